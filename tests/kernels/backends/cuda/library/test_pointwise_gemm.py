"""GEMMs with generated epilogues on Hopper: when they apply, and the kernel."""

import dataclasses
import functools

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import nn
from blufunc.core.arrays.errstate import ignoring_fp_errors
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.programs.simplify import inline_bodies, simplify
from blufunc.core.programs.stage import stage
from blufunc.kernels.backends.cuda import dispatch
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library import pointwise_gemm
from blufunc.kernels.backends.cuda.library.pointwise_gemm import ENTRY, PointwiseGemm, gemm_of, source
from blufunc.kernels.backends.cuda.library.tile_gemm import COLUMNS, ROWS, instructions
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.kernels.ops.pointwise_gemm import Epilogue, dot_pointwise_p
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.emulated_mma import Emulator, tensor_map
from tests.kernels.backends.cuda.library.test_split_gemm import moved_registers, products
from tests.kernels.rewrites.test_gemm_epilogue import half
from tests.kernels.rewrites.test_pointwise_epilogue import agrees, always, gradients, two_layers

BF16, F32 = dtypes.bfloat16, dtypes.float32
M, N, K = 2 * ROWS, 2 * COLUMNS, 64


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    always(monkeypatch)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("emulated"))


# -- steps of programs -------------------------------------------------------------------------------

X, W = half(2, ROWS, K), half(K, N)
H, DY, V = half(M, N), half(M, K), half(N, K)
ROWS_BACK = lambda h, dy, v: bf.vjp(nn.gelu, h)[1](bnp.einsum("mk,nk->mn", dy, v))[0]

BY_ROWS = {  # a function of one matmul, and whether the terms of its right operand are contiguous
    "columns": (lambda x, w: nn.gelu(x @ w), (X, W), False),
    "rows": (lambda x, w: nn.gelu(bnp.einsum("bmk,nk->bmn", x, w)), (X, half(N, K)), True),
    "several axes": (lambda x, w: nn.gelu(bnp.einsum("bmk,khn->bmhn", x, w)), (X, half(K, 2, COLUMNS)), False),
    "backward": (ROWS_BACK, (H, DY, V), True),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_ROWS)
def test_which_kernel_it_is(name, fake, cuda):
    fun, args, by_rows = BY_ROWS[name]
    (eqn,) = [e for e in products(fun, *args) if e.prim is dot_pointwise_p]
    found = gemm_of(eqn, "sm_90a")
    assert (found.m, found.n, found.k, found.by_rows) == (M, N, K, by_rows)
    assert pointwise_gemm.why_not(eqn, "sm_90a") is None
    assert "Hopper" in pointwise_gemm.why_not(eqn, "sm_80")
    agrees(fun, args, cuda)
    assert fake.epilogues


