"""Rows in shared memory: staged for several loops, or prefetched.

Kernels, stage 6, two passes. ``stage_rows`` follows the thread mapping, which it replaces where it stages a row. If
shared memory has space for the rows of one or two blocks per SM, or of a cluster, the row is copied
there asynchronously while the first loop reads what has arrived. The whole row is then in flight at once, and memory
is read once. If later loops need the row only through one computed value, that value replaces the row's elements, such
as scaled logits. Each thread stores it for the lanes that it reads, so no thread waits.

Rows that are not staged are reread. Inputs at their last read and outputs that are not read then bypass the cache.
Where nothing is reread, outputs are cached as usual.

``prefetch_rows`` requires the thread mapping and the keeps in shared memory. A warp or block that loops over rows and
keeps much of each in registers has low occupancy: memory idles during its reductions. So it copies its next rows to
shared memory asynchronously, into a ring. The first loop of an iteration loads the oldest row to registers, and its
slot is refilled at once. The ring shrinks L1, so row-invariant values stay in registers too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from blufunc.kernels.backends.cuda import device_model as device
from blufunc.kernels.backends.cuda.device_model import WARP, Limits
from blufunc.kernels.backends.cuda.schedule.reductions import OneLane
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import (
    Prefetch,
    ScheduledKernel,
    StagedRow,
    ThreadMapping,
    Vectors,
    keep_bytes,
    keeps_of,
    lane_loops,
    loads_in,
    values_in,
)
from blufunc.kernels.backends.cuda.schedule.vectorize import is_wide
from blufunc.kernels.loopir.index import Index, Range, of, ranges_of
from blufunc.kernels.loopir.ir import (
    BODIES,
    Accumulate,
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Reduce,
    Replacement,
    Rows,
    Scan,
    Set,
    Store,
    Value,
    computed_in,
    dependencies,
    load,
    loads_replaced,
    post_order,
    read,
)

# -- staged rows ------------------------------------------------------------------------------------


_LEAST_COST = 3
"""Minimum operations of a value to store it in place of the row, not recompute it."""

Access = tuple[Buffer, Index]


def stage_rows(s: ScheduledKernel) -> ScheduledKernel:
    """Stage a reread row in shared memory; otherwise choose what bypasses the cache."""
    kernel = s.kernel
    reread = _read_again(kernel)
    if not reread:
        return replace(s, held=_held(kernel))
    found = _largest_row(kernel, reread, s.cuts, s.limits)
    if found is not None:
        staged, (cluster, threads, resident) = found
        blocks = cluster * s.places
        mapping = ThreadMapping(cluster * threads, resident=resident, cluster=cluster, blocks=blocks)
        kernel = _with_copy(kernel, staged)
        s = replace(s, staged=staged, mapping=mapping)
        reread = _read_again(kernel)
    last = {b: Buffer(b.name, b.dtype, b.size) for b, _ in reread}
    body = []
    for n, t in enumerate(kernel.body):
        ends = {a: load(last[a[0]], a[1]) for a, loops in reread.items() if n == loops[-1]}
        body.append(loads_replaced(t, ends) if isinstance(t, Lanes) and ends else t)
    read_later = {v.attr[0] for v in post_order(replace(kernel, body=()).roots()) if v.op == "load"}
    large = {b for b in kernel.buffers if b.written and b.size * b.dtype.itemsize > device.L2_BYTES}
    streamed = frozenset(large - read_later if reread else ())
    return replace(s, kernel=replace(kernel, body=tuple(body)), last_reads=last, streamed=streamed)


def _held(kernel: Kernel) -> frozenset[Buffer]:
    """Inputs that stay in L2 longest, where it cannot hold inputs and outputs.

    Memory is busiest if outputs leave L2 first: threads wait for loads, not for stores.
    """
    large = {b for b in kernel.buffers if b.size * b.dtype.itemsize > device.L2_BYTES // 2}
    loops = [s for s in kernel.statements() if isinstance(s, Lanes) and not isinstance(s, OneLane)]
    stored = {t.buffer for s in loops for t in s.body if isinstance(t, Store)}
    if not stored & large:
        return frozenset()
    loads = [(v, s.range) for s in loops for v in loads_in(s)]
    return frozenset(v.attr[0] for v, lanes in loads if v.attr[0] in large and _is_of_row(v, lanes))


def _read_again(kernel: Kernel) -> dict[Access, list[int]]:
    """Rows that several loops over all lanes read, with the positions of these loops."""
    found: dict[Access, list[int]] = {}
    for n, s in enumerate(kernel.body):
        if isinstance(s, Lanes) and not isinstance(s, OneLane):
            for access in {v.attr: None for v in loads_in(s) if _is_of_row(v, s.range)}:
                found.setdefault(access, []).append(n)
    return {access: loops for access, loops in found.items() if len(loops) > 1}


def _is_of_row(v: Value, lanes: Range) -> bool:
    """True if a load of an input has one element per lane and varies by point."""
    ranges = ranges_of(v.attr[1])
    return not v.args and not v.attr[0].written and lanes in ranges and ranges != {lanes}


def _largest_row(
    kernel: Kernel, reread: Mapping[Access, list[int]], cuts: Mapping[Range, Vectors], limits: Limits
) -> tuple[StagedRow, Shape] | None:
    """Largest row that fits, if its vectors can be copied and nothing else is kept."""
    if any(isinstance(s, (Set, Accumulate, Scan)) for s in kernel.statements()):
        return None
    found: dict[int, tuple[StagedRow, Shape]] = {}
    for (buffer, index), loops in reread.items():
        over = kernel.body[loops[0]].range
        cut, size = cuts[over], over.extent * buffer.dtype.itemsize
        vectors, vector_bytes = cut.vector.extent, cut.width * buffer.dtype.itemsize
        if cut.element is None or vector_bytes % 16 or size < device.STAGED_BYTES:
            continue
        shape = _shape(vectors, vector_bytes, limits)
        if shape is None or any(kernel.body[n].range is not over for n in loops) or not is_wide(index, cut):
            continue
        slot = Range("slot", shape.slots(vectors)) if shape.cluster > 1 else cut.vector
        row = Buffer(f"{buffer.name}_row", buffer.dtype, slot.extent * cut.width)
        bulk = limits.bulk and index.coefficient(over) == 1
        found[size] = StagedRow(buffer, index, row, cut, slot, loops[0], bulk), shape
    return found[max(found)] if found else None


def _shape(vectors: int, vector_bytes: int, limits: Limits) -> Shape | None:
    """Blocks for rows of ``vectors`` vectors; None if a row does not fit."""
    if limits.bulk:
        return cluster_shape(vectors, vector_bytes, limits)
    blocks = min(
        device.STAGING_BLOCKS, limits.shared_bytes // (vectors * vector_bytes + device.RESERVED_SHARED_BYTES)
    )
    return Shape(1, device.BLOCK_LIMIT, blocks) if blocks else None


# -- clusters ---------------------------------------------------------------------------------------

# From compute capability 9.0 the blocks of a cluster are co-scheduled and form one thread group: each keeps its share
# of a row in its own shared memory. Reductions combine the blocks' results in rank order, so they are deterministic and
# the same in all blocks. ``include/cluster.cuh`` has the device functions.

# measured: barriers of the cluster take 5% more time. Bulk copies: 16384 rows of 128256 floats, with loss and gradient,
# at 94% of the speed of a plain copy instead of 91%, and 8192 rows of 50304 at 96% instead of 93% (H200)


class Shape(NamedTuple):
    """Blocks of a row.

    Attributes:
      cluster: blocks that share it.
      threads: threads per block.
      resident: blocks that fit on an SM.
    """

    cluster: int
    threads: int
    resident: int

    def slots(self, vectors: int) -> int:
        """Vectors that a block has space for: a whole row, or an even share per thread."""
        if self.cluster == 1:
            return vectors
        return -(-vectors // (self.cluster * self.threads)) * self.threads


def cluster_shape(vectors: int, vector_bytes: int, limits: Limits) -> Shape | None:
    """Cluster shape for rows of ``vectors`` vectors; None if a row does not fit.

    While the blocks of a cluster synchronize, another cluster uses the memory system. So several blocks per SM are
    best, with as much of its shared memory as possible; then small clusters, which are easier to place: one block if
    two rows fit.
    """
    found: dict[tuple[bool, int], Shape] = {}
    for cluster in range(1, limits.cluster + 1):
        share = -(-vectors // cluster)
        for resident, wanted in device.CLUSTER_THREADS.items():
            steps = min(device.UNROLLED_VECTORS, -(-share // wanted))
            shape = Shape(cluster, -(-share // (WARP * steps)) * WARP, resident)
            room = resident * (shape.slots(vectors) * vector_bytes + device.RESERVED_SHARED_BYTES)
            if room <= limits.shared_bytes and shape.threads <= device.BLOCK_LIMIT:
                used = 16 * resident * share * vector_bytes // limits.shared_bytes  # in sixteenths
                # a block alone on its SM prefers a small cluster
                found.setdefault((True, used) if resident > 1 else (False, cluster), shape)
    return found[max(found)] if found else None


# -- loops that read the copy ----------------------------------------------------------------------


def _with_copy(kernel: Kernel, staged: StagedRow) -> Kernel:
    """Kernel whose loops read the copy, or the results stored in its place."""
    of_row = lambda v: v.op == "load" and _is_of_row(v, staged.cut.range)
    found = {(staged.source, staged.index): load(staged.row, staged.place)}
    body = [
        loads_replaced(s, found) if n >= staged.first and isinstance(s, Lanes) else s
        for n, s in enumerate(_with_results(kernel.body, staged, of_row))
    ]
    return replace(kernel, body=tuple(body))


def _with_results(body: Sequence[Any], staged: StagedRow, of_row: Callable[[Value], bool]) -> list[Any]:
    """Statements whose loops find earlier results in place of the staged row.

    ``of_row`` is true for loads of the row, and of other rows.
    """
    out, row = list(body), staged.row
    loops = [n for n, s in enumerate(body) if isinstance(s, Lanes) and s.range is staged.cut.range]
    if any(isinstance(s, OneLane) for s in body):
        return out  # it may read the row
    kept = load(row, staged.place)
    for at, n in enumerate(loops[:-1]):
        later = loops[at + 1 :]
        found = _result_of(out[n], [out[m] for m in later], row, lambda v: v is kept or of_row(v))
        if found is None:
            continue
        out[n] = replace(out[n], body=(*out[n].body, Store(row, staged.place, found)))
        put = Replacement({found: kept}.get)
        for m in later:
            out[m] = put.statement(out[m])
    return out


def _result_of(
    loop: Lanes, later: Sequence[Lanes], row: Buffer, of_row: Callable[[Value], bool]
) -> Value | None:
    """Last value of a loop that is later loops' only need of rows, if worth storing."""
    here = set(post_order(values_in(loop)))
    needed = [v for s in later for v in values_in(s)]
    if any(v.op in BODIES for v in post_order(needed)):
        return None  # the body has values that do not belong to a lane
    for v in reversed(post_order(needed)):
        fits = v in here and v.op == "apply" and v.dtype == row.dtype
        if fits and any(of_row(x) for x in post_order([v])) and not any(map(of_row, _without(needed, v))):
            operations = sum(x.attr[0].cost for x in post_order([v]) if x.op == "apply")
            return v if operations >= _LEAST_COST else None
    return None


