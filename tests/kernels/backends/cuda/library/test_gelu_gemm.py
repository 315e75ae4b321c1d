"""Products with GELU by Hopper's own kernel: which they are, that they mean the same, and the kernel itself."""

import math

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import nn
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda import dispatch
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library import gelu_gemm
from blufunc.kernels.backends.cuda.library.gelu_gemm_source import ENTRY, GeluProduct, source
from blufunc.kernels.backends.cuda.library.tile_gemm import COLUMNS, ROWS, instructions
from blufunc.kernels.backends.cuda.lowered import Draft
from blufunc.kernels.rewrites import activation_epilogue
from tests.emulation import fake_cuda
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.emulated_mma import Emulator, tensor_map
from tests.kernels.backends.cuda.library.test_split_gemm import moved_registers, products
from tests.kernels.rewrites.test_activation_epilogue import agrees, gradients, two_layers
from tests.kernels.rewrites.test_gemm_epilogue import half

BF16, F32 = dtypes.bfloat16, dtypes.float32
M, N, K = 2 * ROWS, 2 * COLUMNS, 64


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(activation_epilogue, "LEAST_ELEMENTS", 1)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("emulated"))


# -- which products ----------------------------------------------------------------------------------

X, W, B = half(2, ROWS, K), half(K, N), half(N)
H, DY, V = half(M, N), half(M, K), half(N, K)
BACK = lambda h, dy, v: bf.vjp(nn.gelu, h)[1](dy @ v)[0]
ROWS_BACK = lambda h, dy, v: bf.vjp(nn.gelu, h)[1](bnp.einsum("mk,nk->mn", dy, v))[0]
half_of = lambda *shape: half(*shape, dtype=dtypes.float16)

