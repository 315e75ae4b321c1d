"""``linear_transpose``: <A x, y> = <x, A' y>, and errors for nonlinear functions."""

import re

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, tree
from blufunc.transforms.arguments import ShapeDtypeStruct
from blufunc.transforms.autodiff.grad import grad, vjp
from blufunc.transforms.autodiff.linear_transpose import linear_transpose
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw

W = draw(4, 3)

LINEAR = {
    "matrix": (lambda x: W @ x, (draw(3),)),
    "scale": (lambda x: x * 3.0 - x / 2.0, (draw(3),)),
    "moves": (lambda x: bnp.concatenate([x[::-1], x[1:]]).reshape(5, 1), (draw(3),)),
    "sums": (lambda x: (x.sum(), bnp.cumsum(x)), (draw(3),)),
    "update": (lambda x, y: x.at[1].set(y).at[0].add(2 * y), (draw(3), draw())),
    "where": (lambda x, y: bnp.where(bnp.array([True, False, True]), x, y), (draw(3), draw(3, seed=1))),
    "tree": (lambda p: {"a": p["a"] + p["b"], "b": [p["b"], None]}, ({"a": draw(3), "b": draw(3, seed=1)},)),
    "jit": (jit(lambda x, y: (W @ x, y * 2.0)), (draw(3), draw())),
    "checkpoint": (checkpoint(lambda x: W @ x), (draw(3),)),
    "scan": (lambda x: scan(lambda c, a: (c * 0.5 + a, c), x[0] * 0.0, x), (draw(3),)),
    "vmap": (vmap(lambda x: x @ W), (draw(2, 4),)),
    "unused": (lambda x, y: x * 2.0, (draw(3), draw(2))),
    "grad of a quadratic": (grad(lambda x: (x * x).sum()), (draw(3),)),
}


def inner(a, b):
    return sum((np.vdot(np.asarray(x), np.asarray(y)) for x, y in zip(tree.leaves(a), tree.leaves(b))), 0.0)


@pytest.mark.parametrize("name", LINEAR)
def test_the_adjoint(name):
    f, primals = LINEAR[name]
    out = f(*primals)
    ct = tree.map(lambda x: draw(*x.shape, seed=9), out)
    transposed = linear_transpose(f, *primals)
    found = transposed(ct)
    assert isinstance(found, tuple) and tree.structure(found) == tree.structure(primals)
    np.testing.assert_allclose(inner(out, ct), inner(primals, found), rtol=1e-12)
    close(found, vjp(f, *primals)[1](ct))
    close(jit(transposed)(ct), found)
    close(linear_transpose(jit(f), *primals)(ct), found)
    batch = tree.map(lambda x: bnp.stack([x, x * 2]), ct)
    close(tree.map(lambda x: x[1], vmap(transposed)(batch)), tree.map(lambda x: x * 2, found))
    twice = linear_transpose(lambda y: transposed(y), ct)(found)
    close(twice[0], f(*found))


def test_only_types_are_used():
    runs = []

    def f(x):
        runs.append(x)
        return x * 2.0

    t = linear_transpose(f, ShapeDtypeStruct((3,), "float64"))
    close(t(draw(3))[0], draw(3) * 2)
    t(draw(3))
    assert len(runs) == 1
    assert [e.prim.name for e in make_jaxpr(t)(draw(3)).eqns] == ["mul"]


def test_closed_over_tracers():
    """The transposed function is differentiable in what the linear one closes over."""
    f = lambda w: (linear_transpose(lambda x: w @ x, draw(3))(draw(4))[0] ** 2).sum()
    plain = lambda w: ((draw(4) @ w) ** 2).sum()
    close(grad(f)(W), grad(plain)(W))
    close(jit(grad(f))(W), grad(plain)(W))


def test_integers():
    n = arr([1, 2, 3], np.int32)
    (found,) = linear_transpose(lambda x: x[::-1] * 2, n)(n)
    close(found, arr([6, 4, 2], np.int32))
    (_, unused) = linear_transpose(lambda x, y: x + x, n, n)(n)
    close(unused, arr([0, 0, 0], np.int32))


@jit
def jitted_sine(x):
    return bnp.sin(x)


NONLINEAR = {
    "sine": (lambda x: bnp.sin(x), "sin is not linear"),
    "product": (lambda x: x * x, "mul is linear in each operand alone"),
    "dot": (lambda x: x @ (2.0 * x), "dot_general is linear in each operand alone"),
    "floor": (lambda x: bnp.floor(x), "floor is not linear"),
    "abs": (lambda x: abs(x) + x, "abs"),
    "max": (lambda x: x.max(), "reduce_max"),
    "denominator": (lambda x: 1.0 / x, "div is not linear in operand 1"),
    "in jit": (lambda x: jitted_sine(x) * 2.0, "sin"),
    "in scan": (lambda x: scan(lambda c, a: (c * a, c), x[0], x)[0], "scan|mul"),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_what_is_not_linear_is_named_with_its_line(name):
    f, says = NONLINEAR[name]
    with pytest.raises(errors.GradError, match="not linear") as info:
        linear_transpose(f, draw(3))

    assert re.search(says, str(info.value)), str(info.value)
    assert "test_linear_transpose.py" in info.value.where and info.value.fix


ERRORS = {
    "no function": (lambda: linear_transpose(3, draw(3)), "takes a function"),
    "no array": (lambda: linear_transpose(lambda x: x, "a"), "argument x"),
    "mixed": (lambda: linear_transpose(lambda x: x.astype("float64"), arr([1], np.int32)), "integers"),
    "structure": (lambda: linear_transpose(lambda x: x, draw(3))((draw(3),)), "structure"),
    "shape": (lambda: linear_transpose(lambda x: {"y": x}, draw(3))({"y": draw(2)}), r"cotangent\['y'\]"),
    "not an array": (lambda: linear_transpose(lambda x: x, draw(3))("a"), "cotangent"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, says = ERRORS[name]
    with pytest.raises(errors.BlufuncError, match=says) as info:
        call()
    assert "test_linear_transpose.py" in info.value.where


@pytest.mark.peer
def test_against_jax():
    import jax

    f = lambda np_: lambda x, y: (np_.concatenate([x, y])[::2] * 3.0, np_.cumsum(y))
    x, y = np.float32([1, 2, 3]), np.float32([4, 5])
    cts = (np.float32([1, -2, 0.5]), np.float32([2, 7]))
    got = linear_transpose(f(bnp), x, y)(cts)
    want = jax.linear_transpose(f(jax.numpy), x, y)(cts)
    for g, w in zip(got, want):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-6)
