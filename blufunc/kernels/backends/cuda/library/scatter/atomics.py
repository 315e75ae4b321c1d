"""Scatters of integers into many bins or rows, by atomics.

Kernels, stage 8, below ``op.py``. In: sizes and dtypes of a scatter. Out: a copy of the array and one launch. Sums of
integers, modulo the range of their dtype, and their extrema are the same in any order. Atomics wait where many updates
meet in one element, for which ``bins.py`` is better.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.library.scatter import common
from blufunc.kernels.backends.cuda.library.scatter.common import Own
from blufunc.kernels.codegen import source_files
from blufunc.kernels.codegen.source_files import DEVICE

_THREADS = 256
_ATOMICS = {"add": "atomicAdd", "max": "atomicMax", "min": "atomicMin"}
_FILE = "backends/cuda/include/scatter_atomics.cuh"


def suits(how: str, dtype: np.dtype) -> bool:
    """True if there are atomics for a reduction and a dtype, and no order matters."""
    return how in _ATOMICS and dtypes.is_integer(dtype) and dtype.itemsize >= 4


class Atomics:
    """Scatter of ``n`` rows of integers; ``Args`` as of ``rows.Rows``."""

    def __init__(
        self, how: str, dtype: np.dtype, index: np.dtype, n: int, height: int, width: int, device: int,
        own: Own, clip: bool = False,
    ):  # fmt: skip
        self._nbytes = height * width * dtype.itemsize
        self._update: driver.Launch | None = None
        if n:
            function = _function(how, dtype, index.name, clip, device)
            args = (0, 0, 0, np.int64(n * width), np.int32(width), np.int32(height))
            self._update = function.prepare((-(-n * width // _THREADS),), (_THREADS,), 0, args)

    def __call__(self, x: int, rows: int, updates: int, out: int, stream: Any) -> None:
        """Put the launches on a stream; the arrays are given by their addresses."""
        driver.copy_on_device(out, x, self._nbytes, stream)
        if self._update is not None:
            for i, address in enumerate((rows, updates, out)):
                self._update.arguments.set_pointer(i, address)
            self._update(stream.ptr)


def texts(how: str, dtype: np.dtype, index: np.dtype, clip: bool) -> list[modules.Text]:
    """The source that ``Atomics`` compiles, and its name."""
    return [(source(how, dtype, index.name, clip), f"scatter_atomic_{how}")]


def source(how: str, dtype: np.dtype, index: str, clip: bool) -> str:
    """CUDA C++ of the kernel for a reduction, a dtype, and an index dtype."""
    signed = not dtypes.is_unsigned(dtype) and how != "add"  # sums of either are the same bits
    word = {4: ("unsigned", "int"), 8: ("unsigned long long", "long long")}[dtype.itemsize][signed]
    declared = common.types(index, dtype, THREADS=_THREADS, CLIP=clip)
    macros = {"ATOMIC(place, u)": f"{_ATOMICS[how]}(place, u)", "Word": word}
    return DEVICE.with_prelude(declared + source_files.source(_FILE, **macros))


@functools.lru_cache(64)
def _function(how: str, dtype: np.dtype, index: str, clip: bool, device: int) -> Any:
    module = modules.module(source(how, dtype, index, clip), device, f"scatter_atomic_{how}")
    return module.kernel("update")
