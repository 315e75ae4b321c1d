"""Operations that read and write at positions known only at run time: dynamic slices, gather, scatter.

Core operations. Semantics and dimension numbers are XLA's, the names JAX's. Every gather and scatter
is reduced to one form (``_Plan``): rows of a matrix, chosen by one flat index. Batching goes through
the batching dimensions, so that ``vmap`` of a gather is one gather. Scatters are deterministic: of
several updates to one element, ``scatter`` keeps the last in row-major order of the indices.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import scipy.sparse

from blufunc import errors
from blufunc.core import dtypes, source
from blufunc.core.array import lift, scalar
from blufunc.core.avals import ShapedArray
from blufunc.core.kinds import check_types
from blufunc.core.ops.elementwise import (
    add,
    clamp,
    convert,
    div,
    eq,
    lt,
    mul,
    neg,
    select,
    zeros_of,
)
from blufunc.core.ops.elementwise import (
    operand as operand_like,
)
from blufunc.core.ops.shape import (
    canonical_axis,
    concatenate,
    expand_dims,
    insert,
    iota,
    replace,
    slice_in_dim,
    squeeze,
)
from blufunc.core.primitive import Primitive, unsupported
from blufunc.core.structure import (
    Linear,
    all_front,
    broadcast_in_dim,
    full,
    instantiate,
    move_dim,
    reshape,
    zeros,
)
from blufunc.core.tangents import Zero, is_linear, zero
from blufunc.core.trace import Value

_py_slice = slice


class GatherScatterMode(enum.Enum):
    """What happens to windows that do not lie within the operand.

    CLIP moves them inside. FILL_OR_DROP fills what a gather reads with a constant, and leaves out what a scatter
    writes. PROMISE_IN_BOUNDS says that there are none; if there are, gathers clip, scatters drop, and gradients are
    wrong.
    """

    CLIP = "clip"
    FILL_OR_DROP = "fill_or_drop"
    PROMISE_IN_BOUNDS = "promise_in_bounds"

    def __str__(self) -> str:
        return self.value

    @staticmethod
    def from_any(mode: str | GatherScatterMode | None) -> GatherScatterMode:
        """The mode for ``"clip"``, ``"fill"``, ``"drop"``, ``"promise_in_bounds"``, a mode, or None (fill or drop)."""
        if isinstance(mode, GatherScatterMode):
            return mode
        try:
            return _MODES[mode]
        except (KeyError, TypeError):
            raise errors.ValueRangeError(
                f"{mode!r} is not a mode of gather and scatter.",
                where=source.here(),
                fix="use 'clip', 'fill', 'drop' or 'promise_in_bounds'",
            ) from None


_CLIP, _FILL, _PROMISE = (
    GatherScatterMode.CLIP,
    GatherScatterMode.FILL_OR_DROP,
    GatherScatterMode.PROMISE_IN_BOUNDS,
)
_MODES = {
    None: _FILL, "fill": _FILL, "drop": _FILL, "fill_or_drop": _FILL, "clip": _CLIP, "promise_in_bounds": _PROMISE,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GatherDimensionNumbers:
    """How the dimensions of operand, indices and result of a gather relate.

    The last dimension of the indices holds one start per entry of ``start_index_map``; the others are batch
    dimensions, each position in them names one window.

    Attributes:
      offset_dims: the result's dimensions that run within a window, rising; the others are the batch dimensions.
      collapsed_slice_dims: operand dimensions in which the window has size 1 and that the result leaves out.
      start_index_map: for each component of an index the operand dimension that it is a start in.
      operand_batching_dims: operand dimensions that go along with batch dimensions of the indices: size 1 in the
        window, left out of the result.
      start_indices_batching_dims: those dimensions of the indices.
    """

    offset_dims: tuple[int, ...]
    collapsed_slice_dims: tuple[int, ...]
    start_index_map: tuple[int, ...]
    operand_batching_dims: tuple[int, ...] = ()
    start_indices_batching_dims: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScatterDimensionNumbers:
    """How the dimensions of operand, indices and updates of a scatter relate: the same, read as writing.

    Attributes:
      update_window_dims: the updates' dimensions that run within a window, rising.
      inserted_window_dims: operand dimensions in which the window has size 1 and that the updates do not have.
      scatter_dims_to_operand_dims: for each component of an index the operand dimension that it is a start in.
      operand_batching_dims: operand dimensions that go along with batch dimensions of the indices.
      scatter_indices_batching_dims: those dimensions of the indices.
    """

    update_window_dims: tuple[int, ...]
    inserted_window_dims: tuple[int, ...]
    scatter_dims_to_operand_dims: tuple[int, ...]
    operand_batching_dims: tuple[int, ...] = ()
    scatter_indices_batching_dims: tuple[int, ...] = ()


def _as_gather(d: ScatterDimensionNumbers) -> GatherDimensionNumbers:
    """The gather that reads what the scatter writes."""
    return GatherDimensionNumbers(
        d.update_window_dims,
        d.inserted_window_dims,
        d.scatter_dims_to_operand_dims,
        d.operand_batching_dims,
        d.scatter_indices_batching_dims,
    )


def _as_scatter(d: GatherDimensionNumbers) -> ScatterDimensionNumbers:
    """The scatter that writes what the gather reads."""
    return ScatterDimensionNumbers(
        d.offset_dims,
        d.collapsed_slice_dims,
        d.start_index_map,
        d.operand_batching_dims,
        d.start_indices_batching_dims,
    )


# -- dynamic slices --------------------------------------------------------------------------------


class _DynamicSlice(Linear):
    """The window of ``slice_sizes`` at starts that are operands; starts are clamped so that it fits."""

    name, kind = "dynamic_slice", "index"

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
            numbers = GatherDimensionNumbers(offset, (), _up(moving), (0,), (0,))
        return gather(x, indices, numbers, slice_sizes, mode=_CLIP), 0


class _DynamicUpdateSlice(Primitive):
    """The operand with a window replaced by ``update``; starts are clamped so that the window fits."""

    name, kind, fresh = "dynamic_update_slice", "index", True

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
        numbers = ScatterDimensionNumbers(window, (), _up(moving), (0,), (0,))
        return scatter(x, indices, update, numbers, unique_indices=True, mode=_CLIP), 0


def _window(shape: tuple[int, ...], sizes: tuple[int, ...], starts: Sequence) -> tuple[slice, ...]:
    window = []
    for n, size, start in zip(shape, sizes, starts, strict=True):
        lo = min(max(int(start), 0), n - size)
        window.append(_py_slice(lo, lo + size))
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
    """The axes along which a window can move at all."""
    return tuple(d for d, (n, size) in enumerate(zip(shape, sizes, strict=True)) if size < n)


def _batched_starts(axis, starts, start_dims, shape, moving, sizes) -> Any:
    """Batched and constant starts, those along ``moving`` axes, as the indices of a gather."""
    columns = []
    for d in moving:
        s = starts[d]
        if s.aval.dtype != dtypes.int32:
            if s.aval.dtype.itemsize >= 4:  # clamped before it is cut to 32 bits
                s = clamp(0, s, min(shape[d] - sizes[d], np.iinfo(s.aval.dtype).max))
            s = convert(s, dtypes.int32)
        columns.append(broadcast_in_dim(s, (axis.size, 1), () if start_dims[d] is None else (0,)))
    return concatenate(columns, 1)


# -- gather and scatter as rows of a matrix --------------------------------------------------------


class _Plan:
    """How a gather or scatter of given shapes reduces to rows of a matrix chosen by a flat index.

    The axes in which positions vary (indexed, batching or only partly read), and whatever lies between them, become
    one axis of length ``rows``; the axes before it are ``outer``, those behind it are ``inner``. A window is the row
    that it starts in plus ``offsets``.

    Attributes:
      batch: the batch dimensions of the indices.
      bounds: for each component of an index, the largest start that keeps the window inside.
      strides: for each component, the rows from one start to the next.
      along: (dimension of the indices, stride) of the batching dimensions.
      offsets: the rows of a window, from its first; None where that is one.
      natural: the shape of what is gathered, in the order (outer, batch, window, inner).
      order: the permutation from there to the order of the result (or updates).
    """

    def __init__(
        self, shape: tuple[int, ...], indices: tuple[int, ...], d: GatherDimensionNumbers, sizes: tuple
    ):
        self.batch = indices[:-1]
        varying = {i for i, (n, size) in enumerate(zip(shape, sizes, strict=True)) if size < n}
        varying.update(d.operand_batching_dims)
        first, last = (min(varying), max(varying) + 1) if varying else (0, 0)
        self.first, self.last = first, last
        self.outer, self.inner = math.prod(shape[:first]), math.prod(shape[last:])
        self.varying_shape = shape[first:last]
        self.rows = math.prod(self.varying_shape)
        stride = {i: math.prod(shape[i + 1 : last]) for i in range(first, last)}
        self.bounds = np.array([shape[i] - sizes[i] for i in d.start_index_map], np.intp)
        self.strides = np.array([stride.get(i, 0) for i in d.start_index_map], np.intp)
        self.along = [
            (k, stride[i])
            for i, k in zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True)
        ]
        removed = {*d.collapsed_slice_dims, *d.operand_batching_dims}
        windows = [i for i in range(len(shape)) if i not in removed]
        offsets = np.zeros(1, np.intp)
        for i in range(first, last):
            if i not in removed:
                offsets = (offsets[:, None] + np.arange(sizes[i]) * stride[i]).reshape(-1)
        self.offsets = None if offsets.shape == (1,) and not offsets[0] else offsets
        self.per_window = len(offsets)
        before = [i for i in windows if i < first]
        inside = [i for i in windows if first <= i < last]
        after = [i for i in windows if i >= last]
        self.natural = (
            *(sizes[i] for i in before),
            *self.batch,
            *(sizes[i] for i in (*inside, *after)),
        )
        position = {("batch", k): len(before) + k for k in range(len(self.batch))}
        position.update({("window", i): p for p, i in enumerate(before)})
        position.update(
            {("window", i): len(before) + len(self.batch) + p for p, i in enumerate(inside + after)}
        )
        rest_w, rest_b = iter(windows), iter(range(len(self.batch)))
        order = [
            position[("window", next(rest_w)) if p in d.offset_dims else ("batch", next(rest_b))]
            for p in range(len(self.natural))
        ]
        self.order = None if order == list(range(len(order))) else tuple(order)
        self.inverse = None if self.order is None else tuple(int(i) for i in np.argsort(order))

    def starts(self, indices: np.ndarray, drop: bool, clip: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """The row that each window starts in, and which windows lie inside (None: all, or nobody asked)."""
        if indices.dtype == np.uint64:
            indices = np.minimum(indices, np.uint64(np.iinfo(np.intp).max))
        at = indices.reshape(math.prod(self.batch), len(self.bounds)).astype(np.intp)
        inside: Any = None
        if drop:
            inside = ((at >= 0) & (at <= self.bounds)).all(1)
            if inside.all():
                inside = None
        if clip or inside is not None:
            at = np.minimum(np.maximum(at, 0), self.bounds)
        rows = at[:, 0] * self.strides[0] if len(self.strides) == 1 else at @ self.strides
        if self.along:
            rows = rows.reshape(self.batch)
            for k, stride in self.along:
                line = np.arange(self.batch[k], dtype=np.intp) * stride
                rows = rows + line.reshape(-1, *[1] * (len(self.batch) - k - 1))
            rows = rows.reshape(-1)
        return rows, inside

    def window_rows(self, starts: np.ndarray) -> np.ndarray:
        """All rows of all windows."""
        return starts if self.offsets is None else (starts[:, None] + self.offsets).reshape(-1)


_plan = functools.lru_cache(4096)(_Plan)


def _default_fill(dtype: np.dtype) -> Any:
    """What a gather reads outside: NaN, the least signed or greatest unsigned integer, or True."""
    if dtypes.is_inexact(dtype):
        return np.nan
    if dtypes.is_bool(dtype):
        return True
    if dtypes.is_integer(dtype):
        return np.iinfo(dtype).max if dtypes.is_unsigned(dtype) else np.iinfo(dtype).min
    return np.zeros((), dtype)[()]  # keys


class _Gather(Linear):
    """Windows of the operand, at starts given by an array of indices."""

    name, kind, fresh = "gather", "index", True

    def impl(
        self,
        x,
        indices,
        *,
        dimension_numbers,
        slice_sizes,
        indices_are_sorted,
        unique_indices,
        mode,
        fill_value,
    ):
        plan = _plan(x.shape, indices.shape, dimension_numbers, slice_sizes)
        starts, inside = plan.starts(indices, drop=mode is _FILL, clip=mode is not _FILL)
        rows = plan.window_rows(starts)
        if x.flags.c_contiguous or len(rows) * plan.inner * plan.outer >= x.size:
            table = x.reshape(plan.outer, plan.rows, plan.inner)
            out = table[0].take(rows, 0, mode="clip") if plan.outer == 1 else table.take(rows, 1, mode="clip")
        else:  # a few rows of a view: copying all of it into order would cost more
            at = np.unravel_index(rows, plan.varying_shape) if plan.varying_shape else (None,)
            out = x[(*[_py_slice(None)] * plan.first, *at)]
        if inside is not None:
            fill = _default_fill(x.dtype) if fill_value is None else fill_value
            out.reshape(plan.outer, len(starts), plan.per_window * plan.inner)[:, ~inside] = fill
        out = out.reshape(plan.natural)
        return out if plan.order is None else out.transpose(plan.order)

    def abstract(self, x, indices, *, dimension_numbers, slice_sizes, **_):
        d = dimension_numbers
        _check_numbers(
            "gather", ("offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims",
                       "start_indices_batching_dims"), d, x, indices)  # fmt: skip
        removed = {*d.collapsed_slice_dims, *d.operand_batching_dims}
        if len(slice_sizes) != x.ndim or any(
            not 0 <= size <= n or (i in removed and size > 1)
            for i, (size, n) in enumerate(zip(slice_sizes, x.shape, strict=False))
        ):
            raise errors.ShapeError(
                f"gather from {x} cannot take windows of {slice_sizes}.",
                why="a window has one size per axis, not larger than the axis, and 1 on collapsed and batching axes.",
                fix="correct slice_sizes, or index with x[...]",
            )
        window = [size for i, size in enumerate(slice_sizes) if i not in removed]
        ndim = indices.ndim - 1 + len(window)
        if len(window) != len(d.offset_dims) or any(o >= ndim for o in d.offset_dims):
            raise errors.ShapeError(
                f"gather from {x}: windows have {len(window)} axes left and the result {ndim}, offset_dims are "
                f"{d.offset_dims}.",
                fix="give one position in the result per axis of the window that is not collapsed or batching",
            )
        rest_w, rest_b = iter(window), iter(indices.shape[:-1])
        shape = tuple([next(rest_w) if p in d.offset_dims else next(rest_b) for p in range(ndim)])
        return ShapedArray(shape, x.dtype)

    def jvp(self, primals, tangents, **params):
        x, indices = primals
        out = self.bind(x, indices, **params)
        if tangents[0].__class__ is Zero:
            return out, zero(out.aval)
        return out, self.bind(tangents[0], indices, **{**params, "fill_value": 0})

    def transpose(
        self,
        ct,
        x,
        indices,
        *,
        dimension_numbers,
        slice_sizes,
        indices_are_sorted,
        unique_indices,
        mode,
        fill_value,
    ):
        out = scatter_add_p.bind(
            zeros(x.aval),
            indices,
            ct,
            dimension_numbers=_as_scatter(dimension_numbers),
            indices_are_sorted=indices_are_sorted,
            unique_indices=unique_indices,
            mode=mode,
        )
        x.add(out)

    def batch(self, axis, args, dims, *, dimension_numbers, slice_sizes, **params):
        (x, indices), (dx, di) = args, dims
        n = dimension_numbers
        offset, collapsed, index_map = _up(n.offset_dims), n.collapsed_slice_dims, n.start_index_map
        along, indices_along = n.operand_batching_dims, n.start_indices_batching_dims
        if dx is not None:
            x = move_dim(x, dx, 0)
            collapsed, index_map, along = _up(collapsed), _up(index_map), _up(along)
        if di is not None:
            indices, indices_along = move_dim(indices, di, 0), _up(indices_along)
        if dx is None:
            pass
        elif di is None:
            offset, slice_sizes = (0, *offset), (axis.size, *slice_sizes)
        else:
            along, indices_along, slice_sizes = (0, *along), (0, *indices_along), (1, *slice_sizes)
        numbers = GatherDimensionNumbers(offset, collapsed, index_map, along, indices_along)
        return self.bind(x, indices, dimension_numbers=numbers, slice_sizes=slice_sizes, **params), 0


class _Scatter(Primitive):
    """A kind: the operand with windows, at starts given by an array of indices, combined with updates."""

    kind, fresh = "index", True
    types = "number"

    def impl(self, x, indices, updates, *, dimension_numbers, indices_are_sorted, unique_indices, mode):
        sizes = _window_sizes(x.shape, updates.shape, dimension_numbers)
        plan = _plan(x.shape, indices.shape, _as_gather(dimension_numbers), sizes)
        starts, inside = plan.starts(indices, drop=mode is not _CLIP, clip=mode is _CLIP)
        if plan.inverse is not None:
            updates = updates.transpose(plan.inverse)
        if inside is not None:
            kept = updates.reshape(plan.outer, len(starts), plan.per_window * plan.inner)[:, inside]
            updates, starts = kept, starts[inside]
        rows = plan.window_rows(starts)
        if plan.outer > 1:
            rows = (np.arange(plan.outer, dtype=np.intp)[:, None] * plan.rows + rows).reshape(-1)
        if not updates.size:
            return np.array(x, order="C")
        updates = updates.reshape(len(rows), plan.inner)
        unique = unique_indices or len(rows) == 1
        return self.combine(x, rows, updates, plan.outer * plan.rows, unique)

    def combine(
        self, x: np.ndarray, rows: np.ndarray, updates: np.ndarray, n: int, unique: bool
    ) -> np.ndarray:
        """``x`` with ``updates`` combined into ``rows`` of its ``n``; ``unique``: no row comes twice."""
        raise NotImplementedError

    def abstract(self, x, indices, updates, *, dimension_numbers, **_):
        check_types(self.name, self.types, x)
        d = dimension_numbers
        _check_numbers(
            self.name, ("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims",
                        "operand_batching_dims", "scatter_indices_batching_dims"), d, x, indices)  # fmt: skip
        if updates.dtype != x.dtype:
            raise errors.DtypeError(
                f"{self.name} into {x} needs updates of its dtype, not {updates}.",
                fix="convert one of them with .astype",
            )
        window = x.ndim - len(d.inserted_window_dims) - len(d.operand_batching_dims)
        ndim = indices.ndim - 1 + window
        if len(d.update_window_dims) != window or any(o >= ndim for o in d.update_window_dims):
            raise errors.ShapeError(
                f"{self.name} into {x}: windows have {window} axes left and the updates {ndim}, update_window_dims "
                f"are {d.update_window_dims}.",
                fix="give one axis of the updates per axis of the operand that is not inserted or batching",
            )
        batch = tuple([n for p, n in enumerate(updates.shape) if p not in d.update_window_dims])
        sizes = _window_sizes(x.shape, updates.shape, d) if updates.ndim == ndim else ()
        if (
            updates.ndim != ndim
            or batch != indices.shape[:-1]
            or any(size > n for size, n in zip(sizes, x.shape, strict=True))
        ):
            raise errors.ShapeError(
                f"{self.name} into {x} at indices {indices} cannot take updates {updates}.",
                why=f"outside of update_window_dims {d.update_window_dims} their shape must be {indices.shape[:-1]}, "
                f"inside not larger than the operand's.",
                fix="broadcast the updates first, or use x.at[...]",
            )
        return x.strong()

    def batch(self, axis, args, dims, *, dimension_numbers, **params):
        n = dimension_numbers
        if dims[1] is None:
            x, updates = all_front(axis, [args[0], args[2]], [dims[0], dims[2]])
            indices = args[1]
            window, along, indices_along = (0,), (), n.scatter_indices_batching_dims
        else:
            x, indices, updates = all_front(axis, args, dims)
            window, along, indices_along = (), (0,), (0, *_up(n.scatter_indices_batching_dims))
        numbers = ScatterDimensionNumbers(
            (*window, *_up(n.update_window_dims)),
            _up(n.inserted_window_dims),
            _up(n.scatter_dims_to_operand_dims),
            (*along, *_up(n.operand_batching_dims)),
            indices_along,
        )
        return self.bind(x, indices, updates, dimension_numbers=numbers, **params), 0

    def read(self, x: Any, indices: Any, updates: ShapedArray, params: dict, fill_value: Any = 0) -> Any:
        """What ``x`` holds where this scatter writes: an array like ``updates``."""
        d = params["dimension_numbers"]
        return gather_p.bind(
            x,
            indices,
            dimension_numbers=_as_gather(d),
            slice_sizes=_window_sizes(x.aval.shape, updates.shape, d),
            indices_are_sorted=params["indices_are_sorted"],
            unique_indices=params["unique_indices"],
            mode=params["mode"],
            fill_value=fill_value,
        )


class _ScatterSet(_Scatter):
    """The operand with windows replaced; where they overlap, the last one stays."""

    name, types = "scatter", "any"

    def combine(self, x, rows, updates, n, unique):
        out = np.array(x, order="C")
        # one flat, contiguous index: NumPy assigns in its order, so that the last update of a row stays
        out.reshape(n, updates.shape[1])[rows] = updates
        return out

    def jvp(self, primals, tangents, **params):
        # which update stays depends on the indices alone, so this is linear in operand and updates together
        x, indices, updates = primals
        tx, _, tu = tangents
        out = self.bind(*primals, **params)
        if tx.__class__ is Zero and tu.__class__ is Zero:
            return out, zero(out.aval)
        return out, self.bind(instantiate(tx), indices, instantiate(tu), **params)

    def transpose(self, ct, x, indices, updates, **params):
        if is_linear(x):
            x.add(self.bind(ct, indices, zeros(updates.aval), **params))
        if is_linear(updates):
            read = self.read(ct, indices, updates.aval, params)
            if not _unique(indices, params):
                read = select(self._stayed(x.aval, indices, updates.aval, params), read, zeros_of(read))
            updates.add(read)

    def _stayed(self, x: ShapedArray, indices: Any, updates: ShapedArray, params: dict) -> Any:
        """Which elements of the updates were not overwritten by later ones: scatter their numbers, and read back."""
        shape = updates.shape
        batch = tuple(p for p in range(len(shape)) if p not in params["dimension_numbers"].update_window_dims)
        count = math.prod([shape[p] for p in batch])
        numbers = reshape(add(iota(dtypes.int32, (count,), 0), 1), tuple([shape[p] for p in batch]))
        numbers = broadcast_in_dim(numbers, shape, batch)
        last = self.bind(full(x.shape, 0, dtypes.int32), indices, numbers, **params)
        return eq(self.read(last, indices, updates, params), numbers)


class _ScatterAdd(_Scatter):
    """The operand with updates added; half-precision floats are summed in float32."""

    name = "scatter_add"

    def combine(self, x, rows, updates, n, unique):
        wide, width = _wide(x.dtype), updates.shape[1]
        blank = not any(x.strides) and not any(
            x.flat[0].tobytes()
        )  # zeros that were broadcast: a gradient begins
        if blank or (not unique and 2 * len(rows) > n):
            out = _sum_rows(rows, updates.astype(wide, copy=False), n).reshape(x.shape)
            if not blank:
                np.add(out, x, out=out)
            return out.astype(x.dtype, copy=False)
        if not unique:  # few rows of many: leave the others alone
            return _combine_at(np.add, x, rows, updates)
        out = np.array(x, order="C")
        out.reshape(n, width)[rows] += updates
        return out

    def jvp(self, primals, tangents, **params):
        x, indices, updates = primals
        tx, _, tu = tangents
        out = self.bind(*primals, **params)
        if tu.__class__ is Zero:
            return out, zero(out.aval) if tx.__class__ is Zero else tx
        return out, self.bind(instantiate(tx), indices, tu, **params)

    def transpose(self, ct, x, indices, updates, **params):
        if is_linear(x):
            x.add(ct)
        if is_linear(updates):
            updates.add(self.read(ct, indices, updates.aval, params))


class _ScatterMul(_Scatter):
    """The operand with windows multiplied by updates."""

    name = "scatter_mul"

    def combine(self, x, rows, updates, n, unique):
        return _combine_at(np.multiply, x, rows, updates)

    def jvp(self, primals, tangents, **params):
        x, indices, updates = primals
        tx, _, tu = tangents
        out = self.bind(*primals, **params)
        if tu.__class__ is Zero:
            return out, zero(out.aval) if tx.__class__ is Zero else self.bind(tx, indices, updates, **params)
        self._require_unique(indices, params)
        t = mul(x, scatter_add_p.bind(zeros(x.aval), indices, tu, **params))
        return out, t if tx.__class__ is Zero else add(self.bind(tx, indices, updates, **params), t)

    def transpose(self, ct, x, indices, updates, **params):
        if is_linear(x):
            x.add(self.bind(ct, indices, updates, **params))
        if is_linear(updates):
            self._require_unique(indices, params)
            updates.add(self.read(mul(ct, x), indices, updates.aval, params))

    def _require_unique(self, indices, params):
        if not _unique(indices, params):
            raise errors.GradError(
                "scatter_mul has a derivative with respect to its updates only if no index repeats.",
                where=source.here(),
                why="the derivative for one factor is the product of all the others.",
                fix="pass unique_indices=True if that is so: x.at[i].mul(y, unique_indices=True)",
            )


class _ScatterExtreme(_Scatter):
    """The operand with windows replaced by the larger (or smaller) of themselves and the updates."""

    types = "ordered"
    transpose = unsupported("it is not linear: it is transposed through its derivative")

    def __init__(self, name: str, ufunc: np.ufunc):
        super().__init__(name)
        self.at = ufunc

    def combine(self, x, rows, updates, n, unique):
        return _combine_at(self.at, x, rows, updates)

    def jvp(self, primals, tangents, **params):
        # all values that equal the result share its tangent evenly: the convention of max
        x, indices, updates = primals
        tx, _, tu = tangents
        out = self.bind(*primals, **params)
        if tx.__class__ is Zero and tu.__class__ is Zero:
            return out, zero(out.aval)
        dtype = out.aval.dtype
        won = eq(updates, self.read(out, indices, updates.aval, params))
        kept = eq(x, out)
        wide = _wide(dtype)
        winners = scatter_add_p.bind(convert(kept, wide), indices, convert(won, wide), **params)
        share = convert(div(scalar(1, wide), winners), dtype)
        t = zeros(x.aval) if tx.__class__ is Zero else select(kept, tx, zeros_of(out))
        if tu.__class__ is not Zero:
            t = scatter_add_p.bind(t, indices, select(won, tu, zeros_of(out)), **params)
        return out, mul(t, share)


def _wide(dtype: np.dtype) -> np.dtype:
    """What to compute in for values of ``dtype``."""
    return dtypes.float32 if dtypes.is_floating(dtype) and dtype.itemsize <= 2 else dtype


def _sum_rows(rows: np.ndarray, updates: np.ndarray, n: int) -> np.ndarray:
    """The matrix of ``n`` rows whose row i is the sum of the updates j with ``rows[j] == i``, in order of j.

    That is the product with a sparse matrix of ones, which SciPy runs as one pass over the updates: several times
    faster than ``np.add.at`` or sorting.
    """
    if dtypes.is_complex(updates.dtype):  # as pairs of reals: one times infinity is NaN for complex numbers
        real = np.ascontiguousarray(updates).view(f"f{updates.dtype.itemsize // 2}")
        return _sum_rows(rows, real, n).view(updates.dtype)
    count = len(rows)
    small = np.int32 if max(n, count) < 2**31 else np.int64
    ones = np.ones(count, updates.dtype)
    table = scipy.sparse.csc_array(
        (ones, rows.astype(small), np.arange(count + 1, dtype=small)), shape=(n, count)
    )
    return table @ updates


def _combine_at(ufunc: np.ufunc, x: np.ndarray, rows: np.ndarray, updates: np.ndarray) -> np.ndarray:
    """``x`` with ``ufunc`` applied to some of its rows, one update after the other."""
    wide = _wide(x.dtype)
    out = np.array(x, wide, order="C")
    width = updates.shape[1]
    if width > 1:  # one index per element: ``at`` is several times faster on vectors
        rows = (rows[:, None] * width + np.arange(width, dtype=np.intp)).reshape(-1)
    ufunc.at(out.reshape(-1), rows, np.ascontiguousarray(updates, wide).reshape(-1))
    return out if wide == x.dtype else out.astype(x.dtype)


def _window_sizes(
    shape: tuple[int, ...], updates: tuple[int, ...], d: ScatterDimensionNumbers
) -> tuple[int, ...]:
    """The sizes of a scatter's windows, per operand dimension."""
    window = iter(d.update_window_dims)
    removed = (*d.inserted_window_dims, *d.operand_batching_dims)
    return tuple([1 if i in removed else updates[next(window)] for i in range(len(shape))])


