"""Indexing: ``x[...]``, NumPy's rules lowered to a few primitives.

Face. An index expression is read once (``parse``) into one item per axis. What is static becomes a
slice, a reversal and a reshape; positions that are scalars at run time become one ``dynamic_slice``;
arrays of positions become one ``gather``, of the axes that static items have left. ``updating`` writes
by the same reading.

Nested lists of ints or booleans stand for arrays. Negative positions count from the end. A Python int out of range is
an error in ``x[i]``. Other positions out of range read the nearest element and write nothing, as in JAX; derivatives of
such a read go to the element that was read, where JAX gives 0 to all. ``x.at[i].get(mode=)`` and ``.set(mode=)`` choose
otherwise: ``'clip'``, the nearest element; ``'fill'``, another value, and ``'drop'``, no write;
``'promise_in_bounds'``, that it does not happen.
"""

from __future__ import annotations

from operator import index as to_index
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray, from_numpy
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.core.ops import dynamic, foreign, gather_scatter
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.ops.shape import rev_p, slice_p
from blufunc.core.ops.windows import GatherDimensionNumbers, GatherScatterMode
from blufunc.core.primitives.linear_ops import broadcast_in_dim, reshape, reshape_p
from blufunc.numpy.creation import asarray, holds_values
from blufunc.numpy.promotion import as_value, broadcast_shapes, cast, constant, stretch

_INT32 = dtypes.int32

# -- reading an index expression -------------------------------------------------------------------


class Slice:
    """Axis ``axis`` at ``start``, ``start + step``, ...: ``size`` valid positions."""

    __slots__ = ("axis", "size", "start", "step")

    def __init__(self, axis: int, start: int, size: int, step: int):
        self.axis, self.start, self.size, self.step = axis, start, size, step


class Point:
    """Axis ``axis`` at one position: an int, maybe out of range, or a rank-0 value."""

    __slots__ = ("at", "axis")

    def __init__(self, axis: int, at: Any):
        self.axis, self.at = axis, at


class Positions:
    """Axis ``axis`` at an array of positions: a NumPy array (static) or a value."""

    __slots__ = ("at", "axis")

    def __init__(self, axis: int, at: Any):
        self.axis, self.at = axis, at


class New:
    """A new axis of size 1."""

    __slots__ = ()


NEW = New()
_ALL = slice(None)


class Parsed:
    """An index expression, item by item.

    Attributes:
      items: ``Slice``, ``Point``, ``Positions`` and ``NEW``, in the order of the expression.
      advanced: whether there are arrays of positions.
      dynamic: whether there are positions of rank 0 that are values.
      distinct: whether no element can be named twice.
    """

    __slots__ = ("advanced", "distinct", "dynamic", "items")

    def __init__(self, items: list, distinct: bool):
        self.items = items
        self.advanced = any(i.__class__ is Positions for i in items)
        self.dynamic = any(i.__class__ is Point and i.at.__class__ is not int for i in items)
        self.distinct = not self.advanced or distinct


def parse(shape: tuple[int, ...], index: Any) -> Parsed:
    entries = list(index) if index.__class__ is tuple else [index]
    used, dots = 0, None
    for i, e in enumerate(entries):
        if e is Ellipsis:
            if dots is not None:
                raise errors.ArgumentError("an index may hold one Ellipsis (...).", where=source.here())
            dots = i
        elif e is not None:
            entries[i] = e = _entry(e)
            if e.__class__ is not bool:
                used += e.ndim if _is_mask(e) else 1
    rank = len(shape)
    if used > rank:
        raise errors.IndexRangeError(
            f"too many indices: {used} for an array of shape {shape}, which has {rank} axes.",
            where=source.here(),
            fix="drop indices, or add axes first: x[None]",
        )
    fill = [_ALL] * (rank - used)
    entries = entries + fill if dots is None else entries[:dots] + fill + entries[dots + 1 :]

    items: list[Any] = []
    axis, masks, arrays, lone_true = 0, 0, 0, False
    for e in entries:
        if e is None:
            items.append(NEW)
        elif e.__class__ is slice:
            items.append(_slice(axis, shape[axis], e))
            axis += 1
        elif e.__class__ is int:
            items.append(Point(axis, e + shape[axis] if e < 0 else e))
            axis += 1
        elif e.__class__ is bool:
            items.append(Positions(-1, np.zeros(int(e), np.int64)))  # a new axis of size 0 or 1
            arrays += 1
            lone_true = e
        elif _is_mask(e):
            items += mask_positions(axis, shape, e)
            axis += e.ndim
            masks += 1
        elif isinstance(e, Array) and not e.aval.ndim:
            items.append(Point(axis, wrapped(e, shape[axis])))
            axis += 1
        else:
            n = shape[axis]
            items.append(
                Positions(axis, np.where(e < 0, e + n, e) if isinstance(e, np.ndarray) else wrapped(e, n))
            )
            axis += 1
            arrays += 1
    if lone_true and not masks and arrays == 1 and not any(i.__class__ is Point for i in items):
        items = [NEW if i.__class__ is Positions and i.axis < 0 else i for i in items]
    return Parsed(items, masks <= 1 and arrays == 0)


