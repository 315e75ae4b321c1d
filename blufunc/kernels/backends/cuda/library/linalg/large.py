"""Factorizations of larger matrices, by cuSOLVER and cuBLAS.

Kernels, below ``cupy_ops``. In: CuPy arrays of matrices (b, n, n) in row-major order. Out: factors. Nothing waits for
the device: whether a matrix has a factor is read there. Batches of small matrices are one call of a batched routine,
few large ones a call each, on several streams. cuSOLVER's column-major lower triangle takes half the time of the upper
one, so matrices are transposed before and after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from blufunc.kernels.backends.cuda.library.linalg import moves

ROWS_PER_MATRIX = 64
"""Rows per matrix of a batch beyond which Cholesky is faster one by one.
measured: 4 and 16 of 512 in 0.98 ms, one by one 0.67 and 1.05; of 1024 in 1.8 and 2.2, 0.84 and 2.0 (H100, 2026-11-27)
"""

ROWS_PER_PIVOTED, MOST_PIVOTED = 28, 512
"""The same of LU by cuBLAS, and the rows up to which it is faster for any number.
measured: 16 of 384 in 3.9 ms, one by one 4.4; 4, 16 and 64 of 512 in 7.9, 7.7 and 11, 2.3, 6.7 and 25; 64 of 1024 in 82
and 44 (H100, 2026-11-27)
"""

STREAMS = 8
"""Streams on which matrices are factored one by one.

Panels of a few hundred rows occupy few SMs.
measured: 16 LU of 1024 by 1, 4, 8 and 16 streams in 34, 13.8, 12.2 and 12.3 ms (H100, 2026-11-27)
"""

_LETTERS = {"f": "s", "d": "d", "F": "c", "D": "z"}


def is_batched(number: int, n: int, rows_per_matrix: int = ROWS_PER_MATRIX) -> bool:
    """True for batches that one routine factors together."""
    return number > 1 and n <= rows_per_matrix * number


def _pointers(x: Any) -> Any:
    """The addresses of the matrices of an array (b, ...)."""
    import cupy

    begin, step = x.data.ptr, x.strides[0]
    return cupy.arange(begin, begin + len(x) * step, step, dtype=np.uintp)


def cholesky(x: Any) -> Any:
    """Lower triangles (b, n, n), of which those without a factor are NaN."""
    import cupy
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cublas, cusolver

    number, n = x.shape[:2]
    y, letter = moves.transposed(x, lower=True), _LETTERS[x.dtype.char]
    found = cupy.zeros(number, np.int32)
    handle, lower = device.get_cusolver_handle(), cublas.CUBLAS_FILL_MODE_LOWER
    if is_batched(number, n):
        factor = getattr(cusolver, f"{letter}potrfBatched")
        factor(handle, lower, n, _pointers(y).data.ptr, n, found.data.ptr, number)
    else:
        size = getattr(cusolver, f"{letter}potrf_bufferSize")(handle, lower, n, y.data.ptr, n)
        work, factor = _workspaces(number, size, x.dtype), getattr(cusolver, f"{letter}potrf")

        def run(i: int, handle: int) -> None:
            scratch = work[i % len(work)].data.ptr
            factor(handle, lower, n, y[i].data.ptr, n, scratch, size, found[i:].data.ptr)

        _overlapped(number, run)
    return moves.triangles(y, found)


def lu(x: Any) -> tuple[Any, Any]:
    """Packed factors of matrices (b, m, n), and their pivots from 0 on."""
    import cupy
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cublas, cusolver

    number, m, n = x.shape
    y, letter = moves.transposed(x), _LETTERS[x.dtype.char]
    pivots, found = cupy.empty((number, min(m, n)), np.int32), cupy.empty(number, np.int32)
    if m == n <= MOST_PIVOTED and is_batched(number, n, ROWS_PER_PIVOTED):
        factor = getattr(cublas, f"{letter}getrfBatched")
        factor(
            device.get_cublas_handle(), n, _pointers(y).data.ptr, n, pivots.data.ptr, found.data.ptr, number
        )
    else:
        size = getattr(cusolver, f"{letter}getrf_bufferSize")(
            device.get_cusolver_handle(), m, n, y.data.ptr, m
        )
        work, factor = _workspaces(number, size, x.dtype), getattr(cusolver, f"{letter}getrf")

        def run(i: int, handle: int) -> None:
            scratch = work[i % len(work)].data.ptr
            factor(handle, m, n, y[i].data.ptr, m, scratch, pivots[i].data.ptr, found[i:].data.ptr)

        _overlapped(number, run)
    return moves.transposed(y), pivots - np.int32(1)


# -- several streams --------------------------------------------------------------------------------


def _workspaces(number: int, size: int, dtype: np.dtype) -> Any:
    """Memory of cuSOLVER for each stream that factors some of ``number`` matrices."""
    import cupy

    return cupy.empty((min(number, STREAMS), size), dtype)


def _overlapped(number: int, run: Callable[[int, int], None]) -> None:
    """Call ``run(i, handle)`` for each ``i``, on streams in turn.

    They begin after the work of the current stream, which waits for them.
    """
    import cupy

    if number == 1:
        return run(0, cupy.cuda.device.get_cusolver_handle())
    current, others = cupy.cuda.get_current_stream(), _streams(cupy.cuda.runtime.getDevice())[:number]
    begin = current.record()
    for stream, _ in others:
        stream.wait_event(begin)
    for i in range(number):
        stream, handle = others[i % len(others)]
        with stream:
            run(i, handle)
    for stream, _ in others:
        current.wait_event(stream.record())
    return None


_LOCAL = threading.local()
"""Streams and handles of this thread: a handle serves one thread at a time."""


def _streams(device: int) -> list[tuple[Any, int]]:
    """Streams of a device, each with a handle of cuSOLVER of its own.

    A handle has memory, which serves one stream.
    """
    import cupy
    from cupy_backends.cuda.libs import cusolver

    found = _LOCAL.__dict__.setdefault("streams", {})
    if device not in found:
        found[device] = [(cupy.cuda.Stream(non_blocking=True), cusolver.create()) for _ in range(STREAMS)]
    return found[device]
