"""NumPy implementation of gather and scatter: matrix rows chosen by a flat index.

Below ``gather_scatter``. In: shapes, checked dimension numbers and sizes. Out: a ``Plan``, made once per combination,
that turns an array of indices into row indices. ``sum_rows`` and ``combine_at`` are the arithmetic on such rows.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from blufunc import _lazy
from blufunc.core.ir import dtypes
from blufunc.core.ops.windows import GatherDimensionNumbers

with _lazy.modules(globals()):
    import scipy.sparse


class Plan:
    """Reduction of a gather or scatter to matrix rows chosen by a flat index.

    The axes in which positions vary (indexed, batching or only partly read), and whatever lies between them, become
    one axis of length ``rows``; the axes before it are ``outer``, those after it ``inner``. A window is the row
    that it starts in plus ``offsets``.

    Attributes:
      batch: the batch dimensions of the indices.
      bounds: for each component of an index, the largest start that keeps the window inside.
      strides: for each component, the rows from one start to the next.
      along: (dimension of the indices, stride) of the batching dimensions.
      offsets: the rows of a window, from its first; None where that is one.
      natural: the shape of what is gathered, in the order (outer, batch, window, inner).
      order: the permutation from there to the order of the result (or updates).
    """

    def __init__(
        self, shape: tuple[int, ...], indices: tuple[int, ...], d: GatherDimensionNumbers, sizes: tuple
    ):
        self.batch = indices[:-1]
        varying = {i for i, (n, size) in enumerate(zip(shape, sizes, strict=True)) if size < n}
        varying.update(d.operand_batching_dims)
        first, last = (min(varying), max(varying) + 1) if varying else (0, 0)
        self.first, self.last = first, last
        self.outer, self.inner = math.prod(shape[:first]), math.prod(shape[last:])
        self.varying_shape = shape[first:last]
        self.rows = math.prod(self.varying_shape)
        stride = {i: math.prod(shape[i + 1 : last]) for i in range(first, last)}
        self.bounds = np.array([shape[i] - sizes[i] for i in d.start_index_map], np.intp)
        self.strides = np.array([stride.get(i, 0) for i in d.start_index_map], np.intp)
        self.along = [
            (k, stride[i])
            for i, k in zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True)
        ]
        removed = {*d.collapsed_slice_dims, *d.operand_batching_dims}
        windows = [i for i in range(len(shape)) if i not in removed]
        offsets = np.zeros(1, np.intp)
        for i in range(first, last):
            if i not in removed:
                offsets = (offsets[:, None] + np.arange(sizes[i]) * stride[i]).reshape(-1)
        self.offsets = None if offsets.shape == (1,) and not offsets[0] else offsets
        self.per_window = len(offsets)
        before = [i for i in windows if i < first]
        inside = [i for i in windows if first <= i < last]
        after = [i for i in windows if i >= last]
        self.natural = (
            *(sizes[i] for i in before),
            *self.batch,
            *(sizes[i] for i in (*inside, *after)),
        )
        position = {("batch", k): len(before) + k for k in range(len(self.batch))}
        position.update({("window", i): p for p, i in enumerate(before)})
        position.update(
            {("window", i): len(before) + len(self.batch) + p for p, i in enumerate(inside + after)}
        )
        rest_w, rest_b = iter(windows), iter(range(len(self.batch)))
        order = [
            position[("window", next(rest_w)) if p in d.offset_dims else ("batch", next(rest_b))]
            for p in range(len(self.natural))
        ]
        self.order = None if order == list(range(len(order))) else tuple(order)
        self.inverse = None if self.order is None else tuple(int(i) for i in np.argsort(order))

    def starts(self, indices: np.ndarray, drop: bool, clip: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """The first row of each window, and a mask of windows inside, if needed."""
        if indices.dtype == np.uint64:
            indices = np.minimum(indices, np.uint64(np.iinfo(np.intp).max))
        at = indices.reshape(math.prod(self.batch), len(self.bounds)).astype(np.intp)
        inside: Any = None
        if drop:
            inside = ((at >= 0) & (at <= self.bounds)).all(1)
            if inside.all():
                inside = None
        if clip or inside is not None:
            at = np.minimum(np.maximum(at, 0), self.bounds)
        rows = at[:, 0] * self.strides[0] if len(self.strides) == 1 else at @ self.strides
        if self.along:
            rows = rows.reshape(self.batch)
            for k, stride in self.along:
                line = np.arange(self.batch[k], dtype=np.intp) * stride
                rows = rows + line.reshape(-1, *[1] * (len(self.batch) - k - 1))
            rows = rows.reshape(-1)
        return rows, inside

    def window_rows(self, starts: np.ndarray) -> np.ndarray:
        """All rows of all windows."""
        return starts if self.offsets is None else (starts[:, None] + self.offsets).reshape(-1)


plan_for = functools.lru_cache(4096)(Plan)


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """Dtype to compute in for values of ``dtype``."""
    return dtypes.float32 if dtypes.is_floating(dtype) and dtype.itemsize <= 2 else dtype


def sum_rows(rows: np.ndarray, updates: np.ndarray, n: int) -> np.ndarray:
    """Segment sum: row i of ``n`` sums updates j with ``rows[j] == i``, in order.

    Computed as a sparse matmul with ones, which SciPy runs as one pass over the updates: several times faster
    than ``np.add.at`` or sorting.
    """
    if dtypes.is_complex(updates.dtype):  # as pairs of reals: one times infinity is NaN for complex values
        real = np.ascontiguousarray(updates).view(f"f{updates.dtype.itemsize // 2}")
        return sum_rows(rows, real, n).view(updates.dtype)
    count = len(rows)
    small = np.int32 if max(n, count) < 2**31 else np.int64
    ones = np.ones(count, updates.dtype)
    table = scipy.sparse.csc_array(
        (ones, rows.astype(small), np.arange(count + 1, dtype=small)), shape=(n, count)
    )
    return table @ updates


def combine_at(ufunc: np.ufunc, x: np.ndarray, rows: np.ndarray, updates: np.ndarray) -> np.ndarray:
    """``x`` with ``ufunc`` applied to some of its rows, one update after the other."""
    wide = wide_dtype(x.dtype)
    out = np.array(x, wide, order="C")
    width = updates.shape[1]
    if width > 1:  # one index per element: ``at`` is several times faster on vectors
        rows = (rows[:, None] * width + np.arange(width, dtype=np.intp)).reshape(-1)
    ufunc.at(out.reshape(-1), rows, np.ascontiguousarray(updates, wide).reshape(-1))
    return out if wide == x.dtype else out.astype(x.dtype)
