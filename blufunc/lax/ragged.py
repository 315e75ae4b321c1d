"""Matmuls of rows in groups, each with a matrix of its own: ``ragged_dot``.

Face: part of ``blufunc.lax``. Each group's rows are masked out of a copy of the operand, and one ``dot_general``
contracts over groups and terms, so that its cost is that of all groups times all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import ints
from blufunc.core.ir.trace import Array
from blufunc.core.ops import cumulative
from blufunc.core.ops.dot import dot_general
from blufunc.core.ops.elementwise import bitwise_and, convert, ge, lt, select, sub
from blufunc.core.ops.shape import iota
from blufunc.core.primitives.linear_ops import broadcast_in_dim, broadcast_to, move_dim, transpose

Ints = tuple[int, ...]


@dataclass(frozen=True, init=False)
class RaggedDotDimensionNumbers:
    """The axes of a ``ragged_dot_general``.

    Attributes:
      dot_dimension_numbers: as of ``dot_general``.
      lhs_ragged_dimensions: the one axis of the left operand that consists of groups.
      rhs_group_dimensions: the axis of the right operand with a matrix for each group, or none.
    """

    dot_dimension_numbers: tuple[tuple[Ints, Ints], tuple[Ints, Ints]]
    lhs_ragged_dimensions: Ints
    rhs_group_dimensions: Ints

    def __init__(self, dot_dimension_numbers: Any, lhs_ragged_dimensions: Any, rhs_group_dimensions: Any):
        (a, b), (c, d) = dot_dimension_numbers
        name = "RaggedDotDimensionNumbers"
        numbers = [ints(x, name, "dot_dimension_numbers") for x in (a, b, c, d)]
        put = lambda field, value: object.__setattr__(self, field, value)
        put("dot_dimension_numbers", ((numbers[0], numbers[1]), (numbers[2], numbers[3])))
        put("lhs_ragged_dimensions", ints(lhs_ragged_dimensions, name, "lhs_ragged_dimensions"))
        put("rhs_group_dimensions", ints(rhs_group_dimensions, name, "rhs_group_dimensions"))


_ROWS = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
) -> Array:
    """Matmul of each group of rows by the matrix of that group.

    Args:
      lhs: an array (m, k).
      rhs: an array (g, k, n): a matrix for each group.
      group_sizes: integers (g,): the number of rows of each group, in order. Rows after the last group are 0.
      precision, preferred_element_type: as of ``dot_general``.
      group_offset: None.
    Returns:
      an array (m, n).
    """
    return ragged_dot_general(lhs, rhs, group_sizes, _ROWS, precision, preferred_element_type, group_offset)


def ragged_dot_general(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    ragged_dot_dimension_numbers: RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
) -> Array:
    """``dot_general`` where an axis of the left operand consists of groups.

    If that axis is one of rows, each group is multiplied by its own part of the right operand. If it is contracted,
    the result has a leading axis: each group's sum. If it is a batch axis, groups change nothing.

    Args:
      lhs, rhs: arrays of one dtype.
      group_sizes: integers (g,), or (batch axes..., axes outside of the ragged one..., g).
      ragged_dot_dimension_numbers: the axes.
      precision, preferred_element_type: as of ``dot_general``.
      group_offset: None.
    """
    name = "ragged_dot_general"
    if group_offset is not None:
        raise errors.UnsupportedError(
            f"{name} takes no group_offset.",
            where=source.here(),
            fix="pad group_sizes with groups of no rows",
        )
    x, y, sizes = lift(lhs), lift(rhs), lift(group_sizes)
    numbers = ragged_dot_dimension_numbers
    (x_sums, y_sums), (x_batch, y_batch) = numbers.dot_dimension_numbers
    if len(numbers.lhs_ragged_dimensions) != 1 or not dtypes.is_integer(sizes.aval.dtype):
        raise errors.ArgumentError(
            f"{name}: ragged axes {numbers.lhs_ragged_dimensions}, groups {sizes.aval}.",
            where=source.here(),
            fix="give one ragged axis of the left operand, and integer sizes",
        )
    (ragged,) = numbers.lhs_ragged_dimensions
    how = {"precision": precision, "preferred_element_type": preferred_element_type}
    grouped = numbers.rhs_group_dimensions
    of_rows = ragged not in x_sums and ragged not in x_batch
    if len(grouped) != int(of_rows):
        raise errors.ArgumentError(
            f"{name}: the ragged axis {ragged} and the group axes {grouped} of the right operand.",
            where=source.here(),
            why="rows in groups have a matrix for each group, and others do not.",
        )
    if ragged in x_batch:
        return dot_general(x, y, numbers.dot_dimension_numbers, **how)
    if of_rows and y.aval.shape[grouped[0]] != sizes.aval.shape[-1]:
        raise errors.ShapeError(
            f"{name}: {sizes.aval.shape[-1]} groups, and matrices {y.aval} for {y.aval.shape[grouped[0]]}.",
            where=source.here(),
        )
    rows = [d for d in range(x.aval.ndim) if d not in x_sums and d not in x_batch]
    outer = rows[: rows.index(ragged)] if of_rows else x_sums[: x_sums.index(ragged)]
    spread = _of_groups(x, sizes, ragged, (*x_batch, *outer), name)
    # the axes of ``spread`` are those of the operand after one of groups
    sums, batch = tuple([d + 1 for d in x_sums]), tuple([d + 1 for d in x_batch])
    if of_rows:
        return dot_general(spread, y, (((0, *sums), (grouped[0], *y_sums)), (batch, y_batch)), **how)
    out = dot_general(spread, y, ((sums, y_sums), (batch, y_batch)), **how)
    return move_dim(out, len(batch), 0)


def _of_groups(x: Array, sizes: Array, ragged: int, dims: Ints, name: str) -> Array:
    """A copy of x for each group, along a new first axis, which is 0 outside of the group."""
    if sizes.aval.ndim == 1:
        dims = ()
    if tuple(sizes.aval.shape[:-1]) != tuple([x.aval.shape[d] for d in dims]):
        raise errors.ShapeError(
            f"{name}: groups {sizes.aval} of {x.aval}.",
            where=source.here(),
            fix="give sizes (g,), or for each place along the batch axes and those outside of the ragged one",
        )
    shape = (sizes.aval.shape[-1], *x.aval.shape)
    sizes = convert(sizes, dtypes.int32)
    ends = cumulative.cumsum(sizes, sizes.aval.ndim - 1)
    axes = (*[d + 1 for d in dims], 0)
    start, end = (_placed(v, shape, axes) for v in (sub(ends, sizes), ends))
    place = iota(dtypes.int32, shape, ragged + 1)
    inside = bitwise_and(ge(place, start), lt(place, end))
    return select(inside, broadcast_to(x, shape), broadcast_to(scalar(0, x.aval.dtype), shape))


def _placed(x: Array, shape: Ints, axes: Ints) -> Array:
    """``broadcast_in_dim`` to axes in any order."""
    order = sorted(range(len(axes)), key=axes.__getitem__)
    return broadcast_in_dim(transpose(x, tuple(order)), shape, tuple(sorted(axes)))
