"""Elementwise epilogues of matmuls: plans, values, and reasons for none."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, nn
from blufunc.core.arrays import backend
from blufunc.core.arrays.errstate import ignoring_fp_errors
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var
from blufunc.core.ops import elementwise as ew
from blufunc.core.primitives.linear_ops import reduce_sum
from blufunc.core.programs.simplify import simplify
from blufunc.core.programs.stage import stage
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.backends.cuda.library import pointwise_gemm
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.inspect.program import Sight
from blufunc.kernels.ops.pointwise_gemm import Epilogue, dot_pointwise_p
from examples.gpt import model as gpt
from tests.kernels.backends.cuda.test_program import on, same, uniform
from tests.kernels.rewrites.test_gemm_epilogue import half

F16, F32, BF16 = dtypes.float16, dtypes.float32, dtypes.bfloat16
EPILOGUE, DOT, BIAS, KERNEL = dot_pointwise_p.name, "dot_general", "dot_general+bias", "kernel"


def always(monkeypatch):
    """Let epilogues take no time, so that all are worth it."""
    monkeypatch.setattr(pointwise_gemm, "GEMM_SECONDS", 0.0)
    monkeypatch.setattr(pointwise_gemm, "GEMM_TILE_SECONDS", 0.0)
    monkeypatch.setattr(pointwise_gemm, "EPILOGUE_RATE", float("inf"))


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    always(monkeypatch)


def draft(fun, *args, arch="sm_90a"):
    """The schedule of a function of arrays on a device, and the names of its steps."""
    traced = bf.jit(fun).trace(*args)
    made = Draft(traced.jaxpr, (False,) * len(traced.jaxpr.invars), arch).schedule
    return made, [s.eqn.prim.name if hasattr(s, "eqn") else KERNEL for s in made.steps]


def two_layers(x, w, b, v):
    return nn.gelu(x @ w + b) @ v


def gated(x, gate, up, down):
    return (nn.silu(x @ gate) * (x @ up)) @ down


def squared(x, w, v):
    return bnp.square(nn.relu(x @ w)) @ v


def gradients(f):
    """Of a scalar function of the result, by everything."""
    return lambda *args: bf.vjp(f, *args)[1](bnp.ones_like(f(*args)))


def layers(ws, x):
    """The gradient of a loop over layers: forward and backward are programs apart."""
    step = lambda x, w: (x + nn.gelu(x @ w[0]) @ w[1], None)
    return bf.grad(lambda ws: lax.scan(step, x, ws)[0].astype(F32).sum())(ws)


T, D, H = 256, 64, 128
X, W, B, V = half(2, T // 2, D) / 4, half(D, H) / 4, half(H), half(H, D) / 4
G, U, R = half(2, T // 2, H), half(2, T // 2, H, seed=3), half(2, T // 2, H, seed=4)
FLAT, DY = half(T, H), half(T, D) / 4
WIDE = [x.astype(F32) for x in (X, W, B, V)]
MORE = half(D, H, seed=7) / 4


def twice(x, w):
    """Two GELUs of one argument, traced apart, one of which a kernel reads."""
    h = x @ w
    return nn.gelu(h), bf.vmap(lambda h: nn.gelu(h).astype(F32) * 2, axis_name="i")(h)


back_of = lambda f: lambda h, dy, v: bf.vjp(f, h)[1](dy @ v.T)[0]
JOINED = {
    "GELU": ([EPILOGUE], lambda x, w: nn.gelu(x @ w), X, W),
    "a bias and GELU": ([EPILOGUE], lambda x, w, b: nn.gelu(x @ w + b), X, W, B),
    "a bias first": ([EPILOGUE], lambda x, w, b: nn.gelu(b + x @ w), X, W, B),
    "a bias that is rounded": (
        [KERNEL, EPILOGUE], lambda x, w, b: nn.gelu(x @ w + b.astype(x.dtype)), X, W, B.astype(F32)
    ),
    "the exact GELU": ([EPILOGUE], lambda x, w: nn.gelu(x @ w, approximate=False), X, W),
    "SiLU": ([EPILOGUE], lambda x, w: nn.silu(x @ w), X, W),
    "squared ReLU": ([EPILOGUE], lambda x, w: bnp.square(nn.relu(x @ w)), X, W),
    "a bias and squared ReLU": ([EPILOGUE], lambda x, w, b: bnp.square(nn.relu(x @ w + b)), X, W, B),
    "a function of the user's": (
        [EPILOGUE], lambda x, w: bnp.where((h := x @ w) > 0, bnp.sin(h), h / 3), X, W
    ),
    "a gate": ([EPILOGUE], lambda x, w, g: nn.silu(g) * (x @ w), X, W, G),
    "a gate of another shape": (
        [EPILOGUE], lambda x, w, g: nn.silu(g.reshape(2, -1, H)) * (x @ w), X, W, FLAT
    ),
    "a gate that is a matmul": ([DOT, EPILOGUE], lambda x, g, w: nn.silu(x @ g) * (x @ w), X, W, MORE),
    "a gate that comes later": ([DOT, EPILOGUE], lambda x, g, w: (x @ w) * nn.silu(x @ g), X, W, MORE),
    "two arrays": ([EPILOGUE], lambda x, w, g, u: bnp.tanh(x @ w + g) * u, X, W, G, U),
    "four arrays": (
        [EPILOGUE], lambda x, w, g, u, r, s: bnp.tanh(x @ w + g) * u - r * s, X, W, G, U, R, half(2, T // 2, H, seed=8)
    ),
    "a residual after an activation": ([EPILOGUE], lambda x, w, r: r + nn.silu(x @ w), X, W, R),
    "scales of columns": ([EPILOGUE], lambda x, w, b: nn.silu((x @ w) * b), X, W, B),
    "scales of columns in float32": (
        [EPILOGUE], lambda x, w, b: ((x @ w).astype(F32) * b).astype(BF16), X, W, B.astype(F32)
    ),
    "scales that were integers": (
        [KERNEL, EPILOGUE], lambda x, w, s: nn.silu(x @ w) * s.astype(BF16), X, W, np.arange(H, dtype=np.int32) % 3
    ),
    "a scale": ([EPILOGUE], lambda x, w, s: ((x @ w).astype(F32) * s).astype(BF16), X, W, np.float32(0.3)),
    "transposed operands": (
        [EPILOGUE], lambda x, w, b: nn.gelu(bnp.einsum("bmk,nk->bmn", x, w) + b), X, W.T.copy(), B
    ),
    "several features": (
        [EPILOGUE], lambda x, w, b: nn.gelu(bnp.einsum("bmk,khn->bmhn", x, w) + b), X, half(D, 2, D) / 4, half(2, D)
    ),
    "columns cut off": ([EPILOGUE], lambda x, w: nn.gelu(x @ w), X, half(D, 320) / 4),
    "reshaped before": ([EPILOGUE, DOT], lambda x, w: nn.gelu((x @ w).reshape(T, H)) @ w.T, X, W),
    "the argument is returned": ([EPILOGUE], lambda x, w, b: (nn.gelu(h := x @ w + b), h), X, W, B),
    "a kernel reads the argument": (
        [EPILOGUE, KERNEL], lambda x, w, b: (nn.gelu(h := x @ w + b), bnp.tanh(h).astype(F32)), X, W, B
    ),
    "two of one argument": ([EPILOGUE, KERNEL], twice, X, W),
    "vmap": ([EPILOGUE], lambda x, w: bf.vmap(lambda x: nn.gelu(x @ w))(x), X, W),
    "backward": ([EPILOGUE], back_of(nn.gelu), FLAT, DY, V),
    "backward, at an argument of another shape": (
        [EPILOGUE], lambda h, dy, v: bf.vjp(nn.gelu, h.reshape(T, H))[1](dy @ v.T)[0], FLAT.reshape(-1), DY, V
    ),
    "backward, of squared ReLU": ([EPILOGUE], back_of(lambda h: bnp.square(nn.relu(h))), FLAT, DY, V),
    "backward, of a gate": (
        [EPILOGUE], lambda g, u, dy, v: bf.vjp(lambda g, u: nn.silu(g) * u, g, u)[1](dy @ v.T),
        FLAT, half(T, H, seed=1), DY, V,
    ),
    "two layers": ([EPILOGUE, DOT], two_layers, X, W, B, V),
    "gated layers": ([DOT, EPILOGUE, DOT], gated, X, W, MORE, V),
    "two layers in mixed precision": ([KERNEL, EPILOGUE, DOT, KERNEL], bf.autocast(two_layers), *WIDE),
}  # fmt: skip
BACKWARD = {  # a function, its arguments, and the numbers of results of epilogues, forward and backward
    "GELU": ((2, 1), two_layers, X, W, B, V),
    "GELU in mixed precision": ((2, 2), bf.autocast(two_layers), *WIDE),
    "a gate": ((2, 2), gated, X, W, MORE, V),
    "squared ReLU": ((2, 1), squared, X, W, V),
}


def agrees(fun, args, device, tolerance=0.05):
    """With what the CPU does; the later calls may be graphs."""
    want, jitted, there = bf.jit(fun)(*on(backend.host_device(), *args)), bf.jit(fun), on(device, *args)
    for _ in range(4):
        same(jitted(*there), want, tolerance)
    same(there, args)


def epilogues(made):
    return [s.eqn for s in made.steps if hasattr(s, "eqn") and s.eqn.prim is dot_pointwise_p]


@pytest.mark.parametrize("name", JOINED)
def test_matmuls_with_epilogues(name, fake, cuda):
    steps, fun, *args = JOINED[name]
    made, found = draft(fun, *args)
    assert sorted(found) == sorted(steps), made.notes
    agrees(fun, args, cuda)
    assert "pointwise" in fake.epilogues


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_layers(name, fake, cuda):
    """One matmul per direction; the second reads the first's. No kernel has exp."""
    results, fun, *args = BACKWARD[name]
    made, _ = draft(gradients(fun), *args)
    assert tuple(len(e.outvars) for e in epilogues(made)) == results
    assert not [k for k in made.kernels if "logistic" in str(k)]
    agrees(gradients(fun), args, cuda, 0.1)


