"""Scatters of rows: updates in the order of their rows, then combined row by row.

Kernels, stage 8, below ``op.py``. In: sizes and dtypes of a scatter. Out: launches that never wait for the host, so a
graph can capture them.

Few updates are counted per row and gathered, and each is ranked among those of its row. Many are sorted by row in a
stable radix sort whose work does not depend on the rows: blocks have parts of the updates, and sort them in tiles (D.
Merrill, A. Grimshaw, "Revisiting Sorting for GPGPU Stream Architectures", 2010). Scalars are sorted themselves, of
longer rows the positions. The order, the split of rows with many updates, and so the result are the same either way,
and do not depend on thread scheduling: the integer atomics only count.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from blufunc.kernels.backends.cuda import device_model
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.library.scatter import common
from blufunc.kernels.backends.cuda.library.scatter.common import Own
from blufunc.kernels.codegen import scalar_ops, source_files
from blufunc.kernels.codegen.source_files import DEVICE

SORTED = 1 << 16
"""Minimum updates that are sorted: fewer are ranked in 0.2 ms at most."""

_NAMES = ("count", "begin", "gather", "rank", "partial", "combine")
_ORDER_NAMES = ("count_rows", "place_rows", "count_keys", "place_keys", "sum_parts", "bounds")

_THREADS = 256
_SCAN_THREADS = 1024
_CHUNK = 64
_WARPS = 8
_MOST_BITS = 8  # of a digit: a thread of 8 warps has one
_TILE = 16 * 32 * _WARPS
_MOST_PARTS = 4 * device_model.SM_COUNT

_FILE = "backends/cuda/include/scatter.cuh"
_ORDER_FILE = "backends/cuda/include/scatter_order.cuh"


class Rows:
    """Scatter of ``n`` rows of ``width`` into ``height`` rows: scratch and launches.

    Args:
      how: a key of ``COMBINE``.
      dtype: that of the array and the updates.
      index: that of the row indices, int32 or int64.
      own: gives device memory.
      clip: whether indices out of range mean the nearest row; else they are dropped.
    """

    def __init__(
        self, how: str, dtype: np.dtype, index: np.dtype, n: int, height: int, width: int, device: int,
        own: Own, clip: bool = False,
    ):  # fmt: skip
        vector, values = _vector(width), sorts_updates(dtype, n, width)
        functions = functions_of(how, dtype, index.name, vector, clip, values, device)
        self._order: Sorted | _Ranked
        if is_sorted(n):
            payload = dtype if values else None
            sort = order_functions(index.name, digits(height)[1], clip, payload, device)
            self._order = Sorted(functions, sort, n, height, own, payload, digits(height))
        else:
            self._order = _Ranked(functions, n, height, own)
        starts, order = self._order.starts, self._order.order
        chunks = n // _CHUNK
        self._partials = own((max(chunks, 1) * width,), common.wide(dtype))
        partials = self._partials.ptr
        blocks = (-(-height * width // (_THREADS * vector)),)
        sizes = (np.int64(height * width), np.int32(width))
        args = (0, 0, starts, order, 0, partials, *sizes)
        self._combine = functions["combine"].prepare(blocks, (_THREADS,), 0, args)
        self._partial: driver.Launch | None = None
        if chunks:
            grid = (-(-chunks * width // (_THREADS * vector)),)
            more = (
                0,
                0,
                starts,
                order,
                partials,
                np.int64(chunks * width),
                np.int32(width),
                np.int32(height),
            )
            self._partial = functions["partial"].prepare(grid, (_THREADS,), 0, more)

    def __call__(self, x: int, rows: int, updates: int, out: int, stream: Any) -> None:
        """Put the launches on a stream; the arrays are given by their addresses."""
        updates = self._order(rows, updates, stream)
        if self._partial is not None:
            for i, address in enumerate((rows, updates)):
                self._partial.arguments.set_pointer(i, address)
            self._partial(stream.ptr)
        for i, address in ((0, x), (1, updates), (4, out)):
            self._combine.arguments.set_pointer(i, address)
        self._combine(stream.ptr)


def is_sorted(n: int) -> bool:
    """True if the order of that many updates is found by sorting."""
    return n >= SORTED


class _Ranked:
    """The order of few updates: the rank of each is the number of those before it.

    Attributes:
      starts, order: addresses of where the updates of each row begin, and of their positions.
    """

    def __init__(self, functions: dict[str, Any], n: int, height: int, own: Own):
        self._counts = own((height,), np.dtype(np.int32))
        self._scratch = [own((max(size, 1),), np.dtype(np.int32)) for size in (height + 1, n, n, n)]
        self.starts, place, found, self.order = (b.ptr for b in self._scratch)
        counts, each, n_, height_ = self._counts.ptr, (-(-n // _THREADS),), np.int32(n), np.int32(height)

        def prepare(name: str, grid: tuple, block: int, *args: Any) -> driver.Launch:
            return functions[name].prepare(grid, (block,), 0, args)

        self._launches = [prepare("begin", (1,), _SCAN_THREADS, counts, self.starts, height_)]
        self._by_rows: list[driver.Launch] = []
        if n:
            count = prepare("count", each, _THREADS, 0, counts, place, n_, height_)
            gather = prepare("gather", each, _THREADS, 0, self.starts, place, found, n_, height_)
            rank = prepare("rank", each, _THREADS, 0, self.starts, place, found, self.order, n_, height_)
            self._by_rows = [count, gather, rank]
            self._launches = [count, *self._launches, gather, rank]

    def __call__(self, rows: int, updates: int, stream: Any) -> int:
        """Find the order; returns the address of the updates that it is one of."""
        for launch in self._by_rows:
            launch.arguments.set_pointer(0, rows)
        driver.fill_zero(self._counts.ptr, self._counts.nbytes, stream)
        for launch in self._launches:
            launch(stream.ptr)
        return updates


class Sorted:
    """The order of many updates, by radix; attributes as of ``_Ranked``.

    If updates are sorted themselves, ``order`` is the address of their rows.

    Args:
      by: number of passes, and bits of a digit.
      begin: lowest bit of the rows that they are sorted by.
    """

    def __init__(
        self, functions: dict[str, Any], sort: dict[str, Any], n: int, height: int, own: Own,
        payload: np.dtype | None, by: tuple[int, int], begin: int = 0,
    ):  # fmt: skip
        passes, bits = by
        count = 1 << bits
        parts = min(_MOST_PARTS, -(-n // _TILE))
        each = -(-n // (parts * _TILE)) * _TILE
        blocks = (-(-n // each),)
        unsigned = np.dtype(np.uint32)
        two = range(min(passes, 2))
        keys = [own((n,), unsigned) for _ in two]
        payloads = [own((n,), payload or unsigned) for _ in two]
        counts, totals, bases = (
            own((blocks[0] * count,), unsigned),
            own((count,), unsigned),
            own((count + 1,), unsigned),
        )
        starts = bases if passes == 1 else own((height + 1,), unsigned)
        self._memory = (keys, payloads, counts, totals, bases, starts)
        n_, height_, each_ = np.int32(n), np.int32(height), np.int32(each)
        self._by_rows: list[driver.Launch] = []
        self._launches: list[driver.Launch] = []

        def add(name: str, *args: Any, grid: tuple = blocks, block: int = 32 * _WARPS) -> driver.Launch:
            launch = (functions if name == "begin" else sort)[name].prepare(grid, (block,), 0, args)
            self._launches.append(launch)
            return launch

        for p in range(passes):
            into, before, shift = p % 2, (p - 1) % 2, np.int32(begin + p * bits)
            if p == 0:
                self._by_rows.append(add("count_rows", 0, counts.ptr, n_, each_, shift, height_))
            else:
                add("count_keys", keys[before].ptr, counts.ptr, n_, each_, shift)
            add("sum_parts", counts.ptr, totals.ptr, np.int32(blocks[0]), grid=(count // 32,), block=1024)
            add("begin", totals.ptr, bases.ptr, np.int32(count), grid=(1,), block=_SCAN_THREADS)
            made = (counts.ptr, bases.ptr, keys[into].ptr, payloads[into].ptr, n_, each_)
            if p == 0:
                self._place = add("place_rows", 0, 0, *made, shift, height_)
                self._by_rows.append(self._place)
            else:
                add("place_keys", keys[before].ptr, payloads[before].ptr, *made, shift)
        last = (passes - 1) % 2
        if passes > 1:
            grid = (-(-(n + 1) // _THREADS),)
            add("bounds", keys[last].ptr, starts.ptr, n_, height_, grid=grid, block=_THREADS)
        self.starts = starts.ptr
        self.order = payloads[last].ptr if payload is None else keys[last].ptr
        self._updates = None if payload is None else payloads[last].ptr

    def __call__(self, rows: int, updates: int, stream: Any) -> int:
        """Find the order; returns the address of the updates that it is one of."""
        for launch in self._by_rows:
            launch.arguments.set_pointer(0, rows)
        self._place.arguments.set_pointer(1, updates)
        for launch in self._launches:
            launch(stream.ptr)
        return updates if self._updates is None else self._updates


def digits(height: int) -> tuple[int, int]:
    """Passes of the sort of rows below ``height``, and the bits of a digit."""
    bits = max(5, height.bit_length())  # ``height`` itself is the key of updates without a row
    passes = -(-bits // _MOST_BITS)
    return passes, -(-bits // passes)


def sorts_updates(dtype: np.dtype, n: int, width: int) -> bool:
    """True if updates are sorted themselves: scalars no larger than positions."""
    return is_sorted(n) and width == 1 and dtype.itemsize <= 4


def texts(
    how: str, dtype: np.dtype, index: np.dtype, n: int, height: int, width: int, clip: bool
) -> list[modules.Text]:
    """The sources that ``Rows`` compiles, and their names."""
    values = sorts_updates(dtype, n, width)
    found = [(source(how, dtype, index.name, _vector(width), clip, values), f"scatter_{how}")]
    if is_sorted(n):
        sort = order_source(index.name, digits(height)[1], clip, dtype if values else None)
        found.append((sort, "scatter_order"))
    return found


def _vector(width: int) -> int:
    """Elements of a row per thread."""
    return next(v for v in (4, 2, 1) if width % v == 0)


def source(how: str, dtype: np.dtype, index: str, vector: int, clip: bool, values: bool = False) -> str:
    """CUDA C++ of the kernels for a reduction, a dtype, and an index dtype.

    ``values``: whether updates are sorted themselves.
    """
    constants = {
        "THREADS": _THREADS,
        "SCAN_THREADS": _SCAN_THREADS,
        "CHUNK": _CHUNK,
        "VECTOR": vector,
        "CLIP": clip,
    }
    declared = common.types(index, dtype, **constants)
    macros = common.macros(how, dtype)
    macros["AT(k)"] = "(k)" if values else "order[k]"
    macros["ROW(k)"] = "order[k]" if values else "row_of(rows[order[k]], height)"
    return DEVICE.with_prelude(declared + source_files.source(_FILE, **macros))


def order_source(index: str, bits: int, clip: bool, payload: np.dtype | None = None) -> str:
    """CUDA C++ of the sort of row indices, with digits of some bits.

    ``payload``: dtype of the updates, if these are sorted along, else positions are.
    """
    kind = "int" if payload is None else scalar_ops.storage_type(payload)
    declared = common.types(index, WARPS=_WARPS, BITS=bits, CLIP=clip, Payload=kind)
    macros = {"PAYLOAD(updates, j)": "j" if payload is None else "updates[j]"}
    return DEVICE.with_prelude(declared + source_files.source(_ORDER_FILE, **macros))


@functools.lru_cache(256)
def functions_of(
    how: str, dtype: np.dtype, index: str, vector: int, clip: bool, values: bool, device: int
) -> dict[str, Any]:
    module = modules.module(source(how, dtype, index, vector, clip, values), device, f"scatter_{how}")
    return {name: module.kernel(name) for name in _NAMES}


@functools.lru_cache(64)
def order_functions(
    index: str, bits: int, clip: bool, payload: np.dtype | None, device: int
) -> dict[str, Any]:
    module = modules.module(order_source(index, bits, clip, payload), device, "scatter_order")
    return {name: module.kernel(name) for name in _ORDER_NAMES}