def _is_mask(e: Any) -> bool:
    return isinstance(e, np.ndarray) and e.dtype.kind == "b"


def _entry(e: Any) -> Any:
    """An entry as int, bool, slice, NumPy array, or value of integers."""
    cls = e.__class__
    if cls is int or cls is bool or cls is slice:
        return e
    if isinstance(e, Array):
        dtype = e.aval.dtype
        if dtypes.is_bool(dtype):
            if not isinstance(e, ConcreteArray):
                raise errors.NonConcreteBooleanIndexError(
                    f"indexing by a traced boolean array ({e.aval}): the size of the result would not be known.",
                    where=source.here(),
                    why="while a function is traced its arrays have a shape and a dtype but no value yet.",
                    fix="bnp.where(mask, x, 0) keeps the shape; x.at[mask].set(number) works; "
                    "bnp.nonzero(mask, size=...) bounds the size",
                )
            host = np.asarray(e)
            return host if host.ndim else bool(host)
        if not dtypes.is_integer(dtype):
            raise _not_an_index(f"an array of dtype {dtypes.short_name(dtype)}")
        return e
    if isinstance(e, np.bool_):
        return bool(e)
    if isinstance(e, np.ndarray):
        if e.dtype.kind not in "iub":
            raise _not_an_index(f"an array of dtype {e.dtype}")
        if e.ndim:
            return e if e.dtype.kind == "b" else e.astype(np.int64)
        return bool(e) if e.dtype.kind == "b" else int(e)
    if isinstance(e, (list, tuple)):
        return _entry(_from_sequence(e))
    if foreign.is_foreign(e):  # ahead of ``__index__``, which tensors of any shape have
        return _entry(as_value(e, "indexing"))
    if isinstance(e, (float, complex, str)) or not (hasattr(e, "__index__") or hasattr(e, "__array__")):
        raise _not_an_index(f"{e!r} ({cls.__name__})")
    return to_index(e) if hasattr(e, "__index__") else _entry(as_value(e, "indexing"))


def _from_sequence(e: Any) -> Any:
    """Positions, or booleans, spelled out as nested lists."""
    if holds_values(e):
        return asarray(e)
    try:
        host = np.asarray(e)
    except ValueError:
        raise errors.ArgumentError(
            f"an index is a nested sequence: {e!r:.60}.",
            where=source.here(),
            fix="make its rows equally long; x[tuple(index)] is one index for each axis",
        ) from None
    return host if host.size else host.astype(np.int64)


def _not_an_index(what: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"{what} cannot be an index.",
        where=source.here(),
        why="indices are integers, slices, None, ..., and arrays of integers or booleans.",
        fix="convert first: i.astype('int32'), or use // in the place of /",
    )


def _slice(axis: int, n: int, s: slice) -> Slice:
    start, stop, step = s.start, s.stop, s.step
    if start is None and stop is None and (step is None or step == 1):
        return Slice(axis, 0, n, 1)
    for bound in (start, stop, step):
        if isinstance(bound, Array) and not isinstance(bound, ConcreteArray):
            raise errors.ConcretizationError(
                f"a slice with the traced bound {bound.aval}: the size of the result would not be known.",
                where=source.here(),
                fix="lax.dynamic_slice_in_dim(x, start, size, axis) with a static size, or make the bound static",
            )
        if isinstance(bound, float):
            raise _not_an_index(f"the slice bound {bound!r} (float)")
        if not (bound is None or hasattr(bound, "__index__")):
            raise _not_an_index(f"the slice bound {bound!r} ({type(bound).__name__})")
    start, stop, step = [b if b is None else to_index(b) for b in (start, stop, step)]
    if step == 0:
        raise errors.ValueRangeError(
            "an index is a slice of step 0.", where=source.here(), fix="give a step other than 0: x[::1]"
        )
    start, stop, step = slice(start, stop, step).indices(n)
    size = len(range(start, stop, step))
    return Slice(axis, start if size else 0, size, step if size > 1 else 1)


