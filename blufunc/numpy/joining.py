"""Concatenating, stacking, splitting and repeating arrays.

Face over ``core.ops.shape``. What only depends on static sizes becomes concatenations, slices and
broadcasts; positions that are arrays become a gather.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import only_none
from blufunc.core.ir.trace import Array
from blufunc.core.ops import cumulative, dynamic
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.primitives.linear_ops import broadcast_in_dim, reduce_sum
from blufunc.core.primitives.linear_ops import reshape as _reshape
from blufunc.numpy import elementwise as ew
from blufunc.numpy.indexing import getitem
from blufunc.numpy.manipulation import atleast_1d, atleast_2d, atleast_3d, broadcast_to, ndim
from blufunc.numpy.picking import take
from blufunc.numpy.promotion import (
    as_value,
    axis_in,
    cast,
    dtype_of,
    line_axis,
    promote_dtypes,
    shape_of,
    static_int,
    value_of,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike

# -- joining and splitting -------------------------------------------------------------------------


def _sequence(xs: Any, name: str) -> list[Any]:
    if isinstance(xs, (tuple, list)):
        if not xs:
            raise errors.ValueRangeError(
                f"{name} of no arrays.", where=source.here(), fix="pass one at least"
            )
        return list(xs)
    if isinstance(xs, (Array, np.ndarray)):
        x = as_value(xs, name)
        return [getitem(x, i) for i in range(len(x))]
    raise errors.ArgumentError(
        f"{name} takes a sequence of arrays, not a {type(xs).__name__}.",
        where=source.here(),
        fix=f"bnp.{name}([x, y])",
    )


def concatenate(arrays: Any, axis: int | None = 0, dtype: DTypeLike | None = None) -> Array:
    """Concatenate arrays of one shape, except along ``axis``, along that axis.

    They are promoted to one dtype. With ``axis=None`` they are flattened first.
    """
    values = promote_dtypes("concatenate", *_sequence(arrays, "concatenate"))
    if axis is None:
        values, axis = [_reshape(v, (v.aval.size,)) for v in values], 0
    ranks = {v.aval.ndim for v in values}
    shapes = " and ".join(map(str, dict.fromkeys(v.aval.shape for v in values)))
    if len(ranks) > 1 or ranks == {0}:
        raise errors.ShapeError(
            f"concatenate of shapes {shapes}: the ranks must agree and be 1 at least.",
            where=source.here(),
            fix="bnp.stack makes a new axis; x[None] adds one",
        )
    d = axis_in(axis, values[0].aval.ndim, "concatenate")
    if len({v.aval.shape[:d] + v.aval.shape[d + 1 :] for v in values}) > 1:
        raise errors.ShapeError(
            f"concatenate of shapes {shapes} along axis {d}: the other axes must agree.",
            where=source.here(),
            fix="check the axis, or pad or slice the arrays first",
        )
    want = dtype_of(dtype)
    result = shape_ops.concatenate(values, d)
    return result if want is None else ops.convert(result, want)


concat = concatenate


def stack(arrays: Any, axis: int = 0, out: None = None, dtype: DTypeLike | None = None) -> Array:
    """Arrays of one shape along a new axis at position ``axis`` of the result."""
    only_none("stack", "out", out)
    values = promote_dtypes("stack", *_sequence(arrays, "stack"))
    shapes = dict.fromkeys(v.aval.shape for v in values)
    if len(shapes) > 1:
        raise errors.ShapeError(
            f"stack of shapes {' and '.join(map(str, shapes))}: they must be equal.",
            where=source.here(),
            fix="bnp.broadcast_arrays first, or concatenate along an axis that exists",
        )
    d = axis_in(axis, values[0].aval.ndim + 1, "stack")
    s = values[0].aval.shape
    return concatenate([_reshape(v, (*s[:d], 1, *s[d:])) for v in values], d, dtype=dtype)


def unstack(x: ArrayLike, /, *, axis: int = 0) -> tuple[Array, ...]:
    """The slices of x along an axis, without it."""
    x = as_value(x, "unstack")
    d = axis_in(axis, x.aval.ndim, "unstack")
    return tuple([shape_ops.index_in_dim(x, i, d, keepdims=False) for i in range(x.aval.shape[d])])


def vstack(tup: Any, dtype: DTypeLike | None = None) -> Array:
    """Arrays one below the other: along axis 0, vectors as rows."""
    return concatenate([atleast_2d(x) for x in _sequence(tup, "vstack")], 0, dtype=dtype)


def hstack(tup: Any, dtype: DTypeLike | None = None) -> Array:
    """Arrays side by side: along axis 1, vectors along axis 0."""
    values = [atleast_1d(x) for x in _sequence(tup, "hstack")]
    return concatenate(values, 0 if values[0].aval.ndim == 1 else 1, dtype=dtype)


def dstack(tup: Any, dtype: DTypeLike | None = None) -> Array:
    """Arrays along a third axis."""
    return concatenate([atleast_3d(x) for x in _sequence(tup, "dstack")], 2, dtype=dtype)


def column_stack(tup: Any) -> Array:
    """Stack vectors as columns, and matrices, into a matrix."""
    values = [atleast_1d(x) for x in _sequence(tup, "column_stack")]
    return concatenate([_reshape(v, (v.aval.size, 1)) if v.aval.ndim == 1 else v for v in values], 1)


def append(arr: ArrayLike, values: ArrayLike, axis: int | None = None) -> Array:
    """``values`` after ``arr`` along an axis; both flattened by default."""
    return concatenate([arr, values], axis)


def block(arrays: Any) -> Array:
    """Assemble nested lists of arrays: the innermost along the last axis."""

    def depth_of(entry: Any) -> int:
        if not isinstance(entry, list):
            return 0
        depths = {depth_of(e) for e in entry}
        if len(depths) != 1:
            raise errors.ArgumentError(
                "block: the lists are not nested to one depth, or one is empty.",
                where=source.here(),
                fix="bnp.block([[a, b], [c, d]])",
            )
        return depths.pop() + 1

    def made(entry: Any, level: int) -> Array:
        if level == 0:
            v = value_of(entry, "block")
            return _reshape(v, (1,) * (rank - v.aval.ndim) + v.aval.shape)
        return concatenate([made(e, level - 1) for e in entry], rank - level)

    def ranks(entry: Any) -> int:
        return max(map(ranks, entry)) if isinstance(entry, list) else value_of(entry, "block").aval.ndim

    depth = depth_of(arrays)
    rank = max(depth, ranks(arrays))
    return made(arrays, depth)


def split(ary: ArrayLike, indices_or_sections: Any, axis: int = 0) -> list[Array]:
    """Split ``ary`` into equal parts, or before each of the given positions."""
    x = as_value(ary, "split")
    d = axis_in(axis, x.aval.ndim, "split")
    if not isinstance(indices_or_sections, (tuple, list, np.ndarray)):
        count = static_int(indices_or_sections, "split", "the number of sections")
        if count < 1 or x.aval.shape[d] % count:
            raise errors.ValueRangeError(
                f"split: axis {d} of {x.aval} does not divide into {count} equal parts.",
                where=source.here(),
                fix="bnp.array_split makes parts of nearly equal size",
            )
    return array_split(x, indices_or_sections, d)


def array_split(ary: ArrayLike, indices_or_sections: Any, axis: int = 0) -> list[Array]:
    """Split ``ary`` into parts of sizes that differ by at most 1, or at positions."""
    x = as_value(ary, "array_split")
    d = axis_in(axis, x.aval.ndim, "array_split")
    n = x.aval.shape[d]
    if isinstance(indices_or_sections, (tuple, list, np.ndarray)):
        cuts = [static_int(i, "array_split", "a position") for i in indices_or_sections]
        edges = [0, *cuts, n]
        pieces = [slice(a, b).indices(n)[:2] for a, b in itertools.pairwise(edges)]
    else:
        count = static_int(indices_or_sections, "array_split", "the number of sections")
        if count < 1:
            raise errors.ValueRangeError(f"array_split into {count} parts.", where=source.here())
        quotient, extra = divmod(n, count)
        sizes = [quotient + (i < extra) for i in range(count)]
        edges = [0, *np.cumsum(sizes).tolist()]
        pieces = list(itertools.pairwise(edges))
    return [shape_ops.slice_in_dim(x, a, max(a, b), axis=d) for a, b in pieces]


def vsplit(ary: ArrayLike, indices_or_sections: Any) -> list[Array]:
    """``split`` along axis 0."""
    return split(ary, indices_or_sections, 0)


def hsplit(ary: ArrayLike, indices_or_sections: Any) -> list[Array]:
    """``split`` along axis 1, or axis 0 of a vector."""
    return split(ary, indices_or_sections, 0 if ndim(ary) == 1 else 1)


def dsplit(ary: ArrayLike, indices_or_sections: Any) -> list[Array]:
    """``split`` along axis 2."""
    return split(ary, indices_or_sections, 2)


# -- repetition ------------------------------------------------------------------------------------


def repeat(
    a: ArrayLike, repeats: ArrayLike, axis: int | None = None, *, total_repeat_length: int | None = None
) -> Array:
    """Repeat each element along an axis ``repeats`` times; flattened by default.

    Traced ``repeats`` need ``total_repeat_length``, the size of the result, which cuts it off or fills it
    with the last element.
    """
    x = value_of(a, "repeat")
    x, d = line_axis(x, axis, "repeat")
    s, n = x.aval.shape, x.aval.shape[d]
    if isinstance(repeats, Array) and not (
        isinstance(repeats, ConcreteArray) and total_repeat_length is None
    ):
        if total_repeat_length is None:
            raise errors.ConcretizationError(
                "repeat by a traced array: the size of the result would not be known.",
                where=source.here(),
                fix="give total_repeat_length=...",
            )
        slot = shape_ops.iota(dtypes.int32, (total_repeat_length, n), 0)
        ends = broadcast_in_dim(
            cumulative.cumsum_p.bind(broadcast_to(repeats, (n,)), axis=0, reverse=False),
            (total_repeat_length, n),
            (1,),
        )
        past = ops.ge_p.bind(slot, cast(ends, dtypes.int32))
        which = reduce_sum(ops.convert(past, dtypes.int32), (1,))
        return take(x, which, d, mode="clip")
    if total_repeat_length is not None:
        (total_repeat_length,) = shape_of((total_repeat_length,), "repeat")
    counts = np.asarray(repeats)
    if counts.size == 1:
        count = static_int(counts.reshape(())[()], "repeat", "the count")
        if count < 0:
            raise errors.ValueRangeError(f"repeat {count} times.", where=source.here(), fix="use 0 or more")
        if total_repeat_length is None:
            wide = broadcast_in_dim(
                x, (*s[: d + 1], count, *s[d + 1 :]), tuple([i if i <= d else i + 1 for i in range(len(s))])
            )
            return _reshape(wide, (*s[:d], n * count, *s[d + 1 :]))
        counts = np.full(n, count)
    if counts.shape != (n,):
        raise errors.ShapeError(
            f"repeat: {counts.size} counts for axis {d} of {x.aval}.",
            where=source.here(),
            fix="give one each",
        )
    which_host = np.repeat(np.arange(n), counts)
    if total_repeat_length is not None:
        which_host = np.resize(
            np.pad(which_host, (0, max(0, total_repeat_length - which_host.size)), mode="edge"),
            total_repeat_length,
        )
    return take(x, which_host, d, mode="clip")


def tile(A: Any, reps: Any) -> Array:
    """``A`` repeated as a whole ``reps`` times along each axis (aligned right)."""
    x = value_of(A, "tile")
    counts = shape_of(reps, "tile")
    rank = max(len(counts), x.aval.ndim)
    counts = (1,) * (rank - len(counts)) + counts
    s = (1,) * (rank - x.aval.ndim) + x.aval.shape
    wide = tuple(n for pair in zip(counts, s, strict=True) for n in pair)
    kept = tuple([2 * i + 1 for i in range(rank)])
    result = broadcast_in_dim(_reshape(x, s), wide, kept)
    return _reshape(result, tuple([c * n for c, n in zip(counts, s, strict=True)]))


def roll(a: ArrayLike, shift: Any, axis: int | Sequence[int] | None = None) -> Array:
    """``a`` with its elements moved cyclically by ``shift`` along ``axis``.

    ``shift`` may be traced. Without an axis, ``a`` is rolled as if flattened.
    """
    x = value_of(a, "roll")
    if axis is None:
        return _reshape(roll(_reshape(x, (x.aval.size,)), shift, 0), x.aval.shape)
    axes = list(axis) if isinstance(axis, (tuple, list)) else [axis]
    shifts = list(shift) if isinstance(shift, (tuple, list)) else [shift] * len(axes)
    if len(shifts) == 1:
        shifts = shifts * len(axes)
    axes = axes * len(shifts) if len(axes) == 1 else axes
    if len(shifts) != len(axes):
        raise errors.ValueRangeError(
            f"roll: {len(shifts)} shifts for {len(axes)} axes.",
            where=source.here(),
            fix="give one shift per axis",
        )
    for amount, a in zip(shifts, axes, strict=True):
        d = axis_in(a, x.aval.ndim, "roll")
        n = x.aval.shape[d]
        if not n:
            continue
        if isinstance(amount, Array):
            start = ew.remainder(ops.neg_p.bind(ops.convert(amount, dtypes.int32)), n)
            twice = shape_ops.concatenate([x, x], d)
            x = dynamic.dynamic_slice_in_dim(twice, start, n, d, allow_negative_indices=False)
            continue
        cut = n - static_int(amount, "roll", "shift") % n
        if cut != n:
            parts = [shape_ops.slice_in_dim(x, cut, n, axis=d), shape_ops.slice_in_dim(x, 0, cut, axis=d)]
            x = shape_ops.concatenate(parts, d)
    return x
