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

from blufunc.kernels.cuda_vectors import Vectors
from blufunc.kernels.indices import Range, of
from blufunc.kernels.loopir import (
    Accumulate,
    Keep,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Set,
    Store,
    Substitution,
    Value,
    post_order,
    read,
    values_of,
)
from blufunc.kernels.scalars import is_small_float

SM_COUNT = 132
"""Multiprocessors of the device that the figures below were chosen for."""

SHARED_BYTES = 227 << 10
"""What a block may have of shared memory."""

_WARP = 32
_BLOCK = 256
_WARP_LANES = 1024
"""Up to how many lanes one warp does a row."""
_THREAD_VECTORS = 4
"""Vectors of a row that a thread does, about, where a block does a row."""
_UNROLLED = 16
"""Up to how many vectors a thread's loop is written out, so that what it keeps can be registers."""
_KEPT_REGISTERS = 104
"""Registers of a thread that keeps may take."""


@dataclass(frozen=True)
class Schedule:
    """The shape of blocks.

    Attributes:
      threads: of a group.
      points: groups of a block that do a point each.
      sharing: groups of a block that share the rows of one point; 1 where ``points`` is more than 1.
      unrolled: vectors that a thread does one after the other, of a kernel without lanes.
      in_shared: keeps that lie in shared memory.
    """

    threads: int
    points: int = 1
    sharing: int = 1
    unrolled: int = 1
    in_shared: tuple[Keep, ...] = ()

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.points * self.sharing


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


def schedule(kernel: Kernel, cuts: dict[Range, Vectors]) -> Schedule:
    """The shape of blocks for a kernel whose ranges of lanes, or innermost grid range, have been cut in vectors."""
    loops = list(loops_of(kernel.body))
    if not loops:
        return _of_points(kernel, cuts)
    most = max((cuts[s.range] for s in loops), key=lambda c: c.vector.extent * c.width)
    rows = [s for s in kernel.body if isinstance(s, Rows)]
    keeps = list(dict.fromkeys(s.keep for s in kernel.statements() if isinstance(s, (Set, Accumulate))))
    reduces = any(isinstance(s, Reduce) for s in kernel.statements() if s not in kernel.finish)
    if rows and _rows_apart(kernel.body):
        made = _of_rows(most, max(r.range.extent for r in rows), reduces, keeps, cuts)
    elif rows:
        made = Schedule(_block_threads(most))
    else:
        made = _of_lanes(kernel, most)
    return replace(made, in_shared=_in_shared(keeps, made, cuts))


def _of_points(kernel: Kernel, cuts: dict[Range, Vectors]) -> Schedule:
    """No lanes: a thread does a vector, or a few where there are very many."""
    vectors = kernel.points // max(1, math.prod(c.width for r, c in cuts.items() if r in kernel.grid))
    enough = SM_COUNT * 2048 * 4
    return Schedule(1, _BLOCK if vectors > SM_COUNT * 128 else 128, unrolled=2 if vectors >= enough else 1)