def mask_positions(axis: int, shape: tuple[int, ...], mask: np.ndarray) -> list[Positions]:
    own = shape[axis : axis + mask.ndim]
    # an axis of size 0 fits any other: the mask selects nothing
    if len(own) < mask.ndim or any(size not in (0, n) for size, n in zip(mask.shape, own, strict=True)):
        raise errors.IndexRangeError(
            f"a boolean index of shape {mask.shape} for axes of shape {own}.",
            where=source.here(),
            why="a mask has to cover the axes that it stands for.",
            fix="compare the array itself (x[x > 0]), or broadcast the mask: bnp.broadcast_to(mask, shape)",
        )
    return [Positions(axis + i, p) for i, p in enumerate(np.nonzero(mask))]


def wrapped(i: Array, n: int) -> Array:
    """Positions with negative ones counted from the end of an axis of size ``n``."""
    unsigned = dtypes.is_unsigned(i.aval.dtype)
    if i.aval.dtype.itemsize < 4:
        i = ops.convert(i, _INT32)
    if unsigned:
        return i
    dtype = i.aval.dtype
    from_end = ops.add_p.bind(i, constant(n, dtype))
    return ops.select_p.bind(ops.lt_p.bind(i, constant(0, dtype)), from_end, i)


def unwrapped(shape: tuple[int, ...], index: Any) -> Any:
    """An index whose negative positions are out of range, not from the end."""
    parts = index if index.__class__ is tuple else (index,)
    is_mask = lambda e: isinstance(e, (Array, np.ndarray)) and e.dtype.kind == "b"
    taken = [0 if e is None or e is Ellipsis else e.ndim if is_mask(e) else 1 for e in parts]
    axis, result = 0, []
    for e, n in zip(parts, taken, strict=True):
        if e is Ellipsis:
            axis += len(shape) - sum(taken)
        elif n and not is_mask(e) and not isinstance(e, (slice, bool)) and axis < len(shape):
            e = _below(as_value(e, "an index"), shape[axis])
        axis += n
        result.append(e)
    return tuple(result)


def _below(i: Array, n: int) -> Array:
    """Positions with negative ones moved down by the size of their axis."""
    if not dtypes.is_integer(i.aval.dtype) or dtypes.is_unsigned(i.aval.dtype):
        return i
    i = ops.convert(i, _INT32) if i.aval.dtype.itemsize < 4 else i
    dtype = i.aval.dtype
    lower = ops.sub_p.bind(ops.max_p.bind(i, constant(-n - 1, dtype)), constant(n, dtype))
    return ops.select_p.bind(ops.lt_p.bind(i, constant(0, dtype)), lower, i)


# -- reading elements ------------------------------------------------------------------------------


def gather_mode(mode: Any) -> GatherScatterMode:
    """A ``mode=`` option as a GatherScatterMode."""
    return GatherScatterMode.from_any(mode)


def fill_number(value: Any, x: Array) -> bool | int | float | complex:
    """The number to fill with, which ``x`` must be able to hold."""
    number = (
        np.asarray(value)
        if isinstance(value, (bool, int, float, complex, np.ndarray, np.generic, ConcreteArray))
        else None
    )
    if number is None or number.size != 1 or number.dtype.kind in "USOmM" or number.dtype.names:
        raise errors.ArgumentError(
            f"fill_value is a number, not {value!r:.60}.", where=source.here(), fix="fill_value=0"
        )
    found = number.reshape(()).item()
    if isinstance(found, complex) and not dtypes.is_complex(x.aval.dtype):
        raise errors.DtypeError(
            f"fill_value={found} in {x.aval}.", where=source.here(), fix="use a real number"
        )
    return found


