"""GEMMs of few rows: when the kernel applies, its source, and host results."""

from dataclasses import replace

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import lax, nn
from blufunc.config import config
from blufunc.core.arrays.errstate import ignoring_fp_errors
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda import dispatch
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library.decoding import skinny_gemm
from blufunc.kernels.backends.cuda.library.decoding.skinny_gemm import (
    ENTRY,
    SkinnyGemm,
    gemm_of,
    instructions,
    source,
)
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.codegen.source_files import DEVICE
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.emulated_mma import Emulator
from tests.emulation.fake_cuda import shape_of, skinny_results
from tests.kernels.backends.cuda.library.test_pointwise_gemm import EPILOGUES, epilogue_of
from tests.kernels.backends.cuda.library.test_split_gemm import products
from tests.kernels.rewrites.test_gemm_epilogue import half

BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
K, N = 512, 256


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("skinny"))


# -- which steps it runs ---------------------------------------------------------------------------

X, W, T = half(8, K), half(K, N), half(N, K)
swiglu = lambda x, g, u: nn.silu(x @ g) * (x @ u)
WHICH = {  # a function, its arguments, and (rows, columns contiguous per term or not, swapped) of each matmul
    "rows": (lambda x, w: x @ w, (X, W), [(8, False, False)]),
    "a transpose": (lambda x, w: x @ w.T, (X, T), [(8, True, False)]),
    "several axes": (
        lambda x, w: bnp.einsum("btk,knh->btnh", x, w), (half(4, 4, K), half(K, 4, 64)), [(16, False, False)]
    ),
    "a vector": (lambda x, w: x @ w, (half(K), W), [(1, False, False)]),
    "a matrix and a vector": (lambda x, w: w @ x, (half(K), T), [(1, True, True)]),
    "SwiGLU": (swiglu, (X, W, half(K, N)), [(8, False, False)]),
    "a slice of a stack": (lambda x, w: x @ w[1], (X, half(2, K, N)), [(8, False, False)]),
}  # fmt: skip


@pytest.mark.parametrize("name", WHICH)
def test_which_matmuls_it_runs(name, fake, cuda):
    fun, args, expected = WHICH[name]
    jaxpr = bf.jit(fun).trace(*args).jaxpr
    steps = Draft(jaxpr, (False,) * len(args), "sm_90a").schedule.steps
    found = []
    for step in steps:
        if isinstance(gemm := gemm_of(step.eqn) if hasattr(step, "eqn") else "", SkinnyGemm):
            (text,) = dispatch.Library("sm_90a").sources(step)
            found.append((gemm.m, "BY_TERMS = true" in text[0], gemm.swapped))
    assert found == expected
    on_device = [bf.device_put(x, cuda) for x in args]
    got, want = np.asarray(bf.jit(fun)(*on_device)), np.asarray(fun(*map(bnp.asarray, args)))
    np.testing.assert_allclose(got.astype(F32), want.astype(F32), rtol=0.02, atol=0.02 * np.abs(want).max())


