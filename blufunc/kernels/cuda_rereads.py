"""Rows that several loops read, and that are too long to be kept in registers.

Kernels, stage 6, before ``cuda_style.py``. Where one or two blocks of a multiprocessor find room for their rows in
shared memory, or the blocks of a cluster for one row (``cuda_clusters.py``), the row is copied there, without passing
through registers, while the first loop takes up what has come already: so all of it is under way at once, and memory is
read once. Other rows are read again; what is known to be read for the last time, or written and not read at all, need
not stay in the cache then. Where nothing is read again, results are written as always: past the cache takes 1% longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from blufunc.kernels.cuda_clusters import Shape, cluster_shape
from blufunc.kernels.cuda_limits import STATIC_BYTES, Limits
from blufunc.kernels.cuda_row_passes import OneLane
from blufunc.kernels.cuda_row_results import with_results_kept
from blufunc.kernels.cuda_schedule import Schedule
from blufunc.kernels.cuda_vectors import Vectors, is_contiguous, loads_replaced
from blufunc.kernels.indices import Index, Range, of, ranges_of
from blufunc.kernels.loopir import (
    Accumulate,
    Buffer,
    Kernel,
    Lanes,
    Scan,
    Set,
    Store,
    Value,
    load,
    post_order,
    values_of,
)

_THREADS = 1024
"""Threads of a block that copies its row vector by vector: so few each that their loops are written out."""

_LEAST_BYTES = 76 << 10
"""Rows from here on are copied: of smaller ones, the second-level cache has most when they are read again."""

_MOST_BLOCKS = 2
"""Blocks that copy rows on a multiprocessor: there is no place for more threads."""

_CACHE_BYTES = 50 << 20
"""The second-level cache: larger results are not found there by who comes next."""

Access = tuple[Buffer, Index]


@dataclass(frozen=True)
class RowCopy:
    """A row in shared memory.

    Attributes:
      source, index: what is copied, and the element of it that each lane reads.
      row: stands for the copy, whose elements are those of the lanes.
      cut: the lanes in vectors.
      slot: where the copy has a vector: its number, or of a row that blocks share, that among those of the block.
      first: the position among the kernel's statements of the first loop that reads it.
      shape: the blocks.
      bulk: whether one thread copies what a block has of the row, in large pieces; else each does what it reads.
    """

    source: Buffer
    index: Index
    row: Buffer
    cut: Vectors
    slot: Range
    first: int
    shape: Shape
    bulk: bool

    @property
    def place(self) -> Index:
        """Where the copy has the element of each lane."""
        assert self.cut.element is not None
        return of(self.slot) * self.cut.width + of(self.cut.element)

    @property
    def schedule(self) -> Schedule:
        """The blocks of a kernel that copies its rows."""
        cluster, threads, resident = self.shape
        return Schedule(cluster * threads, resident=resident, cluster=cluster)


@dataclass(frozen=True)
class Rereads:
    """How rows are read again.

    Attributes:
      copy: the row that is copied.
      last: stands for buffers where they are read for the last time.
      streamed: the outputs that need not stay in the cache.
      held: the inputs that are to stay there longer than what is written.
    """

    copy: RowCopy | None = None
    last: Mapping[Buffer, Buffer] = field(default_factory=dict)
    streamed: frozenset[Buffer] = frozenset()
    held: frozenset[Buffer] = frozenset()


def with_rereads(kernel: Kernel, cuts: Mapping[Range, Vectors], limits: Limits) -> tuple[Kernel, Rereads]:
    """A kernel in which loops read rows again from where they lie then.

    Args:
      cuts: the vectors of its lanes.
      limits: what the device allows.
    """
    again = _read_again(kernel)
    if not again:
        return kernel, Rereads(held=_held(kernel))
    copy = _copied(kernel, again, cuts, limits)
    if copy is not None:
        kernel = _with_copy(kernel, copy)
        again = _read_again(kernel)
    last = {b: Buffer(b.name, b.dtype, b.size) for b, _ in again}
    body = []
    for n, s in enumerate(kernel.body):
        found = {a: load(last[a[0]], a[1]) for a, loops in again.items() if n == loops[-1]}
        body.append(loads_replaced(s, found) if isinstance(s, Lanes) and found else s)
    read_later = {v.attr[0] for v in post_order(replace(kernel, body=()).roots()) if v.op == "load"}
    large = {b for b in kernel.buffers if b.written and b.size * b.dtype.itemsize > _CACHE_BYTES}
    streamed = large if again else set()
    return replace(kernel, body=tuple(body)), Rereads(copy, last, frozenset(streamed - read_later))


def _with_copy(kernel: Kernel, copy: RowCopy) -> Kernel:
    """The kernel in which loops read the copy, and what earlier ones put in its place."""
    access = copy.source, copy.index
    of_row = lambda v: v.op == "load" and _is_of_row(v, copy.cut.range)
    body = with_results_kept(kernel.body, copy.cut.range, copy.row, copy.place, of_row)
    found = {access: load(copy.row, copy.place)}
    read_copy = lambda n, s: n >= copy.first and isinstance(s, Lanes)
    return replace(
        kernel, body=tuple(loads_replaced(s, found) if read_copy(n, s) else s for n, s in enumerate(body))
    )


def _held(kernel: Kernel) -> frozenset[Buffer]:
    """Inputs and outputs that the cache does not hold together go through it. Memory is busiest if what is written
    leaves it first: that waits for no one, but reading does.
    """
    large = {b for b in kernel.buffers if b.size * b.dtype.itemsize > _CACHE_BYTES // 2}
    loops = [s for s in kernel.statements() if isinstance(s, Lanes) and not isinstance(s, OneLane)]
    stored = {t.buffer for s in loops for t in s.body if isinstance(t, Store)}
    if not stored & large:
        return frozenset()
    return frozenset(
        v.attr[0] for s in loops for v in _loads(s) if v.attr[0] in large and _is_of_row(v, s.range)
    )


def _read_again(kernel: Kernel) -> dict[Access, list[int]]:
    """What varies from point to point, and several loops over all lanes read: with the positions of these loops."""
    found: dict[Access, list[int]] = {}
    for n, s in enumerate(kernel.body):
        if not isinstance(s, Lanes) or isinstance(s, OneLane):
            continue
        for access in {v.attr: None for v in _loads(s) if _is_of_row(v, s.range)}:
            found.setdefault(access, []).append(n)
    return {access: loops for access, loops in found.items() if len(loops) > 1}


def _loads(s: Lanes) -> list[Value]:
    return [v for v in post_order([v for t in s.body for v in values_of(t)]) if v.op == "load"]


def _is_of_row(v: Value, lanes: Range) -> bool:
    ranges = ranges_of(v.attr[1])
    return not v.args and not v.attr[0].written and lanes in ranges and ranges != {lanes}


def _copied(
    kernel: Kernel, again: Mapping[Access, list[int]], cuts: Mapping[Range, Vectors], limits: Limits
) -> RowCopy | None:
    """The largest row that there is room for, if its vectors can be copied and nothing else is kept."""
    statements = list(kernel.statements())
    if any(isinstance(s, (Set, Accumulate, Scan)) for s in statements):
        return None
    found: dict[int, RowCopy] = {}
    for (buffer, index), loops in again.items():
        over = kernel.body[loops[0]].range
        cut, size = cuts[over], over.extent * buffer.dtype.itemsize
        if cut.element is None or cut.width * buffer.dtype.itemsize % 16 or size < _LEAST_BYTES:
            continue
        shape = _shape(cut.vector.extent, cut.width * buffer.dtype.itemsize, limits)
        if shape is None or any(kernel.body[n].range is not over for n in loops):
            continue
        if is_contiguous(index.substitute({over: of(cut.vector) * cut.width + of(cut.element)}), cut.element):
            slot = Range("slot", shape.slots(cut.vector.extent)) if shape.cluster > 1 else cut.vector
            row = Buffer(f"{buffer.name}_row", buffer.dtype, slot.extent * cut.width)
            bulk = limits.bulk and index.coefficient(over) == 1
            found[size] = RowCopy(buffer, index, row, cut, slot, loops[0], shape, bulk)
    return found[max(found)] if found else None


def _shape(vectors: int, vector_bytes: int, limits: Limits) -> Shape | None:
    """The blocks for rows of so many vectors, or None where there is no room for a row."""
    if limits.bulk:
        return cluster_shape(vectors, vector_bytes, limits)
    blocks = min(_MOST_BLOCKS, limits.shared_bytes // (vectors * vector_bytes + STATIC_BYTES))
    return Shape(1, _THREADS, blocks) if blocks else None
