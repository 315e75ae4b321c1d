"""Dynamic slices: reads and updates of one window at a run-time start.

Core operations, above ``gather_scatter``. In: operand and starts, one integer per axis. Out: the window, or
the operand with the window replaced. Starts are clamped so that the window fits. ``vmap`` over the starts is
a gather or scatter; over the operand alone, still a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import ints, sequence
from blufunc.core.ir.trace import Array
from blufunc.core.ops.elementwise import add, clamp, convert, lt, select, zeros_of
from blufunc.core.ops.elementwise import operand as operand_like
from blufunc.core.ops.gather_scatter import gather, scatter
from blufunc.core.ops.shape import (
    canonical_axis,
    concatenate,
    expand_dims,
    insert,
    replace,
    slice_in_dim,
    squeeze,
)
from blufunc.core.ops.windows import (
    GatherDimensionNumbers,
    GatherScatterMode,
    ScatterDimensionNumbers,
    behind_batch,
)
from blufunc.core.primitives.linear_ops import (
    Linear,
    all_front,
    broadcast_in_dim,
    instantiate,
    move_dim,
    zeros,
)
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.primitives.sharding import BOTH, Factoring
from blufunc.core.primitives.tangents import Zero, is_linear, zero

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike


class _DynamicSlice(Linear):
    """The window of ``slice_sizes`` at starts that are operands, clamped to fit."""

    name, kind = "dynamic_slice", "index"
    autocast_class = "widest"

    def shard(self, avals, outs, **params):
        b = Factoring()
        x, *starts = avals
        dims = b.each(x.shape, [d for d, n in enumerate(outs[0].shape) if n != x.shape[d]])

        def local(params, operands, results):
            return {**params, "slice_sizes": results[0]}

        return b.rule([dims, *[()] * len(starts)], [dims], params=local)

    def impl(self, x, *starts, slice_sizes):
        return x[_window(x.shape, slice_sizes, starts)]

    def abstract(self, x, *starts, slice_sizes):
        _check_starts(self.name, x, starts)
        if len(slice_sizes) != x.ndim or any(
            not 0 <= s <= n for s, n in zip(slice_sizes, x.shape, strict=True)
        ):
            raise errors.ShapeError(
                f"dynamic_slice of {x} cannot have the sizes {slice_sizes}.",
                fix="give one size per axis, between 0 and the size of the axis",
            )
        return ShapedArray(slice_sizes, x.dtype)

    def transpose(self, ct, x, *starts, slice_sizes):
        x.add(dynamic_update_slice_p.bind(zeros(x.aval), ct, *starts))

    def batch(self, axis, args, dims, *, slice_sizes):
        (x, *starts), (d, *start_dims) = args, dims
        if all(sd is None for sd in start_dims):
            starts.insert(d, scalar(0, dtypes.int32))
            return self.bind(x, *starts, slice_sizes=insert(slice_sizes, d, axis.size)), d
        shape = x.aval.shape if d is None else x.aval.shape[:d] + x.aval.shape[d + 1 :]
        moving = _moving(shape, slice_sizes)
        if not moving:
            return x, d
        indices = _batched_starts(axis, starts, start_dims, shape, moving, slice_sizes)
        offset = tuple(range(1, len(shape) + 1))
        if d is None:
            numbers = GatherDimensionNumbers(offset, (), moving)
        else:
            x, slice_sizes = move_dim(x, d, 0), (1, *slice_sizes)
            numbers = GatherDimensionNumbers(offset, (), behind_batch(moving), (0,), (0,))
        return gather(x, indices, numbers, slice_sizes, mode=GatherScatterMode.CLIP), 0


class _DynamicUpdateSlice(Primitive):
    """The operand with a window replaced by ``update``; starts are clamped to fit."""

    name, kind, fresh = "dynamic_update_slice", "index", True
    linear, autocast_class = BOTH, "widest"

    def shard(self, avals, outs, **params):
        b = Factoring()
        x, update, *starts = avals
        dims = b.each(x.shape, [d for d, n in enumerate(update.shape) if n != x.shape[d]])
        return b.rule([dims, dims, *[()] * len(starts)], [dims])

    def impl(self, x, update, *starts):
        out = np.array(x, order="C")
        out[_window(x.shape, update.shape, starts)] = update
        return out

    def abstract(self, x, update, *starts):
        _check_starts(self.name, x, starts)
        if x.dtype != update.dtype:
            raise errors.DtypeError(
                f"dynamic_update_slice of {x} needs an update of its dtype, not {update}.",
                fix="convert one of them with .astype",
            )
        if update.ndim != x.ndim or any(m > n for m, n in zip(update.shape, x.shape, strict=True)):
            raise errors.ShapeError(
                f"dynamic_update_slice: the update {update} does not fit in {x}.",
                fix="give it as many axes, none of them larger",
            )
        return x.strong()

    def jvp(self, primals, tangents):
        x, update, *starts = primals
        out = self.bind(*primals)
        tx, tu = tangents[:2]
        if tx.__class__ is Zero and tu.__class__ is Zero:
            return out, zero(out.aval)
        return out, self.bind(instantiate(tx), instantiate(tu), *starts)

    def transpose(self, ct, x, update, *starts):
        if is_linear(x):
            x.add(self.bind(ct, zeros(update.aval), *starts))
        if is_linear(update):
            update.add(dynamic_slice_p.bind(ct, *starts, slice_sizes=update.aval.shape))

    def batch(self, axis, args, dims):
        x, update = all_front(axis, args[:2], dims[:2])
        starts, start_dims = args[2:], dims[2:]
        if all(sd is None for sd in start_dims):
            return self.bind(x, update, scalar(0, dtypes.int32), *starts), 0
        shape, sizes = x.aval.shape[1:], update.aval.shape[1:]
        moving = _moving(shape, sizes)
        if not moving:
            return update, 0
        indices = _batched_starts(axis, starts, start_dims, shape, moving, sizes)
        window = tuple(range(1, len(shape) + 1))
        numbers = ScatterDimensionNumbers(window, (), behind_batch(moving), (0,), (0,))
        return scatter(x, indices, update, numbers, unique_indices=True, mode=GatherScatterMode.CLIP), 0


def _window(shape: tuple[int, ...], sizes: tuple[int, ...], starts: Sequence) -> tuple[slice, ...]:
    window = []
    for n, size, start in zip(shape, sizes, starts, strict=True):
        lo = min(max(int(start), 0), n - size)
        window.append(slice(lo, lo + size))
    return tuple(window)


def _check_starts(name: str, x: ShapedArray, starts: Sequence[ShapedArray]) -> None:
    if len(starts) != x.ndim:
        raise errors.ShapeError(
            f"{name} of {x} needs {x.ndim} start indices, not {len(starts)}.",
            fix="give one start per axis, or use lax.dynamic_slice_in_dim for a single axis",
        )
    for s in starts:
        if s.ndim or not dtypes.is_integer(s.dtype):
            raise errors.DtypeError(
                f"{name} takes integers of rank 0 as start indices, not {s}.",
                fix="pass integers, or convert with .astype('int32')",
            )


def _moving(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes along which a window can move."""
    return tuple(d for d, (n, size) in enumerate(zip(shape, sizes, strict=True)) if size < n)