WHERE_THEY_LIE = {  # views of arguments, and whether they are read in place
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
def test_operands_are_read_in_place(name, fake, cuda):
    view, args, in_place = WHERE_THEY_LIE[name]
    fun = lambda x, w: nn.gelu(bnp.matmul(*view(x, w)))
    agrees(fun, args, cuda)
    assert (fake.launches == 0) == in_place


def test_the_kernel_of_a_view_is_known_before(cuda, monkeypatch):
    """It is compiled together with all others."""
    used: list = []
    monkeypatch.setattr(pointwise_gemm, "Kernel", lambda gemm, rows, device: used.append(gemm))
    fun = lambda x, w: nn.gelu(x @ w.T)
    traced = bf.jit(fun).trace(X, half(N, K))
    (step,) = Draft(traced.jaxpr, (False, False), "sm_90a").schedule.steps
    (announced,) = dispatch.Library("sm_90a").sources(step)
    cuda_program.CudaProgram(traced.jaxpr, (False, False))
    assert [p.by_rows for p in used] == [True]
    assert announced == (DEVICE.with_prelude(source(used[0])), ENTRY)


LAYERS = half(2, ROWS, K) / 8, half(K, N) / 8, half(N), half(N, K) / 8


def test_the_gradient_of_a_bias_is_begun_by_the_matmul(fake, cuda):
    """Of GELU's argument, in mixed precision; no kernel reads all of that gradient."""
    args = [x.astype(np.float32) for x in LAYERS]
    back = gradients(bf.autocast(two_layers))
    (eqn,) = [e for e in products(back, *args) if e.prim is dot_pointwise_p and not e.params["epilogue"].bias]
    assert [v.aval.shape for v in eqn.outvars] == [(2, ROWS, N), (M // ROWS, N)]
    assert eqn.params["epilogue"].summed == 0 and eqn.params["epilogue"].rows == ROWS
    assert {e.source for e in eqn.params["epilogue"].jaxpr.eqns} == {
        None
    }  # plans of other lines are not kept
    agrees(back, args, cuda, 0.1)


READ = {  # what is done with a gradient besides, and whether the matmul makes sums for it
    "summed up": (lambda d: d.astype(F32).sum((0,)), True),
    "moved before": (lambda d: d.astype(F32).reshape(2, ROWS, N).sum((0, 1)), True),
    "moved after": (lambda d: d.astype(F32).sum((0,)).reshape(2, COLUMNS), True),
    "summed up and read": (lambda d: (d.astype(F32).sum((0,)), bnp.tanh(d).astype(F32)), True),
    "over columns": (lambda d: d.astype(F32).sum((1,)), False),
    "over some rows": (lambda d: d.astype(F32).reshape(2, ROWS, N).sum((1,)), False),
    "its maximum": (lambda d: d.max((0,)), False),
    "squared before": (lambda d: (d.astype(F32) ** 2).sum((0,)), False),
}


@pytest.mark.parametrize("name", READ)
def test_which_sums_are_begun(name, cuda):
    read, begun = READ[name]
    fun = lambda h, dy, v: (d := ROWS_BACK(h, dy, v), read(d))
    (eqn,) = [e for e in products(fun, H, DY, V) if e.prim is dot_pointwise_p]
    assert (len(eqn.outvars) == 2) == begun
    agrees(fun, (H, DY / 8, V / 8), cuda, 0.1)


# -- the kernel --------------------------------------------------------------------------------------


def epilogue_of(fun, kinds, **fields):
    """The epilogue that a function of the matmul and of operands of these kinds is."""
    types = {"matrix": BF16, "bfloat16": BF16, "float32": F32, "scalar": F32}
    avals = [ShapedArray((), types[kind]) for kind in ("matrix", *kinds)]
    jaxpr = simplify(inline_bodies(simplify(stage(fun, avals, "epilogue")))[0])
    return Epilogue(jaxpr, **fields)


slope_of = lambda f: lambda x, t: bf.vjp(f, x)[1](t)[0]
squared_relu = lambda h: bnp.square(nn.relu(h))
swiglu = lambda g, u: nn.silu(g) * u
EPILOGUES = {  # a function of the matmul and operands, their kinds, and what else an epilogue has
    "nothing": (lambda t: [t], (), {}),
    "a bias": (lambda t: [t], (), {"bias": True}),
    "a residual": (lambda t, r: [t + r], ("matrix",), {}),
    "GELU": (lambda t: [nn.gelu(t)], (), {}),
    "a bias, GELU, and its argument": (lambda t: [nn.gelu(t), t], (), {"bias": True}),
    "the derivative of GELU": (lambda t, x: [slope_of(nn.gelu)(x, t)], ("matrix",), {}),
    "and its sums": (lambda t, x: [slope_of(nn.gelu)(x, t)], ("matrix",), {"summed": 0, "rows": ROWS}),
    "and GELU again, and sums": (
        lambda t, x: [slope_of(nn.gelu)(x, t), nn.gelu(x)], ("matrix",), {"summed": 0, "rows": ROWS}
    ),
    "the exact GELU": (lambda t: [nn.gelu(t, approximate=False)], (), {}),
    "SwiGLU": (lambda t, g: [swiglu(g, t), t], ("matrix",), {}),
    "its derivative": (
        lambda t, g, u: bf.vjp(swiglu, g, u)[1](t), ("matrix", "matrix"), {"summed": 1, "rows": ROWS}
    ),
    "and SwiGLU again": (lambda t, g, u: [*bf.vjp(swiglu, g, u)[1](t), swiglu(g, u)], ("matrix", "matrix"), {}),
    "squared ReLU": (lambda t: [squared_relu(t), t], (), {}),
    "the derivative of squared ReLU": (lambda t, x: [slope_of(squared_relu)(x, t)], ("matrix",), {}),
    "vectors and a scalar": (
        lambda t, b, c, s: [(bnp.tanh(t + b).astype(F32) * c * s).astype(BF16)], ("bfloat16", "float32", "scalar"), {}
    ),
    "four matrices": (lambda t, a, b, c, d: [t * a - b * c + d], ("matrix",) * 4, {}),
}  # fmt: skip
LARGE = 32768, 3072, 768


def gemm(name, sizes, by_rows, cluster=2):
    fun, kinds, fields = EPILOGUES[name]
    return PointwiseGemm(
        *sizes, by_rows=by_rows, cluster=cluster, epilogue=epilogue_of(fun, kinds, **fields), kinds=kinds
    )


@pytest.mark.sampled(2)
@needs_nvrtc
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("name", EPILOGUES)
def test_it_compiles_without_spills(name, by_rows):
    p = gemm(name, LARGE if by_rows else (8192, 5632, 2048), by_rows)
    text = DEVICE.with_prelude(source(p))
    made = nvrtc.build(text, "sm_90a", ENTRY)
    found = resources(made)[ENTRY]
    assert found.spill_stores == 0
    assert "erialized" not in made.log, made.log  # as matmuls are that wait for each other
    assert moved_registers(text, p.threads) <= found.registers * p.threads


class Case:
    """The operands of one matmul, and what is right for them."""

    def __init__(self, p):
        self.gemm = p
        rng = np.random.default_rng([p.m, p.n, p.k])
        normal = lambda *shape: rng.standard_normal(shape).astype(BF16)
        self.a = normal(p.m, p.k)
        self.b = (normal(*((p.n, p.k) if p.by_rows else (p.k, p.n))) / 8).astype(BF16)
        made = {
            "matrix": lambda: (normal(p.m, p.n) * 2).astype(BF16), "bfloat16": lambda: normal(p.n),
            "float32": lambda: normal(p.n).astype(F32), "scalar": lambda: np.array([0.7], F32),
        }  # fmt: skip
        self.given = [made[kind]() for kind in (*["bfloat16"] * p.epilogue.bias, *p.kinds)]
        outs = p.epilogue.jaxpr.outvars
        self.results = [np.full((p.m, p.n), np.nan, BF16) for _ in outs]
        if p.epilogue.summed is not None:
            self.results.append(np.full((p.m // ROWS, p.n), np.nan, F32))

    @property
    def right(self):
        """The definition, by the matmul in float32."""
        p, scalars = self.gemm, [x.reshape(()) if x.size == 1 else x for x in self.given]
        impl = functools.partial(
            dot_pointwise_p.impl, epilogue=p.epilogue, dimension_numbers=(((1,), (0,)), ((), ())), precision=None,
            preferred_element_type=BF16,
        )  # fmt: skip
        return ignoring_fp_errors(impl, self.a, self.b.T if p.by_rows else self.b, *scalars)

    def check(self):
        wide = [x.astype(np.float64) for x in self.results]
        for got, want in list(zip(wide, self.right, strict=True))[: len(self.gemm.epilogue.jaxpr.outvars)]:
            want = want.astype(np.float64)
            size = np.abs(want).max()
            assert np.abs(got - want).max() <= 2**-5 * size  # some steps round to other neighbours
            assert np.abs(got - want).mean() <= 1e-4 * size
        if self.gemm.epilogue.summed is not None:
            of_own = wide[self.gemm.epilogue.summed].reshape(-1, ROWS, self.gemm.n).sum(1)
            np.testing.assert_allclose(wide[-1], of_own, rtol=1e-5, atol=1e-4)


def run_emulated(case, emulator, eager=False):
    p = case.gemm
    boxes = p.boxes(2 * case.a.shape[1], 2 * case.b.shape[1])
    maps = [tensor_map(box, array) for box, array in zip(boxes, (case.a, case.b), strict=True)]
    parameters = [("TensorMap", m) for m in maps]
    for x in (*case.given, *case.results):
        kind = ("float *", x) if x.dtype == F32 else ("element *", x.view(np.uint16))
        parameters.append(kind)
    how = (p.threads, p.shared_bytes, (False, not p.by_rows), eager)
    emulator.launch(source(p), instructions(p), "bfloat16", ENTRY, parameters, 1, *how)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", EPILOGUES)
def test_the_kernel_emulated(name, eager, emulator):
    """One block without a cluster, two tiles, and more steps than stages."""
    case = Case(gemm(name, (ROWS, 2 * COLUMNS, 320), by_rows=eager, cluster=1))
    run_emulated(case, emulator, eager)
    case.check()


SIZES = (
    (2 * ROWS, COLUMNS, 64),
    (3 * ROWS, 2 * COLUMNS, 320),
    (ROWS, 3 * COLUMNS, 128),
    (ROWS, COLUMNS + 64, 64),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_all_results_of_several_tiles(sizes, by_rows, emulator):
    """Rows and columns of tiles, the last partial, in one block."""
    case = Case(gemm("and GELU again, and sums", sizes, by_rows, cluster=1))
    run_emulated(case, emulator)
    case.check()


def test_vectors_of_a_tile_that_is_cut_off(emulator):
    case = Case(gemm("vectors and a scalar", (ROWS, COLUMNS + 128, 64), True, cluster=1))
    run_emulated(case, emulator)
    case.check()


def test_far_out_the_slope_is_that_of_the_definition(emulator):
    """Where the product of its factors is not a number yet."""
    case = Case(gemm("the derivative of GELU", (ROWS, COLUMNS, 64), True, cluster=1))
    x = np.array([0, -0.0, 30, -30, 1e6, -1e6, 1e12, -1e12, 2e13, -2e13, 1e15, -1e15], BF16)
    case.given[0][...] = np.resize(x, case.given[0].shape)
    run_emulated(case, emulator)
    t = (case.a.astype(np.float32) @ case.b.astype(np.float32).T).astype(BF16).astype(np.float32)
    slopes = np.resize(np.array([0.5, 0.5, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]), t.shape)
    np.testing.assert_allclose(case.results[0].astype(np.float32), t * slopes, rtol=2**-6, atol=1e-3)


@pytest.mark.slow
def test_what_is_recomputed_has_the_bits_of_the_forward_pass(emulator):
    """At the stored, rounded argument: large values, and GELU close to 0."""
    forward = Case(gemm("a bias, GELU, and its argument", (ROWS, COLUMNS, 64), False, cluster=1))
    far = [0, -0.0, 3e38, -3e38, 1e-38, -1e-38, 12, -12, np.inf, -np.inf, np.nan]
    forward.given[0][: len(far)] = np.array(far, BF16)
    run_emulated(forward, emulator)
    back = Case(gemm("and GELU again, and sums", (ROWS, COLUMNS, 64), True, cluster=1))
    back.given[0][...] = forward.results[1]
    run_emulated(back, emulator)
    np.testing.assert_array_equal(back.results[1].view(np.uint16), forward.results[0].view(np.uint16))


def test_gelu_of_negative_arguments_is_relative_to_itself(emulator):
    """The tanh form by a logistic does not cancel: only rounding errors remain."""
    case = Case(gemm("and GELU again, and sums", (ROWS, COLUMNS, 64), True, cluster=1))
    case.given[0][...] = np.resize(np.linspace(-12, 3, 3001).astype(BF16), case.given[0].shape)
    run_emulated(case, emulator)
    x = case.given[0].astype(np.float64)
    right = x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    denormal = np.abs(x).max() * 2.0**-126  # x times a logistic that is flushed to 0
    np.testing.assert_allclose(case.results[1].astype(np.float64), right, rtol=2**-8, atol=denormal)


ON_A_DEVICE = (256, 192, 64), (512, 384, 128), (256, 640, 320), (8192, 768, 192), (5120, 3072, 768)


@pytest.mark.gpu
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("sizes", ON_A_DEVICE)
def test_on_a_device(sizes, name, by_rows):
    import cupy

    case = Case(gemm(name, sizes, by_rows))
    bits = lambda x: x if x.dtype == F32 else x.view(np.uint16)
    there = [cupy.asarray(bits(x)) for x in (case.a, case.b, *case.given, *case.results)]
    at = [x.data.ptr for x in there]
    rows = case.a.shape[1], case.b.shape[1]
    kernel, stream = pointwise_gemm.Kernel(case.gemm, rows, 0), cupy.cuda.get_current_stream()
    results = there[2 + len(case.given) :]
    kernel(at[:2], at[2:], stream)
    first = results[0].get()
    kernel(at[:2], at[2:], stream)
    np.testing.assert_array_equal(results[0].get(), first)
    for mine, x in zip(case.results, results, strict=True):
        mine[...] = x.get().view(mine.dtype)
    case.check()


@pytest.mark.gpu
def test_layers_on_a_device():
    agrees(gradients(two_layers), LAYERS, bf.devices("cuda")[0], 0.1)


def test_kernels_of_alike_epilogues_are_one_source():
    """Each is traced anew; a program asks for each source once."""
    first, second = (gemm("SwiGLU", (512, 384, 128), True) for _ in range(2))
    assert first.epilogue.jaxpr is not second.epilogue.jaxpr
    assert source(first) == source(second)
    assert source(dataclasses.replace(first, n=768)) != source(first)
