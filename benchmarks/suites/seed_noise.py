"""Test whether two libraries' losses differ by more than the data order explains.

In: losses of runs from one start, for each library and each seed of the data order. A running mean smooths the losses,
since neighbouring batches differ far more than libraries. The *difference* of two libraries is between runs with the
same order; the *spread* is between runs of one library with two orders. Curves lie within seed noise if the difference
is at most the spread, both in the maximum and in the mean.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Comparison:
    """Absolute differences of smoothed losses: maximum, and mean over steps and runs."""

    largest: float
    mean: float
    spread_largest: float
    spread_mean: float

    @property
    def within_noise(self) -> bool:
        """True if the libraries differ by no more than the seeds."""
        return self.largest <= self.spread_largest and self.mean <= self.spread_mean


def smoothed(losses: list[float], window: int) -> np.ndarray:
    """Running means of ``window`` losses; ``window - 1`` fewer than there are losses."""
    return np.convolve(losses, np.full(window, 1 / window), "valid")


def compare(
    ours: dict[int, list[float]], theirs: dict[int, list[float]], window: int = 20
) -> Comparison | None:
    """Compare two libraries' losses by seed; None with fewer than two common seeds.

    ``window`` is limited to a tenth of the steps that all runs have, for short runs.
    """
    seeds = sorted(ours.keys() & theirs.keys())
    if len(seeds) < 2:
        return None
    steps = min(len(runs[seed]) for runs in (ours, theirs) for seed in seeds)
    window = max(1, min(window, steps // 10))
    a, b = ({seed: smoothed(runs[seed][:steps], window) for seed in seeds} for runs in (ours, theirs))
    between = np.abs([a[seed] - b[seed] for seed in seeds])
    pairs = itertools.combinations(seeds, 2)
    spread = np.abs([runs[i] - runs[j] for i, j in pairs for runs in (a, b)])
    return Comparison(*(float(f(x)) for x in (between, spread) for f in (np.max, np.mean)))
