"""Reductions of windows as pointwise work, on emulated and real devices."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir import dtypes
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
    "repeats": ((3, 5), (2, 3), (1, 1), ((1, 1), (2, 2)), {"base_dilation": (2, 3)}),
    "repeats, cropped": ((3, 5), (2, 3), (1, 1), ((0, 1), (2, -4)), {"base_dilation": (2, 3)}),
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


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("name", CASES)
def test_cases(name, kind, cuda):
    shape, *slide = CASES[name]
    check(program(kind, *slide), operands(shape, "float32"), cuda)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int32", "uint8"])
def test_dtypes(dtype, cuda):
    shape, *slide = CASES["3/2"]
    x = operands(shape, dtype)[0]
    for kind in ("sum", "max", "min"):
        start = {"sum": 0, "max": lowest(dtype), "min": highest(dtype)}[kind]
        combine = REDUCTIONS[kind][1]
        fun = lambda x, combine=combine, start=start: lax.reduce_window(x, start, combine, *slide[:3])
        check(fun, [x], cuda)


def lowest(dtype):
    dtype = np.dtype(dtype) if dtype != "bfloat16" else dtypes.bfloat16
    return np.iinfo(dtype).min if dtypes.is_integer(dtype) else -np.inf


def highest(dtype):
    dtype = np.dtype(dtype) if dtype != "bfloat16" else dtypes.bfloat16
    return np.iinfo(dtype).max if dtypes.is_integer(dtype) else np.inf


def with_special(shape):
    x = RNG.standard_normal(shape).astype(np.float32)
    x[0, 1:3] = np.nan
    x[2, :5] = -np.inf
    x[4, 3:] = np.inf
    return x


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("window", [(2, 2), (5, 9)])
def test_nan_and_infinity(kind, window, cuda):
    fun = reduction(kind, window, (1, 1), "SAME", {})
    x = with_special((8, 10))
    check(lambda x: (fun(x), bf.vjp(fun, x)[1](x + 1)[0]), [np.nan_to_num(x, nan=7.0)], cuda)
    check(fun, [x], cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("name", CASES)
def test_cases_on_a_device(name, kind, dtype):
    shape, *slide = CASES[name]
    fun, args = program(kind, *slide), operands(shape, dtype)
    want, jitted = fun(*args), bf.jit(fun)
    for _ in range(3):
        same(jitted(*on(bf.devices("cuda")[0], *args)), want, 1e-5 if dtype == "float32" else 2e-2)


def test_one_kernel_for_a_pool_and_its_neighbours(fake, cuda):
    shape, *slide = CASES["3/2"]
    pool = reduction("max", *slide)
    (x,) = on(cuda, np.asarray(operands(shape, "float32")[0]))
    jitted = bf.jit(lambda x: bnp.maximum(pool(x) * 2, 0))
    jitted(x)
    before = fake.launches
    jitted(x)
    assert fake.launches == before + 1
