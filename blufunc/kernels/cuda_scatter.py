"""Scatters on a CUDA device: rows of updates combined into rows of an array, in the order of the updates.

Kernels, stage 8, below ``cuda_library``. Which updates belong to a row is found by counting: how many there are of
each row, where each row's begin, and then every update finds its rank among those of its row. That order, and with it
the result, does not depend on which thread comes first; the integer atomics only count. Nothing waits for the host, so
that a graph can have it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from blufunc.core import dtypes
from blufunc.kernels import cuda_runtime, nvrtc, scalars
from blufunc.kernels.cuda_prelude import with_prelude

_COMBINE = {
    "set": "u",
    "add": "acc + u",
    "mul": "acc * u",
    "max": "(u != u || u > acc) ? u : acc",  # NaN stays: no number is greater
    "min": "(u != u || u < acc) ? u : acc",
}

_THREADS = 256
_SCAN_THREADS = 1024

_SOURCE = """\
// How many updates each row has; the place of an update among them, as it happens to come.
extern "C" __global__ void count(const {index} *rows, int *counts, int *place, int n, int height) {{
  int j = blockIdx.x * {threads} + threadIdx.x;
  if (j < n) place[j] = rows[j] >= 0 && rows[j] < height ? atomicAdd(&counts[rows[j]], 1) : -1;
}}

// Where the updates of each row begin, and after the last row where they end. One block.
extern "C" __global__ void begin(const int *counts, int *starts, int height) {{
  __shared__ int sums[{scan}];
  int t = threadIdx.x, each = (height + {scan} - 1) / {scan};
  int first = min(t * each, height), last = min(first + each, height), sum = 0;
  for (int r = first; r < last; ++r) sum += counts[r];
  sums[t] = sum;
  for (int step = 1; step < {scan}; step *= 2) {{
    __syncthreads();
    int before = t >= step ? sums[t - step] : 0;
    __syncthreads();
    sums[t] += before;
  }}
  int start = sums[t] - sum;
  for (int r = first; r < last; ++r) {{
    starts[r] = start;
    start += counts[r];
  }}
  if (t == {scan} - 1) starts[height] = sums[t];
}}

// The updates of each row side by side, in any order.
extern "C" __global__ void gather(const {index} *rows, const int *starts, const int *place, int *found, int n) {{
  int j = blockIdx.x * {threads} + threadIdx.x;
  if (j < n && place[j] >= 0) found[starts[rows[j]] + place[j]] = j;
}}

// And in their order: the rank of an update is the number of those before it.
extern "C" __global__ void rank(const {index} *rows, const int *starts, const int *place, const int *found,
                                int *order, int n) {{
  int j = blockIdx.x * {threads} + threadIdx.x;
  if (j >= n || place[j] < 0) return;
  int first = starts[rows[j]], last = starts[rows[j] + 1], before = 0;
  for (int k = first; k < last; ++k) before += found[k] < j;
  order[first + before] = j;
}}

// Each element of the result takes up its updates.
extern "C" __global__ void combine(const {type} *x, const {type} *updates, const int *starts, const int *order,
                                   {type} *out, long long size, int width) {{
  long long i = ((long long)blockIdx.x * {threads} + threadIdx.x) * {vector};
  if (i >= size) return;
  int row = int(i / width), column = int(i % width);
  {wide} acc[{vector}];
  for (int v = 0; v < {vector}; ++v) acc[v] = {loaded_x};
  for (int k = starts[row]; k < starts[row + 1]; ++k) {{
    const {type} *from = updates + (long long)order[k] * width + column;
    for (int v = 0; v < {vector}; ++v) {{
      {wide} u = {loaded_u};
      {wide} &acc_v = acc[v];
      acc_v = {combined};
    }}
  }}
  for (int v = 0; v < {vector}; ++v) out[i + v] = {stored};
}}
"""


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
    xp, (height, width), n = library.xp, x.shape, len(rows)
    vector = next(v for v in (4, 2, 1) if width % v == 0)
    functions = _functions(how, dtype, rows.dtype.name, vector, device)
    counts = xp.zeros(height, np.int32)
    starts = xp.empty(height + 1, np.int32)
    place, found, order = (xp.empty(max(n, 1), np.int32) for _ in range(3))
    out = xp.empty_like(x)
    stream = cuda_runtime.work_stream(device)
    at = lambda a: int(a.data.ptr)
    n_, height_ = np.int32(n), np.int32(height)
    each = (-(-n // _THREADS),)

    def launch(name: str, grid: tuple, block: int, *args: Any) -> None:
        functions[name].launch(grid, (block,), 0, args, stream)

    if n:
        launch("count", each, _THREADS, at(rows), at(counts), at(place), n_, height_)
    launch("begin", (1,), _SCAN_THREADS, at(counts), at(starts), height_)
    if n:
        launch("gather", each, _THREADS, at(rows), at(starts), at(place), at(found), n_)
        launch("rank", each, _THREADS, at(rows), at(starts), at(place), at(found), at(order), n_)
    blocks = (-(-x.size // (_THREADS * vector)),)
    arrays = (at(x), at(updates), at(starts), at(order), at(out))
    launch("combine", blocks, _THREADS, *arrays, np.int64(x.size), np.int32(width))
    return out


def source(how: str, dtype: np.dtype, index: str, vector: int) -> str:
    """The CUDA C++ of the kernels for one way to combine, one dtype, and indices of ``int32`` or ``int64``."""
    storage, wide = scalars.storage_type(dtype), scalars.register_type(dtype)
    text = _SOURCE.format(
        index={"int32": "int", "int64": "long long"}[index],
        type=storage,
        wide=wide,
        vector=vector,
        threads=_THREADS,
        scan=_SCAN_THREADS,
        loaded_x=scalars.loaded("x[i + v]", dtype),
        loaded_u=scalars.loaded("from[v]", dtype),
        combined=_COMBINE[how].replace("acc", "acc_v"),
        stored=scalars.stored("acc[v]", dtype),
    )
    return with_prelude(text)


@functools.lru_cache(256)
def _functions(how: str, dtype: np.dtype, index: str, vector: int, device: int) -> dict[str, Any]:
    arch = cuda_runtime.properties(device).arch
    module = cuda_runtime.Module(nvrtc.compile(source(how, dtype, index, vector), arch, f"scatter_{how}"))
    return {name: module.kernel(name) for name in ("count", "begin", "gather", "rank", "combine")}


def takes(how: str, dtype: np.dtype) -> bool:
    """Whether the kernels are written for a dtype: for complex numbers there is no order, and nothing for keys."""
    if dtypes.is_key(dtype) or dtypes.is_bool(dtype):
        return False
    return not (dtypes.is_complex(dtype) and how in ("max", "min"))
