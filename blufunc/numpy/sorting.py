"""Sorting along an axis, and the positions that sort.

Face over the ``sort`` primitive. In come arrays, out come their lines in order, or int32 positions. NaN is
sorted last, complex numbers by their real, then their imaginary part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import only_none, sequence, static_int
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.ops import sort as sort_ops
from blufunc.core.ops.shape import iota
from blufunc.numpy.promotion import as_value, axis_in, cast, dtype_of, line_axis

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike


def _check_kind(name: str, kind: Any, order: Any) -> None:
    """Check NumPy's ``kind``, which only says whether sorts are stable, and ``order``."""
    only_none(name, "order", order, "arrays have no fields.")
    if kind not in (None, "stable", "mergesort", "quicksort", "heapsort"):
        raise errors.ValueRangeError(
            f"{name}: {kind!r:.60} is not a kind.", where=source.here(), fix="leave kind out: stable= says it"
        )


def sort(
    a: ArrayLike,
    axis: int | None = -1,
    *,
    kind: str | None = None,
    order: None = None,
    stable: bool = True,
    descending: bool = False,
) -> Array:
    """Sort along an axis, ascending or descending; axis None flattens.

    ``kind``, NumPy's name of an algorithm, has no effect, and ``order`` must be None.
    """
    _check_kind("sort", kind, order)
    x, d = line_axis(as_value(a, "sort"), axis, "sort")
    result = sort_ops.sort(x, d, is_stable=stable)
    return shape_ops.rev(result, (d,)) if descending else result


def argsort(
    a: ArrayLike,
    axis: int | None = -1,
    *,
    kind: str | None = None,
    order: None = None,
    stable: bool = True,
    descending: bool = False,
    dtype: DTypeLike | None = None,
) -> Array:
    """Positions, int32 or ``dtype``, that sort ``a`` along an axis.

    Equal elements keep their order, descending too. For ``kind`` and ``order`` see ``sort``.
    """
    _check_kind("argsort", kind, order)
    want = dtype_of(dtype) or dtypes.default(int)
    if not dtypes.is_integer(want):
        raise errors.DtypeError(
            f"argsort: positions of dtype {dtypes.short_name(want)}.",
            where=source.here(),
            fix="dtype='int32'",
        )
    x, d = line_axis(as_value(a, "argsort"), axis, "argsort")
    if not descending:
        return cast(sort_ops.argsort(x, d, is_stable=stable), want)
    n = x.aval.shape[d]
    backwards = sort_ops.argsort(shape_ops.rev(x, (d,)), d, is_stable=stable)
    return cast(ops.sub(n - 1, shape_ops.rev(backwards, (d,))), want)


def lexsort(keys: ArrayLike, axis: int = -1) -> Array:
    """Positions, int32, that sort by the last key, then by the one before it, ..."""
    if isinstance(keys, Array):
        keys = [shape_ops.index_in_dim(keys, i, 0, keepdims=False) for i in range(len(keys))]
    values = [as_value(k, "lexsort") for k in sequence(keys, "lexsort", "keys", "arrays")]
    if not values:
        raise errors.ArgumentError(
            "lexsort needs at least one key.", where=source.here(), fix="lexsort((x,))"
        )
    d = axis_in(axis, values[0].aval.ndim, "lexsort")
    positions = iota(dtypes.int32, values[0].aval.shape, d)
    return sort_ops.sort((*reversed(values), positions), d, num_keys=len(values))[-1]


def sort_complex(a: ArrayLike) -> Array:
    """Sort along the last axis as complex: by real, then imaginary part."""
    x = as_value(a, "sort_complex")
    wide = x.aval.dtype == dtypes.float64 or x.aval.dtype == dtypes.complex128
    return sort(cast(x, dtypes.complex128 if wide else dtypes.complex64), -1)


def _checked_kth(kth: Any, n: int, name: str) -> None:
    """``kth``, an int or several, must name elements of a line of ``n``."""
    for k in kth if isinstance(kth, (tuple, list)) else [kth]:
        if not -n <= static_int(k, name, "kth") < n:
            raise errors.ValueRangeError(
                f"{name}: kth={k} of a line of {n} elements.", where=source.here(), fix=f"use 0 to {n - 1}"
            )


def partition(a: ArrayLike, kth: Any, axis: int | None = -1) -> Array:
    """Partition lines: element ``kth`` as sorted, smaller before, larger after it.

    The order of the others is unspecified: here they are sorted, too.
    """
    x, d = line_axis(as_value(a, "partition"), axis, "partition")
    _checked_kth(kth, x.aval.shape[d], "partition")
    return sort(x, d)


def argpartition(a: ArrayLike, kth: Any, axis: int | None = -1) -> Array:
    """The positions, int32, that put ``a`` in the order of ``partition``."""
    x, d = line_axis(as_value(a, "argpartition"), axis, "argpartition")
    _checked_kth(kth, x.aval.shape[d], "argpartition")
    return argsort(x, d, dtype=dtypes.int32)
