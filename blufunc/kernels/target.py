"""What passes and lowering must know of the machine.

Kernels, stages 5 and 6. In: nothing; each dialect makes one. Out: a ``Target``, whose numbers decide how rows are cut
and what is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.machine import Machine
from blufunc.kernels.precision import ProductShape

_A_CPU = Machine("a CPU", bandwidth=2e10, flops=1e11, products=2e11)


@dataclass(frozen=True)
class Target:
    """What a lowering must know of the machine.

    Attributes:
      chunks: from the rows and the lanes of a reduction over rows to the number of chunks that rows are cut in.
      crowding: from the lanes of a row, and how many values are kept of each, to how many times as many chunks there
        are to be; None: one time.
      summed_lanes: up to how many lanes rows are also reduced over rows where their lanes meet, as what is found so far
        lies beside the row.
      total_chunks: from the elements of a reduction over everything to the number of chunks.
      tile_chunks: the same where no number of a whole row is needed, from the rows and the number of tiles that each is
        cut in; None: as ``chunks``.
      interleaved: whether chunks of rows take rows in turns, so that what all of them read at a time lies side by side;
        else each takes rows that follow each other.
      finish_bytes: up to how much chunks of rows find for one tile of columns, to be added up at the kernel's end.
      keep_bytes: how much a grid point may keep of its row between loops.
      keep_loads: whether what was read is kept too: not where a cache does that.
      tile: up to how many columns a chunk adds up at a time.
      scan_tile: up to how many columns a point scans, from row to row.
      wide_tile: from how many elements there are to the same, where elements are stored too; None: as ``tile``.
      batch_first: whether products want their batch axes side by side in memory.
      epilogues: whether products can add something to what they compute.
      splits: from an algorithm and a shape to whether a product of float32 is quicker by that, on tensor cores; None:
        there are none, and the precisions that name such an algorithm are computed as float32.
      partial_sums: from the shape of such a product and the most terms that it adds up at a time to how many sums of
        terms it is to compute side by side.
      in_one_kernel: from the shape of a product of two parts of float16 to how many sums of terms a kernel for all of
        it makes; 0 where there is none.
      pointwise_gemm: from a ``dot_pointwise`` equation to why there is no kernel for it; None if there is one.
      pointwise_seconds: from such an equation to how much longer its kernel takes than the library's matmul alone.
      rows_of_sums: from an equation to the rows of each partial column sum that its kernel can write as well; 0: none.
      cache_bytes, cache_speedup: of arrays up to that size, how many times as fast they are read again.
      scratch_bytes: from an equation that is a step of its own to the memory that it works in, in bytes.
      group: whether kernels that do the same to different arrays are launched as one.
      ordered: from the steps of a fusion to these in the order in which they are best; None: as they are.
      recompute: whether what is cheap to compute again is not kept for later, where memory is scarcer than time.
      scarce_bytes: from which peak on memory is scarce: smaller programs compute nothing again for its sake.
      machine: the speed that is taken for granted where time is weighed against memory. It is not measured, so that
        programs are the same wherever they are compiled.
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
    splits: Callable[[str, ProductShape], bool] | None = None
    partial_sums: Callable[[ProductShape, int], int] = lambda shape, chunk: 1
    in_one_kernel: Callable[[ProductShape], int] = lambda shape: 0
    pointwise_gemm: Callable[[Eqn], str | None] = lambda eqn: "the device has none"
    pointwise_seconds: Callable[[Eqn], float] = lambda eqn: 0.0
    rows_of_sums: Callable[[Eqn], int] = lambda eqn: 0
    cache_bytes: int = 0
    cache_speedup: float = 1.0
    scratch_bytes: Callable[[Eqn], int] = lambda eqn: 0
    group: bool = False
    ordered: Callable[[list[Any]], list[Any]] | None = None
    recompute: bool = False
    scarce_bytes: int = 0
    machine: Machine = _A_CPU
