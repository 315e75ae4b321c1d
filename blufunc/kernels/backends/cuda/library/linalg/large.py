"""Factorizations of larger matrices, by cuSOLVER and cuBLAS.

Kernels, below ``cupy_ops``. In: CuPy arrays of matrices (b, n, n) in row-major order. Out: factors. Nothing waits for
the device: whether a matrix has a factor is read there. Batches of small matrices are one call of a batched routine,
few large ones a call each. cuSOLVER's column-major lower triangle takes half the time of the upper one, so matrices are
transposed before and after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from blufunc.kernels.backends.cuda.library.linalg import moves

ROWS_PER_MATRIX = 128
"""Rows for each matrix of a batch beyond which its matrices fill a GPU one by one.
measured: 16 Cholesky factors of 1024 in 1.9 ms, one by one 5.5; 4 of 2048 in 4.7 and 2.7 (H100, November 2026).
"""

MOST_PIVOTED = 512
"""Rows up to which cuBLAS's batched LU is faster than one by one.
measured: 16 of 512 in 7.3 ms, one by one 15; 16 of 1024 in 69 and 33 (H100, November 2026).
"""

STREAMS = 8
"""Streams on which matrices are factored one by one: panels of a few hundred rows occupy few SMs."""

_LETTERS = {"f": "s", "d": "d", "F": "c", "D": "z"}


def is_batched(number: int, n: int) -> bool:
    """True for batches that one routine factors together."""
    return number > 1 and n <= ROWS_PER_MATRIX * number


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
    if m == n <= MOST_PIVOTED and is_batched(number, n):
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
    """Call ``run(i, handle)`` for each ``i``, on streams in turn, between work of the current stream."""
    import cupy

    if number == 1:
        return run(0, cupy.cuda.device.get_cusolver_handle())
    current, beside = cupy.cuda.get_current_stream(), _beside(cupy.cuda.runtime.getDevice())[:number]
    begin = current.record()
    for stream, _ in beside:
        stream.wait_event(begin)
    for i in range(number):
        stream, handle = beside[i % len(beside)]
        with stream:
            run(i, handle)
    for stream, _ in beside:
        current.wait_event(stream.record())
    return None


_LOCAL = threading.local()
"""Streams and handles of this thread, by device: a handle serves one thread at a time."""


def _beside(device: int) -> list[tuple[Any, int]]:
    """Streams of a device, each with a handle of cuSOLVER, whose own memory serves one stream."""
    import cupy
    from cupy_backends.cuda.libs import cusolver

    found = _LOCAL.__dict__.setdefault("streams", {})
    if device not in found:
        found[device] = [(cupy.cuda.Stream(non_blocking=True), cusolver.create()) for _ in range(STREAMS)]
    return found[device]
