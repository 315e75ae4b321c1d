"""Autotuning: the fastest of several implementations, by timing them.

Kernels, stage 8, called by ``cublaslt``. In: candidates, likely winners first, and a timer. Out: their times. All
candidates run briefly, the best more carefully. The best long ones run again, in turns, until the device is as warm as
in training: at the power limit clocks drop, and a candidate that moves fewer bytes may win.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

Way = TypeVar("Way", bound=Hashable)

Look = Callable[[Way, float], tuple[float, float] | None]
"""Time a candidate for about that many ms: ms of one run and of the look, or None."""


class Round(NamedTuple):
    """A round of timing: candidates, milliseconds for each, and repetitions."""

    kept: int
    ms: float
    passes: int


GLANCE, CARE, WARM = Round(16, 0.2, 1), Round(6, 1.0, 3), Round(4, 10.0, 3)

MOST_MS = 80.0
"""Time limit of the first two rounds."""

LONG_MS = 0.05
"""Minimum time in ms of a candidate that is timed warm."""


def fastest(ways: Sequence[Way], look: Look[Way]) -> dict[Way, float]:
    """Milliseconds of one run of the working candidates, the fastest first.

    Args:
      ways: the candidates, the likeliest winner first.
      look: runs a candidate for a given time.
    """
    failed: set[Way] = set()

    def run(way: Way, ms: float) -> tuple[float, float]:
        found = None if way in failed else look(way, ms)
        if found is None:
            failed.add(way)
            return math.inf, 0.0
        return found

    times: dict[Way, float] = {}
    spent = 0.0
    for how in (GLANCE, CARE):
        looked: dict[Way, float] = {}
        for way in (list(times) or list(ways))[: how.kept] * how.passes:
            if spent < MOST_MS:
                one, took = run(way, how.ms)
                looked[way], spent = min(one, looked.get(way, one)), spent + took
        times = _in_order(times, looked)
    times = {way: ms for way, ms in times.items() if way not in failed}
    best = list(times)[: WARM.kept]
    if len(best) > 1 and times[best[0]] >= LONG_MS:
        passes = [[run(way, WARM.ms)[0] for way in best] for _ in range(WARM.passes)]
        means = map(statistics.fmean, zip(*passes[1:], strict=True))  # the first pass warms up
        times = _in_order(times, dict(zip(best, means, strict=True)))
    return {way: ms for way, ms in times.items() if way not in failed}


def _in_order(times: dict[Way, float], looked: dict[Way, float]) -> dict[Way, float]:
    """All candidates by time, those of the last round first."""
    every = {**times, **looked}
    return {way: every[way] for way in sorted(every, key=lambda way: (way not in looked, every[way]))}
