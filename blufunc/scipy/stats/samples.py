"""Statistics of samples: mode, ranks and the standard error of the mean.

All results have static shapes, so the functions can be traced.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in
from blufunc.numpy.promotion import as_value, inexact

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


class ModeResult(NamedTuple):
    """``mode``: the most common values; ``count``: their counts."""

    mode: Any
    count: Any


_RANKINGS = ("average", "min", "max", "dense", "ordinal")


def mode(
    a: ArrayLike, axis: int | None = 0, nan_policy: str = "propagate", keepdims: bool = False
) -> ModeResult:
    """The most common value along an axis, and its count; ties give the smallest.

    Args:
      a: an array.
      axis: along which; None for all elements.
      nan_policy: ``"propagate"``: NaN counts as a value, larger than all others.
      keepdims: keep the axis, with size 1.
    """
    _policy("mode", nan_policy, ("propagate",))
    x = bnp.atleast_1d(as_value(a, "mode"))
    shape = tuple(1 if axis is None else n for n in x.shape)
    if axis is None:
        x, d = bnp.ravel(x), 0
    else:
        d = axis_in(axis, x.ndim, "mode")
        shape = (*shape[:d], 1, *shape[d + 1 :])
    x = bnp.moveaxis(x, d, 0)
    n = x.shape[0]
    if not n:
        values, counts = bnp.full(x.shape[1:], math.nan), bnp.zeros(x.shape[1:])
    else:
        x = bnp.sort(x, axis=0)
        places = lax.broadcasted_iota(dtypes.int32, x.shape, 0)
        starts = lax.cummax(bnp.where(_begins(x), places, 0), 0)
        run = places - starts + 1
        best = bnp.argmax(run, axis=0)
        values = bnp.take_along_axis(x, best[None], 0)[0]
        counts = bnp.max(run, axis=0).astype(dtypes.default(int))
    if keepdims:
        values, counts = values.reshape(shape), counts.reshape(shape)
    return ModeResult(values, counts)


def rankdata(
    a: ArrayLike, method: str = "average", *, axis: int | None = None, nan_policy: str = "propagate"
) -> Array:
    """The ranks of the elements, from 1 on, as floats.

    Args:
      a: an array.
      method: what equal elements get: the ``"average"`` of their ranks, the ``"min"`` or the ``"max"`` of them, the
        same rank without a gap after it (``"dense"``), or each its own, in their order (``"ordinal"``).
      axis: along which; None for all elements, as one vector.
      nan_policy: ``"propagate"``: all ranks are NaN where there is a NaN among the elements.
    """
    _policy("rankdata", nan_policy, ("propagate",))
    if method not in _RANKINGS:
        raise errors.ValueRangeError(
            f"rankdata: {method!r:.60} is not a method.",
            where=source.here(),
            fix=f"use one of {', '.join(_RANKINGS)}",
        )
    x = as_value(a, "rankdata")
    x = bnp.ravel(x) if axis is None else x
    d = axis_in(0 if axis is None else axis, x.ndim, "rankdata")
    x = bnp.moveaxis(x, d, 0)
    n = x.shape[0]
    if not x.size:
        return bnp.moveaxis(x.astype(dtypes.default(float)), 0, d)
    order = bnp.argsort(x, axis=0)
    ordered = bnp.take_along_axis(x, order, 0)
    places = lax.broadcasted_iota(dtypes.int32, x.shape, 0)
    begins = _begins(ordered)
    first = lax.cummax(bnp.where(begins, places, 0), 0)
    ends = bnp.concatenate([begins[1:], bnp.ones_like(begins[:1])])
    last = lax.cummin(bnp.where(ends, places, n - 1), 0, reverse=True)
    ranks = {
        "ordinal": lambda: places + 1,
        "dense": lambda: bnp.cumsum(begins.astype(dtypes.int32), axis=0),
        "min": lambda: first + 1,
        "max": lambda: last + 1,
        "average": lambda: (first + last).astype(dtypes.default(float)) * 0.5 + 1,
    }[method]()
    ranks = bnp.take_along_axis(ranks.astype(dtypes.default(float)), bnp.argsort(order, axis=0), 0)
    if dtypes.is_floating(x.dtype):
        ranks = bnp.where(bnp.any(bnp.isnan(x), axis=0, keepdims=True), math.nan, ranks)
    return bnp.moveaxis(ranks, 0, d)


def sem(
    a: ArrayLike,
    axis: int | None = 0,
    ddof: int = 1,
    nan_policy: str = "propagate",
    *,
    keepdims: bool = False,
) -> Array:
    """The standard error of the mean: standard deviation over root of the count.

    Args:
      a: an array of at least one axis.
      axis: along which; None for all elements.
      ddof: delta degrees of freedom of the deviation.
      nan_policy: ``"propagate"``, or ``"omit"`` to leave NaNs out.
      keepdims: keep the axis, with size 1.
    """
    _policy("sem", nan_policy, ("propagate", "omit"))
    x = inexact(a, "sem")
    if axis is not None:
        axis = axis_in(axis, x.ndim, "sem")
    if nan_policy == "omit":
        count = bnp.sum(~bnp.isnan(x), axis=axis, keepdims=keepdims)
        return bnp.nanstd(x, axis=axis, ddof=ddof, keepdims=keepdims) / bnp.sqrt(count.astype(x.dtype))
    size = x.size if axis is None else x.shape[axis]
    return bnp.std(x, axis=axis, ddof=ddof, keepdims=keepdims) / math.sqrt(max(size, 1))


def _begins(ordered: Any) -> Any:
    """Where, along the first axis of sorted elements, a new value begins."""
    new = ordered[1:] != ordered[:-1]
    if dtypes.is_floating(ordered.dtype):  # NaNs, which stand last, are one value
        new = new & ~bnp.isnan(ordered[:-1])
    return bnp.concatenate([bnp.ones(ordered[:1].shape, bool), new])


def _policy(name: str, policy: str, known: tuple[str, ...]) -> None:
    if policy not in known:
        raise errors.UnsupportedError(
            f"{name} does not support nan_policy={policy!r:.60}.",
            where=source.here(),
            why="a traced program cannot depend on whether there are NaNs.",
            fix=f"use {' or '.join(map(repr, known))}",
        )
