"""Sorting and searching along an axis.

Face over the ``sort`` primitive. NaN is sorted behind everything else.
"""

from __future__ import annotations

from typing import Any

from blufunc import errors
from blufunc.core import dtypes, source
from blufunc.core.axes import sequence
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.ops import sort as sort_ops
from blufunc.core.ops.reduce import reduce_or
from blufunc.core.ops.shape import iota
from blufunc.core.structure import broadcast_in_dim, reduce_sum, reshape
from blufunc.core.trace import Value
from blufunc.numpy import indexing
from blufunc.numpy.promotion import as_value, axis_in, promote_dtypes


def _line(x: Any, axis: int | None, name: str) -> tuple[Value, int]:
    x = as_value(x, name)
    if axis is None:
        return reshape(x, (x.aval.size,)), 0
    return x, axis_in(axis, x.aval.ndim, name)


def sort(x: Any, /, axis: int | None = -1, *, stable: bool = True, descending: bool = False) -> Value:
    """x in ascending (or descending) order along an axis; flattened first if the axis is None."""
    x, d = _line(x, axis, "sort")
    result = sort_ops.sort(x, d, is_stable=stable)
    return shape_ops.rev(result, (d,)) if descending else result


def argsort(x: Any, /, axis: int | None = -1, *, stable: bool = True, descending: bool = False) -> Value:
    """The positions, int32, that put x in ascending (or descending) order along an axis.

    Equal elements keep their order, descending too.
    """
    x, d = _line(x, axis, "argsort")
    if not descending:
        return sort_ops.argsort(x, d, is_stable=stable)
    n = x.aval.shape[d]
    backwards = sort_ops.argsort(shape_ops.rev(x, (d,)), d, is_stable=stable)
    return ops.sub(n - 1, shape_ops.rev(backwards, (d,)))


def lexsort(keys: Any, /, axis: int = -1) -> Value:
    """The positions, int32, that order by the last of several keys, then by the last but one, and so on."""
    if isinstance(keys, Value):
        keys = [_row(keys, i) for i in range(len(keys))]
    values = [as_value(k, "lexsort") for k in sequence(keys, "lexsort", "keys", "arrays")]
    if not values:
        raise errors.ArgumentError(
            "lexsort needs at least one key.", where=source.here(), fix="lexsort((x,))"
        )
    d = axis_in(axis, values[0].aval.ndim, "lexsort")
    positions = iota(dtypes.int32, values[0].aval.shape, d)
    return sort_ops.sort((*reversed(values), positions), d, num_keys=len(values))[-1]


def _row(x: Value, i: int) -> Value:
    """Row ``i`` of x."""
    return shape_ops.index_in_dim(x, i, 0, keepdims=False)


def searchsorted(x: Any, v: Any, /, side: str = "left", *, sorter: Any = None) -> Value:
    """For each element of v, the position, int32, at which it would keep the sorted vector x sorted.

    ``side='left'`` is before equal elements, ``'right'`` behind them. NaN belongs at the end.
    """
    if side not in ("left", "right"):
        raise errors.ValueRangeError(
            f"searchsorted: side is {side!r}.", where=source.here(), fix="use 'left' or 'right'"
        )
    x, v = promote_dtypes("searchsorted", as_value(x, "searchsorted"), v)
    if x.aval.ndim != 1:
        raise errors.ShapeError(f"searchsorted in {x.aval}: x has rank 1.", where=source.here())
    if sorter is not None:
        x = indexing.getitem(x, as_value(sorter, "searchsorted"))
    shape = (*v.aval.shape, x.aval.size)
    line = broadcast_in_dim(x, shape, (len(shape) - 1,))
    values = broadcast_in_dim(v, shape, tuple(range(len(shape) - 1)))
    below = ops.lt(line, values) if side == "left" else ops.le(line, values)
    if dtypes.is_floating(x.aval.dtype):
        value_nan, line_nan = ops.ne(values, values), ops.ne(line, line)
        at_end = value_nan if side == "right" else ops.bitwise_and(value_nan, ops.bitwise_not(line_nan))
        below = ops.bitwise_or(below, at_end)
    return reduce_sum(ops.convert(below, dtypes.int32), (len(shape) - 1,))


def digitize(x: Any, bins: Any, right: bool = False) -> Value:
    """The number, int32, of the interval between ``bins`` in which each element of x lies.

    ``bins`` increase or decrease; they do the latter if their last is smaller than their first. ``right`` says
    whether intervals include their larger end instead of the smaller one.
    """
    bins, side = as_value(bins, "digitize"), "left" if right else "right"
    n = bins.aval.size
    if n < 2 or bins.aval.ndim != 1:
        return searchsorted(bins, x, side)
    falls = ops.lt(indexing.getitem(bins, n - 1), indexing.getitem(bins, 0))
    rising = ops.select(falls, shape_ops.rev(bins, (0,)), bins)
    below = searchsorted(rising, x, side)
    return ops.select(falls, ops.sub(n, below), below)


def isin(x: Any, values: Any, /, *, invert: bool = False) -> Value:
    """Whether each element of x is one of ``values``, as bool."""
    x, values = promote_dtypes("isin", x, as_value(values, "isin"))
    n = values.aval.size
    shape = (*x.aval.shape, n)
    equal = ops.eq(
        broadcast_in_dim(x, shape, tuple(range(len(shape) - 1))),
        broadcast_in_dim(reshape(values, (n,)), shape, (len(shape) - 1,)),
    )
    found = reduce_or(equal, (len(shape) - 1,))
    return ops.bitwise_not(found) if invert else found


def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None) -> Value:
    """The piecewise linear function through points ``(xp, fp)``, ``xp`` increasing, at x, as floats.

    Outside of ``xp`` it is ``left`` and ``right``, by default the first and last of ``fp``.
    """
    x, xp, fp = promote_dtypes("interp", x, as_value(xp, "interp"), as_value(fp, "interp"), inexact=True)
    n = xp.aval.size
    i = ops.clamp(1, searchsorted(xp, x, "right"), n - 1)
    x0, x1, f0, f1 = (indexing.getitem(v, j) for v in (xp, fp) for j in (ops.sub(i, 1), i))
    gap = ops.sub(x1, x0)
    safe = ops.select(ops.eq(gap, 0.0), 1.0, gap)
    result = ops.add(f0, ops.mul(ops.div(ops.sub(x, x0), safe), ops.sub(f1, f0)))
    low, high = indexing.getitem(xp, 0), indexing.getitem(xp, n - 1)
    first = indexing.getitem(fp, 0) if left is None else left
    last = indexing.getitem(fp, n - 1) if right is None else right
    result = ops.select(ops.lt(x, low), first, result)
    return ops.select(ops.gt(x, high), last, result)
