"""Transpositions as CUDA C++: tiles that are read along one axis and written along another.

Kernels, stage 6, beside ``cuda_style.py``. A kernel without lanes whose results lie along one range of the grid, and
some of whose operands lie along another, would read or write memory in small pieces. Here a block does a tile of 32
by 32 points. It reads what lies the other way round along that way first, to shared memory, and then does the points
along the results.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from blufunc.kernels import scalars
from blufunc.kernels.cuda_limits import HOPPER, Limits
from blufunc.kernels.cuda_schedule import Schedule
from blufunc.kernels.cuda_style import CudaKernel, CudaStyle
from blufunc.kernels.cuda_vectors import Vectors, vectors_of
from blufunc.kernels.indices import Range
from blufunc.kernels.loopir import Kernel, Store, Value, dependencies, post_order

_SIDE, _ROWS = 32, 8
"""Points of a tile along each side, and how many rows of them a block does at a time."""

_LEAST = 16
"""From what size of both ranges on a tile is worth its barrier."""


def turned_loads(kernel: Kernel) -> tuple[Range, list[Value]] | None:
    """The range along which operands lie that do not lie along the grid's innermost one, and the loads of them."""
    if len(kernel.grid) < 2 or kernel.finish or not all(isinstance(s, Store) for s in kernel.body):
        return None
    inner = kernel.grid[-1]
    found: dict[Range, list[Value]] = {}
    values = post_order(kernel.roots())
    if any(v.op == "fold" for v in values):
        return None
    for v in values:
        if v.op == "load" and not v.args and v.attr[1].coefficient(inner) not in (0, 1, None):
            for r in kernel.grid[:-1]:
                if v.attr[1].coefficient(r) == 1 and r.extent > 1:
                    found.setdefault(r, []).append(v)
    if len(found) != 1 or not all(s.index.coefficient(inner) == 1 for s in kernel.body):
        return None
    ((outer, loads),) = found.items()
    return (outer, loads) if min(outer.extent, inner.extent) >= _LEAST else None


class TileStyle(CudaStyle):
    """Writes kernels for which ``turned_loads`` finds some."""

    def __init__(self, kernel: Kernel, aliased: Collection[str] = (), limits: Limits = HOPPER):
        super().__init__(kernel, aliased, limits)
        found = turned_loads(self.kernel)
        assert found is not None
        self.outer, loads = found
        self.turned = dict.fromkeys(loads, "")
        self.schedule = Schedule(1, _SIDE * _ROWS)
        self.across, self.down, self.step = self.fresh("across"), self.fresh("down"), self.fresh("step")
        self.reading = True

    def cuts_of(self, kernel: Kernel) -> dict[Range, Vectors]:
        return {kernel.grid[-1]: vectors_of(kernel.grid[-1], 1)}

    def _tiles(self, r: Range) -> int:
        """How many tiles a range is, or points if it is none of the two."""
        return -(-r.extent // _SIDE) if r in (self.outer, self.kernel.grid[-1]) else r.extent

    @property
    def blocks(self) -> int:
        """A block for each tile."""
        return math.prod(map(self._tiles, self.kernel.grid))

    def grid(self) -> None:
        inner, ranges = self.kernel.grid[-1], self.kernel.grid
        self.line(
            f"const int {self.across} = threadIdx.x % {_SIDE}, {self.down} = threadIdx.x / {_SIDE};",
        )
        tiles = {r: self.fresh(f"{r.name}_tile") for r in (self.outer, inner)}
        for n, r in enumerate(ranges):
            below = math.prod(map(self._tiles, ranges[n + 1 :]))
            text = f"blockIdx.x / {below}u % {self._tiles(r)}u"
            self.line(f"const {self.index_type} {tiles.get(r) or self.variable(r)} = {text};")
        self.scope.ranges |= {r for r in ranges if r not in tiles}
        for v in self.turned:
            name = self.turned[v] = self.fresh(f"{self.named[v.attr[0]]}_tile")
            kind = scalars.register_type(v.dtype)
            self.line(f"__shared__ {kind} {name}[{_SIDE}][{_SIDE + 1}];")
        with self._in_tile({self.outer: self.across, inner: self.down}, tiles):
            for v, name in self.turned.items():
                self.need(dependencies(v))
                text = super().expression(v)
                self.line(f"{name}[{self.down} + {self.step}][{self.across}] = {text};")
        self.line("__syncthreads();")
        self.reading = False
        with self._in_tile({inner: self.across, self.outer: self.down}, tiles):
            self.body(self.kernel.body)

    @contextmanager
    def _in_tile(self, places: dict[Range, str], tiles: dict[Range, str]) -> Iterator[None]:
        """The points of a tile: its loop variables, of which one runs with neighbouring threads."""
        loop = f"for (int {self.step} = 0; {self.step} < {_SIDE}; {self.step} += {_ROWS})"
        with self.block(["#pragma unroll", loop]):
            inside = []
            for r, place in places.items():
                more = f" + {self.step}" if place == self.down else ""
                self.line(
                    f"const {self.index_type} {self.variable(r)} = {tiles[r]} * {_SIDE} + {place}{more};"
                )
                if r.extent % _SIDE:
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

    def made(self, source: str) -> CudaKernel:
        return CudaKernel(source, self.entry, (self.blocks, 1, 1), (_SIDE * _ROWS, 1, 1))
