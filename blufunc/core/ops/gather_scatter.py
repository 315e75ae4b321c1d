"""Gather and scatter: reads and updates of windows at an array of indices.

Core operations, above ``windows`` (dimension numbers) and ``rows`` (NumPy implementation). In: operand, indices and
updates. Out: the gathered windows, or the updated operand. They share a file because each is the other's transpose.
Batching uses the batching dimensions, so that ``vmap`` of a gather is one gather. Scatters are deterministic: of
several updates to one element, ``scatter`` keeps the last in row-major order of the indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import ints
from blufunc.core.ops.elementwise import add, convert, div, eq, mul, named, neg, select, zeros_of
from blufunc.core.ops.elementwise import operand as operand_like
from blufunc.core.ops.rows import combine_at, plan_for, sum_rows, wide_dtype
from blufunc.core.ops.shape import iota
from blufunc.core.ops.windows import (
    GatherDimensionNumbers,
    GatherScatterMode,
    ScatterDimensionNumbers,
    as_gather,
    as_scatter,
    behind_batch,
    check_numbers,
    window_sizes,
)
from blufunc.core.primitives.kinds import check_types
from blufunc.core.primitives.linear_ops import (
    Linear,
    all_front,
    broadcast_in_dim,
    full,
    instantiate,
    move_dim,
    reshape,
    zeros,
)
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.sharding import Factoring
from blufunc.core.primitives.tangents import Zero, is_linear, zero

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.signatures import Scatter
    from blufunc.core.ir.trace import Array


def gather_fill(dtype: np.dtype, fill_value: Any = None) -> Any:
    """Fill value outside the operand: NaN, min signed or max unsigned int, True."""
    if fill_value is not None:
        return fill_value
    if dtypes.is_inexact(dtype):
        return np.nan
    if dtypes.is_bool(dtype):
        return True
    if dtypes.is_integer(dtype):
        return np.iinfo(dtype).max if dtypes.is_unsigned(dtype) else np.iinfo(dtype).min
    return np.zeros((), dtype)[()]  # keys


def _windows(
    b: Factoring, x: tuple[int, ...], indices: tuple[int, ...], numbers: Any, sizes, ndim, rows: str | None
):
    """Factors of operand, indices and windows, and of the batch of indices alone.

    ``rows`` is the reduction if the indexed rows are sharded: "sum", "" for none, or None if they cannot be.
    """
    dx: list[Any] = [()] * len(x)
    di: list[Any] = [()] * len(indices)
    batch = [d for d in range(ndim) if d not in numbers.offset_dims]
    for d, i in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        dx[d] = di[i] = b.new(x[d])
    own = set()
    for i, n in enumerate(indices[:-1]):
        if not di[i]:
            di[i] = b.new(n)
            own |= {*di[i]}
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(x)) if d not in removed]
    for d in range(len(x)):
        if d in numbers.start_index_map:
            if d in numbers.collapsed_slice_dims and rows is not None and x[d] > 1:
                dx[d] = b.new(x[d], rows or None)
        elif d in window and sizes[d] == x[d]:
            dx[d] = b.new(x[d])
    out: list[Any] = [()] * ndim
    for place, d in zip(numbers.offset_dims, window, strict=True):
        out[place] = dx[d] if d not in numbers.start_index_map else ()
    for place, f in zip(batch, di[:-1], strict=True):
        out[place] = f
    return dx, di, out, own


class _Gather(Linear):
    """Windows of the operand, at starts given by an array of indices."""

    name, kind, fresh = "gather", "index", True
    autocast_class = "widest"

    def linear_in(self, avals, outs, *, mode, fill_value, **params):
        if mode is not GatherScatterMode.FILL_OR_DROP:
            return self.linear
        fill = gather_fill(avals[0].dtype, fill_value)
        return self.linear if not fill or np.isnan(fill) else ()  # every term would be filled

    def shard(self, avals, outs, **params):
        """Batch and whole window dimensions pass; a table may be sharded over its rows."""
        b = Factoring()
        x, indices = avals
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        table = dtypes.is_numeric(x.dtype) and not dtypes.is_bool(x.dtype)
        dx, di, out, _ = _windows(
            b, x.shape, indices.shape, numbers, sizes, outs[0].ndim, "sum" if table else None
        )

        def local(params, operands, results):
            return {**params, "slice_sizes": tuple(map(min, params["slice_sizes"], operands[0]))}

        return b.rule([dx, di], [out], params=local, special="gather", harmless=frozenset({0}))

    def impl(self, x, indices, *, dimension_numbers, slice_sizes, mode, fill_value, **_):
        plan = plan_for(x.shape, indices.shape, dimension_numbers, slice_sizes)
        starts, inside = plan.starts(
            indices,
            drop=mode is GatherScatterMode.FILL_OR_DROP,
            clip=mode is not GatherScatterMode.FILL_OR_DROP,
        )
        rows = plan.window_rows(starts)
        if x.flags.c_contiguous or len(rows) * plan.inner * plan.outer >= x.size:
            table = x.reshape(plan.outer, plan.rows, plan.inner)
            out = table[0].take(rows, 0, mode="clip") if plan.outer == 1 else table.take(rows, 1, mode="clip")
        else:  # few rows of a view: copying all of it into order would cost more
            at = np.unravel_index(rows, plan.varying_shape) if plan.varying_shape else (None,)
            # C order: NumPy may lay out a result in the order of the view, which cannot be filled by rows
            out = np.ascontiguousarray(x[(*[slice(None)] * plan.first, *at)])
        if inside is not None:
            fill = gather_fill(x.dtype, fill_value)
            out.reshape(plan.outer, len(starts), plan.per_window * plan.inner)[:, ~inside] = fill
        out = out.reshape(plan.natural)
        return out if plan.order is None else out.transpose(plan.order)

    def abstract(self, x, indices, *, dimension_numbers, slice_sizes, **_):
        d = dimension_numbers
        check_numbers(
            "gather", ("offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims",
                       "start_indices_batching_dims"), d, x, indices)  # fmt: skip
        removed = {*d.collapsed_slice_dims, *d.operand_batching_dims}
        if len(slice_sizes) != x.ndim or any(
            not 0 <= size <= (n or i in d.operand_batching_dims) or (i in removed and size > 1)
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

    def transpose(self, ct, x, indices, *, dimension_numbers, slice_sizes, fill_value, **params):
        numbers = as_scatter(dimension_numbers)
        x.add(scatter_add_p.bind(zeros(x.aval), indices, ct, dimension_numbers=numbers, **params))

    def batch(self, axis, args, dims, *, dimension_numbers, slice_sizes, **params):
        (x, indices), (dx, di) = args, dims
        n = dimension_numbers
        offset, collapsed, index_map = behind_batch(n.offset_dims), n.collapsed_slice_dims, n.start_index_map
        along, indices_along = n.operand_batching_dims, n.start_indices_batching_dims
        if dx is not None:
            x = move_dim(x, dx, 0)
            collapsed, index_map, along = map(behind_batch, (collapsed, index_map, along))
        if di is not None:
            indices, indices_along = move_dim(indices, di, 0), behind_batch(indices_along)
        if dx is None:
            pass
        elif di is None:
            offset, slice_sizes = (0, *offset), (axis.size, *slice_sizes)
        else:
            along, indices_along, slice_sizes = (0, *along), (0, *indices_along), (1, *slice_sizes)
        numbers = GatherDimensionNumbers(offset, collapsed, index_map, along, indices_along)
        return self.bind(x, indices, dimension_numbers=numbers, slice_sizes=slice_sizes, **params), 0


class _Scatter(Primitive):
    """A kind: the operand with updates combined into windows at an array of indices."""

    kind, fresh = "index", True
    types = "number"

    def shard(self, avals, outs, **params):
        """Whole window dimensions and rows pass; sums may shard the batch."""
        b = Factoring()
        x, indices, updates = avals
        numbers = as_gather(params["dimension_numbers"])
        sizes = window_sizes(x.shape, updates.shape, params["dimension_numbers"])
        adds = self is scatter_add_p and dtypes.is_inexact(x.dtype)
        dx, di, du, own = _windows(b, x.shape, indices.shape, numbers, sizes, updates.ndim, "")
        if adds:
            b.reduced.update(dict.fromkeys(own, "sum"))
        else:
            di = [() if set(f) & own else f for f in di]
            du = [() if set(f) & own else f for f in du]
        partial, linear = (frozenset({0}), (frozenset({0, 2}),)) if adds else (frozenset(), ())
        return b.rule(
            [dx, di, du], [dx], special="scatter", partial=partial, linear=linear, harmless=frozenset({1})
        )

    def impl(self, x, indices, updates, *, dimension_numbers, indices_are_sorted, unique_indices, mode):
        sizes = window_sizes(x.shape, updates.shape, dimension_numbers)
        plan = plan_for(x.shape, indices.shape, as_gather(dimension_numbers), sizes)
        starts, inside = plan.starts(
            indices, drop=mode is not GatherScatterMode.CLIP, clip=mode is GatherScatterMode.CLIP
        )
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
        """``x`` with ``updates`` combined into ``rows``; ``unique``: no row repeats."""
        raise NotImplementedError

    def abstract(self, x, indices, updates, *, dimension_numbers, **_):
        check_types(self.name, self.types, x)
        d = dimension_numbers
        check_numbers(
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
        sizes = window_sizes(x.shape, updates.shape, d) if updates.ndim == ndim else ()
        if (
            updates.ndim != ndim
            or batch != indices.shape[:-1]
            or any(
                size > (n or i in d.operand_batching_dims)
                for i, (size, n) in enumerate(zip(sizes, x.shape, strict=True))
            )
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
            window, along, indices_along = (), (0,), (0, *behind_batch(n.scatter_indices_batching_dims))
        numbers = ScatterDimensionNumbers(
            (*window, *behind_batch(n.update_window_dims)),
            behind_batch(n.inserted_window_dims),
            behind_batch(n.scatter_dims_to_operand_dims),
            (*along, *behind_batch(n.operand_batching_dims)),
            indices_along,
        )
        return self.bind(x, indices, updates, dimension_numbers=numbers, **params), 0

    def read(self, x: Any, indices: Any, updates: ShapedArray, params: dict, fill_value: Any = 0) -> Any:
        """The windows of ``x`` that this scatter writes: an array like ``updates``."""
        d = params["dimension_numbers"]
        sizes = window_sizes(x.aval.shape, updates.shape, d)
        params = {**params, "dimension_numbers": as_gather(d), "slice_sizes": sizes, "fill_value": fill_value}
        return gather_p.bind(x, indices, **params)


class _ScatterSet(_Scatter):
    """The operand with windows replaced; where they overlap, the last one stays."""

    name, types = "scatter", "any"
    autocast_class = "widest"

    def combine(self, x, rows, updates, n, unique):
        out = np.array(x, order="C")
        # one flat, contiguous index: NumPy assigns in order, so the last update of a row stays
        out.reshape(n, updates.shape[1])[rows] = updates
        return out

    def jvp(self, primals, tangents, **params):
        # the surviving update depends on the indices alone: linear in operand and updates together
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
        """Mask of updates that survive: scatter their indices, and read them back."""
        shape = updates.shape
        batch = tuple(p for p in range(len(shape)) if p not in params["dimension_numbers"].update_window_dims)
        count = math.prod([shape[p] for p in batch])
        numbers = reshape(add(iota(dtypes.int32, (count,), 0), 1), tuple([shape[p] for p in batch]))
        numbers = broadcast_in_dim(numbers, shape, batch)
        last = self.bind(full(x.shape, 0, dtypes.int32), indices, numbers, **params)
        return eq(self.read(last, indices, updates, params), numbers)


class _ScatterAdd(_Scatter):
    """The operand with updates added; half-precision floats are summed in float32."""

    name, widens = "scatter_add", True
    linear, autocast_class = (frozenset({0, 2}),), "float32"

    def combine(self, x, rows, updates, n, unique):
        wide, width = wide_dtype(x.dtype), updates.shape[1]
        blank = not any(x.strides) and not any(
            x.flat[0].tobytes()
        )  # broadcast zeros: the start of a gradient
        if blank or (not unique and 2 * len(rows) > n):
            out = sum_rows(rows, updates.astype(wide, copy=False), n).reshape(x.shape)
            if not blank:
                np.add(out, x, out=out)
            return out.astype(x.dtype, copy=False)
        if not unique:  # few rows of many: leave the others untouched
            return combine_at(np.add, x, rows, updates)
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

    name, widens = "scatter_mul", True
    autocast_class = "float32"

    def combine(self, x, rows, updates, n, unique):
        return combine_at(np.multiply, x, rows, updates)

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
    """The operand with windows replaced by the maximum (or minimum) with updates."""

    types, widens = "ordered", True
    transpose = unsupported("it is not linear: it is transposed through its derivative")

    def __init__(self, name: str, ufunc: np.ufunc):
        super().__init__(name)
        self.at = ufunc

    def combine(self, x, rows, updates, n, unique):
        return combine_at(self.at, x, rows, updates)

    def jvp(self, primals, tangents, **params):
        # ties share the tangent evenly, as in max
        x, indices, updates = primals
        tx, _, tu = tangents
        out = self.bind(*primals, **params)
        if tx.__class__ is Zero and tu.__class__ is Zero:
            return out, zero(out.aval)
        dtype = out.aval.dtype
        won = eq(updates, self.read(out, indices, updates.aval, params))
        kept = eq(x, out)
        wide = wide_dtype(dtype)
        winners = scatter_add_p.bind(convert(kept, wide), indices, convert(won, wide), **params)
        share = convert(div(scalar(1, wide), winners), dtype)
        t = zeros(x.aval) if tx.__class__ is Zero else select(kept, tx, zeros_of(out))
        if tu.__class__ is not Zero:
            t = scatter_add_p.bind(t, indices, select(won, tu, zeros_of(out)), **params)
        return out, mul(t, share)


def _unique(indices: Any, params: dict) -> bool:
    """True if no element is known to be written twice."""
    if params["unique_indices"]:
        return True
    along = params["dimension_numbers"].scatter_indices_batching_dims
    return math.prod([n for k, n in enumerate(indices.aval.shape[:-1]) if k not in along]) <= 1


gather_p = _Gather()
scatter_p = _ScatterSet()
scatter_add_p = _ScatterAdd()
scatter_mul_p = _ScatterMul()
scatter_min_p = _ScatterExtreme("scatter_min", np.minimum)
scatter_max_p = _ScatterExtreme("scatter_max", np.maximum)


# -- functions -------------------------------------------------------------------------------------


def gather(
    operand: ArrayLike,
    start_indices: Any,
    dimension_numbers: GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    *,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    mode: str | GatherScatterMode | None = None,
    fill_value: ArrayLike | None = None,
) -> Array:
    """Windows of ``operand`` at many positions: XLA's gather.

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
        host = np.asarray(fill_value)
        if host.size != 1 or host.dtype.kind in "USO":
            raise errors.ArgumentError(
                f"the fill value of a gather is a number, not {fill_value!r:.60}.",
                where=source.here(),
                fix="fill_value=0",
            )
        fill_value = host.item()
    return gather_p.bind(
        lift(operand),
        lift(start_indices),
        dimension_numbers=dimension_numbers,
        slice_sizes=ints(slice_sizes, "gather", "slice_sizes"),
        indices_are_sorted=bool(indices_are_sorted),
        unique_indices=bool(unique_indices),
        mode=GatherScatterMode.from_any(mode),
        fill_value=fill_value,
    )


def _scatter(prim: Primitive, doc: str, name: str = "", negates: bool = False) -> Scatter:
    """The function of a scatter; one that ``negates`` adds the negated updates."""

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
        updates = operand_like(updates, operand)
        return prim.bind(
            operand,
            lift(scatter_indices),
            neg(updates) if negates else updates,
            dimension_numbers=dimension_numbers,
            indices_are_sorted=bool(indices_are_sorted),
            unique_indices=bool(unique_indices),
            mode=GatherScatterMode.from_any(mode),
        )

    return named(function, name or prim.name, doc)


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
scatter_sub = _scatter(
    scatter_add_p,
    "``operand`` with ``updates`` subtracted at many positions; see ``scatter``.",
    "scatter_sub",
    True,
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
