"""Counting: occurrences of integers, and histograms.

Face over searches and ``scatter_add``. The number of bins has to be known while tracing, their edges have not.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import sequence
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.primitives.linear_ops import reshape
from blufunc.numpy import elementwise as ew
from blufunc.numpy import reductions as red
from blufunc.numpy.creation import asarray, linspace, ones, zeros
from blufunc.numpy.differences import diff
from blufunc.numpy.indexing import getitem
from blufunc.numpy.joining import stack
from blufunc.numpy.promotion import (
    as_dtype_of,
    as_value,
    cast,
    constant,
    inexact,
    promote_dtypes,
    static_int,
)
from blufunc.numpy.searching import searchsorted
from blufunc.numpy.updating import At

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike


def bincount(
    x: ArrayLike, weights: ArrayLike | None = None, minlength: int = 0, *, length: int | None = None
) -> Array:
    """Count each integer from 0, int32; with ``weights``, sum their weights.

    Args:
      x: integers; negative ones count as 0.
      weights: None, or values of the shape of x.
      minlength: the least size of the result, without ``length``.
      length: the size of the result, known while tracing; larger integers are not counted. By default it is the
        largest integer plus 1.
    Raises:
      ConcretizationError: x is traced and no ``length`` is given.
    """
    x = as_value(x, "bincount")
    if not dtypes.is_integer(x.aval.dtype) and not dtypes.is_bool(x.aval.dtype):
        raise errors.DtypeError(
            f"bincount counts integers, not {x.aval}.", where=source.here(), fix="x.astype('int32')"
        )
    if x.aval.ndim != 1:
        raise errors.ShapeError(f"bincount of {x.aval}.", where=source.here(), fix="x.ravel()")
    least = static_int(minlength, "bincount", "minlength")
    if least < 0 or (length is not None and static_int(length, "bincount", "length") < 0):
        raise errors.ValueRangeError("bincount of a negative size.", where=source.here(), fix="use 0 or more")
    if length is None:
        if not isinstance(x, ConcreteArray):
            raise errors.ConcretizationError(
                f"bincount of a traced array ({x.aval}): the size of the result would not be known.",
                where=source.here(),
                fix="give length=..., the largest integer plus 1",
            )
        length = max(least, int(np.asarray(x).max()) + 1 if x.aval.size else 0)
    else:
        length = static_int(length, "bincount", "length")
    amounts = constant(1, dtypes.int32) if weights is None else as_value(weights, "bincount")
    if weights is not None and amounts.aval.shape != x.aval.shape:
        raise errors.ShapeError(
            f"bincount: weights {amounts.aval} for {x.aval}.", where=source.here(), fix="one for each integer"
        )
    if x.aval.dtype not in (
        dtypes.int32,
        dtypes.int64,
    ):  # narrower ones cannot hold the size, unsigned ones no -1
        largest = 2**31 - 1
        wide = x.aval.dtype in (dtypes.uint32, dtypes.uint64)
        x = ops.convert(ew.minimum(x, constant(largest, x.aval.dtype)) if wide else x, dtypes.int32)
    if dtypes.is_bool(amounts.aval.dtype):
        amounts = ops.convert(amounts, dtypes.int32)
    if not length:
        return zeros((0,), amounts.aval.dtype)
    return At(zeros((length,), amounts.aval.dtype))[ew.maximum(x, 0)].add(amounts, mode="drop")


def histogram_bin_edges(
    a: ArrayLike, bins: Any = 10, range: Any = None, weights: ArrayLike | None = None
) -> Array:
    """The edges of the bins of ``histogram``, as floats: one more than there are bins.

    ``bins`` is a number of bins, equally wide between the ends of ``range`` (by default the least and the largest
    element), or the edges themselves. ``weights`` is not used.
    """
    if isinstance(bins, str):
        raise errors.UnsupportedError(
            f"histogram_bin_edges: bins={bins!r}.",
            where=source.here(),
            why="rules that choose the number of bins from the values give a size that is not known while tracing.",
            fix="np.histogram_bin_edges(np.asarray(a), bins), outside of transforms",
        )
    if isinstance(bins, (list, tuple)):
        bins = asarray(bins)
    if _is_vector(bins):
        return inexact(bins, "histogram")
    a = inexact(a, "histogram")
    count = static_int(bins, "histogram", "bins")
    if count < 1:
        raise errors.ValueRangeError(f"histogram: {count} bins.", where=source.here(), fix="use 1 or more")
    if range is None:
        low, high = (
            (red.min(a), red.max(a))
            if a.aval.size
            else (constant(0, a.aval.dtype), constant(1, a.aval.dtype))
        )
    else:
        ends = sequence(range, "histogram", "range", "two numbers")
        if len(ends) != 2:
            raise errors.ArgumentError(
                f"histogram: range is {range!r:.60}.", where=source.here(), fix="range=(low, high)"
            )
        low, high = (as_dtype_of(e, a.aval.dtype, "histogram") for e in ends)
    level = ops.eq(low, high)
    half = constant(0.5, a.aval.dtype)
    low, high = ops.select(level, ops.sub(low, half), low), ops.select(level, ops.add(high, half), high)
    return linspace(low, high, count + 1)


def _is_vector(x: Any) -> bool:
    return isinstance(x, (np.ndarray, Array)) and x.ndim == 1


def _weights(name: str, like: Array, weights: Any) -> Array:
    if weights is None:
        return ones(like.aval.shape, like.aval.dtype)
    weights = as_value(weights, name)
    if weights.aval.shape != like.aval.shape:
        raise errors.ShapeError(
            f"{name}: weights {weights.aval} for values {like.aval}.",
            where=source.here(),
            fix="one for each value",
        )
    return inexact(weights, name)


def _bins_of(edges: Array, x: Array) -> Array:
    """The bin of each value, from 1; 0 below all edges, their number above."""
    n = edges.aval.size
    at = searchsorted(edges, x, "right")
    return ops.select(ops.eq(x, getitem(edges, n - 1)), constant(n - 1, dtypes.int32), at)


def histogram(
    a: ArrayLike,
    bins: Any = 10,
    range: Any = None,
    weights: ArrayLike | None = None,
    density: bool | None = None,
) -> tuple[Array, Array]:
    """Histogram: the count in each bin, and the bin edges, both as floats.

    Bins hold their lower edge, the last one also its upper. For ``bins`` and ``range`` see ``histogram_bin_edges``.

    Args:
      a: real numbers.
      weights: how much each value counts.
      density: divide by the total and the width of the bin, so that the integral is 1.
    """
    a = inexact(a, "histogram")
    edges = histogram_bin_edges(a, bins, range)
    amount = _weights("histogram", a, weights)
    x, edges = promote_dtypes("histogram", a, edges)
    n = edges.aval.size
    if n < 2:
        raise errors.ValueRangeError("histogram needs two edges.", where=source.here(), fix="bins=10")
    at = _bins_of(edges, reshape(x, (x.aval.size,)))
    sums = At(zeros((n + 1,), amount.aval.dtype))[at].add(reshape(amount, (amount.aval.size,)))
    counts = sums[1:n]
    if density:
        counts = ew.divide(counts, ew.multiply(diff(edges), red.sum(counts)))
    return counts, edges


def histogram2d(
    x: ArrayLike,
    y: ArrayLike,
    bins: Any = 10,
    range: Any = None,
    weights: ArrayLike | None = None,
    density: bool | None = None,
) -> tuple[Array, Array, Array]:
    """2-D histogram: counts of points ``(x, y)`` per bin, and the edges.

    ``bins`` is one for both, or a pair, each a number or edges; ``range`` a pair of pairs. See ``histogram``.
    """
    both = stack([inexact(x, "histogram2d"), inexact(y, "histogram2d")], 1)
    if isinstance(bins, (list, tuple)) and len(bins) not in (1, 2):
        bins = [asarray(bins)] * 2
    elif _is_vector(bins) and len(bins) > 2:
        bins = [bins, bins]
    counts, (x_edges, y_edges) = histogramdd(both, bins, range, weights, density)
    return counts, x_edges, y_edges


def histogramdd(
    sample: ArrayLike,
    bins: Any = 10,
    range: Any = None,
    weights: ArrayLike | None = None,
    density: bool | None = None,
) -> tuple[Array, list[Array]]:
    """N-D histogram: counts of points per bin of a grid, and the edges.

    Args:
      sample: the points ``(n, d)``.
      bins: a number for all axes, or for each axis a number or edges.
      range: None, or for each axis None or ``(low, high)``.
      weights: how much each point counts.
      density: divide by the total and the volume of the bin.
    """
    points = inexact(sample, "histogramdd")
    if points.aval.ndim != 2:
        raise errors.ShapeError(
            f"histogramdd takes points (n, d), not {points.aval}.",
            where=source.here(),
            fix="bnp.stack([x, y], 1)",
        )
    n, rank = points.aval.shape
    each: Sequence = (
        [bins] * rank if isinstance(bins, (int, np.integer)) else sequence(bins, "histogramdd", "bins")
    )
    limits: Sequence = [None] * rank if range is None else sequence(range, "histogramdd", "range", "pairs")
    if len(each) != rank or len(limits) != rank:
        raise errors.ArgumentError(
            f"histogramdd: {len(each)} bins and {len(limits)} ranges for {rank} axes.",
            where=source.here(),
            fix="give one for each axis",
        )
    edges, places, sizes = [], [], []
    for d, (b, r) in enumerate(zip(each, limits, strict=True)):
        line = points[:, d]
        edge = cast(histogram_bin_edges(line, b, r), points.aval.dtype)
        edges.append(edge)
        sizes.append(edge.aval.size + 1)
        places.append(_bins_of(edge, line))
    amount = constant(1, points.aval.dtype) if weights is None else as_value(weights, "histogramdd")
    if weights is not None and amount.aval.shape != (n,):
        raise errors.ShapeError(
            f"histogramdd: weights {amount.aval} for {n} points.",
            where=source.here(),
            fix="one for each point",
        )
    counts = At(zeros(tuple(sizes), inexact(amount, "histogramdd").aval.dtype))[tuple(places)].add(amount)
    counts = counts[tuple([slice(1, m - 1) for m in sizes])]
    if density:
        counts = ew.divide(counts, red.sum(counts))
        for d, edge in enumerate(edges):
            along = tuple([-1 if i == d else 1 for i in builtins.range(rank)])
            counts = ew.divide(counts, diff(edge).reshape(along))
    return counts, edges
