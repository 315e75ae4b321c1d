"""LoopIR as CUDA C++: threads over points and lanes, wide loads and stores, reductions through shuffles.

Kernels, stage 6. In: a ``Kernel``. Out: the text of one function, for ``cstyle_cuda.py``.
``cuda_vectors.py`` cuts the lanes in vectors and ``cuda_schedule.py`` deals them out to threads; this page writes it
down. Loops over a row's vectors are written out by the compiler, so that what a row keeps lies in registers. Every
result is the same each time: reductions combine threads in the order of their numbers, and there are no atomics
but the count of blocks that are done.

The parameters of a kernel are a pointer for each buffer, in order, each to memory aligned to 32 bytes; after them,
where a kernel has a finish, one to ``counters`` of type ``unsigned``, which are 0 before the first launch, and again
after each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from blufunc.kernels import cuda_schedule, scalars
from blufunc.kernels.cstyle import comment, reducing, update, written_in
from blufunc.kernels.cuda_copies import RowCopies
from blufunc.kernels.cuda_folds import with_shared_folds
from blufunc.kernels.cuda_limits import HOPPER, Limits
from blufunc.kernels.cuda_moments import with_spreads
from blufunc.kernels.cuda_narrow import narrow_exponentials
from blufunc.kernels.cuda_reductions import ThreadReductions
from blufunc.kernels.cuda_rereads import with_rereads
from blufunc.kernels.cuda_row_passes import (
    OneLane,
    only_reduces,
    with_online_sums,
    with_single_lanes,
)
from blufunc.kernels.cuda_rows_ahead import with_rows_ahead
from blufunc.kernels.cuda_scans import LaneScans
from blufunc.kernels.cuda_schedule import is_unrolled, shared_size, steps_of
from blufunc.kernels.cuda_vectors import (
    Cutter,
    Vectors,
    best_width,
    vectors_of,
    without_cheap_keeps,
)
from blufunc.kernels.indices import Index, Range, flat, of
from blufunc.kernels.loopir import (
    Accumulate,
    Keep,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Scan,
    Set,
    Store,
    Value,
    computed_in,
    identity,
    post_order,
    values_of,
)
from blufunc.kernels.scalars import bare

DYNAMIC = "extern __shared__ __align__(128) unsigned char shared_memory[];"
"""Whatever else lies in shared memory: where a copy of a row does not lie in sectors as the row does, it takes a tenth
more time."""

_WARP = 32
_ROWS_AHEAD = 8
"""Vectors of rows to come that are read before what was read is used."""


@dataclass(frozen=True)
class CudaKernel:
    """A kernel as CUDA C++, and how to launch it.

    Attributes:
      source: a complete translation unit.
      entry: the name of the ``extern "C" __global__`` function.
      grid: blocks along x, y and z; where one is 0 there is nothing to launch.
      block: threads of a block along x, y and z.
      shared_bytes: dynamic shared memory of a block; beyond 48 KiB the driver must be told.
      counters: how many of blocks that are done the last parameter points to; 0: there is no such parameter.
      segments: of a group, how many kernels it is; its parameter is one structure, of the addresses of the buffers of
        each. 0 for what is no group.
    """

    source: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    counters: int = 0
    segments: int = 0


class CudaStyle(RowCopies, LaneScans, ThreadReductions):
    """Writes one kernel for a GPU.

    Args:
      kernel: what to write.
      aliased: names of inputs that may lie where an output does; the others are read through the read-only cache.
      limits: what the device allows.
    """

    def __init__(self, kernel: Kernel, aliased: Collection[str] = (), limits: Limits = HOPPER):
        kernel = without_cheap_keeps(with_shared_folds(kernel))
        kernel = with_online_sums(with_single_lanes(kernel), aliased)
        self.cuts = self.cuts_of(kernel)
        kernel, rereads = with_rereads(kernel, self.cuts, limits)
        self.copy = rereads.copy
        if self.copy is not None:
            self.schedule = self.copy.schedule
        else:
            self.schedule = cuda_schedule.schedule(kernel, self.cuts, limits.shared_bytes)
        if self.schedule.cluster == 1:
            kernel = with_spreads(kernel, self.cuts, self.schedule.threads, aliased)
        kernel, self.ahead = with_rows_ahead(kernel, self.schedule, self.cuts, limits.shared_bytes)
        cutter = Cutter(list(self.cuts.values()))
        super().__init__(cutter.kernel(kernel), aliased)
        if self.copy is not None:
            self.copied_index = cutter.index(self.copy.index)
            self.name(self.copy.row, self.copy.row.name)
            self.readers[self.copy.row] = "vec_load"
        if self.ahead is not None:
            self.sources = {b: (cutter.index(i), c) for b, (i, c) in self.ahead.sources.items()}
            for _, copies in self.sources.values():
                self.name(copies, copies.name)
                self.readers[copies] = "vec_load"
        for buffer, last in rereads.last.items():
            self.named[last], self.readers[last] = self.named[buffer], "vec_ldcs"
        self.streamed, self.held = rereads.streamed, rereads.held
        self.narrow = narrow_exponentials(self.kernel)
        keeps = dict.fromkeys(s.keep for s in kernel.statements() if isinstance(s, (Set, Accumulate)))
        self.cut_of_keep = {cutter.cell(k): self.cuts[k.lanes] for k in keeps}
        self.in_shared = [cutter.cell(k) for k in self.schedule.in_shared]
        self.threads, self.thread = self.schedule.threads, "thread"
        self.when_read: Callable[[], None] | None = None  # what is to be done after the loop that reads a row
        self.arrived = ""  # what tells whether the block came last, where it has been counted already
        self.combining: int | None = None  # where in shared memory groups hand over what they accumulated

    def cuts_of(self, kernel: Kernel) -> dict[Range, Vectors]:
        """Vectors of the ranges of all lanes; of a kernel without lanes, of its innermost grid range."""
        lanes = [s.range for s in kernel.statements() if isinstance(s, Lanes)]
        cut = lanes if any(cuda_schedule.loops_of(kernel.body)) else [*kernel.grid[-1:], *lanes]
        return {r: vectors_of(r, best_width(kernel, r)) for r in dict.fromkeys(cut)}

    # -- the function, the grid ----------------------------------------------------------------

    @property
    def entry(self) -> str:
        """The name of the function: no function of CUDA is called so."""
        return f"{self.kernel.name}_kernel"

    @property
    def blocks(self) -> int:
        """How many blocks are launched."""
        made = self.schedule
        return -(-self.places() // made.points) * made.cluster

    def places(self) -> int:
        """The number of points, or of vectors of points."""
        return math.prod([r.extent for r in self.grid_ranges()])

    def grid_ranges(self) -> list[Range]:
        """The ranges of the grid; the range of its vectors in the place of one that is cut."""
        return [self.cuts[r].vector if r in self.cuts else r for r in self.kernel.grid]

    def signature(self) -> str:
        pointers = [
            f"{'' if b.written else 'const '}{scalars.storage_type(b.dtype)} *{self.named[b]}"
            for b in self.kernel.buffers
        ]
        if self.kernel.finish:
            pointers.append("unsigned *finished")
        made = self.schedule
        bounds = f"__launch_bounds__({made.block}{f', {made.resident}' if made.resident else ''})"
        if made.cluster > 1:
            bounds = f"__cluster_dims__({made.cluster}, 1, 1) {bounds}"
        return f'extern "C" __global__ void {bounds} {self.entry}({", ".join(pointers)})'

    def grid(self) -> None:
        made = self.schedule
        if not any(cuda_schedule.loops_of(self.kernel.body)):
            self._points()
            return
        if made.cluster > 1:
            self._cluster()
            return
        if made.threads == made.block:
            self.line("const int thread = threadIdx.x;")
        else:
            self.line(
                f"const int thread = threadIdx.x % {made.threads}, group = threadIdx.x / {made.threads};"
            )
        place = "" if made.points == 1 else f" * {made.points}u + group"
        with self._place(place, self.blocks * made.points):
            self.point()

    def _cluster(self) -> None:
        """A point for each cluster: its threads are those of all of its blocks."""
        made = self.schedule
        self.line("__shared__ uint64_t met[2];")
        self.line("cluster_begin(met);")
        self.line(f"const int thread = blockIdx.x % {made.cluster}u * {made.block} + threadIdx.x;")
        with self._place(f" / {made.cluster}u", self.places()):
            self.point()
        if not self.exchanges:
            self.line("ptx_cluster_wait();")

    def _points(self) -> None:
        """A kernel without lanes: a thread does one vector."""
        points = self.schedule.points
        last = self.cuts.get(self.kernel.grid[-1]) if self.kernel.grid else None
        with self._place(f" * {points}u + threadIdx.x", self.blocks * points):
            self.vector(last, self.kernel.body)

    @contextmanager
    def _place(self, place: str, reached: int) -> Iterator[None]:
        """A place of the grid, of which the first ``places()`` are points: its loop variables.

        ``place`` says how its number follows from the block's; ``reached`` is how many numbers there are.
        """
        ranges = [r for r in self.grid_ranges() if r.extent > 1]
        point = self.fresh("point")
        if ranges or reached > self.places():
            kind, block = (
                ("unsigned", "blockIdx.x") if reached < 1 << 32 else ("uint64_t", "uint64_t(blockIdx.x)")
            )
            self.line(f"const {kind} {point} = {block}{place};")
        for i, r in enumerate(ranges):
            inner = math.prod([x.extent for x in ranges[i + 1 :]])
            text = f"{point} / {inner}u" if inner > 1 else point
            text = f"{text} % {r.extent}u" if i else text
            self.line(f"const {self.index_type} {self.variable(r)} = {text};")
        if reached > self.places():
            with self.block([f"if ({point} < {self.places()}u)"], ranges, written_in(self.kernel.body)):
                yield
        else:
            self.scope.ranges |= frozenset(ranges)
            yield

    # -- points ----------------------------------------------------------------------------------

    def point(self) -> None:
        """One point of the grid: its keeps, and its statements."""
        for keep in self.cut_of_keep:
            self._declare_keep(keep)
            self._start(keep)
        body = self.kernel.body
        copies_first = self.copy is not None and self.copy.first == 0  # and reads while the row comes
        if self.threads > _WARP and only_reduces(body[0]) and not copies_first:
            self._read_early()
        at = self._arrival()
        if at is None:
            self._at_point(body)
            return
        self.body(body[:at])
        self.arrived = self.fresh("before")
        place, blocks = self._counter()
        self.line(f"const unsigned {self.arrived} = thread == 0 ? ptx_arrive({place}, {blocks - 1}) : ~0u;")
        self.body(body[at:])

    def _read_early(self) -> None:
        """Read what does not wait for any loop, while nobody does something else."""
        for v in post_order([v for s in self.kernel.body for v in _values_in(s)]):
            known = v.ranges() <= self.scope.ranges and not self.reads[v]
            if v.op == "load" and not v.args and known:
                self.named_value(v)

    def _arrival(self) -> int | None:
        """After how many statements a block may count as done, if that is before it stores rows.

        The finish reads what the first thread has stored then. That rows have been stored need not be waited for.
        """
        kernel, made = self.kernel, self.schedule
        if not kernel.finish or made.threads < made.block or made.threads == 1:
            return None
        values = post_order([v for s in kernel.finish for v in _values_in(s)])
        found = {v.attr[0] for v in values if v.op == "load"}
        stores = [n for n, s in enumerate(kernel.body) if isinstance(s, Store) and s.buffer in found]
        inner = [s for loop in kernel.body for s in getattr(loop, "body", ()) if not isinstance(s, Reduce)]
        if not stores or any(not isinstance(s, Store) or s.buffer in found for s in inner):
            return None
        # what the finish stores may lie where other blocks still read
        sizes = {b.size for b in kernel.buffers if b.name in self.aliased}
        replaced = any(s.buffer.size in sizes for s in _stores_of(kernel.finish))
        rest = kernel.body[stores[-1] + 1 :]
        return stores[-1] + 1 if _stores_of(rest) and not replaced else None

    def _counter(self) -> tuple[str, int]:
        """Where blocks that are done are counted, and how many there are: of a cluster the one that stores, if that
        counts itself before the others are done."""
        kernel, counted = self.kernel, self.schedule.cluster if self.arrived else 1
        counter = self.index(flat([of(r) for r in kernel.over], [r.extent for r in kernel.over]))
        return (
            "finished" if counter == "0" else f"finished + {counter}"
        ), self.blocks // kernel.ends // counted

    def _at_point(self, body: Sequence[Any]) -> None:
        """Statements of a point; where groups share its rows, the first of them does what comes after these."""
        if self.schedule.sharing == 1:
            self.body(body)
            return
        at = next(i for i, s in enumerate(body) if isinstance(s, Rows))
        self.body(body[: at + 1])
        self._combine(_grown_in(body))
        with self.block(["if (group == 0)"], (), written_in(body[at + 1 :])):
            self.body(body[at + 1 :])

    def _declare_keep(self, keep: Keep) -> None:
        cut, made = self.cut_of_keep[keep], self.schedule
        kind, name = scalars.register_type(keep.dtype), self.name(keep, keep.name)
        if keep in self.in_shared:
            original = Keep(keep.name, keep.dtype, cut.range)
            group = f" + group * {cut.range.extent}" if made.block > made.threads else ""
            self.line(f"{kind} *{name} = ({kind} *)(shared_memory + {self.shared_bytes}){group};")
            self.shared_bytes += shared_size(original, cut, made)
        else:
            self.line(f"{kind} {name}[{max(1, steps_of(cut, self.threads) * cut.width)}];")

    def _start(self, keep: Keep) -> None:
        """Let a keep that grows be what its reduction starts from."""
        if keep.op is None:
            return
        start = scalars.literal(identity(keep.op, keep.dtype), keep.dtype)
        self._for_all(self.cut_of_keep[keep], lambda: self.line(f"{self.read_keep(keep)} = {start};"))

    def _for_all(self, cut: Vectors, each: Callable[[], None]) -> None:
        """What is done for every lane, without values."""
        with self._vectors(cut, ()):
            self.inner, outside = cut, self.inner
            if cut.element is None:
                each()
            else:
                e = self.variable(cut.element)
                with self.block(["#pragma unroll", f"for (int {e} = 0; {e} < {cut.width}; ++{e})"]):
                    each()
            self.inner = outside

    def _combine(self, keeps: Sequence[Keep]) -> None:
        """Let the first group have what all groups accumulated."""
        sizes = [self.cut_of_keep[k].range.extent * max(4, k.dtype.itemsize) for k in keeps]
        start = self.combining = self.shared_bytes if self.combining is None else self.combining
        size = max(sizes, default=0) * (self.schedule.sharing - 1)
        self.shared_bytes = max(self.shared_bytes, start + size)
        for n, keep in enumerate(keeps):
            if n:
                self.line("__syncthreads();")
            self._combine_one(keep, start)

    def _combine_one(self, keep: Keep, start: int) -> None:
        """The same of one keep, in the order of the groups, through shared memory from ``start`` on."""
        assert keep.op is not None
        cut, op = self.cut_of_keep[keep], keep.op
        parts, g, extent = self.fresh("parts"), self.fresh("g"), cut.range.extent
        kind = scalars.register_type(keep.dtype)

        def lane() -> str:
            return self.index(lane_of(cut))

        def give() -> None:
            self.line(f"{parts}[(group - 1) * {extent} + {lane()}] = {self.read_keep(keep)};")

        def take() -> None:
            place = self.read_keep(keep)
            text = reducing(op, keep.dtype, place, f"{parts}[{g} * {extent} + {lane()}]", keep.dtype)
            with self.block([f"for (int {g} = 0; {g} < {self.schedule.sharing - 1}; ++{g})"]):
                self.line(update(place, bare(text)))

        self.line(f"{kind} *{parts} = ({kind} *)(shared_memory + {start});")
        with self.block(["if (group > 0)"]):
            self._for_all(cut, give)
        self.line("__syncthreads();")
        with self.block(["if (group == 0)"]):
            self._for_all(cut, take)

    # -- rows ------------------------------------------------------------------------------------

    def rows(self, s: Rows) -> None:
        j = self.variable(s.range)
        sharing = self.schedule.sharing
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

        loops = list(cuda_schedule.loops_of(s.body))
        sites = [x for x in loops if any(isinstance(t, (Reduce, Scan)) for t in x.body)]
        vectors = max([steps_of(self.cuts[x.range], self.threads) for x in loops], default=1)
        ahead = 1 if sites else max(1, _ROWS_AHEAD // max(1, vectors))
        loop = f"for ({self.index_type} {j} = {start}; {goes_on(s.range)}; {step})"
        self.repeated, self.in_rows = len(sites) == 1, True
        ring = None if self.finishing else self.ahead
        ranges = [s.range] if ring is None else [s.range, ring.turn]
        if ring is not None:
            self.start_copies(s, goes_on)
        with self.block([f"#pragma unroll {ahead}", loop], ranges, written_in(s.body)):
            if ring is None:
                self.body(s.body)
            else:
                self.line(f"ptx_wait_copies({ring.depth - 1});")
                self.when_read = lambda: self.copy_next(s, f"{j} + {ring.depth * sharing}", goes_on)
                self.body(s.body)
                turn = self.variable(ring.turn)
                self.line(f"{turn} = {turn} + 1 == {ring.depth} ? 0 : {turn} + 1;")
        self.repeated = self.in_rows = False

    # -- lanes and their totals ------------------------------------------------------------------

    @contextmanager
    def _vectors(self, cut: Vectors, writes: Collection[Any], crowded: bool = False) -> Iterator[None]:
        """A loop over the vectors that are this thread's, of those of a range.

        Args:
          crowded: whether registers do not suffice for all of them at once.
        """
        q, n, threads = self.variable(cut.vector), cut.vector.extent, self.threads
        start = "0" if threads == 1 else self.thread
        outside = self.step
        if not is_unrolled(cut, threads) and not self._in_registers(cut):
            loop = f"for ({self.index_type} {q} = {start}; {q} < {n}; {q} += {threads})"
            self.step = f"{q}"
            with self.block(["#pragma unroll 4", loop], [cut.vector], writes):
                yield
        else:
            t, steps = self.fresh("t"), steps_of(cut, threads)
            self.step = t
            unroll = "#pragma unroll" if is_unrolled(cut, threads) and not crowded else "#pragma unroll 4"
            with self.block([unroll, f"for (int {t} = 0; {t} < {steps}; ++{t})"], (), writes):
                place = t if threads == 1 else f"{t} * {threads} + {start}"
                self.line(f"const {self.index_type} {q} = {place};")
                known = [cut.vector, *self.slot(cut, t)]
                if n % threads:
                    with self.block([f"if ({q} < {n})"], known, writes):
                        yield
                else:
                    self.scope.ranges |= {*known}
                    yield
        self.step = outside

    def _in_registers(self, cut: Vectors) -> bool:
        """Whether something is kept of these lanes by each thread for itself: what shared memory has no room for."""
        return any(c is cut and k not in self.in_shared for k, c in self.cut_of_keep.items())

    def lanes(self, s: Lanes) -> None:
        if s.note:
            self.line(comment(s.note))
        cut = self.cuts[s.range]
        copied = self.copy is not None and s is self.kernel.body[self.copy.first]
        if copied:
            self.copy_row(cut)
            self._read_early()
        self.declare_totals(s, cut)
        scans = [x for x in s.body if isinstance(x, Scan)]
        if isinstance(s, OneLane):
            self._one_lane(s)
        elif scans:
            self.scanned_lanes(s, scans, cut)
        elif s.body:
            with self._vectors(cut, written_in([s]), self.is_crowded(s)):
                if copied:
                    self.wait_for_row(cut, self.step)
                self.vector(cut, s.body)
            if self.when_read is not None:
                then, self.when_read = self.when_read, None
                then()
        self.exchange_totals(s, cut)

    def _one_lane(self, s: OneLane) -> None:
        """The body of a loop for one of its lanes, by the thread whose lane it is."""
        cut = self.cuts[s.range]
        self.need(computed_in(s.lane))
        owner = f"({self.index(s.lane // cut.width)}) % {self.threads} == {self.thread}"
        inner = [cut.vector] if cut.element is None else [cut.vector, cut.element]
        with self.block([f"if ({owner})" if self.threads > 1 else ""], inner, written_in([s])):
            self.line(
                f"const {self.index_type} {self.variable(cut.vector)} = {self.index(s.lane // cut.width)};"
            )
            if cut.element is not None:
                text = self.index(s.lane % cut.width)
                self.line(f"const {self.index_type} {self.variable(cut.element)} = {text};")
            self.body(s.body)

    def expression(self, v: Value) -> str:
        text = super().expression(v)
        return text.replace("bf_exp(", "ptx_exp(", 1) if v in self.narrow else text

    def read_keep(self, keep: Keep) -> str:
        cut = self.cut_of_keep[keep]
        if keep in self.in_shared:
            return f"{self.named[keep]}[{self.index(lane_of(cut))}]"
        parts = (
            [self.step] if cut.width == 1 else [f"{self.step} * {cut.width}", self.variable(cut.innermost)]
        )
        return f"{self.named[keep]}[{' + '.join(parts)}]"

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        kernel, self.finishing = self.kernel, True
        place, blocks = self._counter()
        assert self.schedule.points == 1 or not kernel.over, "blocks of many points end together"
        last = f"came_last({self.arrived}, {blocks})" if self.arrived else f"last_block({place}, {blocks})"
        with self.block([f"if ({last})"], (), written_in(kernel.finish)):
            if any(isinstance(s, Rows) for s in kernel.finish):
                for keep in _grown_in(kernel.finish):
                    self._start(keep)
                self._at_point(kernel.finish)
            else:
                self.threads, self.thread = self.schedule.block, "int(threadIdx.x)"
                self.body(kernel.finish)

    def made(self, source: str) -> CudaKernel:
        """The kernel, written, in a source."""
        return CudaKernel(
            source,
            self.entry,
            (self.blocks, 1, 1),
            (self.schedule.block, 1, 1),
            self.shared_bytes,
            self.kernel.ends,
        )


def _values_in(s: Any) -> list[Value]:
    """The values that a statement uses, and those in it."""
    return [*values_of(s), *(v for t in getattr(s, "body", ()) for v in _values_in(t))]


def _stores_of(body: Sequence[Any]) -> list[Store]:
    """The stores among statements, and in their loops."""
    return [x for s in body for x in (s, *getattr(s, "body", ())) if isinstance(x, Store)]


def _grown_in(body: Sequence[Any]) -> list[Keep]:
    """What statements accumulate."""
    found = [s.keep for loop in cuda_schedule.loops_of(body) for s in loop.body if isinstance(s, Accumulate)]
    return list(dict.fromkeys(found))


def lane_of(cut: Vectors) -> Index:
    """A lane in terms of its vector and element."""
    return of(cut.vector) * cut.width + (of(cut.element) if cut.element is not None else 0)
