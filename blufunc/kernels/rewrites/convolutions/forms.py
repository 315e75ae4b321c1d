"""Convolutions as matmuls, as elementwise products, and with more features.

Kernels, before stage 5, called by ``canonical``. In: operands and parameters of ``convolution``. Out: variables.

- Windows that tile the input are a matmul: 1 x 1 convolutions, patch embeddings, and their gradients.
- One feature per group (depthwise) is a sum of elementwise products with shifted arrays, one per window element, which
  one kernel computes at the speed of memory; its weight gradient is as many sums of products.
- Few features (images) are joined by those of neighbors, as many as the stride, and filled up with zeros: tensor cores
  load eight 16-bit features at once. A 7 x 7 convolution with stride 2 of 3 features is a 4 x 4 one of 12.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import add_p, mul_p
from blufunc.core.ops.shape import concatenate_p
from blufunc.core.primitives.linear_ops import broadcast_in_dim_p, reduce_sum_p
from blufunc.kernels.ops.convolution import Convolution, convolution_from, convolution_p
from blufunc.kernels.precision import is_tf32, resolved
from blufunc.kernels.rewrites.convolutions.building import Builder


def put(
    b: Builder, operands: Sequence[Any], params: dict[str, Any], library: Callable[[Convolution], bool]
) -> Any:
    """A convolution in its best form; ``library``: whether a library computes it fast."""
    if is_tiled(operands, params):
        return _tiled(b, operands, params)
    if is_depthwise(operands, params) and (
        is_along_one_axis(operands, params)
        or not library(convolution_from([v.aval for v in operands], params))
    ):
        first, second = operands
        return _DEPTHWISE[params["kind"]](b, first, second, _Depthwise(operands, params))
    if has_few_features(operands, params):
        return _with_more_features(b, operands, params)
    return b.put(convolution_p, *map(b.dense, operands), **params)


def arrays(operands: Sequence[Any], params: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Shapes of x, w and y."""
    a, b, shape = operands[0].aval.shape, operands[1].aval.shape, params["shape"]
    return {"forward": (a, b, shape), "input": (shape, b, a), "weight": (a, shape, b)}[params["kind"]]


# -- windows that tile the input -----------------------------------------------------------------------


def is_tiled(operands: Sequence[Any], params: dict[str, Any]) -> bool:
    """True if each element of the input is in one window."""
    if params["groups"] != 1 or not params["features_last"] or any(map(any, params["padding"])):
        return False
    x, w, y = arrays(operands, params)
    axes = zip(x[1:-1], w[1:-1], y[1:-1], params["strides"], params["dilation"], strict=True)
    return all(r == s and (d == 1 or r == 1) and size == p * s for size, r, p, s, d in axes)


