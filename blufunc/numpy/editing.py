"""Arrays with elements put in, taken out, or replaced, under NumPy's names for it.

Face over gathers, scatters and joins. What NumPy does in place returns a new array here, and says so by
``inplace=False``. Where the size of a result depends on values, these are given by NumPy arrays, Python scalars
or arrays outside of traces; or ``size`` is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray, from_numpy
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import only_none, sequence
from blufunc.core.ir.trace import Array, Tracer
from blufunc.core.ops import cumulative, gather_scatter
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.ops import sort as sort_ops
from blufunc.core.ops.windows import ScatterDimensionNumbers
from blufunc.core.primitives.linear_ops import reshape
from blufunc.numpy import elementwise as ew
from blufunc.numpy.creation import asarray
from blufunc.numpy.indexing import gather_mode, getitem, wrapped
from blufunc.numpy.joining import stack
from blufunc.numpy.manipulation import moveaxis
from blufunc.numpy.picking import flatnonzero, nonzero, take, take_along_axis
from blufunc.numpy.promotion import (
    as_dtype_of,
    as_value,
    axis_in,
    broadcast_shapes,
    cast,
    constant,
    line_axis,
    promote_dtypes,
    shape_of,
    stretch,
)
from blufunc.numpy.updating import At

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

_INT32 = dtypes.int32

# -- insertion and deletion ------------------------------------------------------------------------


def _known_positions(name: str, obj: Any, n: int) -> np.ndarray | None:
    """Integer positions along an axis of size ``n`` as NumPy array; None if traced."""
    if isinstance(obj, slice):
        return np.arange(*obj.indices(n))
    if isinstance(obj, Tracer):
        return None
    if isinstance(obj, (list, tuple)) and not obj:
        return np.zeros(0, np.int64)
    host = np.asarray(asarray(obj) if isinstance(obj, (list, tuple)) else as_value(obj, name))
    if host.dtype.kind == "b":
        if host.shape != (n,):
            raise errors.ShapeError(
                f"{name}: a mask of shape {host.shape} for an axis of size {n}.",
                where=source.here(),
                fix="one boolean for each position of the axis",
            )
        return np.nonzero(host)[0]
    if host.dtype.kind not in "iu":
        raise errors.DtypeError(
            f"{name} at positions of dtype {host.dtype}.", where=source.here(), fix="astype('int32')"
        )
    host = host.astype(np.int64)
    outside = host[(host < -n) | (host >= n + (name == "insert"))]
    if outside.size:
        raise errors.IndexRangeError(
            f"{name} at position {outside.flat[0]} of an axis of size {n}.",
            where=source.here(),
            fix=f"use positions from {-n} on",
        )
    return np.where(host < 0, host + n, host)


def delete(
    arr: ArrayLike, obj: Any, axis: int | None = None, *, assume_unique_indices: bool = False
) -> Array:
    """``arr`` without the positions ``obj`` along an axis; None flattens it.

    Args:
      arr: an array.
      obj: an int, a slice, integers or a mask; a traced int; or traced integers, with ``assume_unique_indices``.
      axis: an axis of ``arr``.
      assume_unique_indices: a promise that no position is named twice, so that the size of the result is known.
    """
    x = as_value(arr, "delete")
    x, d = line_axis(x, axis, "delete")
    n = x.aval.shape[d]
    at = _known_positions("delete", obj, n)
    if at is not None:
        return take(x, np.delete(np.arange(n), at), d, mode="clip")
    obj = as_value(obj, "delete")
    if not dtypes.is_integer(obj.aval.dtype) or (obj.aval.ndim and not assume_unique_indices):
        raise errors.ConcretizationError(
            f"delete of traced positions ({obj.aval}): the size of the result would not be known.",
            where=source.here(),
            fix="assume_unique_indices=True, if no position is named twice; or bnp.where with a mask",
        )
    gone = reshape(wrapped(obj, n), (obj.aval.size,))
    keep = At(ops.eq(shape_ops.iota(_INT32, (n,), 0), -1))[gone].set(True)
    at_kept = flatnonzero(ops.bitwise_not(keep), size=max(n - gone.aval.size, 0))
    return take(x, at_kept, d, mode="clip")


def insert(arr: ArrayLike, obj: Any, values: ArrayLike, axis: int | None = None) -> Array:
    """``arr`` with ``values`` inserted before positions ``obj``; axis None flattens.

    Args:
      arr: an array.
      obj: an int, a slice, or integers, which may be traced; positions in ``arr`` as it was. A mask stands for
        its positions.
      values: what to put in, in the dtype of ``arr``; broadcasts to the shape that is put in.
      axis: an axis of ``arr``.
    """
    x = as_value(arr, "insert")
    new = asarray(values, x.aval.dtype)
    x, d = line_axis(x, axis, "insert")
    n = x.aval.shape[d]
    known = _known_positions("insert", obj, n)
    at = from_numpy(known.astype(np.int32)) if known is not None else wrapped(as_value(obj, "insert"), n)
    if not dtypes.is_integer(at.aval.dtype) or at.aval.ndim > 1:
        raise errors.ArgumentError(
            f"insert at {at.aval}.", where=source.here(), fix="an int, a slice, or a vector of integers"
        )
    new = reshape(new, (1,) * max(x.aval.ndim - new.aval.ndim, 0) + new.aval.shape)
    if not at.aval.ndim:
        new = moveaxis(new, 0, d)  # as NumPy does: one position takes rows
    count = at.aval.size if at.aval.size != 1 else new.aval.shape[d]
    target = (*x.aval.shape[:d], count, *x.aval.shape[d + 1 :])
    if broadcast_shapes(target, new.aval.shape) != target:
        raise errors.ShapeError(
            f"insert: values of shape {new.aval.shape} into {x.aval} along axis {d}.",
            where=source.here(),
            fix="values broadcast to x, but for the axis",
        )
    lines, new = moveaxis(x, d, 0), moveaxis(stretch(new, target), d, 0)
    rest = lines.aval.shape[1:]
    at = ops.clamp(0, stretch(reshape(at, (at.aval.size,)), (count,)), n)
    order = sort_ops.argsort(at, 0)
    # the i-th insertion moves later ones by one
    shift = sort_ops.place_along(shape_ops.iota(_INT32, (count,), 0), order, 0)
    places = ops.add(cast(at, _INT32), shift)
    total = n + count
    taken = At(ops.eq(shape_ops.iota(_INT32, (total,), 0), -1))[places].set(True)
    kept = flatnonzero(ops.bitwise_not(taken), size=n)
    result = At(stretch(constant(0, x.aval.dtype), (total, *rest)))[places].set(new, unique_indices=True)
    result = At(result)[kept].set(lines, unique_indices=True)
    return moveaxis(result, 0, d)


def resize(a: ArrayLike, new_shape: SupportsIndex | Sequence[SupportsIndex]) -> Array:
    """The elements of ``a`` in another shape, repeated cyclically to fill it."""
    x, shape = as_value(a, "resize"), shape_of(new_shape, "resize")
    n, size = x.aval.size, math.prod(shape)
    flat = reshape(x, (n,))
    if not n:
        return stretch(constant(0, x.aval.dtype), shape)
    if size > n:
        flat = reshape(stretch(flat, (-(-size // n), n)), (-(-size // n) * n,))
    return reshape(shape_ops.slice_in_dim(flat, 0, size), shape)


def trim_zeros(filt: ArrayLike, trim: str = "fb", axis: int | None = None) -> Array:
    """A vector without leading (``'f'``) and trailing (``'b'``) zeros; not traceable.

    ``axis`` is its only one, 0, or None.

    Raises:
      ConcretizationError: the vector is traced, so that the size of the result would not be known.
    """
    x = as_value(filt, "trim_zeros")
    if not isinstance(trim, str) or set(trim.lower()) - {"f", "b"}:
        raise errors.ValueRangeError(
            f"trim_zeros: trim is {trim!r:.60}.", where=source.here(), fix="use 'f', 'b' or 'fb'"
        )
    if x.aval.ndim != 1:
        raise errors.ShapeError(f"trim_zeros of {x.aval}.", where=source.here(), fix="pass a vector")
    if axis is not None:
        axis_in(axis, 1, "trim_zeros")
    (at,) = nonzero(x)
    host = np.asarray(at)
    if not host.size:
        return shape_ops.slice_in_dim(x, 0, 0)
    start = int(host[0]) if "f" in trim.lower() else 0
    stop = int(host[-1]) + 1 if "b" in trim.lower() else x.aval.size
    return shape_ops.slice_in_dim(x, start, stop)


# -- choice by mask or number ----------------------------------------------------------------------


def compress(
    condition: ArrayLike,
    a: ArrayLike,
    axis: int | None = None,
    *,
    size: int | None = None,
    fill_value: ArrayLike = 0,
    out: None = None,
) -> Array:
    """Positions along an axis where the vector ``condition`` holds; None flattens.

    ``size`` is the number of elements to return, filled with ``fill_value``; required if ``condition`` is traced.
    """
    only_none("compress", "out", out)
    mask, x = asarray(condition), as_value(a, "compress")
    if mask.aval.ndim != 1:
        raise errors.ShapeError(f"compress by {mask.aval}.", where=source.here(), fix="pass a vector")
    x, d = line_axis(x, axis, "compress")
    n = x.aval.shape[d]
    if isinstance(mask, ConcreteArray) and size is None:
        (known,) = np.nonzero(np.asarray(mask))
        if known.size and known[-1] >= n:
            raise errors.ShapeError(
                f"compress: a condition of size {mask.aval.size} for an axis of size {n}.",
                where=source.here(),
                fix="one boolean for each position of the axis",
            )
        return take(x, known, d, mode="clip")
    flags = shape_ops.slice_in_dim(ew.truth(mask, "compress"), 0, min(n, mask.aval.size))
    at = flatnonzero(flags, size=size, fill_value=n)
    return take(x, at, d, mode="fill", fill_value=fill_value)


def extract(
    condition: ArrayLike, arr: ArrayLike, *, size: int | None = None, fill_value: ArrayLike = 0
) -> Array:
    """The elements of ``arr`` where ``condition`` holds, both flattened."""
    mask = as_value(condition, "extract")
    flat = (
        np.asarray(mask).reshape(-1) if isinstance(mask, ConcreteArray) else reshape(mask, (mask.aval.size,))
    )
    return compress(flat, arr, None, size=size, fill_value=fill_value)


def choose(a: ArrayLike, choices: Any, out: None = None, mode: str = "raise") -> Array:
    """For each integer in ``a``, the element at its place of that choice.

    ``a`` and the choices broadcast. For indices out of range, ``mode='clip'`` takes the nearest choice and ``'wrap'``
    wraps around; ``'raise'`` is an error, and requires concrete indices.
    """
    only_none("choose", "out", out)
    a = as_value(a, "choose")
    if isinstance(choices, Array):
        options = [getitem(choices, i) for i in range(len(choices))]
    else:
        options = list(sequence(choices, "choose", "choices", "arrays"))
    if not options or not (dtypes.is_integer(a.aval.dtype) or dtypes.is_bool(a.aval.dtype)):
        raise errors.ArgumentError(
            f"choose by {a.aval} among {len(options)} choices.",
            where=source.here(),
            fix="integers, and one choice at least",
        )
    a = cast(a, _INT32)
    n = len(options)
    if mode == "raise":
        if not isinstance(a, ConcreteArray):
            raise errors.ConcretizationError(
                "choose with mode='raise' by a traced array: whether its numbers are in range is not known.",
                where=source.here(),
                fix="mode='clip', or 'wrap'",
            )
        host = np.asarray(a)
        if ((host < 0) | (host >= n)).any():
            raise errors.IndexRangeError(
                f"choose: a number out of range for {n} choices.",
                where=source.here(),
                fix="mode='clip', or 'wrap'",
            )
    elif mode == "wrap":
        a = ew.remainder(a, n)
    elif mode == "clip":
        a = ops.clamp(0, a, n - 1)
    else:
        raise errors.ValueRangeError(
            f"choose: mode is {mode!r:.60}.", where=source.here(), fix="use 'raise', 'clip' or 'wrap'"
        )
    values = promote_dtypes("choose", *options)
    shape = broadcast_shapes(a.aval.shape, *[v.aval.shape for v in values])
    table = stack([stretch(v, shape) for v in values], 0)
    return getitem(take_along_axis(table, reshape(stretch(a, shape), (1, *shape)), 0, mode="clip"), 0)


# -- updates ---------------------------------------------------------------------------------------


def _refuse_inplace(name: str, inplace: Any) -> None:
    if inplace:
        raise errors.ImmutableArrayError(
            f"{name} in place: arrays are immutable.",
            where=source.here(),
            why="transforms are only correct for functions that change nothing.",
            fix=f"x = bnp.{name}(x, ..., inplace=False)",
        )


def put(
    a: ArrayLike, ind: ArrayLike, v: ArrayLike, mode: str | None = None, *, inplace: bool = True
) -> Array:
    """``a`` with ``v``, repeated, at flat positions; with ``inplace=False``.

    Out of range: nothing is written by default; ``mode='clip'`` writes to the nearest element, ``'wrap'`` counts round.
    """
    _refuse_inplace("put", inplace)
    x = as_value(a, "put")
    at = asarray(ind)
    values = asarray(v, x.aval.dtype)
    if not dtypes.is_integer(at.aval.dtype):
        raise errors.DtypeError(f"put at {at.aval}.", where=source.here(), fix="astype('int32')")
    n = x.aval.size
    at = reshape(at, (at.aval.size,))
    if not at.aval.size or not values.aval.size:
        return x
    if mode == "wrap":
        at, mode = ew.remainder(at, max(n, 1)), None
    elif mode not in (None, "clip"):
        raise errors.ValueRangeError(
            f"put: mode is {mode!r:.60}.", where=source.here(), fix="use 'clip', 'wrap', or none"
        )
    new = resize(values, at.aval.shape)
    return reshape(At(reshape(x, (n,)))[at].set(cast(new, x.aval.dtype), mode=mode), x.aval.shape)


def place(arr: ArrayLike, mask: ArrayLike, vals: ArrayLike, *, inplace: bool = True) -> Array:
    """``arr`` with ``vals``, repeated, where ``mask`` holds; with ``inplace=False``."""
    _refuse_inplace("place", inplace)
    x, mask = as_value(arr, "place"), as_value(mask, "place")
    values = asarray(vals, x.aval.dtype)
    if mask.aval.size != x.aval.size or not values.aval.size:
        raise errors.ShapeError(
            f"place: a mask {mask.aval} for {x.aval}, and {values.aval.size} values.",
            where=source.here(),
            fix="a mask of the size of x, and one value at least",
        )
    flags = reshape(ew.truth(mask, "place"), (mask.aval.size,))
    rank = ops.sub(cumulative.cumsum_p.bind(ops.convert(flags, _INT32), axis=0, reverse=False), 1)
    line = reshape(values, (values.aval.size,))
    new = getitem(line, ew.remainder(rank, values.aval.size))
    flat = reshape(x, (x.aval.size,))
    return reshape(ops.select(flags, cast(new, x.aval.dtype), flat), x.aval.shape)


def put_along_axis(
    arr: ArrayLike,
    indices: ArrayLike,
    values: ArrayLike,
    axis: int | None,
    inplace: bool = True,
    *,
    mode: str | None = None,
) -> Array:
    """``arr`` with ``values`` where ``take_along_axis`` reads; ``inplace=False``.

    ``indices`` have the rank of ``arr`` and sizes that broadcast to it but along the axis; ``values`` broadcast to
    them. The axis None means ``arr`` flattened. Out of range nothing is written; ``mode='clip'`` writes to the nearest
    element.
    """
    _refuse_inplace("put_along_axis", inplace)
    x, at = as_value(arr, "put_along_axis"), as_value(indices, "put_along_axis")
    shape = x.aval.shape
    x, d = line_axis(x, axis, "put_along_axis")
    rank = x.aval.ndim
    if at.aval.ndim != rank or not dtypes.is_integer(at.aval.dtype):
        raise errors.ShapeError(
            f"put_along_axis in {x.aval} at {at.aval}: the indices are integers of the same rank.",
            where=source.here(),
            fix="insert axes of size 1: indices[:, None]",
        )
    target = tuple([at.aval.shape[i] if i == d else n for i, n in enumerate(x.aval.shape)])
    if broadcast_shapes(at.aval.shape, target) != target:
        raise errors.ShapeError(
            f"put_along_axis: {x.aval.shape} and {at.aval.shape} do not agree beside axis {d}.",
            where=source.here(),
            fix="only the size along the axis may differ",
        )
    at = wrapped(stretch(at, target), x.aval.shape[d])
    values = as_dtype_of(values, x.aval.dtype, "put_along_axis")
    if broadcast_shapes(values.aval.shape, target) != target:
        raise errors.ShapeError(
            f"put_along_axis: values {values.aval} for indices of shape {target}.",
            where=source.here(),
            fix="values broadcast to the indices",
        )
    others = tuple([i for i in range(rank) if i != d])
    out = gather_scatter.scatter_p.bind(
        x,
        reshape(at, (*target, 1)),
        stretch(values, target),
        dimension_numbers=ScatterDimensionNumbers((), (d,), (d,), others, others),
        indices_are_sorted=False,
        unique_indices=False,
        mode=gather_mode(mode),
    )
    return reshape(out, shape)


def fill_diagonal(a: ArrayLike, val: ArrayLike, wrap: bool = False, *, inplace: bool = True) -> Array:
    """``a`` with ``val``, repeated, on its diagonal; with ``inplace=False``.

    ``a`` has two axes, or several of one size. With ``wrap`` the diagonal of a tall matrix begins again below.
    """
    _refuse_inplace("fill_diagonal", inplace)
    x = as_value(a, "fill_diagonal")
    val = asarray(val, x.aval.dtype)
    s = x.aval.shape
    if len(s) < 2 or (len(s) > 2 and len(set(s)) > 1):
        raise errors.ShapeError(
            f"fill_diagonal of {x.aval}.", where=source.here(), fix="a matrix, or axes of one size"
        )
    if len(s) == 2:
        step = s[1] + 1
        end = x.aval.size if wrap else min(s[0], s[1]) * s[1]
    else:
        step, end = 1 + sum(math.prod(s[i:]) for i in range(1, len(s))), x.aval.size
    at = np.arange(0, end, step)
    if not at.size or not val.aval.size:
        return x
    new = cast(resize(val, (at.size,)), x.aval.dtype)
    return reshape(At(reshape(x, (x.aval.size,)))[at].set(new), s)
