"""Factorizations of larger matrices, by cuSOLVER and cuBLAS.

Kernels, below ``cupy_ops``. In: CuPy arrays of matrices (b, n, n) in row-major order. Out: factors. Nothing waits for
the device: whether a matrix has a factor is read there. Batches of small matrices are one call of a batched routine,
few large ones a call each. cuSOLVER's column-major lower triangle takes half the time of the upper one, so matrices are
transposed before and after.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

ROWS_PER_MATRIX = 128
"""Rows for each matrix of a batch beyond which its matrices fill a GPU one by one.
measured: 16 Cholesky factors of 1024 in 1.9 ms, one by one 5.5; 4 of 2048 in 4.7 and 2.7 (H100, November 2026).
"""

MOST_PIVOTED = 512
"""Rows up to which cuBLAS's batched LU is faster than one by one.
measured: 16 of 512 in 7.3 ms, one by one 15; 16 of 1024 in 69 and 33 (H100, November 2026).
"""

_LETTERS = {"f": "s", "d": "d", "F": "c", "D": "z"}


def is_batched(number: int, n: int) -> bool:
    """True for batches that one routine factors together."""
    return number > 1 and n <= ROWS_PER_MATRIX * number


def _pointers(x: Any) -> Any:
    """The addresses of the matrices of an array (b, ...)."""
    import cupy

    begin, step = x.data.ptr, x.strides[0]
    return cupy.arange(begin, begin + len(x) * step, step, dtype=np.uintp)


def _columns_first(x: Any) -> Any:
    """A copy of matrices in column-major order."""
    return x.swapaxes(-1, -2).copy()


def cholesky(x: Any) -> Any:
    """Lower triangles (b, n, n), of which those without a factor are NaN."""
    import cupy
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cublas, cusolver

    number, n = x.shape[:2]
    y, letter = _columns_first(x), _LETTERS[x.dtype.char]
    found = cupy.zeros(number, np.int32)
    handle, lower = device.get_cusolver_handle(), cublas.CUBLAS_FILL_MODE_LOWER
    if is_batched(number, n):
        factor = getattr(cusolver, f"{letter}potrfBatched")
        factor(handle, lower, n, _pointers(y).data.ptr, n, found.data.ptr, number)
    else:
        size = getattr(cusolver, f"{letter}potrf_bufferSize")(handle, lower, n, y.data.ptr, n)
        work, factor = cupy.empty(size, x.dtype), getattr(cusolver, f"{letter}potrf")
        for i in range(number):
            factor(handle, lower, n, y[i].data.ptr, n, work.data.ptr, size, found[i:].data.ptr)
    out = _columns_first(y)
    last = out[:, -1, -1].copy()
    _clear_upper(x.dtype.kind == "c")(found, np.int64(n), last, out)
    return out


@functools.cache
def _clear_upper(is_complex: bool) -> Any:
    import cupy

    # a NaN anywhere in the lower triangle reaches the last element of the diagonal; other elements stay
    return cupy.ElementwiseKernel(
        "raw int32 found, int64 n, raw T last",
        "T out",
        f"""
        long long matrix = i / (n * n), row = i / n % n, column = i % n;
        bool good = !found[matrix] && last[matrix]{".real()" if is_complex else ""} > 0;
        if (column > row) out = T(0);
        else if (!good) out = T(nan(""));
        """,
        "blufunc_clear_upper",
    )


def lu(x: Any) -> tuple[Any, Any]:
    """Packed factors of matrices (b, m, n), and their pivots from 0 on."""
    import cupy
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cublas, cusolver

    number, m, n = x.shape
    y, letter = _columns_first(x), _LETTERS[x.dtype.char]
    pivots, found = cupy.empty((number, min(m, n)), np.int32), cupy.empty(number, np.int32)
    if m == n <= MOST_PIVOTED and is_batched(number, n):
        factor = getattr(cublas, f"{letter}getrfBatched")
        factor(
            device.get_cublas_handle(), n, _pointers(y).data.ptr, n, pivots.data.ptr, found.data.ptr, number
        )
    else:
        handle = device.get_cusolver_handle()
        size = getattr(cusolver, f"{letter}getrf_bufferSize")(handle, m, n, y.data.ptr, m)
        work, factor = cupy.empty(size, x.dtype), getattr(cusolver, f"{letter}getrf")
        for i in range(number):
            factor(handle, m, n, y[i].data.ptr, m, work.data.ptr, pivots[i].data.ptr, found[i:].data.ptr)
    return y.swapaxes(-1, -2), pivots - np.int32(1)
