"""Elements by position, and positions by value: take, nonzero, equality of arrays.

Face over indexing and gather. Positions that depend on values make results of a size that is only
known when the program runs; while tracing, such functions ask for a ``size``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray, from_numpy
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import only_none, sequence
from blufunc.core.ir.trace import Array
from blufunc.core.ops import cumulative, gather_scatter
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.ops.reduce import reduce_and
from blufunc.core.ops.windows import GatherDimensionNumbers, ScatterDimensionNumbers
from blufunc.core.primitives.linear_ops import broadcast_in_dim, full
from blufunc.core.primitives.linear_ops import reshape as _reshape
from blufunc.numpy import elementwise as ew
from blufunc.numpy.creation import asarray
from blufunc.numpy.indexing import fill_number, gather_mode, getitem, wrapped
from blufunc.numpy.manipulation import ravel, squeeze
from blufunc.numpy.promotion import (
    as_value,
    broadcast_shapes,
    cast,
    constant,
    line_axis,
    meet,
    positions,
    shape_of,
    static_int,
    stretch,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

# -- picking ---------------------------------------------------------------------------------------


def take(
    a: ArrayLike,
    indices: ArrayLike,
    axis: int | None = None,
    out: None = None,
    mode: str | None = None,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    fill_value: ArrayLike | None = None,
) -> Array:
    """The elements of ``a`` at integer positions along an axis; flattened by default.

    The result has the shape of ``indices`` instead of the axis. Out of range: ``mode='fill'`` (the
    default) gives NaN, or the extreme of integers; ``'clip'`` the nearest element, the first for
    negative positions; ``'wrap'`` counts round.
    ``unique_indices`` and ``indices_are_sorted`` are promises that make for faster programs.
    """
    only_none("take", "out", out)
    x = as_value(a, "take")
    x, d = line_axis(x, axis, "take")
    positions: Any = indices
    if indices.__class__ is int or isinstance(indices, np.integer):
        positions = np.asarray(indices, np.int64)
    elif not isinstance(indices, np.ndarray):
        positions = as_value(indices, "take")
    if dtypes.is_narrow(positions.dtype):
        positions = cast(positions, dtypes.int32)
    dtype = positions.dtype
    if dtype.kind not in "iu":
        raise errors.DtypeError(
            f"take at indices of dtype {dtype}.", where=source.here(), fix="astype('int32')"
        )
    if mode == "wrap":
        positions, mode = ew.remainder(positions, x.aval.shape[d]), "clip"
    elif mode is not None and gather_mode(mode) == gather_mode("clip"):
        positions = ew.maximum(
            positions, 0
        )  # negative ones are before the first: they do not count from the end
    index = (slice(None),) * d + (positions if positions.ndim else _reshape(asarray(positions), (1,)),)
    result = getitem(x, index, gather_mode(mode or "fill"), fill_value, unique_indices, indices_are_sorted)
    return result if positions.ndim else squeeze(result, d)


def take_along_axis(
    arr: ArrayLike,
    indices: ArrayLike,
    axis: int | None = -1,
    mode: str | None = None,
    fill_value: ArrayLike | None = None,
    wrap_negative_indices: bool = True,
) -> Array:
    """The elements of ``arr`` at ``indices`` along an axis, line by line.

    Both have the same rank, and sizes that broadcast except along the axis. ``mode`` and ``fill_value`` are those of
    ``take``. Negative indices count from the end or, if ``wrap_negative_indices`` is False, are out of range.
    """
    x, positions = as_value(arr, "take_along_axis"), as_value(indices, "take_along_axis")
    x, d = line_axis(x, axis, "take_along_axis")
    rank = x.aval.ndim
    if positions.aval.ndim != rank or not dtypes.is_integer(positions.aval.dtype):
        raise errors.ShapeError(
            f"take_along_axis of {x.aval} at {positions.aval}: the indices are integers of the same rank.",
            where=source.here(),
            fix="insert axes of size 1: indices[:, None]",
        )
    common = []
    for i, (m, n) in enumerate(zip(x.aval.shape, positions.aval.shape, strict=True)):
        if i != d and m != n and 1 not in (m, n):
            raise errors.ShapeError(
                f"take_along_axis: {x.aval.shape} and {positions.aval.shape} do not agree on axis {i}.",
                where=source.here(),
                fix="only the size along the axis may differ",
            )
        common.append(max(m, n) if m and n else 0)
    to_x = tuple([m if i == d else n for i, (m, n) in enumerate(zip(x.aval.shape, common, strict=True))])
    to_i = tuple(
        [m if i == d else n for i, (m, n) in enumerate(zip(positions.aval.shape, common, strict=True))]
    )
    if 0 in to_i:  # there are no windows, and no room for one either
        return full(to_i, 0, x.aval.dtype)
    x, positions = stretch(x, to_x), stretch(positions, to_i)
    positions = wrapped(positions, to_x[d]) if wrap_negative_indices else positions
    batching = tuple([i for i in range(rank) if i != d])
    numbers = GatherDimensionNumbers((), (d,), (d,), batching, batching)
    return gather_scatter.gather(
        x,
        _reshape(positions, (*to_i, 1)),
        numbers,
        (1,) * rank,
        mode=gather_mode(mode or "fill"),
        fill_value=None if fill_value is None else fill_number(fill_value, x),
    )


def select(condlist: Sequence, choicelist: Sequence, default: Any = 0) -> Array:
    """Per element, the first choice whose condition holds; else ``default``."""
    conditions = sequence(condlist, "select", "the conditions", "arrays")
    choices = sequence(choicelist, "select", "the choices", "arrays")
    if len(conditions) != len(choices) or not conditions:
        raise errors.ValueRangeError(
            f"select: {len(conditions)} conditions for {len(choices)} choices.", where=source.here()
        )
    result = default
    for condition, choice in zip(reversed(conditions), reversed(choices), strict=True):
        result = ew.choose(condition, choice, result)
    return result


def ix_(*args: Any) -> tuple[Array, ...]:
    """Open grid of index arrays: the i-th has size 1 along all axes but the i-th."""
    values = [as_value(x, "ix_") for x in args]
    return tuple(
        [
            _reshape(v, tuple([v.aval.size if d == i else 1 for d in range(len(args))]))
            for i, v in enumerate(values)
        ]
    )


def unravel_index(indices: ArrayLike, shape: SupportsIndex | Sequence[SupportsIndex]) -> tuple[Array, ...]:
    """Flat positions as one array of positions for each axis of ``shape``.

    Negative positions count from the end; positions out of range are clamped.
    """
    rest = as_value(indices, "unravel_index")
    if rest.aval.dtype.itemsize < 4:
        rest = cast(rest, dtypes.int32)
    sizes = shape_of(shape, "unravel_index")
    size = math.prod(sizes)
    if not dtypes.is_unsigned(rest.aval.dtype):
        rest = ops.select(ops.lt(rest, 0), ops.add(rest, size), rest)
    rest = ops.clamp(0, rest, max(size - 1, 0))
    result = []
    for n in reversed(sizes):
        result.append(ew.remainder(rest, n))
        rest = ew.floor_divide(rest, n)
    return tuple(reversed(result))


@overload
def where(condition: ArrayLike, x: ArrayLike, y: ArrayLike, /) -> Array: ...
@overload
def where(
    condition: ArrayLike, /, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> tuple[Array, ...]: ...


def where(
    condition: ArrayLike,
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
    /,
    *,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
) -> Any:
    """``x`` where ``condition`` holds, else ``y``: elementwise, promoted, broadcast.

    Both x and y are computed everywhere. A gradient through the side that is not chosen is exactly 0
    times that side's derivative, so keep that finite: choose a safe argument before the function.
    Without x and y, the positions where ``condition`` holds: ``nonzero(condition, size=..., fill_value=...)``.
    """
    if x is None and y is None:
        return nonzero(condition, size=size, fill_value=fill_value)
    if size is not None or fill_value is not None:
        raise errors.ArgumentError(
            "where(condition, x, y) takes no size and no fill_value.",
            where=source.here(),
            fix="bnp.where(condition, size=...) gives positions",
        )
    if x is None or y is None:
        raise errors.ArgumentError(
            "where takes both x and y, or neither.",
            where=source.here(),
            fix="bnp.where(condition, x, y), or bnp.nonzero(condition, size=...) for positions",
        )
    return ew.choose(condition, x, y)


def nonzero(
    a: ArrayLike, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> tuple[Array, ...]:
    """The positions of the elements that are not 0, one int32 vector for each axis.

    Their number depends on the values: while tracing, ``size`` is required, which cuts the
    result off or fills it with ``fill_value`` (0; or a tuple, one for each axis).
    """
    x = as_value(a, "nonzero")
    if not x.aval.ndim:
        raise errors.ShapeError(
            f"nonzero takes an array with axes, not {x.aval}.", where=source.here(), fix="x[None], or x != 0"
        )
    if size is None:
        if not isinstance(x, ConcreteArray):
            raise errors.ConcretizationError(
                f"nonzero of a traced array ({x.aval}): the size of the result would not be known.",
                where=source.here(),
                fix="give size=..., or use bnp.where(condition, x, y)",
            )
        return tuple([from_numpy(p.astype(dtypes.default(int))) for p in np.nonzero(np.asarray(x))])
    (size,) = shape_of((static_int(size, "nonzero", "size"),), "nonzero")
    if not size or not x.aval.size:
        return tuple(_nowhere(x.aval.ndim, size, fill_value))
    flags = _reshape(ew.truth(x, "nonzero"), (x.aval.size,))
    rank = cumulative.cumsum_p.bind(ops.convert(flags, dtypes.int32), axis=0, reverse=False)
    slots = ops.select(flags, ops.sub(rank, 1), constant(size, dtypes.int32))
    n = shape_ops.iota(dtypes.int32, (x.aval.size,), 0)
    start = broadcast_in_dim(constant(x.aval.size, dtypes.int32), (size,), ())
    numbers = ScatterDimensionNumbers((), (0,), (0,))
    flat = gather_scatter.scatter(start, _reshape(slots, (x.aval.size, 1)), n, numbers)
    found = ops.lt(flat, x.aval.size)
    if fill_value is None:
        fill_value = 0
    fills = fill_value if isinstance(fill_value, (tuple, list)) else [fill_value] * x.aval.ndim
    axes = unravel_index(flat, x.aval.shape)
    return tuple([positions(ew.choose(found, p, f)) for p, f in zip(axes, fills, strict=True)])


def _nowhere(rank: int, size: int, fill_value: Any) -> list[Array]:
    """Positions of no elements along ``rank`` axes: ``fill_value`` throughout."""
    fills = fill_value if isinstance(fill_value, (tuple, list)) else [fill_value] * rank
    return [
        stretch(constant(0, dtypes.int32) if f is None else cast(asarray(f), dtypes.int32), (size,))
        for f in fills
    ]


def flatnonzero(a: ArrayLike, *, size: int | None = None, fill_value: ArrayLike | None = None) -> Array:
    """Positions in ``a`` flattened of the elements that are not 0."""
    return nonzero(ravel(a), size=size, fill_value=fill_value)[0]


def argwhere(a: ArrayLike, *, size: int | None = None, fill_value: ArrayLike | None = None) -> Array:
    """Positions of elements that are not 0 as rows of an ``(n, rank)`` array."""
    columns = nonzero(a, size=size, fill_value=fill_value)
    return shape_ops.concatenate([_reshape(c, (c.aval.size, 1)) for c in columns], 1)


def array_equal(a1: ArrayLike, a2: ArrayLike, equal_nan: bool = False) -> Array:
    """Test for one shape and equal elements, as scalar bool."""
    x, y = as_value(a1, "array_equal"), as_value(a2, "array_equal")
    if x.aval.shape != y.aval.shape:
        return asarray(False)
    same = ew.equal(x, y)
    if equal_nan:
        same = ew.logical_or(same, ew.logical_and(ew.isnan(x), ew.isnan(y)))
    return _all(same)


def array_equiv(a1: ArrayLike, a2: ArrayLike) -> Array:
    """Test for equal elements after broadcasting, as scalar bool."""
    x, y = as_value(a1, "array_equiv"), as_value(a2, "array_equiv")
    try:
        broadcast_shapes(x.aval.shape, y.aval.shape)
    except errors.ShapeError:
        return asarray(False)
    return _all(ew.equal(x, y))


def isclose(
    a: ArrayLike, b: ArrayLike, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Array:
    """Test ``|a - b| <= atol + rtol * |b|``, elementwise; equal infinities are close."""
    if dtypes.is_key(as_value(a, "isclose").aval.dtype):
        return ew.equal(a, b)
    x, y = meet(a, b, "isclose")
    if not dtypes.is_inexact(x.aval.dtype):
        x, y = cast(x, dtypes.float32), cast(y, dtypes.float32)
    near = ew.less_equal(ew.abs(ew.subtract(x, y)), ew.add(ew.multiply(ew.abs(y), rtol), atol))
    close = ew.logical_or(ew.logical_and(near, ew.isfinite(y)), ew.equal(x, y))
    return ew.logical_or(close, ew.logical_and(ew.isnan(x), ew.isnan(y))) if equal_nan else close


def allclose(
    a: ArrayLike, b: ArrayLike, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Array:
    """Test that all elements are close (see ``isclose``), as scalar bool."""
    return _all(isclose(a, b, rtol, atol, equal_nan))


def _all(x: Array) -> Array:
    return reduce_and(x, tuple(range(x.aval.ndim)))
