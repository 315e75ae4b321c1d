"""Column scans as CUDA C++: many rows of a tile of columns at a time.

Kernels, stage 6. In: a ``ScheduledKernel`` of kind "column scan". Out: the source of its function. Rows are sequential
and lanes are independent. So a block has a tile of columns, one per lane of its warps. In each turn a warp reads some
rows at once and combines them down each column. Warps combine theirs through shared memory, and the result carries
over to the next turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from blufunc.kernels.backends.cuda.device_model import SCANNED_ROWS, WARP
from blufunc.kernels.backends.cuda.render.lane_scans import REDUCERS
from blufunc.kernels.backends.cuda.render.writer import CudaWriter
from blufunc.kernels.backends.cuda.schedule.kinds import scanned_keeps
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.c_renderer import as_type, start_of, written_in
from blufunc.kernels.loopir.ir import Accumulate, Keep, Lanes, Rows, Store


class ColumnScanRenderer(CudaWriter):
    """Renderer of column scans.

    Attributes:
      turn, row_of_turn: variables of the loops over turns, and over a warp's rows in a turn.
      there: bounds check of a thread's column; empty if always in bounds.
    """

    def __init__(self, scheduled: ScheduledKernel):
        super().__init__(scheduled)
        (self.lanes_of_row,) = self.kernel.body[0].body
        self.cut = self.cuts[self.lanes_of_row.range]
        self.scanned = scanned_keeps(self.lanes_of_row)
        self.turn = self.row_of_turn = self.there = ""

    def grid(self) -> None:
        k, lanes = self.cut.vector, self.cut.range.extent
        tiles = -(-lanes // WARP)
        self.line(f"const int thread = threadIdx.x % {WARP}, group = threadIdx.x / {WARP};")
        for n, r in enumerate(self.kernel.grid):
            inner = tiles * math.prod(x.extent for x in self.kernel.grid[n + 1 :])
            self.line(f"const {self.index_type} {self.variable(r)} = blockIdx.x / {inner}u % {r.extent}u;")
        tile = f"blockIdx.x % {tiles}u * {WARP} + " if tiles > 1 else ""
        self.line(f"const {self.index_type} {self.variable(k)} = {tile}thread;")
        self.scope.ranges |= {*self.kernel.grid, k}
        if lanes % WARP:
            self.there = f"{self.variable(k)} < {lanes}"
        rows, *rest = self.kernel.body
        self._scanned_rows(rows)
        for s in rest:
            self._results(s)

    def _scanned_rows(self, s: Rows) -> None:
        """Loop over all rows, some per warp in each turn."""
        groups, writes = self.mapping.sharing, written_in(s.body)
        scans = {
            x.keep: x for x in self.lanes_of_row.body if isinstance(x, Accumulate) and x.keep in self.scanned
        }
        rest = [x for x in self.lanes_of_row.body if isinstance(x, Store) or x.keep not in scans]
        carries: dict[Keep, tuple[str, str]] = {}
        for keep in self.scheduled.keeps:
            kind, name, start = self._declared(keep)
            if keep in scans:
                carry, memory = carries[keep] = self.fresh(f"{name}_carry"), self.fresh(f"{name}_shared")
                self.line(f"{kind} {carry} = {start};")
                self.line(f"__shared__ {kind} {memory}[2][{groups * WARP}];")
            else:
                self.line(f"{kind} {name} = {start};")
        turns = -(-s.range.extent // (groups * SCANNED_ROWS))
        self.turn, self.row_of_turn = self.fresh("turn"), self.fresh("row")
        with self.block([f"for (int {self.turn} = 0; {self.turn} < {turns}; ++{self.turn})"], (), writes):
            for keep, x in scans.items():
                kind, name, start = self._declared(keep)
                carry, memory = carries[keep]
                self.line(f"{kind} {name}[{SCANNED_ROWS}];")
                each = functools.partial(self._take, x)
                self._rows_of_turn(s, writes, each, f"{name}[{self.row_of_turn}] = {start};")
                call = f"column_scan<{REDUCERS[keep.op or '']}, {groups}>"
                self.line(f"{call}({name}, {carry}, {memory}[{self.turn} & 1]);")
            if rest:
                self._rows_of_turn(s, writes, lambda: self.vector(self.cut, rest))

    def _declared(self, keep: Keep) -> tuple[str, str, str]:
        """C type and name of a keep, and the identity of its reduction."""
        start = start_of(keep.op or "", keep.dtype)
        return scalar_ops.register_type(keep.dtype), self.name(keep, keep.name), start

    def _rows_of_turn(self, s: Rows, writes: set, each: Callable[[], None], first: str = "") -> None:
        """Loop over a warp's rows in a turn; out-of-range rows run only ``first``."""
        i, j, groups = self.row_of_turn, self.variable(s.range), self.mapping.sharing
        ragged = [f"{j} < {s.range.extent}"] if s.range.extent % (groups * SCANNED_ROWS) else []
        inside = " && ".join([*ragged, *[self.there] * bool(self.there)])
        with self.block(["#pragma unroll", f"for (int {i} = 0; {i} < {SCANNED_ROWS}; ++{i})"], (), writes):
            self.line(
                f"const {self.index_type} {j} = ({self.turn} * {groups} + group) * {SCANNED_ROWS} + {i};"
            )
            if first and inside:
                self.line(first)
            with self.block([f"if ({inside})" if inside else ""], [s.range], writes):
                each()

    def _take(self, s: Accumulate) -> None:
        """Value of a row, before it is combined with others."""
        self.inner, outside = self.cut, self.inner
        value = as_type(self.value(s.value), s.value.dtype, s.keep.dtype)
        self.line(f"{self.read_keep(s.keep)} = {value};")
        self.inner = outside

    def read_keep(self, keep: Keep) -> str:
        return f"{self.named[keep]}[{self.row_of_turn}]" if keep in self.scanned else self.named[keep]

    def _results(self, s: Lanes) -> None:
        """Store the column totals of all warps, combined in order."""
        for keep in [keep for keep in self.scheduled.keeps if keep not in self.scanned]:
            kind, name, _ = self._declared(keep)
            memory, groups = self.fresh(f"{name}_shared"), self.mapping.sharing
            self.line(f"__shared__ {kind} {memory}[{groups * WARP}];")
            self.line(f"{name} = column_reduce<{REDUCERS[keep.op or '']}, {groups}>({name}, {memory});")
        inside = ["group == 0", *[self.there] * bool(self.there)]
        with self.block([f"if ({' && '.join(inside)})"], (), written_in(s.body)):
            self.vector(self.cut, s.body)
