"""Packing: offsets in the arena for rectangles, bytes by time.

Kernels, stage 7, below ``plan.py``. In: when each buffer is needed and its size. Out: an offset for each, none of which
overlap. Greedy, by the tightest gap, for a few orders of the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

ROOMY = 1 << 62  # the end of a space without a limit
GOOD_ENOUGH = 1.005  # a gain below this is not worth a search, nor another order of the steps
ROUNDS, PLACEMENTS = 48, 8_000  # the longest search for a better packing: about 0.1 s


class Shelf:
    """Rectangles that lie in one space, bytes by positions, sorted by offset."""

    def __init__(self, capacity: int = 16):
        self.count = 0
        self.table = np.empty((4, capacity), np.int64)  # first and last position, offset, top

    def fit(self, start: int, end: int, nbytes: int, limit: int = ROOMY) -> int | None:
        """The offset of the tightest gap that is free all the while, or None."""
        firsts, lasts, offsets, tops = self.table
        n = self.count
        (meanwhile,) = ((firsts[:n] <= end) & (lasts[:n] >= start)).nonzero()
        floors = np.zeros(len(meanwhile) + 1, np.int64)  # the tops below each gap; the last gap is open
        np.maximum.accumulate(tops[meanwhile], out=floors[1:])
        room = np.empty_like(floors)
        room[:-1], room[-1] = offsets[meanwhile], limit
        room -= floors
        room[room < nbytes] = ROOMY + 1
        which = int(room.argmin())
        return int(floors[which]) if room[which] <= ROOMY else None

    def put(self, start: int, end: int, offset: int, nbytes: int) -> None:
        """Adds a rectangle; ``nbytes`` is aligned, so that every gap begins at an aligned offset."""
        if self.count == self.table.shape[1]:
            self.table = np.concatenate([self.table, np.empty_like(self.table)], axis=1)
        at = int(self.table[2, : self.count].searchsorted(offset))
        self.table[:, at + 1 : self.count + 1] = self.table[:, at : self.count]
        self.table[:, at] = start, end, offset, offset + nbytes
        self.count += 1


Rectangle = tuple[int, int, int]  # first position, last position, bytes

# What comes first lies best. The first row is usually within the aim on training steps.
_STRATEGIES: tuple[Callable[[Rectangle], tuple[int, ...]], ...] = (
    lambda r: (-r[2], r[0] - r[1]),  # the largest
    lambda r: ((r[0] - r[1] - 1) * r[2],),  # the largest area
)


def pack(rectangles: list[Rectangle], bound: int, search: bool = True) -> tuple[list[int], int]:
    """Offsets for rectangles, and the height that they reach: the lowest of a few packings.

    ``search``: whether to search for a better one where the first few are not good enough.
    """
    best: list[int] = []
    lowest = ROOMY
    for offsets in _packings(rectangles, bound, search):
        height = max((offset + r[2] for offset, r in zip(offsets, rectangles, strict=True)), default=0)
        if height < lowest:
            best, lowest = offsets, height
        if lowest <= bound * GOOD_ENOUGH:
            break
    return best, lowest


def _packings(rectangles: list[Rectangle], bound: int, search: bool) -> Iterator[list[int]]:
    """Offsets by each strategy, then by blame: what reached above ``bound`` is placed earlier next time."""
    indices = range(len(rectangles))
    largest: list[int] = []
    for strategy in _STRATEGIES:
        offsets = _place(rectangles, sorted(indices, key=lambda i: strategy(rectangles[i])))
        largest = largest or offsets
        yield offsets
    offsets = largest
    weights = [r[2] for r in rectangles]
    for _ in range(min(ROUNDS, PLACEMENTS // (len(rectangles) + 1)) if search else 0):
        for i in indices:
            if offsets[i] + rectangles[i][2] > bound:
                weights[i] *= 3
        offsets = _place(rectangles, sorted(indices, key=lambda i: -weights[i]))
        yield offsets


def _place(rectangles: list[Rectangle], order: list[int]) -> list[int]:
    """Offsets for rectangles, each placed in the tightest gap among those before it."""
    shelf = Shelf(len(rectangles))
    offsets = [0] * len(rectangles)
    for i in order:
        start, end, nbytes = rectangles[i]
        offset = shelf.fit(start, end, nbytes)
        assert offset is not None  # the arena has no limit
        shelf.put(start, end, offset, nbytes)
        offsets[i] = offset
    return offsets
