"""Warp-specialized GEMM for Hopper with an overlapped epilogue.

Kernels, stages 6 and 8, above ``include/tile_gemm.cuh``, below ``pointwise_gemm`` and ``softmax_gemm``, which
bring their epilogues. In: the sizes of a GEMM and the source of an epilogue, or the operands of a step, which are read
in place where possible. Out: CUDA C++, and the addresses of operands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from blufunc.core.ir.jaxpr import Literal
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.driver.tensor_map import Box
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Strided, strided
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.codegen import source_files
from blufunc.kernels.codegen.source_files import Constant
from blufunc.kernels.schedule import OpaqueStep

FILE = "backends/cuda/include/tile_gemm.cuh"

ROWS, COLUMNS = 128, 192
"""Tile size. With more columns, accumulators leave no registers for the epilogue."""

EPILOGUE_WARPS = 7

VECTOR = 8
"""Alignment of the rows of operands and results in elements: 16 bytes."""

TERMS = 64
"""Terms of a stage."""

_STAGES = 4


@dataclass(frozen=True)
class TileGemm:
    """Sizes: (m, k) by (k, n).

    Attributes:
      by_rows: whether the terms of the right operand are contiguous, not its columns.
      cluster: blocks that share columns.
    """

    m: int
    n: int
    k: int
    by_rows: bool
    cluster: int = 2

    threads: ClassVar[int] = 512
    epilogue_bytes: ClassVar[int] = 0
    """Shared memory of the epilogue warps' own, after the barriers."""
    raster_bands: ClassVar[int] = 1
    """Tiles of a column of clusters that are computed before those of the next column.

    Their part of the right operand then stays in L2, which may not hold all of it.
    """

    @property
    def bands(self) -> int:
        """Rows of tiles of a cluster."""
        return self.m // (ROWS * self.cluster)

    @property
    def columns(self) -> int:
        """Columns of tiles; the last may be partial."""
        return -(-self.n // COLUMNS)

    @property
    def whole(self) -> bool:
        """True if rows fill whole tiles, and terms whole stages."""
        return self.k > 0 and not (self.m % (ROWS * self.cluster) or self.k % TERMS)

    def grid(self, sms: int) -> int:
        """Blocks of the grid: a cluster per tile; with fewer SMs, several tiles each."""
        return self.cluster * min(sms // self.cluster, self.bands * self.columns)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages, a padded tile, barriers, and the epilogue's."""
        tile = ROWS * (2 * COLUMNS + 16)
        return _STAGES * (ROWS + COLUMNS) * 2 * TERMS + tile + 8 * (2 * _STAGES + 2) + self.epilogue_bytes

    def boxes(self, row: int, other_row: int) -> tuple[Box, Box]:
        """Box of each operand per copy, for strides in bytes of rows (right: or terms)."""
        left = Box((self.k, 1, self.m, 1), (row,) * 3, (TERMS, 1, ROWS, 1))
        (size, rows), part = ((self.k, self.n), COLUMNS) if self.by_rows else ((self.n, self.k), TERMS)
        return left, Box((size, 1, rows, 1), (other_row,) * 3, (64, 1, part // self.cluster, 1))


def instructions(p: TileGemm) -> str:
    """The part of the source that is PTX, which tests replace on the host."""
    own = source_files.source(FILE, "instructions")
    return mma.shared_instructions("bfloat16", COLUMNS, (False, not p.by_rows)) + own


def source(p: TileGemm, epilogue: str, **constants: Constant) -> str:
    """The complete CUDA C++ of one GEMM.

    Args:
      epilogue: source of a structure derived from ``EpilogueHooks``, and of the kernel, which calls ``tile_gemm(a, b,
        epilogue)`` with its first two parameters, the maps of ``p.boxes``.
      constants: what the epilogue reads besides.
    """
    sizes = source_files.declared(
        M=p.m, N=p.n, K=p.k, ROWS=ROWS, COLUMNS=COLUMNS, TERMS=TERMS, STAGES=_STAGES,
        EPILOGUE_WARPS=EPILOGUE_WARPS, THREADS=p.threads, CLUSTER=p.cluster, BANDS=p.raster_bands,
        BY_ROWS=p.by_rows, **constants,
    )  # fmt: skip
    return sizes + instructions(p) + source_files.source(FILE, "gemm") + epilogue


def by_rows_of(step: OpaqueStep, n: int, contract: Sequence[int]) -> bool:
    """True if a factor of a step that is not loaded yet will be read by rows of terms."""
    atom, given = step.eqn.invars[n], step.operands[n]
    shape, chain = atom.aval.shape, [] if isinstance(given, Literal) else given[1]
    layout = strided(chain[0].invars[0].aval.shape if chain else shape, chain)
    return matrix_of(layout, shape, contract)[0]


class Factor:
    """A factor in place, if its rows or columns are contiguous, or as a dense copy.

    Attributes:
      by_rows: True if the contracted axes are contiguous.
      row: stride of the other axes, in elements.
    """

    def __init__(self, operand: Operand, contract: Sequence[int]):
        self._operand, self.copied = operand, False
        self.by_rows, self.row, in_place = matrix_of(operand.layout, operand.aval.shape, contract)
        if not in_place:
            self.copy(self.by_rows, self.row)

    def copy(self, by_rows: bool, row: int) -> None:
        """Read a dense copy."""
        self.copied, self.by_rows, self.row = not self._operand.in_place, by_rows, row

    def address(self, executor: Executor) -> tuple[int, DeviceBuffer | None]:
        """Address of its first element, and what must live until it is read."""
        return self._operand.located(executor, in_place=not self.copied)


def factors_of(
    operands: Sequence[Operand], contracts: Sequence[Sequence[int]], k: int
) -> tuple[Factor, Factor]:
    """Both factors of a GEMM of ``k`` terms, the left one by rows."""
    left, right = (Factor(o, own) for o, own in zip(operands, contracts, strict=True))
    if not left.by_rows:
        left.copy(by_rows=True, row=k)
    return left, right


def matrix_of(layout: Strided, shape: Sequence[int], contract: Sequence[int]) -> tuple[bool, int, bool]:
    """Matrix layout of an operand: ``(by_rows, row, in_place)``, as in ``Factor``.

    Where ``in_place`` is False, the layout is that of a dense copy.
    """
    contract = sorted(contract)
    free = [d for d in range(len(shape)) if d not in contract]
    terms, others = (_as_one(layout, axes) for axes in (contract, free))
    row = others if terms == 1 else terms
    if row is not None and 1 in (terms, others) and row > 0 and not (row % VECTOR or layout.offset % VECTOR):
        return terms == 1, row, True
    by_rows = 0 not in contract
    return by_rows, math.prod(shape[d] for d in (contract if by_rows else free)), False


def _as_one(layout: Strided, axes: Sequence[int]) -> int | None:
    """Stride of some axes in elements, if they are one axis in memory; else None."""
    own = [(layout.shape[d], layout.strides[d]) for d in axes if layout.shape[d] > 1]
    if any(stride != inner * n for (_, stride), (n, inner) in itertools.pairwise(own)):
        return None
    return own[-1][1] if own else 1
