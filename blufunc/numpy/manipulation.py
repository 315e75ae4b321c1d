"""Changes of shape and order: reshape, transpose, broadcast, flip, roll.

Face over ``core.structure`` and ``core.ops.shape``. Shapes and axes are static, so all of this becomes
reshapes, transposes, slices and reversals, and never a gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.axes import is_several, sequence
from blufunc.core.ir.source import here
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.primitives.linear_ops import reshape as _reshape
from blufunc.core.primitives.linear_ops import transpose as _transpose
from blufunc.numpy.creation import match_to
from blufunc.numpy.promotion import (
    as_value,
    axes_in,
    axis_in,
    match_shapes,
    shape_of,
    static_int,
    stretch,
    type_of,
    value_of,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike


def shape(a: Any) -> tuple[int, ...]:
    """The shape of ``a``, a tuple of int."""
    return type_of(a, "shape").shape


def ndim(a: Any) -> int:
    """The number of axes of ``a``."""
    return type_of(a, "ndim").ndim


def size(a: Any, axis: int | Sequence[int] | None = None) -> int:
    """The number of elements of ``a``, or along an axis or axes."""
    aval = type_of(a, "size")
    return math.prod([aval.shape[d] for d in axes_in(axis, aval.ndim, "size")])


# -- shapes ----------------------------------------------------------------------------------------


def reshape(
    a: ArrayLike,
    shape: SupportsIndex | Sequence[SupportsIndex],
    order: str = "C",
    *,
    copy: bool | None = None,
) -> Array:
    """The elements of ``a`` in another shape; a size of -1 is inferred.

    Elements are read and written in row-major order, or column-major with ``order='F'``.
    """
    x = value_of(a, "reshape")
    new_shape = _solved(x.aval.shape, shape_of(shape, "reshape", open=True))
    if order == "F":
        backwards = _transpose(x, tuple(range(x.aval.ndim))[::-1])
        return _transpose(_reshape(backwards, new_shape[::-1]), tuple(range(len(new_shape)))[::-1])
    if order != "C":
        raise errors.ValueRangeError(
            f"reshape: order is {order!r}.", where=source.here(), fix="use 'C' or 'F'"
        )
    result = _reshape(x, new_shape)
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


def ravel(a: ArrayLike, order: str = "C") -> Array:
    """The elements of ``a`` in row-major order, as rank 1."""
    x = value_of(a, "ravel")
    return reshape(x, (x.aval.size,), order)


def expand_dims(a: ArrayLike, axis: int | Sequence[int] = 0) -> Array:
    """Insert axes of size 1 at positions ``axis`` (an int or several) of the result."""
    x = value_of(a, "expand_dims")
    axes: Any = tuple(axis) if is_several(axis) else axis  # type: ignore[arg-type]
    count = len(axes) if axes.__class__ is tuple else 1
    axes = axes_in(axes, x.aval.ndim + count, "expand_dims")
    old = iter(x.aval.shape)
    return _reshape(x, tuple([1 if d in axes else next(old) for d in range(x.aval.ndim + count)]))


def squeeze(a: ArrayLike, axis: int | Sequence[int] | None = None) -> Array:
    """Remove all axes of size 1, or those of ``axis``, which must have size 1."""
    x = value_of(a, "squeeze")
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


@overload
def atleast_1d(ary: ArrayLike, /) -> Array: ...
@overload
def atleast_1d(*arys: ArrayLike) -> Array | list[Array]: ...


def atleast_1d(*arys: Any) -> Any:
    """Each x with rank 1 at least; a list if there are several."""
    return _each(arys, lambda x: _reshape(x, (1,)) if not x.aval.ndim else x, "atleast_1d")


@overload
def atleast_2d(ary: ArrayLike, /) -> Array: ...
@overload
def atleast_2d(*arys: ArrayLike) -> Array | list[Array]: ...


def atleast_2d(*arys: Any) -> Any:
    """Each x with rank 2 at least (axes come first); a list if there are several."""
    return _each(arys, lambda x: _reshape(x, (1,) * max(2 - x.aval.ndim, 0) + x.aval.shape), "atleast_2d")


@overload
def atleast_3d(ary: ArrayLike, /) -> Array: ...
@overload
def atleast_3d(*arys: ArrayLike) -> Array | list[Array]: ...


def atleast_3d(*arys: Any) -> Any:
    """Each x of rank >= 3: ``(n,)`` to ``(1, n, 1)``, ``(m, n)`` to ``(m, n, 1)``."""

    def three(x: Array) -> Array:
        s = x.aval.shape
        return _reshape(x, [(1, 1, 1), (1, *s, 1), (*s, 1)][len(s)]) if len(s) < 3 else x

    return _each(arys, three, "atleast_3d")


def _each(xs: Sequence, f: Any, name: str) -> Any:
    results = [f(value_of(x, name)) for x in xs]
    return results[0] if len(results) == 1 else results


# -- axes ------------------------------------------------------------------------------------------


def transpose(a: ArrayLike, axes: Any = None) -> Array:
    """``a`` with its axes in the order of ``axes``, reversed by default."""
    x = value_of(a, "transpose")
    rank = x.aval.ndim
    if axes is None:
        return _transpose(x, tuple(range(rank))[::-1])
    order = tuple([axis_in(a, rank, "transpose") for a in sequence(axes, "transpose", "axes")])
    if sorted(order) != list(range(rank)):
        raise errors.ShapeError(
            f"transpose: {tuple(axes)} is not an order of the {rank} axes of {x.aval}.",
            where=source.here(),
            fix="name each axis once",
        )
    return _transpose(x, order)


permute_dims = transpose


def matrix_transpose(x: ArrayLike, /) -> Array:
    """x ``(..., m, n)`` with its last two axes swapped."""
    x = as_value(x, "matrix_transpose")
    if x.aval.ndim < 2:
        raise errors.ShapeError(
            f"matrix_transpose takes matrices, not {x.aval}.",
            where=source.here(),
            fix="x[:, None] is a column",
        )
    return swapaxes(x, -1, -2)


def swapaxes(a: ArrayLike, axis1: int, axis2: int) -> Array:
    """Swap two axes of ``a``."""
    x = as_value(a, "swapaxes")
    rank = x.aval.ndim
    order = list(range(rank))
    a, b = axis_in(axis1, rank, "swapaxes"), axis_in(axis2, rank, "swapaxes")
    order[a], order[b] = b, a
    return _transpose(x, tuple(order))


def moveaxis(a: ArrayLike, source: Any, destination: Any) -> Array:
    """Move axes from ``source`` to ``destination`` (ints, or tuples of one length)."""
    x = as_value(a, "moveaxis")
    rank = x.aval.ndim
    src = [axis_in(a, rank, "moveaxis") for a in (source if is_several(source) else [source])]
    dst = [axis_in(a, rank, "moveaxis") for a in (destination if is_several(destination) else [destination])]
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


def rollaxis(a: ArrayLike, axis: int, start: int = 0) -> Array:
    """Move an axis to stand before the one at ``start``; see ``moveaxis``."""
    x = as_value(a, "rollaxis")
    rank = x.aval.ndim
    a, to = axis_in(axis, rank, "rollaxis"), static_int(start, "rollaxis", "start")
    if not -rank <= to <= rank:
        raise errors.ValueRangeError(
            f"rollaxis: start is {to}, of rank {rank}.", where=source.here(), fix=f"use {-rank} to {rank}"
        )
    to = to + rank if to < 0 else to
    return moveaxis(x, a, to - (a < to))


def broadcast_to(array: ArrayLike, shape: Any) -> Array:
    """Repeat ``array`` along new leading axes and axes of size 1 to ``shape``."""
    x = value_of(array, "broadcast_to")
    return match_to("broadcast_to", shape_of(shape, "broadcast_to"), x)[0]


def broadcast_arrays(*args: Any) -> list[Array]:
    """The arrays, each broadcast to their common shape."""
    values = [value_of(x, "broadcast_arrays") for x in args]
    if not values:
        return []
    values = match_shapes("broadcast_arrays", *values)
    full = next((v.aval.shape for v in values if v.aval.ndim), ())
    return [stretch(v, full) for v in values]


def flip(m: ArrayLike, axis: int | Sequence[int] | None = None) -> Array:
    """``m`` in reverse order along ``axis`` (an int, several, or None for all)."""
    x = as_value(m, "flip")
    return shape_ops.rev(x, axes_in(axis, x.aval.ndim, "flip"))


def flipud(m: ArrayLike) -> Array:
    """``m`` in reverse order along axis 0."""
    return flip(m, 0)


def fliplr(m: ArrayLike) -> Array:
    """``m`` in reverse order along axis 1."""
    return flip(m, 1)


def rot90(m: ArrayLike, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Array:
    """Rotate ``m`` by ``k`` quarter turns from the first axis to the second."""
    x = as_value(m, "rot90")
    pair = axes_in(sequence(axes, "rot90", "axes"), x.aval.ndim, "rot90")
    if len(pair) != 2:
        raise errors.ArgumentError(
            f"rot90: axes is a pair of axes, not {axes!r:.60}.", where=source.here(), fix="axes=(0, 1)"
        )
    a, b = (axis_in(d, x.aval.ndim, "rot90") for d in axes)
    k = static_int(k, "rot90", "k") % 4
    if k == 0:
        return x
    if k == 2:
        return flip(x, (a, b))
    return swapaxes(flip(x, b), a, b) if k == 1 else flip(swapaxes(x, a, b), b)
