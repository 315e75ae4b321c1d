"""ScheduledKernel: LoopIR with every decision on how a GPU runs it.

Kernels, stage 6, between LoopIR and CUDA C++, at the bottom of its package. In: a kernel. Out: the record that
``passes.py`` fills pass by pass, and that ``render`` prints as CUDA without further decisions. ``str()`` of it, shown
for each kernel by ``BLUFUNC_DEBUG=schedule``, lists the decisions.

A block consists of **thread groups**. A group has one point of the grid at a time, and its threads share the lanes of
the point. Without lanes, a group is one thread, which has one vector of the innermost grid range. Where the rows of a
point are independent, the groups of a block share them, and their accumulated keeps are reduced in order at the end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from blufunc.kernels.backends.cuda.device_model import (
    AHEAD_BYTES,
    HOPPER,
    ROW_OPERATIONS,
    UNROLLED_VECTORS,
    VECTORS_IN_FLIGHT,
    Limits,
)
from blufunc.kernels.loopir.index import Index, Range, of
from blufunc.kernels.loopir.ir import (
    Accumulate,
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Scan,
    Set,
    Value,
    post_order,
    values_of,
)

Kind = Literal["points", "lanes", "column scan", "transpose", "group"]
"""Kinds of kernels, one renderer each; ``kinds.py`` chooses."""


@dataclass(frozen=True, eq=False)
class Vectors:
    """A loop variable split into vectors: ``range = width * vector + element``.

    Attributes:
      range: the loop variable.
      width: elements per vector.
      vector: index of the vector; the range itself if the width is 1.
      element: index of the element in its vector; None if the width is 1.
    """

    range: Range
    width: int
    vector: Range
    element: Range | None

    @property
    def innermost(self) -> Range:
        """Loop variable that all values of the range depend on."""
        return self.vector if self.element is None else self.element

    @property
    def index(self) -> Index:
        """The range in terms of vector and element."""
        return of(self.vector) * self.width + (of(self.element) if self.element is not None else 0)

    def steps(self, threads: int) -> int:
        """Vectors of each thread of a group."""
        return -(-self.vector.extent // threads)

    def is_unrolled(self, threads: int) -> bool:
        """True if a thread's loop over its vectors is fully unrolled."""
        return self.steps(threads) <= UNROLLED_VECTORS


@dataclass(frozen=True)
class ThreadMapping:
    """Assignment of points and lanes to blocks and threads.

    Attributes:
      threads: threads of a group.
      points: groups of a block that have a point each.
      sharing: groups of a block that share the rows of one point; 1 where ``points`` is more than 1.
      resident: blocks that an SM must have room for, so that the compiler may use all registers that these leave; 0:
        the compiler balances registers and blocks.
      cluster: blocks that are one group; more than 1 only with one group and one point.
      blocks: blocks of the grid.
    """

    threads: int = 1
    points: int = 1
    sharing: int = 1
    resident: int = 0
    cluster: int = 1
    blocks: int = 0

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.points * self.sharing // self.cluster


@dataclass(frozen=True)
class StagedRow:
    """A row copied to shared memory, because several loops read it.

    Attributes:
      source, index: the input, and the element of it that each lane reads.
      row: stands for the copy, whose elements are those of the lanes.
      cut: the lanes in vectors.
      slot: index of a vector in the copy; in a cluster, among the vectors of the block.
      first: position of the first loop that reads the copy, among the kernel's statements.
      bulk: True if one thread copies the block's share in large pieces; otherwise each thread copies what it reads.
    """

    source: Buffer
    index: Index
    row: Buffer
    cut: Vectors
    slot: Range
    first: int
    bulk: bool

    @property
    def place(self) -> Index:
        """Element of the copy that each lane reads."""
        assert self.cut.element is not None
        return of(self.slot) * self.cut.width + of(self.cut.element)


@dataclass(frozen=True)
class Prefetch:
    """Ring of prefetched rows in shared memory for each group.

    Attributes:
      depth: rows of the ring.
      turn: stands for the row that is read.
      lanes: the lanes of a row.
      sources: for each copied input, the index of the element that each lane reads, and the ring.
    """

    depth: int
    turn: Range
    lanes: Range
    sources: Mapping[Buffer, tuple[Index, Buffer]]


