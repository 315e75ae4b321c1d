"""Step times that executables report.

Kernels, alongside stage 8: the result of ``timings`` on the CPU; that of CUDA programs has the same ``name`` and
``ms``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class StepTime(NamedTuple):
    """The time of a step: the median over some runs, in milliseconds."""

    name: str
    ms: float


def medians(names: Sequence[str], runs: Sequence[Sequence[float]]) -> list[StepTime]:
    """The ``StepTime`` of each step, from its seconds in each run."""
    columns = zip(*runs, strict=True)
    return [StepTime(n, 1e3 * statistics.median(c)) for n, c in zip(names, columns, strict=True)]
