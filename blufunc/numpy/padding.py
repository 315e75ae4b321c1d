"""Arrays with elements added at their ends: ``pad`` in all of NumPy's modes.

Face over pads, slices and joins. Widths are static, so that each mode is a join of slices of the array, some of
them reversed, stretched or reduced; the axes follow one another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.primitives.linear_ops import reshape as _reshape
from blufunc.numpy import elementwise as ew
from blufunc.numpy import reductions as red
from blufunc.numpy.creation import linspace
from blufunc.numpy.functional import apply_along_axis
from blufunc.numpy.promotion import (
    PYTHON_SCALARS,
    as_value,
    axis_in,
    cast,
    constant,
    static_int,
    stretch,
)
from blufunc.numpy.statistics import median

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

_OPTIONS: dict[str, tuple[str, ...]] = {
    "constant": ("constant_values",),
    "edge": (),
    "empty": (),
    "linear_ramp": ("end_values",),
    "maximum": ("stat_length",),
    "mean": ("stat_length",),
    "median": ("stat_length",),
    "minimum": ("stat_length",),
    "reflect": ("reflect_type",),
    "symmetric": ("reflect_type",),
    "wrap": (),
}
"""Each mode with the options that it takes."""


def pad(array: ArrayLike, pad_width: Any, mode: str | Callable = "constant", **kwargs: Any) -> Array:
    """``array`` with elements added at both ends of its axes.

    Args:
      array: an array.
      pad_width: one int for all ends, ``(before, after)`` for all axes, one such pair for each axis, or a dict from
        axes to these.
      mode: ``'constant'``, with ``constant_values`` (0); ``'empty'``, with zeros; ``'edge'``, the last element again;
        ``'reflect'``, mirrored without it; ``'symmetric'``, mirrored with it, both with ``reflect_type`` (``'even'``,
        or ``'odd'``: mirrored in the point at the end); ``'wrap'``, from the other end; ``'linear_ramp'``, falling
        evenly to ``end_values`` (0); ``'maximum'``, ``'minimum'``, ``'mean'`` and ``'median'`` of the nearest
        ``stat_length`` elements, by default of all. Or a function ``(line, widths, axis, kwargs) -> line``, which is
        given lines with zeros added and returns them with other elements there.
      kwargs: the options named above; each is a scalar, or scalars arranged like ``pad_width``.
    """
    x = as_value(array, "pad")
    rank = x.aval.ndim
    widths = _pairs(pad_width, rank, "pad_width")
    if any(w < 0 for pair in widths for w in pair):
        raise errors.ValueRangeError(
            f"pad: {pad_width} has a negative width.", where=source.here(), fix="slice x"
        )
    if callable(mode):
        return _by_function(x, widths, mode, kwargs)
    if not isinstance(mode, str) or mode not in _OPTIONS:
        raise errors.ValueRangeError(
            f"pad has no mode {mode!r:.60}.", where=source.here(), fix=f"use one of {', '.join(_OPTIONS)}"
        )
    for option in kwargs:
        if option not in _OPTIONS[mode]:
            raise errors.ArgumentError(
                f"pad: mode {mode!r} does not take {option}.",
                where=source.here(),
                fix=f"it takes {', '.join(_OPTIONS[mode]) or 'no options'}",
            )
    if mode == "constant":
        return _pad_constant(x, widths, kwargs.get("constant_values", 0))
    if mode == "empty":
        return _pad_constant(x, widths, 0)
    axis_mode = _axis_mode(mode, rank, kwargs)
    for d, (before, after) in enumerate(widths):
        if before or after:
            if x.aval.shape[d] == 0:
                raise errors.ValueRangeError(
                    f"pad: axis {d} of {x.aval} is empty, so mode {mode!r} has nothing to take.",
                    where=source.here(),
                    fix="mode='constant'",
                )
            x = axis_mode(x, d, before, after)
    return x


def _axis_mode(mode: str, rank: int, options: dict[str, Any]) -> Callable:
    """The function ``(x, axis, before, after)`` that pads one axis."""
    if mode == "linear_ramp":
        return functools.partial(_ramp, ends=_numbers(options.get("end_values", 0), rank, "end_values"))
    if mode in _STATISTICS:
        length = options.get("stat_length")
        lengths = None if length is None else _pairs(length, rank, "stat_length")
        for n in [] if lengths is None else [n for pair in lengths for n in pair]:
            if n < 1:
                raise errors.ValueRangeError(
                    f"pad: stat_length is {length}.", where=source.here(), fix="use 1 or more"
                )
        return functools.partial(_statistic, function=_STATISTICS[mode], lengths=lengths)
    kind = options.get("reflect_type", "even")
    if kind not in ("even", "odd"):
        raise errors.ValueRangeError(
            f"pad: reflect_type is {kind!r:.60}.", where=source.here(), fix="use 'even' or 'odd'"
        )
    if kind == "odd":
        return functools.partial(_odd, shared=mode == "reflect")
    return functools.partial(_moved, mode=mode)


def _by_function(x: Array, widths: list[tuple[int, int]], function: Callable, options: dict) -> Array:
    x = _pad_constant(x, widths, 0)
    for d, pair in enumerate(widths):
        x = apply_along_axis(function, d, x, pair, d, options)
    return x


def _numbers(values: Any, rank: int, what: str) -> list[tuple[Any, Any]]:
    """Scalar options as a pair per axis."""
    if values.__class__ in PYTHON_SCALARS or isinstance(values, Array):
        return [(values, values)] * rank
    try:
        pairs = np.broadcast_to(np.asarray(values), (rank, 2)).tolist()
    except (TypeError, ValueError):
        raise errors.ShapeError(
            f"pad: {what} {values!r:.60} does not fit an array of rank {rank}.",
            where=source.here(),
            fix="give a number, (before, after), or one pair for each axis",
        ) from None
    return [(a, b) for a, b in pairs]


def _pairs(width: Any, rank: int, what: str) -> list[tuple[int, int]]:
    if isinstance(width, dict):
        by_axis = {axis_in(a, rank, "pad"): w for a, w in width.items()}
        return [_pairs(by_axis[d], 1, what)[0] if d in by_axis else (0, 0) for d in range(rank)]
    try:
        host = np.broadcast_to(np.asarray(width), (rank, 2))
    except (TypeError, ValueError):
        raise errors.ShapeError(
            f"pad: {what} {width} does not fit an array of rank {rank}.",
            where=source.here(),
            fix="give an int, (before, after), or one pair for each axis",
        ) from None
    return [(static_int(a, "pad", what), static_int(b, "pad", what)) for a, b in host]


def _pad_constant(x: Array, widths: list[tuple[int, int]], values: Any) -> Array:
    nested = (
        isinstance(values, (tuple, list)) or np.ndim(values) > 0 if not isinstance(values, Array) else False
    )
    if not nested:
        value = _element(values, x)
        return shape_ops.pad(x, value, [(a, b, 0) for a, b in widths])
    try:
        pairs = np.broadcast_to(np.asarray(values), (x.aval.ndim, 2))
    except ValueError:
        raise errors.ShapeError(
            f"pad: constant_values {values!r:.60} for {x.aval}.",
            where=source.here(),
            fix="a number, or (before, after) for each axis",
        ) from None
    for d, (pair, ends) in enumerate(zip(pairs.tolist(), widths, strict=True)):
        for end, (value, width) in enumerate(zip(pair, ends, strict=True)):
            config = [(0, 0, 0)] * x.aval.ndim
            config[d] = (width, 0, 0) if end == 0 else (0, width, 0)
            x = shape_ops.pad(x, _element(value, x), config)
    return x


def _element(value: Any, x: Array) -> Array:
    if value.__class__ in PYTHON_SCALARS:
        if not dtypes.is_inexact(x.aval.dtype) and not isinstance(value, int):
            value = np.asarray(value).real.astype(int).item()  # as NumPy does
        return constant(value, x.aval.dtype)
    value = as_value(value, "pad")
    if value.aval.size != 1:
        raise errors.ShapeError(
            f"pad: constant_values is {value.aval}.", where=source.here(), fix="pass a number"
        )
    return cast(_reshape(value, ()), x.aval.dtype)


# -- one axis --------------------------------------------------------------------------------------


def _moved(x: Array, d: int, before: int, after: int, mode: str) -> Array:
    """Padding that repeats elements of x."""
    n = x.aval.shape[d]
    if mode == "edge" or (mode == "reflect" and n == 1):
        parts = [x]
        if before:
            parts.insert(0, _edge(x, d, 0, before))
        if after:
            parts.append(_edge(x, d, n - 1, after))
        return shape_ops.concatenate(parts, d)
    # one period of the extended line, of which the result is a window
    host = np.pad(np.arange(n), (before, after), mode=mode)  # type: ignore[call-overload]
    return _from_runs(x, d, host)


def _odd(x: Array, d: int, before: int, after: int, shared: bool) -> Array:
    """Mirror at both end points; the image repeats those unless ``shared``."""
    while before or after:
        n = x.aval.shape[d]
        reach = n - shared
        if not reach:
            return _moved(x, d, before, after, "edge")
        head, tail = min(before, reach), min(after, reach)
        parts = [x]
        if head:
            image = shape_ops.rev(shape_ops.slice_in_dim(x, int(shared), head + shared, axis=d), (d,))
            parts.insert(0, ops.sub(ops.mul(_edge(x, d, 0, head), 2), image))
        if tail:
            image = shape_ops.rev(shape_ops.slice_in_dim(x, n - shared - tail, n - shared, axis=d), (d,))
            parts.append(ops.sub(ops.mul(_edge(x, d, n - 1, tail), 2), image))
        x = shape_ops.concatenate(parts, d)
        before, after = before - head, after - tail
    return x


def _ramp(x: Array, d: int, before: int, after: int, ends: list[tuple[Any, Any]]) -> Array:
    n = x.aval.shape[d]
    parts = [x]
    for front, width, end in ((True, before, ends[d][0]), (False, after, ends[d][1])):
        if not width:
            continue
        edge = shape_ops.index_in_dim(x, 0 if front else n - 1, d, keepdims=False)
        line = _line(_element(end, x), edge, width, d)
        parts = [line, *parts] if front else [*parts, shape_ops.rev(line, (d,))]
    return shape_ops.concatenate(parts, d)


def _line(start: Array, stop: Array, count: int, d: int) -> Array:
    """``count`` steps from ``start`` towards ``stop`` on a new axis; integers floor."""
    dtype = stop.aval.dtype
    if dtypes.is_inexact(dtype):
        return linspace(start, stop, count, endpoint=False, axis=d)
    shape = (*stop.aval.shape[:d], count, *stop.aval.shape[d:])
    gap = ops.sub(*[cast(v, dtypes.int32) if dtype.itemsize < 4 else v for v in (stop, start)])
    gap = _reshape(gap, (*stop.aval.shape[:d], 1, *stop.aval.shape[d:]))
    step = ew.multiply(stretch(gap, shape), shape_ops.iota(gap.aval.dtype, shape, d))
    return cast(ew.add(ew.floor_divide(step, count), cast(start, gap.aval.dtype)), dtype)


_STATISTICS: dict[str, Callable] = {
    "maximum": red.max,
    "mean": red.mean,
    "median": median,
    "minimum": red.min,
}


def _statistic(
    x: Array, d: int, before: int, after: int, function: Callable, lengths: list[tuple[int, int]] | None
) -> Array:
    n, dtype = x.aval.shape[d], x.aval.dtype
    parts = [x]
    for front, width in ((True, before), (False, after)):
        if not width:
            continue
        count = n if lengths is None else min(n, lengths[d][0 if front else 1])
        near = shape_ops.slice_in_dim(x, 0 if front else n - count, count if front else n, axis=d)
        value = function(near, d, keepdims=True)
        if not dtypes.is_inexact(dtype):
            value = ew.round(value)
        edge = stretch(
            cast(value, dtype), tuple([width if i == d else m for i, m in enumerate(x.aval.shape)])
        )
        parts = [edge, *parts] if front else [*parts, edge]
    return shape_ops.concatenate(parts, d)


def _edge(x: Array, d: int, at: int, width: int) -> Array:
    """The elements at one position of an axis, ``width`` times."""
    to = tuple([width if i == d else n for i, n in enumerate(x.aval.shape)])
    return stretch(shape_ops.slice_in_dim(x, at, at + 1, axis=d), to)


def _from_runs(x: Array, d: int, positions: np.ndarray) -> Array:
    """Elements at ``positions`` along an axis, read as slices in both directions."""
    parts, i = [], 0
    while i < len(positions):
        j, step = i + 1, 0
        if j < len(positions) and abs(int(positions[j]) - int(positions[i])) == 1:
            step = int(positions[j] - positions[i])
            while j < len(positions) and positions[j] - positions[j - 1] == step:
                j += 1
        low, high = sorted((int(positions[i]), int(positions[j - 1])))
        run = shape_ops.slice_in_dim(x, low, high + 1, axis=d)
        parts.append(shape_ops.rev(run, (d,)) if step < 0 else run)
        i = j
    return shape_ops.concatenate(parts, d)