def _tiled(b: Builder, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    x, w, y = arrays(operands, params)
    n, c, window, counts, spatial = x[0], x[-1], w[1:-1], y[1:-1], range(len(w) - 2)
    split = (n, *(m for p, r in zip(counts, window, strict=True) for m in (p, r)), c)
    rows, taps = (0, *(1 + 2 * i for i in spatial)), tuple(2 + 2 * i for i in spatial)
    features = len(split) - 1
    plain = all(r == 1 for r in window)

    def product(lhs: Any, rhs: Any, left: Sequence[int], right: Sequence[int]) -> Any:
        dtype = params["dtype"]
        return b.put(
            dot_general_p, lhs, rhs, dimension_numbers=((tuple(left), tuple(right)), ((), ())),
            precision=params["precision"],
            preferred_element_type=None if dtype == lhs.aval.dtype else dtype,
        )  # fmt: skip

    a, other = operands
    last = len(w) - 1
    if plain:
        if params["kind"] == "forward":
            return product(a, b.reshape(other, (w[0], c)), (last,), (1,))
        if params["kind"] == "input":
            return product(a, b.reshape(other, (w[0], c)), (last,), (0,))
        rows_of = tuple(range(last))
        return b.reshape(product(other, a, rows_of, rows_of), params["shape"])
    if params["kind"] == "forward":
        apart = b.transpose(b.reshape(a, split), (*rows, *taps, features))
        windows = b.reshape(apart, (n, *counts, math.prod(w[1:])))
        return product(windows, b.reshape(other, (w[0], math.prod(w[1:]))), (last,), (1,))
    if params["kind"] == "weight":
        apart = b.transpose(b.reshape(a, split), (*rows, *taps, features))
        windows = b.reshape(apart, (n, *counts, math.prod(w[1:])))
        rows_of = tuple(range(last))
        return b.reshape(product(other, windows, rows_of, rows_of), params["shape"])
    windows = product(a, b.reshape(other, (w[0], math.prod(w[1:]))), (last,), (0,))
    apart = b.reshape(windows, (n, *counts, *window, c))
    order = [0, *(d for i in spatial for d in (1 + i, 1 + len(counts) + i)), 1 + 2 * len(counts)]
    return b.reshape(b.transpose(apart, order), params["shape"])


# -- few features --------------------------------------------------------------------------------------

VECTOR = 8
"""Features that kernels load at once."""


def has_few_features(operands: Sequence[Any], params: dict[str, Any]) -> bool:
    """True for tensor cores, and fewer features than a vector."""
    x, _, y = arrays(operands, params)
    narrow = operands[0].aval.dtype.itemsize == 2 or is_tf32(resolved(params["precision"]))
    return params["features_last"] and params["groups"] == 1 and narrow and min(x[-1], y[-1]) < VECTOR


class _Fold:
    """An axis whose stride becomes features.

    Attributes:
      by: elements that are joined.
      counts: elements of the input, after ``before`` zeros and before ``after`` others.
      window: elements of the window.
    """

    def __init__(self, size: int, window: int, results: int, stride: int, low: int, high: int, folds: bool):
        self.by, self.size, self.taps = (stride if folds else 1), size, window
        self.window = -(-window // self.by)
        self.counts = results + self.window - 1 if folds else size
        self.before, self.after = (low, self.counts * self.by - size - low) if folds else (0, 0)
        self.padding, self.stride = ((0, 0), 1) if folds else ((low, high), stride)


def _with_more_features(b: Builder, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    x, w, y = arrays(operands, params)
    folds = x[-1] < VECTOR and any(s > 1 for s in params["strides"]) and set(params["dilation"]) == {1}
    axes = [
        _Fold(size, window, results, stride, low, high, folds)
        for size, window, results, stride, (low, high) in zip(
            x[1:-1], w[1:-1], y[1:-1], params["strides"], params["padding"], strict=True
        )
    ]
    together = math.prod(a.by for a in axes)
    inputs = next(n for n in range(VECTOR) if (x[-1] + n) * together % VECTOR == 0)
    outputs, depth = -y[-1] % VECTOR, (x[-1] + inputs) * together
    around = [(a.before, a.after, 0) for a in axes]
    of_taps = [(0, a.window * a.by - a.taps, 0) for a in axes]
    counts, windows = [a.counts for a in axes], [a.window for a in axes]

    def of_x(v: Any) -> Any:
        return b.dense(_joined(b, b.pad(v, [(0, 0, 0), *around, (0, inputs, 0)]), axes, counts))

    def of_w(v: Any) -> Any:
        return b.dense(_joined(b, b.pad(v, [(0, outputs, 0), *of_taps, (0, inputs, 0)]), axes, windows))

    def of_y(v: Any) -> Any:
        return b.pad(v, [(0, 0, 0)] * (v.aval.ndim - 1) + [(0, outputs, 0)])

    how = {**params, "strides": tuple(a.stride for a in axes), "padding": tuple(a.padding for a in axes)}
    first, second = operands
    if params["kind"] == "forward":
        out = b.put(convolution_p, of_x(first), of_w(second), **{**how, "shape": (*y[:-1], y[-1] + outputs)})
        return b.pad(out, [(0, 0, 0)] * (len(y) - 1) + [(0, -outputs, 0)])
    if params["kind"] == "input":
        out = b.put(convolution_p, of_y(first), of_w(second), **{**how, "shape": (x[0], *counts, depth)})
        cut = [(0, 0, 0), *((-low, -high, 0) for low, high, _ in around), (0, -inputs, 0)]
        return b.pad(_apart(b, out, axes, counts, x[-1] + inputs), cut)
    shape = (y[-1] + outputs, *windows, depth)
    out = b.put(convolution_p, of_x(first), of_y(second), **{**how, "shape": shape})
    cut = [(0, -outputs, 0), *((0, -high, 0) for _, high, _ in of_taps), (0, -inputs, 0)]
    return b.pad(_apart(b, out, axes, windows, x[-1] + inputs), cut)


def _joined(b: Builder, v: Any, axes: Sequence[_Fold], counts: Sequence[int]) -> Any:
    """``v`` with neighbors along all axes as features."""
    if all(a.by == 1 for a in axes):
        return v
    first, features, n = v.aval.shape[0], v.aval.shape[-1], len(axes)
    apart = b.reshape(
        v, (first, *(m for c, a in zip(counts, axes, strict=True) for m in (c, a.by)), features)
    )
    order = (0, *range(1, 2 * n, 2), *range(2, 2 * n + 1, 2), 2 * n + 1)
    return b.reshape(b.transpose(apart, order), (first, *counts, math.prod(a.by for a in axes) * features))


def _apart(b: Builder, v: Any, axes: Sequence[_Fold], counts: Sequence[int], features: int) -> Any:
    """The inverse of ``_joined``."""
    if all(a.by == 1 for a in axes):
        return v
    first, n = v.aval.shape[0], len(axes)
    apart = b.reshape(v, (first, *counts, *(a.by for a in axes), features))
    order = (0, *(d for i in range(n) for d in (1 + i, 1 + n + i)), 2 * n + 1)
    whole = [c * a.by for c, a in zip(counts, axes, strict=True)]
    return b.reshape(b.transpose(apart, order), (first, *whole, features))


# -- one feature per group -----------------------------------------------------------------------------

MOST_TAPS = 32
"""Maximum elements of a window that is unrolled."""


def is_depthwise(operands: Sequence[Any], params: dict[str, Any]) -> bool:
    """True for short windows with one input and one output feature per group."""
    x, w, y = arrays(operands, params)
    axis = -1 if params["features_last"] else 1
    taps = math.prod(w) // w[0]
    return x[axis] == y[axis] == params["groups"] > 1 and taps <= MOST_TAPS


def is_along_one_axis(operands: Sequence[Any], params: dict[str, Any]) -> bool:
    """True for windows along one axis, with adjacent results: as fast as memory.

    measured: 4 elements of 8 x 2048 x 2048 in 59 us; 3 x 3 of 64 x 56 x 56 x 144 in 250, cuDNN 62 (H100)
    """
    _, w, _ = arrays(operands, params)
    spatial = w[1:-1] if params["features_last"] else w[2:]
    return sum(n > 1 for n in spatial) <= 1 and set(params["strides"]) == {1}


class _Depthwise:
    """Shapes and slides of a depthwise convolution, whatever its layout.

    Attributes:
      axes: the spatial axes.
      features: the axis of the features.
      x, w, y: shapes.
      wide: the dtype of sums.
    """

    def __init__(self, operands: Sequence[Any], params: dict[str, Any]):
        self.x, self.w, self.y = arrays(operands, params)
        last, n = params["features_last"], len(self.x) - 2
        self.axes = tuple(range(1, 1 + n)) if last else tuple(range(2, 2 + n))
        self.features = n + 1 if last else 1
        self.strides, self.dilation = params["strides"], params["dilation"]
        self.lows = [low for low, _ in params["padding"]]
        self.dtype, self.shape = params["dtype"], params["shape"]
        dtype = operands[0].aval.dtype
        self.wide = dtype if dtype.itemsize == 8 else np.dtype(np.float32)

    def taps(self) -> list[tuple[int, ...]]:
        """The positions in a window."""
        return list(itertools.product(*(range(self.w[d]) for d in self.axes)))

    def weights(self, b: Builder, w: Any, tap: Sequence[int]) -> Any:
        """The weights of one position, a vector of features."""
        starts, limits = [0] * len(self.w), list(self.w)
        for d, r in zip(self.axes, tap, strict=True):
            starts[d], limits[d] = r, r + 1
        part = b.slice(b.convert(w, self.wide), tuple(starts), tuple(limits), (1,) * len(starts))
        return b.reshape(part, (self.w[0],))

    def along(self, b: Builder, v: Any, shape: Sequence[int]) -> Any:
        """A vector of features as an array."""
        return b.put(broadcast_in_dim_p, v, shape=tuple(shape), dims=(self.features,))

    def windows(self, b: Builder, x: Any, tap: Sequence[int]) -> Any | None:
        """The inputs that windows have at a position; None: all are padding."""
        terms = []
        for i, d in enumerate(self.axes):
            # window p has element p * stride + at
            at, stride = tap[i] * self.dilation[i] - self.lows[i], self.strides[i]
            first = max(0, -(at // stride))
            last = min(self.y[d] - 1, (self.x[d] - 1 - at) // stride)
            terms.append((first * stride + at, last - first + 1, stride, (first, self.y[d] - 1 - last, 0)))
        return self._shifted(b, x, terms)

    def results(self, b: Builder, y: Any, tap: Sequence[int]) -> Any | None:
        """The result that has each input at a position, or zero; None: none has."""
        terms = []
        for i, d in enumerate(self.axes):
            at, stride = tap[i] * self.dilation[i] - self.lows[i], self.strides[i]
            first = max(0, -(at // stride))
            last = min(self.y[d] - 1, (self.x[d] - 1 - at) // stride)
            pads = first * stride + at, self.x[d] - 1 - last * stride - at, stride - 1 if last > first else 0
            terms.append((first, last - first + 1, 1, pads))
        return self._shifted(b, y, terms)

    def _shifted(self, b: Builder, x: Any, terms: Sequence[tuple[int, int, int, Any]]) -> Any | None:
        """A slice along all axes (start, number, step), with zeros around.

        A kernel reads it under a condition.
        """
        if any(number <= 0 for _, number, _, _ in terms):
            return None
        rank = x.aval.ndim
        starts, limits, steps, config = [0] * rank, list(x.aval.shape), [1] * rank, [(0, 0, 0)] * rank
        for d, (start, number, step, pads) in zip(self.axes, terms, strict=True):
            starts[d], limits[d], steps[d] = start, start + (number - 1) * step + 1, step if number > 1 else 1
            config[d] = pads
        return b.convert(b.pad(b.slice(x, tuple(starts), tuple(limits), tuple(steps)), config), self.wide)


def _sum(b: Builder, terms: Sequence[Any], of: _Depthwise) -> Any:
    if not terms:
        return b.put(broadcast_in_dim_p, b.zero(of.dtype), shape=tuple(of.shape), dims=())
    return b.convert(functools.reduce(lambda x, y: b.put(add_p, x, y), terms), of.dtype)


def _depthwise_forward(b: Builder, x: Any, w: Any, of: _Depthwise) -> Any:
    parts = [(tap, part) for tap in of.taps() if (part := of.windows(b, x, tap)) is not None]
    return _sum(b, [b.put(mul_p, part, of.along(b, of.weights(b, w, tap), of.y)) for tap, part in parts], of)


def _depthwise_input(b: Builder, y: Any, w: Any, of: _Depthwise) -> Any:
    parts = [(tap, part) for tap in of.taps() if (part := of.results(b, y, tap)) is not None]
    return _sum(b, [b.put(mul_p, part, of.along(b, of.weights(b, w, tap), of.x)) for tap, part in parts], of)


def _depthwise_weight(b: Builder, x: Any, y: Any, of: _Depthwise) -> Any:
    axes, wide = tuple(d for d in range(len(of.y)) if d != of.features), b.convert(y, of.wide)
    sums = []
    for tap in of.taps():
        part = of.windows(b, x, tap)
        if part is None:
            sums.append(b.put(broadcast_in_dim_p, b.zero(of.wide), shape=(1, of.w[0]), dims=()))
            continue
        total = b.put(reduce_sum_p, b.put(mul_p, part, wide), axes=axes)
        sums.append(b.reshape(total, (1, of.w[0])))
    stacked = sums[0] if len(sums) == 1 else b.put(concatenate_p, *sums, dimension=0)
    return b.convert(b.reshape(b.transpose(stacked, (1, 0)), of.shape), of.dtype)


_DEPTHWISE = {"forward": _depthwise_forward, "input": _depthwise_input, "weight": _depthwise_weight}