def _unique(indices: Any, params: dict) -> bool:
    """Whether it is known that no element is written twice."""
    if params["unique_indices"]:
        return True
    along = params["dimension_numbers"].scatter_indices_batching_dims
    return math.prod([n for k, n in enumerate(indices.aval.shape[:-1]) if k not in along]) <= 1


def _up(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Dimension numbers behind a new leading dimension."""
    return tuple([d + 1 for d in dims])


def _check_numbers(name: str, fields: tuple[str, ...], d: Any, x: ShapedArray, indices: ShapedArray) -> None:
    """Check dimension numbers against operand and indices; ``fields`` are in the order of a gather's."""
    if not dtypes.is_integer(indices.dtype):
        raise errors.DtypeError(f"{name} takes integer indices, not {indices}.", fix="i.astype('int32')")
    window, removed, index_map, along, indices_along = (getattr(d, f) for f in fields)
    problem = None
    if not indices.ndim:
        problem = "the indices need at least one axis, the last, which holds the components of an index"
    elif indices.shape[-1] != len(index_map):
        problem = f"indices {indices} have {indices.shape[-1]} components, {fields[2]} has {len(index_map)}"
    elif any(a >= b for dims in (window, removed, along) for a, b in itertools.pairwise(dims)):
        problem = f"{fields[0]}, {fields[1]} and {fields[3]} must be rising"
    elif any(not 0 <= i < x.ndim for dims in (removed, index_map, along) for i in dims):
        problem = f"{fields[1]}, {fields[2]} and {fields[3]} must be axes of the operand"
    elif any(o < 0 for o in window):
        problem = f"{fields[0]} must not be negative"
    elif len({*index_map, *along}) != len(index_map) + len(along) or {*removed} & {*along}:
        problem = (
            f"{fields[3]} must not be among {fields[1]} or {fields[2]}, nor an axis twice in any of them"
        )
    elif len(along) != len(indices_along) or len(set(indices_along)) != len(indices_along):
        problem = f"{fields[3]} and {fields[4]} must pair up"
    elif any(not 0 <= k < indices.ndim - 1 for k in indices_along):
        problem = f"{fields[4]} must be axes of the indices, not the last"
    elif any(x.shape[i] != indices.shape[k] for i, k in zip(along, indices_along, strict=True)):
        problem = f"axes {along} of the operand and {indices_along} of the indices differ in size"
    if problem:
        raise errors.ShapeError(
            f"{name} of {x} at indices {indices}: {problem}.",
            why=f"the dimension numbers are {d}.",
            fix="correct the dimension numbers, or index with x[...] and x.at[...]",
        )


dynamic_slice_p = _DynamicSlice()
dynamic_update_slice_p = _DynamicUpdateSlice()
gather_p = _Gather()
scatter_p = _ScatterSet()
scatter_add_p = _ScatterAdd()
scatter_mul_p = _ScatterMul()
scatter_min_p = _ScatterExtreme("scatter_min", np.minimum)
scatter_max_p = _ScatterExtreme("scatter_max", np.maximum)


# -- functions -------------------------------------------------------------------------------------


def dynamic_slice(
    operand: Any,
    start_indices: Any,
    slice_sizes: Sequence[int],
    *,
    allow_negative_indices: bool | Sequence[bool] = True,
) -> Any:
    """The window of ``operand`` of ``slice_sizes`` (static) at ``start_indices`` (which may be traced).

    Args:
      start_indices: one integer per axis, in a sequence or an array of rank 1. Where the window would not fit, the
        start is moved.
      allow_negative_indices: whether negative starts count from the end (per axis or for all).
    """
    operand = lift(operand)
    starts = _starts(operand, start_indices, allow_negative_indices)
    return dynamic_slice_p.bind(operand, *starts, slice_sizes=tuple(map(index, slice_sizes)))


def dynamic_update_slice(
    operand: Any,
    update: Any,
    start_indices: Any,
    *,
    allow_negative_indices: bool | Sequence[bool] = True,
) -> Any:
    """``operand`` with the window at ``start_indices`` replaced by ``update``; see ``dynamic_slice``."""
    operand = lift(operand)
    starts = _starts(operand, start_indices, allow_negative_indices)
    return dynamic_update_slice_p.bind(operand, operand_like(update, operand), *starts)


def _starts(x: Any, starts: Any, allow_negative: bool | Sequence[bool]) -> list[Any]:
    """Start indices as rank-0 integers that count from the front."""
    if isinstance(starts, Value):
        if starts.aval.ndim != 1:
            raise errors.ShapeError(
                f"start indices are a sequence of integers or an array of rank 1, not {starts.aval}.",
                where=source.here(),
                fix="pass a tuple: dynamic_slice(x, (i, j), sizes)",
            )
        starts = [squeeze(slice_in_dim(starts, i, i + 1), (0,)) for i in range(starts.aval.shape[0])]
    ndim = x.aval.ndim
    if len(starts) != ndim:
        raise errors.ShapeError(
            f"a window of {x.aval} needs {ndim} start indices, not {len(starts)}.",
            where=source.here(),
            fix="give one start per axis, or use lax.dynamic_slice_in_dim for a single axis",
        )
    allow = [allow_negative] * ndim if isinstance(allow_negative, bool) else allow_negative
    return [_start(s, n, a) for s, n, a in zip(starts, x.aval.shape, allow, strict=True)]


def _start(s: Any, n: int, allow_negative: bool) -> Any:
    if not isinstance(s, Value):
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
    operand: Any, start_index: Any, slice_size: int, axis: int = 0, *, allow_negative_indices: bool = True
) -> Any:
    """``slice_size`` positions of ``operand`` along one axis, from ``start_index`` on."""
    operand = lift(operand)
    axis = canonical_axis(axis, operand.aval.ndim, "dynamic_slice_in_dim")
    starts = replace((0,) * operand.aval.ndim, axis, start_index)
    sizes = replace(operand.aval.shape, axis, slice_size)
    return dynamic_slice(operand, starts, sizes, allow_negative_indices=allow_negative_indices)


