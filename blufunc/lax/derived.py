"""Functions under the names of JAX's ``lax`` that are compositions of others.

Face: part of ``blufunc.lax``, without primitives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in, ints, shape_of
from blufunc.core.ir.trace import Array
from blufunc.core.ops.elementwise import (
    bitwise_not,
    bitwise_or,
    convert,
    div,
    neg,
    population_count,
    shift_right_logical,
    sub,
)
from blufunc.core.ops.gather_scatter import gather, scatter
from blufunc.core.ops.shape import concatenate, expand_dims, slice_in_dim
from blufunc.core.ops.sort import top_k
from blufunc.core.ops.windows import GatherScatterMode, ScatterDimensionNumbers, as_gather, window_sizes
from blufunc.core.primitives.linear_ops import broadcast_in_dim, move_dim, reshape


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that arrays of the given shapes broadcast to by NumPy's rules."""
    plain = [shape_of(ints(s, "broadcast_shapes", "a shape"), "broadcast_shapes") for s in shapes]
    try:
        return np.broadcast_shapes(*plain)
    except ValueError:
        raise errors.ShapeError(
            f"the shapes {', '.join(map(str, plain))} do not broadcast.", where=source.here()
        ) from None


def dtype(x: Any) -> np.dtype:
    """The dtype that x has as an array."""
    return lift(x).aval.dtype


def reciprocal(x: Any) -> Array:
    """``1 / x``."""
    x = lift(x)
    return div(scalar(1, x.aval.dtype), x)


def clz(x: Any) -> Array:
    """The number of leading zero bits of each integer, in its own dtype."""
    x = lift(x)
    if not dtypes.is_integer(x.aval.dtype):
        raise errors.DtypeError(f"clz counts bits of integers, not of {x.aval}.", where=source.here())
    bits = x.aval.dtype.itemsize * 8
    step = 1
    while step < bits:  # sets every bit below the highest set one
        x = bitwise_or(x, shift_right_logical(x, scalar(step, x.aval.dtype)))
        step *= 2
    return sub(scalar(bits, x.aval.dtype), population_count(x))


def split(operand: Any, sizes: Sequence[int], axis: int = 0) -> list[Array]:
    """Split the operand along ``axis`` into parts of sizes that sum to its own."""
    x = lift(operand)
    axis = axis_in(axis, x.aval.ndim, "split")
    parts = ints(sizes, "split", "sizes")
    if min(parts, default=0) < 0 or sum(parts) != x.aval.shape[axis]:
        raise errors.ShapeError(
            f"split: the sizes {parts} do not sum to that of axis {axis} of {x.aval}.", where=source.here()
        )
    ends = np.cumsum(parts, dtype=int).tolist()
    return [slice_in_dim(x, end - n, end, axis=axis) for n, end in zip(parts, ends, strict=True)]


def tile(operand: Any, reps: Sequence[int]) -> Array:
    """The operand repeated ``reps[i]`` times along each axis i."""
    x, counts = lift(operand), ints(reps, "tile", "reps")
    if len(counts) != x.aval.ndim or min(counts, default=0) < 0:
        raise errors.ShapeError(
            f"tile of {x.aval} takes one count for each axis, not {counts}.", where=source.here()
        )
    n = len(counts)
    pairs = tuple([m for pair in zip(counts, x.aval.shape, strict=True) for m in pair])
    repeated = broadcast_in_dim(x, pairs, tuple(range(1, 2 * n, 2)))
    return reshape(repeated, tuple([r * m for r, m in zip(counts, x.aval.shape, strict=True)]))


def stack(operands: Sequence[Any], axis: int = 0) -> Array:
    """Arrays of one shape and dtype along a new axis."""
    if not isinstance(operands, (list, tuple)) or not operands:
        raise errors.ArgumentError("stack takes a sequence of arrays, one at least.", where=source.here())
    values = [lift(x) for x in operands]
    axis = axis_in(axis, values[0].aval.ndim + 1, "stack")
    return concatenate([expand_dims(x, (axis,)) for x in values], axis)


def approx_max_k(
    operand: Any,
    k: int,
    reduction_dimension: int = -1,
    recall_target: float = 0.95,
    reduction_input_size_override: int = -1,
    aggregate_to_topk: bool = True,
) -> tuple[Array, Array]:
    """The k largest elements along an axis and their indices; exact here.

    The hints ``recall_target``, ``reduction_input_size_override`` and ``aggregate_to_topk`` are ignored.
    """
    return _top(operand, k, reduction_dimension, "approx_max_k")


def approx_min_k(
    operand: Any,
    k: int,
    reduction_dimension: int = -1,
    recall_target: float = 0.95,
    reduction_input_size_override: int = -1,
    aggregate_to_topk: bool = True,
) -> tuple[Array, Array]:
    """The k smallest elements along an axis and their indices; exact here.

    The hints ``recall_target``, ``reduction_input_size_override`` and ``aggregate_to_topk`` are ignored.
    """
    return _top(operand, k, reduction_dimension, "approx_min_k")


def _top(operand: Any, k: int, axis: int, name: str) -> tuple[Array, Array]:
    from_largest = name == "approx_max_k"
    x = lift(operand)
    axis = axis_in(axis, x.aval.ndim, name)
    last = x.aval.ndim - 1
    flip = bitwise_not if dtypes.is_integer(x.aval.dtype) else neg  # both reverse the order, for all values
    values, places = top_k(move_dim(x if from_largest else flip(x), axis, last), k)
    values, places = move_dim(values, last, axis), move_dim(places, last, axis)
    return values if from_largest else flip(values), places


def scatter_apply(
    operand: Any,
    scatter_indices: Any,
    func: Callable[[Any], Any],
    dimension_numbers: ScatterDimensionNumbers,
    *,
    update_shape: Sequence[int] = (),
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: Any = None,
) -> Array:
    """The operand with ``func`` applied to the indexed windows, which may not overlap.

    Args:
      func: from an array to one of the same shape and dtype, elementwise.
      update_shape: the shape of a ``scatter``'s updates for these indices.
    """
    x = lift(operand)
    if not isinstance(dimension_numbers, ScatterDimensionNumbers):
        raise errors.ArgumentError(
            f"scatter_apply takes ScatterDimensionNumbers, not {dimension_numbers!r:.60}.",
            where=source.here(),
            fix="lax.ScatterDimensionNumbers(...); or x.at[i].apply(func)",
        )
    shape = shape_of(ints(update_shape, "scatter_apply", "update_shape"), "scatter_apply")
    sizes = window_sizes(x.aval.shape, shape, dimension_numbers)
    read = GatherScatterMode.CLIP  # out-of-range windows are dropped when written
    hints = {"indices_are_sorted": indices_are_sorted, "unique_indices": unique_indices}
    taken = gather(x, scatter_indices, as_gather(dimension_numbers), sizes, mode=read, **hints)
    updates = convert(lift(func(taken)), x.aval.dtype)
    return scatter(x, scatter_indices, updates, dimension_numbers, mode=mode, **hints)
