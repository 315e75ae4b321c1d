"""``detrend``: removal of means and linear trends.

A face above ``blufunc.numpy``. The residual of a least-squares line is a projection, so it is linear in the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.axes import axis_in, ints, only_none
from blufunc.core.ir.trace import Array
from blufunc.numpy.promotion import inexact

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

__all__ = ["detrend"]


def detrend(
    data: ArrayLike,
    axis: int = -1,
    type: str = "linear",
    bp: int | Sequence[int] | np.ndarray = 0,
    overwrite_data: None = None,
) -> Array:
    """Remove a trend along an axis.

    Args:
      data: an array; integers become float32.
      axis: the axis.
      type: ``"linear"``: subtract least-squares lines; ``"constant"``: subtract the mean.
      bp: where the lines of ``"linear"`` begin anew.
      overwrite_data: None.
    """
    only_none("detrend", "overwrite_data", overwrite_data)
    x = inexact(data, "detrend")
    if type not in ("linear", "constant", "l", "c"):
        raise errors.ValueRangeError(
            f"detrend: {type!r:.60} is not a trend.", where=source.here(), fix="type='linear' or 'constant'"
        )
    axis = axis_in(axis, x.aval.ndim, "detrend")
    if type[0] == "c":
        return x - bnp.mean(x, axis, keepdims=True)
    n = x.aval.shape[axis]
    breaks = ints(np.atleast_1d(bp), "detrend", "bp")
    if any(not 0 <= b <= n for b in breaks):
        raise errors.ValueRangeError(
            f"detrend of {n} points with the break points {breaks}.",
            where=source.here(),
            fix="break points are indices along the axis",
        )
    x = bnp.moveaxis(x, axis, -1)
    edges = sorted({0, *breaks, n})
    parts = [_without_line(x[..., a:b]) for a, b in itertools.pairwise(edges)]
    return bnp.moveaxis(bnp.concatenate(parts, -1) if parts else x, -1, axis)


def _without_line(x: Array) -> Array:
    """The residual of the least-squares line along the last axis."""
    n = x.aval.shape[-1]
    x = x - bnp.mean(x, -1, keepdims=True)
    if n == 1:
        return x
    t = bnp.linspace(-1, 1, n, dtype=x.real.dtype)
    slope = bnp.sum(x * t, -1, keepdims=True) / bnp.sum(t * t)
    return x - slope * t
