"""Continuous distributions whose samples are functions of uniform or normal ones.

A face, above ``random.uniforms``. Functions whose name ends in an underscore are samplers for samplers: their arguments
are checked, and they use no key up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.primitives import linear_ops
from blufunc.random.arguments import (
    Shape,
    float_dtype,
    fresh_key,
    mode_of,
    new_keys,
    parameters,
    shape_of,
)
from blufunc.random.uniforms import bits_, signs, two_units, uniform_, unit

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array


def normal(key: ArrayLike, shape: Shape = (), dtype: DTypeLike = float) -> Array:
    """Samples from the standard normal distribution, by its inverse CDF.

    Args:
      dtype: floating or complex; of complex samples, real and imaginary part have variance 1/2.
    """
    key, shape = fresh_key("normal", key), shape_of("normal", shape)
    return normal_(key, shape, inexact_dtype("normal", dtype))


def inexact_dtype(name: str, dtype: Any) -> np.dtype:
    """A floating or complex dtype; float32 for None."""
    dtype = dtypes.default(float) if dtype is None else dtypes.as_dtype(dtype)
    return dtype if dtypes.is_complex(dtype) else float_dtype(name, dtype)


def normal_(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """``normal`` of checked arguments."""
    if dtypes.is_complex(dtype):
        real = np.dtype(f"f{dtype.itemsize // 2}")
        re, im = (normal_(k, shape, real) for k in new_keys(key))
        return ops.div(ops.complex_(re, im), scalar(math.sqrt(2), dtype))
    above_minus_one = np.nextafter(np.asarray(-1, dtype), np.asarray(0, dtype))  # erf_inv(-1) is -inf
    u = uniform_(key, shape, dtype, scalar(float(above_minus_one), dtype), scalar(1, dtype))
    return ops.mul(scalar(math.sqrt(2), dtype), ops.erf_inv(u))


def truncated_normal(
    key: ArrayLike, lower: ArrayLike, upper: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = float
) -> Array:
    """Samples from the standard normal distribution truncated to (lower, upper).

    They come from the inverse of the distribution function in ``dtype``, which is 1 to all digits far from 0: an
    interval in the tails (from about 5 on, in float32) gets few values, in the end only those next to its ends.

    Args:
      lower, upper: real scalars or arrays that broadcast together, and to ``shape``.
    """
    name = "truncated_normal"
    key, dtype = fresh_key(name, key), float_dtype(name, dtype)
    shape, (lower, upper) = parameters(name, shape, dtype, lower=lower, upper=upper)
    root2 = scalar(math.sqrt(2), dtype)
    u = uniform_(key, shape, dtype, ops.erf(ops.div(lower, root2)), ops.erf(ops.div(upper, root2)))
    least = ops.nextafter(ops.stop_gradient(lower), scalar(math.inf, dtype))
    most = ops.nextafter(ops.stop_gradient(upper), scalar(-math.inf, dtype))
    return ops.clamp(least, ops.mul(root2, ops.erf_inv(u)), most)


def exponential(key: ArrayLike, shape: Shape = (), dtype: DTypeLike = float) -> Array:
    """Samples from the exponential distribution of rate 1."""
    key, shape = fresh_key("exponential", key), shape_of("exponential", shape)
    return exponential_(key, shape, float_dtype("exponential", dtype))


def exponential_(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """``exponential`` of checked arguments."""
    return -ops.log1p(-unit(key, shape, dtype))


def gumbel(key: ArrayLike, shape: Shape = (), dtype: DTypeLike = float, mode: str | None = None) -> Array:
    """Samples from the standard Gumbel distribution: ``-log(-log(u))`` of uniform u.

    Args:
      mode: how far the upper tail reaches, which u near 1 gives. ``"low"``, the default: u has the digits of ``dtype``,
        and no float32 sample exceeds 16. ``"high"``: twice the digits, 32. ``"highest"``: as many as 64 bits give, 44;
        of float32 only, for other dtypes it is ``"high"``.
    """
    key, shape = fresh_key("gumbel", key), shape_of("gumbel", shape)
    return gumbel_(key, shape, float_dtype("gumbel", dtype), mode_of("gumbel", mode, GUMBEL_MODES))


GUMBEL_MODES = ("highest", "high", "low")


def gumbel_(key: Any, shape: tuple[int, ...], dtype: np.dtype, mode: str = "low") -> Any:
    """``gumbel`` of checked arguments."""
    info = dtypes.finfo(dtype)
    if mode == "low":
        u = uniform_(key, shape, dtype, scalar(float(info.tiny), dtype), scalar(1, dtype))
        return -ops.log(-ops.log(u))
    if mode == "highest" and dtype == dtypes.float32:
        return _gumbel_of_64_bits(bits_(key, 32, (2, *shape)))
    high, low = two_units(key, shape, dtype)
    # where u is small its complement, whose logarithm is taken, has digits to spare
    x = ops.select(high >= 0.5, high, high + low * 2.0**-info.nmant + float(info.tiny))
    return -ops.log(-ops.log1p(-x))


def _gumbel_of_64_bits(words: Any) -> Any:
    """From two uint32 per sample, high word first: u is their fixed-point number."""
    high, low = (shape_ops.index_in_dim(words, i, 0, False) for i in range(2))
    one = scalar(1, dtypes.uint32)
    # the two's complement of both words is 1 - u
    carry = ops.convert(ops.eq(low, scalar(0, dtypes.uint32)), dtypes.uint32)
    complement = ops.add(ops.bitwise_not(high), carry), ops.add(ops.bitwise_not(low), one)
    is_small = ops.lt(high, scalar(2**31, dtypes.uint32))
    x = _fraction(*(ops.select(is_small, a, b) for a, b in zip((high, low), complement, strict=True)))
    return ops.select(is_small, -ops.log(-ops.log1p(-x)), -ops.log(-ops.log(x)))


def _fraction(high: Any, low: Any) -> Any:
    """``(high * 2**32 + low) / 2**64`` in float32, truncated; for results below 1/2."""
    upper = _leading_zeros(high)
    word = scalar(32, dtypes.uint32)
    none = ops.eq(upper, word)
    shift = ops.select(none, _leading_zeros(low), upper)
    # a shift by 32 gives 0: nothing comes from the low word if all of the high one is needed
    whole = ops.select(
        none,
        ops.shift_left(low, shift),
        ops.bitwise_or(ops.shift_left(high, shift), ops.shift_right_logical(low, ops.sub(word, shift))),
    )
    mantissa = ops.bitwise_and(
        ops.shift_right_logical(whole, scalar(8, dtypes.uint32)), scalar(2**23 - 1, dtypes.uint32)
    )
    zeros = ops.select(none, ops.add(shift, word), shift)
    exponent = ops.shift_left(ops.sub(scalar(126, dtypes.uint32), zeros), scalar(23, dtypes.uint32))
    exponent = ops.bitwise_and(exponent, scalar(2**30 - 2**22, dtypes.uint32))
    return ops.bitcast(ops.bitwise_or(exponent, mantissa), dtypes.float32)


def _leading_zeros(x: Any) -> Any:
    for shift in (1, 2, 4, 8, 16):
        x = ops.bitwise_or(x, ops.shift_right_logical(x, scalar(shift, dtypes.uint32)))
    return ops.sub(scalar(32, dtypes.uint32), ops.population_count(x))


# -- by inversion ----------------------------------------------------------------------------------


def laplace(key: ArrayLike, shape: Shape = (), dtype: DTypeLike = float) -> Array:
    """Samples from the Laplace distribution of location 0 and scale 1."""
    name = "laplace"
    key, shape, dtype = fresh_key(name, key), shape_of(name, shape), float_dtype(name, dtype)
    least = np.asarray(-1, dtype) + np.asarray(dtypes.finfo(dtype).epsneg, dtype)
    u = uniform_(key, shape, dtype, scalar(float(least), dtype), scalar(1, dtype))
    return ops.sign(u) * ops.log1p(-ops.abs(u))


def logistic(key: ArrayLike, shape: Shape = (), dtype: DTypeLike = float) -> Array:
    """Samples from the logistic distribution of location 0 and scale 1."""
    name = "logistic"
    key, shape, dtype = fresh_key(name, key), shape_of(name, shape), float_dtype(name, dtype)
    u = uniform_(key, shape, dtype, scalar(float(dtypes.finfo(dtype).tiny), dtype), scalar(1, dtype))
    return ops.log(u) - ops.log1p(-u)


def cauchy(key: ArrayLike, shape: Shape = (), dtype: DTypeLike = float) -> Array:
    """Samples from the standard Cauchy distribution."""
    name = "cauchy"
    key, shape, dtype = fresh_key(name, key), shape_of(name, shape), float_dtype(name, dtype)
    u = uniform_(key, shape, dtype, scalar(float(dtypes.finfo(dtype).eps), dtype), scalar(1, dtype))
    return ops.tan((u - 0.5) * math.pi)


def pareto(key: ArrayLike, b: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = float) -> Array:
    """Samples from the Pareto distribution, of density ``b * x**(-b - 1)``, x >= 1.

    Args:
      b: the shape parameter, positive.
    """
    key, dtype = fresh_key("pareto", key), float_dtype("pareto", dtype)
    shape, (b,) = parameters("pareto", shape, dtype, b=b)
    return ops.exp(exponential_(key, shape, dtype) / b)


def weibull_min(
    key: ArrayLike,
    scale: ArrayLike,
    concentration: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike = float,
) -> Array:
    """Samples from the Weibull distribution: ``scale * e**(1 / concentration)``.

    ``e`` is exponential.

    Args:
      scale, concentration: positive values.
    """
    name = "weibull_min"
    key, dtype = fresh_key(name, key), float_dtype(name, dtype)
    shape, (scale, concentration) = parameters(name, shape, dtype, scale=scale, concentration=concentration)
    return ops.pow(exponential_(key, shape, dtype), 1.0 / concentration) * scale


def rayleigh(key: ArrayLike, scale: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = float) -> Array:
    """Samples from the Rayleigh distribution.

    They are lengths of vectors of two normal numbers of deviation ``scale``.

    Args:
      scale: positive values.
    """
    key, dtype = fresh_key("rayleigh", key), float_dtype("rayleigh", dtype)
    shape, (scale,) = parameters("rayleigh", shape, dtype, scale=scale)
    return scale * ops.sqrt(ops.log(unit(key, shape, dtype)) * -2.0)


def triangular(
    key: ArrayLike,
    left: ArrayLike,
    mode: Any,
    right: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike = float,
) -> Array:
    """Samples from the triangular distribution.

    Its density rises from ``left`` to ``mode`` and falls to ``right``.

    Args:
      left, mode, right: ascending values.
    """
    name = "triangular"
    key, dtype = fresh_key(name, key), float_dtype(name, dtype)
    shape, (left, mode, right) = parameters(name, shape, dtype, left=left, mode=mode, right=right)
    u = unit(key, shape, dtype)
    width = right - left
    rising = ops.lt(u, (mode - left) / width)
    # a root of 0 has no derivative: each side takes the root of 1 where the other one holds
    below = ops.sqrt(ops.select(rising, u * width * (mode - left), scalar(1, dtype)))
    above = ops.sqrt(ops.select(rising, scalar(1, dtype), (1 - u) * width * (right - mode)))
    return ops.select(rising, left + below, right - above)


# -- from normal samples ---------------------------------------------------------------------------


def lognormal(
    key: ArrayLike, sigma: ArrayLike = 1.0, shape: Shape | None = None, dtype: DTypeLike = float
) -> Array:
    """Samples whose logarithm is normal, of mean 0 and deviation ``sigma``.

    Args:
      dtype: floating or complex.
    """
    key, dtype = fresh_key("lognormal", key), inexact_dtype("lognormal", dtype)
    shape, (sigma,) = parameters("lognormal", shape, dtype, sigma=sigma)
    return ops.exp(normal_(key, shape, dtype) * sigma)


def maxwell(key: ArrayLike, shape: Shape = (), dtype: DTypeLike = float) -> Array:
    """Samples from the Maxwell distribution: lengths of standard normal 3-vectors."""
    key, shape = fresh_key("maxwell", key), shape_of("maxwell", shape)
    return _maxwell(key, shape, float_dtype("maxwell", dtype))


def _maxwell(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return ops.sqrt(linear_ops.reduce_sum(ops.square(normal_(key, (*shape, 3), dtype)), (len(shape),)))


def double_sided_maxwell(
    key: ArrayLike, loc: ArrayLike, scale: ArrayLike, shape: Shape = (), dtype: DTypeLike = float
) -> Array:
    """Samples from the double-sided Maxwell distribution: with a random sign.

    They are multiplied by ``scale``, and ``loc`` is added.

    Args:
      loc, scale: values that broadcast together; the result is differentiable in them.
      shape: of the samples for each element of the parameters; the result has the shape ``shape`` followed by
        theirs. Without ``shape`` and with parameters that have axes, JAX repeats these axes; this function does not.
    """
    name = "double_sided_maxwell"
    key, dtype = fresh_key(name, key), float_dtype(name, dtype)
    extra = shape_of(name, shape)
    own, (loc, scale) = parameters(name, None, dtype, loc=loc, scale=scale)
    shape = (*extra, *own)
    first, second = new_keys(key)
    drawn = signs(second, shape, dtype) * _maxwell(first, shape, dtype)
    return drawn * linear_ops.broadcast_to(scale, shape) + linear_ops.broadcast_to(loc, shape)


def wald(key: ArrayLike, mean: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = float) -> Array:
    """Samples from the Wald (inverse Gaussian) distribution of scale 1.

    By the transformation of J. R. Michael, W. R. Schucany and R. W. Haas (The American Statistician 30, 1976).

    Args:
      mean: positive values.
    """
    key, dtype = fresh_key("wald", key), float_dtype("wald", dtype)
    shape, (mean,) = parameters("wald", shape, dtype, mean=mean)
    first, second = new_keys(key)
    y = ops.square(normal_(first, shape, dtype))
    u = unit(second, shape, dtype)
    square = ops.square(mean)
    x = mean + square * y / 2 - mean / 2 * ops.sqrt(4 * mean * y + square * ops.square(y))
    return ops.select(ops.le(u, mean / (mean + x)), x, square / x)
