"""Which of several ways to compute the same is the fastest, by running them.

Kernels, stage 8, below ``cublaslt``. All ways run for a moment, the best of these with more care. Of what takes long,
the best run once more, by turns and for so long that the device is as warm as in a training step: steps run at the
limit of a device's power, where clocks fall, and what moves less may be faster than what was faster on a cool device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

Way = TypeVar("Way", bound=Hashable)

Look = Callable[[Way, float], tuple[float, float] | None]
"""Runs a way for about so many milliseconds: those of one run, and those that it took to find out; None: it fails."""


class Round(NamedTuple):
    """How many ways are looked at, for how many milliseconds each, and how often."""

    kept: int
    ms: float
    passes: int


GLANCE, CARE, WARM = Round(16, 0.2, 1), Round(6, 1.0, 3), Round(4, 10.0, 3)

MOST_MS = 80.0
"""What the first two rounds may take; ways that are thought best come first."""

LONG_MS = 0.05
"""From how many milliseconds on a device that is warm counts: below, programs wait for more than for their products."""


def fastest(ways: Sequence[Way], look: Look[Way]) -> dict[Way, float]:
    """Milliseconds of one run of the ways that run, the fastest first.

    Args:
      ways: the one that is thought best first.
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
        means = map(statistics.fmean, zip(*passes[1:], strict=True))  # the first one warms up
        times = _in_order(times, dict(zip(best, means, strict=True)))
    return {way: ms for way, ms in times.items() if way not in failed}


def _in_order(times: dict[Way, float], looked: dict[Way, float]) -> dict[Way, float]:
    """All by time, those first that were ``looked`` at last."""
    every = {**times, **looked}
    return {way: every[way] for way in sorted(every, key=lambda way: (way not in looked, every[way]))}