def dynamic_index_in_dim(
    operand: Any, index: Any, axis: int = 0, keepdims: bool = True, *, allow_negative_indices: bool = True
) -> Any:
    """The elements of ``operand`` at position ``index`` along one axis, which stays with size 1 if ``keepdims``."""
    operand = lift(operand)
    axis = canonical_axis(axis, operand.aval.ndim, "dynamic_index_in_dim")
    out = dynamic_slice_in_dim(operand, index, 1, axis, allow_negative_indices=allow_negative_indices)
    return out if keepdims else squeeze(out, (axis,))


def dynamic_update_slice_in_dim(
    operand: Any, update: Any, start_index: Any, axis: int, *, allow_negative_indices: bool = True
) -> Any:
    """``operand`` with the positions along one axis, from ``start_index`` on, replaced by ``update``."""
    operand = lift(operand)
    axis = canonical_axis(axis, operand.aval.ndim, "dynamic_update_slice_in_dim")
    starts = replace((0,) * operand.aval.ndim, axis, start_index)
    return dynamic_update_slice(operand, update, starts, allow_negative_indices=allow_negative_indices)


def dynamic_update_index_in_dim(
    operand: Any, update: Any, index: Any, axis: int, *, allow_negative_indices: bool = True
) -> Any:
    """``operand`` with position ``index`` along one axis replaced by ``update``, which may lack the axis."""
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


