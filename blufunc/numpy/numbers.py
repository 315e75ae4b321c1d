"""Properties of numbers: divisors, bits, exponents, spacing; and Bessel's i0.

Face over ``elementwise`` and ``core.ops.integers``. Floats are taken apart through their bits, so exactly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import only_none
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import integers
from blufunc.core.ops import shape as shape_ops
from blufunc.core.ops.special import bessel_i0e
from blufunc.core.primitives.linear_ops import reduce_sum, reshape
from blufunc.numpy import elementwise as ew
from blufunc.numpy.manipulation import moveaxis
from blufunc.numpy.promotion import (
    as_value,
    cast,
    constant,
    constant_like,
    inexact,
    line_axis,
    match_shapes,
    meet,
    static_int,
    stretch,
    value_of,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

# -- integers --------------------------------------------------------------------------------------


def _integers(name: str, x: Any, y: Any) -> tuple[Array, Array]:
    x, y = meet(x, y, name)
    if not dtypes.is_integer(x.aval.dtype):
        raise errors.DtypeError(
            f"{name} takes integers, not {x.aval}.", where=source.here(), fix="x.astype('int32')"
        )
    return x, y


def gcd(x1: ArrayLike, x2: ArrayLike) -> Array:
    """Greatest common divisors of integers, elementwise; 0 of 0 and 0."""
    return integers.gcd_p.bind(*_integers("gcd", x1, x2))


def lcm(x1: ArrayLike, x2: ArrayLike) -> Array:
    """Least common multiples of integers, elementwise; 0 if one of them is."""
    x, y = _integers("lcm", x1, x2)
    common = integers.gcd_p.bind(x, y)
    safe = ops.select(ops.eq(common, 0), constant_like(1, common), common)
    return ops.abs(ops.mul(x, ops.div(y, safe)))


def packbits(a: ArrayLike, axis: int | None = None, bitorder: str = "big") -> Array:
    """Pack each eight booleans (or x != 0) along an axis into a uint8, zero-padded.

    ``bitorder='big'`` makes the first the highest bit, ``'little'`` the lowest. The axis None means ``a`` flattened.
    """
    x = as_value(a, "packbits")
    if not (dtypes.is_integer(x.aval.dtype) or dtypes.is_bool(x.aval.dtype)):
        raise errors.DtypeError(f"packbits of {x.aval}.", where=source.here(), fix="x != 0")
    weights = _bit_weights("packbits", bitorder)
    x, d = line_axis(x, axis, "packbits")
    bits = moveaxis(ops.convert(ew.truth(x, "packbits"), dtypes.uint8), d, -1)
    *rest, n = bits.aval.shape
    fill = -n % 8
    bits = shape_ops.pad(bits, constant(0, dtypes.uint8), [*[(0, 0, 0)] * len(rest), (0, fill, 0)])
    groups = reshape(bits, (*rest, (n + fill) // 8, 8))
    return moveaxis(reduce_sum(ops.mul(groups, stretch(weights, groups.aval.shape)), (len(rest) + 1,)), -1, d)


def unpackbits(
    a: ArrayLike, axis: int | None = None, count: int | None = None, bitorder: str = "big"
) -> Array:
    """Unpack uint8 into eight uint8 bits each along an axis: reverses ``packbits``.

    ``count`` bits are returned, padded by zeros or truncated; a negative count is the number of bits to omit.
    """
    x = as_value(a, "unpackbits")
    if x.aval.dtype != dtypes.uint8:
        raise errors.DtypeError(
            f"unpackbits takes uint8, not {x.aval}.", where=source.here(), fix="x.astype('uint8')"
        )
    weights = _bit_weights("unpackbits", bitorder)
    x, d = line_axis(x, axis, "unpackbits")
    lines = moveaxis(x, d, -1)
    *rest, n = lines.aval.shape
    set_ = ew.not_equal(
        ew.bitwise_and(reshape(lines, (*rest, n, 1)), reshape(weights, (*[1] * (len(rest) + 1), 8))), 0
    )
    bits = reshape(ops.convert(set_, dtypes.uint8), (*rest, 8 * n))
    if count is not None:
        size = static_int(count, "unpackbits", "count")
        size = size if size >= 0 else 8 * n + size
        if size < 0:
            raise errors.ValueRangeError(
                f"unpackbits: count={count} of {8 * n} bits.", where=source.here(), fix="leave out fewer"
            )
        widths = [*[(0, 0, 0)] * len(rest), (0, size - 8 * n, 0)]
        bits = shape_ops.pad(bits, constant(0, dtypes.uint8), widths)
    return moveaxis(bits, -1, d)


def _bit_weights(name: str, bitorder: Any) -> Array:
    if bitorder not in ("big", "little"):
        raise errors.ValueRangeError(
            f"{name}: bitorder is {bitorder!r:.60}.", where=source.here(), fix="use 'big' or 'little'"
        )
    weights = 2 ** np.arange(8, dtype=np.uint8)
    return from_numpy(weights[::-1] if bitorder == "big" else weights)


# -- floats ----------------------------------------------------------------------------------------

_LAYOUT = {
    dtypes.float16: (dtypes.int16, 10, 15),
    dtypes.bfloat16: (dtypes.int16, 7, 127),
    dtypes.float32: (dtypes.int32, 23, 127),
    dtypes.float64: (dtypes.int64, 52, 1023),
}
"""Per float dtype: integer of its width, fraction bits, and exponent bias."""


def _real(name: str, x: Any) -> Array:
    x = inexact(x, name)
    if x.aval.dtype not in _LAYOUT:
        raise errors.DtypeError(
            f"{name} takes real numbers of 16 bits or more, not {x.aval}.",
            where=source.here(),
            fix="take the real part, or convert to float32",
        )
    return x


def _power_of_two(exponent: Array, dtype: np.dtype) -> Array:
    """2 to the power of integers, exactly, where that is a normal number."""
    bits, fraction, bias = _LAYOUT[dtype]
    biased = ops.convert(ops.add(exponent, bias), bits)
    return ops.bitcast(ops.shift_left(biased, constant(fraction, bits)), dtype)


def frexp(x: ArrayLike, /) -> tuple[Array, Array]:
    """``(m, e)`` with ``x == m * 2**e`` and ``0.5 <= |m| < 1``; e is int32.

    Of 0, infinities and NaN, m is x and e is 0.
    """
    x = _real("frexp", x)
    dtype = x.aval.dtype
    bits, fraction, bias = _LAYOUT[dtype]
    # subnormal numbers are made normal first
    least = constant(float(dtypes.finfo(dtype).tiny), dtype)
    small = ops.lt(ops.abs(x), least)
    lift = fraction + 1
    normal = ops.select(small, ops.mul(x, constant(2.0**lift, dtype)), x)
    mask = (1 << (8 * dtype.itemsize - 1 - fraction)) - 1
    biased = ops.bitwise_and(
        ops.shift_right_logical(ops.bitcast(normal, bits), constant(fraction, bits)), mask
    )
    exponent = ops.sub(ops.convert(biased, dtypes.int32), bias - 1)
    plain = ops.bitwise_or(ops.eq(x, 0), ops.bitwise_not(ew.isfinite(x)))
    exponent = ops.select(plain, 0, exponent)
    # in two steps, since 2**-e is no normal number for the largest exponents
    step = ops.min(exponent, bias - 1)
    mantissa = ops.mul(normal, _power_of_two(ops.neg(step), dtype))
    mantissa = ops.mul(mantissa, _power_of_two(ops.sub(step, exponent), dtype))
    mantissa = ops.select(plain, x, mantissa)
    return mantissa, ops.select(
        ops.bitwise_and(small, ops.bitwise_not(plain)), ops.sub(exponent, lift), exponent
    )


def ldexp(x: ArrayLike, exponent: ArrayLike, /) -> Array:
    """``x * 2**exponent``, elementwise, as a float, rounded once."""
    e = value_of(exponent, "ldexp")
    if not (dtypes.is_integer(e.aval.dtype) or dtypes.is_bool(e.aval.dtype)):
        raise errors.DtypeError(
            f"ldexp takes an integer exponent, not {e.aval}.", where=source.here(), fix="x * 2**y for floats"
        )
    x, e = match_shapes("ldexp", _real("ldexp", x), ops.convert(e, dtypes.int32))
    dtype = x.aval.dtype
    if dtype.itemsize < 4:  # what float32 cannot hold exactly is beyond these anyway
        return cast(ldexp(cast(x, dtypes.float32), e), dtype)
    _, fraction, bias = _LAYOUT[dtype]
    # steps whose factors are normal; downwards each leaves the bits of a fraction, so that only the last one rounds
    down = bias - 1 - (fraction + 1)
    for _ in range(2):
        step = ops.clamp(-down, e, bias)
        far = ops.bitwise_or(ops.lt(e, -(bias - 1)), ops.gt(e, bias))
        step = ops.select(far, step, 0)
        x = ops.mul(x, _power_of_two(step, dtype))
        e = ops.sub(e, step)
    return ops.mul(x, _power_of_two(ops.clamp(-(bias - 1), e, bias), dtype))


def modf(x: ArrayLike, /, out: None = None) -> tuple[Array, Array]:
    """Fractional and integral part as floats, elementwise, with the sign of x."""
    only_none("modf", "out", out)
    x = _real("modf", x)
    whole = ops.trunc(x)
    rest = ops.select(ew.isinf(x), constant_like(0, x), ops.sub(x, whole))
    return ew.copysign(rest, x), whole


def spacing(x: ArrayLike, /) -> Array:
    """The distance from x to the next float away from 0, with the sign of x."""
    x = _real("spacing", x)
    outward = constant(math.inf, x.aval.dtype)
    away = ops.select(ops.lt(x, 0), ops.neg(outward), outward)
    return ops.sub(ops.nextafter(*match_shapes("spacing", x, away)), x)


# -- special functions -----------------------------------------------------------------------------


def i0(x: ArrayLike) -> Array:
    """The modified Bessel function of the first kind and order 0, as a float."""
    x = inexact(x, "i0")
    return ops.mul(bessel_i0e(x), ops.exp(ops.abs(x)))


def kaiser(M: int, beta: ArrayLike) -> Array:
    """The Kaiser window, ``i0(beta sqrt(1 - t**2)) / i0(beta)``, t from -1 to 1.

    It has M points and the dtype of ``beta``.
    """
    n = static_int(M, "kaiser", "M")
    if n < 0:
        raise errors.ValueRangeError(f"kaiser of {n} points.", where=source.here(), fix="use 0 or more")
    beta = inexact(beta, "kaiser")
    if beta.aval.ndim:
        raise errors.ShapeError(
            f"kaiser: beta is {beta.aval}.", where=source.here(), fix="a number; vmap for several"
        )
    t = np.linspace(-1, 1, n) if n != 1 else np.zeros(1)
    arc = from_numpy(np.sqrt(np.clip(1 - t * t, 0, 1)).astype(beta.aval.dtype))
    return ew.divide(i0(ops.mul(arc, beta)), i0(beta))
