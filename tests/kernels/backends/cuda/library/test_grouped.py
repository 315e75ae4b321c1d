"""Matmuls of groups on a CUDA device: which kernel, the kernels, results."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import lax
from blufunc.core.ir import dtypes
from blufunc.core.ops.ragged_dot import ragged_contract_p, ragged_dot_p
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library.grouped import hopper, op, portable
from blufunc.kernels.backends.cuda.library.grouped.hopper import GroupedGemm
from blufunc.kernels.backends.cuda.library.grouped.portable import PortableGemm
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.emulated_mma import Emulator, tensor_map
from tests.kernels.backends.cuda.library.test_split_gemm import moved_registers, products
from tests.kernels.backends.cuda.test_program import on

BF16 = np.dtype(dtypes.bfloat16)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("emulated"))


# -- the kernel for Hopper ---------------------------------------------------------------------------

OFFSETS = {  # boundaries of groups of 400 rows
    "uneven": [[0, 130, 130, 131, 390, 400]],
    "ahead and beyond": [[7, 100, 228, 300, 300, 340]],
    "one group has all": [[0, 0, 0, 400, 400, 400]],
    "none": [[0, 0, 0, 0, 0, 0]],
    "beyond the rows": [[-5, 100, 200, 500, 900, 900]],
    "two stacks": [[0, 130, 130, 131, 390, 400], [10, 20, 21, 22, 300, 399]],
}


def gemm(summed=False, by_rows=False, columns=128, cluster=1, dtype="bfloat16", wide=False, stacks=1, matrices=1, k=80,
         n=136):  # fmt: skip
    """A GEMM of 400 dense rows in five groups."""
    other = k if by_rows else n
    strides = (k, 400 * k, *((0, n, 400 * n) if summed else (k * n, other, 5 * k * n)))
    return GroupedGemm(
        stacks, 400, k, n, 5, matrices, stacks, summed, by_rows, dtype, wide, *strides, columns, cluster
    )


class Case:
    """Operands of a kernel, and what is right for them."""

    def __init__(self, p, offsets):
        self.gemm, self.offsets = p, np.array(offsets, np.int32)
        rng = np.random.default_rng([p.k, p.n, p.summed])
        dtype = BF16 if p.dtype == "bfloat16" else np.dtype("float16")
        draw = lambda *shape: rng.standard_normal(shape).astype(dtype)
        self.a = draw(p.stacks, p.m, p.k)
        if p.summed:
            self.b = draw(p.stacks, p.m, p.n)
        else:
            self.b = draw(p.matrices, p.groups, *((p.n, p.k) if p.by_rows else (p.k, p.n)))
        shape = (p.stacks, p.groups, p.k, p.n) if p.summed else (p.stacks, p.m, p.n)
        self.out = np.full(shape, np.nan, np.float32 if p.wide else dtype)

    def check(self):
        p = self.gemm
        prim = ragged_contract_p if p.summed else ragged_dot_p
        b = np.swapaxes(self.b, 2, 3) if p.by_rows else self.b
        b = b[0] if p.matrices == 1 and not p.summed else b
        wide = self.a.astype(np.float64), b.astype(np.float64)
        want = prim.impl(*wide, self.offsets, precision=None, preferred_element_type=None)
        np.testing.assert_allclose(
            self.out.astype(np.float64), want, rtol=1e-5 if p.wide else 2**-8, atol=1e-4 if p.wide else 2e-2
        )


def run_emulated(case, emulator, eager=False):
    p = case.gemm
    boxes = p.boxes()
    maps = [tensor_map(box, array) for box, array in zip(boxes, (case.a, case.b), strict=True)]
    result = ("result *", case.out if p.wide else case.out.view(np.uint16))
    parameters = [*(("TensorMap", m) for m in maps), ("const int *", case.offsets), result]
    how = (p.threads, p.shared_bytes, (p.summed, not p.by_rows), eager)
    emulator.launch(hopper.source(p), hopper.instructions(p), p.dtype, hopper.ENTRY, parameters, 1, *how)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("name", OFFSETS)
def test_groups_of_any_size(name, summed, emulator):
    """In one block, which computes all tiles; copies are early in half of the cases."""
    stacks, eager = len(OFFSETS[name]), (list(OFFSETS).index(name) + summed) % 2 == 1
    case = Case(gemm(summed, stacks=stacks), OFFSETS[name])
    run_emulated(case, emulator, eager)
    case.check()


FORMS = {
    "rows": {"by_rows": True},
    "float16": {"dtype": "float16", "columns": 192, "n": 200},
    "float32 results": {"wide": True},
    "sums in float32": {"wide": True, "summed": True},
    "wide tiles": {"columns": 256, "n": 264, "k": 64},
    "sums in wide tiles": {"columns": 256, "n": 264, "k": 136, "summed": True},
    "a matrix per stack": {"stacks": 2, "matrices": 2},
    "a band of several columns": {"columns": 128, "n": 392, "k": 8},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, emulator):
    p = gemm(**FORMS[name])
    case = Case(p, OFFSETS["two stacks" if p.stacks == 2 else "uneven"])
    run_emulated(case, emulator)
    case.check()


def test_infinities_stay_in_their_group(emulator):
    """The last stage of a sum reads rows of the next group, and tiles do, too."""
    for summed in (False, True):
        case = Case(gemm(summed), OFFSETS["ahead and beyond"])
        case.a[0, 340:] = np.inf
        case.b[0, 340:] = np.nan if summed else case.b[0, 340:]
        run_emulated(case, emulator)
        assert np.isfinite(case.out.astype(np.float32)).all()
        case.a[0, 340:] = 0
        if summed:
            case.b[0, 340:] = 0
        case.check()


COMPILED = {
    "rows by matrices": {}, "float16, by rows": {"by_rows": True, "dtype": "float16", "columns": 192},
    "sums": {"summed": True, "wide": True}, "clusters": {"cluster": 2, "summed": True, "columns": 256},
    "wide tiles": {"columns": 256, "by_rows": True},
}  # fmt: skip


@pytest.mark.second
@needs_nvrtc
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_without_spills(name):
    p = gemm(**COMPILED[name])
    made = nvrtc.build(hopper.source(p), "sm_90a", hopper.ENTRY)
    found = resources(made)[hopper.ENTRY]
    assert found.spill_stores == 0
    assert "erialized" not in made.log, made.log
    assert moved_registers(hopper.source(p), p.threads) <= found.registers * p.threads


def test_shared_memory_suffices():
    for columns in (128, 192, 256):
        p = gemm(columns=columns)
        held = p.shared_bytes + 4 * (hopper.MOST_PARTS - p.parts)
        assert held <= 227 * 1024
    most = gemm(stacks=512)
    assert most.parts <= hopper.MOST_PARTS < gemm(stacks=586).parts


TILINGS = {  # rows, terms, columns, groups, whether summed: columns of a tile, blocks of a cluster
    "a few large groups": ((16384, 1024, 4096, 8, False), (256, 2)),
    "many small groups": ((16384, 1024, 512, 64, False), (256, 1)),
    "sums of large matrices": ((16384, 1024, 4096, 8, True), (256, 2)),
    "narrow": ((16384, 1024, 128, 8, False), (128, 2)),
    "of 1.5 wide tiles": ((16384, 1024, 384, 8, False), (192, 2)),
}


@pytest.mark.parametrize("name", TILINGS)
def test_tiles(name):
    (m, k, n, groups, summed), want = TILINGS[name]
    p = GroupedGemm(1, m, k, n, groups, 1, 1, summed, False, "bfloat16", False, k, 0, k * n, n, 0).tiled()
    assert (p.columns, p.cluster) == want


# -- the kernel for any architecture -----------------------------------------------------------------

PLAIN = {
    "float32": ("float32", "float32"),
    "float64": ("float64", "float64"),
    "integers": ("int8", "int32"),
    "long integers": ("int64", "int64"),
}


def portable_gemm(dtype, out, summed=False, stacks=1, tf32=False, by_rows=False, n=136):
    k = 80
    b = (400 * n, 0, n, 1) if summed else (5 * k * n, k * n, 1, k) if by_rows else (5 * k * n, k * n, n, 1)
    return PortableGemm(stacks, 400, k, n, 5, 1, stacks, summed, (400 * k, k), b, dtype, out, tf32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["beyond the rows", "two stacks"])
@pytest.mark.parametrize("kind", PLAIN)
def test_plain_arithmetic_on_the_host(kind, name, host):
    dtype, out = map(np.dtype, PLAIN[kind])
    offsets = np.array(OFFSETS[name], np.int32)
    rng = np.random.default_rng(0)
    for summed in (False, True):
        p = portable_gemm(dtype.name, out.name, summed, stacks=len(offsets))
        shapes = (p.stacks, 400, p.k), (p.stacks, 400, p.n) if summed else (5, p.k, p.n)
        a, b = ((10 * rng.standard_normal(s)).astype(dtype) for s in shapes)
        prim = ragged_contract_p if summed else ragged_dot_p
        want = prim.impl(a, b, offsets, precision=None, preferred_element_type=out)
        text = "#define __device__\n#define __align__(n)\n" + portable.source(p)
        got = host.launch(
            text, portable.ENTRY, [a, b, offsets], np.full_like(want, 77), grid=p.grid, block=portable.THREADS
        )
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-2 if dtype == np.float32 else 1e-9)


TENSOR = {
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16 to float32": ("float16", "float32"),
    "TF32": ("float32", "float32", {"tf32": True}),
    "TF32 to bfloat16": ("float32", "bfloat16", {"tf32": True}),
    "float32 to bfloat16": ("float32", "bfloat16"),
    "terms of matrices": ("bfloat16", "bfloat16", {"by_rows": True}),
    "an odd size": ("bfloat16", "bfloat16", {"n": 135}),
}


@pytest.mark.sampled(3)
@needs_nvrtc
@pytest.mark.parametrize("name", TENSOR)
def test_portable_sources_compile(name):
    dtype, out, *more = TENSOR[name]
    for summed in (False, True):
        p = portable_gemm(dtype, out, summed, **(more[0] if more else {}))
        made = nvrtc.build(portable.source(p), "sm_80", portable.ENTRY)
        assert resources(made)[portable.ENTRY].spill_stores == 0


# -- steps of programs -------------------------------------------------------------------------------


def on_host(*xs):
    return [bnp.asarray(x, dtype=x.dtype) for x in xs]


def with_gradients(x, w, sizes, ct, **how):
    y, pullback = bf.vjp(lambda x, w: lax.ragged_dot(x, w, sizes, **how), x, w)
    return (y, *pullback(ct))


def draw(m, k, n, sizes, dtype):
    rng = np.random.default_rng(m + n)
    x, w, ct = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (len(sizes), k, n), (m, n)))
    return x, w, np.array(sizes, np.int32), ct


STEPS = {  # dtype, (rows, terms, columns), sizes, and kernels
    "aligned": (BF16, (96, 32, 40), (30, 0, 50), ["grouped on Hopper"] * 3),
    "not aligned": (BF16, (96, 33, 40), (30, 0, 50), ["grouped"] * 3),
    "float32": (np.dtype("float32"), (96, 32, 40), (30, 0, 50), ["grouped"] * 3),
    "float64": (np.dtype("float64"), (96, 32, 40), (30, 10, 90), ["grouped"] * 3),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name, fake, cuda):
    dtype, shape, sizes, kernels = STEPS[name]
    args = draw(*shape, sizes, dtype)
    got = bf.jit(with_gradients)(*on(cuda, *args))
    want = with_gradients(*on_host(*args))
    assert [e for e in fake.epilogues if "grouped" in e] == kernels
    for g, w in zip(got, want, strict=True):
        close(g, w, dtype)


def close(got, want, dtype, scale=1.0):
    got, want = (np.asarray(v).astype(np.float64) for v in (got, want))
    tolerance = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5, "float64": 1e-11}[dtype.name] * scale
    assert got.shape == want.shape
    assert np.abs(got - want).max(initial=0) <= tolerance * max(1, np.abs(want).max(initial=0))


VIEWS = {  # views of x (40, 3, 32) and w (4, 32, 48): whether both are read in place
    "stacks of rows": (lambda x, w: (bnp.swapaxes(x, 0, 1), w), True),
    "a transpose": (lambda x, w: (x[:, 0], bnp.swapaxes(w, 1, 2)[:, :32]), True),
    "columns": (lambda x, w: (x[:, 0], w[:, :, 16:]), True),
    "backwards": (lambda x, w: (x[::-1, 0], w), False),
    "one row, repeated": (lambda x, w: (bnp.broadcast_to(x[:1, 0], (40, 32)), w), False),
    "transposed rows": (lambda x, w: (x[:32, 0].T, w), False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_operands_are_read_in_place(name, fake, cuda, monkeypatch):
    view, in_place = VIEWS[name]
    found = []
    plan = op.plan
    monkeypatch.setattr(op, "plan", lambda *args: found.append(plan(*args)) or found[-1])
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((40, 3, 32)).astype(BF16), rng.standard_normal((4, 32, 48)).astype(BF16)
    sizes = np.array([10, 3, 0, 20], np.int32)

    def f(x, w):
        x, w = view(x, w)
        dot = lambda x: lax.ragged_dot(x, w, sizes)
        return bf.vmap(dot)(x) if x.ndim == 3 else dot(x)

    compiled = bf.jit(f)
    got = compiled(*on(cuda, x, w))
    close(got, f(*on_host(x, w)), BF16)
    assert "grouped on Hopper" in fake.epilogues
    *_, announced, bound = found
    assert announced == bound, "what is compiled ahead is what runs"
    assert all(bound[1]) == in_place


def test_what_no_kernel_has_runs_on_the_host(cuda):
    x, w, sizes, _ = draw(6, 4, 2, (1, 3), np.dtype("complex64"))
    close(
        np.abs(bf.jit(lax.ragged_dot)(*on(cuda, x, w, sizes))),
        np.abs(np.asarray(lax.ragged_dot(x, w, sizes))),
        np.dtype("float32"),
    )
    (eqn,) = [e for e in products(lax.ragged_dot, x, w, sizes) if e.prim is ragged_dot_p]
    assert "on the host" in op.remark(eqn, "sm_90a")
    x, w = x.real.astype(BF16), w.real.astype(BF16)
    for arch, by in (("sm_80", "any architecture"), ("sm_90a", "any architecture")):
        (eqn,) = [e for e in products(lax.ragged_dot, x, w, sizes, arch=arch) if e.prim is ragged_dot_p]
        assert by in op.remark(eqn, arch)


# -- on a device -------------------------------------------------------------------------------------

ON_A_DEVICE = {  # dtype, (rows, terms, columns), sizes, parameters
    "balanced": ("bfloat16", (2048, 512, 768), (512,) * 4, {}),
    "skewed": ("bfloat16", (4096, 1024, 512), (3000, 0, 1, 500, 300), {}),
    "in clusters": ("bfloat16", (4096, 512, 1024), (1100, 1300, 996), {}),
    "sums to less": ("float16", (1000, 320, 200), (100, 0, 300, 7), {}),
    "sums to more": ("float16", (1000, 320, 200), (100, 0, 900, 700), {}),
    "float32 results": (
        "bfloat16",
        (1000, 320, 200),
        (100, 0, 600, 7),
        {"preferred_element_type": "float32"},
    ),
    "not aligned": ("bfloat16", (700, 123, 77), (100, 200, 300), {}),
    "TF32": ("float32", (1000, 256, 384), (300, 0, 600), {"precision": "high"}),
    "TF32, not aligned": ("float32", (700, 123, 77), (100, 200, 300), {"precision": "high"}),
    "IEEE": ("float32", (1000, 256, 384), (300, 0, 600), {"precision": "highest"}),
    "float64": ("float64", (500, 123, 77), (100, 200, 100), {}),
    "many groups": ("bfloat16", (4096, 256, 256), tuple([16, 0, 40, 8] * 64), {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_values_and_gradients(name):
    """Against float64 sums of the same operands, and bit for bit the same again."""
    gpu = bf.devices("cuda")[0]
    dtype, shape, sizes, how = ON_A_DEVICE[name]
    dtype = dtypes.as_dtype(dtype)
    x, w, sizes, ct = draw(*shape, sizes, dtype)
    result = dtypes.as_dtype(how.get("preferred_element_type", dtype))
    program = bf.jit(lambda *args: with_gradients(*args, **how))
    args = on(gpu, x, w, sizes, ct.astype(result))
    got, repeated = ([np.asarray(v) for v in program(*args)] for _ in range(2))
    wide = [v.astype(np.float64) for v in (x, w, ct.astype(result))]
    want = with_gradients(*on_host(*wide[:2], sizes, wide[2]))
    for g, a, r in zip(got, repeated, want, strict=True):
        np.testing.assert_array_equal(g.view(np.uint8), a.view(np.uint8))
        r = np.asarray(r)
        error = np.linalg.norm(g.astype(np.float64) - r) / np.linalg.norm(r)
        least = 5e-3 if dtype.itemsize == 2 else 1e-3 if how.get("precision") == "high" else 1e-6
        assert error <= least, (name, error)


@pytest.mark.gpu
def test_stacks_and_views_on_a_device():
    gpu = bf.devices("cuda")[0]
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((500, 3, 128)).astype(BF16), rng.standard_normal((4, 256, 128)).astype(BF16)
    sizes = rng.integers(0, 170, (3, 4)).astype(np.int32)

    def f(x, w, sizes):
        dot = lambda x, sizes: lax.ragged_dot(x, bnp.swapaxes(w, 1, 2), sizes)
        return bf.vmap(dot, (1, 0))(x, sizes)

    got = np.asarray(bf.jit(f)(*on(gpu, x, w, sizes))).astype(np.float64)
    want = np.asarray(f(*on_host(x.astype(np.float64), w.astype(np.float64), sizes)))
    assert np.linalg.norm(got - want) <= 5e-3 * np.linalg.norm(want)
