"""Scatters on a CUDA device: rows of updates combined into rows of an array, in the order of the updates.

Kernels, stage 8, below ``cupy_ops``. Which updates belong to a row is found by counting: how many there are of
each row, where each row's begin, and then every update finds its rank among those of its row. That order, and where the
updates of a row are divided if it has very many, and with them the result, do not depend on which thread comes first;
the integer atomics only count. Nothing waits for the host, so that a graph can have it.
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
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.prelude import DEVICE
from blufunc.kernels.schedule import OpaqueStep

_NAMES = ("count", "begin", "gather", "rank", "partial", "combine")

_COMBINE = {
    "set": "u",
    "add": "acc + u",
    "mul": "acc * u",
    "max": "(u != u || u > acc) ? u : acc",  # NaN stays: no number is greater
    "min": "(u != u || u < acc) ? u : acc",
}

_ROW = {
    False: "return row >= 0 && row < height ? int(row) : -1;",
    True: "return row < 0 ? 0 : row < height ? int(row) : height - 1;",
}
"""The row of an update: by whether rows that there are not are the nearest that there is, or left out."""

_THREADS = 256
_SCAN_THREADS = 1024
_CHUNK = 64

_SOURCE = """\
// The row of an update, or -1 if there is no such row.
__device__ int row_of({index} row, int height) {{
  {row}
}}

// How many updates each row has; the place of an update among them, as it happens to come.
extern "C" __global__ void count(const {index} *rows, int *counts, int *place, int n, int height) {{
  int j = blockIdx.x * {threads} + threadIdx.x;
  if (j >= n) return;
  int row = row_of(rows[j], height);
  place[j] = row < 0 ? -1 : atomicAdd(&counts[row], 1);
}}

// Where the updates of each row begin, and after the last row where they end. One block.
extern "C" __global__ void begin(const int *__restrict__ counts, int *__restrict__ starts, int height) {{
  __shared__ int sums[{scan}];
  int t = threadIdx.x, each = (height + {scan} - 1) / {scan};
  int first = min(t * each, height), last = min(first + each, height), sum = 0;
  #pragma unroll 8  // a block is alone with all rows: what it waits for is memory
  for (int r = first; r < last; ++r) sum += counts[r];
  sums[t] = sum;
  for (int step = 1; step < {scan}; step *= 2) {{
    __syncthreads();
    int before = t >= step ? sums[t - step] : 0;
    __syncthreads();
    sums[t] += before;
  }}
  int start = sums[t] - sum;
  #pragma unroll 8
  for (int r = first; r < last; ++r) {{
    starts[r] = start;
    start += counts[r];
  }}
  if (t == {scan} - 1) starts[height] = sums[t];
}}

// The updates of each row side by side, in any order.
extern "C" __global__ void gather(const {index} *rows, const int *starts, const int *place, int *found, int n,
                                  int height) {{
  int j = blockIdx.x * {threads} + threadIdx.x;
  if (j < n && place[j] >= 0) found[starts[row_of(rows[j], height)] + place[j]] = j;
}}

// And in their order: the rank of an update is the number of those before it.
extern "C" __global__ void rank(const {index} *rows, const int *starts, const int *place, const int *found,
                                int *order, int n, int height) {{
  int j = blockIdx.x * {threads} + threadIdx.x;
  if (j >= n || place[j] < 0) return;
  int row = row_of(rows[j], height), first = starts[row], last = starts[row + 1], before = 0;
  for (int k = first; k < last; ++k) before += found[k] < j;
  order[first + before] = j;
}}

// What a row of very many updates would otherwise wait for, one after the other: the updates in each {chunk} places of
// the order are combined by themselves, where they are of one row.
extern "C" __global__ void partial(const {index} *rows, const {type} *updates, const int *starts, const int *order,
                                   {wide} *partials, long long size, int width, int height) {{
  long long i = ((long long)blockIdx.x * {threads} + threadIdx.x) * {vector};
  if (i >= size) return;
  int first = int(i / width) * {chunk}, column = int(i % width);
  if (first + {chunk} > starts[height]) return;
  if (row_of(rows[order[first]], height) != row_of(rows[order[first + {chunk} - 1]], height)) return;
  {wide} acc[{vector}];
  #pragma unroll 8  // the additions wait for each other; what they add need not
  for (int k = first; k < first + {chunk}; ++k) {{
    const {type} *from = updates + (long long)order[k] * width + column;
    for (int v = 0; v < {vector}; ++v) {{
      {wide} u = {loaded_u};
      {wide} &acc_v = acc[v];
      acc_v = k == first ? u : {combined};
    }}
  }}
  for (int v = 0; v < {vector}; ++v) partials[i + v] = acc[v];
}}

