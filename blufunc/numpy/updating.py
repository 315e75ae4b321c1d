"""``x.at[index]``: arrays with some elements changed.

Face; it shares the parser of index expressions with ``indexing``. Static positions become a
``dynamic_update_slice`` of the window that they make; a mask and a number become a choice; all else is
one scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from blufunc import _lazy, errors
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.core.ops import dynamic, gather_scatter
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops.shape import slice_p
from blufunc.core.ops.windows import GatherScatterMode, ScatterDimensionNumbers
from blufunc.core.primitives.linear_ops import broadcast_in_dim, reshape
from blufunc.core.primitives.primitive import Primitive
from blufunc.numpy import elementwise as ew
from blufunc.numpy.indexing import (
    NEW,
    Layout,
    Parsed,
    Point,
    Positions,
    Slice,
    clipped,
    gather_mode,
    getitem,
    mask_positions,
    parse,
    stacked,
    unwrapped,
)
from blufunc.numpy.promotion import PYTHON_SCALARS, as_value, cast, constant, fits, stretch

with _lazy.modules(globals()):
    from blufunc.parallel.mesh import constrain as constraints

_INT32 = dtypes.int32

# -- writing elements ------------------------------------------------------------------------------


class At:
    """``x.at``: index it to name the elements that an update is about."""

    __slots__ = ("x",)

    def __init__(self, x: Array):
        self.x = x

    def __getitem__(self, index: Any) -> Place:
        return Place(self.x, index)

    def __repr__(self) -> str:
        return f"<at of {self.x.aval}>"


class Place:
    """``x.at[index]``: methods that return x with these elements changed.

    Where an element is named several times, ``add``, ``mul``, ``min`` and ``max`` apply all updates, ``set`` the
    last one. Options of all methods: ``mode``, for positions that are out of range (``'drop'`` by default,
    ``'clip'``, ``'promise_in_bounds'``); ``indices_are_sorted`` and ``unique_indices``, promises that make for
    faster programs; and ``wrap_negative_indices``, which is True: if False, a negative position is out of range.
    """

    __slots__ = ("index", "x")

    def __init__(self, x: Array, index: Any):
        self.x, self.index = x, index

    def __repr__(self) -> str:
        return f"<{self.x.aval} at {self.index!r}>"

    def set(self, values: Any, **options: Any) -> Array:
        """Replace the elements by ``values``, which broadcast to ``x[index]``."""
        return _update(self.x, self.index, values, "set", **options)

    def add(self, values: Any, **options: Any) -> Array:
        """``values`` added to the elements."""
        return _update(self.x, self.index, values, "add", **options)

    def subtract(self, values: Any, **options: Any) -> Array:
        """``values`` subtracted from the elements."""
        return _update(self.x, self.index, ew.negative(values), "add", **options)

    def multiply(self, values: Any, **options: Any) -> Array:
        """The elements multiplied by ``values``."""
        return _update(self.x, self.index, values, "multiply", **options)

    mul = multiply

    def divide(self, values: Any, **options: Any) -> Array:
        """Divide the elements by ``values``."""
        return ops.div(self.x, self._among_ones(values, options))

    def power(self, values: Any, **options: Any) -> Array:
        """The elements raised to the power ``values``."""
        return ew.power(self.x, self._among_ones(values, options))

    def _among_ones(self, values: Any, options: dict[str, Any]) -> Array:
        ones = stretch(constant(1, self.x.aval.dtype), self.x.aval.shape)
        return _update(ones, self.index, values, "multiply", **options)

    def min(self, values: Any, **options: Any) -> Array:
        """The smaller ones of the elements and ``values``."""
        return _update(self.x, self.index, values, "min", **options)

    def max(self, values: Any, **options: Any) -> Array:
        """The larger ones of the elements and ``values``."""
        return _update(self.x, self.index, values, "max", **options)

    def apply(self, function: Callable[[Array], Any], **options: Any) -> Array:
        """Replace the elements by ``function`` of them, elementwise, once each."""
        mask = _whole_mask(self.x, self.index)
        if mask is not None and not isinstance(mask, ConcreteArray):
            return ops.select_p.bind(
                mask, cast(as_value(function(self.x), "apply"), self.x.aval.dtype), self.x
            )
        return self.set(function(self.get()), **options)

    def get(
        self,
        *,
        mode: Any = None,
        fill_value: Any = None,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        wrap_negative_indices: bool = True,
        out_sharding: Any = None,
    ) -> Array:
        """``x[index]``; mode ``'clip'`` (default), or ``'fill'`` with ``fill_value``."""
        if mode is None:
            mode = GatherScatterMode.CLIP if fill_value is None else GatherScatterMode.FILL_OR_DROP
        index = self.index if wrap_negative_indices else unwrapped(self.x.aval.shape, self.index)
        out = getitem(self.x, index, gather_mode(mode), fill_value, unique_indices, indices_are_sorted)
        return out if out_sharding is None else constraints.constrain(out, out_sharding)


_COMBINE: dict[str, tuple[Callable, Primitive]] = {
    "set": (lambda old, new: new, gather_scatter.scatter_p),
    "add": (lambda old, new: ew.add(old, new), gather_scatter.scatter_add_p),
    "multiply": (lambda old, new: ew.multiply(old, new), gather_scatter.scatter_mul_p),
    "min": (lambda old, new: ops.min_p.bind(old, new), gather_scatter.scatter_min_p),
    "max": (lambda old, new: ops.max_p.bind(old, new), gather_scatter.scatter_max_p),
}
"""For each update: the operation on elements, and the scatter."""


def _update(
    x: Array,
    index: Any,
    values: Any,
    how: str,
    *,
    mode: Any = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    wrap_negative_indices: bool = True,
) -> Array:
    new = _as_update(x, values, how)
    if not wrap_negative_indices:
        index = unwrapped(x.aval.shape, index)
    mask = _whole_mask(x, index)
    if mask is not None:
        row = _row_for_mask(x, index, new)
        if row is not None:
            return ops.select_p.bind(mask, _COMBINE[how][0](x, row), x)
    p = parse(x.aval.shape, index)
    mode = GatherScatterMode.from_any(mode)
    if not p.advanced and not p.dynamic:
        points = [i for i in p.items if i.__class__ is Point]
        if mode is GatherScatterMode.CLIP:
            for i in points:
                i.at = clipped(i.at, x.aval.shape[i.axis], i.axis)
        if any(not 0 <= i.at < x.aval.shape[i.axis] for i in points):
            _fitted(x, new, Layout(Parsed(p.items, True)), p, how)
            return x  # out of range: nothing is written
        if all(i.__class__ is not Slice or i.step == 1 for i in p.items):
            return _update_window(x, p, new, how)
    return _scatter(x, p, new, how, mode, unique_indices or p.distinct, indices_are_sorted)


def _find_mask(index: Any) -> tuple[int, Any, int] | None:
    """Axes before, in and after a boolean array in an index of full slices."""
    if isinstance(index, (Array, np.ndarray)):  # the usual case, which must be fast
        return (0, index, -1) if index.dtype.kind == "b" and index.ndim else None
    if index.__class__ is not tuple:
        return None
    before, after, mask, dots = 0, 0, None, False
    for e in index:
        if isinstance(e, (Array, np.ndarray)) and e.dtype.kind == "b" and e.ndim and mask is None:
            mask = e
        elif e is Ellipsis and not dots:
            dots = True
            if mask is None:
                before = -1
            else:
                after = -1
        elif e.__class__ is slice and e == slice(None):
            if mask is None and before >= 0:
                before += 1
            elif mask is not None and after >= 0:
                after += 1
            else:
                return None  # slices around an ellipsis: left to the general way
        else:
            return None
    return None if mask is None else (before, mask, after if dots or after else -1)


def _whole_mask(x: Array, index: Any) -> Array | None:
    """The mask of an index by one boolean array, in the shape of x."""
    found = _find_mask(index)
    if found is None:
        return None
    before, mask, _ = found
    mask = as_value(mask)
    if before < 0:
        before = x.aval.ndim - mask.aval.ndim - max(found[2], 0)
    own = x.aval.shape[before : before + mask.aval.ndim] if before >= 0 else None
    if mask.aval.shape != own:
        mask_positions(0, own or x.aval.shape, np.zeros(mask.aval.shape, bool))
        return broadcast_in_dim(constant(False, dtypes.bool_), x.aval.shape, ())  # it has an axis of size 0
    return broadcast_in_dim(mask, x.aval.shape, tuple(range(before, before + mask.aval.ndim)))


def _row_for_mask(x: Array, index: Any, new: Array) -> Array | None:
    """Broadcast a mask update that is equal for all elements; None otherwise."""
    if not new.aval.ndim:
        return new
    before, mask, after = _find_mask(index)  # type: ignore[misc]
    rest = x.aval.shape[before + mask.ndim :] if before >= 0 else x.aval.shape[x.aval.ndim - max(after, 0) :]
    own = new.aval.shape
    while len(own) > len(rest) and own[0] == 1:
        own = own[1:]
    if not fits(own, rest):
        return None
    return stretch(reshape(new, own), x.aval.shape)


def _as_update(x: Array, values: Any, how: str) -> Array:
    dtype = x.aval.dtype
    if values.__class__ in PYTHON_SCALARS:
        kind = PYTHON_SCALARS[values.__class__][0]
    else:
        values = as_value(values, f".at[...].{how}")
        kind = values.aval.dtype
    if kind != dtype and _rank(kind) > _rank(dtype):
        shown = values.aval if isinstance(values, Array) else repr(values)
        raise errors.DtypeError(
            f"x.at[...].{how}({shown}) into an array of dtype {dtypes.short_name(dtype)} would lose information.",
            where=source.here(),
            why="the result has the dtype of x.",
            fix=f"convert x first (x.astype('{kind}')), or the values (values.astype('{dtype}'))",
        )
    return cast(values, dtype) if isinstance(values, Array) else constant(values, dtype)


def _rank(dtype: np.dtype) -> int:
    if dtypes.is_bool(dtype):
        return 0
    if dtypes.is_key(dtype):
        return 9
    return 1 if dtypes.is_integer(dtype) else 2 if dtypes.is_floating(dtype) else 3


def _fitted(x: Array, new: Array, layout: Layout, p: Parsed, how: str) -> Array:
    """``new`` broadcast to the shape of ``x[index]``; scalars stay unchanged."""
    own, shape = new.aval.shape, layout.shape
    while len(own) > len(shape) and own[0] == 1:
        own = own[1:]
    new = reshape(new, own)
    if not fits(own, shape):
        raise errors.ShapeError(
            f"x.at[...].{how}: values of shape {own} do not broadcast to the shape {shape} of x[...].",
            where=source.here(),
            why=f"x has shape {x.aval.shape}, and the index picks {math.prod(shape)} of its elements.",
            fix="reshape the values, or index other elements",
        )
    return stretch(new, shape) if own else new


def _shaped(new: Array, shape: tuple[int, ...]) -> Array:
    return reshape(new, shape) if new.aval.ndim else stretch(new, shape)


def _update_window(x: Array, p: Parsed, new: Array, how: str) -> Array:
    """Static positions without steps: the window is rewritten as a whole."""
    start, sizes = [0] * x.aval.ndim, [1] * x.aval.ndim
    for item in p.items:
        if item.__class__ is Slice:
            start[item.axis], sizes[item.axis] = item.start, item.size
        elif item is not NEW:
            start[item.axis] = item.at
    new = _shaped(_fitted(x, new, Layout(p), p, how), tuple(sizes))
    if 0 in sizes:
        return x
    combine = _COMBINE[how][0]
    if tuple(sizes) == x.aval.shape:
        return combine(x, new)
    if how != "set":
        limit = tuple([a + n for a, n in zip(start, sizes, strict=True)])
        new = combine(slice_p.bind(x, start_indices=tuple(start), limit_indices=limit, strides=None), new)
    starts = [constant(s, _INT32) for s in start]
    return dynamic.dynamic_update_slice_p.bind(x, new, *starts)


def _scatter(
    x: Array, p: Parsed, new: Array, how: str, mode: GatherScatterMode, unique: bool, is_sorted: bool
) -> Array:
    layout = Layout(p)
    new = _fitted(x, new, layout, p, how)
    shape = x.aval.shape
    # The updates' axes in order: windows over whole or partial axes, grids for stepped slices, and the arrays.
    # A grid is one more axis of the indices, whose axes keep their order in the updates.
    slices = [i for i in p.items if i.__class__ is Slice]
    sizes = [i.size for i in slices]
    nb = len(layout.batch)
    updates_shape = (*sizes[: layout.first], *layout.batch, *sizes[layout.first :])
    new = _shaped(new, updates_shape)
    place = [k if k < layout.first else k + nb for k in range(len(slices))]
    gridded = [k for k, s in enumerate(slices) if s.step != 1]
    window = tuple([place[k] for k in range(len(slices)) if k not in gridded])
    batch_places = [d for d in range(len(updates_shape)) if d not in window]
    batch = tuple([updates_shape[d] for d in batch_places])
    columns: list[tuple[int, Any]] = []
    inserted: list[int] = []
    at = (
        batch_places.index(layout.first) if nb else 0
    )  # where the arrays' axes are among those of the indices
    for k, s in enumerate(slices):
        if k in gridded:
            d = batch_places.index(place[k])
            line = np.arange(s.size, dtype=np.int64) * s.step + s.start
            columns.append((s.axis, line.reshape([-1 if i == d else 1 for i in range(len(batch))])))
            inserted.append(s.axis)
        elif s.size != shape[s.axis]:
            columns.append((s.axis, s.start))
    for item in p.items:
        if item.__class__ in (Positions, Point) and item.axis >= 0:
            c = item.at
            if len(batch) > nb and not isinstance(c, int) and c.ndim:
                c = _padded_rank(c, at, nb, len(batch))
            columns.append((item.axis, c))
            inserted.append(item.axis)
    if 0 in batch:
        return x
    if not columns:
        return _COMBINE[how][0](x, _shaped(new, shape))
    axes = tuple([a for a, _ in columns])
    indices = stacked([c for _, c in columns], batch, x)
    return _COMBINE[how][1].bind(
        x,
        indices,
        new,
        dimension_numbers=ScatterDimensionNumbers(window, tuple(sorted(inserted)), axes),
        indices_are_sorted=is_sorted,
        unique_indices=unique,
        mode=mode,
    )


def _padded_rank(c: Any, at: int, nb: int, rank: int) -> Any:
    """Positions over the arrays' broadcast axes, on all axes of the indices."""
    own = (1,) * (nb - c.ndim) + tuple(c.shape)
    full = (1,) * at + own + (1,) * (rank - at - nb)
    return c.reshape(full) if isinstance(c, np.ndarray) else reshape(c, full)
