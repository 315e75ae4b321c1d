"""What a budget of memory bought, and at which price: part of ``lower().memory``; or why there is no plan within it.

Kernels, beside ``budget.py``, which makes both. In: the schedule of a program without a budget, and within it.
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
    """A value that is computed again and not kept.

    Attributes:
      label: its type, the operation that computes it, and the user's line.
      nbytes: its size.
    """

    label: str
    nbytes: int


def dropped(v: Var, eqn: Eqn, way: str = "") -> Dropped:
    """The entry of a value; ``way`` is how it is computed again, if not by its equation."""
    return Dropped(f"{v.aval} {eqn.prim.name}{way} at {line_of(eqn)}", nbytes(v))


@dataclass(frozen=True)
class Bought:
    """What a program computes again for its budget.

    Attributes:
      budget: in bytes.
      default: the schedule of the program without a budget, which would need more.
      made: the schedule within the budget.
      dropped: the values that are computed again instead of being kept, the largest first.
      machine: what times are estimated for.
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
        """Operations of arithmetic more than without a budget."""
        return self.costs[1].flops - self.costs[0].flops

    @property
    def bytes(self) -> int:
        """Bytes moved more than without a budget; fewer, where a sum that is written no more moved most."""
        return self.costs[1].bytes - self.costs[0].bytes

    @functools.cached_property
    def times(self) -> tuple[float, float]:
        """The time of the program without a budget, and within it, by which it was chosen: the roofline of ``machine``
        and its launches, not measured.
        """
        return plan_seconds(self.default, self.machine), plan_seconds(self.made, self.machine)

    @property
    def seconds(self) -> float:
        """Time more than without a budget."""
        return self.times[1] - self.times[0]

    def report(self, n: int = 10) -> str:
        """The peaks; the ``n`` largest rows of what is computed again, values of one line together; and the price."""
        before, _ = self.costs
        alike: dict[Dropped, int] = {}
        for d in self.dropped:
            alike[d] = alike.get(d, 0) + 1
        rows = sorted(alike.items(), key=lambda row: -row[0].nbytes * row[1])
        total = sum(d.nbytes for d in self.dropped)
        lines = [
            f"memory budget {size(self.budget)}: planned peak {size(self.peak_bytes)} instead of "
            f"{size(self.default_peak_bytes)}",
            f"computed again, or later, instead of kept: {len(self.dropped)} values, {size(total)}",
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
    """The error where no plan within a budget was found; ``least`` is that of ``lowest``, for which there is one."""
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
    """What would help: more, or less of what cannot be computed again."""
    plan = least.plan
    advice = [f"memory_budget={lowest}, or a smaller batch"]
    if plan.output_bytes > budget // 16:
        advice.append(
            f"donate_argnums=... lets results take the memory of arguments (now {size(plan.output_bytes)} more)"
        )
    if plan.argument_bytes > budget // 2:
        advice.append(f"arguments alone take {size(plan.argument_bytes)}: divide them among devices")
    return "; ".join(advice)


def bought_of(
    budget: int, default: Schedule, made: Schedule, entries: Sequence[Dropped], machine: Machine
) -> Bought:
    """The report of a schedule within a budget."""
    return Bought(budget, default, made, tuple(sorted(entries, key=lambda d: -d.nbytes)), machine)
