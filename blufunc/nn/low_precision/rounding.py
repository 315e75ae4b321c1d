"""Rounding to the numbers of a format, exactly.

A face, above ``formats.py``. An element is scaled by a power of two that makes the last place of its number 1, rounded
to an integer, and scaled back: both scalings are exact. Nothing is a function that devices approximate.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax, random
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in
from blufunc.nn.low_precision.formats import MX, Format
from blufunc.nn.low_precision.scaling import power_of_two
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

ROUNDINGS = ("nearest", "stochastic")

_HALVES = 24
"""Bits of the random number that a remainder is compared with."""


def round_to(
    x: ArrayLike,
    format: Format | MX,
    *,
    axis: int = -1,
    rounding: str = "nearest",
    key: ArrayLike | None = None,
    saturate: bool = True,
) -> Array:
    """``x`` rounded to the numbers of a format, in the dtype of ``x``.

    Zeros keep their sign, and NaN stays NaN, which a format without one has no code for. The derivative is that of
    the identity.

    Args:
      x: float32, bfloat16 or float16; its dtype holds the numbers of the format.
      format: a ``Format``, or an ``MX`` of blocks along ``axis``; the last block may be shorter.
      rounding: "nearest": to the nearest number, ties to the even one (without a mantissa, to
        the larger one); "stochastic": up or down, with probabilities
        that make the mean ``x``.
      key: a random key, for stochastic rounding.
      saturate: numbers above the largest become it; otherwise infinity; NaN if the format has no infinities; the
        largest number if it has neither. Blocks saturate.
    Raises:
      DtypeError: ``x`` is of another dtype.
      ArgumentError: there is no such format or rounding, or a key too many or too few.
      ShapeError: ``x`` has no such axis.
    """
    x = bnp.asarray(x)
    _check(x, format, axis, rounding, key)
    return _to_format(x, key, format, axis, rounding, saturate)


@functools.partial(custom_jvp, nondiff_argnums=(2, 3, 4, 5))
def _to_format(x: Any, key: Any, format: Format | MX, axis: int, rounding: str, saturate: bool) -> Any:
    wide = x.astype(dtypes.float32)
    if isinstance(format, Format):
        return _rounded(wide, format, rounding, key, saturate).astype(x.dtype)
    wide = bnp.moveaxis(wide, axis, -1)
    n = wide.shape[-1]
    blocks = bnp.pad(wide, [(0, 0)] * (wide.ndim - 1) + [(0, -n % format.block)])
    count = -(-n // format.block)
    blocks = blocks.reshape((*wide.shape[:-1], count, format.block))
    k = shared_exponents(blocks, format)
    values = _rounded(_scaled(blocks, -k), format.element, rounding, key, True)
    out = _scaled(values, k).reshape((*wide.shape[:-1], count * format.block))[..., :n]
    return bnp.moveaxis(out, -1, axis).astype(x.dtype)


@_to_format.defjvp
def _straight_through(
    format: Format | MX, axis: int, rounding: str, saturate: bool, primals: Any, tangents: Any
) -> Any:
    """The derivative of the identity: that of a rounding is 0 almost everywhere."""
    x, key = primals
    return _to_format(x, key, format, axis, rounding, saturate), tangents[0]


def shared_exponents(blocks: Any, format: MX) -> Any:
    """Exponents int32 [..., 1] of the scales of blocks, within float8_e8m0fnu.

    Args:
      blocks: float32 [..., b].
    """
    element = format.element
    finite = bnp.where(bnp.isfinite(blocks), bnp.abs(blocks), 0.0)
    top = bnp.max(finite, axis=-1, keepdims=True)
    k = _exponent(top) - element.most
    if not format.clip:
        # one more where the mantissa of the largest is above that of the format's
        above = _scaled(top, -k) > element.largest
        k = k + above.astype(dtypes.int32)
    return bnp.where(top > 0, bnp.clip(k, -127, 127), -127)


def _rounded(x: Any, format: Format, rounding: str, key: Any, saturate: bool) -> Any:
    """float32 rounded to the numbers of a format."""
    size = bnp.abs(x)
    place = bnp.maximum(_exponent(size), format.least) - format.mantissa
    units = _scaled(size, -place)
    if rounding == "nearest":
        whole = bnp.round(units)
    else:
        below = bnp.floor(units)
        chance = random.bits(key, x.shape, "uint32") >> np.uint32(32 - _HALVES)
        whole = below + (chance.astype(dtypes.float32) * 2.0**-_HALVES < units - below)
    out = _scaled(whole, place)
    beyond = {"ieee": np.inf, "nan": np.nan, "none": format.largest}[format.specials]
    out = bnp.where(out > format.largest, format.largest if saturate else beyond, out)
    # infinities have no units
    out = bnp.where(
        bnp.isfinite(size), out, bnp.where(bnp.isnan(size), size, format.largest if saturate else beyond)
    )
    return bnp.copysign(out, x)


def _exponent(size: Any) -> Any:
    """The exponents of float32 magnitudes; -127 of zeros and subnormal numbers."""
    return (lax.bitcast_convert_type(size, dtypes.int32) >> 23) - 127


def _scaled(x: Any, k: Any) -> Any:
    """``x * 2 ** k`` by two factors, as one may be no normal number.

    |k| is at most 252.
    """
    half = k >> 1
    return x * power_of_two(half) * power_of_two(k - half)


def _check(x: Any, format: Any, axis: int, rounding: str, key: Any) -> None:
    if x.dtype not in (dtypes.float32, dtypes.bfloat16, dtypes.float16):
        raise errors.DtypeError(f"round_to: x is {x.dtype}.", where=source.here(), fix='x.astype("float32")')
    if not isinstance(format, (Format, MX)):
        raise errors.ArgumentError(
            f"round_to: {format!r:.60} is no format.",
            where=source.here(),
            fix="nn.low_precision.E2M1, Format(4, 3) or MX(E2M1)",
        )
    if isinstance(format, MX):
        axis_in(axis, x.ndim, "round_to")
    check_rounding("round_to", rounding)
    if (key is None) != (rounding == "nearest"):
        raise errors.ArgumentError(
            f"round_to: {rounding} rounding {'needs a' if key is None else 'takes no'} key.",
            where=source.here(),
            fix='rounding="stochastic", key=random.key(0)',
        )


def check_rounding(name: str, rounding: Any) -> None:
    """Raise ArgumentError unless there is such a rounding."""
    if rounding not in ROUNDINGS:
        raise errors.ArgumentError(
            f"{name}: there is no rounding {rounding!r:.60}.",
            where=source.here(),
            fix=f"one of {', '.join(map(repr, ROUNDINGS))}",
        )