def getitem(
    x: Array,
    index: Any,
    mode: GatherScatterMode | None = None,
    fill_value: Any = None,
    unique: bool = False,
    is_sorted: bool = False,
) -> Array:
    """``x[index]``, basic and advanced; the module says what is out of range."""
    if index.__class__ is int and mode is None:
        shape = x.aval.shape
        if shape:
            n, rest = shape[0], shape[1:]
            i = index + n if index < 0 else index
            if not 0 <= i < n:
                raise _out_of_range(index, x, 0)
            start = (i,) + (0,) * len(rest)
            row = slice_p.bind(x, start_indices=start, limit_indices=(i + 1, *rest), strides=None)
            return reshape_p.bind(row, shape=rest)
    if fill_value is not None:
        fill_value = fill_number(fill_value, x)
    p = parse(x.aval.shape, index)
    if mode is None:
        mode = GatherScatterMode.CLIP
        for item in p.items:
            if item.__class__ is Point and item.at.__class__ is int:
                n = x.aval.shape[item.axis]
                if not 0 <= item.at < n:
                    raise _out_of_range(item.at - n if item.at < 0 else item.at, x, item.axis)
    if (
        mode is GatherScatterMode.FILL_OR_DROP
        and not p.advanced
        and any(i.__class__ is Point for i in p.items)
    ):
        return _gather(x, p, mode, fill_value, True, True)
    if not p.advanced:
        return _window(x, p)
    return _gather(x, p, mode, fill_value, unique or p.distinct, is_sorted or p.distinct)


def _out_of_range(i: int, x: Array, axis: int) -> errors.IndexRangeError:
    if not x.aval.shape[axis]:
        return errors.IndexRangeError(f"index {i} into axis {axis}, which is empty.", where=source.here())
    return errors.IndexRangeError(
        f"index {i} is out of range for axis {axis} of {x.aval}.",
        where=source.here(),
        fix="for the nearest element: x.at[i].get(mode='clip')",
    )


def clipped(i: int, n: int, axis: int) -> int:
    if not n:
        raise errors.IndexRangeError(f"index {i} into axis {axis}, which is empty.", where=source.here())
    return min(max(i, 0), n - 1)


def _window(x: Array, p: Parsed) -> Array:
    """Slices and points: a slice or dynamic slice, reversals, a reshape."""
    shape = x.aval.shape
    start, limit, strides, backwards = [0] * len(shape), list(shape), [1] * len(shape), []
    out: list[int] = []
    points: list[tuple[int, Array]] = []
    for item in p.items:
        if item is NEW:
            out.append(1)
        elif item.__class__ is Slice:
            d, step = item.axis, abs(item.step)
            low = item.start if item.step > 0 else item.start + (item.size - 1) * item.step
            start[d], strides[d] = low, step
            limit[d] = low + (item.size - 1) * step + 1 if item.size else low
            if item.step < 0:
                backwards.append(d)
            out.append(item.size)
        elif item.at.__class__ is int:
            i = clipped(item.at, shape[item.axis], item.axis)
            start[item.axis], limit[item.axis] = i, i + 1
        else:
            points.append((item.axis, item.at))
    stepped = any(s != 1 for s in strides)
    if points and not stepped:
        starts = [constant(s, _INT32) for s in start]
        sizes = [b - a for a, b in zip(start, limit, strict=True)]
        for axis, at in points:
            if not shape[axis]:
                clipped(0, 0, axis)
            starts[axis], sizes[axis] = at, 1
        x = dynamic.dynamic_slice_p.bind(x, *starts, slice_sizes=tuple(sizes))
    else:
        if stepped or any(start) or tuple(limit) != shape:
            x = slice_p.bind(
                x,
                start_indices=tuple(start),
                limit_indices=tuple(limit),
                strides=tuple(strides) if stepped else None,
            )
        if points:
            starts, sizes = [constant(0, _INT32)] * len(shape), list(x.aval.shape)
            for axis, at in points:
                starts[axis], sizes[axis] = at, 1
            x = dynamic.dynamic_slice_p.bind(x, *starts, slice_sizes=tuple(sizes))
    if backwards:
        x = rev_p.bind(x, dimensions=tuple(backwards))
    return reshape(x, tuple(out))


