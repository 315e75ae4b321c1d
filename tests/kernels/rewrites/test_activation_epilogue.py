"""GELU in products: where that is, that it means the same, and that what is left out stays as it was."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, nn
from blufunc.config import config
from blufunc.core.arrays import backend
from blufunc.core.ir import dtypes
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.inspect.program import Sight
from blufunc.kernels.rewrites import activation_epilogue
from examples.gpt import model as gpt
from tests.emulation import fake_cuda
from tests.kernels.backends.cuda.test_program import on, same, uniform
from tests.kernels.rewrites.test_gemm_epilogue import draft, half

F16, F32 = dtypes.float16, dtypes.float32
GELU, BIAS_GELU, DGELU = "dot_general+gelu", "dot_general+bias+gelu", "dot_general+dgelu"
DOT, BIAS, KERNEL = "dot_general", "dot_general+bias", "kernel"
LEAST = activation_epilogue.LEAST_ELEMENTS


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(activation_epilogue, "LEAST_ELEMENTS", 1)


def two_layers(x, w, b, v):
    return nn.gelu(x @ w + b) @ v


def gradients(f):
    """Of a scalar function of the result, by everything."""
    return lambda *args: bf.vjp(f, *args)[1](bnp.ones_like(f(*args)))


def layers(ws, x):
    """The gradient of a loop over layers: forward and backward are programs apart."""
    step = lambda x, w: (x + nn.gelu(x @ w[0]) @ w[1], None)
    return bf.grad(lambda ws: lax.scan(step, x, ws)[0].astype(F32).sum())(ws)


X, W, B, V = half(2, 8, 16), half(16, 24), half(24), half(24, 8)
WIDE = uniform(2, 8, 16), uniform(16, 24), uniform(24), uniform(24, 8)
HALF = [half(*s, dtype=F16) for s in ((2, 8, 16), (16, 24), (24,), (24, 8))]


def twice(x, w):
    """Two GELUs of one argument, traced apart: the product computes one of them."""
    h = x @ w
    return nn.gelu(h), bf.vmap(lambda h: nn.gelu(h) * 2, axis_name="i")(h)


JOINED = {
    "two of one argument": ([GELU, KERNEL], twice, half(16, 16), half(16, 24)),
    "a product": ([GELU], lambda x, w: nn.gelu(x @ w), X, W),
    "a product and a bias": ([BIAS_GELU], lambda x, w, b: nn.gelu(x @ w + b), X, W, B),
    "a bias first": ([BIAS_GELU], lambda x, w, b: nn.gelu(b + x @ w), X, W, B),
    "float16": ([BIAS_GELU], lambda x, w, b, v: nn.gelu(x @ w + b), *HALF),
    "a bias that is rounded": ([KERNEL, BIAS_GELU], lambda x, w, b: nn.gelu(x @ w + b.astype(x.dtype)), X, W, WIDE[2]),
    "transposed operands": (
        [BIAS_GELU], lambda x, w, b: nn.gelu(bnp.einsum("kbm,nk->bmn", x, w) + b), half(16, 2, 8), half(24, 16), B
    ),
    "odd sizes": ([GELU], lambda x, w: nn.gelu(x @ w), half(3, 7), half(7, 8)),
    "a slice": ([GELU], lambda x, w: nn.gelu(x[1, 3:, 1:] @ w[:15]), X, W),
    "several features": (
        [BIAS_GELU], lambda x, w, b: nn.gelu(bnp.einsum("bmk,khn->bmhn", x, w) + b), X, half(16, 3, 8), half(3, 8)
    ),
    "the argument is returned": ([BIAS_GELU], lambda x, w, b: (nn.gelu(h := x @ w + b), h), X, W, B),
    "a kernel reads the argument": (
        [BIAS_GELU, KERNEL], lambda x, w, b: (nn.gelu(h := x @ w + b), bnp.tanh(h)), X, W, B
    ),
    "a kernel reads the result": ([GELU, KERNEL], lambda x, w: bnp.tanh(nn.gelu(x @ w)), X, W),
    "vmap": ([GELU], lambda x, w: bf.vmap(lambda x: nn.gelu(x @ w))(x), X, W),
    "backward": (
        [DGELU], lambda h, dy, v: bf.vjp(nn.gelu, h)[1](dy @ v.T)[0], half(16, 24), half(16, 8), half(24, 8)
    ),
    "backward, float16": (
        [DGELU], lambda h, dy, v: bf.vjp(nn.gelu, h)[1](dy @ v.T)[0],
        *[half(*s, dtype=F16) for s in ((16, 24), (16, 8), (24, 8))],
    ),
    "backward, at an argument of another shape": (
        [DGELU], lambda h, dy, v: bf.vjp(nn.gelu, h.reshape(16, 24))[1](dy @ v.T)[0],
        half(4, 96), half(16, 8), half(24, 8),
    ),
    "two layers": ([BIAS_GELU, DOT], two_layers, X, W, B, V),
    "two layers in float16": ([BIAS_GELU, DOT], two_layers, *HALF),
    "two layers in mixed precision": ([KERNEL, BIAS_GELU, DOT, KERNEL], bf.autocast(two_layers), *WIDE),
    "forward mode": (
        [DOT, BIAS_GELU, KERNEL],
        lambda x, w, b, t: bf.jvp(lambda x: nn.gelu(x @ w + b), (x,), (t,)), X, W, B, half(2, 8, 16, seed=1),
    ),
}  # fmt: skip
BACKWARD = {
    "two layers": (two_layers, X, W, B, V),
    "two layers in float16": (two_layers, *HALF),
    "two layers in mixed precision": (bf.autocast(two_layers), *WIDE),
    "without a bias": (lambda x, w, v: nn.gelu(x @ w) @ v, X, W, V),
}


def agrees(fun, args, device, tolerance=0.05):
    """With what the CPU does; the later calls may be graphs."""
    want, jitted, there = bf.jit(fun)(*on(backend.host_device(), *args)), bf.jit(fun), on(device, *args)
    for _ in range(4):
        same(jitted(*there), want, tolerance)
    same(there, args)


@pytest.mark.parametrize("name", JOINED)
def test_products_that_compute_gelu(name, fake, cuda):
    steps, fun, *args = JOINED[name]
    assert sorted(draft(fun, *args)[1]) == sorted(steps)
    agrees(fun, args, cuda)
    assert [e for e in fake.epilogues if "gelu" in e]


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_layers(name, fake, cuda):
    """One product in each direction, which stores what the other reads: no kernel has an exponential."""
    fun, *args = BACKWARD[name]
    made, found = draft(gradients(fun), *args)
    assert [s for s in found if "gelu" in s] == [GELU if len(args) == 3 else BIAS_GELU, DGELU]
    assert not [k for k in made.kernels if "tanh" in str(k)]
    agrees(gradients(fun), args, cuda, 0.1)


def test_forward_and_backward_are_programs_apart(fake, cuda):
    args = (half(3, 16, 24) / 4, half(3, 24, 16) / 4), half(8, 16)
    run = lambda w, v, x: layers((w, v), x)
    agrees(run, (*args[0], args[1]), cuda, 0.1)
    assert {"gelu_aux", "dgelu"} <= set(fake.epilogues)


@pytest.mark.gpu
@pytest.mark.parametrize("name", JOINED)
def test_products_that_compute_gelu_on_a_device(name):
    _, fun, *args = JOINED[name]
    agrees(fun, args, bf.devices("cuda")[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_layers_on_a_device(name):
    fun, *args = BACKWARD[name]
    agrees(gradients(fun), args, bf.devices("cuda")[0], 0.1)


APART = {
    "the exact form": (lambda x, w: nn.gelu(x @ w, approximate=False), X, W),
    "float32": (lambda x, w, b: nn.gelu(x @ w + b), *WIDE[:3]),
    "float32 of a product in bfloat16": (lambda x, w: nn.gelu((x @ w).astype(F32)), X, W),
    "no product": (lambda x: nn.gelu(x + 1), X),
    "a product of several matrices": (lambda x, y: nn.gelu(x @ y), half(2, 8, 16), half(2, 16, 24)),
    "rows of no multiple of 8": (lambda x, w: nn.gelu(x @ w), X, half(16, 20)),
    "an array is added": (lambda x, w, y: nn.gelu(x @ w + y), X, W, half(2, 8, 24)),
    "the product is moved": (lambda x, w: nn.gelu((x @ w).T), half(16, 16), half(16, 24)),
    "backward, the cotangent is read by others": (
        lambda h, dy, v: (bf.vjp(nn.gelu, h)[1](t := dy @ v.T)[0], t), half(16, 24), half(16, 8), half(24, 8)
    ),
    "backward, a kernel computes the argument": (
        lambda h, dy, v: bf.vjp(nn.gelu, bnp.tanh(h))[1](dy @ v.T)[0], half(16, 24), half(16, 8), half(24, 8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_products_that_do_not(name, cuda):
    fun, *args = APART[name]
    found = draft(fun, *args)[1]
    assert not [s for s in found if "gelu" in s], found
    agrees(fun, args, cuda)


def test_small_products_do_not(cuda, monkeypatch):
    monkeypatch.setattr(activation_epilogue, "LEAST_ELEMENTS", 2 * 8 * 24 + 1)
    assert draft(two_layers, X, W, B, V)[1] == [DOT, KERNEL, DOT]
    monkeypatch.setattr(activation_epilogue, "LEAST_ELEMENTS", 2 * 8 * 24)
    assert draft(two_layers, X, W, B, V)[1] == [BIAS_GELU, DOT]


def test_a_replaced_product_stays_as_it_is(cuda):
    with bf.override(lax.dot_general_p, impl=lambda *args, **params: np.full((2, 8, 24), 7, X.dtype)):
        same(bf.jit(lambda x, w: nn.gelu(x @ w))(*on(cuda, X, W)), np.full((2, 8, 24), 7, X.dtype))


@pytest.mark.parametrize("prim", [lax.tanh_p, lax.add_p])
def test_gelu_of_replaced_operations_stays_apart(cuda, prim):
    with bf.override(prim, impl=lambda *args, **params: prim.impl(*args, **params)):
        _, found = draft(two_layers, X, W, B, V)
    assert not [s for s in found if "gelu" in s], found


@pytest.mark.parametrize(
    "fun, args",
    [
        (lambda x, w: (nn.gelu(h := x @ w), h), (half(16, 0), half(0, 24))),
        (lambda h, dy, v: bf.vjp(nn.gelu, h)[1](dy @ v.T)[0], (half(16, 24), half(16, 0), half(24, 0))),
    ],
)
def test_products_of_nothing_are_not_joined(cuda, fun, args):
    assert not [s for s in draft(fun, *args)[1] if "gelu" in s]
    agrees(fun, args, cuda)


def test_a_number_stays_weak():
    assert nn.gelu(2.0).aval == nn.silu(2.0).aval
    np.testing.assert_allclose(float(nn.gelu(2.0)), float(nn.gelu(bnp.float32(2))), rtol=1e-6)


def test_products_that_the_library_refuses_are_computed_apart(fake, cuda, monkeypatch, capsys):
    plan = fake_cuda.cublaslt.Plan

    def refuse(gemm, device, addresses):
        if "gelu" in (gemm.epilogue or ""):
            raise errors.UnsupportedError("no algorithm.")
        return plan(gemm, device, addresses)

    monkeypatch.setattr(fake_cuda.cublaslt, "Plan", refuse)
    monkeypatch.setattr(config, "debug", "fusion")
    agrees(gradients(two_layers), (X, W, B, V), cuda, 0.1)
    assert "computed in another way" in capsys.readouterr().err
    assert "bias" in fake.epilogues and not [e for e in fake.epilogues if "gelu" in e]


def test_what_is_computed_again_is_not_merged_with_what_was_first(cuda):
    """A checkpointed layer computes its GELU twice, in a product each time."""

    def both(*args):
        y, pull = bf.vjp(bf.checkpoint(two_layers), *args)
        return y, pull(bnp.ones_like(y))

    _, found = draft(both, X, W, B, V)
    assert [s for s in found if "gelu" in s] == [BIAS_GELU, BIAS_GELU, DGELU]
    agrees(both, (X, W, B, V), cuda, 0.1)


def test_what_products_compute_is_shown(cuda):
    traced = bf.jit(gradients(two_layers)).trace(X, W, B, V)
    rows = {row.name: row for row in Sight(traced.jaxpr, traced.donated, cuda).cost.steps}
    rows = {name: row for name, row in rows.items() if "gelu" in name}
    assert {name: row.kind for name, row in rows.items()} == {BIAS_GELU: "library", DGELU: "library"}
    x, h = X.nbytes, 2 * 8 * 24 * 2
    assert (rows[BIAS_GELU].reads, rows[BIAS_GELU].writes) == (x + W.nbytes + B.nbytes, 2 * h)
    assert rows[BIAS_GELU].products == 2 * 16 * 16 * 24
    assert (rows[DGELU].reads, rows[DGELU].writes) == (2 * 8 * 8 * 2 + V.nbytes + h, h)


def test_a_block_of_gpt2_has_three_kernels_less(monkeypatch):
    """Without GELU of a block, without what it is computed again from, and without its derivative."""
    config = gpt.Config(layers=2, heads=12, width=768, context=1024, vocab=512)
    params = bf.eval_shape(lambda key: gpt.init(key, config), bf.random.key(0))
    tokens = bf.ShapeDtypeStruct((32, config.context + 1), np.int32)
    step = bf.value_and_grad(bf.autocast(lambda p, tokens: gpt.loss(p, tokens, config)))
    traced = bf.jit(step).trace(params, tokens)

    def planned(least):
        monkeypatch.setattr(activation_epilogue, "LEAST_ELEMENTS", least)
        donated = (False,) * len(traced.jaxpr.invars)
        made = cuda_program.planned(simplify(traced.jaxpr), donated, "sm_90a")
        return made, [s.eqn.prim.name for s in made.steps if hasattr(s, "eqn")]

    (made, found), (before, names) = planned(LEAST), planned(1 << 40)
    assert found.count(BIAS_GELU) == found.count(DGELU) == config.layers
    assert not [s for s in names if "gelu" in s]
    assert len(before.kernels) - len(made.kernels) >= 2 * config.layers
