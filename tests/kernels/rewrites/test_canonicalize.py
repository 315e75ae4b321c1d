"""Matmuls that sum nothing, as elementwise products."""

import numpy as np
import pytest

import blufunc as bf
from blufunc import lax
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.rewrites.canonicalize import canonicalize

X, Y = (np.random.default_rng(0).standard_normal(n).astype(np.float32) * 3 for n in (15, 7))


@pytest.mark.parametrize(
    ("of", "to", "elementwise"),
    [
        ("float32", "float32", True),
        ("bfloat16", "float32", True),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
    ],
)
def test_an_outer_product_is_rounded_once(of, to, elementwise, monkeypatch):
    def fun(x, y):
        return lax.dot_general(x, y, (((), ()), ((), ())), preferred_element_type=to)

    x, y = (from_numpy(a).astype(of) for a in (X, Y))
    made = canonicalize(simplify(bf.jit(fun).trace(x, y).jaxpr), {}, False)
    assert ("dot_general" not in [e.prim.name for e in made.eqns]) == elementwise
    monkeypatch.setattr(config, "host_compiler", "always")
    np.testing.assert_array_equal(bf.jit(fun)(x, y), fun(x, y))