OVERLAPS = {  # a function, and whether its matmuls may load weights ahead
    "first": (lambda x, w: x @ w, [False]),
    "after a kernel": (lambda x, w: bnp.cumsum(x, 0) @ w, [True]),
    "after another": (lambda x, w: (x @ w) @ w.T, [False, True]),
    "weights that a kernel writes": (lambda x, w: bnp.tanh(x) @ (w * 2 - 1).T.T, [False]),
    "in a loop": (lambda x, w: lax.fori_loop(0, 2, lambda i, y: bnp.tanh(y @ w) @ w.T, x), [False, True] * 2),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_weights_are_loaded_ahead_if_nothing_writes_them(name, fake, cuda, monkeypatch):
    fun, expected = OVERLAPS[name]
    args = [bf.device_put(x, cuda) for x in (X, W)]
    bf.jit(fun)(*args)
    assert fake.overlapped == expected
    fake.overlapped.clear()
    monkeypatch.setattr(config, "cuda_overlap", False)
    bf.jit(lambda *args: fun(*args))(*args)
    assert fake.overlapped == [False] * len(expected)


OTHERS = {
    "17 rows": (half(17, K), W),
    "an odd number of columns": (X, half(K, N + 1)),
    "an odd number of terms": (half(8, K - 4), half(K - 4, N)),
    "few weights": (half(8, 64), half(64, 64)),
    "float32": (X.astype(np.float32), W.astype(np.float32)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_which_matmuls_it_leaves_to_others(name):
    (eqn,) = products(lambda x, w: x @ w, *OTHERS[name])
    assert isinstance(gemm_of(eqn), str)


CONTRACTED = {  # shapes, contracted axes, and whether the kernel runs it
    "terms of x last": ((8, 4, K), (K, 4, N), ((1, 2), (1, 0)), False),  # of the weights in another order
    "two axes of terms": ((8, 4, K), (4, K, N), ((1, 2), (0, 1)), True),
    "two axes of terms, exchanged": ((8, 4, K), (4, K, N), ((2, 1), (1, 0)), True),
    "terms of x first": ((K, 8), (K, N), ((0,), (0,)), False),
    "terms of x in the middle": ((2, K, 4), (K, N), ((1,), (0,)), False),
    "terms of the weights in the middle": ((8, K), (4, K, N), ((1,), (1,)), False),
    "terms of the weights in two places": ((8, 4, K), (4, N, K), ((1, 2), (0, 2)), False),
    "a vector": ((4, K), (N, 4, K), ((0, 1), (1, 2)), True),
    "a vector, its axes exchanged": ((K, 4), (N, 4, K), ((0, 1), (2, 1)), False),
    "one row, its terms first": ((K, 1), (K, N), ((0,), (0,)), True),
}


@pytest.mark.parametrize("name", CONTRACTED)
def test_operands_are_matrices_as_they_lie(name):
    *shapes, contracted, expected = CONTRACTED[name]
    numbers = contracted, ((), ())
    (eqn,) = products(lambda x, w: lax.dot_general(x, w, numbers), *(half(*s) for s in shapes))
    assert isinstance(gemm_of(eqn), SkinnyGemm) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONTRACTED)
def test_axes_in_any_order_on_a_device(name):
    *shapes, contracted, _ = CONTRACTED[name]
    args = [half(*s) for s in shapes]
    fun = bf.jit(lambda x, w: lax.dot_general(x, w, (contracted, ((), ()))))
    want = np.tensordot(*(a.astype(np.float64) for a in args), contracted)
    got = np.asarray(fun(*(bf.device_put(a, bf.devices("cuda")[0]) for a in args))).astype(np.float64)
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()


def test_tiles():
    tiles = lambda by_terms: [
        (p.columns, p.warps)
        for p in (SkinnyGemm(8, n, 2048, BF16, BF16, by_terms).tiled() for n in (256, 2048, 5632, 32000))
    ]
    assert tiles(False) == [(32, 16), (32, 16), (32, 8), (64, 8)]
    assert tiles(True) == [(16, 16), (16, 16), (32, 8), (32, 8)]


TILES = [
    (columns, by_terms, warps)
    for by_terms in (False, True)
    for columns in ((32, 64), (16, 32))[by_terms]
    for warps in (8, 16)
]


# -- the kernel ------------------------------------------------------------------------------------


def gemm(m, n, k, dtype=BF16, out=None, epilogue="", **fields):
    if epilogue:
        fun, kinds, more = EPILOGUES[epilogue]
        fields |= {"epilogue": epilogue_of(fun, kinds, **more), "bias": more.get("bias", False)}
        fields["kinds"] = tuple("vector" if kind == "bfloat16" else kind for kind in kinds)
    return SkinnyGemm(m, n, k, dtype, out or dtype, **fields).tiled()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("columns, by_terms, warps", TILES)
@pytest.mark.parametrize("rows", [1, 8, 16])
@needs_nvrtc
def test_it_compiles_without_spills(rows, columns, by_terms, warps, arch):
    p = gemm(rows, 2048, 2048, by_terms=by_terms, columns=columns, warps=warps)
    found = resources(nvrtc.build(DEVICE.with_prelude(source(p)), arch, ENTRY))[ENTRY]
    assert found.spill_stores == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in EPILOGUES if "sums" not in n and n != "its derivative"])
@needs_nvrtc
def test_epilogues_compile(name):
    nvrtc.build(DEVICE.with_prelude(source(gemm(8, 2048, 2048, epilogue=name))), "sm_90a", ENTRY)


