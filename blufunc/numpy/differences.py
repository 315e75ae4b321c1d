"""Differences and sums of neighbours: diff, gradient, trapezoid, unwrap.

Face over slices. Lines are cut into what comes before and after, so that all of it is elementwise.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.primitives.linear_ops import reshape
from blufunc.numpy import elementwise as ew
from blufunc.numpy import reductions as red
from blufunc.numpy.joining import concatenate
from blufunc.numpy.manipulation import moveaxis
from blufunc.numpy.promotion import (
    as_dtype_of,
    as_value,
    axes_in,
    axis_in,
    cast,
    inexact,
    promote_dtypes,
    static_int,
    stretch,
    value_of,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike


def _part(x: Array, start: int, stop: int, d: int) -> Array:
    """Positions ``start`` to ``stop`` of axis ``d``; from the end if negative."""
    n = x.aval.shape[d]
    stop = stop if stop >= 0 else n + stop
    return shape_ops.slice_in_dim(x, min(start, n), max(min(start, n), stop), axis=d)


def _steps(x: Array, d: int) -> Array:
    """Each element less the one before it."""
    n = x.aval.shape[d]
    after, before = _part(x, 1, n, d), _part(x, 0, max(n - 1, 0), d)
    return ew.not_equal(after, before) if dtypes.is_bool(x.aval.dtype) else ew.subtract(after, before)


def diff(
    a: ArrayLike,
    n: int = 1,
    axis: int = -1,
    prepend: ArrayLike | None = None,
    append: ArrayLike | None = None,
) -> Array:
    """Differences of neighbours along an axis, ``n`` times; inequality for booleans.

    ``prepend`` and ``append`` come before and after ``a`` along the axis: scalars, or arrays that fit.
    """
    x = as_value(a, "diff")
    d = axis_in(axis, x.aval.ndim, "diff")
    times = static_int(n, "diff", "n")
    if times < 0:
        raise errors.ValueRangeError(f"diff: n is {n}.", where=source.here(), fix="use 0 or more")
    if not times:
        return x
    parts = []
    for part in (prepend, x, append):
        if part is None:
            continue
        number = isinstance(part, (int, float)) and dtypes.is_inexact(x.aval.dtype)
        part = as_dtype_of(part, x.aval.dtype, "diff") if number else value_of(part, "diff")
        if not part.aval.ndim:
            part = stretch(part, tuple([1 if i == d else m for i, m in enumerate(x.aval.shape)]))
        parts.append(part)
    if len(parts) > 1:
        x = concatenate(parts, d)
    for _ in range(times):
        x = _steps(x, d)
    return x


def ediff1d(ary: ArrayLike, to_end: ArrayLike | None = None, to_begin: ArrayLike | None = None) -> Array:
    """Differences of neighbours of ``ary`` flattened, with values at both ends."""
    x = as_value(ary, "ediff1d")
    result = diff(reshape(x, (x.aval.size,)))
    parts = []
    for part in (to_begin, result, to_end):
        if part is not None:
            part = as_dtype_of(part, result.aval.dtype, "ediff1d")
            parts.append(reshape(part, (part.aval.size,)))
    return concatenate(parts, 0) if len(parts) > 1 else result


def trapezoid(y: ArrayLike, x: ArrayLike | None = None, dx: ArrayLike = 1.0, axis: int = -1) -> Array:
    """The integral of y along an axis by the trapezoidal rule, as a float.

    The samples are at ``x`` (a vector, or of the shape of y), or ``dx`` apart.
    """
    if x is None:
        y, dx = promote_dtypes("trapezoid", as_value(y, "trapezoid"), dx, inexact=True)
    else:
        y, x = promote_dtypes("trapezoid", as_value(y, "trapezoid"), as_value(x, "trapezoid"), inexact=True)
    d = axis_in(axis, y.aval.ndim, "trapezoid")
    y = moveaxis(y, d, -1)
    last = y.aval.ndim - 1
    n = y.aval.shape[last]
    pairs = ops.add(_part(y, 1, n, last), _part(y, 0, max(n - 1, 0), last))
    if x is not None:
        dx = diff(x if x.aval.ndim == 1 else moveaxis(x, d, -1))
    return ops.mul(red.sum(ew.multiply(pairs, dx), -1), 0.5)


def unwrap(
    p: ArrayLike, discont: ArrayLike | None = None, axis: int = -1, period: ArrayLike = 2 * math.pi
) -> Array:
    """Add multiples of ``period`` so that neighbours differ by half of it at most.

    Steps that are smaller than ``discont`` (half the period, if that is larger) are left alone. Integers with a
    Python integer as period stay integers.
    """
    p = as_value(p, "unwrap")
    integers = not dtypes.is_inexact(p.aval.dtype) and period.__class__ is int
    if not integers:
        p, period = promote_dtypes("unwrap", p, period, inexact=True)
    if not p.aval.ndim:
        raise errors.ShapeError("unwrap takes a line of values.", where=source.here(), fix="p[None]")
    d = axis_in(axis, p.aval.ndim, "unwrap")
    period = cast(value_of(period, "unwrap"), p.aval.dtype)
    half = ew.floor_divide(period, 2) if integers else ops.mul(period, 0.5)
    step = _steps(p, d)
    if not p.aval.shape[d]:
        return p
    low = ops.neg(half)
    wrapped = ew.add(ew.remainder(ew.subtract(step, low), period), low)
    # a step of exactly half a period keeps its direction
    at_low = ops.bitwise_and(ew.equal(wrapped, low), ew.greater(step, 0))
    even = ew.equal(ew.remainder(period, 2), 0) if integers else True
    wrapped = ew.choose(ew.logical_and(at_low, even), half, wrapped)
    moved = ew.subtract(wrapped, step)
    least = half if discont is None else as_dtype_of(discont, p.aval.dtype, "unwrap")
    moved = ew.choose(ew.less(ew.abs(step), least), 0, moved)
    rest = ew.add(_part(p, 1, p.aval.shape[d], d), red.cumsum(moved, d))
    return concatenate([_part(p, 0, 1, d), rest], d)


def gradient(f: Any, *varargs: Any, axis: Any = None, edge_order: int | None = None) -> Array | list[Array]:
    """Slopes of samples along each axis, as floats: central, one-sided at the ends.

    Args:
      f: the samples, two at least along each axis that counts.
      varargs: the spacing: none (1), one number for all axes, or for each axis a number or the coordinates.
      axis: None for all axes, an int or several.
      edge_order: 1, or 2 for one-sided differences of second order at the ends.
    Returns:
      an array for one axis, else a list of arrays.
    """
    f = inexact(f, "gradient")
    axes = axes_in(axis, f.aval.ndim, "gradient")
    if isinstance(axis, (tuple, list)):
        axes = tuple([axis_in(a, f.aval.ndim, "gradient") for a in axis])
    order = 1 if edge_order is None else static_int(edge_order, "gradient", "edge_order")
    if order not in (1, 2):
        raise errors.ValueRangeError(
            f"gradient: edge_order is {order}.", where=source.here(), fix="use 1 or 2"
        )
    spacing = list(varargs) if len(varargs) != 1 else list(varargs) * len(axes)
    if len(spacing) not in (0, len(axes)):
        raise errors.ArgumentError(
            f"gradient: {len(spacing)} spacings for {len(axes)} axes.",
            where=source.here(),
            fix="give none, one, or one for each axis",
        )
    results = []
    for d, h in zip(axes, spacing or [1.0] * len(axes), strict=True):
        n = f.aval.shape[d]
        if n < order + 1:
            raise errors.ShapeError(
                f"gradient along axis {d} of {f.aval}: {order + 1} samples are needed.", where=source.here(),
                fix="choose the axes: gradient(f, axis=...)",
            )  # fmt: skip
        results.append(_slope(f, d, as_dtype_of(h, f.aval.dtype, "gradient"), order))
    return results[0] if len(results) == 1 else results


def _slope(f: Array, d: int, h: Array, order: int) -> Array:
    n = f.aval.shape[d]
    dtype = f.aval.dtype
    if h.aval.ndim:
        if h.aval.shape != (n,):
            raise errors.ShapeError(
                f"gradient: the coordinates along axis {d} are {h.aval}, of {n} samples.",
                where=source.here(),
                fix="a number, or a vector with one coordinate for each sample",
            )
        gaps = _steps(cast(h, dtype), 0)
    else:
        gaps = stretch(cast(h, dtype), (n - 1,))
    gaps = reshape(gaps, tuple([n - 1 if i == d else 1 for i in range(f.aval.ndim)]))
    slopes = ew.divide(_steps(f, d), gaps)  # within each interval
    first, last = _part(slopes, 0, 1, d), _part(slopes, n - 2, n - 1, d)
    if n == 2:
        return concatenate([first, last], d)
    before, after = _part(gaps, 0, n - 2, d), _part(gaps, 1, n - 1, d)
    total = ew.add(before, after)
    left, right = _part(slopes, 0, n - 2, d), _part(slopes, 1, n - 1, d)
    # the slope at a point of the parabola through it and its neighbours: each interval weighs by the other's length
    inner = ew.divide(ew.add(ew.multiply(left, after), ew.multiply(right, before)), total)
    if order == 2:
        first = _to_end(first, _part(slopes, 1, 2, d), _part(gaps, 0, 1, d), _part(gaps, 1, 2, d))
        last = _to_end(
            last, _part(slopes, n - 3, n - 2, d), _part(gaps, n - 2, n - 1, d), _part(gaps, n - 3, n - 2, d)
        )
    return concatenate([first, inner, last], d)


def _to_end(near: Array, far: Array, gap: Array, next_gap: Array) -> Array:
    """The slope at an end of the parabola through three points."""
    bend = ew.divide(ew.subtract(near, far), ew.add(gap, next_gap))
    return ew.add(near, ew.multiply(bend, gap))
