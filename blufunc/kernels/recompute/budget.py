"""Plans within a memory budget: ``jit(memory_budget=)``.

Kernels, between stages 5 and 7: the driver of ``budget_cuts.py``. In: a program on its way to a schedule, and a
budget in bytes for its planned peak. Out: its default schedule, if that fits; else the fastest schedule with
recomputation found within the budget, and a report.

The effect of recomputation on the peak is known only after fusion, ordering and packing. So each choice is tried: a
plan without kernels costs a fraction of compiling a program. For each segmentation of the program, the price of a
byte in seconds is raised until the plan fits. If the peak has moved and is still too high, the new program is cut at
that peak, a few times over.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var
from blufunc.kernels.recompute.budget_cuts import Choice, Cuts
from blufunc.kernels.recompute.budget_report import Dropped, bought_of, dropped, no_plan
from blufunc.kernels.recompute.recompute_cost import plan_seconds
from blufunc.kernels.schedule import Schedule

_PEAKS = 5
"""Successive peaks that are cut."""

_PROGRESS = 0.98
"""A cut must lower the peak at least to this fraction for another one to follow."""

_TRIES = 3
"""Plans of one segmentation that nearly fit, before it is given up."""

_NEARLY = 1.1
"""The peak of such a plan, in budgets."""

_REPEATS = 1.5
"""Maximum recomputation of the part before the first peak, relative to its time."""

_PLANS = 16
"""Plans for one aim."""

_AIMS = 4
"""Aims for one budget."""

_SHARES = (1, 0.95, 0.9, 0.8)
"""Fractions of a budget to aim at."""

_STEPS = 128
_RATES = range(-3 * _STEPS, 12 * _STEPS)
"""Prices of a byte to try: logarithms, in units of the time to move the byte."""


def search(planning: Any, budget: int, default: Schedule) -> Schedule:
    """The fastest schedule found with its planned peak within a budget in bytes.

    Args:
      planning: the program, a ``pipeline.Planning``.
      default: its schedule without a budget.
    Returns:
      the schedule; its ``bought`` reports the recomputation.
    Raises:
      MemoryBudgetError: none was found; the message gives the lowest peak found, and the values alive there.
    """
    return _Search(planning, budget, default).run()


@dataclass(frozen=True)
class _Trial:
    """A program with recomputed values, and its plan.

    Attributes:
      origins: for equations, the call, or the choice, that recomputes them.
      made: its estimated schedule.
      seconds: estimated time of the recomputation.
      dropped: the values that are not saved, of all peaks that were cut.
    """

    jaxpr: Jaxpr
    origins: dict[Eqn, int]
    made: Schedule
    seconds: float = 0.0
    dropped: tuple[Dropped, ...] = ()

    @property
    def peak(self) -> int:
        """The planned peak in bytes."""
        return self.made.plan.peak_bytes


class _Search:
    def __init__(self, planning: Any, budget: int, default: Schedule):
        self.planning, self.budget, self.default = planning, budget, default
        self.machine = planning.target.machine
        self.start = _Trial(default.jaxpr, planning.origins, planning.estimate(default.jaxpr))
        self.default_seconds = plan_seconds(self.start.made, self.machine)
        self.floor = 0  # lower bound: no cut of the first peak leaves less
        self.most_seconds = 0.0
        self.plans = 0

    def run(self) -> Schedule:
        """The schedule within the budget.

        Other budgets lead to other choices. Where none fits, smaller ones are tried, and then larger ones by
        bisection: the error reports the smallest for which there is a plan.
        """
        for share in _SHARES:
            if share * self.budget < self.floor:  # the first attempt sets the floor
                break
            made = self.attempt(int(share * self.budget))
            if made is not None:
                return made
        low, high, best = max(self.budget, self.floor), self.default.plan.peak_bytes, self.default
        while high - low > high // 16:
            probe = (low + high) // 2
            found = self.attempt(probe)
            if found is None:
                low = probe
            elif found.plan.peak_bytes <= self.budget:
                return found
            else:
                high, best = probe, found
        raise no_plan(self.budget, high, best, self.default)

    def attempt(self, budget: int) -> Schedule | None:
        """A schedule within a budget; aims lower if kernels need more than was estimated."""
        aim = budget
        for n in range(_AIMS):
            self.plans = 0
            trial = self.descend(self.start, aim)
            made = self.planning.schedule(trial.jaxpr, trial.origins)
            if made.plan.peak_bytes <= budget:
                made.bought = bought_of(self.budget, self.default, made, trial.dropped, self.machine)
                return made
            if trial.peak > aim:
                break
            aim -= (made.plan.peak_bytes - budget) << n
        return None

    def descend(self, start: _Trial, aim: int) -> _Trial:
        """The fastest trial that fits; if none does, the one with the lowest peak."""
        lowest = start
        for _ in range(_PEAKS):
            if lowest.peak <= aim or lowest.made.plan.peak_step is None:
                break
            found = self.cut(lowest, aim)
            if found.peak > aim and found.peak > lowest.peak * _PROGRESS:
                break
            lowest = found
        return lowest

    def cut(self, trial: _Trial, aim: int) -> _Trial:
        """A trial that recomputes more after the peak of another."""
        cuts = Cuts(trial.made, aim, self.machine, self.planning.target.activation_kernel)
        if trial is self.start:
            self.most_seconds = _REPEATS * sum(cuts.seconds.values())
            self.floor = trial.peak - max(self.choices(cuts, s)(_RATES[-1]).freed for s in cuts.levels)
        fits: _Trial | None = None
        lowest = trial
        most = self.most_seconds - trial.seconds
        seen: set[frozenset[Var]] = set()
        for segments in cuts.levels:
            chosen = self.choices(cuts, segments)
            if chosen(_RATES[-1]).freed < cuts.excess:
                continue
            wanted, k = cuts.excess, 0
            for _ in range(_TRIES):
                k = bisect.bisect_left(_RATES, wanted, lo=k, key=lambda rate: chosen(rate).freed)
                if k == len(_RATES) or self.plans == _PLANS:
                    break
                choice = chosen(_RATES[k])
                key = frozenset(choice.recomputed)
                if key in seen or choice.seconds >= most:
                    break
                seen.add(key)
                found = self.tried(trial, cuts, choice)
                lowest = min(lowest, found, key=lambda t: t.peak)
                if found.peak <= aim:
                    most = min(most, choice.seconds)  # an estimate of the same kind
                    fits = min(fits or found, found, key=lambda t: t.seconds)
                if found.peak <= aim or found.peak > _NEARLY * aim:
                    break
                wanted = choice.freed + found.peak - aim
        return fits or lowest

    def choices(self, cuts: Cuts, segments: Sequence[range]) -> Callable[[int], Choice]:
        """The choice for each price of a byte."""
        return functools.cache(lambda k: cuts.choose(segments, 2 ** (k / _STEPS) / self.machine.bandwidth))

    def tried(self, trial: _Trial, cuts: Cuts, choice: Choice) -> _Trial:
        """The plan with the recomputation of a choice."""
        self.plans += 1
        origins = dict(trial.origins)
        jaxpr = cuts.program(choice, origins)
        made = self.planning.estimate(jaxpr, origins)
        ways = cuts.ways(choice, jaxpr)
        entries = [dropped(v, cuts.maker[v], ways.get(v, "")) for v in cuts.dropped(choice)]
        seconds = plan_seconds(made, self.machine) - self.default_seconds
        return _Trial(jaxpr, origins, made, seconds, (*trial.dropped, *entries))
