"""Uniform samples: bits, reals in an interval, integers, booleans, signs.

A face, above ``random.arguments``; every other sampler draws through these. Functions whose name ends in an underscore
are samplers for samplers: their arguments are checked, and they use no key up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import random_bits as rb
from blufunc.core.ops import shape as shape_ops
from blufunc.random.arguments import (
    Shape,
    broadcast,
    float_dtype,
    fresh_key,
    integer_dtype,
    mode_of,
    new_keys,
    parameter,
    shape_of,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array


def bits(key: ArrayLike, shape: Shape = (), dtype: DTypeLike | None = None) -> Array:
    """Random bits as unsigned integers of ``dtype``, uint32 by default."""
    default = dtypes.uint64 if dtypes.is_wide() else dtypes.uint32
    dtype = default if dtype is None else dtypes.as_dtype(dtype)
    if not dtypes.is_unsigned(dtype) or dtypes.is_narrow(dtype):
        raise errors.DtypeError(
            f"bits come as unsigned integers, not as {dtypes.short_name(dtype)}.",
            where=source.here(),
            fix="dtype='uint32', or randint for signed and narrower ones",
        )
    return bits_(fresh_key("bits", key), dtype.itemsize * 8, shape_of("bits", shape))


def uniform(
    key: ArrayLike,
    shape: Shape = (),
    dtype: DTypeLike = float,
    minval: ArrayLike = 0.0,
    maxval: ArrayLike = 1.0,
) -> Array:
    """Samples from the uniform distribution on [minval, maxval).

    Random bits become the mantissa of a number in [1, 2), from which 1 is subtracted.

    Args:
      minval, maxval: real numbers or arrays that broadcast to ``shape``; the result is differentiable in them.
    """
    key, shape, dtype = fresh_key("uniform", key), shape_of("uniform", shape), float_dtype("uniform", dtype)
    minval = parameter("uniform", "minval", minval, shape, dtype)
    maxval = parameter("uniform", "maxval", maxval, shape, dtype)
    return uniform_(key, shape, dtype, minval, maxval)


def uniform_(key: Any, shape: tuple[int, ...], dtype: np.dtype, minval: Any, maxval: Any) -> Any:
    """``uniform`` of checked arguments."""
    info = dtypes.finfo(dtype)
    # bfloat16 and float8 have fewer than 8 bits of mantissa: random bytes are enough
    drawn = 8 if info.nmant < 8 else info.bits
    unsigned = np.dtype(f"u{dtype.itemsize}")
    mantissa = ops.convert(bits_(key, drawn, shape), unsigned)
    mantissa = ops.shift_right_logical(mantissa, scalar(drawn - info.nmant, unsigned))
    one = int(np.ones((), dtype).view(unsigned))
    floats = ops.sub(ops.bitcast(ops.bitwise_or(mantissa, scalar(one, unsigned)), dtype), scalar(1, dtype))
    # rounding may give less than minval
    return ops.max(minval, ops.add(ops.mul(floats, ops.sub(maxval, minval)), minval))


def unit(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Uniform samples of [0, 1)."""
    return uniform_(key, shape, dtype, scalar(0, dtype), scalar(1, dtype))


def bits_(key: Any, width: int, shape: tuple[int, ...]) -> Any:
    """``bits`` of checked arguments."""
    return rb.random_bits_p.bind(key, shape=shape, bit_width=width)


def randint(
    key: ArrayLike, shape: Shape, minval: ArrayLike, maxval: ArrayLike, dtype: DTypeLike = int
) -> Array:
    """Uniform integers in [minval, maxval); ``minval`` where the interval is empty.

    Twice as many bits as ``dtype`` has are taken modulo the size of the interval, so the bias is at most
    about ``(maxval - minval) / 2**64`` for int32. Dtypes narrower than 32 bits are drawn as int32.

    Args:
      minval, maxval: ints, or arrays that broadcast to ``shape``; limited to the range of ``dtype``. Floats are
        truncated to integers.
    Raises:
      DtypeError: ``dtype`` is not an integer, or ``minval`` or ``maxval`` not real.
      ShapeError: ``minval`` or ``maxval`` does not broadcast to ``shape``.
    """
    key, shape = fresh_key("randint", key), shape_of("randint", shape)
    return randint_(key, shape, minval, maxval, integer_dtype("randint", dtype))


