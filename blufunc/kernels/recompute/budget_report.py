"""Reports on memory budgets: recomputed values and price, or why no plan fits.

Kernels, used by ``budget.py``. In: the schedules of a program without a budget and within it. Out: a part of
``lower().memory``, or a ``MemoryBudgetError``.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Var, line_of
from blufunc.kernels.cost import Cost, cost_of, plan_seconds
from blufunc.kernels.machine import Machine
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

    @classmethod
    def of(cls, v: Var, eqn: Eqn, way: str = "") -> Dropped:
        """The entry of a value; ``way``: how it is recomputed, if not by its equation."""
        return cls(f"{v.aval} {eqn.prim.name}{way} at {line_of(eqn)}", v.aval.nbytes)


@dataclass(frozen=True)
class RematChoice:
    """Rematerialization for a memory budget: ``lower().memory.bought``.

    Attributes:
      budget: in bytes.
      default: the schedule without a budget, which needs more.
      made: the schedule within the budget.
      dropped: the values that are recomputed instead of saved, the largest first.
      machine: the device that times are estimated for.
      moved: the values that wait in the memory of the host, the longest first.
    """

    budget: int
    default: Schedule = field(repr=False)
    made: Schedule = field(repr=False)
    dropped: tuple[Dropped, ...] = field(repr=False)
    machine: Machine
    moved: tuple[Dropped, ...] = field(default=(), repr=False)

    @property
    def default_peak_bytes(self) -> int:
        """The planned peak without a budget."""
        return self.default.plan.peak_bytes

    @property
    def peak_bytes(self) -> int:
        """The planned peak within the budget."""
        return self.made.plan.peak_bytes

    @functools.cached_property
    def costs(self) -> tuple[Cost, Cost]:
        """The cost of the program without a budget and within it."""
        return cost_of(self.default), cost_of(self.made)

    @property
    def flops(self) -> int:
        """Additional arithmetic operations."""
        return self.costs[1].flops - self.costs[0].flops

    @property
    def bytes(self) -> int:
        """Additional bytes moved; negative if dropping a written sum saves more."""
        return self.costs[1].bytes - self.costs[0].bytes

    @functools.cached_property
    def times(self) -> tuple[float, float]:
        """Estimated times without a budget and within it (``plan_seconds``)."""
        return plan_seconds(self.default, self.machine), plan_seconds(self.made, self.machine)

    @property
    def seconds(self) -> float:
        """Additional estimated time."""
        return self.times[1] - self.times[0]

    def report(self, n: int = 10) -> str:
        """The peaks, the ``n`` largest rows of recomputed values, and the price."""
        before, _ = self.costs
        lines = [
            f"memory budget {size(self.budget)}: planned peak {size(self.peak_bytes)} instead of "
            f"{size(self.default_peak_bytes)}",
        ]
        if self.dropped or not self.moved:
            lines += _listed("recomputed, or computed later, instead of saved", self.dropped, n)
        if self.moved:
            lines += _listed("offloaded to the memory of the host instead of saved", self.moved, n)
        lines.append(
            f"price: {count(self.flops)} operations ({_share(self.flops, before.flops)}), "
            f"{'-' if self.bytes < 0 else ''}{size(abs(self.bytes))} moved ({_share(self.bytes, before.bytes)}); "
            f"{duration(self.seconds)} ({_share(self.seconds, self.times[0])}) "
            f"estimated for {self.machine.name}"
        )
        return "\n".join(lines)

    __str__ = report


def _listed(what: str, values: tuple[Dropped, ...], n: int) -> list[str]:
    """The sum of some values, and the ``n`` largest rows of them."""
    rows = sorted(Counter(values).items(), key=lambda row: -row[0].nbytes * row[1])
    lines = [f"{what}: {len(values)} values, {size(sum(d.nbytes for d in values))}"]
    lines += [f"  {size(k * d.nbytes):>10}  {f'{k} x ' if k > 1 else ''}{d.label}" for d, k in rows[:n]]
    if len(rows) > n:
        rest = sum(k * d.nbytes for d, k in rows[n:])
        lines.append(f"  {size(rest):>10}  in {len(rows) - n} smaller")
    return lines


def _share(part: float, whole: float) -> str:
    return f"{part / whole:+.1%}" if whole else "of nothing"


def no_plan(budget: int, lowest: int, least: Schedule, default: Schedule) -> errors.MemoryBudgetError:
    """The error that no plan fits; ``least`` is the plan for the budget ``lowest``."""
    plan = least.plan
    advice = [f"memory_budget={lowest}, or a smaller batch"]
    if plan.output_bytes > budget // 16:
        advice.append(
            f"donate_argnums=... lets results take the memory of arguments (now {size(plan.output_bytes)} more)"
        )
    if plan.argument_bytes > budget // 2:
        advice.append(f"arguments alone take {size(plan.argument_bytes)}: shard them across devices")
    return errors.MemoryBudgetError(
        f"no plan of {least.jaxpr.name or 'the program'} fits memory_budget={size(budget)} ({budget} bytes).",
        where=source.here(),
        why=f"the lowest budget for which one was found is {size(lowest)} ({lowest} bytes); without a budget it is "
        f"{size(default.plan.peak_bytes)}.\n{plan.report(6)}",
        fix="; ".join(advice),
    )
