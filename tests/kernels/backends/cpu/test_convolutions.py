"""Convolutions that are matmuls on the CPU: which, and their values."""

import numpy as np
import pytest

import blufunc as bf
from blufunc import lax
from blufunc.config import config
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.backends.cpu.convolutions import with_matmuls

RNG = np.random.default_rng(0)
draw = lambda *shape: RNG.normal(size=shape).astype(np.float32)
NHWC, NCHW, MIXED = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("HNCW", "IHOW", "CWNH")
CASES = {  # shapes of operands, layout, other parameters, and whether it is a matmul
    "1 x 1": ((2, 5, 6, 3), (1, 1, 3, 4), NHWC, {}, True),
    "1 x 1, features first": ((2, 3, 5, 6), (4, 3, 1, 1), NCHW, {}, True),
    "1 x 1, strides": ((2, 5, 6, 3), (1, 1, 3, 4), NHWC, {"window_strides": (2, 3)}, True),
    "1 x 1, another layout": ((5, 2, 3, 6), (3, 1, 4, 1), MIXED, {"window_strides": (2, 1)}, True),
    "the whole image": ((2, 5, 6, 3), (5, 6, 3, 4), NHWC, {}, True),
    "whole rows": ((2, 5, 6, 3), (5, 1, 3, 4), NHWC, {"window_strides": (3, 2)}, True),
    "whole, another layout": ((5, 2, 3, 6), (3, 5, 4, 1), MIXED, {}, True),
    "images of one element": ((2, 1, 1, 3), (1, 1, 3, 4), NHWC, {}, True),
    "one feature": ((2, 5, 6, 1), (1, 1, 1, 1), NHWC, {}, True),
    "3 x 3": ((2, 5, 6, 3), (3, 3, 3, 4), NHWC, {}, False),
    "padding": (
        (2, 5, 6, 3),
        (1, 1, 3, 4),
        NHWC,
        {"padding": ((1, 0), (2, -1)), "window_strides": (1, 2)},
        True,
    ),
    "holes": ((2, 5, 6, 3), (1, 1, 3, 4), NHWC, {"lhs_dilation": (2, 3), "padding": ((0, 1), (-2, 0))}, True),
    "part of the image": (
        (2, 5, 6, 3),
        (3, 3, 3, 4),
        NHWC,
        {"padding": ((-1, 0), (0, -1)), "rhs_dilation": (1, 2), "window_strides": (2, 1)},
        True,
    ),
    "one padded window": ((2, 3, 3, 3), (4, 4, 3, 4), NHWC, {"padding": ((1, 0), (0, 1))}, False),
    "groups": ((2, 5, 6, 4), (1, 1, 2, 4), NHWC, {"feature_group_count": 2}, False),
}


def program(name):
    *_, layout, options, _ = CASES[name]
    options = {"window_strides": (1, 1), "padding": "VALID", **options}
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=layout, **options)


@pytest.mark.parametrize("name", CASES)
def test_which_are_matmuls(name):
    shapes, expected = CASES[name][:2], CASES[name][-1]
    made = with_matmuls(simplify(bf.jit(program(name)).trace(*(draw(*s) for s in shapes)).jaxpr))
    assert any(e.prim.name == "dot_general" for e in made.eqns) == expected
    assert any(e.prim.name == "conv_general_dilated" for e in made.eqns) == (not expected)


def test_gradients_of_a_1_by_1_convolution_are_matmuls():
    loss = lambda x, w: (program("1 x 1, strides")(x, w) ** 2).sum()
    made = with_matmuls(
        simplify(bf.jit(bf.grad(loss, (0, 1))).trace(draw(2, 5, 6, 3), draw(1, 1, 3, 4)).jaxpr)
    )
    assert [e.prim.name for e in made.eqns if e.prim.kind == "contract"] == ["dot_general"] * 3


@pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")
@pytest.mark.parametrize("derive", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("name", CASES)
def test_values(name, derive, monkeypatch):
    x, w = (draw(*shape) for shape in CASES[name][:2])
    fun = program(name)
    if derive:
        fun = bf.grad(lambda x, w: (program(name)(x, w) ** 3).sum(), (0, 1))
    monkeypatch.setattr(config, "host_compiler", "never")
    want = bf.tree.leaves(bf.jit(lambda x, w: fun(x, w))(x, w))
    monkeypatch.setattr(config, "host_compiler", "always")
    for g, r in zip(bf.tree.leaves(bf.jit(fun)(x, w)), want, strict=True):
        np.testing.assert_allclose(g, r, rtol=1e-4, atol=1e-4 * max(1, np.abs(r).max()))


def test_a_replaced_convolution_stays():
    with bf.override(lax.conv_general_dilated_p, impl=lambda x, w, **params: x):
        jaxpr = simplify(bf.jit(program("1 x 1")).trace(draw(2, 5, 6, 3), draw(1, 1, 3, 4)).jaxpr)
        assert with_matmuls(jaxpr) is jaxpr
