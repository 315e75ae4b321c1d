"""Scans of columns as CUDA C++: the rows of a tile of columns, many at a time.

Kernels, stage 6, beside ``cuda_style.py``. Where rows follow one another, their lanes do not meet. So a block takes a
tile of 32 columns, each of which is a lane of its warps. In each turn a warp reads some rows, all at once, and combines
them down each column; warps combine theirs through shared memory, and what all have combined is carried to the next
turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from blufunc.kernels import scalars
from blufunc.kernels.cstyle import written_in
from blufunc.kernels.cuda_limits import HOPPER, SM_COUNT, UNASKED_BYTES, Limits
from blufunc.kernels.cuda_scans import REDUCERS
from blufunc.kernels.cuda_schedule import Schedule
from blufunc.kernels.cuda_style import CudaStyle
from blufunc.kernels.cuda_vectors import Vectors, vectors_of
from blufunc.kernels.indices import Range
from blufunc.kernels.loopir import (
    Accumulate,
    Keep,
    Kernel,
    Lanes,
    Rows,
    Store,
    identity,
    post_order,
    values_of,
)
from blufunc.kernels.scalars import bare

_WARP = 32

_ROWS = 8
"""Rows that a warp reads at once."""

_WARPS = 16, 32
"""Warps of a block where there is one for each multiprocessor, and where there is not."""

_REGISTERS, _OTHER_REGISTERS = 1 << 16, 40
"""Registers of a block, and those that a thread needs beside the rows that it has at once."""


def scans_columns(kernel: Kernel) -> bool:
    """Whether rows follow one another in all that a kernel does, and what they accumulate is read in them."""
    if kernel.finish or not kernel.body or not isinstance(kernel.body[0], Rows):
        return False
    rows, *rest = kernel.body
    if any(not isinstance(s, Lanes) for s in (*rows.body, *rest)) or len(rows.body) > 1 or len(rest) > 1:
        return False
    (lanes,) = rows.body
    if any(not isinstance(s, (Accumulate, Store)) for s in lanes.body):
        return False
    scanned = _scanned(lanes)
    if any(not isinstance(t, Store) or _reads([t]) & scanned.keys() for s in rest for t in s.body):
        return False
    return rows.index.bounds()[1] < rows.limit and bool(scanned)


def _scanned(lanes: Lanes) -> dict[Keep, None]:
    """What rows accumulate and read, in order."""
    reads = _reads(lanes.body)
    return {s.keep: None for s in lanes.body if isinstance(s, Accumulate) and s.keep in reads}


def _reads(body: Sequence[Any]) -> set[Keep]:
    values = post_order([v for s in body for v in values_of(s)])
    return {v.attr for v in values if v.op == "read" and isinstance(v.attr, Keep)}


class ColumnStyle(CudaStyle):
    """Writes kernels that ``scans_columns`` finds."""

    def __init__(self, kernel: Kernel, aliased: Collection[str] = (), limits: Limits = HOPPER):
        super().__init__(kernel, aliased, limits)
        rows = self.kernel.body[0]
        (self.lanes_of_row,) = rows.body
        self.cut = self.cuts[self.lanes_of_row.range]
        self.tiles = -(-self.cut.range.extent // _WARP)
        self.scanned = _scanned(self.lanes_of_row)
        crowded = int(len(self.scanned) > 2)  # compilers would rather spill than have one block alone
        self.schedule = Schedule(_WARP, sharing=self._warps(rows.range.extent), resident=crowded)
        self.turn, self.row_of_turn = "", ""
        self.there = ""  # the condition that a thread's column is one of the row's, if that is not known

    def _warps(self, rows: int) -> int:
        """Warps of a block: no more than there are rows, registers and shared memory for."""
        sizes = {keep: max(4, keep.dtype.itemsize) for keep in self.cut_of_keep}
        # beside the rows of each scan, half as much for what is computed of them
        registers = _OTHER_REGISTERS + 3 * sum(_ROWS * sizes[keep] // 4 for keep in self.scanned) // 2
        shared = _WARP * sum(sizes[keep] * (1 + (keep in self.scanned)) for keep in sizes)
        room = min(_REGISTERS // (_WARP * registers), UNASKED_BYTES // shared)
        room = room // 4 * 4  # as they are handed out
        return max(1, min(_WARPS[self.blocks < SM_COUNT], -(-rows // _ROWS), room))

    def cuts_of(self, kernel: Kernel) -> dict[Range, Vectors]:
        return {s.range: vectors_of(s.range, 1) for s in kernel.statements() if isinstance(s, Lanes)}

    @property
    def blocks(self) -> int:
        """A block for each tile."""
        return self.tiles * self.kernel.points

    def grid(self) -> None:
        k, lanes = self.cut.vector, self.cut.range.extent
        self.line(f"const int thread = threadIdx.x % {_WARP}, group = threadIdx.x / {_WARP};")
        for n, r in enumerate(self.kernel.grid):
            below = self.tiles * math.prod(x.extent for x in self.kernel.grid[n + 1 :])
            self.line(f"const {self.index_type} {self.variable(r)} = blockIdx.x / {below}u % {r.extent}u;")
        tile = f"blockIdx.x % {self.tiles}u * {_WARP} + " if self.tiles > 1 else ""
        self.line(f"const {self.index_type} {self.variable(k)} = {tile}thread;")
        self.scope.ranges |= {*self.kernel.grid, k}
        if lanes % _WARP:
            self.there = f"{self.variable(k)} < {lanes}"
        rows, *rest = self.kernel.body
        self.scanned_rows(rows)
        for s in rest:
            self._results(s)

    def scanned_rows(self, s: Rows) -> None:
        """All rows, some of each warp in a turn."""
        groups, writes = self.schedule.sharing, written_in(s.body)
        rest = [x for x in self.lanes_of_row.body if isinstance(x, Store) or x.keep not in self.scanned]
        exchanges = {x.keep: x for x in self.lanes_of_row.body if isinstance(x, Accumulate) and x not in rest}
        carries: dict[Keep, tuple[str, str]] = {}
        for keep in self.cut_of_keep:
            kind, name = scalars.register_type(keep.dtype), self.name(keep, keep.name)
            start = scalars.literal(identity(keep.op or "", keep.dtype), keep.dtype)
            if keep in exchanges:
                carry, memory = self.fresh(f"{name}_carry"), self.fresh(f"{name}_shared")
                carries[keep] = carry, memory
                self.line(f"{kind} {carry} = {start};")
                self.line(f"__shared__ {kind} {memory}[2][{groups * _WARP}];")
            else:
                self.line(f"{kind} {name} = {start};")
        step, extent = groups * _ROWS, s.range.extent
        self.turn, self.row_of_turn = self.fresh("turn"), self.fresh("row")
        with self.block(
            [f"for (int {self.turn} = 0; {self.turn} < {-(-extent // step)}; ++{self.turn})"], (), writes
        ):
            for keep, x in exchanges.items():
                kind, name = scalars.register_type(keep.dtype), self.named[keep]
                start = scalars.literal(identity(x.keep.op or "", keep.dtype), keep.dtype)
                carry, memory = carries[keep]
                self.line(f"{kind} {name}[{_ROWS}];")
                each = functools.partial(self._take, x)
                self._rows_of_turn(s, writes, each, f"{name}[{self.row_of_turn}] = {start};")
                call = f"column_scan<{REDUCERS[keep.op or '']}, {groups}>"
                self.line(f"{call}({name}, {carry}, {memory}[{self.turn} & 1]);")
            if rest:
                self._rows_of_turn(s, writes, lambda: self.vector(self.cut, rest))

    def _rows_of_turn(self, s: Rows, writes: set, each: Callable[[], None], first: str = "") -> None:
        """A loop over the rows of a warp in a turn; ``first`` is a line for those too that are none."""
        i, j, step = self.row_of_turn, self.variable(s.range), self.schedule.sharing * _ROWS
        ragged = [f"{j} < {s.range.extent}"] if s.range.extent % step else []
        inside = " && ".join([*ragged, *[self.there] * bool(self.there)])
        with self.block(["#pragma unroll", f"for (int {i} = 0; {i} < {_ROWS}; ++{i})"], (), writes):
            self.line(
                f"const {self.index_type} {j} = ({self.turn} * {self.schedule.sharing} + group) * {_ROWS} + {i};"
            )
            if first and inside:
                self.line(first)
            with self.block([f"if ({inside})" if inside else ""], [s.range], writes):
                each()

    def _take(self, s: Accumulate) -> None:
        """The value of a row, before it is combined with others."""
        self.inner, outside = self.cut, self.inner
        value = bare(self.value(s.value))
        if s.value.dtype != s.keep.dtype:
            value = f"{scalars.register_type(s.keep.dtype)}({value})"
        self.line(f"{self.read_keep(s.keep)} = {value};")
        self.inner = outside

    def read_keep(self, keep: Keep) -> str:
        return f"{self.named[keep]}[{self.row_of_turn}]" if keep in self.scanned else self.named[keep]

    def _results(self, s: Lanes) -> None:
        """What is stored of the sums of whole columns: those of all warps, in their order."""
        sums = [keep for keep in self.cut_of_keep if keep not in self.scanned]
        for keep in sums:
            name, memory = self.named[keep], self.fresh(f"{self.named[keep]}_shared")
            kind, groups = scalars.register_type(keep.dtype), self.schedule.sharing
            self.line(f"__shared__ {kind} {memory}[{groups * _WARP}];")
            self.line(f"{name} = column_reduce<{REDUCERS[keep.op or '']}, {groups}>({name}, {memory});")
        inside = ["group == 0", *[self.there] * bool(self.there)]
        with self.block([f"if ({' && '.join(inside)})"], (), written_in(s.body)):
            self.vector(self.cut, s.body)
