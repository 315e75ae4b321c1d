"""Device parameters that passes and lowering consult.

Kernels, stages 5 and 6. In: nothing; each dialect makes one. Out: a ``Target``, which decides how rows are split and
which values are saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.machine import Machine
from blufunc.kernels.ops.convolution import Convolution
from blufunc.kernels.ops.gemm import overwritten_by
from blufunc.kernels.precision import ProductShape

_A_CPU = Machine("a CPU", bandwidth=2e10, flops=1e11, products=2e11)


@dataclass(frozen=True)
class Target:
    """Cost parameters and capabilities of a device.

    Attributes:
      chunks: from rows and lanes to the number of chunks of a reduction over rows.
      crowding: from the lanes of a row, and the values kept per lane, to a factor for the number of chunks; None: 1.
      summed_lanes: limit of the lanes of rows that are also reduced over rows where lanes are reduced, since partial
        results fit next to the row.
      total_chunks: from the elements of a reduction over everything to the number of chunks.
      tile_chunks: the number of chunks if no scalar of a whole row is needed, from the rows and the tiles of each;
        None: as ``chunks``.
      interleaved: whether chunks take rows in turns, so that rows that are read at the same time are adjacent;
        otherwise each takes consecutive rows.
      finish_bytes: limit of the chunks' results for one tile of columns, to be added up at the kernel's end.
      keep_bytes: limit of the part of its row that a grid point keeps between loops.
      keep_loads: whether loaded values are kept too; unnecessary with a cache.
      tile: limit of the columns that a chunk sums at a time.
      scan_tile: limit of the columns that a point scans, from row to row.
      wide_tile: from the number of elements to ``tile`` if elements are stored too; None: as ``tile``.
      batch_first: whether matmuls need dense batch axes.
      epilogues: whether matmuls can add to their result.
      convolutions: from a ``Convolution`` to whether a library computes it fast; None: there are no kernels for the
        forms of ``rewrites/convolutions``, and no equation takes them.
      splits: from an algorithm and a shape to whether it makes a float32 matmul faster, on tensor cores; None: there
        are none, and precisions that name an algorithm are computed as float32.
      partial_sums: from the shape of such a matmul and the terms of a chunk to its number of parallel partial sums.
      in_one_kernel: from the shape of a matmul of two float16 parts to the partial sums of the kernel for all of it; 0:
        there is none.
      pointwise_gemm: from a ``dot_pointwise`` equation to why there is no kernel for it; None if there is one.
      pointwise_seconds: from such an equation to its kernel's extra time relative to the library's matmul alone.
      matmul_seconds: from a matmul without batch axes to the time of the library's kernel; None: none are merged.
      row_seconds: from an equation of ``dot_rows_p`` to the time in which its kernel computes its rows; None if there
        is no kernel.
      rows_of_sums: from an equation to the rows of each partial column sum that its kernel can also write; 0: none.
      cache_bytes, cache_speedup: arrays up to that size are read again faster by that factor.
      scratch_bytes: from an opaque equation to its scratch memory, in bytes.
      overwritten: from an opaque equation in planned memory to its results and the operands that they may overwrite.
      native_windows: whether a reduction of windows has a form of its own; others are unrolled into pointwise work.
      in_order: whether an opaque equation needs its operands contiguous in memory.
      least_points: minimum points of a loop that runs in a kernel, point by point.
      selected_elements: elements, counting each operation's, up to which all branches are computed and one is selected.
      updates_in_place: minimum bytes of an array that dies with a ``dynamic_update_slice`` for this to be a step of its
        own; None: it never is.
      generated_columns: whether arrays that are generated from rows and columns are computed along columns, also by
        each reduction of one.
      joined_parts: whether a point stores an element of each of the equal parts that an array is joined from.
      group: whether structurally identical kernels on different arrays are launched as one.
      ordered: from the steps of a fusion to their best order; None: unchanged.
      recompute: whether cheap values are recomputed if memory is scarce.
      scarce_bytes: smallest peak at which memory is scarce.
      machine: the speed that weighs time against memory; not measured, so that programs are the same everywhere.
    """

    chunks: Callable[[int, int], int]
    total_chunks: Callable[[int], int]
    keep_bytes: int
    keep_loads: bool
    tile: int
    scan_tile: int = 512
    tile_chunks: Callable[[int, int], int] | None = None
    interleaved: bool = False
    finish_bytes: int = 0
    summed_lanes: int = sys.maxsize
    crowding: Callable[[int, int], int] | None = None
    wide_tile: Callable[[int], int] | None = None
    batch_first: bool = False
    epilogues: bool = False
    convolutions: Callable[[Convolution], bool] | None = None
    splits: Callable[[str, ProductShape], bool] | None = None
    partial_sums: Callable[[ProductShape, int], int] = lambda shape, chunk: 1
    in_one_kernel: Callable[[ProductShape], int] = lambda shape: 0
    pointwise_gemm: Callable[[Eqn], str | None] = lambda eqn: "the device has none"
    pointwise_seconds: Callable[[Eqn], float] = lambda eqn: 0.0
    matmul_seconds: Callable[[Eqn], float] | None = None
    row_seconds: Callable[[Eqn], float | None] = lambda eqn: None
    rows_of_sums: Callable[[Eqn], int] = lambda eqn: 0
    cache_bytes: int = 0
    cache_speedup: float = 1.0
    scratch_bytes: Callable[[Eqn], int] = lambda eqn: 0
    overwritten: Callable[[Eqn], list[tuple[int, int]]] = overwritten_by
    native_windows: Callable[[Eqn], bool] = lambda eqn: False
    in_order: Callable[[Eqn], bool] = lambda eqn: False
    least_points: int = 1
    selected_elements: int = 0
    updates_in_place: int | None = None
    generated_columns: bool = False
    joined_parts: bool = False
    group: bool = False
    ordered: Callable[[list[Any]], list[Any]] | None = None
    recompute: bool = False
    scarce_bytes: int = 0
    machine: Machine = _A_CPU
