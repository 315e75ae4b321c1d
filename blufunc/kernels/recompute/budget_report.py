"""Report of a memory budget: recomputed values and their cost, or why none fits.

Kernels, called by ``budget.py``; part of ``lower().memory``. In: the schedule of a program without a budget, and the
one within it. Out: its report, or the error.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Var, line_of
from blufunc.kernels.cost import Cost, cost_of
from blufunc.kernels.machine import Machine
from blufunc.kernels.recompute.recompute_cost import plan_seconds
from blufunc.kernels.recompute.repeat import nbytes
from blufunc.kernels.tables import count, duration, size

if TYPE_CHECKING:
    from blufunc.kernels.schedule import Schedule


class Dropped(NamedTuple):
    """A value that is recomputed instead of saved.

    Attributes:
      label: its type, the operation that computes it, and the user's line.
      nbytes: its size.
    """

    label: str
    nbytes: int


def dropped(v: Var, eqn: Eqn, way: str = "") -> Dropped:
    """The entry of a value; ``way`` is its recomputation, if not by its equation."""
    return Dropped(f"{v.aval} {eqn.prim.name}{way} at {line_of(eqn)}", nbytes(v))


@dataclass(frozen=True)
class Bought:
    """The recomputation of a program with a memory budget, and its cost.

    Attributes:
      budget: in bytes.
      default: the schedule of the program without a budget, which exceeds it.
      made: the schedule within the budget.
      dropped: the values that are recomputed instead of saved, the largest first.
      machine: the machine of the time estimates.
    """

    budget: int
    default: Schedule = field(repr=False)
    made: Schedule = field(repr=False)
    dropped: tuple[Dropped, ...] = field(repr=False)
    machine: Machine

    @property
    def default_peak_bytes(self) -> int:
        """The planned peak without a budget."""
        return self.default.plan.peak_bytes

    @property
    def peak_bytes(self) -> int:
        """The planned peak within it."""
        return self.made.plan.peak_bytes

    @functools.cached_property
    def costs(self) -> tuple[Cost, Cost]:
        """The cost of the program without a budget, and within it."""
        return cost_of(self.default), cost_of(self.made)

    @property
    def flops(self) -> int:
        """Additional arithmetic operations."""
        return self.costs[1].flops - self.costs[0].flops

    @property
    def bytes(self) -> int:
        """Additional bytes moved; negative where eliding the store of a sum saves more."""
        return self.costs[1].bytes - self.costs[0].bytes

    @functools.cached_property
    def times(self) -> tuple[float, float]:
        """Estimated seconds without a budget, and within it: roofline plus launches."""
        return plan_seconds(self.default, self.machine), plan_seconds(self.made, self.machine)

    @property
    def seconds(self) -> float:
        """Additional time in seconds."""
        return self.times[1] - self.times[0]

    def report(self, n: int = 10) -> str:
        """The peaks, the ``n`` largest recomputed values grouped by line, and the cost."""
        before, _ = self.costs
        grouped: dict[Dropped, int] = {}
        for d in self.dropped:
            grouped[d] = grouped.get(d, 0) + 1
        rows = sorted(grouped.items(), key=lambda row: -row[0].nbytes * row[1])
        total = sum(d.nbytes for d in self.dropped)
        lines = [
            f"memory budget {size(self.budget)}: planned peak {size(self.peak_bytes)} instead of "
            f"{size(self.default_peak_bytes)}",
            f"recomputed, or computed later, instead of saved: {len(self.dropped)} values, {size(total)}",
        ]
        lines += [f"  {size(k * d.nbytes):>10}  {f'{k} x ' if k > 1 else ''}{d.label}" for d, k in rows[:n]]
        if len(rows) > n:
            rest = sum(k * d.nbytes for d, k in rows[n:])
            lines.append(f"  {size(rest):>10}  in {len(rows) - n} smaller")
        lines.append(
            f"price: {count(self.flops)} operations ({_share(self.flops, before.flops)}), "
            f"{'-' if self.bytes < 0 else ''}{size(abs(self.bytes))} moved ({_share(self.bytes, before.bytes)}); "
            f"{duration(self.seconds)} ({_share(self.seconds, self.times[0])}) "
            f"estimated for {self.machine.name}"
        )
        return "\n".join(lines)

    __str__ = report


def _share(part: float, whole: float) -> str:
    return f"{part / whole:+.1%}" if whole else "of nothing"


def no_plan(budget: int, lowest: int, least: Schedule, default: Schedule) -> errors.MemoryBudgetError:
    """Error if no plan within a budget was found; ``least`` is the plan of ``lowest``."""
    lines = [
        f"the lowest budget for which one was found is {size(lowest)} ({lowest} bytes); without a budget it is "
        f"{size(default.plan.peak_bytes)}.",
        *least.plan.report(6).splitlines(),
    ]
    return errors.MemoryBudgetError(
        f"no plan of {least.jaxpr.name or 'the program'} fits memory_budget={size(budget)} ({budget} bytes).",
        where=source.here(),
        why="\n".join(lines),
        fix=_fix(budget, lowest, least),
    )


def _fix(budget: int, lowest: int, least: Schedule) -> str:
    """The remedy: a larger budget, or fewer bytes of values that cannot be recomputed."""
    plan = least.plan
    advice = [f"memory_budget={lowest}, or a smaller batch"]
    if plan.output_bytes > budget // 16:
        advice.append(
            f"donate_argnums=... lets results take the memory of arguments (now {size(plan.output_bytes)} more)"
        )
    if plan.argument_bytes > budget // 2:
        advice.append(f"arguments alone take {size(plan.argument_bytes)}: shard them across devices")
    return "; ".join(advice)


def bought_of(
    budget: int, default: Schedule, made: Schedule, entries: Sequence[Dropped], machine: Machine
) -> Bought:
    """The report of a schedule within a budget."""
    return Bought(budget, default, made, tuple(sorted(entries, key=lambda d: -d.nbytes)), machine)