def _batched_starts(axis, starts, start_dims, shape, moving, sizes) -> Any:
    """Starts along ``moving`` axes, batched and constant, as the indices of a gather."""
    columns = []
    for d in moving:
        s = starts[d]
        if s.aval.dtype != dtypes.int32:
            if s.aval.dtype.itemsize >= 4:  # clamp before narrowing to 32 bits
                s = clamp(0, s, min(shape[d] - sizes[d], np.iinfo(s.aval.dtype).max))
            s = convert(s, dtypes.int32)
        columns.append(broadcast_in_dim(s, (axis.size, 1), () if start_dims[d] is None else (0,)))
    return concatenate(columns, 1)


dynamic_slice_p = _DynamicSlice()
dynamic_update_slice_p = _DynamicUpdateSlice()


# -- functions -------------------------------------------------------------------------------------


def dynamic_slice(
    operand: ArrayLike,
    start_indices: Any,
    slice_sizes: Sequence[int],
    *,
    allow_negative_indices: bool | Sequence[bool] = True,
) -> Array:
    """The window of static ``slice_sizes`` at ``start_indices``, which may be traced.

    Args:
      start_indices: one integer per axis, in a sequence or an array of rank 1. Where the window would not fit, the
        start is moved.
      allow_negative_indices: whether negative starts count from the end (per axis or for all).
    """
    operand = lift(operand)
    starts = _starts(operand, start_indices, allow_negative_indices)
    return dynamic_slice_p.bind(
        operand, *starts, slice_sizes=ints(slice_sizes, "dynamic_slice", "slice_sizes")
    )


def dynamic_update_slice(
    operand: ArrayLike,
    update: ArrayLike,
    start_indices: Any,
    *,
    allow_negative_indices: bool | Sequence[bool] = True,
) -> Array:
    """``operand`` with a window replaced by ``update``; see ``dynamic_slice``."""
    operand = lift(operand)
    starts = _starts(operand, start_indices, allow_negative_indices)
    return dynamic_update_slice_p.bind(operand, operand_like(update, operand), *starts)