@dataclass(frozen=True)
class ScheduledKernel:
    """A kernel and the decisions of the passes so far.

    Attributes:
      kernel: LoopIR; after the last pass in terms of vectors and their elements.
      aliased: names of inputs that may share memory with an output, which the read-only cache must not serve.
      limits: limits of the device.
      kind: selects the renderer.
      cuts: vectors of each range of lanes and, without lanes, of the innermost grid range.
      mapping: blocks and threads.
      in_shared: keeps in shared memory; the others are in registers.
      keeps: vectors of each keep's values, once the kernel is vectorized.
      staged: the row that loops read from shared memory.
      prefetch: rows copied to shared memory ahead of time.
      last_reads: stand-ins for inputs at their last read, which bypass the cache.
      streamed: outputs that bypass the cache.
      held: inputs that stay in L2 longest.
      fast_exps: exponentials on the special function unit.
      arrive_after: statements of a point after which its block counts as done for the finish; None: after all.
      shared: byte offsets in dynamic shared memory of keeps and copies of rows.
      combine_at: byte offset at which groups reduce their accumulated keeps.
      shared_bytes: dynamic shared memory per block.
      segments: points of each kernel of a group.
    """

    kernel: Kernel
    aliased: frozenset[str] = frozenset()
    limits: Limits = HOPPER
    kind: Kind = "points"
    cuts: Mapping[Range, Vectors] = field(default_factory=dict)
    mapping: ThreadMapping = ThreadMapping()
    in_shared: frozenset[Keep] = frozenset()
    keeps: Mapping[Keep, Vectors] = field(default_factory=dict)
    staged: StagedRow | None = None
    prefetch: Prefetch | None = None
    last_reads: Mapping[Buffer, Buffer] = field(default_factory=dict)
    streamed: frozenset[Buffer] = frozenset()
    held: frozenset[Buffer] = frozenset()
    fast_exps: frozenset[Value] = frozenset()
    arrive_after: int | None = None
    shared: Mapping[Keep | Buffer, int] = field(default_factory=dict)
    combine_at: int = 0
    shared_bytes: int = 0
    segments: tuple[int, ...] = ()

    @property
    def entry(self) -> str:
        """Name of the CUDA function, distinct from all of CUDA's names."""
        return f"{self.kernel.name}_kernel"

    @property
    def grid_ranges(self) -> list[Range]:
        """Ranges of the grid, with the range of vectors in place of a cut one."""
        return [self.cuts[r].vector if r in self.cuts else r for r in self.kernel.grid]

    @property
    def places(self) -> int:
        """Points of the grid, or vectors of points."""
        return math.prod(r.extent for r in self.grid_ranges)

    @property
    def copies(self) -> list[Buffer]:
        """Stand-ins for rows in shared memory."""
        staged = [] if self.staged is None else [self.staged.row]
        return [*staged, *(ring for _, ring in (self.prefetch.sources.values() if self.prefetch else ()))]

    @property
    def waits(self) -> bool:
        """Whether it waits for preceding kernels by itself, so that it may begin ahead.

        Its loads then bypass the read-only cache, which must not hold what a kernel that still runs will write.
        """
        buffers = sum(b.size * b.dtype.itemsize for b in self.kernel.buffers)
        return max(1, len(self.segments)) * buffers <= AHEAD_BYTES

    @property
    def segment_vectors(self) -> list[int]:
        """Vectors of each kernel of a group."""
        return [n // self.cuts[self.kernel.grid[0]].width for n in self.segments]

    @property
    def segment_starts(self) -> list[int]:
        """First block of each kernel of a group, and the total block count."""
        return [0, *itertools.accumulate(-(-n // self.mapping.block) for n in self.segment_vectors)]

    def is_crowded(self, loop: Lanes) -> bool:
        """True if a loop reads several rows besides the staged one.

        The block that stages a row has all threads of its SM, so registers cannot hold all rows in flight.
        """
        return self.staged is not None and len({v.attr[0] for v in loads_in(loop)} - {self.staged.source}) > 1

    def rows_in_flight(self, rows: Rows, threads: int) -> int:
        """Unrolled iterations of a loop over rows; one if threads synchronize in each."""
        loops = list(lane_loops(rows.body))
        if any(isinstance(t, (Reduce, Scan)) for s in loops for t in s.body):
            return 1
        vectors = max([self.cuts[s.range].steps(threads) for s in loops], default=1)
        most = max(1, VECTORS_IN_FLIGHT // max(1, vectors))
        lanes = {x for s in loops for x in (s.range, self.cuts[s.range].vector, self.cuts[s.range].element)}
        if any(rows.range in v.ranges() and v.ranges() & lanes for s in loops for v in loads_in(s)):
            return most
        # only arithmetic is in flight, of which a few hundred operations hide the loads of a row
        work = sum(self.cuts[s.range].width * _operations(s) for s in loops)
        return max(1, min(most, ROW_OPERATIONS // max(1, work)))

    def __str__(self) -> str:
        rows = [(name, text) for name, text in _decisions(self) if text]
        return "\n".join([f"schedule {self.entry}", *(f"  {n:<9} {t}" for n, t in rows), str(self.kernel)])


# -- facts about LoopIR ----------------------------------------------------------------------------


def lane_loops(body: Sequence[Any]) -> Iterator[Lanes]:
    """Loops over lanes in a body, including those in rows."""
    for s in body:
        if isinstance(s, Lanes):
            yield s
        elif isinstance(s, Rows):
            yield from lane_loops(s.body)


def keeps_of(kernel: Kernel) -> list[Keep]:
    """All keeps that a kernel writes, in order."""
    return list(dict.fromkeys(s.keep for s in kernel.statements() if isinstance(s, (Set, Accumulate))))


def accumulated_in(body: Sequence[Any]) -> list[Keep]:
    """Keeps that loops over lanes accumulate, in order."""
    found = [s.keep for loop in lane_loops(body) for s in loop.body if isinstance(s, Accumulate)]
    return list(dict.fromkeys(found))


def _operations(loop: Lanes) -> int:
    """Arithmetic per lane of a loop, in float additions."""
    return sum(v.attr[0].cost for v in post_order(values_in(loop)) if v.op == "apply")


def values_in(s: Any) -> list[Value]:
    """Values that a statement uses, including nested statements."""
    return [*values_of(s), *(v for t in getattr(s, "body", ()) for v in values_in(t))]


def loads_in(s: Any) -> list[Value]:
    """Loads that a statement requires."""
    return [v for v in post_order(values_in(s)) if v.op == "load"]


def keeps_read_in(s: Any) -> set[Keep]:
    """Keeps that a statement reads."""
    return {v.attr for v in post_order(values_in(s)) if v.op == "read" and isinstance(v.attr, Keep)}


def keep_bytes(keep: Keep) -> int:
    """Bytes of one value of a keep."""
    return max(4, keep.dtype.itemsize)


# -- text ------------------------------------------------------------------------------------------


def _decisions(s: ScheduledKernel) -> Iterator[tuple[str, str]]:
    """Decisions as ``(name, text)``; a text may be empty."""
    m, staged, prefetch = s.mapping, s.staged, s.prefetch
    resident = f", at least {m.resident} per SM" if m.resident else ""
    yield "kind", s.kind + (f" of {len(s.segments)} kernels" if s.segments else "")
    yield "grid", f"{m.blocks} blocks x {m.block} threads{resident}"
    yield "mapping", _mapping(s)
    yield "cluster", f"{m.cluster} blocks" if m.cluster > 1 else ""
    for cut in s.cuts.values():
        yield "vectors", _vectors(s, cut)
    for keep, cut in s.keeps.items():
        place = _in_shared(s, keep) if keep in s.in_shared else "registers"
        yield "keep", f"{keep} in {place}, values per thread: {_steps(s, cut) * cut.width}"
    if staged is not None:
        how = "in bulk" if staged.bulk else "vector by vector"
        yield "stage", f"{staged.source.name} -> {staged.row} in {_in_shared(s, staged.row)}, {how}"
    if prefetch is not None:
        for source, (_, ring) in prefetch.sources.items():
            yield "prefetch", f"{source.name} -> {ring} in {_in_shared(s, ring)}, {prefetch.depth} rows ahead"
    caches = {"read last": s.last_reads, "streamed": s.streamed, "held in L2": s.held}
    yield "cache", "; ".join(f"{how}: {_names(s, found)}" for how, found in caches.items() if found)
    yield "exp", f"{len(s.fast_exps)} fast" if s.fast_exps else ""
    yield "shared", f"{s.shared_bytes} bytes" if s.shared_bytes else ""
    if s.kernel.finish:
        n, last = len(s.kernel.body), "the last block"
        last += f" of each of {s.kernel.ends} parts" if s.kernel.ends > 1 else ""
        yield "finish", f"by {last}; blocks count as done after {s.arrive_after or n} of {n} statements"
    yield "begin", "ahead of the end of preceding kernels" if s.waits else ""
    yield "aliased", ", ".join(sorted(s.aliased))


def _in_shared(s: ScheduledKernel, thing: Keep | Buffer) -> str:
    return f"shared memory at byte {s.shared[thing]}" if thing in s.shared else "shared memory"


def _mapping(s: ScheduledKernel) -> str:
    m = s.mapping
    if s.kind in ("points", "group"):
        return "1 vector per thread"
    if s.kind == "transpose":
        return "1 tile per block"
    if s.kind == "column scan":
        return f"{m.threads} columns per block, {m.sharing} warps share the rows"
    group = f"{m.threads} threads per point"
    if m.points > 1:
        return f"{group}, {m.points} points per block"
    return f"{group}, {m.sharing} groups share its rows" if m.sharing > 1 else group


def _steps(s: ScheduledKernel, cut: Vectors) -> int:
    """Vectors of a range per thread; for lanes of a point, as its group shares them."""
    return cut.steps(s.mapping.threads) if s.kind == "lanes" else 1


def _vectors(s: ScheduledKernel, cut: Vectors) -> str:
    text = f"{cut.range} < {cut.range.extent}"
    if cut.element is not None:
        text += f" = {cut.width} * {cut.vector} + {cut.element}"
    unrolled = s.kind != "lanes" or cut.is_unrolled(s.mapping.threads)
    return f"{text}: {_steps(s, cut)} per thread{'' if unrolled else ', not unrolled'}"


def _names(s: ScheduledKernel, buffers: Any) -> str:
    """Names in parameter order, since sets are unordered."""
    return ", ".join(b.name for b in s.kernel.buffers if b in buffers)
