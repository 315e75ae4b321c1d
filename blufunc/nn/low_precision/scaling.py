"""Scales of fp8 operands: powers of two, from the largest elements.

A face, below ``product.py``. A float keeps its relative precision under any scale; a scale only places the range. So
scales are powers of two: multiplying by one, and by its reciprocal, is exact, and what a scale that is no power of two
gains is less than one binade of range. Exponents come from the bits of the largest element, as exactly on any device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir import dtypes

BLOCK = 128
"""Elements along the contracted axis of a block, as of cuBLASLt on Hopper."""

SCALINGS = ("tensor", "row", "block")

_LEAST = -120
"""The exponent of the scale of the largest float32 numbers, with a margin of 0."""


class Scaled(NamedTuple):
    """fp8 values [m, k], and the scales that bring them back.

    Attributes:
      values: of float8_e4m3fn or float8_e5m2.
      scale: float32, by ``scaling``: [1, 1]; [m, 1]; or [k / 128 rounded up, m] of blocks along k. The transpose, of
        blocks, is the layout in which cuBLASLt reads it.
    """

    values: Any
    scale: Any


def largest_number(dtype: np.dtype) -> float:
    """The largest finite number of a dtype."""
    return float(bnp.finfo(dtype).max)


def _most(dtype: np.dtype) -> int:
    """The largest exponent k of a scale.

    All numbers of the dtype times 2^-k are normal bfloat16 numbers.
    """
    smallest = math.frexp(float(bnp.finfo(dtype).smallest_subnormal))[1] - 1
    return smallest + 126


def largest(x: Any, scaling: str) -> Any:
    """The largest magnitudes of a matrix in float32: [1, 1], [m, 1], or of blocks."""
    wide = bnp.abs(x.astype(dtypes.float32))
    if scaling == "tensor":
        return bnp.max(wide, axis=(-2, -1), keepdims=True)
    if scaling == "row":
        return bnp.max(wide, axis=-1, keepdims=True)
    *lead, m, k = wide.shape
    n = -(-k // BLOCK)
    if n * BLOCK != k:
        wide = bnp.pad(wide, [(0, 0)] * (len(lead) + 1) + [(0, n * BLOCK - k)])
    return bnp.max(wide.reshape((*lead, m, n, BLOCK)), axis=-1)


def exponents(top: Any, dtype: np.dtype, margin: int = 0) -> Any:
    """Exponents k of scales: ``top * 2 ** (k + margin)`` is in the range of a dtype.

    It is 0 where ``top`` is 0, infinite or NaN, so that infinities and NaN reach the result.

    Args:
      top: float32 magnitudes.
    """
    limit = int(np.float32(largest_number(dtype)).view(np.int32))
    bits = lax.bitcast_convert_type(top, dtypes.int32)
    above = (bits & 0x7FFFFF) > (limit & 0x7FFFFF)
    k = (limit >> 23) - (bits >> 23) - above.astype(dtypes.int32) - margin
    usable = (top > 0) & (bits < 0x7F800000)
    return bnp.where(usable, bnp.clip(k, _LEAST, _most(dtype)), 0)


def power_of_two(k: Any) -> Any:
    """``2.0 ** k`` of int32 in the range of normal numbers, exactly."""
    return lax.bitcast_convert_type((k + 127) << 23, dtypes.float32)


def scaled(x: Any, dtype: np.dtype, scaling: str, margin: int = 0, top: Any = None) -> Scaled:
    """A matrix [m, k] in fp8.

    Finite elements beyond the range are clipped: alongside an infinity, or if ``top`` is of other steps.

    Args:
      top: magnitudes to take the scales from; default: the largest ones of ``x``.
    """
    k = exponents(largest(x, scaling) if top is None else top, dtype, margin)
    values = x.astype(dtypes.float32) * of_elements(power_of_two(k), x.shape[-1])
    most = largest_number(dtype)
    values = bnp.where(bnp.isfinite(values), bnp.clip(values, -most, most), values)
    return Scaled(values.astype(dtype), power_of_two(-(k.mT if scaling == "block" else k)))


def of_elements(scale: Any, k: int) -> Any:
    """Scales [1, 1], [m, 1] or [m, n] of blocks, in a shape that broadcasts to [m, k]."""
    if scale.shape[-1] == 1:
        return scale
    of_blocks = bnp.broadcast_to(scale[..., None], (*scale.shape, BLOCK))
    return of_blocks.reshape((*scale.shape[:-1], -1))[..., :k]
