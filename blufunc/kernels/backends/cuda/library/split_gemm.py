"""Float32 GEMM on Hopper's tensor cores: sizes and source.

Kernels, stage 6, above ``include/split_gemm.cuh``, which says how it works, below ``matmul``. In: the sizes of a GEMM.
Out: CUDA C++.
"""

from __future__ import annotations

from dataclasses import dataclass

from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.codegen import source_files

_FILE = "backends/cuda/include/split_gemm.cuh"

ROWS = 128
"""Of a tile: 64 for each group."""

STEP = 64
"""How many terms are added up on tensor cores at a time: two stages."""

_STAGE_TERMS, _STAGES = 32, 5


@dataclass(frozen=True)
class SplitGemm:
    """Sizes: results (sums, m, n), of operands of m and n rows and k terms.

    Attributes:
      columns: of a tile.
      sums: how many results there are, each of a part of the terms.
      by_rows: of each operand, whether its terms lie side by side.
      group: how many tiles along m, with all along n, follow each other: what they read stays in the second-level
        cache.
    """

    m: int
    n: int
    k: int
    by_rows: tuple[bool, bool]
    columns: int = 192
    sums: int = 1
    group: int = 8

    threads = 384

    @property
    def blocks(self) -> int:
        """As many as there are tiles of all sums; with fewer, each has several tiles."""
        return -(-self.m // ROWS) * -(-self.n // self.columns) * self.sums

    @property
    def shared_bytes(self) -> int:
        """Of a block: stages, and two barriers for each."""
        return _STAGES * ((ROWS + self.columns) * 4 * _STAGE_TERMS + 16)


def source(p: SplitGemm) -> str:
    """The complete CUDA C++ of one product."""
    sizes = source_files.declared(
        M=p.m, N=p.n, K=p.k, ROWS=ROWS, COLUMNS=p.columns, SUMS=p.sums, GROUP=p.group, STAGES=_STAGES,
        TERMS=_STAGE_TERMS, THREADS=p.threads, A_BY_ROWS=p.by_rows[0], B_BY_ROWS=p.by_rows[1],
    )  # fmt: skip
    return sizes + instructions(p) + source_files.source(_FILE)


def instructions(p: SplitGemm) -> str:
    """The part of the source that is PTX, which tests replace on the host."""
    turned = (not p.by_rows[0], not p.by_rows[1])
    return mma.shared_instructions("float16", p.columns, turned)