class Case:
    """The operands of GEMMs of the same rows, and what is right for them."""

    def __init__(self, p, pad=0):
        self.gemm = p
        rng = np.random.default_rng([p.m, p.n, p.k])
        normal = lambda *shape: rng.standard_normal(shape).astype(p.dtype)
        self.arrays = [normal(p.m, p.k + pad)]
        if p.rows is not None:
            given = zip(p.rows.kinds, p.wide, strict=True)
            self.arrays = [
                normal(*shape_of(p, kind)).astype(F32 if wide else p.dtype) for kind, wide in given
            ]
        shape = (p.n, p.k + pad) if p.by_terms else (p.k, p.n + pad)
        self.weights = [normal(*shape) for _ in range(p.weights)]
        made = {
            "matrix": lambda: normal(p.m, p.n), "vector": lambda: normal(p.n),
            "float32": lambda: normal(p.n).astype(F32), "scalar": lambda: np.array([0.7], F32),
        }  # fmt: skip
        self.given = [normal(p.n).astype(p.out)] * p.bias + [normal(p.m, p.n).astype(p.out)] * p.addend
        self.given += [made[kind]() for kind in p.kinds]
        outs = 1 if p.epilogue is None else len(p.epilogue.jaxpr.outvars)
        self.results = [np.full((p.m, p.n), np.nan, p.out) for _ in range(outs)]

    def check(self):
        p = self.gemm
        arrays = self.arrays if p.rows is not None else [self.arrays[0][:, : p.k]]
        weights = [w[:, : p.k].T if p.by_terms else w[:, : p.n] for w in self.weights]
        right = ignoring_fp_errors(lambda: skinny_results(p, arrays, weights, self.given))
        for got, want in zip(self.results, right, strict=True):
            got, want = got.astype(np.float64), want.astype(np.float64)
            size = np.abs(want).max()
            # measured: elements round to neighbours of bfloat16
            assert np.abs(got - want).max() <= (1e-5 if p.out == F32 else 2**-6) * size


