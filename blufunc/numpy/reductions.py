"""Sums, means, extrema, tests and running totals over axes.

Face over ``reduce_*`` and the cumulative primitives. All take ``axis`` as None, an int or a tuple, and
``keepdims``; those that can take ``where`` (a mask of what counts) and ``initial``. Sums and products of
integers narrower than 32 bits are computed in 32; half-precision means and variances in float32.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import only_none, static_number
from blufunc.core.ir.trace import Array
from blufunc.core.ops import cumulative, reduce
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.ops.rows import wide_dtype
from blufunc.core.primitives.linear_ops import reduce_sum, reshape
from blufunc.core.primitives.primitive import Primitive
from blufunc.numpy import elementwise as ew
from blufunc.numpy.creation import match_to
from blufunc.numpy.promotion import (
    PYTHON_SCALARS,
    as_dtype_of,
    as_value,
    axes_in,
    axis_in,
    cast,
    constant,
    dtype_of,
    inexact,
    line_axis,
    meet,
    named,
    stretch,
    summed_dtype,
    value_of,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.signatures import Extremum, Position, Quantifier, Running


def _kept(x: Array, result: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    if not keepdims:
        return result
    return reshape(result, tuple([1 if d in axes else n for d, n in enumerate(x.aval.shape)]))


def _masked(x: Array, where: Any, neutral: Any, name: str) -> Array:
    if where is None:
        return x
    mask = value_of(where, name)
    if not dtypes.is_bool(mask.aval.dtype):
        raise errors.DtypeError(
            f"{name}: where is a mask of booleans, not {mask.aval}.",
            where=source.here(),
            fix="where=mask != 0",
        )
    if len(mask.aval.shape) > x.aval.ndim:
        raise errors.ShapeError(
            f"{name}: where has shape {mask.aval.shape}, x {x.aval.shape}.",
            where=source.here(),
            fix="the mask must broadcast to x",
        )
    (mask,) = match_to(name, x.aval.shape, mask)
    return ops.select_p.bind(mask, x, constant(neutral, x.aval.dtype))


def _start(initial: Any, result: Array, name: str) -> Array:
    """``initial`` in the dtype of a result, into which its kind of number must fit."""
    if initial.__class__ is float and initial.is_integer():
        initial = int(initial)
    kind = result.aval.dtype
    scalar = PYTHON_SCALARS.get(initial.__class__)
    own = as_value(initial, name).aval.dtype if scalar is None else scalar[0]
    if dtypes.is_inexact(own) and not dtypes.is_inexact(kind):
        raise errors.DtypeError(
            f"{name}: initial= of {dtypes.short_name(own)} does not fit a result of {dtypes.short_name(kind)}.",
            where=source.here(),
            fix="give an integer, or the dtype of the result: dtype='float32'",
        )
    return as_dtype_of(initial, kind, name)


def sum(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
    promote_integers: bool = True,
) -> Array:
    """The sum over axes; bool and integers below 32 bits accumulate in 32 bits."""
    only_none("sum", "out", out)
    args = (a, axis, dtype, keepdims, initial, where, promote_integers)
    return _total("sum", reduce_sum, ew.add, 0, *args)


def prod(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
    promote_integers: bool = True,
) -> Array:
    """The product over axes; integers below 32 bits accumulate in 32 bits."""
    only_none("prod", "out", out)
    args = (a, axis, dtype, keepdims, initial, where, promote_integers)
    return _total("prod", reduce.reduce_prod, ew.multiply, 1, *args)


def _total(
    name: str, fold: Callable, combine: Callable, neutral: int, a: Any, axis: Any, dtype: Any, keepdims: bool,
    initial: Any, where: Any, promote_integers: bool,
) -> Array:  # fmt: skip
    x = value_of(a, name)
    axes = axes_in(axis, x.aval.ndim, name)
    want = dtype_of(dtype) or (summed_dtype(x.aval.dtype) if promote_integers else x.aval.dtype)
    x = cast(x, dtypes.int32 if dtypes.is_bool(want) else want)
    result = _kept(x, fold(_masked(x, where, neutral, name), axes), axes, keepdims)
    result = result if initial is None else combine(result, _start(initial, result, name))
    return _strong(result, want)


def _strong(x: Any, dtype: np.dtype) -> Any:
    """x as ``dtype``, which is its type and not that of a Python number."""
    return ops.convert(x, dtype) if x.aval.weak_type else cast(x, dtype)


def extreme_of(dtype: np.dtype, largest: bool) -> Any:
    """The identity of a maximum or minimum."""
    if dtypes.is_complex(dtype):
        return math.inf if largest else -math.inf
    return reduce.limit(dtype, largest).item()


def _extremum(prim: Primitive, name: str, combine: Callable, lowest: bool, doc: str) -> Extremum:
    def function(
        a: Any,
        axis: Any = None,
        out: Any = None,
        keepdims: bool = False,
        initial: Any = None,
        where: Any = None,
    ) -> Array:
        only_none(name, "out", out)
        x = value_of(a, name)
        axes = axes_in(axis, x.aval.ndim, name)
        if initial is None:
            if where is not None:
                raise errors.ArgumentError(
                    f"{name} with where= needs initial=.",
                    where=source.here(),
                    why="where nothing counts there is no extremum.",
                    fix=f"bnp.{name}(x, where=mask, initial={'-' if lowest else ''}bnp.inf)",
                )
            if 0 in [x.aval.shape[a] for a in axes]:
                raise errors.ValueRangeError(
                    f"{name} of no elements: {x.aval} over axes {axes}.",
                    where=source.here(),
                    fix="give initial=, the result where there is nothing",
                )
        y = _masked(x, where, extreme_of(x.aval.dtype, not lowest), name)
        found = (
            y
            if not axes
            else prim.bind(y, axes=axes)
            if y.aval.dtype.kind != "c"
            else _of_complex(prim, y, axes)
        )
        result = _kept(x, found, axes, keepdims)
        return _strong(result if initial is None else combine(result, initial), x.aval.dtype)

    return named(function, name, doc)


def _of_complex(prim: Primitive, x: Array, axes: tuple[int, ...]) -> Array:
    """The extremum of complex numbers, by real, then imaginary part; NaN if any is."""
    real, imag = ops.real(x), ops.imag(x)
    best = prim.bind(real, axes=axes)
    tied = ops.eq(real, stretch(_kept(x, best, axes, True), x.aval.shape))
    limit = constant(-math.inf if prim is reduce.reduce_max_p else math.inf, imag.aval.dtype)
    second = prim.bind(ops.select(tied, imag, limit), axes=axes)
    spoiled = reduce.reduce_or(ew.isnan(x), axes)
    return ops.select(
        spoiled, constant(complex(math.nan, math.nan), x.aval.dtype), ops.complex_(best, second)
    )


max = amax = _extremum(
    reduce.reduce_max_p,
    "max",
    ew.maximum,
    True,
    "The largest element over axes, in the dtype of x; NaN if any is. ``initial`` is one more element; "
    "``where`` needs it.",
)
min = amin = _extremum(
    reduce.reduce_min_p,
    "min",
    ew.minimum,
    False,
    "The smallest element over axes, in the dtype of x; NaN if any is. ``initial`` is one more element; "
    "``where`` needs it.",
)


def _logical(prim: Primitive, name: str, neutral: bool, doc: str) -> Quantifier:
    def function(
        a: Any, axis: Any = None, out: Any = None, keepdims: bool = False, *, where: Any = None
    ) -> Array:
        only_none(name, "out", out)
        x = ew.truth(a, name)
        axes = axes_in(axis, x.aval.ndim, name)
        y = _masked(x, where, neutral, name)
        return _kept(x, prim.bind(y, axes=axes) if axes else y, axes, keepdims)

    return named(function, name, doc)


all = _logical(reduce.reduce_and_p, "all", True, "Whether all elements over axes are true (not 0), as bool.")
any = _logical(reduce.reduce_or_p, "any", False, "Whether any element over axes is true (not 0), as bool.")


def count_nonzero(a: ArrayLike, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Array:
    """The number of elements over axes that are not 0, as int32."""
    return sum(ew.truth(a, "count_nonzero"), axis, keepdims=keepdims)


# -- moments ---------------------------------------------------------------------------------------


def _count(x: Array, axes: tuple[int, ...], where: Any, keepdims: bool, name: str) -> Any:
    if where is None:
        return float(math.prod([x.aval.shape[a] for a in axes]))
    (mask,) = match_to(name, x.aval.shape, ew.truth(where, name))
    return sum(mask, axes, keepdims=keepdims)


def mean(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    keepdims: bool = False,
    *,
    where: ArrayLike | None = None,
) -> Array:
    """The mean over axes, in the dtype of ``a``; float32 for integers."""
    only_none("mean", "out", out)
    x = inexact(a, "mean")
    axes = axes_in(axis, x.aval.ndim, "mean")
    want = dtype_of(dtype) or x.aval.dtype
    y = cast(x, wide_dtype(want) if dtypes.is_inexact(want) else dtypes.float32)
    total = sum(y, axes, keepdims=keepdims, where=where)
    n = _count(x, axes, where, keepdims, "mean")
    return cast(ew.divide(total, cast(n, total.aval.dtype) if isinstance(n, Array) else n), want)


@overload
def average(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    weights: ArrayLike | None = None,
    returned: Literal[False] = False,
    keepdims: bool = False,
) -> Array: ...
@overload
def average(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    weights: ArrayLike | None = None,
    *,
    returned: Literal[True],
    keepdims: bool = False,
) -> tuple[Array, Array]: ...
@overload
def average(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    weights: ArrayLike | None = None,
    returned: bool = False,
    keepdims: bool = False,
) -> Array | tuple[Array, Array]: ...


def average(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    weights: ArrayLike | None = None,
    returned: bool = False,
    keepdims: bool = False,
) -> Any:
    """The mean over axes, weighted; with ``returned`` also the sum of the weights.

    ``weights`` has the shape of ``a``, or of its one axis.
    """
    x = inexact(a, "average")
    axes = axes_in(axis, x.aval.ndim, "average")
    if weights is None:
        result = mean(x, axes, keepdims=keepdims)
        total = stretch(
            constant(_count(x, axes, None, False, "average"), result.aval.dtype), result.aval.shape
        )
    else:
        w = as_value(weights, "average")
        if w.aval.shape != x.aval.shape:
            if w.aval.ndim != 1 or len(axes) != 1 or w.aval.size != x.aval.shape[axes[0]]:
                raise errors.ShapeError(
                    f"average: weights {w.aval} do not fit {x.aval} over axis {axis}.",
                    where=source.here(),
                    fix="weights have the shape of x, or of the one axis",
                )
            w = reshape(w, tuple([w.aval.size if d == axes[0] else 1 for d in range(x.aval.ndim)]))
        x, w = meet(x, w, "average", inexact=True)
        total = sum(w, axes, keepdims=keepdims)
        result = ew.divide(sum(ew.multiply(x, w), axes, keepdims=keepdims), total)
    return (result, total) if returned else result


def _center(y: Array, axes: tuple[int, ...], where: Any) -> Array:
    return mean(y, axes, keepdims=True, where=where)


def var(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    ddof: float = 0,
    keepdims: bool = False,
    *,
    where: ArrayLike | None = None,
    mean: ArrayLike | None = None,
    correction: float | None = None,
) -> Array:
    """The variance over axes: the mean of ``|a - mean|**2``, as a real float.

    The sum is divided by the count less ``ddof`` (also called ``correction``). ``mean`` is the mean over the axes,
    which stay with size 1 in it, where it is known already.
    """
    only_none("var", "out", out)
    x = inexact(a, "var")
    axes = axes_in(axis, x.aval.ndim, "var")
    y = cast(x, wide_dtype(x.aval.dtype) if dtype is None else dtypes.as_dtype(dtype))
    center = _center(y, axes, where) if mean is None else cast(as_value(mean, "var"), y.aval.dtype)
    centered = ew.subtract(y, center)
    if dtypes.is_complex(centered.aval.dtype):
        squares = ops.add(ops.square(ops.real(centered)), ops.square(ops.imag(centered)))
    else:
        squares = ops.square_p.bind(centered)
    real = squares.aval.dtype
    count = _count(x, axes, where, keepdims, "var")
    less = ddof if correction is None else correction
    if less.__class__ not in (int, float):
        less = static_number(less, "var", "ddof")
    if isinstance(count, float):
        count = constant(builtins.max(count - less, 0.0), real)
    else:
        count = ew.maximum(ew.subtract(cast(count, real), less), 0)
    result = ew.divide(sum(squares, axes, keepdims=keepdims, where=where), count)
    return cast(result, real if dtype is not None or dtypes.is_complex(x.aval.dtype) else x.aval.dtype)


def std(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    ddof: float = 0,
    keepdims: bool = False,
    *,
    where: ArrayLike | None = None,
    mean: ArrayLike | None = None,
    correction: float | None = None,
) -> Array:
    """The standard deviation over axes: the square root of ``var``."""
    only_none("std", "out", out)
    variance = var(
        a, axis, dtype, ddof=ddof, correction=correction, keepdims=keepdims, where=where, mean=mean
    )
    return ops.sqrt_p.bind(variance)


def ptp(
    a: ArrayLike, axis: int | Sequence[int] | None = None, out: None = None, keepdims: bool = False
) -> Array:
    """The range of values over axes: the largest less the smallest."""
    only_none("ptp", "out", out)
    return ew.subtract(max(a, axis, keepdims=keepdims), min(a, axis, keepdims=keepdims))


# -- positions -------------------------------------------------------------------------------------


def _rank_of_complex(x: Array, axis: Any, name: str) -> Array:
    """Floats whose ``name`` extremum is at the position of that of complex x."""
    largest = name == "argmax"
    best = (max if largest else min)(x, axis, keepdims=True)
    hit = ops.bitwise_or(ew.equal(x, best), ew.isnan(x))
    spoiled = ew.choose(ew.isnan(x), math.nan, 0.0)
    return ops.add(spoiled, ops.convert(hit if largest else ops.bitwise_not(hit), dtypes.float32))


def _position(prim: Primitive, name: str, doc: str) -> Position:
    def function(a: Any, axis: int | None = None, out: Any = None, keepdims: bool = False) -> Array:
        only_none(name, "out", out)
        x = value_of(a, name)
        if dtypes.is_bool(x.aval.dtype):
            x = ops.convert(x, dtypes.int8)
        elif dtypes.is_complex(x.aval.dtype):
            x = _rank_of_complex(x, axis, name)
        line, d = line_axis(x, axis, name)
        if not line.aval.shape[d]:
            raise errors.ValueRangeError(
                f"{name} of no elements: axis {d} of {line.aval}.", where=source.here()
            )
        index_dtype = dtypes.default(int) if line.aval.shape[d] <= 2**31 else dtypes.int64
        result = prim.bind(line, axes=(d,), index_dtype=index_dtype)
        return _kept(x, result, tuple(range(x.aval.ndim)) if axis is None else (d,), keepdims)

    return named(function, name, doc)


argmax = _position(
    reduce.argmax_p,
    "argmax",
    "The position of the largest element along an axis (of x flattened, by default), as int32; the first of equals.",
)
argmin = _position(
    reduce.argmin_p,
    "argmin",
    "The position of the smallest element along an axis (of x flattened, by default), as int32; the first of equals.",
)

# -- running totals --------------------------------------------------------------------------------


def _running(prim: Primitive, name: str, doc: str, widen: bool = True) -> Running:
    def function(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Array:
        only_none(name, "out", out)
        x = value_of(a, name)
        want = dtype_of(dtype)
        if want is None:
            want = dtypes.default(int) if widen and dtypes.is_bool(x.aval.dtype) else x.aval.dtype
        x = cast(x, want)
        x, d = line_axis(x, axis, name)
        return prim.bind(x, axis=d, reverse=False)

    return named(function, name, doc)


cumsum = _running(
    cumulative.cumsum_p, "cumsum", "The sums up to each element along an axis (of x flattened, by default)."
)
cumprod = _running(
    cumulative.cumprod_p,
    "cumprod",
    "The products up to each element along an axis (of x flattened, by default).",
)


def cumulative_sum(
    x: ArrayLike, /, *, axis: int | None = None, dtype: DTypeLike | None = None, include_initial: bool = False
) -> Array:
    """``cumsum`` of the array API standard; ``include_initial`` prepends a 0."""
    return _with_initial(cumsum, "cumulative_sum", 0, x, axis, dtype, include_initial)


def cumulative_prod(
    x: ArrayLike, /, *, axis: int | None = None, dtype: DTypeLike | None = None, include_initial: bool = False
) -> Array:
    """``cumprod`` of the array API standard; ``include_initial`` prepends a 1."""
    return _with_initial(cumprod, "cumulative_prod", 1, x, axis, dtype, include_initial)


def _with_initial(
    function: Callable, name: str, first: int, x: Any, axis: int | None, dtype: Any, include: bool
) -> Array:
    x = value_of(x, name)
    if axis is None:
        if x.aval.ndim != 1:
            raise errors.ArgumentError(
                f"{name} of {x.aval} needs an axis.", where=source.here(), fix="axis=0, or ravel x first"
            )
        axis = 0
    d = axis_in(axis, x.aval.ndim, name)
    result = function(x, d, dtype or summed_dtype(x.aval.dtype))
    if not include:
        return result
    config = [(1 if i == d else 0, 0, 0) for i in range(result.aval.ndim)]
    return shape_ops.pad(result, constant(first, result.aval.dtype), config)
