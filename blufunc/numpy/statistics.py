"""Order statistics and correlation: quantiles, medians, covariances.

Face over sorting and products. Quantiles sort the lines that they reduce and read them at positions that follow
from the fractions; those that pass over NaN, which sort last, count them first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import only_none
from blufunc.core.ir.trace import Array
from blufunc.core.ops import cumulative, reduce
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import sort as sort_ops
from blufunc.core.primitives.linear_ops import reduce_sum, reshape
from blufunc.core.primitives.linear_ops import transpose as permute
from blufunc.numpy import elementwise as ew
from blufunc.numpy import indexing
from blufunc.numpy import reductions as red
from blufunc.numpy.creation import match_to
from blufunc.numpy.joining import concatenate
from blufunc.numpy.linear import diag, matmul
from blufunc.numpy.manipulation import atleast_2d
from blufunc.numpy.picking import take_along_axis
from blufunc.numpy.promotion import (
    PYTHON_SCALARS,
    as_value,
    axes_in,
    cast,
    constant,
    dtype_of,
    inexact,
    promote_dtypes,
    static_int,
    stretch,
)

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike

_INT32 = dtypes.int32
_METHODS = ("linear", "lower", "higher", "nearest", "midpoint", "inverted_cdf")

# -- quantiles -------------------------------------------------------------------------------------


def quantile(
    a: ArrayLike,
    q: ArrayLike,
    axis: int | Sequence[int] | None = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: ArrayLike | None = None,
) -> Array:
    """The values below which fractions ``q`` of the elements over axes lie, as floats.

    Args:
      a: real numbers.
      q: fractions between 0 and 1; its axes come first in the result. Traced ones are limited to that range.
      axis: None, an int or a tuple.
      method: ``'linear'`` between neighbours, ``'lower'``, ``'higher'``, ``'nearest'`` or ``'midpoint'``;
        ``'inverted_cdf'``, the first element up to which the fraction is reached.
      keepdims: whether reduced axes stay with size 1.
      weights: how much each element counts, for ``'inverted_cdf'``; broadcasts to ``a``.
    Raises:
      ValueRangeError: ``method`` is none of these, ``a`` has no elements, or ``q`` is known and out of range.
    """
    return _quantile("quantile", a, q, axis, out, overwrite_input, method, keepdims, weights, False)


def nanquantile(
    a: ArrayLike,
    q: ArrayLike,
    axis: int | Sequence[int] | None = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: ArrayLike | None = None,
) -> Array:
    """``quantile`` of the elements that are not NaN; NaN where there are none."""
    return _quantile("nanquantile", a, q, axis, out, overwrite_input, method, keepdims, weights, True)


def percentile(
    a: ArrayLike,
    q: ArrayLike,
    axis: int | Sequence[int] | None = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: ArrayLike | None = None,
) -> Array:
    """``quantile`` with ``q`` in percent, between 0 and 100."""
    return _quantile("percentile", a, q, axis, out, overwrite_input, method, keepdims, weights, False)


def nanpercentile(
    a: ArrayLike,
    q: ArrayLike,
    axis: int | Sequence[int] | None = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: ArrayLike | None = None,
) -> Array:
    """``percentile`` of the elements that are not NaN; NaN where there are none."""
    return _quantile("nanpercentile", a, q, axis, out, overwrite_input, method, keepdims, weights, True)


def median(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    out: None = None,
    overwrite_input: bool = False,
    keepdims: bool = False,
) -> Array:
    """The middle value over axes, or the mean of the middle two, as a float."""
    return _quantile("median", a, 0.5, axis, out, overwrite_input, "midpoint", keepdims, None, False)


def nanmedian(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    out: None = None,
    overwrite_input: bool = False,
    keepdims: bool = False,
) -> Array:
    """``median`` of the elements that are not NaN; NaN where there are none."""
    return _quantile("nanmedian", a, 0.5, axis, out, overwrite_input, "midpoint", keepdims, None, True)


def _quantile(
    name: str, x: Any, q: Any, axis: Any, out: Any, overwrite_input: Any, method: str, keepdims: bool,
    weights: Any, pass_nan: bool,
) -> Array:  # fmt: skip
    only_none(name, "out", out)
    only_none(name, "overwrite_input", overwrite_input)
    if method not in _METHODS:
        raise errors.ValueRangeError(
            f"{name}: method {method!r}.", where=source.here(), fix=f"use one of {', '.join(_METHODS)}"
        )
    if weights is not None and method != "inverted_cdf":
        raise errors.UnsupportedError(
            f"{name} with weights has the method 'inverted_cdf' only, not {method!r}.",
            where=source.here(),
            why="between neighbours of unequal weight there is no agreed interpolation.",
            fix="method='inverted_cdf'",
        )
    x = inexact(x, name)
    dtype = x.aval.dtype
    scale = 100 if name.endswith("percentile") else 1
    if isinstance(q, (int, float)) and q.__class__ in PYTHON_SCALARS:
        q = constant(q / scale, dtypes.float32 if dtype.itemsize < 4 else ops.real(x).aval.dtype)
    else:
        q = inexact(q, name)
        q = q if scale == 1 else ew.divide(q, scale)
    if dtypes.is_complex(q.aval.dtype):
        raise errors.DtypeError(
            f"{name}: the fraction is {q.aval}.", where=source.here(), fix="a real number"
        )
    q = _fraction(q, name)
    if dtypes.is_complex(dtype):
        raise errors.DtypeError(
            f"{name} of complex numbers has no meaning.", where=source.here(), fix="take the real part first"
        )
    axes = axes_in(axis, x.aval.ndim, name)
    rest = tuple([d for d in range(x.aval.ndim) if d not in axes])
    n = math.prod([x.aval.shape[a] for a in axes])
    if not n:
        raise errors.ValueRangeError(
            f"{name} of no elements: {x.aval}.",
            where=source.here(),
            fix="reduce over axes that have elements",
        )

    def lined(v: Array) -> Array:
        return reshape(permute(v, (*rest, *axes)), (*[v.aval.shape[d] for d in rest], n))

    lines = lined(x)
    last = lines.aval.ndim - 1
    fractions = reshape(cast(q, dtypes.float32 if dtype.itemsize < 4 else dtype), (q.aval.size,))
    if weights is None:
        ordered = sort_ops.sort(lines, last)
        places = _positions(fractions, lines, method, pass_nan)
        read = [_at(ordered, p) for p in places[:2]]
        result = read[0]
        if method == "midpoint":
            result = ops.mul(ops.add(*read), 0.5)
        elif method == "linear":
            weight = cast(places[2], dtype)
            result = ops.add(*[_share(v, w) for v, w in zip(read, (ops.sub(1, weight), weight), strict=True)])
    else:
        (spread,) = match_to(name, x.aval.shape, as_value(weights, name))
        result = _weighted(lines, lined(cast(spread, fractions.aval.dtype)), fractions, pass_nan)
    nan = ew.isnan(lines)
    spoiled = reduce.reduce_and(nan, (last,)) if pass_nan else reduce.reduce_or(nan, (last,))
    result = ops.select(
        stretch(reshape(spoiled, (*spoiled.aval.shape, 1)), result.aval.shape),
        constant(math.nan, dtype),
        result,
    )
    result = permute(result, (last, *range(last)))
    kept = tuple([1 if d in axes else m for d, m in enumerate(x.aval.shape)]) if keepdims else None
    return reshape(result, (*q.aval.shape, *(result.aval.shape[1:] if kept is None else kept)))


def _share(x: Array, weight: Array) -> Array:
    """``x * weight``, but 0 at weight 0: an infinite neighbour does not count."""
    weight = stretch(weight, x.aval.shape)
    return ops.select(ops.eq(weight, 0), ops.zeros_like(x), ops.mul(x, weight))


def _fraction(q: Array, name: str) -> Array:
    """q, between 0 and 1; NaN stays NaN."""
    if isinstance(q, ConcreteArray):
        known = np.asarray(q)
        outside = known[(known < 0) | (known > 1)]
        if outside.size:
            raise errors.ValueRangeError(
                f"{name}: the fraction {outside[0]} is not between 0 and 1.",
                where=source.here(),
                fix="give fractions to quantile, and percents (0 to 100) to percentile",
            )
        return q
    return ops.clamp(0.0, q, 1.0)


def _positions(q: Array, lines: Array, method: str, pass_nan: bool) -> list[Array]:
    """Positions of quantiles in a sorted line: below, above, weight of the latter.

    Each is of shape ``(k,)``, or ``(..., k)`` if lines differ.
    """
    *rest, n = lines.aval.shape
    if not pass_nan:
        count: Array = constant(n, q.aval.dtype)
    else:
        valid = reduce_sum(ops.convert(ops.bitwise_not(ew.isnan(lines)), q.aval.dtype), (len(rest),))
        shape = (*rest, q.aval.size)
        count = stretch(reshape(ops.max(valid, 1), (*rest, 1)), shape)
        q = stretch(q, shape)
    if method == "inverted_cdf":
        at = ops.max(ops.sub(ops.ceil(ops.mul(q, count)), 1), 0)
        return [at, at]
    place = ops.mul(q, ops.sub(count, 1))
    low, high = ops.floor(place), ops.ceil(place)
    if method == "nearest":
        low = ops.round(place)
    return [high if method == "higher" else low, high, ops.sub(place, low)]


def _at(ordered: Array, place: Array) -> Array:
    """Sorted lines ``(..., n)`` at places ``(k,)``, or ``(..., k)``, line by line."""
    at = ops.convert(place, _INT32)
    if at.aval.ndim == ordered.aval.ndim and at.aval.ndim > 1:
        return take_along_axis(ordered, at, -1, mode="clip")
    return indexing.getitem(ordered, (Ellipsis, at))


def _weighted(lines: Array, weights: Array, q: Array, pass_nan: bool) -> Array:
    """The first element of each line at which a fraction of its weight is reached."""
    last = lines.aval.ndim - 1
    if pass_nan:
        weights = ops.select(ew.isnan(lines), ops.zeros_like(weights), weights)
    ordered, weights = sort_ops.sort((lines, weights), last)
    reached = cumulative.cumsum_p.bind(weights, axis=last, reverse=False)
    shape = (*lines.aval.shape, q.aval.size)
    total = indexing.getitem(reached, (Ellipsis, slice(-1, None)))
    target = ew.multiply(reshape(total, (*total.aval.shape, 1)), q)
    before = ops.lt(stretch(reshape(reached, (*reached.aval.shape, 1)), shape), stretch(target, shape))
    at = reduce_sum(ops.convert(before, _INT32), (last,))
    return take_along_axis(ordered, at, -1, mode="clip")


# -- covariance ------------------------------------------------------------------------------------


def cov(
    m: ArrayLike,
    y: ArrayLike | None = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: ArrayLike | None = None,
    aweights: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
) -> Array:
    """The matrix of covariances of variables, as floats: of rank 0 for one variable.

    Args:
      m: observations ``(variables, observations)``, or of one variable ``(observations,)``.
      y: further variables.
      rowvar: whether the variables are rows; columns if not.
      bias: divide by the number of observations, instead of one less.
      ddof: what to subtract from the number, instead of what ``bias`` says.
      fweights: how often each observation was made: a vector of integers.
      aweights: how much each observation counts: a vector.
      dtype: of the result.
    """
    want = dtype_of(dtype)
    if want is not None and not dtypes.is_inexact(want):
        raise errors.DtypeError(
            f"cov: covariances are floats, not {dtypes.short_name(want)}.", where=source.here()
        )
    variables = [_variables(v, rowvar) for v in (m, y) if v is not None]
    if len(variables) == 2:
        variables = promote_dtypes("cov", *variables)
        counts = [v.aval.shape[1] for v in variables]
        if counts[0] != counts[1]:
            raise errors.ShapeError(
                f"cov: m has {counts[0]} observations and y {counts[1]}.",
                where=source.here(),
                fix="each variable has one value for each observation",
            )
    x = concatenate(variables, 0)
    if want is not None:
        x = cast(x, want)
    if ddof is None:
        ddof = 0 if bias else 1
    less = static_int(ddof, "cov", "ddof")
    n = x.aval.shape[1]
    real = ops.real(x).aval.dtype
    weights = None
    for w, what in ((fweights, "fweights"), (aweights, "aweights")):
        if w is None:
            continue
        w = as_value(w, "cov")
        if w.aval.shape != (n,):
            raise errors.ShapeError(
                f"cov: {what} is {w.aval}, of {n} observations.",
                where=source.here(),
                fix="a vector, one for each",
            )
        if what == "fweights" and not dtypes.is_integer(w.aval.dtype):
            raise errors.DtypeError(
                f"cov: fweights is {w.aval}.", where=source.here(), fix="integers; other weights are aweights"
            )
        w = cast(w, real)
        weights = w if weights is None else ops.mul(weights, w)
    if weights is None:
        total: Array = constant(n, real)
        factor: Array = constant(n - less, real)
        mean = red.mean(x, 1, keepdims=True)
    else:
        total = reduce_sum(weights, (0,))
        scaled = weights if aweights is None else ops.mul(weights, cast(as_value(aweights, "cov"), real))
        share = ops.div(reduce_sum(scaled, (0,)), total) if aweights is not None else constant(1, real)
        factor = ops.sub(total, ops.mul(share, less))
        weighed = ew.multiply(x, cast(weights, x.aval.dtype))
        mean = ew.divide(red.sum(weighed, 1, keepdims=True), total)
    centered = ew.subtract(x, mean)
    right = centered if weights is None else ew.multiply(centered, cast(weights, x.aval.dtype))
    factor = ops.max(factor, constant(0, real))
    product = matmul(centered, ops.conj(permute(right, (1, 0))))
    result = ew.divide(product, factor)
    return reshape(result, ()) if result.aval.size == 1 else result


def _variables(m: Any, rowvar: bool) -> Array:
    x = inexact(m, "cov")
    if x.aval.ndim > 2:
        raise errors.ShapeError(
            f"cov takes one or two axes, not {x.aval}.", where=source.here(), fix="vmap over the others"
        )
    rows = atleast_2d(x)
    return permute(rows, (1, 0)) if not rowvar and x.aval.ndim == 2 else rows


def corrcoef(
    x: ArrayLike, y: ArrayLike | None = None, rowvar: bool = True, dtype: DTypeLike | None = None
) -> Array:
    """The matrix of correlation coefficients, as floats; arguments of ``cov``."""
    c = cov(x, y, rowvar, dtype=dtype)
    if not c.aval.ndim:
        return ops.div(c, c)
    scale = ops.sqrt(ops.real(diag(c)))
    n = scale.aval.size
    result = ew.divide(ew.divide(c, reshape(scale, (n, 1))), reshape(scale, (1, n)))
    if not dtypes.is_complex(result.aval.dtype):
        return ops.clamp(-1.0, result, 1.0)
    return ops.complex_(ops.clamp(-1.0, ops.real(result), 1.0), ops.clamp(-1.0, ops.imag(result), 1.0))
