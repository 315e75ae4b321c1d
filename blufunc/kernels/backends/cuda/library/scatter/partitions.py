"""Scatters of scalars into many bins: partitions, then the bins of each.

Kernels, stage 8, below ``op.py``. In: sizes and dtypes of a scatter. Out: launches that never wait for the host. One
pass of the radix sort puts updates in the order of the high bits of their rows, so that each partition has few bins.
Blocks combine chunks of the updates in shared memory, as in ``bins.py``, and a last launch the chunks of each
partition. Where chunks begin depends on the number of updates alone, and the sort is stable: sums of floats have one
shape, whatever the scheduling.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.library.scatter import bins, common, rows
from blufunc.kernels.backends.cuda.library.scatter.common import Own

_MOST_BITS = 8  # of a partition's number: a thread of the sort has a digit
_BIN_BITS = 8  # fewest of a bin: fewer bins make the lanes of a warp wait for each other
_UPDATES_PER_BIN = 32  # of a chunk, whose bins are initialized and combined once


def suits(how: str, dtype: np.dtype, n: int, height: int, width: int) -> bool:
    """True if the bins of a partition fit, and updates are many enough to sort them.

    Updates are sorted themselves: they have at most 4 bytes.
    """
    many = rows.sorts_updates(dtype, n, width) and n >= bins.UPDATES_PER_BIN * height
    return many and bins.fits(how, dtype, 1 << _bits(height)[0], width)


def _bits(height: int) -> tuple[int, int]:
    """Bits of a bin within its partition, and of a partition."""
    # updates of no row have ``height`` as their row
    low = max(_BIN_BITS, height.bit_length() - _MOST_BITS)
    return low, max(5, height.bit_length() - low)


class Partitions:
    """Scatter of ``n`` scalars into ``height`` bins; ``Args`` as of ``rows.Rows``."""

    def __init__(
        self, how: str, dtype: np.dtype, index: np.dtype, n: int, height: int, width: int, device: int,
        own: Own, clip: bool = False,
    ):  # fmt: skip
        low, high = _bits(height)
        functions, wide = _functions(how, dtype, index.name, low, device), common.wide(dtype)
        ordering = rows.functions_of(how, dtype, index.name, 1, clip, True, device)
        sort = rows.order_functions(index.name, high, clip, dtype, device)
        self._order = rows.Sorted(ordering, sort, n, height, own, dtype, (1, high), low)
        number = 1 << low
        chunks = -(-n // _chunk(low))
        self._partials = own(((chunks + (height >> low) + 1) * number,), wide)
        starts, partials, height_ = self._order.starts, self._partials.ptr, np.int32(height)
        args = (self._order.order, 0, starts, partials, np.int32(n), height_)
        shared = bins.WARPS * number * wide.itemsize
        self._chunks: driver.Launch = functions["combine_chunks"].prepare(
            (chunks,), (32 * bins.WARPS,), shared, args
        )
        more = (0, partials, starts, 0, height_)
        self._whole: driver.Launch = functions["combine_partitions"].prepare(
            (-(-height // 32),), (32 * bins.GROUPS,), 0, more
        )

    def __call__(self, x: int, rows: int, updates: int, out: int, stream: Any) -> None:
        """Put the launches on a stream; the arrays are given by their addresses."""
        self._chunks.arguments.set_pointer(1, self._order(rows, updates, stream))
        for i, address in ((0, x), (3, out)):
            self._whole.arguments.set_pointer(i, address)
        self._chunks(stream.ptr)
        self._whole(stream.ptr)


def _chunk(low: int) -> int:
    return _UPDATES_PER_BIN << low


def texts(how: str, dtype: np.dtype, index: np.dtype, height: int, clip: bool) -> list[modules.Text]:
    """The sources that ``Partitions`` compiles, and their names."""
    low, high = _bits(height)
    return [
        (source(how, dtype, index.name, low), f"scatter_partitions_{how}"),
        (rows.source(how, dtype, index.name, 1, clip, True), f"scatter_{how}"),
        (rows.order_source(index.name, high, clip, dtype), "scatter_order"),
    ]


def source(how: str, dtype: np.dtype, index: str, low: int) -> str:
    """CUDA C++ of the kernels; ``low``: bits of a bin within its partition."""
    return bins.part("partitions", how, dtype, index, BINS=1 << low, CHUNK=_chunk(low))


@functools.lru_cache(64)
def _functions(how: str, dtype: np.dtype, index: str, low: int, device: int) -> dict[str, Any]:
    module = modules.module(source(how, dtype, index, low), device, f"scatter_partitions_{how}")
    return {name: module.kernel(name) for name in ("combine_chunks", "combine_partitions")}
