"""The same elements in other shapes and places: reshape, transpose, join, split, repeat, pad, take.

Face over ``core.structure`` and ``core.ops.shape``. Shapes, axes and counts are static; what only
depends on them becomes slices, pads and reshapes, and never a gather.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core import dtypes, source
from blufunc.core.array import Array, from_numpy
from blufunc.core.ops import cumulative
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import index as index_ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.ops.reduce import reduce_and
from blufunc.core.source import here
from blufunc.core.structure import broadcast_in_dim, reduce_sum
from blufunc.core.structure import reshape as _reshape
from blufunc.core.structure import transpose as _transpose
from blufunc.core.trace import Value
from blufunc.numpy import elementwise as ew
from blufunc.numpy.creation import asarray, match_to
from blufunc.numpy.indexing import gather_mode, getitem, wrapped
from blufunc.numpy.promotion import (
    PYTHON_SCALARS,
    as_value,
    axes_in,
    axis_in,
    cast,
    constant,
    dtype_of,
    match_shapes,
    promote_dtypes,
    shape_of,
    static_int,
    stretch,
)


def _given(x: Any, name: str) -> Value:
    kind = PYTHON_SCALARS.get(x.__class__)
    return as_value(x, name) if kind is None else constant(x, *kind)


def shape(x: Any) -> tuple[int, ...]:
    """The shape of x, a tuple of int."""
    return _given(x, "shape").aval.shape


def ndim(x: Any) -> int:
    """The number of axes of x."""
    return _given(x, "ndim").aval.ndim


def size(x: Any, axis: int | None = None) -> int:
    """The number of elements of x, or the size of an axis."""
    aval = _given(x, "size").aval
    return aval.size if axis is None else aval.shape[axis_in(axis, aval.ndim, "size")]


# -- shapes ----------------------------------------------------------------------------------------


def reshape(x: Any, /, shape: Any, order: str = "C", *, copy: bool | None = None) -> Value:
    """The elements of x in another shape; one size may be -1, which is then worked out.

    Elements are read and written in row-major order, or column-major with ``order='F'``.
    """
    x = _given(x, "reshape")
    wanted = _solved(x.aval.shape, shape_of(shape, "reshape"))
    if order == "F":
        backwards = _transpose(x, tuple(range(x.aval.ndim))[::-1])
        return _transpose(_reshape(backwards, wanted[::-1]), tuple(range(len(wanted)))[::-1])
    if order != "C":
        raise errors.ValueRangeError(
            f"reshape: order is {order!r}.", where=source.here(), fix="use 'C' or 'F'"
        )
    result = _reshape(x, wanted)
    return ops.copy_p.bind(result) if copy else result


def _solved(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    count, rest = math.prod(old), math.prod([n for n in new if n != -1])
    unknown = new.count(-1)
    if unknown == 1 and rest > 0 and count % rest == 0:
        return tuple([count // rest if n == -1 else n for n in new])
    if unknown == 0 and rest == count and all(n >= 0 for n in new):
        return new
    if unknown > 1:
        why, fix = "only one size can be worked out from the others.", "give all sizes but one"
    elif unknown:
        why, fix = f"{count} is not a multiple of {rest}.", "check the sizes that are given"
    else:
        why, fix = f"{old} holds {count} elements and {new} {rest}.", "use -1 for the size that should follow"
    raise errors.ShapeError(f"cannot reshape {old} to {new}.", where=source.here(), why=why, fix=fix)


def ravel(x: Any, /, order: str = "C") -> Value:
    """The elements of x in row-major order, as rank 1."""
    x = _given(x, "ravel")
    return reshape(x, (x.aval.size,), order)


def expand_dims(x: Any, /, axis: Any) -> Value:
    """x with new axes of size 1 at positions ``axis`` (an int or several) of the result."""
    x = _given(x, "expand_dims")
    count = len(axis) if isinstance(axis, (tuple, list)) else 1
    axes = axes_in(axis, x.aval.ndim + count, "expand_dims")
    old = iter(x.aval.shape)
    return _reshape(x, tuple([1 if d in axes else next(old) for d in range(x.aval.ndim + count)]))


def squeeze(x: Any, /, axis: Any = None) -> Value:
    """x without its axes of size 1, or without those named, which must have size 1."""
    x = _given(x, "squeeze")
    old = x.aval.shape
    if axis is None:
        return _reshape(x, tuple([n for n in old if n != 1]))
    axes = axes_in(axis, len(old), "squeeze")
    for a in axes:
        if old[a] != 1:
            raise errors.ShapeError(
                f"squeeze: axis {a} of {x.aval} has size {old[a]}.",
                where=source.here(),
                fix="index the axis (x[0]) or reduce over it",
            )
    return _reshape(x, tuple([n for d, n in enumerate(old) if d not in axes]))


def atleast_1d(*xs: Any) -> Any:
    """Each x with rank 1 at least; a list if there are several."""
    return _each(xs, lambda x: _reshape(x, (1,)) if not x.aval.ndim else x, "atleast_1d")


def atleast_2d(*xs: Any) -> Any:
    """Each x with rank 2 at least (axes are added in front); a list if there are several."""
    return _each(xs, lambda x: _reshape(x, (1,) * max(2 - x.aval.ndim, 0) + x.aval.shape), "atleast_2d")


def atleast_3d(*xs: Any) -> Any:
    """Each x with rank 3 at least: ``(n,)`` becomes ``(1, n, 1)`` and ``(m, n)`` ``(m, n, 1)``."""

    def three(x: Value) -> Value:
        s = x.aval.shape
        return _reshape(x, [(1, 1, 1), (1, *s, 1), (*s, 1)][len(s)]) if len(s) < 3 else x

    return _each(xs, three, "atleast_3d")


def _each(xs: Sequence, f: Any, name: str) -> Any:
    results = [f(_given(x, name)) for x in xs]
    return results[0] if len(results) == 1 else results


# -- axes ------------------------------------------------------------------------------------------


def transpose(x: Any, /, axes: Any = None) -> Value:
    """x with its axes in the order of ``axes``, reversed by default."""
    x = _given(x, "transpose")
    rank = x.aval.ndim
    if axes is None:
        return _transpose(x, tuple(range(rank))[::-1])
    order = tuple([axis_in(a, rank, "transpose") for a in axes])
    if sorted(order) != list(range(rank)):
        raise errors.ShapeError(
            f"transpose: {tuple(axes)} is not an order of the {rank} axes of {x.aval}.",
            where=source.here(),
            fix="name each axis once",
        )
    return _transpose(x, order)


permute_dims = transpose


def matrix_transpose(x: Any, /) -> Value:
    """x ``(..., m, n)`` with its last two axes exchanged."""
    x = as_value(x, "matrix_transpose")
    if x.aval.ndim < 2:
        raise errors.ShapeError(
            f"matrix_transpose takes matrices, not {x.aval}.",
            where=source.here(),
            fix="x[:, None] is a column",
        )
    return swapaxes(x, -1, -2)


def swapaxes(x: Any, /, axis1: int, axis2: int) -> Value:
    """x with two axes exchanged."""
    x = as_value(x, "swapaxes")
    rank = x.aval.ndim
    order = list(range(rank))
    a, b = axis_in(axis1, rank, "swapaxes"), axis_in(axis2, rank, "swapaxes")
    order[a], order[b] = b, a
    return _transpose(x, tuple(order))


def moveaxis(x: Any, /, source: Any, destination: Any) -> Value:
    """x with axes moved from positions ``source`` to ``destination`` (ints or equally long tuples)."""
    x = as_value(x, "moveaxis")
    rank = x.aval.ndim
    src = [axis_in(a, rank, "moveaxis") for a in (source if isinstance(source, (tuple, list)) else [source])]
    dst = [
        axis_in(a, rank, "moveaxis")
        for a in (destination if isinstance(destination, (tuple, list)) else [destination])
    ]
    if len(src) != len(dst) or len(set(src)) != len(src) or len(set(dst)) != len(dst):
        raise errors.ValueRangeError(
            f"moveaxis: {source} and {destination} are not equally many distinct axes.",
            where=here(),
            fix="name for each axis that moves one place",
        )
    order: list[int] = [d for d in range(rank) if d not in src]
    for to, frm in sorted(zip(dst, src, strict=True)):
        order.insert(to, frm)
    return _transpose(x, tuple(order))


def broadcast_to(x: Any, /, shape: Any) -> Value:
    """x repeated along new leading axes and axes of size 1 to make up ``shape``."""
    x = _given(x, "broadcast_to")
    return match_to("broadcast_to", shape_of(shape, "broadcast_to"), x)[0]


def broadcast_arrays(*xs: Any) -> list[Value]:
    """The arrays, each broadcast to their common shape."""
    values = [_given(x, "broadcast_arrays") for x in xs]
    if not values:
        return []
    values = match_shapes("broadcast_arrays", *values)
    full = next((v.aval.shape for v in values if v.aval.ndim), ())
    return [stretch(v, full) for v in values]


def flip(x: Any, /, axis: Any = None) -> Value:
    """x in reverse order along ``axis`` (an int, several, or None for all)."""
    x = as_value(x, "flip")
    return shape_ops.rev(x, axes_in(axis, x.aval.ndim, "flip"))


def flipud(x: Any, /) -> Value:
    """x in reverse order along axis 0."""
    return flip(x, 0)


def fliplr(x: Any, /) -> Value:
    """x in reverse order along axis 1."""
    return flip(x, 1)


def rot90(x: Any, /, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Value:
    """x turned by ``k`` quarter turns from the first of two axes towards the second."""
    x = as_value(x, "rot90")
    a, b = (axis_in(d, x.aval.ndim, "rot90") for d in axes)
    k = static_int(k, "rot90", "k") % 4
    if k == 0:
        return x
    if k == 2:
        return flip(x, (a, b))
    return swapaxes(flip(x, b), a, b) if k == 1 else flip(swapaxes(x, a, b), b)


# -- joining and splitting -------------------------------------------------------------------------


def _sequence(xs: Any, name: str) -> list[Any]:
    if isinstance(xs, (tuple, list)):
        if not xs:
            raise errors.ValueRangeError(
                f"{name} of no arrays.", where=source.here(), fix="pass one at least"
            )
        return list(xs)
    if isinstance(xs, (Value, np.ndarray)):
        x = as_value(xs, name)
        return [getitem(x, i) for i in range(len(x))]
    raise errors.ArgumentError(
        f"{name} takes a sequence of arrays, not a {type(xs).__name__}.",
        where=source.here(),
        fix=f"bnp.{name}([x, y])",
    )


def concatenate(xs: Any, /, axis: int | None = 0, *, dtype: Any = None) -> Value:
    """Arrays of one shape, but for their size along ``axis``, one after the other along it.

    They are promoted to one dtype. With ``axis=None`` they are flattened first.
    """
    values = promote_dtypes("concatenate", *_sequence(xs, "concatenate"))
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


def stack(xs: Any, /, axis: int = 0, *, dtype: Any = None) -> Value:
    """Arrays of one shape along a new axis at position ``axis`` of the result."""
    values = promote_dtypes("stack", *_sequence(xs, "stack"))
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


def unstack(x: Any, /, *, axis: int = 0) -> tuple[Value, ...]:
    """The slices of x along an axis, without it."""
    x = as_value(x, "unstack")
    d = axis_in(axis, x.aval.ndim, "unstack")
    return tuple([shape_ops.index_in_dim(x, i, d, keepdims=False) for i in range(x.aval.shape[d])])


def vstack(xs: Any, /, *, dtype: Any = None) -> Value:
    """Arrays one below the other: along axis 0, vectors as rows."""
    return concatenate([atleast_2d(x) for x in _sequence(xs, "vstack")], 0, dtype=dtype)


def hstack(xs: Any, /, *, dtype: Any = None) -> Value:
    """Arrays side by side: along axis 1, vectors along axis 0."""
    values = [atleast_1d(x) for x in _sequence(xs, "hstack")]
    return concatenate(values, 0 if values[0].aval.ndim == 1 else 1, dtype=dtype)


def dstack(xs: Any, /, *, dtype: Any = None) -> Value:
    """Arrays along a third axis."""
    return concatenate([atleast_3d(x) for x in _sequence(xs, "dstack")], 2, dtype=dtype)


def column_stack(xs: Any, /) -> Value:
    """Vectors as the columns of a matrix, beside matrices."""
    values = [atleast_1d(x) for x in _sequence(xs, "column_stack")]
    return concatenate([_reshape(v, (v.aval.size, 1)) if v.aval.ndim == 1 else v for v in values], 1)


def append(x: Any, values: Any, axis: int | None = None) -> Value:
    """``values`` after x along an axis; both flattened by default."""
    return concatenate([x, values], axis)


def split(x: Any, indices_or_sections: Any, axis: int = 0) -> list[Value]:
    """x cut along an axis: into equal parts, or before each of the given positions."""
    x = as_value(x, "split")
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


def array_split(x: Any, indices_or_sections: Any, axis: int = 0) -> list[Value]:
    """x cut along an axis: into parts whose sizes differ by 1 at most, or before each of the given positions."""
    x = as_value(x, "array_split")
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


def vsplit(x: Any, indices_or_sections: Any) -> list[Value]:
    """``split`` along axis 0."""
    return split(x, indices_or_sections, 0)


def hsplit(x: Any, indices_or_sections: Any) -> list[Value]:
    """``split`` along axis 1, or axis 0 of a vector."""
    return split(x, indices_or_sections, 0 if ndim(x) == 1 else 1)


def dsplit(x: Any, indices_or_sections: Any) -> list[Value]:
    """``split`` along axis 2."""
    return split(x, indices_or_sections, 2)


# -- repetition ------------------------------------------------------------------------------------


def repeat(
    x: Any, /, repeats: Any, axis: int | None = None, *, total_repeat_length: int | None = None
) -> Value:
    """Each element of x along an axis ``repeats`` times (an int, or one for each); flattened by default.

    Traced ``repeats`` need ``total_repeat_length``, the size of the result, which cuts it off or fills it
    with the last element.
    """
    x = _given(x, "repeat")
    if axis is None:
        x, axis = _reshape(x, (x.aval.size,)), 0
    d = axis_in(axis, x.aval.ndim, "repeat")
    s, n = x.aval.shape, x.aval.shape[d]
    if isinstance(repeats, Value) and not (isinstance(repeats, Array) and total_repeat_length is None):
        if total_repeat_length is None:
            raise errors.ConcretizationError(
                "repeat by a traced array: the size of the result would not be known.",
                where=source.here(),
                fix="give total_repeat_length=...",
            )
        from_end = shape_ops.iota(dtypes.int32, (total_repeat_length, n), 0)
        ends = broadcast_in_dim(ops_cumsum(broadcast_to(repeats, (n,))), (total_repeat_length, n), (1,))
        which = _count(ops.ge_p.bind(from_end, cast(ends, dtypes.int32)), 1)
        return take(x, which, d, mode="clip")
    counts = np.asarray(repeats)
    if counts.ndim and counts.size != 1:
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
    count = static_int(counts.reshape(())[()], "repeat", "the count")
    if count < 0:
        raise errors.ValueRangeError(f"repeat {count} times.", where=source.here(), fix="use 0 or more")
    wide = broadcast_in_dim(
        x, (*s[: d + 1], count, *s[d + 1 :]), tuple([i if i <= d else i + 1 for i in range(len(s))])
    )
    result = _reshape(wide, (*s[:d], n * count, *s[d + 1 :]))
    if total_repeat_length is not None and total_repeat_length != n * count:
        return repeat(x, np.full(n, count), d, total_repeat_length=total_repeat_length)
    return result


def ops_cumsum(x: Value) -> Value:
    """The running sum of a vector."""
    return cumulative.cumsum_p.bind(x, axis=0, reverse=False)


def _count(mask: Value, axis: int) -> Value:
    return reduce_sum(ops.convert(mask, dtypes.int32), (axis,))


def tile(x: Any, /, reps: Any) -> Value:
    """x repeated as a whole ``reps`` times along each axis (an int, or a tuple aligned at the right)."""
    x = _given(x, "tile")
    counts = shape_of(reps, "tile")
    rank = max(len(counts), x.aval.ndim)
    counts = (1,) * (rank - len(counts)) + counts
    s = (1,) * (rank - x.aval.ndim) + x.aval.shape
    wide = tuple(n for pair in zip(counts, s, strict=True) for n in pair)
    kept = tuple([2 * i + 1 for i in range(rank)])
    result = broadcast_in_dim(_reshape(x, s), wide, kept)
    return _reshape(result, tuple([c * n for c, n in zip(counts, s, strict=True)]))


def roll(x: Any, /, shift: Any, axis: Any = None) -> Value:
    """x with its elements moved by ``shift`` along ``axis``, those that leave coming back at the other end.

    ``shift`` may be traced. Without an axis, x is rolled as if flattened.
    """
    x = _given(x, "roll")
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
        if isinstance(amount, Value):
            start = ew.remainder(ops.neg_p.bind(ops.convert(amount, dtypes.int32)), n)
            twice = shape_ops.concatenate([x, x], d)
            x = index_ops.dynamic_slice_in_dim(twice, start, n, d, allow_negative_indices=False)
            continue
        cut = n - static_int(amount, "roll", "shift") % n
        if cut != n:
            parts = [shape_ops.slice_in_dim(x, cut, n, axis=d), shape_ops.slice_in_dim(x, 0, cut, axis=d)]
            x = shape_ops.concatenate(parts, d)
    return x


# -- padding ---------------------------------------------------------------------------------------


def pad(x: Any, pad_width: Any, mode: str = "constant", *, constant_values: Any = 0) -> Value:
    """x with elements added at both ends of its axes.

    Args:
      x: an array.
      pad_width: one int for all ends, ``(before, after)`` for all axes, or one such pair for each axis.
      mode: ``'constant'``; ``'edge'``, the last element again; ``'reflect'``, mirrored without it; ``'symmetric'``,
        mirrored with it; ``'wrap'``, from the other end.
      constant_values: for ``'constant'``: a number, or numbers arranged like ``pad_width``.
    """
    x = as_value(x, "pad")
    rank = x.aval.ndim
    widths = _pairs(pad_width, rank, "pad_width")
    if any(w < 0 for pair in widths for w in pair):
        raise errors.ValueRangeError(
            f"pad: {pad_width} has a negative width.", where=source.here(), fix="slice x"
        )
    if mode == "constant":
        return _pad_constant(x, widths, constant_values)
    if mode not in ("edge", "reflect", "symmetric", "wrap"):
        raise errors.UnsupportedError(
            f"pad has no mode {mode!r}.",
            where=source.here(),
            fix="use 'constant', 'edge', 'reflect', 'symmetric' or 'wrap'",
        )
    for d, (before, after) in enumerate(widths):
        if before or after:
            x = _pad_axis(x, d, before, after, mode)
    return x


def _pairs(width: Any, rank: int, what: str) -> list[tuple[int, int]]:
    if isinstance(width, dict):
        given = {axis_in(a, rank, "pad"): w for a, w in width.items()}
        return [_pairs(given[d], 1, what)[0] if d in given else (0, 0) for d in range(rank)]
    try:
        host = np.broadcast_to(np.asarray(width), (rank, 2))
    except (TypeError, ValueError):
        raise errors.ShapeError(
            f"pad: {what} {width} does not fit an array of rank {rank}.",
            where=source.here(),
            fix="give an int, (before, after), or one pair for each axis",
        ) from None
    return [(static_int(a, "pad", what), static_int(b, "pad", what)) for a, b in host]


def _pad_constant(x: Value, widths: list[tuple[int, int]], values: Any) -> Value:
    nested = (
        isinstance(values, (tuple, list)) or np.ndim(values) > 0 if not isinstance(values, Value) else False
    )
    if not nested:
        value = _element(values, x)
        return shape_ops.pad(x, value, [(a, b, 0) for a, b in widths])
    pairs = np.broadcast_to(np.asarray(values), (x.aval.ndim, 2))
    for d, (pair, ends) in enumerate(zip(pairs.tolist(), widths, strict=True)):
        for end, (value, width) in enumerate(zip(pair, ends, strict=True)):
            config = [(0, 0, 0)] * x.aval.ndim
            config[d] = (width, 0, 0) if end == 0 else (0, width, 0)
            x = shape_ops.pad(x, _element(value, x), config)
    return x


def _element(value: Any, x: Value) -> Value:
    if value.__class__ in PYTHON_SCALARS:
        if not dtypes.is_inexact(x.aval.dtype) and not isinstance(value, int):
            value = int(value)
        return constant(value, x.aval.dtype)
    value = as_value(value, "pad")
    if value.aval.size != 1:
        raise errors.ShapeError(
            f"pad: constant_values is {value.aval}.", where=source.here(), fix="pass a number"
        )
    return cast(_reshape(value, ()), x.aval.dtype)


def _pad_axis(x: Value, d: int, before: int, after: int, mode: str) -> Value:
    n = x.aval.shape[d]
    if n == 0:
        raise errors.ValueRangeError(
            f"pad: axis {d} of {x.aval} is empty, so mode {mode!r} has nothing to take.",
            where=source.here(),
            fix="mode='constant'",
        )
    if mode == "edge":
        parts = [x]
        if before:
            parts.insert(0, _edge(x, d, 0, before))
        if after:
            parts.append(_edge(x, d, n - 1, after))
        return shape_ops.concatenate(parts, d)
    if mode == "reflect" and n == 1:
        return _pad_axis(x, d, before, after, "edge")
    # one period of the extended line, of which the result is a window
    host = np.pad(np.arange(n), (before, after), mode=mode)  # type: ignore[call-overload]
    return _from_runs(x, d, host)


def _edge(x: Value, d: int, at: int, width: int) -> Value:
    """The elements at one position of an axis, ``width`` times."""
    to = tuple([width if i == d else n for i, n in enumerate(x.aval.shape)])
    return stretch(shape_ops.slice_in_dim(x, at, at + 1, axis=d), to)


def _from_runs(x: Value, d: int, positions: np.ndarray) -> Value:
    """The elements of x at ``positions`` along an axis, in runs of slices, forwards and backwards."""
    parts, i = [], 0
    while i < len(positions):
        j, step = i + 1, 0
        if j < len(positions) and abs(int(positions[j]) - int(positions[i])) == 1:
            step = int(positions[j] - positions[i])
            while j < len(positions) and positions[j] - positions[j - 1] == step:
                j += 1
        low, high = sorted((int(positions[i]), int(positions[j - 1])))
        run = shape_ops.slice_in_dim(x, low, high + 1, axis=d)
        parts.append(shape_ops.rev(run, (d,)) if step < 0 else run)
        i = j
    return shape_ops.concatenate(parts, d)


# -- picking ---------------------------------------------------------------------------------------


def take(
    x: Any, indices: Any, axis: int | None = None, *, mode: str | None = None, fill_value: Any = None
) -> Value:
    """The elements of x at integer positions along an axis (of x flattened, by default).

    The result has the shape of ``indices`` in the place of the axis. Out of range: ``mode='fill'`` (the
    default) gives NaN, or the extreme of integers; ``'clip'`` the nearest element; ``'wrap'`` counts round.
    """
    x = as_value(x, "take")
    if axis is None:
        x, axis = _reshape(x, (x.aval.size,)), 0
    d = axis_in(axis, x.aval.ndim, "take")
    positions = (
        as_value(indices, "take") if not isinstance(indices, (np.ndarray, np.integer, int)) else indices
    )
    if isinstance(positions, (int, np.integer)) and not isinstance(positions, bool):
        positions = np.asarray(positions, np.int64)
    dtype = positions.dtype
    if dtype.kind not in "iu":
        raise errors.DtypeError(
            f"take at indices of dtype {dtype}.", where=source.here(), fix="astype('int32')"
        )
    if mode == "wrap":
        positions, mode = ew.remainder(positions, x.aval.shape[d]), "clip"
    index = (slice(None),) * d + (positions if positions.ndim else _reshape(asarray(positions), (1,)),)
    result = getitem(x, index, gather_mode(mode or "fill"), fill_value)
    return result if positions.ndim else squeeze(result, d)


def take_along_axis(x: Any, indices: Any, axis: int | None = -1, *, mode: str | None = None) -> Value:
    """For each position of ``indices``, the element of x there along ``axis``, the other axes going along.

    Both have the same rank, and sizes that broadcast except along the axis.
    """
    x, positions = as_value(x, "take_along_axis"), as_value(indices, "take_along_axis")
    if axis is None:
        x, axis = _reshape(x, (x.aval.size,)), 0
    rank = x.aval.ndim
    d = axis_in(axis, rank, "take_along_axis")
    if positions.aval.ndim != rank or not dtypes.is_integer(positions.aval.dtype):
        raise errors.ShapeError(
            f"take_along_axis of {x.aval} at {positions.aval}: the indices are integers of the same rank.",
            where=source.here(),
            fix="insert axes of size 1: indices[:, None]",
        )
    common = []
    for i, (m, n) in enumerate(zip(x.aval.shape, positions.aval.shape, strict=True)):
        if i != d and m != n and 1 not in (m, n):
            raise errors.ShapeError(
                f"take_along_axis: {x.aval.shape} and {positions.aval.shape} do not agree on axis {i}.",
                where=source.here(),
                fix="only the size along the axis may differ",
            )
        common.append(max(m, n) if m and n else 0)
    to_x = tuple([m if i == d else n for i, (m, n) in enumerate(zip(x.aval.shape, common, strict=True))])
    to_i = tuple(
        [m if i == d else n for i, (m, n) in enumerate(zip(positions.aval.shape, common, strict=True))]
    )
    x, positions = stretch(x, to_x), stretch(positions, to_i)
    positions = wrapped(positions, to_x[d])
    batching = tuple([i for i in range(rank) if i != d])
    numbers = index_ops.GatherDimensionNumbers((), (d,), (d,), batching, batching)
    return index_ops.gather(
        x,
        _reshape(positions, (*to_i, 1)),
        numbers,
        (1,) * rank,
        mode=gather_mode(mode or "fill"),
    )


def choose_by(conditions: Sequence, choices: Sequence, default: Any = 0) -> Value:
    """For each element, the first of ``choices`` whose condition holds; else ``default``."""
    if len(conditions) != len(choices) or not conditions:
        raise errors.ValueRangeError(
            f"select: {len(conditions)} conditions for {len(choices)} choices.", where=source.here()
        )
    result = default
    for condition, choice in zip(reversed(conditions), reversed(choices), strict=True):
        result = ew.where(condition, choice, result)
    return result


def ix_(*xs: Any) -> tuple[Value, ...]:
    """Index arrays that together pick a grid: the i-th gets all axes but the i-th with size 1."""
    values = [as_value(x, "ix_") for x in xs]
    return tuple(
        [
            _reshape(v, tuple([v.aval.size if d == i else 1 for d in range(len(xs))]))
            for i, v in enumerate(values)
        ]
    )


def diff(x: Any, /, n: int = 1, axis: int = -1) -> Value:
    """The differences of neighbours along an axis, taken ``n`` times."""
    x = as_value(x, "diff")
    d = axis_in(axis, x.aval.ndim, "diff")
    for _ in range(static_int(n, "diff", "n")):
        size = x.aval.shape[d]
        after = shape_ops.slice_in_dim(x, min(1, size), size, axis=d)
        before = shape_ops.slice_in_dim(x, 0, max(size - 1, 0), axis=d)
        x = ew.not_equal(after, before) if dtypes.is_bool(x.aval.dtype) else ew.subtract(after, before)
    return x


def unravel_index(indices: Any, shape: Any) -> tuple[Value, ...]:
    """Positions in a flattened array as one array of positions for each axis of ``shape``."""
    rest = as_value(indices, "unravel_index")
    result = []
    for n in reversed(shape_of(shape, "unravel_index")):
        result.append(ew.remainder(rest, n))
        rest = ew.floor_divide(rest, n)
    return tuple(reversed(result))


def nonzero(x: Any, /, *, size: int | None = None, fill_value: Any = 0) -> tuple[Value, ...]:
    """The positions of the elements that are not 0, one int32 vector for each axis.

    How many there are is only known from the values: while tracing, ``size`` must be given, which cuts the
    result off or fills it with ``fill_value``.
    """
    x = as_value(x, "nonzero")
    if size is None:
        if not isinstance(x, Array):
            raise errors.ConcretizationError(
                f"nonzero of a traced array ({x.aval}): the size of the result would not be known.",
                where=source.here(),
                fix="give size=..., or use bnp.where(condition, x, y)",
            )
        return tuple([from_numpy(p.astype(np.int32)) for p in np.nonzero(np.asarray(x))])
    size = static_int(size, "nonzero", "size")
    flags = _reshape(ew.truth(x, "nonzero"), (x.aval.size,))
    rank = ops_cumsum(ops.convert(flags, dtypes.int32))
    slots = ops.select(flags, ops.sub(rank, 1), constant(size, dtypes.int32))
    n = shape_ops.iota(dtypes.int32, (x.aval.size,), 0)
    start = broadcast_in_dim(constant(x.aval.size, dtypes.int32), (size,), ())
    numbers = index_ops.ScatterDimensionNumbers((), (0,), (0,))
    flat = index_ops.scatter(start, _reshape(slots, (x.aval.size, 1)), n, numbers)
    found = ops.lt(flat, x.aval.size)
    fills = fill_value if isinstance(fill_value, (tuple, list)) else [fill_value] * x.aval.ndim
    axes = unravel_index(flat, x.aval.shape)
    return tuple([ew.where(found, p, f) for p, f in zip(axes, fills, strict=True)])


def flatnonzero(x: Any, /, *, size: int | None = None, fill_value: Any = 0) -> Value:
    """The positions in x flattened of the elements that are not 0; see ``nonzero``."""
    return nonzero(ravel(x), size=size, fill_value=fill_value)[0]


def argwhere(x: Any, /, *, size: int | None = None, fill_value: Any = 0) -> Value:
    """The positions of the elements that are not 0 as rows of an ``(n, rank)`` array; see ``nonzero``."""
    return stack(nonzero(x, size=size, fill_value=fill_value), 1)


def array_equal(x: Any, y: Any, /, equal_nan: bool = False) -> Value:
    """Whether two arrays have one shape and equal elements, as bool of rank 0."""
    x, y = as_value(x, "array_equal"), as_value(y, "array_equal")
    if x.aval.shape != y.aval.shape:
        return asarray(False)
    same = ew.equal(x, y)
    if equal_nan:
        same = ew.logical_or(same, ew.logical_and(ew.isnan(x), ew.isnan(y)))
    return _all(same)


def allclose(x: Any, y: Any, /, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Value:
    """Whether all elements are close (see ``isclose``), as bool of rank 0."""
    return _all(ew.isclose(x, y, rtol, atol, equal_nan))


def _all(x: Value) -> Value:
    return reduce_and(x, tuple(range(x.aval.ndim)))