def run_emulated(case, emulator):
    p = case.gemm
    of_types = {"element": "unsigned short *", "float": "float *"}
    wide = "float" if p.out == F32 else "element"
    arrays = [*case.arrays, *case.weights, *case.given, *case.results]
    parameters = []
    for (kind, _), x in zip(skinny_gemm.parameters_of(p), arrays, strict=True):
        kind = kind.removeprefix("const ").replace("result", wide)
        parameters.append((of_types[kind], x if x.dtype == F32 else x.view(np.uint16)))
    rows = [0 if p.rows is not None else case.arrays[0].strides[0], *(w.strides[0] for w in case.weights)]
    parameters += [("long long", np.int64(n // 2).tobytes()) for n in rows]
    emulator.launch(
        source(p),
        instructions(p),
        p.dtype.name,
        ENTRY,
        parameters,
        p.grid,
        p.threads,
        p.shared_bytes,
        parts=("overlap", "skinny"),
    )


SIZES = [(1, 64, 256), (8, 64, 512), (5, 72, 264), (16, 64, 512), (11, 136, 40), (3, 8, 8)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype, out", [(BF16, BF16), (F16, F16), (BF16, F32)])
@pytest.mark.parametrize("columns, by_terms, warps", TILES)
@pytest.mark.parametrize("sizes", SIZES)
def test_kernels_on_the_host(emulator, sizes, columns, by_terms, warps, dtype, out):
    p = gemm(*sizes, dtype, out, by_terms=by_terms, columns=columns, warps=warps)
    case = Case(p, pad=8 * (sizes[0] % 2))
    run_emulated(case, emulator)
    case.check()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    ["a residual", "a bias, GELU, and its argument", "SwiGLU", "vectors and a scalar", "four matrices"],
)
def test_epilogues_on_the_host(emulator, name):
    case = Case(gemm(5, 72, 264, epilogue=name))
    run_emulated(case, emulator)
    case.check()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fields", [{"bias": True}, {"addend": True}, {"addend": True, "out": F32}])
def test_addends_on_the_host(emulator, fields):
    case = Case(gemm(5, 72, 264, **fields))
    run_emulated(case, emulator)
    case.check()


ROWS = {  # functions of rows, and of further arrays
    "RMS norm": lambda x, v: rms_norm(x, v),
    "layer norm": lambda x, v: layer_norm(x, v),
    "softmax": lambda x: nn.softmax(x.astype("float32"), axis=-1).astype(x.dtype),
    "a scaled sum": lambda x, y, s: (x.astype("float32") * s + y.astype("float32")).astype(x.dtype),
}


def rms_norm(x, v):
    wide = x.astype("float32")
    return (wide * lax.rsqrt(bnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype) * v


def layer_norm(x, v):
    wide = x.astype("float32")
    wide = wide - bnp.mean(wide, axis=-1, keepdims=True)
    scale = lax.rsqrt(bnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale * v.astype("float32") + 0.5).astype(x.dtype)


def of_rows(name, m, n, k, dtype, weights=1):
    """The arguments and the function of a program that multiplies rows."""
    kinds = {"a scaled sum": ((m, k), (m, k), ()), "softmax": ((m, k),)}.get(name, ((m, k), (k,)))
    rng = np.random.default_rng([m, n, k])
    arrays = [rng.standard_normal(s).astype(np.float32 if s == () else dtype) for s in kinds]
    matrices = [(rng.standard_normal((k, n)) / np.sqrt(k)).astype(dtype) for _ in range(weights)]

    def fun(arrays, matrices):
        x = ROWS[name](*arrays)
        t = [x @ w for w in matrices]
        return t[0] if len(t) == 1 else nn.silu(t[0]) * sum(t[1:], 0)

    return fun, (arrays, matrices)


def rows_in(fun, args):
    """The GEMM of the only such step of a program."""
    jaxpr = bf.jit(fun).trace(*args).jaxpr
    steps = Draft(jaxpr, (False,) * len(jaxpr.invars), "sm_90a").schedule.steps
    (step,) = (s for s in steps if hasattr(s, "eqn"))
    return gemm_of(step.eqn), len(steps)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "sizes, name, dtype, weights, by_terms",
    [
        ((8, 256, 512), "RMS norm", BF16, 1, False), ((8, 256, 512), "layer norm", F16, 2, True),
        ((5, 264, 256), "layer norm", BF16, 3, False), ((5, 264, 256), "a scaled sum", F16, 1, True),
        ((11, 136, 520), "softmax", BF16, 2, False), ((11, 136, 520), "RMS norm", F16, 1, True),
        ((1, 512, 256), "RMS norm", F16, 2, False), ((1, 512, 256), "a scaled sum", BF16, 3, True),
        ((16, 64, 1032), "layer norm", BF16, 1, False), ((16, 64, 1032), "softmax", F16, 2, True),
    ],
)  # fmt: skip
def test_computed_rows_on_the_host(emulator, sizes, name, dtype, weights, by_terms):
    found, steps = rows_in(*of_rows(name, *sizes, dtype, weights))
    assert steps == 1 and found.weights == weights and found.rows is not None
    case = Case(replace(found, by_terms=by_terms).tiled())
    run_emulated(case, emulator)
    case.check()


@pytest.mark.sampled(2)
@needs_nvrtc
@pytest.mark.parametrize("by_terms", [False, True])
@pytest.mark.parametrize("rows, weights", [(8, 1), (8, 2), (16, 2), (1, 3)])
def test_computed_rows_compile_without_spills(rows, weights, by_terms):
    found, _ = rows_in(*of_rows("layer norm", rows, 2048, 2048, BF16, weights))
    text = DEVICE.with_prelude(source(replace(found, by_terms=by_terms).tiled()))
    assert resources(nvrtc.build(text, "sm_90a", ENTRY))[ENTRY].spill_stores == 0


# -- on a device -----------------------------------------------------------------------------------

MATMULS = {
    "rows": (lambda x, w, r: x @ w, False),
    "transposed": (lambda x, w, r: x @ w.T, True),
    "a residual": (lambda x, w, r: (x @ w).astype("float32") + r, False),
    "SiLU": (lambda x, w, r: nn.silu(x @ w) * r.astype(x.dtype), False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MATMULS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("n, k", [(2048, 2048), (72, 1032), (2048, 5632), (32000, 512), (8, 16384)])
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16])
def test_on_a_device(m, n, k, dtype, name):
    fun, transposed = MATMULS[name]
    rng = np.random.default_rng([m, n, k])
    x, w, r = (rng.standard_normal(s) for s in ((m, k), (n, k) if transposed else (k, n), (m, n)))
    device = bf.devices("cuda")[0]
    args = [bf.device_put(bnp.asarray(a, dtype=dtype), device) for a in (x, w / np.sqrt(k), r)]
    found = bf.jit(fun)
    assert "skinny_gemm" in str(bf.explain(found, *args, run=True))
    got = np.asarray(found(*args)).astype(np.float64)
    x, w, r = (np.asarray(a).astype(np.float64) for a in args)
    t = x @ (w.T if transposed else w)
    want = {"a residual": t + r, "SiLU": t / (1 + np.exp(-t)) * r}.get(name, t)
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()
    np.testing.assert_array_equal(got, np.asarray(found(*args)).astype(np.float64))  # deterministic


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(
    "m, n, k", [(8, 2048, 2048), (1, 72, 1032), (16, 5632, 2048), (7, 2056, 2568), (9, 264, 136)]
)
def test_computed_rows_on_a_device(m, n, k, name, dtype, weights):
    fun, args = of_rows(name, m, n, k, dtype, weights)
    device = bf.devices("cuda")[0]
    found, on_device = bf.jit(fun), bf.tree.map(lambda a: bf.device_put(a, device), args)
    got = np.asarray(found(*on_device)).astype(np.float64)
    want = np.asarray(fun(*bf.tree.map(lambda a: bnp.asarray(a.astype(F32)), args))).astype(np.float64)
    assert np.abs(got - want).max() <= 0.03 * np.abs(want).max()
    np.testing.assert_array_equal(got, np.asarray(found(*on_device)).astype(np.float64))  # deterministic