def _of_lanes(kernel: Kernel, most: Vectors) -> Schedule:
    """Rows of lanes that are points: a warp each or less, or a block each where they are long or few."""
    vectors, lanes = most.vector.extent, most.range.extent
    few = kernel.points < 4 * SM_COUNT and vectors > 2 * _WARP
    if lanes > _WARP_LANES or few:
        return Schedule(_block_threads(most, 2 if few else _THREAD_VECTORS))
    threads = min(_WARP, _power_of_two(vectors))
    if kernel.points % (_WARP // threads):
        threads = _WARP  # whole warps come to exchanges, or none of their threads
    wanted = (
        kernel.points * threads // (4 * SM_COUNT)
    )  # threads of a block if there is a block for each place
    block = max(_WARP, min(_BLOCK, wanted // _WARP * _WARP))
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
    if _registers(keeps, warp, cuts) <= _KEPT_REGISTERS and is_unrolled(most, warp.threads):
        # what exchanges values is a whole warp: groups of less would have to come to an end together
        return Schedule(_WARP, sharing=_sharing(_BLOCK // _WARP, rows, _WARP))
    return Schedule(_block_threads(most, 2))


def _sharing(groups: int, rows: int, threads: int) -> int:
    """How many groups share rows: no more than there are, and whole warps of them."""
    groups = max(1, min(groups, rows))
    whole = max(1, _WARP // threads)
    return -(-groups // whole) * whole


def _block_threads(most: Vectors, each: int = _THREAD_VECTORS) -> int:
    """Threads of a block that does a row: a divisor of the number of vectors if there is a good one."""
    vectors = most.vector.extent
    wanted = vectors / each
    exact = [t for t in range(128, 1025, _WARP) if vectors % t == 0 and wanted / 2 <= t <= wanted * 2]
    if exact:
        return min(exact, key=lambda t: abs(t - wanted))
    return max(_WARP, min(1024, -(-math.ceil(wanted) // _WARP) * _WARP))


def _registers(keeps: Sequence[Keep], made: Schedule, cuts: dict[Range, Vectors]) -> int:
    return sum(
        _words(k, cuts[k.lanes], made.threads) for k in keeps if is_unrolled(cuts[k.lanes], made.threads)
    )


def _words(keep: Keep, cut: Vectors, threads: int) -> int:
    return steps_of(cut, threads) * cut.width * max(1, keep.dtype.itemsize // 4)


def _in_shared(keeps: Sequence[Keep], made: Schedule, cuts: dict[Range, Vectors]) -> tuple[Keep, ...]:
    """The keeps that are no registers: those of loops that are too long to be written out, and the largest."""
    chosen: list[Keep] = []
    bytes_left = SHARED_BYTES - (4 << 10)
    registers = _KEPT_REGISTERS if made.block <= 512 else 40
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


# -- sums of parts -----------------------------------------------------------------------------------

_LONG_FOLD = 32
_FEW_POINTS = SM_COUNT * 512


def with_folds_as_rows(kernel: Kernel) -> Kernel:
    """A kernel of few points with long folds, as one of lanes and rows, so that many threads share a fold.

    That is what finishes reductions over rows: each point adds up a column of the chunks' results.
    """
    if len(kernel.grid) != 1 or kernel.finish or not all(isinstance(s, Store) for s in kernel.body):
        return kernel
    (points,) = kernel.grid
    folds = [v for v in post_order(kernel.roots()) if v.op == "fold"]
    width = next((n for n in (32, 16, 8, 4) if points.extent % n == 0), 1)
    if not folds or width == 1 or points.extent > _FEW_POINTS:
        return kernel
    over = folds[0].attr[1]
    if over.extent < _LONG_FOLD or any(s.guard is not None for s in kernel.body):
        return kernel
    if not all(_is_column(v, over, points) for v in folds):
        return kernel
    tile, lane = Range("tile", points.extent // width), Range("k", width)
    put = Substitution({points: of(tile) * width + of(lane)})
    keeps = [Keep(f"{v.attr[0]}_{n}", v.dtype, lane, v.attr[0]) for n, v in enumerate(folds)]
    sums = tuple(Accumulate(k, put(v.args[0])) for k, v in zip(keeps, folds, strict=True))
    put.done.update((v, read(k)) for k, v in zip(keeps, folds, strict=True))
    stores = tuple(Store(s.buffer, put.index(s.index), put(s.value)) for s in kernel.body)
    body = (Rows(over, (Lanes(lane, sums),), of(over), over.extent), Lanes(lane, stores))
    return Kernel(kernel.name, kernel.buffers, (tile,), body, kernel.notes)


def _is_column(v: Value, over: Range, points: Range) -> bool:
    """Whether a fold adds up what points side by side read side by side."""
    summand = v.args[0]
    if v.attr[1] is not over or summand.op != "load" or summand.args or is_small_float(v.dtype):
        return False
    return {over, points} <= summand.ranges()
