"""Float32 GEMM on Hopper's tensor cores from two float16 parts.

Kernels, stages 5 to 8, above ``include/split_gemm.cuh``, which describes the algorithm. In: a ``split_dot`` equation.
Out: its cost, CUDA C++ and launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.backends.cuda.device_model import SM_BANDWIDTH, SM_COUNT
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.user_kernel import UserKernel
from blufunc.kernels.codegen import source_files
from blufunc.kernels.ops.split_dot import STEP, split_dot_p
from blufunc.kernels.precision import ProductShape
from blufunc.kernels.user_kernel import CudaSource

_FILE = "backends/cuda/include/split_gemm.cuh"

ROWS = 128
"""Rows of a tile: 64 per warpgroup."""

_STAGE_TERMS, _STAGES = 32, 5


@dataclass(frozen=True)
class SplitGemm:
    """Sizes: results (sums, m, n), of operands of m and n rows and k terms.

    Attributes:
      columns: of a tile.
      sums: number of results, each over a part of the terms (split-K).
      by_rows: of each operand, whether its terms are contiguous.
      group: consecutive tiles along m, with all along n, whose operands stay in L2.
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
        """One per tile of all sums; with fewer SMs, each block processes several tiles."""
        return -(-self.m // ROWS) * -(-self.n // self.columns) * self.sums

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block in bytes: stages, and two barriers for each."""
        return _STAGES * ((ROWS + self.columns) * 4 * _STAGE_TERMS + 16)


def source(p: SplitGemm) -> str:
    """The complete CUDA C++ of one GEMM."""
    sizes = source_files.declared(
        M=p.m, N=p.n, K=p.k, ROWS=ROWS, COLUMNS=p.columns, SUMS=p.sums, GROUP=p.group, STAGES=_STAGES,
        TERMS=_STAGE_TERMS, THREADS=p.threads, A_BY_ROWS=p.by_rows[0], B_BY_ROWS=p.by_rows[1],
    )  # fmt: skip
    return sizes + instructions(p) + source_files.source(_FILE)


def instructions(p: SplitGemm) -> str:
    """The part of the source that is PTX, which tests replace on the host."""
    turned = (not p.by_rows[0], not p.by_rows[1])
    return mma.shared_instructions("float16", p.columns, turned)


# -- the row ---------------------------------------------------------------------------------------

_LEAST = 64
"""Minimum rows of an operand, and terms: half a tile, below which it does not pay."""

_VECTOR = 8
"""Elements per copy."""

_STEP_TIME, _TILE_TIME = 1.4e-6, 4e-6
"""Seconds per tile of 192 columns: for one step of terms, and for the rest."""

_MOST_SUMS = 16


def sums_of(shape: ProductShape) -> int:
    """Number of partial sums (split-K) of Hopper's two-part kernel; 0 if unsupported.

    As many as fill all SMs with tiles; each sum is written and read back.
    """
    contiguous = [shape.k if rows else n for rows, n in zip(shape.by_rows, (shape.m, shape.n), strict=True)]
    if shape.batch != 1 or any(n % _VECTOR for n in (*contiguous, shape.n)):
        return 0
    if min(shape.m, shape.n, shape.k) < _LEAST:
        return 0
    columns = columns_of(shape.n)
    tiles = -(-shape.m // ROWS) * -(-shape.n // columns)
    steps = -(-shape.k // STEP)

    def seconds(sums: int) -> float:
        rounds = -(-tiles * sums // SM_COUNT)
        added = 4 * shape.m * shape.n * sums / (SM_BANDWIDTH * SM_COUNT) if sums > 1 else 0
        return rounds * (-(-steps // sums) * _STEP_TIME * columns / 192 + _TILE_TIME) + added

    return min(range(1, min(_MOST_SUMS, steps) + 1), key=seconds)


def columns_of(n: int) -> int:
    """Columns of a tile: as many as registers can accumulate, fewer for small ``n``."""
    return next((c for c in (64, 128) if n <= c), 192)


class SplitDot(UserKernel):
    """``split_dot`` by one launch."""

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim is split_dot_p

    def source_of(self, eqn: Eqn) -> CudaSource:
        lhs, _, rhs, *_ = (a.aval for a in eqn.invars)
        contracts, _ = eqn.params["dimension_numbers"]
        k = math.prod(lhs.shape[d] for d in contracts[0])
        m, n = lhs.size // k, rhs.size // k
        by_rows = (0 not in contracts[0], 0 not in contracts[1])
        made = SplitGemm(m, n, k, by_rows, columns_of(n), eqn.params["sums"])
        grid, block = (made.blocks, 1, 1), (made.threads, 1, 1)
        return CudaSource(source(made), "split_product", grid, block, made.shared_bytes, resident=True)
