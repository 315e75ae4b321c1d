"""Cheap branches become selects."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.rewrites.loops.branches_to_selects import with_selects
from tests.kernels.backends.cuda.test_program import on, same, uniform

CASES = (
    lambda x: bnp.cumsum(x),
    lambda x: x,
    lambda x: bnp.broadcast_to(x.max(), x.shape),
    lambda x: x * 0 + 2,
)


def selected(fun, *args, most=1 << 18):
    traced = bf.make_jaxpr(fun)(*args)
    return [e.prim.name for e in with_selects(simplify(getattr(traced, "jaxpr", traced)), {}, most).eqns]


def test_cheap_branches_are_selects():
    names = selected(lambda k, x: lax.switch(k, CASES, x), np.int32(1), uniform(16))
    assert "cond" not in names and names.count("select") == 3


@pytest.mark.parametrize(
    "fun, size",
    [
        (lambda k, x: lax.switch(k, CASES, x), 1 << 18),
        (lambda k, x: lax.cond(k, lambda x: x @ x, lambda x: x * 2, x), 16),
        (
            lambda k, x: lax.cond(k, lambda x: lax.fori_loop(0, 99, lambda i, y: bnp.sin(y), x), bnp.cos, x),
            16,
        ),
        (lambda k, x: lax.cond(k, lambda x: (bf.debug.print("{}", x), x)[1], bnp.cos, x), 16),
    ],
    ids=["large", "a product", "a loop", "an effect"],
)
def test_others_stay(fun, size):
    x = uniform(size) if size > 16 else uniform(16, 16)
    assert "cond" in selected(fun, np.int32(1), x)


@pytest.mark.parametrize("index", [-3, 0, 1, 2, 3, 9])
def test_the_index_is_clamped(index, cuda):
    f = bf.jit(lambda k, x: lax.switch(k, CASES, x))
    x = uniform(16)
    same(f(*on(cuda, np.int32(index), x)), f(np.int32(index), x))


def test_branches_that_are_not_taken_give_no_nan(cuda):
    """Their values are computed, and dropped; so are those of the gradient."""
    f = bf.jit(
        bf.value_and_grad(lambda x: lax.cond(x[0] > 0, lambda x: bnp.log(x).sum(), lambda x: x.sum(), x))
    )
    x = uniform(5) * 0 - 1
    (there,) = on(cuda, x)
    same(f(there), f(x))
