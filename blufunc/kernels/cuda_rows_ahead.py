"""Rows that are on their way to shared memory while the rows before are computed.

Kernels, stage 6, between ``cuda_schedule.py`` and ``cuda_style.py``. A warp or a block that takes row after row, and
keeps much of each in registers, leaves room for few others: nobody reads while it waits for its reductions. So it
copies rows that it is going to take to shared memory, not by way of registers, a few of them ahead: a ring of rows,
whose oldest is taken to registers by the first loop of its turn, and at once copied over. That leaves the first-level
cache little room: what is the same for all rows stays in registers too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from blufunc.kernels.cuda_limits import STATIC_BYTES
from blufunc.kernels.cuda_schedule import (
    KEPT_REGISTERS,
    OTHER_REGISTERS,
    REGISTER_FILE,
    Schedule,
    is_unrolled,
    loops_of,
    steps_of,
)
from blufunc.kernels.cuda_vectors import Vectors, is_contiguous, loads_replaced
from blufunc.kernels.indices import Index, Range, of
from blufunc.kernels.loopir import (
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
    computed_in,
    load,
    post_order,
    read,
    values_of,
)

_MOST_AHEAD, _LEAST_AHEAD = 4, 2
"""Rows that a group has under way."""


@dataclass(frozen=True)
class RowsAhead:
    """The rows of a group that are in shared memory.

    Attributes:
      depth: how many there are.
      turn: stands for the one that is read.
      lanes: of the rows.
      sources: for each buffer that is copied, the index of the element that each lane reads, and what stands for the
        copies.
    """

    depth: int
    turn: Range
    lanes: Range
    sources: Mapping[Buffer, tuple[Index, Buffer]]


def with_rows_ahead(
    kernel: Kernel, made: Schedule, cuts: Mapping[Range, Vectors], shared_bytes: int
) -> tuple[Kernel, RowsAhead | None]:
    """A kernel whose first loop over each row reads it from shared memory; the kernel as it is where that is no use.

    Args:
      made: its schedule. Blocks that are to share a multiprocessor hide each other's waiting.
      cuts: the vectors of its lanes.
      shared_bytes: what a block may have of shared memory.
    """
    at = next((n for n, s in enumerate(kernel.body) if isinstance(s, Rows)), None)
    if at is None or not made.resident or made.in_shared:
        return kernel, None
    rows = kernel.body[at]
    first = rows.body[0]
    if not any(isinstance(t, (Reduce, Scan)) for s in loops_of(rows.body) for t in s.body):
        return kernel, None  # nobody waits: a loop that only adds up reads ahead by itself
    if not isinstance(first, Lanes) or not is_unrolled(cuts[first.range], made.threads):
        return kernel, None
    if any(isinstance(s, Scan) for s in first.body):  # its loop is of another kind
        return kernel, None
    lanes = first.range
    found = _copied(rows, first, cuts[lanes])
    each = lanes.extent * sum(b.dtype.itemsize for b in found) * made.sharing
    grown = [max(4, s.keep.dtype.itemsize) for s in kernel.statements() if isinstance(s, Accumulate)]
    combined = lanes.extent * max(grown, default=0) * (made.sharing - 1)  # what groups have accumulated
    room = shared_bytes // made.resident - STATIC_BYTES - combined
    depth = min(_MOST_AHEAD, room // max(1, each))
    if not found or depth < _LEAST_AHEAD or rows.range.extent < _LEAST_AHEAD * made.sharing:
        return kernel, None
    turn = Range("turn", depth)
    copies = {b: Buffer(f"{b.name}_rows", b.dtype, depth * lanes.extent) for b in found}
    place = of(turn) * lanes.extent + of(lanes)
    reading = loads_replaced(first, {(b, i): load(copies[b], place) for b, i in found.items()})
    changed = replace(rows, body=(reading, *rows.body[1:]))
    before, changed = _kept_before(
        changed, lanes, _left_registers(kernel, made, cuts) // _words(cuts[lanes], made)
    )
    body = (*kernel.body[:at], *before, changed, *kernel.body[at + 1 :])
    sources = {b: (i, copies[b]) for b, i in found.items()}
    return replace(kernel, body=body), RowsAhead(depth, turn, lanes, sources)


def _copied(rows: Rows, first: Lanes, cut: Vectors) -> dict[Buffer, Index]:
    """What lanes read of each row at one place, in its first loop alone, in vectors of 16 bytes or a multiple."""
    found: dict[Buffer, Index] = {}
    if cut.element is None:
        return found
    vectors = {cut.range: of(cut.vector) * cut.width + of(cut.element)}
    loads = _loads(first)
    others = Counter(v.attr[0] for s in rows.body for v in _loads(s))
    for v in loads:
        buffer, index = v.attr
        is_row = {rows.range, cut.range} <= v.ranges() and not v.args and not computed_in(index)
        if not is_row or buffer.written or others[buffer] > 1 or cut.width * buffer.dtype.itemsize % 16:
            continue
        if is_contiguous(index.substitute(vectors), cut.element):
            found[buffer] = index
    return found


def _words(cut: Vectors, made: Schedule) -> int:
    """Registers of a thread for one value of each of its lanes."""
    return steps_of(cut, made.threads) * cut.width


def _left_registers(kernel: Kernel, made: Schedule, cuts: Mapping[Range, Vectors]) -> int:
    keeps = {s.keep for s in kernel.statements() if isinstance(s, (Set, Accumulate))}
    share = REGISTER_FILE // (made.resident * made.block) - OTHER_REGISTERS
    return min(KEPT_REGISTERS, share) - sum(_words(cuts[k.lanes], made) for k in keeps)


def _kept_before(rows: Rows, lanes: Range, most: int) -> tuple[list[Lanes], Rows]:
    """A loop that keeps what lanes read whatever the row, up to ``most`` values each, and the rows that find it."""
    found = {v.attr: v for s in rows.body for v in _loads(s) if not v.args and v.ranges() == {lanes}}
    keeps = {a: Keep(f"{a[0].name}_kept", v.dtype, lanes) for a, v in list(found.items())[: max(0, most)]}
    keeps = {a: k for a, k in keeps.items() if not a[0].written and k.dtype.itemsize <= 4}
    if not keeps:
        return [], rows
    kept = {a: read(k) for a, k in keeps.items()}
    body = tuple(loads_replaced(s, kept) if isinstance(s, Lanes) else s for s in rows.body)
    return [Lanes(lanes, tuple(Set(k, found[a]) for a, k in keeps.items()))], replace(rows, body=body)


def _loads(s: Any) -> list[Value]:
    inner = [v for t in getattr(s, "body", (s,)) for v in values_of(t)]
    return [v for v in post_order(inner) if v.op == "load"]
