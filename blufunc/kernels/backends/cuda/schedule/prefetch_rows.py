"""Prefetch rows to shared memory while the rows before them are computed.

Kernels, stage 6, a pass that needs the mapping of threads and the keeps in shared memory. A warp or a block that
loops over rows, and keeps much of each in registers, leaves room for few others: memory idles while it waits for its
reductions. So it copies the rows that it computes next to shared memory, without passing through registers: a ring of
rows, whose oldest the first loop of an iteration loads to registers, and which is overwritten at once. That leaves L1
little room: what is the same for all rows stays in registers too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from blufunc.kernels.backends.cuda import device_model as device
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import (
    Prefetch,
    ScheduledKernel,
    Vectors,
    keep_bytes,
    keeps_of,
    lane_loops,
    loads_in,
)
from blufunc.kernels.backends.cuda.schedule.vectorize import is_wide
from blufunc.kernels.loopir.index import Index, Range, of
from blufunc.kernels.loopir.ir import (
    Accumulate,
    Buffer,
    Keep,
    Lanes,
    Reduce,
    Rows,
    Scan,
    Set,
    computed_in,
    load,
    read,
)
from blufunc.kernels.loopir.replace import loads_replaced


def prefetch_rows(s: ScheduledKernel) -> ScheduledKernel:
    """Let the first loop over each row read it from a ring in shared memory, where that pays.

    It does not where blocks hide each other's latency, or where a loop only accumulates rows: it reads ahead anyway.
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
    """Rows of a ring that shared memory has room for, besides what groups have accumulated."""
    accumulated = [keep_bytes(t.keep) for t in s.kernel.statements() if isinstance(t, Accumulate)]
    combined = lanes.extent * max(accumulated, default=0) * (s.mapping.sharing - 1)
    room = s.limits.shared_bytes // s.mapping.resident - device.RESERVED_SHARED_BYTES - combined
    return min(device.PREFETCHED_ROWS[1], room // max(1, lanes.extent * lane_bytes * s.mapping.sharing))


def _rows_read_once(rows: Rows, first: Lanes, cut: Vectors) -> dict[Buffer, Index]:
    """Inputs of which lanes read one element of each row, in the first loop alone, in whole multiples of 16 bytes."""
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
    """Registers of a thread for one value of each of its lanes."""
    return cut.steps(threads) * cut.width


def _left_registers(s: ScheduledKernel) -> int:
    share = device.SM_REGISTERS // (s.mapping.resident * s.mapping.block) - device.OTHER_REGISTERS
    kept = sum(_words(s.cuts[k.lanes], s.mapping.threads) for k in keeps_of(s.kernel))
    return min(device.KEPT_REGISTERS, share) - kept


def _kept_before(rows: Rows, lanes: Range, most: int) -> tuple[list[Lanes], Rows]:
    """A loop that keeps up to ``most`` values that lanes read whatever the row, and the rows that read the keeps."""
    found = {v.attr: v for s in rows.body for v in loads_in(s) if not v.args and v.ranges() == {lanes}}
    keeps = {a: Keep(f"{a[0].name}_kept", v.dtype, lanes) for a, v in list(found.items())[: max(0, most)]}
    keeps = {a: k for a, k in keeps.items() if not a[0].written and k.dtype.itemsize <= 4}
    if not keeps:
        return [], rows
    kept = {a: read(k) for a, k in keeps.items()}
    body = tuple(loads_replaced(s, kept) if isinstance(s, Lanes) else s for s in rows.body)
    return [Lanes(lanes, tuple(Set(k, found[a]) for a, k in keeps.items()))], replace(rows, body=body)
