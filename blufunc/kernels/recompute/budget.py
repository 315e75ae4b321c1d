"""Plans within a memory budget: ``jit(memory_budget=)``.

Kernels, between stages 5 and 7. In: a program that is to be scheduled, and a budget in bytes for its planned peak. Out:
its default schedule if that fits; otherwise the schedule of the program with values recomputed, the fastest that was
found to fit, and a report of the price.

On a device with a link to its host, values may be offloaded instead (``budget_offload.py``): of a plan that recomputes
and one that offloads first, the one with the lower estimated time is taken.

The effect of recomputation on the peak is known only after fusion, ordering and packing. So each choice of
``budget_cuts.py`` is tried: a plan without kernels takes a fraction of the time to compile a program. For each division
of the program in segments, the rate (the seconds that a byte is worth) is raised until the plan fits. If the peak is
then elsewhere and still too high, the new program is cut there in turn.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var
from blufunc.kernels.cost import plan_seconds
from blufunc.kernels.recompute.budget_cuts import Choice, Cuts
from blufunc.kernels.recompute.budget_offload import Offloads
from blufunc.kernels.recompute.budget_report import Dropped, RematChoice, no_plan
from blufunc.kernels.schedule import Schedule

_AIMS = (1, 0.95, 0.9, 0.8)
"""Shares of a budget that estimates aim at, one after the other."""

_PLANS = 16
"""Plans per aim."""

_PROGRESS = 0.98
"""Ratio of two peaks at which cutting stops."""

_NEARLY = 1.1
"""Ratio of a peak to the aim up to which segments are cut again, at a higher rate."""

_REPEATS = 1.5
"""Limit of recomputation, relative to the time up to the first peak."""

_CHEAP = 0.005
"""Price, relative to the program's time, below which no other way is tried."""

_SHARES = (1, 0.5)
"""Shares of the bytes that the link can hide that are offloaded.

The rest of the excess is recomputed.
"""

_OFFLOADS = 4
"""Plans per aim with offloaded values."""

_STEPS = 128
_RATES = range(-3 * _STEPS, 12 * _STEPS)
"""Rates that are tried: ``_STEPS`` times the binary logarithm.

The unit is the time to move a byte.
"""


@dataclass(frozen=True)
class _Trial:
    """A program with values recomputed, and its estimated plan.

    Attributes:
      origins: the call, or the choice, that recomputes an equation, by equation.
      made: its estimated schedule.
      seconds: estimated time of recomputation.
      dropped: the values that are not saved, of all peaks that were cut.
      moved: the values that wait on the host.
    """

    jaxpr: Jaxpr
    origins: dict[Eqn, int]
    made: Schedule
    seconds: float = 0.0
    dropped: tuple[Dropped, ...] = ()
    moved: tuple[Dropped, ...] = ()

    @property
    def peak(self) -> int:
        """The planned peak in bytes."""
        return self.made.plan.peak_bytes


