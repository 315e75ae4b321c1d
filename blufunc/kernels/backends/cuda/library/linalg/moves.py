"""Moves of large matrices around cuSOLVER: transposes, triangles and permutations.

Kernels, below ``large.py``. In: contiguous CuPy arrays. Out: new ones, by launches on CuPy's current stream. A
transpose by tiles in shared memory reads and writes whole lines, where CuPy's copy reads single elements.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from blufunc.kernels.backends.cuda.driver import modules
from blufunc.kernels.codegen import source_files
from blufunc.kernels.codegen.source_files import DEVICE

_FILE = "backends/cuda/include/large_matrices.cuh"
_TILE, _STEP, _THREADS = 32, 8, 128
_SHARED_ROWS = 12 << 10
"""Rows of a permutation in shared memory, at most: 48 KiB."""

_WORDS = {4: "unsigned", 8: "uint2", 16: "uint4"}
_NAN = {
    "f": "0x7fc00000u",
    "d": "Word{0, 0x7ff80000u}",
    "F": "Word{0x7fc00000u, 0x7fc00000u}",
    "D": "Word{0, 0x7ff80000u, 0, 0x7ff80000u}",
}
"""Elements that are NaN, by the dtype's character."""


def transposed(x: Any, lower: bool = False) -> Any:
    """Matrices (b, m, n) as (b, n, m); ``lower``: only their lower triangles."""
    import cupy

    x = cupy.ascontiguousarray(x)
    number, rows, columns = x.shape
    out = cupy.empty((number, columns, rows), x.dtype)
    sizes = np.int32(rows), np.int32(columns)
    _launch(transpose_source(x.dtype, lower), "transpose_matrices", _tiles(x.shape), x, out, *sizes)
    return out


def triangles(x: Any, found: Any) -> Any:
    """Lower triangles of column-major matrices; NaN where ``found`` is not 0."""
    import cupy

    out = cupy.empty_like(x)
    _launch(
        triangle_source(x.dtype), "place_triangles", _tiles(x.shape), x, out, found, np.int32(x.shape[-1])
    )
    return out


def permutation(pivots: Any, rows: int) -> Any:
    """Permutations (b, rows), int32, equivalent to swaps (b, k)."""
    import cupy

    pivots = cupy.ascontiguousarray(pivots, np.int32)
    number, swaps = pivots.shape
    out = cupy.empty((number, rows), np.int32)
    text = permutation_source(rows)
    shared = 4 * rows if rows <= _SHARED_ROWS else 0
    _launch(text, "permute_rows", number, pivots, out, np.int32(swaps), np.int32(rows), shared=shared)
    return out


def transpose_source(dtype: np.dtype, lower: bool) -> str:
    """CUDA C++ of ``transposed``."""
    constants = source_files.declared(Word=_WORDS[dtype.itemsize], LOWER=lower)
    return DEVICE.with_prelude(constants + source_files.source(_FILE, "tiles", "transpose"))


def triangle_source(dtype: np.dtype) -> str:
    """CUDA C++ of ``triangles``."""
    constants = source_files.declared(
        Word=_WORDS[dtype.itemsize], Real="double" if dtype.char in "dD" else "float"
    )
    return DEVICE.with_prelude(
        constants + source_files.source(_FILE, "tiles", "triangle", UNDEFINED=_NAN[dtype.char])
    )


def permutation_source(rows: int) -> str:
    """CUDA C++ of ``permutation``."""
    constants = source_files.declared(THREADS=_THREADS, IN_SHARED=rows <= _SHARED_ROWS)
    return DEVICE.with_prelude(constants + source_files.source(_FILE, "permutation"))


def _tiles(shape: tuple[int, ...]) -> int:
    number, rows, columns = shape
    return number * -(-rows // _TILE) * -(-columns // _TILE)


def _launch(text: str, name: str, blocks: int, *args: Any, shared: int = 0) -> None:
    import cupy

    if not blocks:
        return
    threads = _THREADS if name == "permute_rows" else _TILE * _STEP
    values = [a if isinstance(a, np.generic) else a.data.ptr for a in args]
    kernel = _kernel(text, name, cupy.cuda.runtime.getDevice())
    kernel.prepare((blocks,), (threads,), shared, values)(cupy.cuda.get_current_stream().ptr)


@functools.lru_cache(64)
def _kernel(text: str, name: str, device: int) -> Any:
    return modules.module(text, device, name).kernel(name)
