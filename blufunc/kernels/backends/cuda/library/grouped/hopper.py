"""Grouped GEMM for Hopper: TMA, warpgroup matmuls, persistent blocks.

Kernels, stages 6 and 8, with the source of ``include/grouped_gemm_sm90.cuh``, which describes the algorithm. In: the
sizes of a ``ragged_dot`` or ``ragged_contract``. Out: CUDA C++, and the boxes of its copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from blufunc.kernels.backends.cuda.device_model import SM_COUNT
from blufunc.kernels.backends.cuda.driver.tensor_map import Box
from blufunc.kernels.backends.cuda.library import mma, tile_gemm
from blufunc.kernels.codegen import source_files

FILE = "backends/cuda/include/grouped_gemm_sm90.cuh"

ENTRY = "grouped_gemm"

ROWS, TERMS, PANEL = 128, 64, 64
"""Rows of a tile, terms of a stage, and columns of a box whose rows are terms."""

VECTOR = 8
"""Alignment of rows of operands and results in elements: 16 bytes."""

MOST_PARTS = 4096
"""Maximum groups of all stacks, whose tiles are counted in shared memory."""

_STAGES = {128: 6, 192: 5, 256: 4}
"""By columns of a tile: as many as shared memory holds."""

_STEP, _ROW, _TILE = 4.0, 3.6, 150.0
"""Cycles of a stage: to multiply a column, to copy a row, and the rest.

For 64 terms at 2048 multiplications per cycle; for 128 bytes at 36 bytes per cycle, which an SM gets from L2 if all SMs
read; for a tile of 16 stages.
"""

_LONG = 1024
"""Rows of an average group from which clusters pay.

Half of their last tile may be empty. measured: 2 to 24% faster, or 8% slower where sizes are skewed (H100, 2026-11-27)
"""


@dataclass(frozen=True)
class GroupedGemm:
    """Sizes of a ``ragged_dot``: (stacks, m, k) by (matrices, groups, k, n).

    Attributes:
      matrices, bounds: stacks of the right operand and of the offsets, 1 or ``stacks``.
      summed: whether it is a ``ragged_contract``: (stacks, m, k), (stacks, m, n) to (stacks, groups, k, n).
      by_rows: whether the terms of the right operand are contiguous, not its columns.
      dtype: name of the operands' dtype.
      wide: whether results are float32.
      row, stack: strides of the left operand in elements.
      other_group, other_row, other_stack: of the right one; rows are terms or, if ``by_rows``, columns.
      columns: of a tile.
      cluster: blocks that share columns.
    """

    stacks: int
    m: int
    k: int
    n: int
    groups: int
    matrices: int
    bounds: int
    summed: bool
    by_rows: bool
    dtype: str
    wide: bool
    row: int
    stack: int
    other_group: int
    other_row: int
    other_stack: int
    columns: int = 256
    cluster: int = 1

    threads: ClassVar[int] = 384

    @property
    def parts(self) -> int:
        """Groups of all stacks, and the rows ahead of them and beyond."""
        return self.stacks * (self.groups + 2)

    @property
    def most_tiles(self) -> int:
        """Maximum number of tiles, whatever the sizes of groups, in clusters."""
        across, tall = -(-self.n // self.columns), ROWS * self.cluster
        if self.summed:
            return self.stacks * self.groups * -(-self.k // tall) * across
        return (self.stacks * (self.m // tall) + self.parts) * across

    def grid(self, sms: int) -> int:
        """Blocks of the grid; each computes several tiles."""
        return self.cluster * max(1, min(sms // self.cluster, self.most_tiles))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages, barriers, and the tiles of groups."""
        stages = _STAGES[self.columns]
        return stages * (2 * TERMS * (ROWS + self.columns) + 16) + 4 * self.parts * (not self.summed)

    def tiled(self) -> GroupedGemm:
        """With the estimated best columns and cluster."""
        per_group = self.k if self.summed else self.m // max(1, self.groups)
        cluster = 2 if per_group >= _LONG else 1

        def time(columns: int) -> float:
            tiles = replace(self, columns=columns, cluster=1).most_tiles
            if not self.summed:  # on average, the last tile of a group is half full
                tiles -= self.parts * -(-self.n // columns) // 2
            stage = max(_STEP * columns, _ROW * (ROWS + columns / cluster)) + _TILE
            return -(-tiles // SM_COUNT) * stage

        return replace(self, columns=min(_STAGES, key=lambda c: (time(c), -c)), cluster=cluster)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of both operands in elements, which are multiples of ``VECTOR``."""
        return self.row, self.stack, self.other_group, self.other_row, self.other_stack

    def boxes(self) -> tuple[Box, Box]:
        """Box of each operand per copy."""
        own = (2 * self.row, 2 * self.row, 2 * self.stack)
        other = (2 * self.other_group, 2 * self.other_row, 2 * self.other_stack)
        shared = PANEL, 1, TERMS // self.cluster, 1
        if self.summed:
            left = Box((self.k, 1, self.m, self.stacks), own, (PANEL, 1, TERMS, 1))
            return left, Box((self.n, 1, self.m, self.stacks), other, shared)
        left = Box((self.k, 1, self.m, self.stacks), own, (TERMS, 1, ROWS, 1))
        if self.by_rows:
            shared = TERMS, 1, self.columns // self.cluster, 1
            return left, Box((self.k, self.groups, self.n, self.matrices), other, shared)
        return left, Box((self.n, self.groups, self.k, self.matrices), other, shared)


def instructions(p: GroupedGemm) -> str:
    """The part of the source that is PTX, which tests replace on the host."""
    shared = mma.shared_instructions(p.dtype, p.columns, (p.summed, not p.by_rows))
    clusters = source_files.source(tile_gemm.FILE, "instructions")
    return shared + clusters + source_files.source(FILE, "instructions")


def source(p: GroupedGemm) -> str:
    """The complete CUDA C++ of one GEMM."""
    sizes = source_files.declared(
        STACKS=p.stacks, M=p.m, K=p.k, N=p.n, GROUPS=p.groups, MATRICES=p.matrices, BOUNDS=p.bounds, SUMMED=p.summed,
        BY_ROWS=p.by_rows, ROWS=ROWS, COLUMNS=p.columns, TERMS=TERMS, STAGES=_STAGES[p.columns], BAND=8,
        CLUSTER=p.cluster, THREADS=p.threads, WIDE=p.wide,
    )  # fmt: skip
    return sizes + instructions(p) + source_files.source(FILE, "gemm")
