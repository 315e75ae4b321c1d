"""``ragged_dot``: matmuls of groups of rows, whose sizes are values.

Core operations, above ``dot``. In: rows sorted by group, and the boundaries of groups. Out: ``ragged_dot`` multiplies
each row by the matrix of its group; ``ragged_contract`` sums outer products over each group. Each is the transpose of
the other, so that derivatives and ``vmap`` need no third primitive. Both have one form of operands, stacks of matrices;
``ragged_dot_general`` brings any axes into it by transposes and reshapes, which compiled programs do not execute.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import ints
from blufunc.core.ops.cumulative import cumsum
from blufunc.core.ops.dot import (
    PRECISIONS,
    Axes,
    DimensionNumbers,
    check_precision,
    compute_dtype,
    dot_general,
    dot_general_p,
    plain,
    result_dtype,
    rounded,
)
from blufunc.core.ops.dynamic import dynamic_slice
from blufunc.core.ops.elementwise import clamp, convert, mul
from blufunc.core.ops.shape import concatenate, slice_in_dim
from blufunc.core.primitives.kinds import check_types
from blufunc.core.primitives.linear_ops import (
    add_tangents,
    batched_front,
    broadcast_in_dim,
    full,
    move_dim,
    reduce_sum,
    reshape,
    transpose,
)
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.primitives.sharding import EITHER, Factoring
from blufunc.core.primitives.tangents import Zero, is_linear

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array

# -- primitives ------------------------------------------------------------------------------------


class _Ragged(Primitive):
    """A kind: contractions of matrices whose rows are in groups.

    Operands are two factors and ``offsets``, int32 of shape (groups + 1,): group i has the rows from ``offsets[i]`` to
    ``offsets[i + 1]``. They must not decrease, and be between 0 and the number of rows. Stacks of such problems have a
    leading axis; an operand without it is shared by all of them.
    """

    kind, fresh, widens = "contract", True, True
    linear, autocast_class = EITHER, "low"

    def jvp(self, primals, tangents, **params):
        x, y, offsets = primals
        tx, ty, _ = tangents
        out = self.bind(x, y, offsets, **params)
        left = tx if tx.__class__ is Zero else self.bind(tx, y, offsets, **params)
        right = ty if ty.__class__ is Zero else self.bind(x, ty, offsets, **params)
        return out, add_tangents(left, right)

    def _check(self, lhs, rhs, offsets, ranks, precision, preferred_element_type) -> np.dtype:
        """The dtype of the result; raises unless the operands have these ranks, or stacks.

        Args:
          ranks: those of the factors without stacks.
        """
        check_types(self.name, "number", lhs, rhs)
        stacked = [x.ndim - rank for x, rank in zip((lhs, rhs, offsets), (*ranks, 1), strict=True)]
        sizes = {x.shape[0] for x, n in zip((lhs, rhs, offsets), stacked, strict=True) if n == 1}
        if not set(stacked) <= {0, 1} or (not stacked[0] and any(stacked)) or len(sizes) > 1:
            raise errors.ShapeError(
                f"{self.name}: {lhs}, {rhs} and offsets {offsets} are no matrices of ranks {ranks}, nor stacks of them."
            )
        if offsets.dtype != dtypes.int32 or not offsets.shape[-1]:
            raise errors.ShapeError(f"{self.name}: offsets are int32, one more than groups, not {offsets}.")
        check_precision(self.name, precision, PRECISIONS)
        return result_dtype(self.name, lhs.dtype, rhs.dtype, preferred_element_type)


class _RaggedDot(_Ragged):
    """Rows (m, k) by the matrix of their group, of (groups, k, n); else 0."""

    name = "ragged_dot"

    def flops(self, lhs, rhs, offsets, **_) -> int:
        return 2 * lhs.size * rhs.shape[-1] * (4 if dtypes.is_complex(lhs.dtype) else 1)

    def shard(self, avals, outs, **params):
        b = Factoring()
        lhs, rhs, offsets = avals
        term, column = b.new(lhs.shape[-1], "sum"), b.new(rhs.shape[-1])
        stack = [b.new(lhs.shape[0])] * (lhs.ndim == 3)
        of = lambda x, rank: stack if x.ndim > rank else []
        operands = [[*stack, (), term], [*of(rhs, 3), (), term, column], [*of(offsets, 1), ()]]
        return b.rule(operands, [[*stack, (), column]])

    def impl(self, lhs, rhs, offsets, *, precision, preferred_element_type):
        out = preferred_element_type or lhs.dtype
        compute = compute_dtype(lhs.dtype, out)
        result = np.zeros((*lhs.shape[:-1], rhs.shape[-1]), out)
        for stack, group, rows in _groups(lhs, offsets):
            weight = rhs[(*stack, group)] if rhs.ndim == 4 else rhs[group]
            sums = np.matmul(np.asarray(lhs[(*stack, rows)], compute), np.asarray(weight, compute))
            result[(*stack, rows)] = rounded(sums, out)
        return result

    def abstract(self, lhs, rhs, offsets, *, precision, preferred_element_type):
        out = self._check(lhs, rhs, offsets, (2, 3), precision, preferred_element_type)
        groups = offsets.shape[-1] - 1
        if rhs.shape[-3:-1] != (groups, lhs.shape[-1]):
            raise errors.ShapeError(
                f"{self.name}: rows {lhs} in {groups} groups cannot be multiplied by matrices {rhs}."
            )
        return ShapedArray((*lhs.shape[:-1], rhs.shape[-1]), out)

    def transpose(self, ct, x, w, offsets, *, precision, preferred_element_type):
        if is_linear(x):
            x.add(_bind(ragged_dot_p, ct, _turned(_as(w, ct.dtype)), offsets, precision, x.aval.dtype))
        if is_linear(w):
            dtype = w.aval.dtype
            shared = x.aval.ndim == 3 and w.aval.ndim == 3  # by all stacks, whose sums are rounded once
            wide = compute_dtype(dtype, dtype) if shared else dtype
            sums = _bind(ragged_contract_p, _as(x, ct.dtype), ct, offsets, precision, wide)
            w.add(convert(reduce_sum(sums, (0,)), dtype) if shared else sums)

    def batch(self, axis, args, dims, **params):
        x, w, offsets = args
        dx, dw, bounds = dims
        if dx is None and bounds is None:  # only the matrices: more columns
            at = w.aval.ndim - 2
            w = move_dim(w, dw, at)
            out = self.bind(x, _joined(w, at), offsets, **params)
            return _split(out, x.aval.ndim - 1, w.aval.shape[at:]), x.aval.ndim - 1
        return _bind_stacked(self, axis, args, dims, (2, 3, 1), params)


class _RaggedContract(_Ragged):
    """Outer products, summed per group: (m, k), (m, n) to (groups, k, n)."""

    name = "ragged_contract"

    def flops(self, lhs, rhs, offsets, **_) -> int:
        return 2 * lhs.size * rhs.shape[-1] * (4 if dtypes.is_complex(lhs.dtype) else 1)

    def shard(self, avals, outs, **params):
        b = Factoring()
        lhs, rhs, offsets = avals
        row, column = b.new(lhs.shape[-1]), b.new(rhs.shape[-1])
        stack = [b.new(lhs.shape[0])] * (lhs.ndim == 3)
        operands = [[*stack, (), row], [*stack, (), column], [*(stack if offsets.ndim == 2 else []), ()]]
        return b.rule(operands, [[*stack, (), row, column]])

    def impl(self, lhs, rhs, offsets, *, precision, preferred_element_type):
        out = preferred_element_type or lhs.dtype
        compute = compute_dtype(lhs.dtype, out)
        result = np.zeros((*lhs.shape[:-2], offsets.shape[-1] - 1, lhs.shape[-1], rhs.shape[-1]), out)
        for stack, group, rows in _groups(lhs, offsets):
            x, y = (np.asarray(a[(*stack, rows)], compute) for a in (lhs, rhs))
            result[(*stack, group)] = rounded(np.matmul(x.T, y), out)
        return result

    def abstract(self, lhs, rhs, offsets, *, precision, preferred_element_type):
        out = self._check(lhs, rhs, offsets, (2, 2), precision, preferred_element_type)
        if lhs.shape[:-1] != rhs.shape[:-1]:
            raise errors.ShapeError(f"{self.name}: {lhs} and {rhs} differ in stacks or rows.")
        return ShapedArray((*lhs.shape[:-2], offsets.shape[-1] - 1, lhs.shape[-1], rhs.shape[-1]), out)

    def transpose(self, ct, x, y, offsets, *, precision, preferred_element_type):
        if is_linear(x):
            x.add(_bind(ragged_dot_p, _as(y, ct.dtype), _turned(ct), offsets, precision, x.aval.dtype))
        if is_linear(y):
            y.add(_bind(ragged_dot_p, _as(x, ct.dtype), ct, offsets, precision, y.aval.dtype))

    def batch(self, axis, args, dims, **params):
        x, y, offsets = args
        dx, dy, bounds = dims
        at = x.aval.ndim - 1 - (dx is not None)
        if bounds is None and dy is None:  # one factor alone: more rows or columns of results
            x = move_dim(x, dx, at)
            return _split(self.bind(_joined(x, at), y, offsets, **params), at, x.aval.shape[at:]), at
        if bounds is None and dx is None:
            y = move_dim(y, dy, at)
            return _split(self.bind(x, _joined(y, at), offsets, **params), at + 1, y.aval.shape[at:]), at + 1
        return _bind_stacked(self, axis, args, dims, (2, 2, 1), params)


ragged_dot_p = _RaggedDot()
ragged_contract_p = _RaggedContract()


def _groups(lhs: np.ndarray, offsets: np.ndarray) -> Any:
    """``(stack, group, its rows)`` of all groups that have any; the stack as an index."""
    bounds = np.clip(offsets, 0, lhs.shape[-2])
    for stack in np.ndindex(lhs.shape[:-2]):
        own = (bounds[stack] if bounds.ndim == 2 else bounds).tolist()
        for group, (start, end) in enumerate(itertools.pairwise(own)):
            if end > start:
                yield stack, group, slice(start, end)


def _turned(w: Any) -> Any:
    """Matrices with rows and columns swapped."""
    *stacks, rows, columns = range(w.aval.ndim)
    return transpose(w, (*stacks, columns, rows))


def _bind(prim: Primitive, x: Any, y: Any, offsets: Any, precision: Any, out: np.dtype) -> Any:
    preferred = None if out == x.dtype else out
    return prim.bind(x, y, offsets, precision=precision, preferred_element_type=preferred)


def _as(x: Any, dtype: np.dtype) -> Any:
    return convert(x, dtype) if x.dtype != dtype else x


def _joined(x: Any, axis: int) -> Any:
    """``x`` with two adjacent axes merged into one."""
    shape = x.aval.shape
    return reshape(x, (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]))


def _split(x: Any, axis: int, sizes: tuple[int, ...]) -> Any:
    """``x`` with an axis split into axes of these sizes."""
    shape = x.aval.shape
    return reshape(x, (*shape[:axis], *sizes, *shape[axis + 1 :]))


def _bind_stacked(
    prim: Primitive,
    axis: Any,
    args: Sequence[Any],
    dims: Sequence[int | None],
    ranks: Sequence[int],
    params: dict,
) -> tuple[Any, int]:
    """The batching rule by which examples are stacks, or each of them some.

    Args:
      ranks: those of the operands without stacks. The last of them may be shared by all stacks, and so may one that has
        another rank than the first.
    """
    first = args[0].aval
    stacks = (
        () if first.ndim - (dims[0] is not None) == ranks[0] else (first.shape[1 if dims[0] == 0 else 0],)
    )
    operands = []
    for i, (x, d, rank) in enumerate(zip(args, dims, ranks, strict=True)):
        shared = d is None and x.aval.ndim == rank and (rank != ranks[0] or i == len(ranks) - 1)
        if not shared:
            own = x.aval.ndim - (d is not None) > rank
            x = batched_front(axis, x, d)
            if stacks and not own:  # what the stacks of an example share
                shape = (axis.size, *stacks, *x.aval.shape[1:])
                x = broadcast_in_dim(x, shape, (0, *range(2, len(shape))))
            x = _joined(x, 0) if stacks else x
        operands.append(x)
    out = prim.bind(*operands, **params)
    return (_split(out, 0, (axis.size, *stacks)), 0) if stacks else (out, 0)


# -- functions -------------------------------------------------------------------------------------


@dataclass(frozen=True, init=False)
class RaggedDotDimensionNumbers:
    """Axes of the operands of ``ragged_dot_general``.

    Attributes:
      dot_dimension_numbers: as of ``dot_general``: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
      lhs_ragged_dimensions: the one axis of the lhs whose elements are in groups.
      rhs_group_dimensions: the axis of the rhs with one matrix per group, if the ragged axis is not contracted and no
        batch axis; else none.
    """

    dot_dimension_numbers: DimensionNumbers
    lhs_ragged_dimensions: Axes
    rhs_group_dimensions: Axes

    def __init__(
        self, dot_dimension_numbers: Any, lhs_ragged_dimensions: Any, rhs_group_dimensions: Any
    ) -> None:
        try:
            (lc, rc), (lb, rb) = dot_dimension_numbers
        except (TypeError, ValueError):
            raise errors.ArgumentError(
                f"RaggedDotDimensionNumbers: two pairs of axes are expected, not {dot_dimension_numbers!r:.60}.",
                where=source.here(),
                fix="give ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)), ragged axes and group axes",
            ) from None
        axes = lambda given: ints(given, "RaggedDotDimensionNumbers", "axes")
        numbers = ((axes(lc), axes(rc)), (axes(lb), axes(rb)))
        object.__setattr__(self, "dot_dimension_numbers", numbers)
        object.__setattr__(self, "lhs_ragged_dimensions", axes(lhs_ragged_dimensions))
        object.__setattr__(self, "rhs_group_dimensions", axes(rhs_group_dimensions))


_ROWS_BY_MATRICES = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


def ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
) -> Array:
    """Multiply each row by the matrix of its group; rows are sorted by group.

    The first ``group_sizes[0]`` rows are multiplied by ``rhs[0]``, the next ``group_sizes[1]`` by ``rhs[1]``, and so
    on. Rows beyond the last group are 0. Sizes are values of the program, not part of its types.

    Args:
      lhs: rows, of shape (m, k).
      rhs: a matrix per group, of shape (groups, k, n), in the dtype of ``lhs``.
      group_sizes: integers of shape (groups,). What exceeds ``m`` is cut off, and negative sizes count as 0.
      precision: how exactly devices that have a choice must multiply float32, as in ``dot_general``.
      preferred_element_type: the dtype of the result; the operands' by default.
      group_offset: one integer: ``rhs[0]`` is of this group, and ``rhs`` may have fewer groups than there are sizes.
        Rows of groups without a matrix are 0. So each device can hold some of the matrices.
    Returns:
      an array of shape (m, n).
    """
    return ragged_dot_general(
        lhs, rhs, group_sizes, _ROWS_BY_MATRICES, precision, preferred_element_type, group_offset
    )


def ragged_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
) -> Array:
    """``dot_general`` whose lhs has an axis in groups, whose sizes are values.

    What the groups mean depends on the ragged axis ``m`` or ``k`` of the lhs; ``x`` are axes like it before it:

    - neither contracted nor a batch axis: ``[b, x, m, k], [g, b, k, n], [b, x, g] -> [b, x, m, n]``. Each group of
      ``m`` is multiplied by its own part of the rhs; the rest is 0.
    - contracted: ``[b, m, x, k], [b, x, k, n], [b, x, g] -> [g, b, m, n]``. Each group is summed by itself.
    - a batch axis: as ``dot_general``; sizes are not used.

    Args:
      lhs, rhs: arrays of one dtype.
      group_sizes: integers, of the shape above, or of shape (g,) for all ``b`` and ``x``. Negative sizes count as 0.
      ragged_dot_dimension_numbers: which axes are which.
      precision: how exactly devices that have a choice must multiply float32, as in ``dot_general``.
      preferred_element_type: the dtype of the result; the operands' by default.
      group_offset: one integer: the first group that is computed. The first part of the rhs, or of the result of a
        contracted axis, is of this group. Groups without a part of the rhs are 0.
    Returns:
      an array of the axes of ``dot_general``, without the axis of the rhs with groups; if the ragged axis is
      contracted, with a leading axis of groups.
    Raises:
      ShapeError: the dimension numbers do not fit the operands, or sizes do not.
      DtypeError: the operands have different dtypes, or sizes are no integers.
    """
    lhs, rhs, group_sizes = lift(lhs), lift(rhs), lift(group_sizes)
    d = ragged_dot_dimension_numbers
    if not isinstance(d, RaggedDotDimensionNumbers):
        raise errors.ArgumentError(
            f"ragged_dot_general takes RaggedDotDimensionNumbers, not {d!r:.60}.",
            where=source.here(),
            fix="lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,)), for example",
        )
    dtype = None if preferred_element_type is None else dtypes.as_dtype(preferred_element_type)
    precision = plain(precision)
    params = {"precision": precision, "preferred_element_type": None if dtype == lhs.dtype else dtype}
    dot_general_p.typed((lhs.aval, rhs.aval), {**params, "dimension_numbers": d.dot_dimension_numbers})
    axes = _Axes(lhs.aval, rhs.aval, d)
    axes.check_sizes(group_sizes.aval, group_offset is not None)
    if axes.mode == "batch":
        return dot_general(lhs, rhs, d.dot_dimension_numbers, precision, dtype)
    groups = axes.matrices if axes.mode == "rows" else group_sizes.aval.shape[-1]
    offsets = axes.offsets(group_sizes, group_offset, groups)
    if axes.mode == "rows":
        return axes.rows_by_matrices(lhs, rhs, offsets, params)
    return axes.sums_of_groups(lhs, rhs, offsets, params)


class _Axes:
    """The axes of a ``ragged_dot_general``, by what they are in its two primitives.

    Stacks are batch axes and those before the ragged one; rows are the ragged axis and those after it. So the axes of
    a group of rows are contiguous, and sizes count the ragged axis alone.

    Attributes:
      mode: "rows", "contract" or "batch", after what the ragged axis is.
      matrices: number of groups of the rhs, in the first mode.
    """

    def __init__(self, lhs: ShapedArray, rhs: ShapedArray, d: RaggedDotDimensionNumbers):
        (lc, rc), (lb, rb) = d.dot_dimension_numbers
        if len(d.lhs_ragged_dimensions) != 1 or not 0 <= d.lhs_ragged_dimensions[0] < lhs.ndim:
            raise _misfit(
                f"lhs_ragged_dimensions {d.lhs_ragged_dimensions} are not one axis of the lhs {lhs}"
            )
        (ragged,) = d.lhs_ragged_dimensions
        self._lhs, self._rhs, self._groups = lhs, rhs, d.rhs_group_dimensions
        self.mode = "contract" if ragged in lc else "batch" if ragged in lb else "rows"
        if self.mode == "rows":
            if (
                len(self._groups) != 1
                or self._groups[0] not in range(rhs.ndim)
                or self._groups[0] in (*rc, *rb)
            ):
                raise _misfit(
                    f"rhs_group_dimensions {self._groups} are not one axis of the rhs {rhs} that is neither "
                    "contracted nor a batch axis"
                )
        elif self._groups:
            raise _misfit(
                f"a ragged axis that is contracted or a batch axis has no groups {self._groups} of the rhs"
            )
        free = [a for a in range(lhs.ndim) if a not in (*lc, *lb)]
        own = {"rows": free, "contract": list(lc), "batch": list(lb)}[self.mode]
        at = own.index(ragged)
        self._ragged, self._before, self._after = ragged, own[:at], own[at + 1 :]
        self._lhs_batch, self._rhs_batch = lb, rb
        self._lhs_terms, self._rhs_terms = lc, rc
        self._lhs_free = free
        self._rhs_free = [a for a in range(rhs.ndim) if a not in (*rc, *rb, *self._groups)]
        self.matrices = math.prod(rhs.shape[a] for a in self._groups)

    @property
    def _prefix(self) -> list[int]:
        """The axes of the lhs that sizes have."""
        return self._before if self.mode == "batch" else [*self._lhs_batch, *self._before]

    def check_sizes(self, sizes: ShapedArray, is_part: bool) -> None:
        """Raise unless sizes fit; ``is_part``: the rhs may have fewer groups."""
        if not dtypes.is_integer(sizes.dtype):
            raise errors.DtypeError(
                f"ragged_dot: group_sizes are integers, not {sizes}.",
                where=source.here(),
                fix="convert them: group_sizes.astype('int32')",
            )
        prefix = tuple(self._lhs.shape[a] for a in self._prefix)
        if not sizes.ndim or (sizes.ndim > 1 and sizes.shape[:-1] != prefix):
            other = ", ".join([*map(str, prefix), "groups"])
            raise _misfit(
                f"group_sizes {sizes} are not of shape (groups,)" + f", nor ({other})" * bool(prefix)
            )
        groups = sizes.shape[-1]
        if self.mode == "rows" and not (self.matrices == groups or (is_part and self.matrices < groups)):
            raise _misfit(
                f"the rhs {self._rhs} has {self.matrices} groups, and there are {groups} group_sizes"
            )

    def offsets(self, sizes: Any, group_offset: Any, groups: int) -> Any:
        """Boundaries of ``groups`` groups of rows, the first of which is ``group_offset``."""
        m, last = self._lhs.shape[self._ragged], sizes.aval.shape[-1]
        if sizes.dtype.itemsize < 4:
            sizes = convert(sizes, dtypes.int32)
        sizes = convert(clamp(scalar(0, sizes.dtype), sizes, scalar(m, sizes.dtype)), dtypes.int32)
        if sizes.aval.ndim > 1:
            sizes = reshape(sizes, (math.prod(sizes.aval.shape[:-1]), last))
        stacks, at = sizes.aval.shape[:-1], sizes.aval.ndim - 1
        bounds = cumsum(concatenate([full((*stacks, 1), 0, dtypes.int32), sizes], at), at)
        bounds = clamp(scalar(0, dtypes.int32), bounds, scalar(m, dtypes.int32))
        if group_offset is not None:
            first = _index(group_offset, last)
            end = slice_in_dim(bounds, last, last + 1, axis=at)
            end = broadcast_in_dim(end, (*stacks, groups), tuple(range(at + 1)))
            starts, shape = (*[0] * at, first), (*stacks, groups + 1)
            bounds = dynamic_slice(concatenate([bounds, end], at), starts, shape)
        width = math.prod(self._lhs.shape[a] for a in self._after)
        return bounds if width == 1 else mul(bounds, scalar(width, dtypes.int32))

    def rows_by_matrices(self, lhs: Any, rhs: Any, offsets: Any, params: dict) -> Any:
        """The result by ``ragged_dot_p``."""
        batch, before, rows, terms = self._sizes()
        columns = math.prod(rhs.aval.shape[a] for a in self._rhs_free)
        order = (*self._lhs_batch, *self._lhs_free, *self._lhs_terms)
        x = reshape(transpose(lhs, order), (*self._stacks, rows, terms))
        order = (*self._rhs_batch, *self._groups, *self._rhs_terms, *self._rhs_free)
        matrices = (self.matrices, terms, columns)
        w = reshape(transpose(rhs, order), (batch, *matrices) if self._lhs_batch else matrices)
        if self._lhs_batch and self._before:
            w = broadcast_in_dim(w, (batch, before, *matrices), (0, 2, 3, 4))
            w = reshape(w, (batch * before, *matrices))
        out = ragged_dot_p.bind(x, w, offsets, **params)
        shape = [lhs.aval.shape[a] for a in (*self._lhs_batch, *self._lhs_free)]
        return reshape(out, (*shape, *(rhs.aval.shape[a] for a in self._rhs_free)))

    def sums_of_groups(self, lhs: Any, rhs: Any, offsets: Any, params: dict) -> Any:
        """The result by ``ragged_contract_p``."""
        batch, before, rows, _ = self._sizes()
        shapes = [
            [x.aval.shape[a] for a in free] for x, free in ((lhs, self._lhs_free), (rhs, self._rhs_free))
        ]
        k, n = map(math.prod, shapes)
        x = transpose(lhs, (*self._lhs_batch, *self._lhs_terms, *self._lhs_free))
        y = transpose(rhs, (*self._rhs_batch, *self._rhs_terms, *self._rhs_free))
        x, y = (reshape(a, (*self._stacks, rows, c)) for a, c in ((x, k), (y, n)))
        out = params["preferred_element_type"] or lhs.dtype
        if self._before:  # sums of several stacks are rounded once
            params = {**params, "preferred_element_type": compute_dtype(lhs.dtype, out)}
        sums = ragged_contract_p.bind(x, y, offsets, **params)
        groups = offsets.aval.shape[-1] - 1
        if self._before:
            sums = convert(reduce_sum(reshape(sums, (batch, before, groups, k, n)), (1,)), out)
        if self._stacks:
            sums = transpose(reshape(sums, (batch, groups, k, n)), (1, 0, 2, 3))
        return reshape(sums, (groups, *(lhs.aval.shape[a] for a in self._lhs_batch), *shapes[0], *shapes[1]))

    @property
    def _stacks(self) -> tuple[int, ...]:
        """The axis of stacks, if there are any."""
        batch, before, *_ = self._sizes()
        return (batch * before,) if self._lhs_batch or self._before else ()

    def _sizes(self) -> tuple[int, int, int, int]:
        """Sizes: batch axes, those before the ragged one, rows, and contracted ones."""
        axes = (self._lhs_batch, self._before, (self._ragged, *self._after), self._lhs_terms)
        batch, before, rows, terms = (math.prod(self._lhs.shape[a] for a in own) for own in axes)
        return batch, before, rows, terms


def _index(group_offset: Any, last: int) -> Any:
    """``group_offset`` as a scalar between 0 and ``last``."""
    first = lift(group_offset)
    if first.aval.size != 1 or not dtypes.is_integer(first.dtype):
        raise errors.ArgumentError(
            f"ragged_dot: group_offset is one integer, not {first.aval}.",
            where=source.here(),
            fix="group_offset=jnp.array([first_group])",
        )
    first = convert(reshape(first, ()), dtypes.int32)
    return clamp(scalar(0, dtypes.int32), first, scalar(last, dtypes.int32))


def _misfit(problem: str) -> errors.ShapeError:
    return errors.ShapeError(
        f"ragged_dot: {problem}.",
        where=source.here(),
        fix="ragged_dot takes lhs (m, k), rhs (groups, k, n) and group_sizes (groups,); ragged_dot_general any axes",
    )
