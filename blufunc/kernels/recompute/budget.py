"""Plans within a budget of memory: ``jit(memory_budget=)``.

Kernels, between stages 5 and 7: the entry of what ``budget_cuts.py`` chooses. In: a program on its way to a schedule,
and a budget in bytes for its planned peak. Out: its schedule as ever, if that fits; else the schedule of the program
with values computed again, the least time for which one was found that fits, and what was bought.

What computing again does to the peak is known when all is fused, ordered and packed. So a choice is tried: a plan
without kernels takes a fraction of what it takes to compile a program. For each way to divide the program in
segments, the rate of exchange between bytes and seconds is raised until the plan fits. Where the peak is then
elsewhere, and still too high, the program as it is by then is divided at that place, a few times over.
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
"""Peaks, one after the other, that are cut."""

_PROGRESS = 0.98
"""What is left of a peak that is worth to be cut again."""

_TRIES = 3
"""Plans of one division in segments that nearly fit, before it is given up."""

_NEARLY = 1.1
"""The peak of such a plan, in budgets."""

_REPEATS = 1.5
"""How often what is before the first peak may be computed again, by its time."""

_PLANS = 16
"""Plans for one aim."""

_AIMS = 4
"""Aims for one budget."""

_SHARES = (1, 0.95, 0.9, 0.8)
"""Of a budget, to be tried for it."""

_STEPS = 128
_RATES = range(-3 * _STEPS, 12 * _STEPS)
"""Rates of exchange that are tried, as logarithms: the time that a byte is worth, in the time that it takes to move it.
"""


def search(planning: Any, budget: int, default: Schedule) -> Schedule:
    """The cheapest schedule found with its planned peak within a budget in bytes; ``bought`` says what it recomputes.

    Args:
      planning: the program, a ``pipeline.Planning``.
      default: its schedule without a budget.
    Raises:
      MemoryBudgetError: none was found; the message says how low the peak would come, and what is alive there.
    """
    return _Search(planning, budget, default).run()


@dataclass(frozen=True)
class _Trial:
    """A program with values computed again, and its plan.

    Attributes:
      origins: for equations, the call, or the choice, that computes them again.
      made: its estimated schedule.
      seconds: what computing again takes, estimated.
      dropped: the values that are not kept, of all peaks that were cut.
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
        self.floor = 0  # no cut of the first peak leaves less
        self.most_seconds = 0.0
        self.plans = 0

    def run(self) -> Schedule:
        """The schedule within the budget.

        Other budgets lead to other choices: where none fits, smaller ones are tried, and then larger ones, by
        bisection: the least for which there is a plan is that of the error.
        """
        for share in _SHARES:
            if share * self.budget < self.floor:  # which the first attempt finds
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
        """A schedule within some budget. With kernels it may need more than was estimated: then less is aimed at."""
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
        """The trial that takes the least time of those that fit; if none does, the one with the lowest peak."""
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
        """A trial with more computed again behind the peak of another."""
        target = self.planning.target
        cuts = Cuts(trial.made, aim, self.machine, lambda e: target.pointwise_gemm(e) is None)
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
                key = frozenset(choice.again)
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
        """The choice for each rate."""
        return functools.cache(lambda k: cuts.choose(segments, 2 ** (k / _STEPS) / self.machine.bandwidth))

    def tried(self, trial: _Trial, cuts: Cuts, choice: Choice) -> _Trial:
        """The plan with what a choice computes again."""
        self.plans += 1
        origins = dict(trial.origins)
        jaxpr = cuts.program(choice, origins)
        made = self.planning.estimate(jaxpr, origins)
        ways = cuts.ways(choice, jaxpr)
        entries = [dropped(v, cuts.maker[v], ways.get(v, "")) for v in cuts.dropped(choice)]
        seconds = plan_seconds(made, self.machine) - self.default_seconds
        return _Trial(jaxpr, origins, made, seconds, (*trial.dropped, *entries))