def test_forward_and_backward_are_programs_apart(fake, cuda):
    args = (half(3, D, H) / 8, half(3, H, D) / 8), half(T, D)
    run = lambda w, v, x: layers((w, v), x)
    agrees(run, (*args[0], args[1]), cuda, 0.1)
    assert fake.epilogues.count("pointwise") % 6 == 0 < len(fake.epilogues)


@pytest.mark.gpu
@pytest.mark.parametrize("name", JOINED)
def test_matmuls_with_epilogues_on_a_device(name):
    _, fun, *args = JOINED[name]
    agrees(fun, args, bf.devices("cuda")[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_layers_on_a_device(name):
    _, fun, *args = BACKWARD[name]
    agrees(gradients(fun), args, bf.devices("cuda")[0], 0.1)


APART = {  # what has no epilogue, and the reason that is told, if one is
    "float32": (lambda x, w, b: nn.gelu(x @ w + b), WIDE[:3], "one is float32"),
    "float16": (lambda x, w: nn.gelu(x @ w), [x.astype(F16) for x in (X, W)], "one is float16"),
    "float32 of a product in bfloat16": (lambda x, w: nn.gelu((x @ w).astype(F32)), (X, W), None),
    "no matmul": (lambda x: nn.gelu(x + 1), (X,), None),
    "a bias alone": (lambda x, w, b: x @ w + b, (X, W, B), None),
    "a residual alone": (lambda x, w, r: x @ w + r, (X, W, R), None),
    "a matmul of several matrices": (lambda x, y: nn.gelu(x @ y), (half(2, T, D), half(2, D, H)), None),
    "rows of another number": (lambda x, w: nn.gelu(x @ w), (half(192, D), W), "192 x 128 x 64 is not of whole tiles"),
    "columns of another number": (lambda x, w: nn.gelu(x @ w), (X, half(D, 72)), "256 x 72 x 64 is not"),
    "terms of another number": (lambda x, w: nn.gelu(x @ w), (half(T, 72), half(72, H)), "256 x 128 x 72 is not"),
    "terms first": (lambda x, w: nn.gelu(bnp.einsum("km,kn->mn", x, w)), (half(D, T), W), "rows first on the left"),
    "an array of float32": (
        lambda x, w, r: (nn.silu(x @ w).astype(F32) + r).astype(BF16), (X, W, R.astype(F32)), "one is float32"
    ),
    "a mask": (lambda x, w, m: bnp.where(m, nn.silu(x @ w), 0), (X, W, R > 0), "one is bool"),
    "an integer": (
        lambda x, w, s: bnp.where(s > 0, nn.silu(h := x @ w), h), (X, W, np.int32(1)), "no scalars of bool"
    ),
    "the matmul is moved": (lambda x, w: nn.gelu((x @ w).T), (half(T, D), half(D, T)), None),
    "only kernels read it": (lambda x, w: nn.gelu(x @ w).astype(F32).sum(-1), (X, W), None),
    "what it is computed with depends on it": (
        lambda x, w: nn.silu(h := x @ w) / h.astype(F32).sum(-1, keepdims=True).astype(BF16), (X, W), None
    ),
    "backward, a kernel computes the argument": (
        lambda h, dy, v: bf.vjp(nn.gelu, bnp.cumsum(h, 0))[1](dy @ v.T)[0], (FLAT, DY, V), None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_matmuls_without(name, cuda):
    fun, args, reason = APART[name]
    made, found = draft(fun, *args)
    assert EPILOGUE not in found
    assert [
        n for n in made.notes if "no epilogue for the matmul at test_pointwise" in n and (reason or "\0") in n
    ] or (reason is None), made.notes
    agrees(fun, args, cuda)


def test_other_architectures_have_none():
    made, found = draft(two_layers, X, W, B, V, arch="sm_80")
    assert found == [DOT, KERNEL, DOT] and any("Hopper only" in n for n in made.notes)


def test_a_cotangent_that_others_read_is_stored(cuda):
    fun = lambda h, dy, v: (bf.vjp(nn.gelu, h)[1](t := dy @ v.T)[0], t)
    (eqn,) = epilogues(draft(fun, FLAT, DY, V)[0])
    assert eqn.params["epilogue"].stored == 1
    agrees(fun, (FLAT, DY, V), cuda)


def test_what_is_reduced_keeps_what_it_needs(cuda):
    """A row sum of the gate's gradients is a kernel that reads the matmul's result."""
    fun = lambda x, w: ((y := nn.silu(x @ w)), y.astype(F32).sum(-1))
    made, found = draft(fun, X, W)
    assert found == [EPILOGUE, KERNEL] and len(epilogues(made)[0].outvars) == 1
    agrees(fun, (X, W), cuda)


def test_a_replaced_matmul_stays_as_it_is(cuda):
    with bf.override(lax.dot_general_p, impl=lambda *args, **params: np.full((2, T // 2, H), 7, X.dtype)):
        same(bf.jit(lambda x, w: nn.gelu(x @ w))(*on(cuda, X, W)), np.full((2, T // 2, H), 7, X.dtype))


@pytest.mark.parametrize("prim", [lax.logistic_p, lax.mul_p])
def test_replaced_operations_stay_apart(cuda, prim):
    with bf.override(prim, impl=lambda *args, **params: prim.impl(*args, **params)):
        assert EPILOGUE not in draft(lambda x, w: nn.gelu(x @ w), X, W)[1]


@pytest.mark.parametrize(
    "fun, args",
    [
        (lambda x, w: (nn.gelu(h := x @ w), h), (half(T, 0), half(0, H))),
        (lambda h, dy, v: bf.vjp(nn.gelu, h)[1](dy @ v.T)[0], (FLAT, half(T, 0), half(H, 0))),
    ],
)
def test_matmuls_of_nothing_have_none(cuda, fun, args):
    assert EPILOGUE not in draft(fun, *args)[1]
    agrees(fun, args, cuda)


def test_what_is_recomputed_is_not_merged_with_what_was_first(cuda):
    """A checkpointed layer computes its GELU twice, in a matmul each time."""

    def both(*args):
        y, pull = bf.vjp(bf.checkpoint(two_layers), *args)
        return y, pull(bnp.ones_like(y))

    assert len(epilogues(draft(both, X, W, B, V)[0])) == 3
    agrees(both, (X, W, B, V), cuda, 0.1)


def test_what_they_compute_is_shown(cuda):
    traced = bf.jit(gradients(two_layers)).trace(X, W, B, V)
    rows = [r for r in Sight(traced.jaxpr, traced.donated, cuda).cost.steps if r.name == EPILOGUE]
    assert [row.kind for row in rows] == ["library", "library"]
    h = T * H * 2
    assert (rows[0].reads, rows[0].writes) == (X.nbytes + W.nbytes + B.nbytes, 2 * h)
    assert rows[0].products == rows[1].products == 2 * T * D * H
    assert (rows[1].reads, rows[1].writes) == (X.nbytes + V.nbytes + h, h)


# -- whether they pay ----------------------------------------------------------------------------------


def planned_at(fun, *shapes):
    """A function of arrays of bfloat16 of these shapes, planned by the cost model."""
    jaxpr = simplify(bf.jit(fun).trace(*[bf.ShapeDtypeStruct(s, BF16) for s in shapes]).jaxpr)
    return cuda_program.planned(jaxpr, (False,) * len(jaxpr.invars), "sm_90a")


def mlp(tokens, width, hidden):
    return (tokens, width), (width, hidden), (width, hidden), (hidden, width)


WORTH = {  # gradients of layers, and the numbers of matmuls with epilogues and of epilogues that are too slow
    "GPT-2": (gradients(two_layers), [(32768, 768), (768, 3072), (3072,), (3072, 768)], 2, 0),
    "GPT-2, few tokens": (gradients(two_layers), [(256, 768), (768, 3072), (3072,), (3072, 768)], 0, 2),
    "Llama": (gradients(gated), mlp(8192, 2048, 5632), 1, 1),
    "squared ReLU": (gradients(squared), [(8192, 2048), (2048, 8192), (8192, 2048)], 2, 0),
    "ViT": (lambda x, w, v: nn.gelu(x @ w, approximate=False) @ v, [(25088, 768), (768, 3072), (3072, 768)], 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", WORTH)
def test_the_cost_model(name, monkeypatch):
    """As measured: SwiGLU's backward pass and exact GELU stay separate kernels."""
    monkeypatch.undo()
    fun, shapes, fused, slow = WORTH[name]
    made = planned_at(fun, *shapes)
    assert len(epilogues(made)) == fused
    assert sum("longer than the library's" in n for n in made.notes) == slow


def test_long_epilogues_do_not_pay(monkeypatch):
    """The next tile's matmul hides only some operations, of however many terms it is."""
    monkeypatch.undo()
    long = lambda x, w: bnp.cos(bnp.cos(bnp.cos(bnp.cos(bnp.cos(bnp.cos(bnp.cos(x @ w)))))))
    for terms in (128, 2048):
        assert not epilogues(planned_at(long, (32768, terms), (terms, 3072)))
        assert epilogues(planned_at(lambda x, w: bnp.cos(x @ w), (32768, terms), (terms, 3072)))


def test_a_block_of_gpt2_has_three_kernels_less(monkeypatch):
    """Without the GELU of a block, its argument, or its derivative."""
    monkeypatch.undo()
    config = gpt.Config(layers=2, heads=12, width=768, context=1024, vocab=512)
    params = bf.eval_shape(lambda key: gpt.init(key, config), bf.random.key(0))
    tokens = bf.ShapeDtypeStruct((32, config.context + 1), np.int32)
    step = bf.value_and_grad(bf.autocast(lambda p, tokens: gpt.loss(p, tokens, config)))
    traced = bf.jit(step).trace(params, tokens)

    def planned():
        donated = (False,) * len(traced.jaxpr.invars)
        return cuda_program.planned(simplify(traced.jaxpr), donated, "sm_90a")

    made = planned()
    monkeypatch.setattr(pointwise_gemm, "GEMM_TILE_SECONDS", 1.0)
    before = planned()
    assert len(epilogues(made)) == 2 * config.layers and not epilogues(before)
    assert [e.params["epilogue"].summed for e in epilogues(made)] == [None, None, 0, 0]
    assert len(before.kernels) - len(made.kernels) >= 2 * config.layers


# -- the equation ----------------------------------------------------------------------------------------

NO_EPILOGUES = {
    "a reduction": (lambda t: [reduce_sum(t, (0,))], ((4,),), "reduce_sum is not elementwise"),
    "arrays": (lambda t: [ew.exp(t)], ((4,),), "it is of arrays"),
    "a random number": (
        lambda t: [t * bf.random.uniform(bf.random.key(0), (), BF16)], ((),), "is not elementwise"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_EPILOGUES)
def test_what_is_no_epilogue_is_refused(name):
    fun, shapes, reason = NO_EPILOGUES[name]
    epilogue = Epilogue(stage(fun, [ShapedArray(s, BF16) for s in shapes], "epilogue"))
    assert reason in epilogue.why_not()
    lhs, rhs, out = (Var(ShapedArray(s, BF16)) for s in ((T, D), (D, H), (T, H)))
    numbers = {
        "dimension_numbers": (((1,), (0,)), ((), ())),
        "precision": None,
        "preferred_element_type": BF16,
    }
    eqn = Eqn(dot_pointwise_p, [lhs, rhs], [out], {**numbers, "epilogue": epilogue}, None)
    assert reason in pointwise_gemm.why_not(eqn, "sm_90a")


def test_the_definition_is_the_operations_in_order():
    """Of the equation itself, on arrays of NumPy; with the types that it says."""
    made, _ = draft(gradients(bf.autocast(two_layers)), *WIDE)
    for eqn in epilogues(made):
        values = [uniform(*a.aval.shape).astype(a.aval.dtype) for a in eqn.invars]
        found = ignoring_fp_errors(lambda *args, e=eqn: e.prim.impl(*args, **e.params), *values)
        assert [(x.shape, x.dtype) for x in found] == [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        avals = eqn.prim.abstract(*[a.aval for a in eqn.invars], **eqn.params)
        assert [a.same_type(v.aval) for a, v in zip(avals, eqn.outvars, strict=True)] == [True] * len(found)


def test_a_number_stays_weak():
    assert nn.gelu(2.0).aval == nn.silu(2.0).aval
    np.testing.assert_allclose(float(nn.gelu(2.0)), float(nn.gelu(bnp.float32(2))), rtol=1e-6)


def test_jaxprs_of_results_keep_their_order():
    made, _ = draft(gradients(gated), X, W, MORE, V)
    forward, backward = epilogues(made)
    assert isinstance(forward.params["epilogue"].jaxpr, Jaxpr)
    assert forward.params["epilogue"].stored == 1 and backward.params["epilogue"].stored is None
    assert forward.outvars[1] in backward.invars  # what was stored is read
