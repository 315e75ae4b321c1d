"""Tiles of loop kernels, and when one kernel pays.

Kernels, stage 5, between ``cell`` and ``source``. In: a ``Cell``. Out: a ``Tiling``, or why there is none. Constants
are those of an H200, so that plans are the same wherever they are compiled.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.device_model import SHARED_BYTES, SM_COUNT
from blufunc.kernels.backends.cuda.library.loops.cell import Cell, Product

THREADS = 256
"""Threads of a block: one block per SM."""

WARPS = THREADS // 32

LEAST_STEPS = 4
"""Minimum steps: loading the weights costs as much as some steps."""

MOST_REGISTERS, MOST_STATE = 100, 64
"""Registers of a thread for all scalars of its elements, and for carries."""

KEPT_REGISTERS = 64
"""Registers of a thread for weights; more weights go to shared memory."""

MOST_DEPTH = 8
"""Most steps whose inputs are loaded at a time: a load takes as long as several."""

LINE = 128
"""Bytes between the counters of different rows."""

# seconds of a step, on an H200
BARRIER_SECONDS, MATMUL_SECONDS, ELEMENT_SECONDS = 1.1e-6, 0.9e-6, 0.1e-6
"""Of a level between blocks, a matmul's latencies, and a thread's element."""
UNHELD_SECONDS = 0.05e-6
"""Of an element whose scalars are not held, times the elements of a thread."""
SETUP_SECONDS = 1e-5
"""Of loading the weights, once."""
BLOCK_BANDWIDTH, SHARED_BANDWIDTH = 9e10, 2.1e11
"""Bytes per second of one SM from L2, and from shared memory."""
TENSOR_RATE, FLOAT_RATE = 3e12, 3e11
"""Operations per second of one SM, of matmuls in this kernel."""
NODE_SECONDS, GEMM_SECONDS = 1.2e-6, 5e-6
"""Of a node of a graph, and of a small matmul by the library."""


@dataclass(frozen=True)
class ProductTiling:
    """The part of a matmul that a block computes.

    Attributes:
      terms: padded.
      columns: of the block.
      split: warps that share a column.
      kept: weights are in registers, not in shared memory.
      itemsize: bytes of an element.
    """

    terms: int
    columns: int
    split: int
    kept: bool
    itemsize: int

    @property
    def tiles(self) -> int:
        """Tiles of 8 columns of a warp."""
        return -(-self.columns // (8 * (WARPS // self.split)))

    @property
    def registers(self) -> int:
        """Registers of a thread for weights."""
        return self.terms // (32 * self.split) * self.tiles * 4 if self.kept else 0

    @property
    def weight_bytes(self) -> int:
        """Shared memory for weights."""
        return 0 if self.kept else self.terms * self.columns * self.itemsize

    @property
    def pitch(self) -> int:
        """Elements between rows of partial sums, as in ``loop_kernel.cuh``."""
        return self.columns if self.columns // 8 % 2 else self.columns + 8


@dataclass(frozen=True)
class Tiling:
    """Blocks of a kernel.

    Attributes:
      rows, units: of a block.
      bands, blocks: number of blocks along rows, and along units.
      products: the matmuls' parts.
      depth: steps whose inputs are loaded at a time; 1 with matmuls.
      held: inputs of the next step and outputs of the previous one are in registers while blocks wait for each other,
        as are constants; otherwise they are loaded and stored where they are used.
      seconds: estimated time of a step.
    """

    rows: int
    units: int
    bands: int
    blocks: int
    products: tuple[ProductTiling, ...]
    held: bool
    seconds: float = 0.0
    depth: int = 1

    @property
    def elements(self) -> int:
        """Rows and units of a thread."""
        return -(-self.rows * self.units // THREADS)

    @property
    def grid(self) -> int:
        """Number of blocks."""
        return self.bands * self.blocks

    @property
    def starts(self) -> list[int]:
        """Offsets in shared memory.

        They are those of each matmul's weights, of each one's partial sums, of staged rows, and the end.
        """
        sizes = [p.weight_bytes for p in self.products]
        partial = [4 * p.split * self.rows * p.pitch for p in self.products]
        return list(itertools.accumulate([*sizes, *partial, 4 * WARPS * self.stage], initial=0))

    @property
    def stage(self) -> int:
        """Elements of left operands that a warp stages in shared memory."""
        sizes = (self.rows * (p.terms // WARPS + 4) for p in self.products if p.itemsize == 4)
        return max(sizes, default=0)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self.starts[-1]

    @property
    def waits(self) -> bool:
        """True if blocks wait for each other."""
        return self.blocks > 1 and bool(self.products)

    @property
    def counter_bytes(self) -> int:
        """Scratch memory for counters, which precede left operands."""
        return LINE * self.bands if self.waits else 0

    @property
    def left_starts(self) -> list[int]:
        """Offsets in scratch memory of the left operands, two buffers each, and the end."""
        sizes = [2 * self.bands * self.rows * p.terms * p.itemsize for p in self.products]
        return list(itertools.accumulate(sizes, initial=self.counter_bytes))


def tiling_of(cell: Cell) -> Tiling | str:
    """The fastest tiling of a cell, or why one kernel does not pay."""
    if cell.steps < LEAST_STEPS:
        return f"it has {cell.steps} steps"
    if not cell.products:
        return _without_matmuls(cell)
    heights = [16 * m for m in (1, 2, 4, 8) if m == 1 or 8 * m < cell.rows]
    widths = [u for u in (8, 16, 32, 64, 128, 256) if u == 8 or u < 2 * cell.units]
    sizes = itertools.product(heights, widths, (8, 4, 2, 1))
    found = [t for size in sizes if (t := tiling_with(cell, *size)) is not None]
    if not found:
        return "its weights and state do not fit on chip"
    best = min(found, key=lambda t: t.seconds)
    seconds, stepwise = best.seconds + SETUP_SECONDS / cell.steps, stepwise_seconds(cell)
    if seconds > stepwise:
        return (
            f"a step is estimated to take {seconds * 1e6:.1f} us in it, and {stepwise * 1e6:.1f} us otherwise"
        )
    return best


def _without_matmuls(cell: Cell) -> Tiling:
    """A thread for each row and unit; blocks do not wait for each other."""
    units = min(THREADS, 1 << (cell.units - 1).bit_length())
    rows = THREADS // units
    depth = max(1, min(MOST_DEPTH, MOST_STATE // (2 * max(1, len(cell.inputs))), cell.steps // 2))
    bands, blocks = -(-cell.rows // rows), -(-cell.units // units)
    return Tiling(rows, units, bands, blocks, (), held=True, depth=depth)


def tiling_with(cell: Cell, rows: int, units: int, split: int = WARPS) -> Tiling | None:
    """A tiling with blocks of some size; None if it does not fit.

    Args:
      split: most warps that share a column.
    """
    bands, blocks = -(-cell.rows // rows), -(-cell.units // units)
    if bands * blocks > SM_COUNT:
        return None
    products: list[ProductTiling] = []
    left = KEPT_REGISTERS
    for p in cell.products:
        made = _product(p, p.columns // cell.units * units, cell.dtype.itemsize, rows, split, left)
        if made is None:
            return None
        left -= made.registers
        products.append(made)
    t = Tiling(rows, units, bands, blocks, tuple(products), held=True)
    t = replace(t, held=t.elements * cell.registers <= MOST_REGISTERS)
    state = t.elements * sum(a.groups for a in cell.carries)
    if t.shared_bytes > SHARED_BYTES - 1024 or state > MOST_STATE:
        return None
    return replace(t, seconds=_seconds(cell, t))


def _product(
    p: Product, columns: int, itemsize: int, rows: int, split: int, registers: int
) -> ProductTiling | None:
    """The part of a matmul of a block."""
    if itemsize == 4:
        across = math.gcd(columns, 32)
        if columns // across * rows * across // 32 > 64 or split < WARPS:
            return None
        return ProductTiling(-(-p.terms // 32) * 32, columns, WARPS, False, 4)
    split = next(s for s in (8, 4, 2, 1) if s == 1 or (s <= split and 32 * s <= p.terms))
    terms = -(-p.terms // (32 * split)) * 32 * split
    made = ProductTiling(terms, columns, split, True, 2)
    if max(1, rows // 64) * made.tiles > 16:
        return None
    return made if made.registers <= registers else replace(made, kept=False)


def _seconds(cell: Cell, t: Tiling) -> float:
    """Estimated time of a step in one kernel."""
    total = cell.levels * (BARRIER_SECONDS if t.blocks > 1 else 0) + len(t.products) * MATMUL_SECONDS
    for p in t.products:
        total += t.rows * p.terms * p.itemsize * (WARPS // p.split) / BLOCK_BANDWIDTH
        total += (p.weight_bytes + 8 * p.split * t.rows * p.columns) / SHARED_BANDWIDTH
        rate = TENSOR_RATE if p.itemsize == 2 else FLOAT_RATE
        total += 2 * t.rows * p.terms * p.columns / rate
    accesses = sum(a.groups for a in cell.outputs) + len(cell.inputs)
    seconds = ELEMENT_SECONDS if t.held else UNHELD_SECONDS * t.elements
    return total + t.elements * seconds * (1 + accesses / 8)


def stepwise_seconds(cell: Cell) -> float:
    """Estimated time of a step by kernels of its own."""
    nodes = 1 + len(cell.outputs)
    flops = sum(2 * cell.rows * p.terms * p.columns for p in cell.products)
    rate = 5e13 if cell.dtype == dtypes.float32 else 2e14
    return nodes * NODE_SECONDS + len(cell.products) * GEMM_SECONDS + flops / rate
