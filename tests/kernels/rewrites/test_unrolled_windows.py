"""Reductions of windows as pointwise work, on an emulated device and on a real one."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from tests.kernels.backends.cuda.test_program import on, same

RNG = np.random.default_rng(0)
REDUCTIONS = {"sum": (0, lax.add), "max": (-np.inf, lax.max), "min": (np.inf, lax.min)}
CASES = {  # shape, window, strides, padding and dilations
    "2/2": ((2, 8, 8, 5), (1, 2, 2, 1), (1, 2, 2, 1), "VALID", {}),
    "3/2": ((2, 9, 8, 16), (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)), {}),
    "3/2, features first": ((2, 3, 9, 8), (1, 1, 3, 3), (1, 1, 2, 2), "SAME", {}),
    "overlap": ((2, 9, 10, 3), (1, 3, 3, 1), (1, 1, 1, 1), "SAME", {}),
    "7 x 7": ((2, 15, 14, 3), (1, 7, 7, 1), (1, 2, 1, 1), "SAME", {}),
    "whole axes": ((3, 9, 10, 4), (1, 9, 10, 1), (1, 1, 1, 1), "VALID", {}),
    "parts": ((3, 40, 5), (1, 10, 1), (1, 10, 1), "VALID", {}),
    "long windows": ((3, 100), (1, 45), (1, 2), ((0, 0), (44, 3)), {}),
    "long, dilated windows": ((200, 2), (37, 1), (3, 1), ((9, 9), (0, 0)), {"window_dilation": (4, 1)}),
    "no windows": ((2, 3), (1, 5), (1, 1), "VALID", {}),
    "padding alone": ((2, 3), (1, 2), (1, 2), ((0, 0), (5, 5)), {}),
    "cropped": ((6, 9), (2, 3), (1, 2), ((-1, 2), (1, -2)), {}),
    "dilations": ((5, 9), (2, 3), (1, 2), ((1, 2), (3, 0)), {"base_dilation": (2, 3), "window_dilation": (3, 2)}),
    "gaps": ((4, 5), (1, 1), (1, 1), "VALID", {"base_dilation": (1, 3)}),
    "identity": ((4, 5), (1, 1), (1, 1), "VALID", {}),
}  # fmt: skip


def reduction(kind, window, strides, padding, options):
    start, combine = REDUCTIONS[kind]
    return lambda x: lax.reduce_window(x, start, combine, window, strides, padding, **options)


def program(kind, *slide):
    """A reduction with its derivatives in both modes."""
    fun = reduction(kind, *slide)

    def run(x, t, weight):
        y, tangent = bf.jvp(fun, (x,), (t,))
        (back,) = bf.vjp(fun, x)[1](y * weight.astype(y.dtype))
        return y, tangent, back

    return run


def operands(shape, dtype):
    """Few distinct values, so that extrema have ties."""
    x = RNG.integers(-4, 5, shape).astype(np.float32)
    return [bnp.asarray(a, dtype) for a in (x, RNG.integers(-3, 4, shape), np.float32(0.5))]


def check(fun, args, device):
    want = fun(*args)  # one operation after the other, by NumPy
    same(bf.jit(fun)(*on(device, *args)), want)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("name", CASES)
def test_cases(name, kind, cuda):
    shape, *slide = CASES[name]
    check(program(kind, *slide), operands(shape, "float32"), cuda)