KERNELS = {  # a function of one product; what its kernel is, but for sizes; None: the library's
    "a product": (lambda x, w: nn.gelu(x @ w), (X, W), {"by_rows": False}),
    "of rows": (lambda x, w: nn.gelu(bnp.einsum("bmk,nk->bmn", x, w)), (X, half(N, K)), {"by_rows": True}),
    "and a bias": (lambda x, w, b: nn.gelu(x @ w + b), (X, W, B), {"by_rows": False, "bias": True}),
    "that is returned": (
        lambda x, w, b: (nn.gelu(h := x @ w + b), h), (X, W, B), {"by_rows": False, "bias": True, "stored": True}
    ),
    "several features": (
        lambda x, w: nn.gelu(bnp.einsum("bmk,khn->bmhn", x, w)), (X, half(K, 2, COLUMNS)), {"by_rows": False}
    ),
    "backward": (BACK, (H, DY, V.T.copy()), {"by_rows": False, "derivative": True}),
    "backward, of rows": (ROWS_BACK, (H, DY, V), {"by_rows": True, "derivative": True}),
    "terms first": (lambda x, w: nn.gelu(bnp.einsum("km,kn->mn", x, w)), (half(K, M), W), None),
    "float16": (lambda x, w: nn.gelu(x @ w), (half_of(M, K), half_of(K, N)), None),
    "too few rows": (lambda x, w: nn.gelu(x @ w), (half(ROWS, K), W), None),
    "columns of another number": (lambda x, w: nn.gelu(x @ w), (X, half(K, 128)), None),
    "terms of another number": (lambda x, w: nn.gelu(x @ w), (half(M, 72), half(72, N)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_what_the_kernel_computes(name, fake, cuda):
    fun, args, wanted = KERNELS[name]
    (eqn,) = [e for e in products(fun, *args) if e.prim in activation_epilogue.WITH_ACTIVATION]
    found = gelu_gemm.kernel_of(eqn, "sm_90a")
    n = math.prod(eqn.outvars[0].aval.shape) // M
    full = None if wanted is None else GeluProduct(M, n, K, **{"derivative": False, **wanted})
    assert found == full
    assert gelu_gemm.kernel_of(eqn, "sm_80") is None
    agrees(fun, args, cuda)
    assert fake.epilogues


WHERE_THEY_LIE = {  # views of arguments, and whether they are read where they are
    "a transpose": (lambda x, w: (x, w.T), (X, half(N, K)), True),
    "rows of a larger array": (lambda x, w: (x[:, :, :K], w), (half(2, ROWS, 2 * K), W), True),
    "columns of a larger array": (lambda x, w: (x, w[:, N:]), (X, half(K, 2 * N)), True),
    "every other row": (lambda x, w: (x[:, ::2], w), (half(2, 2 * ROWS, K), W), True),
    "backwards": (lambda x, w: (x[::-1, ::-1], w), (X, W), False),
    "columns backwards": (lambda x, w: (x, w[::-1]), (X, W), False),
    "one row, repeated": (lambda x, w: (bnp.broadcast_to(x, (2, ROWS, K)), w), (half(K), W), False),
    "every other batch entry": (lambda x, w: (x[::2], w), (half(4, ROWS, K), W), False),
    "from an odd place on": (lambda x, w: (x[:, :, 1:], w), (half(2, ROWS, K + 1), W), False),
    "transposed rows": (lambda x, w: (x.T.reshape(2, ROWS, K), w), (half(K, M), W), False),
}


@pytest.mark.parametrize("name", WHERE_THEY_LIE)
def test_factors_are_read_where_they_lie(name, fake, cuda):
    view, args, in_place = WHERE_THEY_LIE[name]
    fun = lambda x, w: nn.gelu(bnp.matmul(*view(x, w)))
    agrees(fun, args, cuda)
    assert (fake.launches == 0) == in_place


def test_the_kernel_of_a_view_is_known_before(cuda, monkeypatch):
    """It is compiled together with all others."""
    used: list = []
    monkeypatch.setattr(gelu_gemm, "Kernel", lambda product, rows, device: used.append(product))
    fun = lambda x, w: nn.gelu(x @ w.T)
    traced = bf.jit(fun).trace(X, half(N, K))
    (step,) = Draft(traced.jaxpr, (False, False), "sm_90a").schedule.steps
    (announced,) = dispatch.Library("sm_90a").sources(step)
    cuda_program.CudaProgram(traced.jaxpr, (False, False))
    assert [p.by_rows for p in used] == [True]
    assert announced == (source(used[0]), ENTRY)


def test_far_out_the_slope_is_that_of_the_definition(emulator):
    """Where the product of its factors is not a number yet."""
    case = Case(GeluProduct(ROWS, COLUMNS, 64, True, 1, derivative=True))
    x = np.array([0, -0.0, 30, -30, 1e6, -1e6, 1e12, -1e12, 2e13, -2e13, 1e15, -1e15], BF16)
    case.given[...] = np.resize(x, case.given.shape)
    run_emulated(case, emulator)
    t = (case.a.astype(np.float32) @ case.b.astype(np.float32).T).astype(BF16).astype(np.float32)
    slopes = np.resize(np.array([0.5, 0.5, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]), case.given.shape)
    np.testing.assert_allclose(case.out.astype(np.float32), t * slopes, rtol=2**-6, atol=1e-3)


LAYERS = half(2, ROWS, K) / 8, half(K, N) / 8, half(N), half(N, K) / 8


def test_the_gradient_of_a_bias_is_begun_by_the_product(fake, cuda):
    """Of GELU's argument, in mixed precision; no kernel reads all of that gradient."""
    args = [x.astype(np.float32) for x in LAYERS]
    back = gradients(bf.autocast(two_layers))
    (eqn,) = [e for e in products(back, *args) if e.prim is activation_epilogue.dot_dgelu_p]
    assert [v.aval.shape for v in eqn.outvars] == [(2, ROWS, N), (M // ROWS, N)]
    assert gelu_gemm.kernel_of(eqn, "sm_90a").summed
    lines = {e.source for e in eqn.params["jaxpr"].eqns}
    assert lines == {None, eqn.source}  # none is of whoever compiles: plans with such lines are not kept
    (before,) = [e for e in products(back, *args, arch="sm_80") if e.prim is activation_epilogue.dot_dgelu_p]
    assert len(before.outvars) == 1
    agrees(back, args, cuda, 0.1)
    assert {"gelu", "dgelu"} == set(fake.epilogues)


READ = {  # what is done with a gradient besides, and whether the product makes sums for it
    "summed up": (lambda d: d.astype(F32).sum((0,)), True),
    "moved before": (lambda d: d.astype(F32).reshape(2, ROWS, N).sum((0, 1)), True),
    "moved behind": (lambda d: d.astype(F32).sum((0,)).reshape(2, COLUMNS), True),
    "summed up and read": (lambda d: (d.astype(F32).sum((0,)), bnp.tanh(d)), True),
    "over columns": (lambda d: d.astype(F32).sum((1,)), False),
    "over some rows": (lambda d: d.astype(F32).reshape(2, ROWS, N).sum((1,)), False),
    "its maximum": (lambda d: d.max((0,)), False),
    "squared before": (lambda d: (d.astype(F32) ** 2).sum((0,)), False),
}


@pytest.mark.parametrize("name", READ)
def test_which_sums_are_begun(name, cuda):
    read, begun = READ[name]
    fun = lambda h, dy, v: (d := ROWS_BACK(h, dy, v), read(d))
    (eqn,) = [e for e in products(fun, H, DY, V) if e.prim is activation_epilogue.dot_dgelu_p]
    assert (len(eqn.outvars) == 2) == begun
    agrees(fun, (H, DY / 8, V / 8), cuda, 0.1)


# -- the kernel --------------------------------------------------------------------------------------

TEXTS = [
    GeluProduct(32768, 3072, 768, True, derivative=True, summed=True),
    GeluProduct(256, 192, 64, False, derivative=True),
    GeluProduct(32768, 3072, 768, False, bias=True, stored=True),
    GeluProduct(512, 384, 128, True),
    *(
        GeluProduct(32768, 3072, 768, by_rows, derivative=True, summed=summed, again=True)
        for by_rows in (False, True) for summed in (False, True)
    ),
]  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("product", TEXTS)
def test_it_compiles_without_spills(product):
    text = source(product)
    made = nvrtc.build(text, "sm_90a", ENTRY)
    found = made.resources()[ENTRY]
    assert found.spill_stores == 0
    assert "erialized" not in made.log, made.log  # as products are that wait for each other
    assert moved_registers(text, product.threads) <= found.registers * product.threads


class Case:
    """The operands of one product, and what is right for them."""

    def __init__(self, product):
        p = self.product = product
        rng = np.random.default_rng([p.m, p.n, p.k])
        normal = lambda *shape: rng.standard_normal(shape).astype(BF16)
        self.a = normal(p.m, p.k)
        self.b = (normal(*((p.n, p.k) if p.by_rows else (p.k, p.n))) / 8).astype(BF16)
        self.given = normal(p.m, p.n) * 2 if p.derivative else normal(p.n)
        self.out = np.full((p.m, p.n), np.nan, BF16)
        self.argument = np.full((p.m, p.n), np.nan, BF16)
        self.sums = np.full((p.m // ROWS, p.n), np.nan, np.float32)
        self.again = np.full((p.m, p.n), np.nan, BF16)

    def check(self):
        p, b = self.product, self.b.astype(np.float64)
        t = self.a.astype(np.float64) @ (b.T if p.by_rows else b) + (
            self.given.astype(np.float64) if p.bias else 0
        )
        if p.stored:
            np.testing.assert_allclose(self.argument.astype(np.float64), t, rtol=2**-8, atol=1e-5)
            t = self.argument.astype(np.float64)
        want = t * fake_cuda.gelu_slope(self.given.astype(np.float64)) if p.derivative else fake_cuda.gelu(t)
        got = self.out.astype(np.float64)
        # of what is rounded twice; relative, as far down as GELU goes where its argument is known
        np.testing.assert_allclose(
            got, want, rtol=2**-8 if p.stored else 2**-6, atol=1e-4 * (1 + 99 * (not p.stored))
        )
        for array, wanted in zip((self.argument, self.sums, self.again), further(p), strict=True):
            assert np.isnan(array.astype(np.float32)).any() != wanted  # none is written that is not wanted
        if p.again:
            x = self.given.astype(np.float64)
            wanted = x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
            least = 2.0**-126  # below, devices give 0
            np.testing.assert_allclose(self.again.astype(np.float64), wanted, rtol=2**-8, atol=least)
        if p.summed:
            bands = got.reshape(-1, ROWS, p.n).sum(1)
            np.testing.assert_allclose(self.sums, bands, rtol=1e-5, atol=1e-4)


VARIANTS = {
    "GELU": {"derivative": False},
    "a bias": {"derivative": False, "bias": True},
    "the argument": {"derivative": False, "bias": True, "stored": True},
    "the derivative": {"derivative": True},
    "sums": {"derivative": True, "summed": True},
    "GELU again": {"derivative": True, "again": True},
    "sums and GELU again": {"derivative": True, "summed": True, "again": True},
}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_kernel_emulated(variant, by_rows, eager, emulator):
    """Of a block without a cluster, as the emulator has none; it has two tiles, and more steps than stages."""
    case = Case(GeluProduct(ROWS, 2 * COLUMNS, 192, by_rows, cluster=1, **VARIANTS[variant]))
    run_emulated(case, emulator, eager)
    case.check()


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize(
    "sizes", [(2 * ROWS, COLUMNS, 64), (3 * ROWS, 2 * COLUMNS, 320), (ROWS, 3 * COLUMNS, 128)]
)
def test_all_results_of_several_tiles(sizes, by_rows, emulator):
    """Of one block, one tile after the other, below and beside each other."""
    case = Case(GeluProduct(*sizes, by_rows, cluster=1, derivative=True, summed=True, again=True))
    run_emulated(case, emulator)
    case.check()


@pytest.mark.parametrize("summed", [False, True])
def test_gelu_again_has_the_bits_of_the_forward_pass(summed, emulator):
    """At the argument that the forward pass stored, rounded: far out, and where GELU is close to 0, too."""
    forward = Case(GeluProduct(ROWS, COLUMNS, 64, False, bias=True, stored=True, cluster=1))
    far = [0, -0.0, 3e38, -3e38, 1e-38, -1e-38, 12, -12, np.inf, -np.inf, np.nan]
    forward.given[: len(far)] = np.array(far, BF16)
    run_emulated(forward, emulator)
    back = Case(GeluProduct(ROWS, COLUMNS, 64, True, derivative=True, summed=summed, again=True, cluster=1))
    back.given[...] = forward.argument
    run_emulated(back, emulator)
    np.testing.assert_array_equal(back.again.view(np.uint16), forward.out.view(np.uint16))


def further(product):
    return product.stored, product.summed, product.again


def run_emulated(case, emulator, eager=False):
    p = case.product
    boxes = p.boxes(2 * case.a.shape[1], 2 * case.b.shape[1])
    maps = [tensor_map(box, array) for box, array in zip(boxes, (case.a, case.b), strict=True)]
    element, half_bits = "element *", lambda x: x.view(np.uint16)
    parameters = [("TensorMap", m) for m in maps] + [("const " + element, half_bits(case.given))]
    parameters += [
        (element, half_bits(case.out)),
        (element, half_bits(case.argument)),
        ("float *", case.sums),
        (element, half_bits(case.again)),
    ]
    how = (p.threads, p.shared_bytes, (False, not p.by_rows), eager)
    emulator.launch(source(p), instructions(p), "bfloat16", ENTRY, parameters, 1, *how)


ON_A_DEVICE = [  # m, n, k; the last ones are several tiles for each cluster
    (256, 192, 64), (512, 384, 128), (256, 576, 320), (8192, 768, 192), (5120, 3072, 768),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", ON_A_DEVICE)
def test_on_a_device(sizes, variant, by_rows):
    import cupy

    case = Case(GeluProduct(*sizes, by_rows, **VARIANTS[variant]))
    names = ("a", "b", "given", "out", "argument", "sums", "again")
    there = {n: cupy.asarray(getattr(case, n).view(np.uint16 if n != "sums" else np.float32)) for n in names}
    at = [there[n].data.ptr for n in names]
    wanted = (at[3], *(a * w for a, w in zip(at[4:], further(case.product), strict=True)))
    rows = case.a.shape[1], case.b.shape[1]
    kernel, stream = gelu_gemm.Kernel(case.product, rows, 0), cupy.cuda.get_current_stream()
    kernel(at[:2], at[2], wanted, stream)
    first = there["out"].get()
    kernel(at[:2], at[2], wanted, stream)
    np.testing.assert_array_equal(there["out"].get(), first)
    for n in names[3:]:
        getattr(case, n)[...] = there[n].get().view(getattr(case, n).dtype)
    case.check()


@pytest.mark.gpu
def test_layers_on_a_device():
    agrees(gradients(two_layers), LAYERS, bf.devices("cuda")[0], 0.1)
