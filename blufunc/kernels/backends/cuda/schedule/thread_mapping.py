"""Thread mapping: points and lanes to blocks and threads, and storage of keeps.

Kernels, stage 6, four passes. ``reload_keeps`` precedes the mapping. A keep of an element that every point and row
reads, such as a normalization scale, costs registers, while the element is in L1: loops reload it. ``map_threads``
follows the choice of vectors; it decides the threads of a group, the groups of a block and the blocks of an SM.
``place_keeps`` moves keeps that exceed the registers to shared memory. ``lay_out_shared_memory``, the last pass,
assigns offsets there to keeps, copies of rows and partials of groups; the renderer declares static memory for
reductions. ``scheduled_kernel.py`` defines groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from blufunc.kernels.backends.cuda import device_model as device
from blufunc.kernels.backends.cuda.device_model import WARP
from blufunc.kernels.backends.cuda.schedule.kinds import scanned_keeps, turned_loads
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import (
    ScheduledKernel,
    ThreadMapping,
    Vectors,
    accumulated_in,
    keep_bytes,
    keeps_of,
    keeps_read_in,
    lane_loops,
)
from blufunc.kernels.loopir.index import Range, ranges_of
from blufunc.kernels.loopir.ir import (
    Accumulate,
    Buffer,
    Cell,
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
    post_order,
    reads_replaced,
)

# -- threads ----------------------------------------------------------------------------------------


Cuts = Mapping[Range, Vectors]


def map_threads(s: ScheduledKernel) -> ScheduledKernel:
    """Assign points and lanes to blocks and threads."""
    if s.kind == "column scan":
        return replace(s, mapping=_column_scan(s))
    if s.kind == "transpose":
        return replace(
            s, mapping=ThreadMapping(1, device.BLOCK, blocks=math.prod(tiles_of(s.kernel).values()))
        )
    if s.kind == "group":
        grouped = replace(s, mapping=ThreadMapping(1, device.BLOCK))
        return replace(s, mapping=replace(grouped.mapping, blocks=grouped.segment_starts[-1]))
    mapping = _of_points(s) if s.kind == "points" else _of_loops(s.kernel, s.cuts)
    return replace(s, mapping=replace(mapping, blocks=-(-s.places // mapping.points)))


def tiles_of(kernel: Kernel) -> dict[Range, int]:
    """Tiles along both ranges of a transpose, and points along the others."""
    found = turned_loads(kernel)
    assert found is not None
    tiled = found[0], kernel.grid[-1]
    return {r: -(-r.extent // WARP) if r in tiled else r.extent for r in kernel.grid}


def _of_points(s: ScheduledKernel) -> ThreadMapping:
    """One vector per thread: many threads hide memory latency."""
    vectors = s.kernel.points // max(1, math.prod(c.width for r, c in s.cuts.items() if r in s.kernel.grid))
    return ThreadMapping(1, device.BLOCK if vectors > device.SM_COUNT * device.BLOCK else device.BLOCK // 2)


def _of_loops(kernel: Kernel, cuts: Cuts) -> ThreadMapping:
    loops, keeps = list(lane_loops(kernel.body)), keeps_of(kernel)
    most = max((cuts[s.range] for s in loops), key=lambda c: c.vector.extent * c.width)
    rows = [s for s in kernel.body if isinstance(s, Rows)]
    if not rows:
        return _of_lanes(kernel, most, keeps, cuts)
    if not _are_independent(kernel.body):
        return ThreadMapping(_block_threads(most))
    reduces = any(isinstance(t, (Reduce, Scan)) for s in loops for t in s.body)
    mapping = _of_rows(most, max(r.range.extent for r in rows), reduces, keeps, cuts)
    if reduces:
        mapping = replace(mapping, resident=_resident(kernel.points, mapping, keeps, cuts))
    if all(isinstance(t, Accumulate) for s in lane_loops(rows) for t in s.body):
        mapping = replace(mapping, resident=device.REDUCTION_BLOCKS)
    return mapping


def _of_lanes(kernel: Kernel, most: Vectors, keeps: Sequence[Keep], cuts: Cuts) -> ThreadMapping:
    """One row per point: per warp or less, or per block if rows are long or few."""
    vectors, points = most.vector.extent, kernel.points
    few = points < device.FULL_BLOCKS and vectors > 2 * WARP
    crowded = _registers(keeps, WARP, cuts) > device.WARP_KEPT_REGISTERS and vectors > 2 * WARP
    if most.range.extent > device.WARP_LANES or few or crowded:
        return ThreadMapping(_block_threads(most, device.BLOCK_LIMIT if keeps else device.BLOCK_LIMIT // 2))
    threads = min(WARP, _power_of_two(vectors))
    if points % (WARP // threads):
        threads = WARP  # reductions need whole warps
    target = points * threads // device.FULL_BLOCKS
    block = max(WARP, min(device.BLOCK // 2, target // WARP * WARP))
    return ThreadMapping(threads, block // threads)


def _of_rows(most: Vectors, rows: int, reduces: bool, keeps: Sequence[Keep], cuts: Cuts) -> ThreadMapping:
    """Independent rows of a point: per warp, or per block if registers are scarce."""
    vectors = most.vector.extent
    if not reduces:
        threads = _power_of_two(vectors) if vectors <= WARP else min(device.BLOCK, -(-vectors // WARP) * WARP)
        return ThreadMapping(threads, sharing=_sharing(device.BLOCK // threads, rows, threads))
    threads = min(WARP, _power_of_two(vectors))
    if _registers(keeps, threads, cuts) <= device.KEPT_REGISTERS and most.is_unrolled(threads):
        # a whole warp reduces: smaller groups would have to end together
        return ThreadMapping(WARP, sharing=_sharing(device.BLOCK // WARP, rows, WARP))
    each = (
        device.ROWS_THREAD_VECTORS
        if vectors >= device.ROWS_THREAD_VECTORS * device.BLOCK
        else device.THREAD_VECTORS
    )
    threads = _block_threads(most, each=each)
    crowded = _registers(keeps, threads, cuts) > device.ROWS_KEPT_REGISTERS
    return ThreadMapping(_block_threads(most, each=1) if crowded else threads)


def _resident(points: int, mapping: ThreadMapping, keeps: Sequence[Keep], cuts: Cuts) -> int:
    """Resident blocks per SM where blocks loop over rows.

    All that the grid has for an SM; 0 if registers do not suffice, or if enough warps of a block have rows of their
    own to hide each other's latency.
    """
    blocks = -(-points // device.SM_COUNT)
    if mapping.threads == WARP:
        return blocks if blocks == 1 else 0
    registers = _registers(keeps, mapping.threads, cuts) + device.OTHER_REGISTERS
    return blocks if blocks * mapping.block * registers <= device.SM_REGISTERS else 0


def _sharing(groups: int, rows: int, threads: int) -> int:
    """Groups that share rows: at most one per row, and whole warps of groups."""
    groups = max(1, min(groups, rows))
    whole = max(1, WARP // threads)
    return -(-groups // whole) * whole


def _block_threads(most: Vectors, limit: int = device.BLOCK_LIMIT, each: int = device.THREAD_VECTORS) -> int:
    """Threads of a block with a row, about ``each`` vectors each; ideally a divisor."""
    vectors = most.vector.extent
    target = vectors / each
    exact = [t for t in range(128, limit + 1, WARP) if vectors % t == 0 and target / 2 <= t <= target * 2]
    if exact:
        return min(exact, key=lambda t: abs(t - target))
    return max(WARP, min(limit, -(-math.ceil(target) // WARP) * WARP))


def _registers(keeps: Sequence[Keep], threads: int, cuts: Cuts) -> int:
    """Registers per thread for keeps whose loops are unrolled."""
    return sum(_words(k, cuts[k.lanes], threads) for k in keeps if cuts[k.lanes].is_unrolled(threads))


def _words(keep: Keep, cut: Vectors, threads: int) -> int:
    return cut.steps(threads) * cut.width * max(1, keep.dtype.itemsize // 4)


def _power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def _are_independent(body: Sequence[Any]) -> bool:
    """True if no row of a point reads what another writes."""
    if sum(isinstance(s, Rows) for s in body) != 1:
        return False
    rows = next(s for s in body if isinstance(s, Rows))
    accumulated = {s.keep for loop in lane_loops(rows.body) for s in loop.body if isinstance(s, Accumulate)}
    set_here: set[Keep] = set()
    for s in rows.body:
        statements = s.body if isinstance(s, Lanes) else (s,)
        for t in statements:
            reads = keeps_read_in(t)
            if reads & accumulated or not reads <= set_here:
                return False
            if isinstance(t, Set):
                set_here.add(t.keep)
    return not set_here & accumulated


def _column_scan(s: ScheduledKernel) -> ThreadMapping:
    """Some rows of a tile of columns per warp; warps limited by rows and resources."""
    rows, keeps = s.kernel.body[0], keeps_of(s.kernel)
    (lanes,) = rows.body
    scanned = scanned_keeps(lanes)
    blocks = -(-lanes.range.extent // WARP) * s.kernel.points
    # besides the rows of each scan, half as many registers for values computed from them
    registers = (
        device.SCAN_REGISTERS + 3 * sum(device.SCANNED_ROWS * keep_bytes(k) // 4 for k in scanned) // 2
    )
    shared = WARP * sum(keep_bytes(k) * (1 + (k in scanned)) for k in keeps)
    room = min(device.SM_REGISTERS // (WARP * registers), device.STATIC_SHARED_BYTES // shared)
    room = room // 4 * 4  # registers are allocated per four warps
    warps = max(
        1,
        min(device.SCAN_WARPS[blocks < device.SM_COUNT], -(-rows.range.extent // device.SCANNED_ROWS), room),
    )
    crowded = int(len(scanned) > 2)  # otherwise compilers spill rather than leave one block per SM
    return ThreadMapping(WARP, sharing=warps, resident=crowded, blocks=blocks)


def place_keeps(s: ScheduledKernel) -> ScheduledKernel:
    """Move keeps to shared memory: those of long loops, and the largest."""
    if s.kind != "lanes":
        return s
    mapping, cuts, keeps = s.mapping, s.cuts, keeps_of(s.kernel)
    chosen: list[Keep] = []
    left = s.limits.shared_bytes - device.RESERVED_SHARED_BYTES
    registers = min(device.KEPT_REGISTERS, device.BLOCK_KEPT_REGISTERS // mapping.block)
    for k in sorted(keeps, key=lambda k: -_words(k, cuts[k.lanes], mapping.threads)):
        rest = [x for x in keeps if x not in chosen]
        fits = _registers(rest, mapping.threads, cuts) <= registers
        if cuts[k.lanes].is_unrolled(mapping.threads) and fits:
            break
        size = shared_size(k, cuts[k.lanes], mapping)
        if size <= left:
            chosen.append(k)
            left -= size
    return replace(s, in_shared=frozenset(chosen))


def shared_size(keep: Keep, cut: Vectors, mapping: ThreadMapping) -> int:
    """Bytes of shared memory of a keep, for all groups of a block."""
    return -(-cut.range.extent * keep_bytes(keep) * mapping.points * mapping.sharing // 16) * 16


# -- keeps that are loaded again --------------------------------------------------------------------


def reload_keeps(s: ScheduledKernel) -> ScheduledKernel:
    """Replace keeps of point- and row-invariant loads by the loads."""
    kernel = s.kernel
    sets = [t for t in kernel.statements() if isinstance(t, Set)]
    times = Counter(t.keep for t in sets)
    values = post_order(kernel.roots())
    in_indices = post_order([c for v in values for i in v.indices() for c in computed_in(i)])
    needed = {v.attr for v in in_indices if v.op == "read"}
    # sizes of outputs that may overwrite an input while points still read it
    overwritten = {t.buffer.size for t in replace(kernel, finish=()).statements() if isinstance(t, Store)}
    found: dict[Cell, Value] = {}
    for t in sets:
        if t.value.op != "load" or t.value.args or t.keep in needed or times[t.keep] > 1:
            continue
        buffer, index = t.value.attr
        if buffer.size not in overwritten and not buffer.written and ranges_of(index) <= {t.keep.lanes}:
            found[t.keep] = t.value
    if not found:
        return s

    def without_sets(t: Any) -> Any:
        if not hasattr(t, "body"):
            return t
        dropped = lambda x: isinstance(x, Set) and x.keep in found
        return replace(t, body=tuple(without_sets(x) for x in t.body if not dropped(x)))

    reloaded = reads_replaced(found)
    return replace(
        s, kernel=replace(kernel, body=tuple(reloaded.statement(without_sets(t)) for t in kernel.body))
    )


# -- shared memory ----------------------------------------------------------------------------------


def lay_out_shared_memory(s: ScheduledKernel) -> ScheduledKernel:
    """Assign offsets to keeps and copies of rows, in multiples of 16 bytes."""
    mapping = s.mapping
    sizes: dict[Keep | Buffer, int] = {
        k: shared_size(k, cut, mapping) for k, cut in s.keeps.items() if k in s.in_shared
    }
    # each group has a ring of rows; the groups of a block share a staged row
    sizes |= {b: -(-b.size * b.dtype.itemsize * mapping.sharing // 16) * 16 for b in s.copies}
    offsets, size = {}, 0
    for thing, nbytes in sizes.items():
        offsets[thing] = size
        size += nbytes
    bodies = [
        s.kernel.body,
        *([s.kernel.finish] if any(isinstance(t, Rows) for t in s.kernel.finish) else ()),
    ]
    combined = [s.keeps[k].range.extent * keep_bytes(k) for body in bodies for k in accumulated_in(body)]
    most = max(combined, default=0) * (mapping.sharing - 1) if s.kind == "lanes" else 0
    return replace(s, shared=offsets, combine_at=size, shared_bytes=size + most)
