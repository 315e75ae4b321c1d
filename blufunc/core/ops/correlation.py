"""NumPy implementation of convolutions: im2col and one GEMM.

Below ``convolution``, which adds types and rules. In: checked arrays of one dtype. Out: a new array of that
dtype. The matrix of windows is copied once, in the memory order of the operand, and in pieces if it is large.
Kernels with few features per group (depthwise ones) have no useful matrix: they run position by position.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blufunc.core.ops.sliding import Ints, Pads, count, padded, window_view

_SCRATCH = 1 << 25
"""Bytes of windows to copy at once."""

_FEW = 16
"""Groups with at most this many multiplies per window element run by position."""


def correlate(
    lhs: np.ndarray,
    rhs: np.ndarray,
    lhs_spec: Ints,
    rhs_spec: Ints,
    out_spec: Ints,
    *,
    window_strides: Ints,
    padding: Pads,
    lhs_dilation: Ints,
    rhs_dilation: Ints,
    feature_group_count: int,
    batch_group_count: int,
) -> np.ndarray:
    """``conv_general_dilated`` of arrays; the parameters are those of the primitive."""
    spatial = lhs_spec[2:]
    kernel = tuple([rhs.shape[a] for a in rhs_spec[2:]])
    slides = zip(
        [lhs.shape[a] for a in spatial],
        kernel,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        strict=True,
    )
    counts = tuple([count(*slide) for slide in slides])
    n, out_features = lhs.shape[lhs_spec[0]] // batch_group_count, rhs.shape[rhs_spec[0]]
    layout = tuple(int(i) for i in np.argsort(out_spec))
    if 0 in (n, out_features, *counts, *kernel, lhs.shape[lhs_spec[1]]):
        return np.zeros([(n, out_features, *counts)[i] for i in layout], lhs.dtype)
    pads, holes = [(0, 0)] * lhs.ndim, [1] * lhs.ndim
    for axis, pad, dilation in zip(spatial, padding, lhs_dilation, strict=True):
        pads[axis], holes[axis] = pad, dilation
    x = padded(lhs, tuple(pads), tuple(holes), 0).transpose(lhs_spec)
    groups = feature_group_count * batch_group_count
    if batch_group_count > 1:
        x = x.reshape(groups, n, *x.shape[1:])
    else:
        x = np.moveaxis(x.reshape(n, groups, x.shape[1] // groups, *x.shape[2:]), 1, 0)
    w = rhs.transpose(rhs_spec)
    w = w.reshape(groups, out_features // groups, *w.shape[1:])
    axes = range(3, x.ndim)
    windows = window_view(x, axes, kernel, counts, window_strides, rhs_dilation)
    few = groups > 1 and w.shape[1] * min(x.shape[1:3]) <= _FEW
    product = _by_position if few else _by_matrix
    out = product(windows, w, out_spec[1] == lhs.ndim - 1)
    out = np.moveaxis(out, (0, -1), (1, 2))
    return out.reshape(n, out_features, *counts).transpose(layout)


def _by_matrix(windows: np.ndarray, w: np.ndarray, features_last: bool) -> np.ndarray:
    """Matmul of a matrix of windows with a matrix of kernels, for each group.

    Args:
      windows: group, batch, input feature, the spatial axes of the result, then those of a window.
      w: group, output feature, input feature, then the axes of a window.
      features_last: whether the result is to have its features innermost in memory, or outermost.
    Returns:
      group, batch, the spatial axes, then output features.
    """
    if windows.nbytes > _SCRATCH and max(windows.shape[1:3]) > 1:
        return _in_pieces(windows, w, features_last)
    spatial = w.ndim - 3
    rows, columns = (1, *range(3, 3 + spatial)), (2, *range(3 + spatial, windows.ndim))
    columns = _by_stride(windows, columns)
    inner = min(
        (a for a in range(1, windows.ndim) if windows.shape[a] > 1),
        key=lambda a: (windows.strides[a], -windows.shape[a]),
        default=columns[-1],
    )
    # where adjacent elements in memory belong to different windows, the matrix is transposed
    across = inner not in columns
    if across:
        rows = _by_stride(windows, rows)
    m, k = (math.prod([windows.shape[a] for a in axes]) for axes in (rows, columns))
    kernel_axes = tuple([2 if a == 2 else a - spatial for a in columns])
    kernels = w.transpose(0, 1, *kernel_axes).reshape(len(w), w.shape[1], k)
    if across:
        matrix = windows.transpose(0, *columns, *rows).reshape(len(w), k, m).swapaxes(1, 2)
    else:
        matrix = windows.transpose(0, *rows, *columns).reshape(len(w), m, k)
    sizes = [windows.shape[a] for a in rows]
    # np.dot, unlike np.matmul, copies strided matrices and calls BLAS
    if features_last:
        out = np.empty((m, len(w), w.shape[1]), w.dtype)
        for g in range(len(w)):
            out[:, g] = np.dot(matrix[g], kernels[g].T)
        out = np.moveaxis(out.reshape(*sizes, len(w), w.shape[1]), -2, 0)
    else:
        out = np.empty((len(w), w.shape[1], m), w.dtype)
        for g in range(len(w)):
            np.dot(kernels[g], matrix[g].T, out=out[g])
        out = np.moveaxis(out.reshape(len(w), w.shape[1], *sizes), 1, -1)
    place = {a: 1 + i for i, a in enumerate(rows)}
    return out.transpose(0, *[place[a] for a in sorted(rows)], out.ndim - 1)


def _in_pieces(windows: np.ndarray, w: np.ndarray, features_last: bool) -> np.ndarray:
    """``_by_matrix`` in chunks of the batch or input features, the outer in memory."""
    axis = max((1, 2), key=lambda a: (windows.shape[a] > 1, windows.strides[a]))
    n = windows.shape[axis]
    step = max(1, n * _SCRATCH // windows.nbytes)
    parts = [slice(i, i + step) for i in range(0, n, step)]
    if axis == 2:
        total = _by_matrix(windows[:, :, parts[0]], w[:, :, parts[0]], features_last)
        for part in parts[1:]:
            total += _by_matrix(windows[:, :, part], w[:, :, part], features_last)
        return total
    first = _by_matrix(windows[:, parts[0]], w, features_last)
    order = sorted(range(first.ndim), key=lambda a: -first.strides[a])
    shape = (first.shape[0], n, *first.shape[2:])
    out = np.empty([shape[a] for a in order], w.dtype).transpose(np.argsort(order))
    out[:, parts[0]] = first
    for part in parts[1:]:
        out[:, part] = _by_matrix(windows[:, part], w, features_last)
    return out


def _by_stride(x: np.ndarray, axes: Ints) -> Ints:
    """``axes`` in memory order, outermost first."""
    return tuple(sorted(axes, key=lambda a: (-x.strides[a], a)))


def _by_position(windows: np.ndarray, w: np.ndarray, features_last: bool) -> np.ndarray:
    """The same without a matrix: a sum over positions, or a dot product per window."""
    spatial = w.ndim - 3
    counts, kernel = windows.shape[3 : 3 + spatial], w.shape[3:]
    if math.prod(counts) < math.prod(kernel):
        inside = range(4, 4 + spatial)
        out = np.empty((*counts, len(w), windows.shape[1], w.shape[1]), w.dtype)
        for at in np.ndindex(*counts):
            here = windows[(slice(None),) * 3 + at]
            np.einsum(here, (0, 1, 3, *inside), w, (0, 2, 3, *inside), (0, 1, 2), out=out[at])
        return np.moveaxis(out, (-3, -2), (0, 1))
    total: Any = None
    for at in np.ndindex(*kernel):
        here, there = windows[(..., *at)], w[(..., *at)]
        if w.shape[2] == 1:
            term = here[:, :, 0, ..., None] * np.expand_dims(there[:, :, 0], tuple(range(1, 2 + spatial)))
        else:
            term = np.einsum("gnc...,goc->gn...o", here, there)
        total = term if total is None else np.add(total, term, out=total)
    return total