def _without(roots: Sequence[Value], known: Value) -> list[Value]:
    """Values to compute where one is known."""
    return post_order(
        [v for v in roots if v is not known], lambda v: [d for d in dependencies(v) if d is not known]
    )


# -- prefetched rows --------------------------------------------------------------------------------


def prefetch_rows(s: ScheduledKernel) -> ScheduledKernel:
    """Read rows from a ring in shared memory in the first loop, where that pays.

    It does not pay where blocks hide each other's latency, or where a loop only accumulates rows, which prefetches
    anyway.
    """
    kernel, mapping = s.kernel, s.mapping
    at = next((n for n, t in enumerate(kernel.body) if isinstance(t, Rows)), None)
    if at is None or not mapping.resident or s.in_shared:
        return s
    rows = kernel.body[at]
    first = rows.body[0]
    if not any(isinstance(t, (Reduce, Scan)) for loop in lane_loops(rows.body) for t in loop.body):
        return s
    if not isinstance(first, Lanes) or any(isinstance(t, Scan) for t in first.body):
        return s
    lanes, cut = first.range, s.cuts[first.range]
    found = _rows_read_once(rows, first, cut)
    depth = _depth(s, lanes, sum(b.dtype.itemsize for b in found))
    fewest, _ = device.PREFETCHED_ROWS
    if (
        not found
        or not cut.is_unrolled(mapping.threads)
        or min(depth, rows.range.extent // mapping.sharing) < fewest
    ):
        return s
    turn = Range("turn", depth)
    rings = {b: Buffer(f"{b.name}_rows", b.dtype, depth * lanes.extent) for b in found}
    place = of(turn) * lanes.extent + of(lanes)
    reading = loads_replaced(first, {(b, i): load(rings[b], place) for b, i in found.items()})
    rows = replace(rows, body=(reading, *rows.body[1:]))
    before, rows = _kept_before(rows, lanes, _left_registers(s) // _words(cut, mapping.threads))
    body = (*kernel.body[:at], *before, rows, *kernel.body[at + 1 :])
    prefetch = Prefetch(depth, turn, lanes, {b: (i, rings[b]) for b, i in found.items()})
    return replace(s, kernel=replace(kernel, body=body), prefetch=prefetch)


def _depth(s: ScheduledKernel, lanes: Range, lane_bytes: int) -> int:
    """Rows of a ring that fit in shared memory next to the groups' accumulated keeps."""
    accumulated = [keep_bytes(t.keep) for t in s.kernel.statements() if isinstance(t, Accumulate)]
    combined = lanes.extent * max(accumulated, default=0) * (s.mapping.sharing - 1)
    room = s.limits.shared_bytes // s.mapping.resident - device.RESERVED_SHARED_BYTES - combined
    return min(device.PREFETCHED_ROWS[1], room // max(1, lanes.extent * lane_bytes * s.mapping.sharing))


def _rows_read_once(rows: Rows, first: Lanes, cut: Vectors) -> dict[Buffer, Index]:
    """Inputs read once per row, by the first loop, in multiples of 16 bytes."""
    found: dict[Buffer, Index] = {}
    if cut.element is None:
        return found
    others = Counter(v.attr[0] for s in rows.body for v in loads_in(s))
    for v in loads_in(first):
        buffer, index = v.attr
        is_row = {rows.range, cut.range} <= v.ranges() and not v.args and not computed_in(index)
        if not is_row or buffer.written or others[buffer] > 1 or cut.width * buffer.dtype.itemsize % 16:
            continue
        if is_wide(index, cut):
            found[buffer] = index
    return found


def _words(cut: Vectors, threads: int) -> int:
    """Registers per thread for one value of each of its lanes."""
    return cut.steps(threads) * cut.width


def _left_registers(s: ScheduledKernel) -> int:
    share = device.SM_REGISTERS // (s.mapping.resident * s.mapping.block) - device.OTHER_REGISTERS
    kept = sum(_words(s.cuts[k.lanes], s.mapping.threads) for k in keeps_of(s.kernel))
    return min(device.KEPT_REGISTERS, share) - kept


def _kept_before(rows: Rows, lanes: Range, most: int) -> tuple[list[Lanes], Rows]:
    """A loop that keeps up to ``most`` row-invariant values, and rows that read them."""
    found = {v.attr: v for s in rows.body for v in loads_in(s) if not v.args and v.ranges() == {lanes}}
    keeps = {a: Keep(f"{a[0].name}_kept", v.dtype, lanes) for a, v in list(found.items())[: max(0, most)]}
    keeps = {a: k for a, k in keeps.items() if not a[0].written and k.dtype.itemsize <= 4}
    if not keeps:
        return [], rows
    kept = {a: read(k) for a, k in keeps.items()}
    body = tuple(loads_replaced(s, kept) if isinstance(s, Lanes) else s for s in rows.body)
    return [Lanes(lanes, tuple(Set(k, found[a]) for a, k in keeps.items()))], replace(rows, body=body)