// Each element of the result takes up its updates: those before the first whole chunk, chunks, and those after.
extern "C" __global__ void combine(const {type} *x, const {type} *updates, const int *starts, const int *order,
                                   {type} *out, const {wide} *partials, long long size, int width) {{
  long long i = ((long long)blockIdx.x * {threads} + threadIdx.x) * {vector};
  if (i >= size) return;
  int row = int(i / width), column = int(i % width);
  {wide} acc[{vector}];
  for (int v = 0; v < {vector}; ++v) acc[v] = {loaded_x};
  int begin = starts[row], end = starts[row + 1];
  int chunk = (begin + {chunk} - 1) / {chunk}, chunks = end / {chunk};  // whole ones
  int upto = chunk < chunks ? chunk * {chunk} : end;
  for (int part = 0; part < 2; ++part) {{
    #pragma unroll 8
    for (int k = begin; k < upto; ++k) {{
      const {type} *from = updates + (long long)order[k] * width + column;
      for (int v = 0; v < {vector}; ++v) {{
        {wide} u = {loaded_u};
        {wide} &acc_v = acc[v];
        acc_v = {combined};
      }}
    }}
    #pragma unroll 8
    for (; chunk < chunks; ++chunk)
      for (int v = 0; v < {vector}; ++v) {{
        {wide} u = partials[(long long)chunk * width + column + v];
        {wide} &acc_v = acc[v];
        acc_v = {combined};
      }}
    begin = upto < end ? chunks * {chunk} : end;
    upto = end;
  }}
  for (int v = 0; v < {vector}; ++v) out[i + v] = {stored};
}}
"""


Own = Callable[[tuple[int, ...], np.dtype], Any]


class Scatter:
    """A scatter of ``n`` rows of ``width`` into ``height`` rows, with its scratch memory and its launches.

    Args:
      how: a key of ``_COMBINE``.
      dtype: that of the array and the updates.
      index: that of the row numbers, int32 or int64.
      clip: whether rows that there are not are the nearest that there is; else they are left out.
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
    """For an equation that combines whole rows at plain row numbers: how, and the width of a row; else None."""
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
    """Whether an index out of range means the nearest row."""
    return eqn.params["mode"] is GatherScatterMode.CLIP


def scatter(x: Any, rows: Any, updates: Any, how: str, dtype: np.dtype, library: Any, device: int) -> Any:
    """``x`` (height, width) with the ``updates`` (n, width) combined into ``rows`` (n), in their order.

    Args:
      x, updates: CuPy arrays, contiguous, holding the bits of ``dtype``.
      rows: CuPy array of int32 or int64; rows that there are not are left out.
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
    """The source that a ``Scatter`` asks for, and its name."""
    return source(how, dtype, index.name, _vector(width), clip), f"scatter_{how}"


def _vector(width: int) -> int:
    """How many elements of a row a thread takes."""
    return next(v for v in (4, 2, 1) if width % v == 0)


def source(how: str, dtype: np.dtype, index: str, vector: int, clip: bool) -> str:
    """The CUDA C++ of the kernels for one way to combine, one dtype, and indices of ``int32`` or ``int64``."""
    storage, wide = scalar_ops.storage_type(dtype), scalar_ops.register_type(dtype)
    text = _SOURCE.format(
        index={"int32": "int", "int64": "long long"}[index],
        row=_ROW[clip],
        type=storage,
        wide=wide,
        vector=vector,
        threads=_THREADS,
        scan=_SCAN_THREADS,
        chunk=_CHUNK,
        loaded_x=scalar_ops.loaded("x[i + v]", dtype),
        loaded_u=scalar_ops.loaded("from[v]", dtype),
        combined=_COMBINE[how].replace("acc", "acc_v"),
        stored=scalar_ops.stored("acc[v]", dtype),
    )
    return DEVICE.with_prelude(text)


@functools.lru_cache(256)
def _functions(how: str, dtype: np.dtype, index: str, vector: int, clip: bool, device: int) -> dict[str, Any]:
    module = modules.module(source(how, dtype, index, vector, clip), device, f"scatter_{how}")
    return {name: module.kernel(name) for name in _NAMES}


def takes(how: str, dtype: np.dtype) -> bool:
    """Whether the kernels are written for a dtype: for complex numbers there is no order, and nothing for keys."""
    if dtypes.is_key(dtype) or dtypes.is_bool(dtype):
        return False
    return not (dtypes.is_complex(dtype) and how in ("max", "min"))
