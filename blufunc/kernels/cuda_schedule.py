"""How the points and lanes of a kernel are dealt out to the threads of a GPU.

Kernels, stage 6, between LoopIR and ``cstyle_cuda.py``. A block is made of **groups** of threads. A group does one
point at a time, its threads sharing the lanes; a kernel without lanes has groups of one thread, and each thread one
vector of the grid's innermost range. Where a point has many rows that do not depend on each other, the groups of a
block take its rows in turn, and what they accumulate is combined in their order at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blufunc.kernels.cuda_limits import SHARED_BYTES, SM_COUNT, STATIC_BYTES
from blufunc.kernels.cuda_vectors import Vectors
from blufunc.kernels.indices import Range
from blufunc.kernels.loopir import (
    Accumulate,
    Keep,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Scan,
    Set,
    post_order,
    values_of,
)

_WARP = 32
_BLOCK = 256
WARP_LANES = 1024
"""Up to how many lanes one warp does a row."""
_THREAD_VECTORS = 2
"""Vectors of a row that a thread does, about, where a block does a row."""
_ROWS_VECTORS = 4
"""The same where a block does long row after row: exchanges between fewer threads take less of its time."""
_UNROLLED = 16
"""Up to how many vectors a thread's loop is written out, so that what it keeps can be registers."""
KEPT_REGISTERS = 160
"""Registers of a thread that keeps may take."""
_WARP_REGISTERS = 64
"""Up to how many of them a warp does a row that is a point: beyond, there would be too few warps to hide waiting."""

_BLOCK_REGISTERS = 80
"""Up to how many of them a thread keeps where a block does row after row: beyond, a thread has one vector of a row."""
REGISTER_FILE = 1 << 16
"""Registers of a multiprocessor."""
OTHER_REGISTERS = 72
"""About how many registers a thread has beside those that keep something."""

_ADDING_BLOCKS = 3
"""Blocks of a multiprocessor that do nothing but add up rows: each reads some ahead."""


@dataclass(frozen=True)
class Schedule:
    """The shape of blocks.

    Attributes:
      threads: of a group.
      points: groups of a block that do a point each.
      sharing: groups of a block that share the rows of one point; 1 where ``points`` is more than 1.
      in_shared: keeps that lie in shared memory.
      resident: how many blocks a multiprocessor is to hold at least, where the compiler may take all of the registers
        that these leave; 0: it finds a balance, and gives up reading ahead for more blocks than there are.
      cluster: how many blocks are one group; more than 1 only where there is one group and one point.
    """

    threads: int
    points: int = 1
    sharing: int = 1
    in_shared: tuple[Keep, ...] = ()
    resident: int = 0
    cluster: int = 1

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.points * self.sharing // self.cluster


