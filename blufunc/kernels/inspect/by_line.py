"""Times of a program by line of the user's code.

Kernels, alongside stage 8. In: a program's steps and their measured times. Out: a ``Profile``. A kernel computes
equations of many lines: its time is split across them in proportion to the least time of each equation alone, by bytes
and arithmetic. This is a model: the sum is measured, the shares of one kernel are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blufunc.core.ir.jaxpr import Eqn, line_of, subjaxprs
from blufunc.kernels.cost import of_eqn
from blufunc.kernels.fusion.report import equations_of
from blufunc.kernels.inspect.program import Sight, Timings
from blufunc.kernels.machine import Machine
from blufunc.kernels.schedule import GroupStep, KernelStep, Schedule, Step
from blufunc.kernels.tables import count, size, table


class LineTime(NamedTuple):
    """The time of a line.

    Attributes:
      line: ``model.py:12 (attention)``, with ``backward`` for what its derivative computes.
      ms: milliseconds.
      bytes: what its steps move, divided like their times.
      flops: their arithmetic.
      steps: number of steps that compute a part of it.
    """

    line: str
    ms: float
    bytes: float
    flops: float
    steps: int


@dataclass(frozen=True)
class Profile:
    """The time of a function by line; ``print`` it.

    Attributes:
      name: of the function.
      lines: a ``LineTime`` for each line, the largest time first.
      timings: the steps that the times come from.
    """

    name: str
    lines: Sequence[LineTime]
    timings: Timings

    @property
    def ms(self) -> float:
        """The sum, in milliseconds."""
        return self.timings.ms

    def __str__(self) -> str:
        rows = [
            (f"{t.ms:.4g}", f"{t.ms / self.ms:.0%}" if self.ms else "", size(t.bytes), count(t.flops), t.line)
            for t in self.lines
        ]
        head = ("ms", "of all", "bytes", "flops", "line")
        shown = table(head, rows, head[:-1]) if rows else "nothing is computed"
        return f"{shown}\n{self.name}: {self.ms:.4g} ms in {len(self.timings)} steps"


def by_line(name: str, sight: Sight, timings: Timings) -> Profile:
    """Split the times of steps across the lines that they compute."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0])
    for step, equations in zip(timings.steps, _equations(sight, timings), strict=True):
        for line, share in _shares(equations, timings.machine).items():
            found = sums[line]
            for i, value in enumerate((step.ms, step.bytes, step.flops)):
                found[i] += share * value
            found[3] += 1
    lines = [LineTime(line, ms, b, f, int(n)) for line, (ms, b, f, n) in sums.items()]
    return Profile(name, sorted(lines, key=lambda t: (-t.ms, t.line)), timings)


def _equations(sight: Sight, timings: Timings) -> Iterator[Sequence[Eqn]]:
    """The equations of each step."""
    if timings.why_not_compiled:  # as NumPy calls: an equation is a step
        yield from ([e] for e in sight.program.jaxpr.eqns)
        return
    for step in sight.schedule.steps:
        yield list(_of_step(step, sight.schedule))


def _of_step(step: Step, made: Schedule) -> Iterator[Eqn]:
    if isinstance(step, KernelStep):
        yield from equations_of(step.region, made.fusion)
    elif isinstance(step, GroupStep):
        for member in step.members:
            yield from _of_step(member, made)
    else:
        yield step.eqn


def _expanded(equations: Iterable[Eqn], times: int) -> Iterator[tuple[Eqn, int]]:
    """Equations, those of bodies too, with the number of executions of each.

    One round counts of a loop of unknown length, and each branch once.
    """
    for eqn in equations:
        bodies = list(subjaxprs(eqn.params)) if eqn.prim.kind == "control" else []
        if not bodies:
            yield eqn, times
        for body in bodies:
            yield from _expanded(body.eqns, times * eqn.params.get("length", 1))


def _shares(equations: Sequence[Eqn], machine: Machine) -> dict[str, float]:
    """The share of each line in a step; a loop or branch is the lines of its bodies."""
    least: dict[str, float] = defaultdict(float)
    for eqn, times in _expanded(equations, 1):
        least[line_of(eqn)] += times * of_eqn(eqn, "library").seconds(machine)
    total = sum(least.values())
    if not total:
        return {line: 1 / len(least) for line in least}
    return {line: seconds / total for line, seconds in least.items()}
