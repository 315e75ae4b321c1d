"""Functions under the names of JAX's ``lax`` that are compositions of others.

Face: part of ``blufunc.lax``, without primitives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in, ints, sequence, shape_of, static_int
from blufunc.core.ir.trace import Array
from blufunc.core.ops.elementwise import (
    add,
    bitcast,
    bitwise_and,
    bitwise_not,
    bitwise_or,
    convert,
    div,
    lt,
    mul,
    neg,
    operand,
    population_count,
    rem,
    select,
    shift_right_logical,
    stretched,
    sub,
)
from blufunc.core.ops.gather_scatter import gather, scatter
from blufunc.core.ops.shape import concatenate, expand_dims, index_in_dim, slice_in_dim
from blufunc.core.ops.sort import top_k
from blufunc.core.ops.windows import (
    GatherDimensionNumbers,
    GatherScatterMode,
    ScatterDimensionNumbers,
    as_gather,
    window_sizes,
)
from blufunc.core.primitives.linear_ops import broadcast_in_dim, broadcast_to, move_dim, reshape

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that arrays of the given shapes broadcast to by NumPy's rules."""
    plain = [shape_of(ints(s, "broadcast_shapes", "a shape"), "broadcast_shapes") for s in shapes]
    try:
        return np.broadcast_shapes(*plain)
    except ValueError:
        raise errors.ShapeError(
            f"the shapes {', '.join(map(str, plain))} do not broadcast.", where=source.here()
        ) from None


def dtype(x: ArrayLike | DTypeLike) -> np.dtype:
    """The dtype that x has as an array; of a dtype, itself."""
    return dtypes.as_dtype(x) if isinstance(x, (np.dtype, type, str)) else lift(x).aval.dtype


def reciprocal(x: ArrayLike) -> Array:
    """``1 / x``."""
    x = lift(x)
    return div(scalar(1, x.aval.dtype, x.aval.weak_type), x)


def clz(x: ArrayLike) -> Array:
    """The number of leading zero bits of each integer, in its own dtype."""
    x = lift(x)
    if not dtypes.is_integer(x.aval.dtype):
        raise errors.DtypeError(f"clz counts bits of integers, not of {x.aval}.", where=source.here())
    bits, dtype = dtypes.iinfo(x.aval.dtype).bits, x.aval.dtype
    if dtypes.is_narrow(dtype):
        unsigned = bitwise_and(convert(x, dtypes.uint8), scalar((1 << bits) - 1, dtypes.uint8))
        return convert(sub(clz(unsigned), scalar(8 - bits, dtypes.uint8)), dtype)
    step = 1
    while step < bits:  # sets every bit below the highest set one
        x = bitwise_or(x, shift_right_logical(x, scalar(step, x.aval.dtype, x.aval.weak_type)))
        step *= 2
    return sub(scalar(bits, x.aval.dtype, x.aval.weak_type), population_count(x))


def split(operand: ArrayLike, sizes: Sequence[int], axis: int = 0) -> list[Array]:
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


def tile(operand: ArrayLike, reps: Sequence[int]) -> Array:
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


def stack(operands: Sequence[ArrayLike], axis: int = 0) -> Array:
    """Arrays of one shape and dtype along a new axis."""
    if not isinstance(operands, (list, tuple)) or not operands:
        raise errors.ArgumentError("stack takes a sequence of arrays, one at least.", where=source.here())
    values = [lift(x) for x in operands]
    axis = axis_in(axis, values[0].aval.ndim + 1, "stack")
    return concatenate([expand_dims(x, (axis,)) for x in values], axis)


def unstack(x: ArrayLike, axis: int = 0) -> tuple[Array, ...]:
    """The slices of x along an axis, each without it."""
    x = lift(x)
    axis = axis_in(axis, x.aval.ndim, "unstack")
    return tuple([index_in_dim(x, i, axis, keepdims=False) for i in range(x.aval.shape[axis])])


def broadcast_to_rank(x: ArrayLike, rank: int) -> Array:
    """x with leading axes of size 1, so that it has ``rank`` axes."""
    x = lift(x)
    new = static_int(rank, "broadcast_to_rank", "rank") - x.aval.ndim
    if new < 0 or rank > 64:
        raise errors.ShapeError(
            f"broadcast_to_rank: {x.aval} to {rank} axes.",
            where=source.here(),
            fix="give at least as many as it has, and at most 64",
        )
    return reshape(x, (*[1] * new, *x.aval.shape)) if new else x