def steps_of(cut: Vectors, threads: int) -> int:
    """How many vectors a thread of a group does."""
    return -(-cut.vector.extent // threads)


def is_unrolled(cut: Vectors, threads: int) -> bool:
    """Whether the loop over a range's lanes is written out."""
    return steps_of(cut, threads) <= _UNROLLED


def loops_of(body: Sequence[Any]) -> Iterator[Lanes]:
    """The loops over lanes in a body, those in rows too."""
    for s in body:
        if isinstance(s, Lanes):
            yield s
        elif isinstance(s, Rows):
            yield from loops_of(s.body)


def schedule(kernel: Kernel, cuts: dict[Range, Vectors], shared_bytes: int = SHARED_BYTES) -> Schedule:
    """The shape of blocks for a kernel whose ranges of lanes, or innermost grid range, have been cut in vectors.

    ``shared_bytes`` is what a block may have of shared memory.
    """
    loops = list(loops_of(kernel.body))
    if not loops:
        return _of_points(kernel, cuts)
    most = max((cuts[s.range] for s in loops), key=lambda c: c.vector.extent * c.width)
    rows = [s for s in kernel.body if isinstance(s, Rows)]
    keeps = list(dict.fromkeys(s.keep for s in kernel.statements() if isinstance(s, (Set, Accumulate))))
    reduces = any(isinstance(t, (Reduce, Scan)) for s in loops for t in s.body)
    if rows and _rows_apart(kernel.body):
        made = _of_rows(most, max(r.range.extent for r in rows), reduces, keeps, cuts)
        if reduces:
            made = replace(made, resident=_blocks_at_once(kernel.points, made, keeps, cuts))
        if all(isinstance(t, Accumulate) for s in loops_of(rows) for t in s.body):
            made = replace(made, resident=_ADDING_BLOCKS)
    elif rows:
        made = Schedule(_block_threads(most))
    else:
        made = _of_lanes(kernel, most, keeps, cuts)
    return replace(made, in_shared=_in_shared(keeps, made, cuts, shared_bytes - STATIC_BYTES))


def _of_points(kernel: Kernel, cuts: dict[Range, Vectors]) -> Schedule:
    """No lanes: a thread does a vector. That there are many threads hides the time that memory takes."""
    vectors = kernel.points // max(1, math.prod(c.width for r, c in cuts.items() if r in kernel.grid))
    return Schedule(1, _BLOCK if vectors > SM_COUNT * _BLOCK else _BLOCK // 2)


def _of_lanes(kernel: Kernel, most: Vectors, keeps: Sequence[Keep], cuts: dict[Range, Vectors]) -> Schedule:
    """Rows of lanes that are points: a warp each or less, or a block each where they are long or few."""
    vectors, points = most.vector.extent, kernel.points
    few = points < 4 * SM_COUNT and vectors > 2 * _WARP
    much = _registers(keeps, Schedule(_WARP), cuts) > _WARP_REGISTERS
    if most.range.extent > WARP_LANES or few or (much and vectors > 2 * _WARP):
        return Schedule(_block_threads(most, 1024 if keeps else 512))
    threads = min(_WARP, _power_of_two(vectors))
    if points % (_WARP // threads):
        threads = _WARP  # whole warps come to exchanges, or none of their threads
    wanted = points * threads // (4 * SM_COUNT)  # threads of a block if there is a block for each place
    block = max(_WARP, min(_BLOCK // 2, wanted // _WARP * _WARP))
    return Schedule(threads, block // threads)


def _of_rows(
    most: Vectors, rows: int, reduces: bool, keeps: Sequence[Keep], cuts: dict[Range, Vectors]
) -> Schedule:
    """Rows that groups may share: they need no barrier for a row if a group is a warp."""
    vectors = most.vector.extent
    if not reduces:
        threads = _power_of_two(vectors) if vectors <= _WARP else min(_BLOCK, -(-vectors // _WARP) * _WARP)
        return Schedule(threads, sharing=_sharing(_BLOCK // threads, rows, threads))
    warp = Schedule(min(_WARP, _power_of_two(vectors)))
    if _registers(keeps, warp, cuts) <= KEPT_REGISTERS and is_unrolled(most, warp.threads):
        # what exchanges values is a whole warp: groups of less would have to come to an end together
        return Schedule(_WARP, sharing=_sharing(_BLOCK // _WARP, rows, _WARP))
    each = _ROWS_VECTORS if vectors >= _ROWS_VECTORS * _BLOCK else _THREAD_VECTORS
    made = Schedule(_block_threads(most, each=each))
    crowded = _registers(keeps, made, cuts) > _BLOCK_REGISTERS
    return Schedule(_block_threads(most, each=1)) if crowded else made


def _blocks_at_once(points: int, made: Schedule, keeps: Sequence[Keep], cuts: dict[Range, Vectors]) -> int:
    """How many blocks that do row after row a multiprocessor is to hold: all that there are for it; 0 where they have
    no room, or where warps of a block do rows each and are so many that they hide each other's waiting.
    """
    blocks = -(-points // SM_COUNT)
    if made.threads == _WARP:
        return blocks if blocks == 1 else 0
    each = _registers(keeps, made, cuts) + OTHER_REGISTERS
    return blocks if blocks * made.block * each <= REGISTER_FILE else 0


def _sharing(groups: int, rows: int, threads: int) -> int:
    """How many groups share rows: no more than there are, and whole warps of them."""
    groups = max(1, min(groups, rows))
    whole = max(1, _WARP // threads)
    return -(-groups // whole) * whole


def _block_threads(most: Vectors, limit: int = 1024, each: int = _THREAD_VECTORS) -> int:
    """Threads of a block that does a row, about so many vectors each: a divisor of their number if there is one."""
    vectors = most.vector.extent
    wanted = vectors / each
    exact = [t for t in range(128, limit + 1, _WARP) if vectors % t == 0 and wanted / 2 <= t <= wanted * 2]
    if exact:
        return min(exact, key=lambda t: abs(t - wanted))
    return max(_WARP, min(limit, -(-math.ceil(wanted) // _WARP) * _WARP))


def _registers(keeps: Sequence[Keep], made: Schedule, cuts: dict[Range, Vectors]) -> int:
    return sum(
        _words(k, cuts[k.lanes], made.threads) for k in keeps if is_unrolled(cuts[k.lanes], made.threads)
    )


def _words(keep: Keep, cut: Vectors, threads: int) -> int:
    return steps_of(cut, threads) * cut.width * max(1, keep.dtype.itemsize // 4)


def _in_shared(
    keeps: Sequence[Keep], made: Schedule, cuts: dict[Range, Vectors], bytes_left: int
) -> tuple[Keep, ...]:
    """The keeps that are no registers: those of loops that are too long to be written out, and the largest."""
    chosen: list[Keep] = []
    registers = min(KEPT_REGISTERS, (40 << 10) // made.block)
    left = sorted(keeps, key=lambda k: -_words(k, cuts[k.lanes], made.threads))
    for k in left:
        size = shared_size(k, cuts[k.lanes], made)
        rest = [x for x in keeps if x not in chosen]
        if is_unrolled(cuts[k.lanes], made.threads) and _registers(rest, made, cuts) <= registers:
            break
        if size <= bytes_left:
            chosen.append(k)
            bytes_left -= size
    return tuple(chosen)


def shared_size(keep: Keep, cut: Vectors, made: Schedule) -> int:
    """Bytes of shared memory of a keep, for all groups of a block."""
    each = cut.range.extent * max(4, keep.dtype.itemsize)
    return -(-each * made.points * made.sharing // 16) * 16


def _power_of_two(n: int) -> int:
    """The least that is no less."""
    return 1 << max(0, n - 1).bit_length()


def _rows_apart(body: Sequence[Any]) -> bool:
    """Whether the rows of a point can be taken in any order: nothing that one writes is read by the next."""
    if sum(isinstance(s, Rows) for s in body) != 1:
        return False
    rows = next(s for s in body if isinstance(s, Rows))
    grown = {s.keep for loop in loops_of(rows.body) for s in loop.body if isinstance(s, Accumulate)}
    set_here: set[Keep] = set()
    for s in rows.body:
        statements = s.body if isinstance(s, Lanes) else (s,)
        for t in statements:
            reads = {v.attr for v in post_order(values_of(t)) if v.op == "read" and isinstance(v.attr, Keep)}
            if reads & grown or not reads <= set_here:
                return False
            if isinstance(t, Set):
                set_here.add(t.keep)
    return not set_here & grown
