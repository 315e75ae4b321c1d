"""Transposes as CUDA C++: tiles read along one axis and written along another.

Kernels, stage 6. In: a ``ScheduledKernel`` of kind "transpose", whose results are contiguous along one range of the
grid and some operands along another, so some accesses would be uncoalesced. Out: the source of its function. A block
has a tile of a warp's width along both. It loads the turned operands along their range into shared memory, then
computes the points along the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from blufunc.kernels.backends.cuda.device_model import WARP
from blufunc.kernels.backends.cuda.render.writer import CudaWriter
from blufunc.kernels.backends.cuda.schedule.kinds import turned_loads
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel
from blufunc.kernels.backends.cuda.schedule.thread_mapping import tiles_of
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.loopir.index import Range
from blufunc.kernels.loopir.ir import Value, dependencies


class TransposeRenderer(CudaWriter):
    """Renderer of transposes.

    Attributes:
      outer: the range along which turned operands are contiguous.
      turned: loads of turned operands, and their tiles in shared memory.
      across, down, step: variables of a thread's place in a tile, and of a warp's row.
      reading: True while the code that fills tiles is written.
    """

    def __init__(self, scheduled: ScheduledKernel):
        super().__init__(scheduled)
        found = turned_loads(self.kernel)
        assert found is not None
        self.outer, loads = found
        self.turned = dict.fromkeys(loads, "")
        self.across, self.down, self.step = self.fresh("across"), self.fresh("down"), self.fresh("step")
        self.reading = True

    def grid(self) -> None:
        inner, ranges = self.kernel.grid[-1], self.kernel.grid
        self.line(f"const int {self.across} = threadIdx.x % {WARP}, {self.down} = threadIdx.x / {WARP};")
        tiles = {r: self.fresh(f"{r.name}_tile") for r in (self.outer, inner)}
        extents = tiles_of(self.kernel)
        for n, r in enumerate(ranges):
            below = math.prod(extents[x] for x in ranges[n + 1 :])
            text = f"blockIdx.x / {below}u % {extents[r]}u"
            self.line(f"const {self.index_type} {tiles.get(r) or self.variable(r)} = {text};")
        self.scope.ranges |= {r for r in ranges if r not in tiles}
        for v in self.turned:
            name = self.turned[v] = self.fresh(f"{self.named[v.attr[0]]}_tile")
            kind = scalar_ops.register_type(v.dtype)
            self.line(f"__shared__ {kind} {name}[{WARP}][{WARP + 1}];")
        with self._in_tile({self.outer: self.across, inner: self.down}, tiles):
            for v, name in self.turned.items():
                self.need(dependencies(v))
                self.line(f"{name}[{self.down} + {self.step}][{self.across}] = {self.expression(v)};")
        self.line("__syncthreads();")
        self.reading = False
        with self._in_tile({inner: self.across, self.outer: self.down}, tiles):
            self.body(self.kernel.body)

    @contextmanager
    def _in_tile(self, places: dict[Range, str], tiles: dict[Range, str]) -> Iterator[None]:
        """Loop over the points of a tile; one variable varies with neighboring threads."""
        loop = f"for (int {self.step} = 0; {self.step} < {WARP}; {self.step} += {self.mapping.block // WARP})"
        with self.block(["#pragma unroll", loop]):
            inside = []
            for r, place in places.items():
                more = f" + {self.step}" if place == self.down else ""
                self.line(
                    f"const {self.index_type} {self.variable(r)} = {tiles[r]} * {WARP} + {place}{more};"
                )
                if r.extent % WARP:
                    inside.append(f"{self.variable(r)} < {r.extent}")
            if inside:
                with self.block([f"if ({' && '.join(inside)})"], places):
                    yield
            else:
                self.scope.ranges |= frozenset(places)
                yield

    def expression(self, v: Value) -> str:
        if v in self.turned and not self.reading:
            return f"{self.turned[v]}[{self.across}][{self.down} + {self.step}]"
        return super().expression(v)