def gather(
    operand: Any,
    start_indices: Any,
    dimension_numbers: GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    *,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    mode: str | GatherScatterMode | None = None,
    fill_value: Any = None,
) -> Any:
    """Windows of ``operand`` at many positions: XLA's gather, the form that all indexing by arrays takes.

    Args:
      start_indices: integers; the last axis holds the components of one index.
      dimension_numbers: how the axes relate.
      slice_sizes: the size of a window along each axis of the operand.
      unique_indices, indices_are_sorted: promises about the indices. The gradient is faster with unique ones.
      mode: what to do about windows that are not within the operand; filling, if None.
      fill_value: what to fill with: a Python scalar. By default NaN, the least signed or greatest unsigned integer,
        or True.
    """
    if fill_value is not None and not isinstance(fill_value, (bool, int, float, complex)):
        fill_value = np.asarray(fill_value).item()
    return gather_p.bind(
        lift(operand),
        lift(start_indices),
        dimension_numbers=dimension_numbers,
        slice_sizes=tuple(map(index, slice_sizes)),
        indices_are_sorted=bool(indices_are_sorted),
        unique_indices=bool(unique_indices),
        mode=GatherScatterMode.from_any(mode),
        fill_value=fill_value,
    )


def _scatter(prim: Primitive, doc: str) -> Callable:
    def function(
        operand: Any,
        scatter_indices: Any,
        updates: Any,
        dimension_numbers: ScatterDimensionNumbers,
        *,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        mode: str | GatherScatterMode | None = None,
    ) -> Any:
        operand = lift(operand)
        return prim.bind(
            operand,
            lift(scatter_indices),
            operand_like(updates, operand),
            dimension_numbers=dimension_numbers,
            indices_are_sorted=bool(indices_are_sorted),
            unique_indices=bool(unique_indices),
            mode=GatherScatterMode.from_any(mode),
        )

    function.__name__ = function.__qualname__ = prim.name
    function.__doc__ = doc
    return function


