"""Searches in sorted vectors: positions, intervals, interpolation.

Face over gathers and comparisons. A search is a bisection whose number of steps follows from the size of the
vector, so that it is one straight program: about ``log2(n)`` gathers for all values at once, and no loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.ops import sort as sort_ops
from blufunc.core.ops.reduce import reduce_or
from blufunc.core.ops.windows import GatherScatterMode
from blufunc.core.primitives.linear_ops import broadcast_in_dim, reduce_sum, reshape
from blufunc.numpy import elementwise as ew
from blufunc.numpy import indexing
from blufunc.numpy.promotion import as_dtype_of, as_value, cast, constant, promote_dtypes, stretch

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

METHODS = ("scan", "scan_unrolled", "sort", "compare_all")
_INT32 = dtypes.int32


def searchsorted(
    a: ArrayLike, v: ArrayLike, side: str = "left", sorter: ArrayLike | None = None, *, method: str = "scan"
) -> Array:
    """Positions, int32, at which each of v keeps the sorted vector ``a`` sorted.

    Args:
      a: a vector in ascending order, NaN at its end; or in any order, with ``sorter``.
      v: an array.
      side: ``'left'``, before equal elements, or ``'right'``, after them.
      sorter: the positions that sort ``a``.
      method: ``'scan'`` (or ``'scan_unrolled'``) bisects, ``'compare_all'`` compares all with all, ``'sort'`` sorts
        both together. The results are the same.
    """
    if side not in ("left", "right"):
        raise errors.ValueRangeError(
            f"searchsorted: side is {side!r}.", where=source.here(), fix="use 'left' or 'right'"
        )
    if method not in METHODS:
        raise errors.ValueRangeError(
            f"searchsorted: method is {method!r}.", where=source.here(), fix=f"use one of {METHODS}"
        )
    x, v = promote_dtypes("searchsorted", as_value(a, "searchsorted"), v)
    if x.aval.ndim != 1:
        raise errors.ShapeError(
            f"searchsorted in {x.aval}: x has rank 1.", where=source.here(), fix="vmap over the other axes"
        )
    if sorter is not None:
        x = indexing.getitem(x, as_value(sorter, "searchsorted"))
    if dtypes.is_bool(x.aval.dtype):
        x, v = ops.convert(x, dtypes.int8), ops.convert(v, dtypes.int8)
    shape = v.aval.shape
    v = reshape(v, (v.aval.size,))
    if not x.aval.size or not v.aval.size:
        return stretch(constant(0, _INT32), shape)
    find = {"compare_all": _by_comparing, "sort": _by_sorting}.get(method, _by_bisection)
    return reshape(find(x, v, side), shape)


def _by_bisection(x: Array, v: Array, side: str) -> Array:
    """Count the elements of x before each of v by halving where the count ends.

    Positions stay within x, so that no round needs a branch: a kernel of all of them is vectorized.
    """
    is_before = ew.less if side == "left" else ew.less_equal
    at = lambda i: indexing.getitem(x, i, GatherScatterMode.PROMISE_IN_BOUNDS)
    found = stretch(constant(0, _INT32), v.aval.shape)
    rest = x.aval.size
    while rest > 1:
        half = rest // 2
        found = ops.select(is_before(at(ops.add(found, half - 1)), v), ops.add(found, half), found)
        rest -= half
    return _nan_last(x, v, ops.add(found, ops.convert(is_before(at(found), v), _INT32)), side)


def _by_comparing(x: Array, v: Array, side: str) -> Array:
    shape = (v.aval.size, x.aval.size)
    line, values = broadcast_in_dim(x, shape, (1,)), broadcast_in_dim(v, shape, (0,))
    below = ew.less(line, values) if side == "left" else ew.less_equal(line, values)
    return _nan_last(x, v, reduce_sum(ops.convert(below, _INT32), (1,)), side)


def _nan_last(x: Array, v: Array, found: Array, side: str) -> Array:
    """``found``, but NaN after all numbers, which comparisons cannot do."""
    if not dtypes.is_inexact(x.aval.dtype):
        return found
    n = x.aval.size
    numbers = ops.sub(n, reduce_sum(ops.convert(ew.isnan(x), _INT32), (0,))) if side == "left" else n
    return ops.select(ew.isnan(v), numbers, found)


def _by_sorting(x: Array, v: Array, side: str) -> Array:
    """Count by a joint sort: each of v follows x before it, and preceding ones of v."""
    m, n = v.aval.size, x.aval.size
    first, last = (v, x) if side == "left" else (x, v)
    order = sort_ops.argsort(shape_ops.concatenate([first, last], 0), 0)
    place = sort_ops.argsort(order, 0)  # of each element among all
    start = 0 if side == "left" else n
    mine = shape_ops.slice_in_dim(place, start, start + m)
    among_v = sort_ops.argsort(sort_ops.argsort(v, 0), 0)
    return ops.sub(mine, among_v)


def digitize(x: ArrayLike, bins: Any, right: bool = False, *, method: str = "scan") -> Array:
    """The interval, int32, between ``bins`` in which each element of x lies.

    ``bins`` increase or decrease; they do the latter if their last is smaller than their first. ``right`` says
    True if intervals include their larger end instead of the smaller one. ``method``: see ``searchsorted``.
    """
    bins, side = as_value(bins, "digitize"), "left" if right else "right"
    n = bins.aval.size
    if n < 2 or bins.aval.ndim != 1:
        return searchsorted(bins, x, side, method=method)
    falls = ew.less(indexing.getitem(bins, n - 1), indexing.getitem(bins, 0))
    rising = ops.select(falls, shape_ops.rev(bins, (0,)), bins)
    below = searchsorted(rising, x, side, method=method)
    return ops.select(falls, ops.sub(n, below), below)


def isin(
    element: ArrayLike,
    test_elements: ArrayLike,
    assume_unique: bool = False,
    invert: bool = False,
    *,
    method: str = "auto",
) -> Array:
    """Test whether each ``element`` is in ``test_elements``; ``invert`` negates.

    method: ``'compare_all'`` compares all with all; ``'binary_search'`` and ``'sort'`` sort ``test_elements``
    and search, in ``(n + m) log m`` steps; ``'auto'`` chooses. ``assume_unique`` is a hint without effect.
    """
    if method not in ("auto", "compare_all", "binary_search", "sort"):
        raise errors.ValueRangeError(
            f"isin: method is {method!r}.",
            where=source.here(),
            fix="use 'auto', 'compare_all', 'binary_search' or 'sort'",
        )
    x, values = promote_dtypes("isin", element, test_elements)
    if dtypes.is_bool(x.aval.dtype):
        x, values = ops.convert(x, dtypes.int8), ops.convert(values, dtypes.int8)
    n = values.aval.size
    values = reshape(values, (n,))
    if method == "compare_all" or (method == "auto" and n <= 16):
        shape = (*x.aval.shape, n)
        equal = ops.eq(
            broadcast_in_dim(x, shape, tuple(range(len(shape) - 1))),
            broadcast_in_dim(values, shape, (len(shape) - 1,)),
        )
        found = reduce_or(equal, (len(shape) - 1,))
    elif not n:
        found = stretch(constant(False, dtypes.bool_), x.aval.shape)
    else:
        ordered = sort_ops.sort(values, 0)
        found = ops.eq(indexing.getitem(ordered, searchsorted(ordered, x)), x)
    return ops.bitwise_not(found) if invert else found


def interp(
    x: ArrayLike,
    xp: ArrayLike,
    fp: ArrayLike,
    left: ArrayLike | None = None,
    right: ArrayLike | None = None,
    period: ArrayLike | None = None,
) -> Array:
    """The piecewise linear function through ``(xp, fp)``, ``xp`` increasing, at x.

    Args:
      x: real numbers, of any shape, also the result's.
      xp, fp: vectors of one size; ``fp`` may be complex.
      left, right: the values outside of ``xp``, by default the first and last of ``fp``; ``'extrapolate'`` continues
        the first and last line.
      period: the period of a periodic function, whose ``xp`` may have any order; ``left`` and ``right`` are not used.
    Raises:
      ShapeError: ``xp`` and ``fp`` are no vectors of one size, or empty.
    """
    fp = as_value(fp, "interp")
    part = ops.real(fp) if dtypes.is_complex(fp.aval.dtype) else fp
    x, xp, _ = promote_dtypes("interp", x, as_value(xp, "interp"), part, inexact=True)
    values = promote_dtypes("interp", fp, constant(0, x.aval.dtype, x.aval.weak_type), inexact=True)[0]
    if xp.aval.ndim != 1 or xp.aval.shape != values.aval.shape or not xp.aval.size:
        raise errors.ShapeError(
            f"interp through points of shapes {xp.aval.shape} and {values.aval.shape}.",
            where=source.here(),
            fix="pass two vectors of one size, not 0; vmap over further axes",
        )
    if period is not None:
        x, xp, values = _one_period(x, xp, values, period)
        left = right = None
    n = xp.aval.size
    if n == 1:
        inner = stretch(values, (1,))
        result = stretch(indexing.getitem(inner, 0), x.aval.shape)
        slope = constant(0, values.aval.dtype)
    else:
        i = ops.clamp(1, searchsorted(xp, x, "right"), n - 1)
        x0, x1 = (indexing.getitem(xp, j) for j in (ops.sub(i, 1), i))
        f0, f1 = (indexing.getitem(values, j) for j in (ops.sub(i, 1), i))
        gap = ops.sub(x1, x0)
        flat = ops.eq(gap, 0.0)
        slope = ops.div(ops.sub(f1, f0), cast(ops.select(flat, 1.0, gap), values.aval.dtype))
        result = ops.add(f0, ops.mul(cast(ops.sub(x, x0), values.aval.dtype), slope))
        result = ops.select(flat, f0, result)
    low, high = indexing.getitem(xp, 0), indexing.getitem(xp, n - 1)
    for end, outside, edge in ((left, ops.lt(x, low), 0), (right, ops.gt(x, high), n - 1)):
        if isinstance(end, str):
            if end != "extrapolate":
                raise errors.ValueRangeError(
                    f"interp: {end!r} outside of xp.", where=source.here(), fix="a number, or 'extrapolate'"
                )
            continue
        kind = values.aval.dtype
        beyond = indexing.getitem(values, edge) if end is None else as_dtype_of(end, kind, "interp")
        result = ops.select(outside, *ew.match_shapes("interp", beyond, result))
    return result


def _one_period(x: Array, xp: Array, values: Array, period: Any) -> tuple[Array, Array, Array]:
    """x and the sorted points in one period, with one more point at each end."""
    dtype = x.aval.dtype
    period = ops.abs(as_dtype_of(period, dtype, "interp"))
    if period.aval.ndim:
        raise errors.ShapeError(
            f"interp: the period is {period.aval}.", where=source.here(), fix="pass a number"
        )
    x, xp = ew.remainder(x, period), ew.remainder(xp, period)
    order = sort_ops.argsort(xp, 0)
    xp, values = indexing.getitem(xp, order), indexing.getitem(values, order)
    n = xp.aval.size
    last, first = (shape_ops.slice_in_dim(xp, i, i + 1) for i in (n - 1, 0))
    xp = shape_ops.concatenate([ops.sub(last, period), xp, ops.add(first, period)], 0)
    ends = [shape_ops.slice_in_dim(values, i, i + 1) for i in (n - 1, 0)]
    return x, xp, shape_ops.concatenate([ends[0], values, ends[1]], 0)
