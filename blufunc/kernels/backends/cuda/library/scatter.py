"""Deterministic row scatters on a CUDA device, in the order of the updates.

Kernels, stage 8, below ``cupy_ops``. In: an array, row indices and rows of updates. Out: launches that never wait for
the host, so a graph can capture them. A counting sort finds the updates of a row: it counts them per row, computes
offsets, and ranks each update within its row. The order, the split of rows with many updates, and so the result do
not depend on thread scheduling; the integer atomics only count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.gather_scatter import (
    scatter_add_p,
    scatter_max_p,
    scatter_min_p,
    scatter_mul_p,
    scatter_p,
)
from blufunc.core.ops.windows import GatherScatterMode
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Work
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel
from blufunc.kernels.codegen import scalar_ops, source_files
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.kernels.schedule import OpaqueStep

_NAMES = ("count", "begin", "gather", "rank", "partial", "combine")

_COMBINE = {
    "set": "(u)",
    "add": "((acc) + (u))",
    "mul": "((acc) * (u))",
    "max": "(((u) != (u) || (u) > (acc)) ? (u) : (acc))",  # NaN propagates: no value compares greater
    "min": "(((u) != (u) || (u) < (acc)) ? (u) : (acc))",
}

_THREADS = 256
_SCAN_THREADS = 1024
_CHUNK = 64

_FILE = "backends/cuda/include/scatter.cuh"


Own = Callable[[tuple[int, ...], np.dtype], Any]


class Scatter:
    """Scatter of ``n`` rows of ``width`` into ``height`` rows: scratch and launches.

    Args:
      how: a key of ``_COMBINE``.
      dtype: that of the array and the updates.
      index: that of the row indices, int32 or int64.
      clip: whether indices out of range mean the nearest row; else they are dropped.
      own: ``own(shape, dtype)`` gives device memory, which lives as long as the object.
    """

    def __init__(
        self,
        how: str,
        dtype: np.dtype,
        index: np.dtype,
        n: int,
        height: int,
        width: int,
        device: int,
        own: Own,
        clip: bool = False,
    ):
        vector = _vector(width)
        self.counts = own((height,), np.dtype(np.int32))
        self.scratch = [own((max(size, 1),), np.dtype(np.int32)) for size in (height + 1, n, n, n)]
        chunks = n // _CHUNK
        self.scratch.append(
            own(
                (max(chunks, 1) * width,), np.dtype(np.float32) if scalar_ops.is_small_float(dtype) else dtype
            )
        )
        starts, place, found, order, partials = (b.ptr for b in self.scratch)
        counts = self.counts.ptr
        functions = _functions(how, dtype, index.name, vector, clip, device)
        each, n_, height_ = (-(-n // _THREADS),), np.int32(n), np.int32(height)
        blocks = (-(-height * width // (_THREADS * vector)),)

        def prepare(name: str, grid: tuple, block: int, *args: Any) -> driver.Launch:
            return functions[name].prepare(grid, (block,), 0, args)

        begin = prepare("begin", (1,), _SCAN_THREADS, counts, starts, height_)
        sizes = (np.int64(height * width), np.int32(width))
        self._combine = prepare("combine", blocks, _THREADS, 0, 0, starts, order, 0, partials, *sizes)
        self._partial: driver.Launch | None = None
        self._by_rows: list[driver.Launch] = []
        self.launches = [begin, self._combine]
        if n:
            count = prepare("count", each, _THREADS, 0, counts, place, n_, height_)
            gather = prepare("gather", each, _THREADS, 0, starts, place, found, n_, height_)
            rank = prepare("rank", each, _THREADS, 0, starts, place, found, order, n_, height_)
            self._by_rows = [count, gather, rank]
            self.launches = [count, begin, gather, rank, self._combine]
        if chunks:
            grid = (-(-chunks * width // (_THREADS * vector)),)
            sizes = (np.int64(chunks * width), np.int32(width), height_)
            self._partial = prepare("partial", grid, _THREADS, 0, 0, starts, order, partials, *sizes)
            self._by_rows.append(self._partial)
            self.launches.insert(-1, self._partial)

    def __call__(self, x: int, rows: int, updates: int, out: int, stream: Any) -> None:
        """Put the launches on a stream; the arrays are given by their addresses."""
        for launch in self._by_rows:
            launch.arguments.set_pointer(0, rows)
        if self._partial is not None:
            self._partial.arguments.set_pointer(1, updates)
        for i, address in ((0, x), (1, updates), (4, out)):
            self._combine.arguments.set_pointer(i, address)
        driver.fill_zero(self.counts.ptr, self.counts.nbytes, stream)
        for launch in self.launches:
            launch(stream.ptr)


def rows_of(eqn: Eqn) -> tuple[str, int] | None:
    """Reduction and row width of an equation on whole rows; None for any other."""
    if eqn.prim not in _WAYS or not takes(_WAYS[eqn.prim], eqn.invars[0].aval.dtype):
        return None
    x, indices, updates = (a.aval for a in eqn.invars)
    if indices.dtype not in (dtypes.int32, dtypes.int64):
        return None
    d = eqn.params["dimension_numbers"]
    rest = tuple(range(updates.ndim - (x.ndim - 1), updates.ndim))
    plain = (
        d.scatter_dims_to_operand_dims == (0,)
        and d.inserted_window_dims == (0,)
        and not d.operand_batching_dims
        and d.update_window_dims == rest
        and updates.shape[len(updates.shape) - len(rest) :] == x.shape[1:]
        and indices.shape[-1] == 1
        and x.size
        and updates.size
    )
    return (_WAYS[eqn.prim], x.size // x.shape[0]) if plain else None


_WAYS = {
    scatter_p: "set",
    scatter_add_p: "add",
    scatter_mul_p: "mul",
    scatter_max_p: "max",
    scatter_min_p: "min",
}


class RowScatter(LibraryKernel):
    """Updates of whole rows, combined in their order."""

    def matches(self, eqn: Eqn) -> bool:
        return rows_of(eqn) is not None

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        how, width = rows_of(step.eqn)  # type: ignore[misc]
        x, indices, _ = (a.aval for a in step.eqn.invars)
        return [text(how, x.dtype, indices.dtype, width, _clips(step.eqn))]

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        eqn = step.eqn
        how, width = rows_of(eqn)  # type: ignore[misc]
        x, indices, _ = (a.aval for a in eqn.invars)
        own = lambda shape, dtype: executor.own(ShapedArray(shape, dtype), "the order of a scatter")
        scatter = Scatter(
            how, x.dtype, indices.dtype, indices.size, x.shape[0], width, executor.device, own, _clips(eqn)
        )
        (result,) = step.results
        assert result is not None
        place = executor.roots.place(result)

        def run(executor: Executor) -> None:
            given = [o.buffer(executor) for o in operands]  # copies live until they have been read
            x, rows, updates = (b.ptr for b in given)
            scatter(x, rows, updates, executor.address(place), executor.work_stream())

        return Work(run, eqn.prim.name, step, anywhere=lambda: all(o.in_place for o in operands))


def _clips(eqn: Eqn) -> bool:
    """True if an index out of range means the nearest row."""
    return eqn.params["mode"] is GatherScatterMode.CLIP


def scatter(x: Any, rows: Any, updates: Any, how: str, dtype: np.dtype, library: Any, device: int) -> Any:
    """``x`` (height, width) with ``updates`` (n, width) combined into ``rows``.

    Args:
      x, updates: CuPy arrays, contiguous, holding the bits of ``dtype``.
      rows: CuPy array (n,) of int32 or int64; indices out of range are dropped.
      how: a key of ``_COMBINE``.
      library: CuPy, for memory.
    Returns:
      a CuPy array like ``x``.
    """
    own = lambda shape, of: _Array(library.xp.empty(shape, of))
    height, width = x.shape
    run = Scatter(how, dtype, rows.dtype, len(rows), height, width, device, own)
    out = library.xp.empty_like(x)
    at = [int(a.data.ptr) for a in (x, rows, updates, out)]
    run(at[0], at[1], at[2], at[3], driver.work_stream(device))
    return out


class _Array:
    """A CuPy array as scratch memory."""

    def __init__(self, array: Any):
        self.array, self.ptr, self.nbytes = array, int(array.data.ptr), array.nbytes


def text(how: str, dtype: np.dtype, index: np.dtype, width: int, clip: bool) -> tuple[str, str]:
    """The source that a ``Scatter`` compiles, and its name."""
    return source(how, dtype, index.name, _vector(width), clip), f"scatter_{how}"


def _vector(width: int) -> int:
    """Elements of a row per thread."""
    return next(v for v in (4, 2, 1) if width % v == 0)


def source(how: str, dtype: np.dtype, index: str, vector: int, clip: bool) -> str:
    """CUDA C++ of the kernels for a reduction, a dtype, and an index dtype."""
    sizes = source_files.declared(
        THREADS=_THREADS, SCAN_THREADS=_SCAN_THREADS, CHUNK=_CHUNK, VECTOR=vector, CLIP=clip,
        Index={"int32": "int", "int64": "long long"}[index],
        Storage=scalar_ops.storage_type(dtype), Wide=scalar_ops.register_type(dtype),
    )  # fmt: skip
    macros = {
        "LOADED(x)": scalar_ops.loaded("(x)", dtype),
        "STORED(x)": scalar_ops.stored("(x)", dtype),
        "COMBINED(acc, u)": _COMBINE[how],
    }
    return DEVICE.with_prelude(sizes + source_files.source(_FILE, **macros))


@functools.lru_cache(256)
def _functions(how: str, dtype: np.dtype, index: str, vector: int, clip: bool, device: int) -> dict[str, Any]:
    module = modules.module(source(how, dtype, index, vector, clip), device, f"scatter_{how}")
    return {name: module.kernel(name) for name in _NAMES}


def takes(how: str, dtype: np.dtype) -> bool:
    """True if the kernels support a dtype: complex has no order, keys no arithmetic."""
    if dtypes.is_key(dtype) or dtypes.is_bool(dtype):
        return False
    return not (dtypes.is_complex(dtype) and how in ("max", "min"))
