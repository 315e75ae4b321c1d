"""The programs of nn: how long they are, and that every transform takes them."""

from __future__ import annotations

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import nn
from blufunc.core.programs import simplify as passes
from blufunc.transforms.autodiff.grad import grad, jvp, value_and_grad
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr

RNG = np.random.default_rng(0)
X = bnp.asarray(RNG.normal(size=(3, 4, 6)), dtype="float32")
HEADS = bnp.asarray(RNG.normal(size=(3, 4, 2, 6)), dtype="float32")
SCALE = bnp.asarray(RNG.normal(size=6), dtype="float32")
LABELS = bnp.asarray(RNG.integers(0, 6, (3, 4)), dtype="int32")

# name: function, argument, equations, equations with the gradient of the sum
PROGRAMS = {
    "relu": (nn.relu, X, 1, 4),
    "gelu": (nn.gelu, X, 8, 15),
    "silu": (nn.silu, X, 2, 6),
    "softmax": (nn.softmax, X, 8, 15),
    "layer_norm": (lambda x: nn.layer_norm(x, SCALE, SCALE), X, 15, 27),
    "rms_norm": (lambda x: nn.rms_norm(x, SCALE), X, 9, 17),
    "attention": (lambda x: nn.dot_product_attention(x, x, x, is_causal=True), HEADS, 18, 38),
    "cross-entropy": (lambda x: nn.softmax_cross_entropy_with_integer_labels(x, LABELS), X, 15, 25),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_short(name):
    f, x, most, most_with_gradient = PROGRAMS[name]
    assert len(passes.simplify(make_jaxpr(f)(x)).eqns) <= most
    both = make_jaxpr(value_and_grad(lambda x: f(x).sum()))(x)
    assert len(passes.simplify(both).eqns) <= most_with_gradient


@pytest.mark.parametrize("name", PROGRAMS)
def test_transforms_compose(name):
    f, x, *_ = PROGRAMS[name]
    if name == "cross-entropy":
        f = lambda x: nn.softmax_cross_entropy_with_integer_labels(x, LABELS[0])
    c = bnp.asarray(RNG.normal(size=f(x[0]).shape), dtype="float32")
    loss = lambda x: (f(x) * c).sum()
    one_by_one = [np.asarray(grad(loss)(row)) for row in x]
    np.testing.assert_allclose(np.asarray(vmap(grad(loss))(x)), one_by_one, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(jit(vmap(grad(jit(loss))))(x)), one_by_one, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        np.asarray(grad(lambda x: vmap(loss)(x).sum())(x)), one_by_one, rtol=1e-5, atol=1e-6
    )
    # forward mode agrees with reverse mode, also over reverse mode
    _, slope = jvp(loss, (x[0],), (x[1],))
    np.testing.assert_allclose(float(slope), (one_by_one[0] * np.asarray(x[1])).sum(), rtol=1e-4, atol=1e-5)
    _, product = jvp(grad(loss), (x[0],), (x[1],))
    expected = grad(lambda y: (grad(loss)(y) * x[1]).sum())(x[0])
    np.testing.assert_allclose(np.asarray(product), np.asarray(expected), rtol=1e-4, atol=1e-5)
