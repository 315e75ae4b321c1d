"""Which of several ways to compute the same is the fastest, by running them.

Kernels, stage 8, below ``cublaslt``. All ways run for a moment, the best of these with more care. Training steps run at
the limit of a device's power, where clocks fall until what is computed takes no more than that. So of what takes long
the energy counts, too: at the limit a run lasts as long as the device may take the run's energy in, at least.
"""

from __future__ import annotations

import math
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


GLANCE, CARE = Round(16, 0.2, 1), Round(6, 1.0, 3)

MOST_MS = 80.0
"""What the first two rounds may take; ways that are thought best come first."""

LONG_MS = 0.1
"""From how many milliseconds on energy counts: it takes some tenths of a second to know."""

COMPARED, MARGIN = 3, 1.15
"""How many ways' energy is measured at most, and by which factor they may take longer than the fastest."""


def fastest(
    ways: Sequence[Way], look: Look[Way], at_limit: Callable[[dict[Way, float]], dict[Way, float]]
) -> dict[Way, float]:
    """Milliseconds of one run of the ways that run, the fastest first.

    Args:
      ways: the one that is thought best first.
      at_limit: of ways with their milliseconds, those of their energy at the limit of power; none if nobody knows.
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
    best = dict([(way, ms) for way, ms in times.items() if ms <= MARGIN * min(times.values())][:COMPARED])
    if len(best) > 1 and min(best.values()) >= LONG_MS:
        limited = at_limit(best)
        times = _in_order(times, {way: max(best[way], ms) for way, ms in limited.items()})
    return times


def _in_order(times: dict[Way, float], looked: dict[Way, float]) -> dict[Way, float]:
    """All by time, those first that were ``looked`` at last."""
    every = {**times, **looked}
    return {way: every[way] for way in sorted(every, key=lambda way: (way not in looked, every[way]))}
