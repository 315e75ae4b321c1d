"""Arrays as sets: unique elements, unions, intersections and differences.

Face over sorting and gathers. In: arrays. Out: vectors in ascending order. The size of a set depends
on values: while tracing, ``size`` must be given, which truncates or pads the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.core.ops import cumulative
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.ops import sort as sort_ops
from blufunc.core.ops.reduce import reduce_or
from blufunc.core.primitives.linear_ops import reshape
from blufunc.numpy import elementwise as ew
from blufunc.numpy.indexing import getitem
from blufunc.numpy.manipulation import moveaxis
from blufunc.numpy.picking import flatnonzero
from blufunc.numpy.promotion import (
    as_dtype_of,
    as_value,
    axis_in,
    cast,
    constant,
    positions,
    promote_dtypes,
    static_int,
    stretch,
    value_of,
)
from blufunc.numpy.searching import isin, searchsorted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

_INT32 = dtypes.int32


class UniqueAllResult(NamedTuple):
    """The result of ``unique_all``."""

    values: Array
    indices: Array
    inverse_indices: Array
    counts: Array


class UniqueCountsResult(NamedTuple):
    """The result of ``unique_counts``."""

    values: Array
    counts: Array


class UniqueInverseResult(NamedTuple):
    """The result of ``unique_inverse``."""

    values: Array
    inverse_indices: Array


def _known(size: Any, name: str, *xs: Array) -> int | None:
    """``size``; None where the values say it."""
    if size is not None:
        size = static_int(size, name, "size")
        if size < 0:
            raise errors.ValueRangeError(f"{name}: size={size}.", where=source.here(), fix="use 0 or more")
        return size
    for x in xs:
        if not isinstance(x, ConcreteArray):
            raise errors.ConcretizationError(
                f"{name} of a traced array ({x.aval}): the size of the result would not be known.",
                where=source.here(),
                why="while a function is traced its arrays have a shape and a dtype but no value yet.",
                fix="give size=..., and fill_value=... for what is left over",
            )
    return None


def _sorted_rows(x: Array, equal_nan: bool) -> tuple[Array, Array, Array]:
    """Sorted rows of x ``(n, m)``, their positions, and flags of new rows."""
    n, m = x.aval.shape
    boolean = dtypes.is_bool(x.aval.dtype)
    work = ops.convert(x, dtypes.int8) if boolean else x
    if not m or not n:
        order = shape_ops.iota(_INT32, (n,), 0)
        first = ops.eq(order, 0) if n else ops.ne(order, order)
        return x, order, first
    columns = [reshape(shape_ops.slice_in_dim(work, j, j + 1, axis=1), (n,)) for j in range(m)]
    *ordered, order = sort_ops.sort((*columns, shape_ops.iota(_INT32, (n,), 0)), 0, num_keys=m)
    rows = shape_ops.concatenate([reshape(c, (n, 1)) for c in ordered], 1) if m > 1 else reshape(
        ordered[0], (n, 1)
    )  # fmt: skip
    after, before = shape_ops.slice_in_dim(rows, 1, n), shape_ops.slice_in_dim(rows, 0, n - 1)
    differ = ops.ne(after, before)
    if equal_nan and dtypes.is_inexact(rows.aval.dtype):
        differ = ops.bitwise_and(differ, ops.bitwise_not(ops.bitwise_and(ew.isnan(after), ew.isnan(before))))
    changed = reduce_or(differ, (1,))
    first = shape_ops.concatenate([stretch(ops.eq(order[:1], order[:1]), (1,)), changed], 0)
    return (ops.convert(rows, dtypes.bool_) if boolean else rows), order, first


@overload
def unique(
    ar: ArrayLike,
    return_index: Literal[False] = False,
    return_inverse: Literal[False] = False,
    return_counts: Literal[False] = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
    sorted: bool = True,
) -> Array: ...
@overload
def unique(
    ar: ArrayLike,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
    sorted: bool = True,
) -> tuple[Array, ...]: ...


def unique(
    ar: ArrayLike,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
    sorted: bool = True,
) -> Any:
    """The sorted unique elements of ``ar``, or its unique slices along an axis.

    Args:
      ar: an array.
      return_index: also return where each was found first, int32.
      return_inverse: also return, in the shape of ``ar`` (or of its axis), which of them each element is, int32.
      return_counts: also return how often each occurs, int32.
      axis: None, for the elements of ``ar`` flattened, or an axis.
      equal_nan: whether all NaN count as one element.
      size: the static number of elements to return: the first ``size``, filled at the end.
      fill_value: what to fill with, by default the smallest element; counts are filled with 0.
      sorted: without effect: the elements are sorted always.
    Returns:
      an array, or a tuple of it and what else was asked for.
    Raises:
      ConcretizationError: ``ar`` is traced and no ``size`` is given.
    """
    return _unique(
        "unique", ar, return_index, return_inverse, return_counts, axis, equal_nan, size, fill_value
    )


def _unique(
    name: str,
    x: Any,
    return_index: bool,
    return_inverse: bool,
    return_counts: bool,
    axis: int | None,
    equal_nan: bool,
    size: int | None,
    fill_value: Any,
) -> Any:
    x = value_of(x, name)
    size = _known(size, name, x)
    if axis is None:
        d, lines, inverse_shape = 0, reshape(x, (x.aval.size,)), x.aval.shape
    else:
        d = axis_in(axis, x.aval.ndim, name)
        lines = moveaxis(x, d, 0)
        inverse_shape = lines.aval.shape[:1]
    n, rest = lines.aval.shape[0], lines.aval.shape[1:]
    width = lines.aval.size // n if n else int(np.prod(rest))
    if not n and size:
        raise errors.ValueRangeError(
            f"{name} of no elements, of size {size}.", where=source.here(), fix="size=0, or none"
        )
    rows, order, first = _sorted_rows(reshape(lines, (n, width)), equal_nan)
    # beyond the last distinct row, starts are n
    starts = cast(flatnonzero(first, size=size, fill_value=n), _INT32) if n else order
    found = ops.lt(starts, n)
    picked = getitem(rows, ops.select(found, starts, 0)) if n else rows
    if fill_value is not None and n:
        fill = as_dtype_of(fill_value, picked.aval.dtype, name)
        if fill.aval.ndim:
            fill = reshape(stretch(fill, rest), (1, width)) if axis is not None else fill
        there = stretch(reshape(found, (found.aval.size, 1)), picked.aval.shape)
        picked = ops.select(there, *ew.match_shapes(name, picked, fill))
    values = reshape(picked, (starts.aval.size, *rest))
    results = [values if axis is None else moveaxis(values, 0, d)]
    if return_index:
        where_first = getitem(order, ops.select(found, starts, 0)) if n else order
        results.append(positions(where_first))
    if return_inverse:
        rank = ops.sub(cumulative.cumsum_p.bind(ops.convert(first, _INT32), axis=0, reverse=False), 1)
        results.append(positions(reshape(sort_ops.place_along(rank, order, 0), inverse_shape)))
    if return_counts:
        ends = shape_ops.concatenate([starts[1:], stretch(ops.add(starts[:1], n), (1,))], 0) if n else starts
        last = ops.sub(starts.aval.size, 1)
        if n:
            # the last one ends where the next distinct row, cut off by ``size``, begins
            beyond = cast(flatnonzero(first, size=starts.aval.size + 1, fill_value=n)[-1:], _INT32)
            at_end = ops.eq(shape_ops.iota(last.aval.dtype, ends.aval.shape, 0), last)
            ends = ops.select(at_end, stretch(beyond, ends.aval.shape), ends)
        results.append(positions(ops.sub(ends, starts)))
    return results[0] if len(results) == 1 else tuple(results)


def unique_all(
    x: ArrayLike, /, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> UniqueAllResult:
    """Unique elements of x, with first positions, inverse and counts.

    NaN are distinct from each other. For ``size`` and ``fill_value`` see ``unique``.
    """
    return UniqueAllResult(*_unique("unique_all", x, True, True, True, None, False, size, fill_value))


def unique_counts(
    x: ArrayLike, /, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> UniqueCountsResult:
    """The distinct elements of x and how often each occurs; see ``unique_all``."""
    return UniqueCountsResult(*_unique("unique_counts", x, False, False, True, None, False, size, fill_value))


def unique_inverse(
    x: ArrayLike, /, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> UniqueInverseResult:
    """The unique elements of x and the inverse; see ``unique_all``."""
    return UniqueInverseResult(
        *_unique("unique_inverse", x, False, True, False, None, False, size, fill_value)
    )


def unique_values(x: ArrayLike, /, *, size: int | None = None, fill_value: ArrayLike | None = None) -> Array:
    """The distinct elements of x; see ``unique_all``."""
    return _unique("unique_values", x, False, False, False, None, False, size, fill_value)


# -- operations on sets ----------------------------------------------------------------------------


def _lines(name: str, x: Any, y: Any) -> tuple[Array, Array]:
    """Two vectors of one dtype."""
    x, y = promote_dtypes(name, x, y)
    return reshape(x, (x.aval.size,)), reshape(y, (y.aval.size,))


def _chosen(
    name: str, x: Array, keep: Array, size: int | None, fill_value: Any, *others: Array
) -> list[Array]:
    """Elements of x and parallel arrays where ``keep``, then ``fill_value`` or first."""
    size = _known(size, name, x, keep)
    n = x.aval.size
    at = flatnonzero(keep, size=size, fill_value=n)
    found = ops.lt(at, n)
    if not n:
        if at.aval.size:
            raise errors.ValueRangeError(f"{name} of size {size}, of nothing.", where=source.here())
        return [x, *others]
    results = [getitem(v, at) for v in (x, *others)]
    if size:
        if fill_value is None:
            fill = ops.select(found[0], results[0][0], constant(0, x.aval.dtype))
        else:
            fill = as_dtype_of(fill_value, x.aval.dtype, name)
        results[0] = ops.select(found, *ew.match_shapes(name, results[0], fill))
    return results


def union1d(
    ar1: ArrayLike, ar2: ArrayLike, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> Array:
    """The unique elements of ``ar1`` and ``ar2`` together.

    For ``size`` and ``fill_value`` see ``unique``.
    """
    both = shape_ops.concatenate(_lines("union1d", ar1, ar2), 0)
    return _unique("union1d", both, False, False, False, None, True, size, fill_value)


def setdiff1d(
    ar1: ArrayLike,
    ar2: ArrayLike,
    assume_unique: bool = False,
    *,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
) -> Array:
    """The unique elements of ``ar1`` that are not in ``ar2``, in the dtype of ``ar1``.

    For ``size`` see ``unique``; ``fill_value`` is 0.

    With ``assume_unique`` the elements of ``ar1`` are taken as they come: in their order, repeated if they are.
    """
    x, y = as_value(ar1, "setdiff1d"), as_value(ar2, "setdiff1d")
    x, y = reshape(x, (x.aval.size,)), reshape(y, (y.aval.size,))
    _known(size, "setdiff1d", x, y)
    keep = isin(x, y, invert=True)
    if not assume_unique:
        rows, order, first = _sorted_rows(reshape(x, (x.aval.size, 1)), True)
        x, keep = reshape(rows, x.aval.shape), ops.bitwise_and(first, getitem(keep, order))
    return _chosen("setdiff1d", x, keep, size, 0 if fill_value is None else fill_value)[0]


def setxor1d(
    ar1: ArrayLike,
    ar2: ArrayLike,
    assume_unique: bool = False,
    *,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
) -> Array:
    """The unique elements of only one of ``ar1`` and ``ar2``.

    For ``size`` and ``fill_value`` see ``unique``.

    ``assume_unique`` promises that neither holds an element twice; the result is the same without.
    """
    x, y = _lines("setxor1d", ar1, ar2)
    _known(size, "setxor1d", x, y)
    both = shape_ops.concatenate([x, y], 0)
    keep = shape_ops.concatenate([isin(x, y, invert=True), isin(y, x, invert=True)], 0)
    rows, order, first = _sorted_rows(reshape(both, (both.aval.size, 1)), True)
    keep = ops.bitwise_and(first, getitem(keep, order))
    return _chosen("setxor1d", reshape(rows, both.aval.shape), keep, size, fill_value)[0]


@overload
def intersect1d(
    ar1: ArrayLike,
    ar2: ArrayLike,
    assume_unique: bool = False,
    return_indices: Literal[False] = False,
    *,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
) -> Array: ...
@overload
def intersect1d(
    ar1: ArrayLike,
    ar2: ArrayLike,
    assume_unique: bool = False,
    *,
    return_indices: Literal[True],
    size: int | None = None,
    fill_value: ArrayLike | None = None,
) -> tuple[Array, Array, Array]: ...
@overload
def intersect1d(
    ar1: ArrayLike,
    ar2: ArrayLike,
    assume_unique: bool = False,
    return_indices: bool = False,
    *,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
) -> Array | tuple[Array, Array, Array]: ...


def intersect1d(
    ar1: ArrayLike,
    ar2: ArrayLike,
    assume_unique: bool = False,
    return_indices: bool = False,
    *,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
) -> Any:
    """The unique elements of both arrays; ``return_indices`` adds first positions.

    ``assume_unique`` promises that neither holds an element twice; the result is the same without. For ``size`` and
    ``fill_value`` see ``unique``; positions beyond the last element are the sizes of ``ar1`` and ``ar2``.
    """
    x, y = _lines("intersect1d", as_value(ar1, "intersect1d"), as_value(ar2, "intersect1d"))
    size = _known(size, "intersect1d", x, y)
    rows, order, first = _sorted_rows(reshape(x, (x.aval.size, 1)), True)
    line = reshape(rows, x.aval.shape)
    keep = ops.bitwise_and(first, getitem(isin(x, y), order))
    values, at_x = _chosen("intersect1d", line, keep, size, fill_value, order)
    if not return_indices:
        return values
    from_y, y_order, _ = _sorted_rows(reshape(y, (y.aval.size, 1)), True)
    real, _ = _chosen("intersect1d", line, keep, size, None, order)
    at_y = getitem(y_order, searchsorted(reshape(from_y, y.aval.shape), real)) if y.aval.size else y_order
    if size is not None:
        count = cumulative.cumsum_p.bind(ops.convert(keep, _INT32), axis=0, reverse=False)[-1:]
        there = ops.lt(shape_ops.iota(_INT32, (size,), 0), stretch(count, (size,)))
        at_x, at_y = ops.select(there, at_x, x.aval.size), ops.select(there, at_y, y.aval.size)
    return values, positions(at_x), positions(at_y)