def broadcast_like(arr: ArrayLike, like_arr: ArrayLike) -> Array:
    """``arr`` broadcast to the shape of another array by NumPy's rules."""
    x, shape = lift(arr), lift(like_arr).aval.shape
    if broadcast_shapes(x.aval.shape, shape) != shape:
        raise errors.ShapeError(
            f"broadcast_like: {x.aval} does not broadcast to {shape}.", where=source.here()
        )
    return broadcast_to(x, shape)


def empty(shape: int | Sequence[int], dtype: DTypeLike) -> Array:
    """An array to be overwritten; its elements are 0."""
    kind = dtypes.as_dtype(dtype)
    size = (shape,) if isinstance(shape, int) else shape
    return broadcast_to(scalar(0, kind), shape_of(ints(size, "empty", "shape"), "empty"))


def stage(x: ArrayLike, /) -> Array:
    """x as an array; a value of the program where a function is traced."""
    return lift(x)


def index_take(src: ArrayLike, idxs: Sequence[ArrayLike], axes: Sequence[int]) -> Array:
    """The elements of ``src`` at positions along ``axes``, one index array for each.

    Indices wrap around. The result has an axis of positions, then the axes of ``src`` that are left.
    """
    x, places = lift(src), [lift(i) for i in sequence(idxs, "index_take", "idxs", "index arrays")]
    taken = ints(axes, "index_take", "axes")
    if len(places) != len(taken) or not taken or any(i.aval.ndim != 1 for i in places):
        raise errors.ArgumentError(
            f"index_take: {len(places)} indices along the axes {taken}.",
            where=source.here(),
            fix="give an index array of rank 1 for each axis",
        )
    wrap = lambda i, n: rem(add(rem(i, n), n), n)
    columns = [expand_dims(wrap(i, x.aval.shape[d]), (1,)) for i, d in zip(places, taken, strict=True)]
    numbers = GatherDimensionNumbers(tuple(range(1, x.aval.ndim - len(taken) + 1)), taken, taken)
    sizes = tuple([1 if d in taken else n for d, n in enumerate(x.aval.shape)])
    return gather(x, concatenate(columns, 1), numbers, sizes)


_WIDER = {8: "16", 16: "32", 32: "64"}


def mulhi(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The upper half of the bits of the product of integers, elementwise."""
    x, y = operand(x, y), operand(y, x)
    if x.aval.shape != y.aval.shape:
        x, y = stretched(x, y)
    kind = x.aval.dtype
    if not dtypes.is_integer(kind) or y.aval.dtype != kind:
        raise errors.DtypeError(
            f"mulhi takes two integers of one dtype, not {x.aval} and {y.aval}.", where=source.here()
        )
    bits = kind.itemsize * 8
    if bits < 64:
        wide = np.dtype(("uint" if dtypes.is_unsigned(kind) else "int") + _WIDER[bits])
        product = mul(convert(x, wide), convert(y, wide))
        return convert(shift_right_logical(product, scalar(bits, wide)), kind)
    u = dtypes.uint64
    a, b = (bitcast(v, u) for v in (x, y))
    low = lambda v: bitwise_and(v, scalar(2**32 - 1, u))
    high = lambda v: shift_right_logical(v, scalar(32, u))
    middle = add(mul(high(a), low(b)), high(mul(low(a), low(b))))
    other = add(mul(low(a), high(b)), low(middle))
    result = add(add(mul(high(a), high(b)), high(middle)), high(other))
    if dtypes.is_unsigned(kind):
        return result
    zero, least = scalar(0, u), scalar(0, kind)
    for v, w in ((x, b), (y, a)):  # a negative operand was read as 2**64 more
        result = sub(result, select(lt(v, least), w, broadcast_to(zero, w.aval.shape)))
    return bitcast(result, kind)


def approx_max_k(
    operand: ArrayLike,
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
    operand: ArrayLike,
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
    operand: ArrayLike,
    scatter_indices: ArrayLike,
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