def randint_(key: Any, shape: tuple[int, ...], minval: Any, maxval: Any, dtype: np.dtype) -> Any:
    """``randint`` of a checked key, shape and dtype."""
    sampled = dtype if dtype.itemsize >= 4 else dtypes.int32
    low, _ = _bound("minval", minval, shape, sampled, dtype)
    high, beyond = _bound("maxval", maxval, shape, sampled, dtype)
    width = sampled.itemsize * 8
    unsigned = np.dtype(f"u{sampled.itemsize}")

    upper, lower = (bits_(k, width, shape) for k in new_keys(key))
    empty = ops.le(high, low)
    span = ops.select(empty, scalar(1, unsigned), ops.convert(ops.sub(high, low), unsigned))
    if beyond is not None:  # maxval is one more than sampled can hold; a full range wraps to a span of 0
        grown = ops.select(ops.logical_and(beyond, ops.gt(high, low)), ops.add(span, 1), span)
        span, full_range = grown, ops.eq(grown, 0)
        divisor = ops.select(full_range, scalar(1, unsigned), span)
    else:
        full_range, divisor = None, span

    def modulo(x):
        r = ops.rem(x, divisor)
        return r if full_range is None else ops.select(full_range, x, r)

    # (a * 2**width + b) % span without wider integers, 2**width % span being (2**(width/2) % span)**2 % span
    power = modulo(scalar(2 ** (width // 2), unsigned))
    power = modulo(ops.mul(power, power))
    offset = modulo(ops.add(ops.mul(modulo(upper), power), modulo(lower)))
    return ops.convert(ops.add(low, ops.convert(offset, sampled)), dtype)


def _bound(what: str, x: Any, shape: tuple[int, ...], sampled: np.dtype, dtype: np.dtype) -> tuple[Any, Any]:
    """A bound of ``randint`` in ``sampled``; and where it was too large, or None."""
    info, limits = dtypes.iinfo(sampled), dtypes.iinfo(dtype)
    # a narrow dtype may have the exclusive bound one above its range
    least, most = (limits.min, limits.max + 1) if sampled != dtype else (info.min, info.max)
    if isinstance(x, (int, np.integer)):
        x = int(x)
        value = least if x < least else most if x > most else x
        beyond = scalar(True, dtypes.bool_) if x > info.max and sampled == dtype else None
        return scalar(value, sampled), beyond
    x = lift(x, what)
    if not dtypes.is_integer(x.dtype):
        if not dtypes.is_floating(x.dtype):
            raise errors.DtypeError(
                f"randint takes a real {what}, not {x.aval}.", where=source.here(), fix=f"int({what})"
            )
        x = ops.convert(x, dtypes.as_dtype(int))
    x = broadcast("randint", what, x, shape)
    own = dtypes.iinfo(x.dtype)
    beyond = None
    if sampled == dtype and own.max > info.max:
        beyond = ops.gt(x, scalar(info.max, x.dtype))
    low, high = (least if least > own.min else None), (most if most < own.max else None)
    if low is not None or high is not None:
        low = own.min if low is None else low
        high = own.max if high is None else high
        x = ops.clamp(scalar(low, x.dtype), x, scalar(high, x.dtype))
    return ops.convert(x, sampled), beyond


def bernoulli(key: ArrayLike, p: ArrayLike = 0.5, shape: Shape | None = None, mode: str = "low") -> Array:
    """Booleans that are True with probability ``p``.

    Args:
      p: a float, or a floating array; samples are drawn in its dtype.
      shape: of the result, which ``p`` broadcasts to; by default that of ``p``.
      mode: ``"high"`` compares with twice the digits, for probabilities below the resolution of their dtype.
    Raises:
      DtypeError: ``p`` is not floating.
    """
    name = "bernoulli"
    key, p = fresh_key(name, key), lift(p, "p")
    if not dtypes.is_floating(p.dtype):
        raise errors.DtypeError(
            f"bernoulli takes a floating probability p, not {p.aval}.", where=source.here(), fix="p=0.5"
        )
    shape = p.shape if shape is None else shape_of(name, shape)
    p = broadcast(name, "p", p, shape)
    if mode_of(name, mode, ("high", "low")) == "low":
        return ops.lt(unit(key, shape, p.dtype), p)
    first, second = two_units(key, shape, p.dtype)
    rest = ops.mul(second, scalar(2.0 ** -dtypes.finfo(p.dtype).nmant, p.dtype))
    return ops.lt(rest, ops.sub(p, first))


def two_units(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> list[Any]:
    """Two arrays of uniform samples of [0, 1)."""
    both = unit(key, (2, *shape), dtype)
    return [shape_ops.index_in_dim(both, i, 0, False) for i in range(2)]


def rademacher(key: ArrayLike, shape: Shape = (), dtype: DTypeLike = int) -> Array:
    """1 or -1, with equal probabilities.

    Args:
      dtype: integer, floating or complex.
    """
    key, shape = fresh_key("rademacher", key), shape_of("rademacher", shape)
    dtype = dtypes.default(int) if dtype is None else dtypes.as_dtype(dtype)
    if not dtypes.is_numeric(dtype) or dtypes.is_unsigned(dtype):
        raise errors.DtypeError(
            f"rademacher gives numbers with a sign, not {dtypes.short_name(dtype)}.",
            where=source.here(),
            fix="dtype='int32'",
        )
    return signs(key, shape, dtype)


def signs(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """``rademacher`` of checked arguments."""
    heads = ops.lt(unit(key, shape, dtypes.float32), scalar(0.5, dtypes.float32))
    return ops.select(heads, scalar(1, dtype), scalar(-1, dtype))
