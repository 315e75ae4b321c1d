"""Convolutions as libraries have them: forward, input or weight gradient.

Kernels, below the rewrites, which make them of ``conv_general_dilated``. Axes are in one order: batch, spatial axes,
features last, in the kernel output features first. The definition is in NumPy; the backend chooses a library or kernel.

    forward   y = convolution(x, w)     the sum over a window of the products with the kernel
    input     x = convolution(y, w)     its transpose in x: what the gradient of x is, and a transposed convolution
    weight    w = convolution(x, y)     its transpose in w
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops import correlation
from blufunc.core.ops.dot import compute_dtype, rounded
from blufunc.core.primitives.primitive import Primitive
from blufunc.kernels.precision import is_tf32, resolved

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Convolution:
    """A convolution, with the shapes of all three arrays.

    Attributes:
      kind: ``forward``, ``input`` or ``weight``.
      x, w, y: shapes of input (n, *spatial, c), kernel (k, *window, c / groups) and result (n, *spatial, k).
      strides, dilation: of the window and between its elements, in elements of x.
      padding: zeros before and after each spatial axis of x.
      groups: of features.
      dtype, out: of the operands and of what is computed.
      tf32: whether float32 may be rounded to TF32.
      features_last: whether arrays in memory have their axes in that order; otherwise features come second.
    """

    kind: str
    x: Ints
    w: Ints
    y: Ints
    strides: Ints
    padding: tuple[tuple[int, int], ...]
    dilation: Ints
    groups: int
    dtype: np.dtype
    out: np.dtype
    tf32: bool
    features_last: bool = True

    def __str__(self) -> str:
        of = f"x{list(self.x)} w{list(self.w)} y{list(self.y)}"
        how = (
            f"strides {self.strides}, padding {self.padding}, dilation {self.dilation}, {self.groups} groups"
        )
        how += "" if self.features_last else ", features second"
        return f"{self.kind} convolution {self.dtype} to {self.out}{' in TF32' * self.tf32} {of}, {how}"


class _Convolution(Primitive):
    """One of the three convolutions; ``shape`` is that of the result."""

    name, kind, fresh = "convolution", "contract", True

    def flops(self, a, b, *, kind, shape, **_) -> int:
        arrays = {"forward": (b.shape, shape), "input": (b.shape, a.shape), "weight": (shape, b.shape)}
        w, y = arrays[kind]
        return 2 * math.prod(y) * math.prod(w[1:])

    def impl(self, a, b, *, kind, shape, dtype, precision, features_last, **slide):
        wide = compute_dtype(a.dtype, dtype)
        a, b = np.asarray(a, wide), np.asarray(b, wide)
        if features_last:
            return rounded(_computed(kind, a, b, shape, **slide), dtype)
        a, b = (np.moveaxis(x, 1, -1) for x in (a, b))
        made = _computed(kind, a, b, (shape[0], *shape[2:], shape[1]), **slide)
        return rounded(np.ascontiguousarray(np.moveaxis(made, -1, 1)), dtype)

    def abstract(self, a, b, *, shape, dtype, **_) -> ShapedArray:
        return ShapedArray(tuple(shape), dtype)


def _computed(kind, a, b, shape, *, strides, padding, dilation, groups):
    """The result of a convolution of arrays with features last."""
    spatial = range(len(strides))
    last = a.ndim - 1
    features_last, features_first = (0, last, *range(1, last)), (last, 0, *range(1, last))
    how = {"feature_group_count": groups, "batch_group_count": 1}
    specs = (features_last,) * 3
    if kind == "forward":
        slide = (strides, padding, (1,) * len(strides), dilation)
    elif kind == "input":
        # of the result, strided, with the reversed kernel: from (k, window, c / g) to (c, window, k / g)
        w = b.reshape(groups, -1, *b.shape[1:])[(..., *(slice(None, None, -1) for _ in spatial), slice(None))]
        w = np.moveaxis(w, -1, 1)
        b = np.moveaxis(w.reshape(-1, *w.shape[2:]), 1, -1)
        pads = []
        for d in spatial:
            reach = (b.shape[1 + d] - 1) * dilation[d]
            low = reach - padding[d][0]
            full = (a.shape[1 + d] - 1) * strides[d] + 1
            pads.append((low, shape[1 + d] + reach - full - low))
        slide = ((1,) * len(strides), tuple(pads), strides, dilation)
    else:
        pads = []
        for d in spatial:
            reach = (shape[1 + d] - 1) * dilation[d] + (b.shape[1 + d] - 1) * strides[d] + 1
            pads.append((padding[d][0], reach - a.shape[1 + d] - padding[d][0]))
        slide = (dilation, tuple(pads), (1,) * len(strides), strides)
        specs = (features_first, features_first, (last, 0, *range(1, last)))
        how = {"feature_group_count": 1, "batch_group_count": groups}
    window_strides, pads, lhs_dilation, rhs_dilation = slide
    made = correlation.correlate(
        a, b, *specs, window_strides=window_strides, padding=tuple(pads), lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation, **how,
    )  # fmt: skip
    assert made.shape == tuple(shape)
    return made


convolution_p = _Convolution()


def convolution_of(eqn: Eqn) -> Convolution:
    """The convolution of an equation of ``convolution_p``."""
    return convolution_from([v.aval for v in eqn.invars], eqn.params)


def convolution_from(operands: Sequence[ShapedArray], p: dict[str, Any]) -> Convolution:
    """The convolution of operands of these types, and parameters of ``convolution_p``."""
    a, b = operands
    first, second, made = (_last(s, p["features_last"]) for s in (a.shape, b.shape, tuple(p["shape"])))
    x, w, y = {
        "forward": (first, second, made),
        "input": (made, second, first),
        "weight": (first, made, second),
    }[p["kind"]]
    dtype, out = a.dtype, np.dtype(p["dtype"])
    tf32 = dtype == np.float32 and is_tf32(resolved(p["precision"]))
    slide = p["strides"], p["padding"], p["dilation"], p["groups"]
    return Convolution(p["kind"], x, w, y, *slide, dtype, out, tf32, p["features_last"])


def _last(shape: Ints, features_last: bool) -> Ints:
    """A shape with its features last."""
    return shape if features_last else (shape[0], *shape[2:], shape[1])