def _starts(x: Any, starts: Any, allow_negative: bool | Sequence[bool]) -> list[Any]:
    """Start indices as rank-0 integers that count from the front."""
    if isinstance(starts, Array):
        if starts.aval.ndim != 1:
            raise errors.ShapeError(
                f"start indices are a sequence of integers or an array of rank 1, not {starts.aval}.",
                where=source.here(),
                fix="pass a tuple: dynamic_slice(x, (i, j), sizes)",
            )
        starts = [squeeze(slice_in_dim(starts, i, i + 1), (0,)) for i in range(starts.aval.shape[0])]
    elif starts.__class__ is not tuple:
        starts = sequence(starts, "a dynamic slice", "start_indices")
    ndim = x.aval.ndim
    if len(starts) != ndim:
        raise errors.ShapeError(
            f"a window of {x.aval} needs {ndim} start indices, not {len(starts)}.",
            where=source.here(),
            fix="give one start per axis, or use lax.dynamic_slice_in_dim for a single axis",
        )
    allow = (
        [allow_negative] * ndim
        if isinstance(allow_negative, bool)
        else sequence(allow_negative, "dynamic_slice", "allow_negative_indices", "bools")
    )
    if len(allow) != ndim:
        raise errors.ArgumentError(
            f"allow_negative_indices has {len(allow)} entries for {ndim} axes.",
            where=source.here(),
            fix="give a bool, or one per axis",
        )
    return [_start(s, n, a) for s, n, a in zip(starts, x.aval.shape, allow, strict=True)]


def _start(s: Any, n: int, allow_negative: bool) -> Any:
    if not isinstance(s, Array):
        if isinstance(s, (int, np.integer)):
            s = int(s) + n if allow_negative and s < 0 else int(s)
            return scalar(min(max(s, 0), n), dtypes.int32)
        s = lift(s)
    dtype = s.aval.dtype
    if dtypes.is_integer(dtype) and dtype.itemsize < 4:  # n need not fit in it
        s = convert(s, dtypes.int32)
    if allow_negative and dtypes.is_integer(dtype) and not dtypes.is_unsigned(dtype) and not s.aval.ndim:
        s = select(lt(s, zeros_of(s)), add(s, scalar(n, s.aval.dtype)), s)
    return s


def dynamic_slice_in_dim(
    operand: ArrayLike,
    start_index: ArrayLike,
    slice_size: int,
    axis: int = 0,
    *,
    allow_negative_indices: bool = True,
) -> Array:
    """``slice_size`` positions of ``operand`` along one axis, from ``start_index`` on."""
    operand = lift(operand)
    axis = canonical_axis(axis, operand.aval.ndim, "dynamic_slice_in_dim")
    starts = replace((0,) * operand.aval.ndim, axis, start_index)
    sizes = replace(operand.aval.shape, axis, slice_size)
    return dynamic_slice(operand, starts, sizes, allow_negative_indices=allow_negative_indices)


def dynamic_index_in_dim(
    operand: ArrayLike,
    index: ArrayLike,
    axis: int = 0,
    keepdims: bool = True,
    *,
    allow_negative_indices: bool = True,
) -> Array:
    """The elements at position ``index`` along one axis, kept with ``keepdims``."""
    operand = lift(operand)
    axis = canonical_axis(axis, operand.aval.ndim, "dynamic_index_in_dim")
    out = dynamic_slice_in_dim(operand, index, 1, axis, allow_negative_indices=allow_negative_indices)
    return out if keepdims else squeeze(out, (axis,))


def dynamic_update_slice_in_dim(
    operand: ArrayLike,
    update: ArrayLike,
    start_index: ArrayLike,
    axis: int,
    *,
    allow_negative_indices: bool = True,
) -> Array:
    """``operand`` with ``update`` written along one axis from ``start_index`` on."""
    operand = lift(operand)
    axis = canonical_axis(axis, operand.aval.ndim, "dynamic_update_slice_in_dim")
    starts = replace((0,) * operand.aval.ndim, axis, start_index)
    return dynamic_update_slice(operand, update, starts, allow_negative_indices=allow_negative_indices)


def dynamic_update_index_in_dim(
    operand: ArrayLike, update: ArrayLike, index: ArrayLike, axis: int, *, allow_negative_indices: bool = True
) -> Array:
    """``operand`` with ``update`` at position ``index``; it may lack the axis."""
    operand = lift(operand)
    axis = canonical_axis(axis, operand.aval.ndim, "dynamic_update_index_in_dim")
    update = operand_like(update, operand)
    if update.aval.ndim == operand.aval.ndim - 1:
        update = expand_dims(update, (axis,))
    elif update.aval.ndim != operand.aval.ndim or update.aval.shape[axis] != 1:
        raise errors.ShapeError(
            f"dynamic_update_index_in_dim along axis {axis} of {operand.aval} cannot take the update {update.aval}.",
            where=source.here(),
            fix="give it size 1 along that axis, or leave the axis out",
        )
    return dynamic_update_slice_in_dim(
        operand, update, index, axis, allow_negative_indices=allow_negative_indices
    )
