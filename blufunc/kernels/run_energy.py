"""The energy that a run takes, of several ways to compute the same.

Kernels, stage 8, beside ``fastest``. A device's counter of energy moves a few times a second, and clocks follow the
power of the last tenths of one. So the device is kept busy without a gap, with one way from one move of the counter to
a next one, and with the next way from there. What was begun before a move and ends behind it is counted there.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Way = TypeVar("Way", bound=Hashable)

Start = Callable[[Way], tuple[int, Callable[[], bool]]]
"""Puts some runs of a way on the device, and does not wait: how many, and a function for whether they are done."""

WINDOW_S = 0.08
"""For how long each way runs, at least: on an H200 the counter moves every 0.1 s."""

PATIENCE_S = 0.5
"""A counter that has not moved for so long counts nothing."""

_AHEAD = 3  # how many starts wait on the device, so that it is never idle


def joules_of_runs(
    ways: Sequence[Way], start: Start[Way], counter: Callable[[], float]
) -> dict[Way, float] | None:
    """Joules of one run of each way, on a warm device; None: the counter does not move, or hardly anything runs.

    Args:
      counter: what the device has taken so far, in joules.
    """
    begun: deque[tuple[Way, int, Callable[[], bool]]] = deque()
    ran: Counter[Way] = Counter()

    def until_it_moves(way: Way, least: float) -> float | None:
        """What the counter says when it moves, ``least`` seconds from now or later, after runs of this way."""
        before, since = counter(), time.monotonic()
        while time.monotonic() - since < least + PATIENCE_S:
            while len(begun) < _AHEAD:
                begun.append((way, *start(way)))
            while begun and begun[0][2]():
                done, count, _ = begun.popleft()
                ran[done] += count
            now = counter()
            if now != before and time.monotonic() - since >= least:
                return now
            before = now
        return None

    found: dict[Way, float] = {}
    if (last := until_it_moves(ways[0], 0.0)) is None:
        return None
    for way in (ways[0], *ways):  # the first one warms up
        ran.clear()
        if (now := until_it_moves(way, WINDOW_S)) is None or not ran[way]:
            return None
        others = sum(found[w] * count for w, count in ran.items() if w != way)
        found[way], last = (now - last - others) / ran[way], now
    return found
