"""Kernels of points and of lanes as CUDA C++: grid, rows, and loops over lanes.

Kernels, stage 6. In: a ``ScheduledKernel`` of kind "points" or "lanes". Out: the source of its function, for
``source.py``. The compiler unrolls loops over a row's vectors, so keeps stay in registers. Results are deterministic:
reductions combine threads in rank order, and the only atomics count finished blocks.

The parameters are a pointer for each buffer, in order, aligned to 32 bytes. A kernel with a finish has one more,
``counters`` of type ``unsigned``, which are 0 before and after each launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from blufunc.kernels.backends.cuda.device_model import WARP
from blufunc.kernels.backends.cuda.render import async_copies, reductions
from blufunc.kernels.backends.cuda.render.lane_scans import scanned_lanes
from blufunc.kernels.backends.cuda.render.writer import CudaWriter
from blufunc.kernels.backends.cuda.schedule.reductions import OneLane, only_reduces
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import (
    ScheduledKernel,
    Vectors,
    accumulated_in,
    lane_loops,
    values_in,
)
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.c_renderer import as_type, comment, reducing, start_of, update, written_in
from blufunc.kernels.codegen.scalar_ops import bare
from blufunc.kernels.loopir.index import Range, flat, of
from blufunc.kernels.loopir.ir import Keep, Lanes, Prefix, Reduce, Rows, Scan, Total, computed_in, post_order


class KernelRenderer(CudaWriter):
    """Renderer of kernels of points and of lanes.

    Attributes:
      when_read: writes the lines after the first loop that reads a row of a ring.
      arrived: variable that is true if the block arrived last, where it counts before it is done.
    """

    def __init__(self, scheduled: ScheduledKernel):
        super().__init__(scheduled)
        self.when_read: Callable[[], None] | None = None
        self.arrived = ""

    # -- the grid ----------------------------------------------------------------------------------

    def grid(self) -> None:
        mapping = self.mapping
        if self.scheduled.kind == "points":
            last = self.cuts.get(self.kernel.grid[-1]) if self.kernel.grid else None
            with self._place(f" * {mapping.points}u + threadIdx.x", mapping.blocks * mapping.points):
                self.vector(last, self.kernel.body)
        elif mapping.cluster > 1:
            self._cluster()
        else:
            if mapping.threads == mapping.block:
                self.line("const int thread = threadIdx.x;")
            else:
                index = f"threadIdx.x % {mapping.threads}, group = threadIdx.x / {mapping.threads}"
                self.line(f"const int thread = {index};")
            place = "" if mapping.points == 1 else f" * {mapping.points}u + group"
            with self._place(place, mapping.blocks * mapping.points):
                self._point()

    def _cluster(self) -> None:
        """One point per cluster; its threads are those of all its blocks."""
        mapping = self.mapping
        self.line("__shared__ uint64_t met[2];")
        self.line("cluster_begin(met);")
        self.line(f"const int thread = blockIdx.x % {mapping.cluster}u * {mapping.block} + threadIdx.x;")
        with self._place(f" / {mapping.cluster}u", self.scheduled.places):
            self._point()
        if not self.cluster_reductions:
            self.line("ptx_cluster_wait();")

    @contextmanager
    def _place(self, place: str, reached: int) -> Iterator[None]:
        """Loop variables of a grid place, with a bounds check if needed.

        Args:
          place: expression that extends the block index to the place's index.
          reached: number of indices; the first ``places`` are points.
        """
        ranges, places = [r for r in self.scheduled.grid_ranges if r.extent > 1], self.scheduled.places
        point = self.fresh("point")
        if ranges or reached > places:
            kind, block = (
                ("unsigned", "blockIdx.x") if reached < 1 << 32 else ("uint64_t", "uint64_t(blockIdx.x)")
            )
            self.line(f"const {kind} {point} = {block}{place};")
        for i, r in enumerate(ranges):
            inner = math.prod([x.extent for x in ranges[i + 1 :]])
            text = f"{point} / {inner}u" if inner > 1 else point
            text = f"{text} % {r.extent}u" if i else text
            self.line(f"const {self.index_type} {self.variable(r)} = {text};")
        if reached > places:
            with self.block([f"if ({point} < {places}u)"], ranges, written_in(self.kernel.body)):
                yield
        else:
            self.scope.ranges |= frozenset(ranges)
            yield

    # -- points ------------------------------------------------------------------------------------

    def _point(self) -> None:
        """One point of the grid: its keeps and its statements."""
        for keep in self.scheduled.keeps:
            self._declare_keep(keep)
            self._start(keep)
        body, at = self.kernel.body, self.scheduled.arrive_after
        staged = self.scheduled.staged
        copies_first = staged is not None and staged.first == 0  # overlap these reads with the row's copy
        if self.threads > WARP and only_reduces(body[0]) and not copies_first:
            self._read_early()
        if at is None:
            self._at_point(body)
            return
        self.body(body[:at])
        self.arrived = self.fresh("before")
        place, blocks = self._counter()
        self.line(f"const unsigned {self.arrived} = thread == 0 ? ptx_arrive({place}, {blocks - 1}) : ~0u;")
        self.body(body[at:])

    def _read_early(self) -> None:
        """Load loop-invariant values early, while memory is idle."""
        for v in post_order([v for s in self.kernel.body for v in values_in(s)]):
            known = v.ranges() <= self.scope.ranges and not self.reads[v]
            if v.op == "load" and not v.args and known:
                self.named_value(v)

    def _counter(self) -> tuple[str, int]:
        """Counter of finished blocks, and their number: one per cluster if early."""
        kernel, counted = self.kernel, self.mapping.cluster if self.arrived else 1
        counter = self.index(flat([of(r) for r in kernel.over], [r.extent for r in kernel.over]))
        place = "finished" if counter == "0" else f"finished + {counter}"
        return place, self.mapping.blocks // kernel.ends // counted

    def _at_point(self, body: Sequence[Any]) -> None:
        """Statements of a point; the first group runs those after the shared rows."""
        if self.mapping.sharing == 1:
            self.body(body)
            return
        at = next(i for i, s in enumerate(body) if isinstance(s, Rows))
        self.body(body[: at + 1])
        for n, keep in enumerate(accumulated_in(body)):
            if n:
                self.line("__syncthreads();")
            self._combine(keep)
        with self.block(["if (group == 0)"], (), written_in(body[at + 1 :])):
            self.body(body[at + 1 :])

    def _declare_keep(self, keep: Keep) -> None:
        cut, mapping = self.scheduled.keeps[keep], self.mapping
        kind, name = scalar_ops.register_type(keep.dtype), self.name(keep, keep.name)
        if keep in self.scheduled.in_shared:
            group = f" + group * {cut.range.extent}" if mapping.block > mapping.threads else ""
            self.shared_pointer(name, kind, self.scheduled.shared[keep], group)
        else:
            self.line(f"{kind} {name}[{max(1, cut.steps(self.threads) * cut.width)}];")

    def _start(self, keep: Keep) -> None:
        """Initialize an accumulated keep with the identity of its reduction."""
        if keep.op is None:
            return
        start = start_of(keep.op, keep.dtype)
        self._for_all(self.scheduled.keeps[keep], lambda: self.line(f"{self.read_keep(keep)} = {start};"))

    def _for_all(self, cut: Vectors, each: Callable[[], None]) -> None:
        """Write lines for every lane, without values."""
        with self._vectors(cut, ()):
            self.inner, outside = cut, self.inner
            if cut.element is None:
                each()
            else:
                e = self.variable(cut.element)
                with self.block(["#pragma unroll", f"for (int {e} = 0; {e} < {cut.width}; ++{e})"]):
                    each()
            self.inner = outside

    def _combine(self, keep: Keep) -> None:
        """Reduce the groups' accumulated keeps into the first group, in order, via smem."""
        assert keep.op is not None
        cut, op = self.scheduled.keeps[keep], keep.op
        parts, g, extent = self.fresh("parts"), self.fresh("g"), cut.range.extent

        def give() -> None:
            self.line(f"{parts}[(group - 1) * {extent} + {self.index(cut.index)}] = {self.read_keep(keep)};")

        def take() -> None:
            place, part = self.read_keep(keep), f"{parts}[{g} * {extent} + {self.index(cut.index)}]"
            text = reducing(op, keep.dtype, place, part, keep.dtype)
            with self.block([f"for (int {g} = 0; {g} < {self.mapping.sharing - 1}; ++{g})"]):
                self.line(update(place, bare(text)))

        self.shared_pointer(parts, scalar_ops.register_type(keep.dtype), self.scheduled.combine_at)
        with self.block(["if (group > 0)"]):
            self._for_all(cut, give)
        self.line("__syncthreads();")
        with self.block(["if (group == 0)"]):
            self._for_all(cut, take)

    # -- rows --------------------------------------------------------------------------------------

    def rows(self, s: Rows) -> None:
        j = self.variable(s.range)
        sharing = self.mapping.sharing
        start, step = ("group", f"{j} += {sharing}") if sharing > 1 else ("0", f"++{j}")
        count, checked = str(s.range.extent), False
        if s.index.bounds()[1] >= s.limit:
            first = s.index - of(s.range)
            if s.index.coefficient(s.range) == 1 and s.range not in first.terms:
                count = self.fresh("rows")
                left = f"{s.limit} - ({self.index(first)})"
                self.line(
                    f"const {self.index_type} {count} = min({left}, {self.index_type}({s.range.extent}));"
                )
            else:
                checked = True

        def goes_on(row: Range) -> str:
            index = s.index.substitute({s.range: of(row)})
            more = f" && {self.index(index)} < {s.limit}" if checked else ""
            return f"{self.variable(row)} < {count}{more}"

        sites = [x for x in lane_loops(s.body) if any(isinstance(t, (Reduce, Scan)) for t in x.body)]
        unrolled = self.scheduled.rows_in_flight(s, self.threads)
        loop = f"for ({self.index_type} {j} = {start}; {goes_on(s.range)}; {step})"
        self.repeated, self.in_rows = len(sites) == 1, True
        ring = None if self.finishing else self.scheduled.prefetch
        ranges = [s.range] if ring is None else [s.range, ring.turn]
        if ring is not None:
            async_copies.start_prefetch(self, s, goes_on)
        with self.block([f"#pragma unroll {unrolled}", loop], ranges, written_in(s.body)):
            if ring is None:
                self.body(s.body)
            else:
                self.line(f"ptx_wait_copies({ring.depth - 1});")
                ahead = f"{j} + {ring.depth * sharing}"
                self.when_read = lambda: async_copies.prefetch_next(self, s, ahead, goes_on)
                self.body(s.body)
                turn = self.variable(ring.turn)
                self.line(f"{turn} = {turn} + 1 == {ring.depth} ? 0 : {turn} + 1;")
        self.repeated = self.in_rows = False

    # -- lanes and their totals --------------------------------------------------------------------

    @contextmanager
    def _vectors(self, cut: Vectors, writes: Collection[Any], crowded: bool = False) -> Iterator[None]:
        """Loop over this thread's vectors of a range.

        Args:
          crowded: True if registers do not suffice for all vectors at once.
        """
        q, n, threads = self.variable(cut.vector), cut.vector.extent, self.threads
        start = "0" if threads == 1 else self.thread
        outside = self.step
        if not cut.is_unrolled(threads) and not self._in_registers(cut):
            loop = f"for ({self.index_type} {q} = {start}; {q} < {n}; {q} += {threads})"
            self.step = f"{q}"
            with self.block(["#pragma unroll 4", loop], [cut.vector], writes):
                yield
        else:
            t, steps = self.fresh("t"), cut.steps(threads)
            self.step = t
            unroll = "#pragma unroll" if cut.is_unrolled(threads) and not crowded else "#pragma unroll 4"
            with self.block([unroll, f"for (int {t} = 0; {t} < {steps}; ++{t})"], (), writes):
                place = t if threads == 1 else f"{t} * {threads} + {start}"
                self.line(f"const {self.index_type} {q} = {place};")
                known = [cut.vector, *async_copies.slot(self, cut, t)]
                if n % threads:
                    with self.block([f"if ({q} < {n})"], known, writes):
                        yield
                else:
                    self.scope.ranges |= {*known}
                    yield
        self.step = outside

    def _in_registers(self, cut: Vectors) -> bool:
        """True if keeps of these lanes are in registers because shared memory is full."""
        scheduled = self.scheduled
        return any(c is cut and k not in scheduled.in_shared for k, c in scheduled.keeps.items())

    def lanes(self, s: Lanes) -> None:
        if s.note:
            self.line(comment(s.note))
        cut, staged = self.cuts[s.range], self.scheduled.staged
        if staged is not None and s is not self.kernel.body[staged.first]:
            staged = None
        if staged is not None:
            async_copies.copy_row(self, staged)
            self._read_early()
        reductions.declare_totals(self, s, cut)
        scans = [x for x in s.body if isinstance(x, Scan)]
        if isinstance(s, OneLane):
            self._one_lane(s)
        elif scans:
            scanned_lanes(self, s, scans, cut)
        elif s.body:
            with self._vectors(cut, written_in([s]), self.scheduled.is_crowded(s)):
                if staged is not None:
                    async_copies.wait_for_row(self, staged, self.step)
                self.vector(cut, s.body)
            if self.when_read is not None:
                then, self.when_read = self.when_read, None
                then()
        reductions.reduce_totals(self, s, cut)

    def _one_lane(self, s: OneLane) -> None:
        """Body of a loop for one of its lanes, on the thread that has the lane."""
        cut = self.cuts[s.range]
        self.need(computed_in(s.lane))
        owner = f"({self.index(s.lane // cut.width)}) % {self.threads} == {self.thread}"
        inner = [cut.vector] if cut.element is None else [cut.vector, cut.element]
        with self.block([f"if ({owner})" if self.threads > 1 else ""], inner, written_in([s])):
            vector = self.variable(cut.vector)
            self.line(f"const {self.index_type} {vector} = {self.index(s.lane // cut.width)};")
            if cut.element is not None:
                text = self.index(s.lane % cut.width)
                self.line(f"const {self.index_type} {self.variable(cut.element)} = {text};")
            self.body(s.body)

    def reduce(self, s: Reduce) -> None:
        reductions.accumulate(self, s)

    def take(self, s: Scan) -> None:
        value = as_type(self.value(s.value), s.value.dtype, s.prefix.dtype)
        self.line(f"{self.read_prefix(s.prefix)} = {value};")

    def read_prefix(self, prefix: Prefix) -> str:
        element = self.inner.element if self.inner is not None else None
        return f"{self.named[prefix]}[{'0' if element is None else self.variable(element)}]"

    def read_total(self, total: Total) -> str:
        if total.position is None:
            return self.named[total]
        return f"{scalar_ops.register_type(total.position)}({self.named[total]}.index)"

    def read_keep(self, keep: Keep) -> str:
        cut = self.scheduled.keeps[keep]
        if keep in self.scheduled.in_shared:
            return f"{self.named[keep]}[{self.index(cut.index)}]"
        parts = (
            [self.step] if cut.width == 1 else [f"{self.step} * {cut.width}", self.variable(cut.innermost)]
        )
        return f"{self.named[keep]}[{' + '.join(parts)}]"

    # -- the finish --------------------------------------------------------------------------------

    def finish(self) -> None:
        kernel, self.finishing = self.kernel, True
        place, blocks = self._counter()
        assert self.mapping.points == 1 or not kernel.over, "blocks of many points end together"
        last = f"came_last({self.arrived}, {blocks})" if self.arrived else f"last_block({place}, {blocks})"
        with self.block([f"if ({last})"], (), written_in(kernel.finish)):
            if any(isinstance(s, Rows) for s in kernel.finish):
                for keep in accumulated_in(kernel.finish):
                    self._start(keep)
                self._at_point(kernel.finish)
            else:
                self.threads, self.thread = self.mapping.block, "int(threadIdx.x)"
                self.body(kernel.finish)