class Search:
    """Search for the fastest schedule within a budget; ``bought`` reports the price.

    Args:
      planning: the program, a ``pipeline.Planning``.
      budget: limit of the planned peak, in bytes.
      default: the program's schedule without a budget.
    """

    def __init__(self, planning: Any, budget: int, default: Schedule):
        self.planning, self.budget, self.default = planning, budget, default
        self.machine = planning.target.machine
        self.start = _Trial(default.jaxpr, planning.origins, planning.schedule(default.jaxpr, estimate=True))
        self.default_seconds = plan_seconds(self.start.made, self.machine)
        self.floor = 0  # no cut of the first peak leaves less
        self.most_seconds = 0.0
        self.plans = 0

    def run(self) -> Schedule:
        """The schedule.

        Raises:
          MemoryBudgetError: none was found; it names the smallest budget with a plan, and the values alive there.
        """
        low, high, best = 0, self.default.plan.peak_bytes, self.default
        probe = self.budget
        while True:
            found = self.attempt(probe)
            if found is not None and found.plan.peak_bytes <= self.budget:
                return found
            if found is None:
                low = max(probe, self.floor)
            else:
                high, best = probe, found
            if high - low <= high // 16:
                raise no_plan(self.budget, high, best, self.default)
            probe = (low + high) // 2

    def attempt(self, budget: int) -> Schedule | None:
        """A schedule within some budget.

        A lower aim leads to other choices, and makes up for kernels that need more memory than estimated.
        """
        aim = budget
        for share in _AIMS:
            aim = min(aim, int(share * budget))
            if aim < self.floor:  # which the first aim finds
                break
            self.plans = 0
            trial = self.descend(aim)
            made = self.planning.schedule(trial.jaxpr, trial.origins)
            if made.plan.peak_bytes <= budget:
                largest_first = tuple(sorted(trial.dropped, key=lambda d: -d.nbytes))
                made.bought = RematChoice(
                    self.budget, self.default, made, largest_first, self.machine, trial.moved
                )
                return made
            if trial.peak <= aim:
                aim -= made.plan.peak_bytes - budget
        return None

    def descend(self, aim: int) -> _Trial:
        """The cheapest trial that meets an aim, by recomputation or with offloaded values."""
        lowest = self.cut_peaks(self.start, aim)
        cheap = lowest.peak <= aim and lowest.seconds <= _CHEAP * self.default_seconds
        empty = self.start.made.plan.peak_step is None
        if cheap or empty or not self.machine.host_link or self.start.peak <= aim:
            return lowest
        offloads = Offloads(self.start.made, Cuts(self.start.made, aim, self.machine), self.machine)
        self.floor = min(self.floor, self.start.peak - sum(v.aval.nbytes for v in offloads.candidates))
        hidden = min(offloads.hidden, self.start.peak - aim)
        for share in _SHARES if offloads.candidates else ():
            most = lowest.seconds if lowest.peak <= aim else float("inf")
            moved = self.offload(offloads, self.start.peak - int(share * hidden), most)
            if moved is not self.start:
                self.plans = 0
                moved = self.cut_peaks(moved, aim)
                lowest = min(lowest, moved, key=lambda t: (max(t.peak, aim), t.seconds))
                if moved.peak <= aim and moved.seconds <= _CHEAP * self.default_seconds:
                    break
        if lowest.peak > aim and offloads.candidates:  # at any price
            moved = self.cut_peaks(self.offload(offloads, aim, float("inf")), aim)
            lowest = min(lowest, moved, key=lambda t: (max(t.peak, aim), t.seconds))
        return lowest

    def offload(self, offloads: Offloads, aim: int, most: float) -> _Trial:
        """The trial with values on the host meanwhile; the first one if none can be.

        Args:
          most: a price at which another plan is known; one that costs more is given up.
        """
        best = trial = self.start
        wanted = trial.peak - aim
        for _ in range(_OFFLOADS):
            chosen = offloads.first(wanted)
            origins = dict(trial.origins)
            jaxpr = offloads.program(chosen, origins)
            made = self.planning.schedule(jaxpr, origins, estimate=True)
            seconds = plan_seconds(made, self.machine) - self.default_seconds
            if seconds >= most:
                return trial
            found = _Trial(jaxpr, origins, made, seconds, (), offloads.moved(chosen))
            best = min(best, found, key=lambda t: (max(t.peak, aim), t.seconds))
            if found.peak <= aim or len(chosen) == len(offloads.candidates):
                break
            wanted += found.peak - aim
        return best

    def cut_peaks(self, lowest: _Trial, aim: int) -> _Trial:
        """Cut peaks, one after the other, while that makes progress."""
        while lowest.peak > aim and lowest.made.plan.peak_step is not None:
            found = self.cut(lowest, aim)
            if found.peak > aim and found.peak > lowest.peak * _PROGRESS:
                break
            lowest = found
        return lowest

    def cut(self, trial: _Trial, aim: int) -> _Trial:
        """The best trial with more values recomputed after the peak of another."""
        target = self.planning.target
        cuts = Cuts(trial.made, aim, self.machine, lambda e: target.pointwise_gemm(e) is None)
        if trial is self.start:
            self.most_seconds = _REPEATS * sum(cuts.seconds.values())
            self.floor = trial.peak - max(self.choices(cuts, s)(_RATES[-1]).freed for s in cuts.levels)
        best, most = trial, self.most_seconds - trial.seconds
        seen: set[frozenset[Var]] = set()
        for segments in cuts.levels:
            chosen = self.choices(cuts, segments)
            if chosen(_RATES[-1]).freed < cuts.excess:
                continue
            wanted, k = cuts.excess, 0
            while True:
                k = bisect.bisect_left(_RATES, wanted, lo=k, key=lambda rate: chosen(rate).freed)
                if k == len(_RATES) or self.plans == _PLANS:
                    break
                choice = chosen(_RATES[k])
                key = frozenset(choice.recomputed)
                if key in seen or choice.seconds >= most:
                    break
                seen.add(key)
                found = self.tried(trial, cuts, choice)
                best = min(best, found, key=lambda t: (max(t.peak, aim), t.seconds))
                if found.peak <= aim:
                    most = min(most, choice.seconds)  # an estimate of the same kind
                if found.peak <= aim or found.peak > _NEARLY * aim:
                    break
                wanted = choice.freed + found.peak - aim
        return best

    def choices(self, cuts: Cuts, segments: Sequence[range]) -> Callable[[int], Choice]:
        """The choice for each rate."""
        return functools.cache(lambda k: cuts.choose(segments, 2 ** (k / _STEPS) / self.machine.bandwidth))

    def tried(self, trial: _Trial, cuts: Cuts, choice: Choice) -> _Trial:
        """The estimated plan of a choice."""
        self.plans += 1
        origins = dict(trial.origins)
        jaxpr = cuts.program(choice, origins)
        made = self.planning.schedule(jaxpr, origins, estimate=True)
        seconds = plan_seconds(made, self.machine) - self.default_seconds
        dropped = (*trial.dropped, *cuts.dropped(choice, jaxpr))
        return _Trial(jaxpr, origins, made, seconds, dropped, trial.moved)