scatter = _scatter(
    scatter_p,
    """``operand`` with windows at many positions replaced by ``updates``: XLA's scatter, the form of ``x.at[i].set``.

    Args:
      scatter_indices: integers; the last axis holds the components of one index.
      updates: the windows, of the operand's dtype. Where they overlap, the last one stays.
      dimension_numbers: how the axes relate.
      indices_are_sorted, unique_indices: promises about the indices; unique ones are faster, gradients above all.
      mode: what to do about windows that are not within the operand; leaving them out, if None.
    """,
)
scatter_add = _scatter(
    scatter_add_p, "``operand`` with ``updates`` added at many positions; see ``scatter``."
)
scatter_mul = _scatter(
    scatter_mul_p, "``operand`` multiplied by ``updates`` at many positions; see ``scatter``."
)
scatter_min = _scatter(
    scatter_min_p, "The smaller of ``operand`` and ``updates`` at many positions; see ``scatter``."
)
scatter_max = _scatter(
    scatter_max_p, "The larger of ``operand`` and ``updates`` at many positions; see ``scatter``."
)


def scatter_sub(
    operand: Any, scatter_indices: Any, updates: Any, dimension_numbers: Any, **options: Any
) -> Any:
    """``operand`` with ``updates`` subtracted at many positions; see ``scatter``."""
    operand = lift(operand)
    updates = neg(operand_like(updates, operand))
    return scatter_add(operand, scatter_indices, updates, dimension_numbers, **options)