class Layout:
    """The origin of the axes of an advanced index.

    Attributes:
      first: the position, among the result's axes without new ones, of the arrays' broadcast axes.
      batch: the broadcast shape of the arrays of positions.
      shape: the shape of the result.
    """

    __slots__ = ("batch", "first", "shape")

    def __init__(self, p: Parsed):
        places = [k for k, i in enumerate(p.items) if i.__class__ in (Positions, Point)]
        arrays = [i.at.shape for i in p.items if i.__class__ is Positions]
        try:
            self.batch = broadcast_shapes(*arrays) if arrays else ()
        except errors.ShapeError as e:
            raise errors.ShapeError(
                f"index arrays of shapes {' and '.join(map(str, dict.fromkeys(arrays)))} do not broadcast.",
                where=source.here(),
                why=e.why,
                fix="bnp.ix_(rows, columns) picks a grid; x[rows][:, columns] does so in two steps",
            ) from None
        # NumPy: the broadcast axes replace adjacent arrays in place; if anything stands between, they come first
        together = places == list(range(places[0], places[-1] + 1)) if places else True
        first = places[0] if places and together else 0
        before = p.items[:first]
        sizes = [getattr(i, "size", 1) for i in p.items if i is NEW or i.__class__ is Slice]
        self.first = sum(i.__class__ is Slice for i in before)
        at = len(before)
        self.shape = (*sizes[:at], *self.batch, *sizes[at:])


def _gather(
    x: Array, p: Parsed, mode: GatherScatterMode, fill_value: Any, unique: bool, is_sorted: bool
) -> Array:
    layout = Layout(p)
    strict = mode is GatherScatterMode.FILL_OR_DROP
    # static items first: what the gather then sees are whole axes and positions
    entries: list[Any] = []
    columns: list[tuple[int, Any]] = []
    for item in p.items:
        if item.__class__ is Slice or (item.__class__ is Point and item.at.__class__ is int and not strict):
            entries.append(item)
        elif item is not NEW:
            if item.axis < 0:
                continue
            columns.append((sum(e.__class__ is Slice for e in entries), item.at))
            entries.append(Slice(item.axis, 0, x.aval.shape[item.axis], 1))
    static = Parsed(entries, True)
    y = _window(x, static)
    if not columns:  # x[False], x[True, True]: an axis of its own, kept or not
        nothing = 0 in layout.batch
        return stretch(constant(0, y.aval.dtype), layout.shape) if nothing else reshape(y, layout.shape)
    axes = tuple([axis for axis, _ in columns])
    if 0 in layout.batch and 0 in [y.aval.shape[a] for a in axes]:
        # nothing is read, from nothing: a window of size 1 would not fit
        return stretch(constant(0, y.aval.dtype), layout.shape)
    indices = stacked([at for _, at in columns], layout.batch, y)
    kept = [d for d in range(y.aval.ndim) if d not in axes]
    nb, first = len(layout.batch), layout.first
    offset = tuple([k if k < first else k + nb for k in range(len(kept))])
    for a in axes:
        if not y.aval.shape[a]:
            clipped(0, 0, a)
    out = gather_scatter.gather_p.bind(
        y,
        indices,
        dimension_numbers=GatherDimensionNumbers(offset, axes, axes),
        slice_sizes=tuple([1 if d in axes else n for d, n in enumerate(y.aval.shape)]),
        indices_are_sorted=is_sorted,
        unique_indices=unique,
        mode=mode,
        fill_value=fill_value,
    )
    return reshape(out, layout.shape)


def stacked(columns: list[Any], batch: tuple[int, ...], x: Array) -> Array:
    """Positions on several axes as an int32 or int64 array ``(*batch, n_axes)``."""
    wide = any(n > 2**31 - 1 for n in x.aval.shape)
    kind = dtypes.int64 if wide else _INT32
    if len(columns) == 1 and isinstance(columns[0], Array):
        kind = columns[0].aval.dtype
    if all(not isinstance(c, Array) for c in columns):
        host = np.stack([np.broadcast_to(c, batch) for c in columns], -1)
        return from_numpy(np.clip(host, *_RANGE).astype(kind) if not wide else host)
    values = []
    for c in columns:
        if isinstance(c, int):
            c = constant(c, kind)
        elif not isinstance(c, Array):
            c = from_numpy(np.clip(c, *_RANGE).astype(kind) if not wide else c)
        c = cast(c, kind)
        if c.aval.shape == batch:
            values.append(reshape(c, (*batch, 1)))
        else:
            into = tuple(range(len(batch) - c.aval.ndim, len(batch)))
            values.append(broadcast_in_dim(c, (*batch, 1), into))
    return shape_ops.concatenate(values, len(batch))


_RANGE = (-(2**31), 2**31 - 1)
