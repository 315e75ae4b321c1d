"""Batched LU and triangular solves of many small matrices, in NumPy.

Below ``triangular`` and ``factor``, which use it for large batches of small matrices, where one LAPACK call
each would cost many times its arithmetic. The loops are over rows and columns; every step is one operation on
the whole batch. In: arrays (batch, m, n). Out: the same values as LAPACK's, up to rounding.
"""

from __future__ import annotations

import numpy as np

_SMALL = 16
_EACH = 8


def is_many(shape: tuple[int, ...]) -> bool:
    """True if a batch of this shape is faster together than one by one."""
    *lead, m, n = shape
    size = max(m, n)
    return len(lead) > 0 and min(m, n) > 0 and size <= _SMALL and int(np.prod(lead)) >= _EACH * size


def lu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed factors, pivots and permutation of LU with partial pivoting."""
    x = x.copy()
    batch, m, n = x.shape
    every, steps = np.arange(batch), min(m, n)
    pivots = np.empty((batch, steps), np.int32)
    order = np.tile(np.arange(m, dtype=np.int32), (batch, 1))
    for j in range(steps):
        column = x[:, j:, j]
        size = np.abs(column.real) + np.abs(column.imag) if x.dtype.kind == "c" else np.abs(column)
        p = j + np.argmax(size, 1)
        pivots[:, j] = p
        for rows in (x, order):
            row = rows[:, j].copy()
            rows[:, j] = rows[every, p]
            rows[every, p] = row
        pivot = x[:, j, j, None]
        x[:, j + 1 :, j] /= np.where(pivot == 0, 1, pivot)  # if it is 0, so is the column below it
        x[:, j + 1 :, j + 1 :] -= x[:, j + 1 :, j, None] * x[:, j, None, j + 1 :]
    return x, pivots, order


def solve_triangles(a: np.ndarray, b: np.ndarray, lower: bool, unit: bool) -> np.ndarray:
    """The solutions of ``a x = b``, a the lower or upper triangles of matrices."""
    n = a.shape[-1]
    x = b.copy()
    for i in range(n) if lower else range(n - 1, -1, -1):
        known = slice(0, i) if lower else slice(i + 1, n)
        x[:, i] -= np.matmul(a[:, i, None, known], x[:, known])[:, 0]
        if not unit:
            x[:, i] /= a[:, i, i, None]
    return x
