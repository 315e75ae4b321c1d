"""What to keep and what to compute again, where a plan needs more memory than a budget allows.

Kernels, between stages 5 and 7, below ``budget.py``. In: a planned program, and the budget that it does not meet. Out,
for a rate of exchange (seconds that a byte is worth) and a way to divide the program in segments: the values that are
computed again behind the peak, and what that takes.

The peak divides the program. Of what is computed before it, each value that is needed behind it is either kept, which
costs bytes, or computed again, which costs time and needs the operands of its equation. Which is cheapest in all, at
a rate of exchange between the two, is a minimum cut: the project selection problem (J. Picard, "Maximal Closure of a
Graph", 1976). So chains, products of matrices, and dead values from which much else can be computed compete on equal
terms. A byte counts by the share of the time over budget for which nobody reads the value: what is read right before
and right behind the peak frees nothing.

A cut knows nothing of the memory that computing again takes itself: from the program's arguments alone the least is
kept, and all of it is there once more. So what is before the peak is divided in segments, where little passes from
one to the next, and each is computed again from what is kept of it and before it: as ``checkpoint`` on layers would,
on blocks of many layers or on parts of one (T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from blufunc.core.jaxpr import DropVar, Eqn, Jaxpr, Var, meets
from blufunc.core.ops.barrier import optimization_barrier_p
from blufunc.kernels.cost import arithmetic, of_eqn
from blufunc.kernels.flow import UNLIMITED, Network
from blufunc.kernels.fuse import Region
from blufunc.kernels.machine import Machine
from blufunc.kernels.numpy_program import eqn_calls_back
from blufunc.kernels.point_control import POINTS
from blufunc.kernels.repeat import Divided, nbytes
from blufunc.kernels.steps import OpaqueStep, Schedule

_ALL = 1 / 8
"""What a byte counts that is free for all of the time, beside one that is for all of the time over budget: of values
that are worth the same, those go first that are not needed for longest.
"""

LEVELS = 7
"""Ways to divide the program: in 1, 2, 4, ... segments."""


@dataclass(frozen=True)
class Choice:
    """What is computed again.

    Attributes:
      again: the values, and for each the number of its segment.
      kept: values that are kept for that, whatever else is computed again.
      freed: bytes that are not alive at the peak for it, less those that are alive instead.
      seconds: how long it takes to compute them, estimated.
    """

    again: dict[Var, int]
    kept: frozenset[Var]
    freed: int
    seconds: float


class Cuts(Divided):
    """The choices that there are for a program.

    Args:
      made: the program as it was planned, with one step for each of its fusion.
      budget: bytes for its planned peak, which is more.
      machine: what time is estimated for.

    Attributes:
      levels: for each way to divide what is before the peak, its segments: ranges of places in ``nodes``.
      excess: bytes to be freed at the peak.
    """

    def __init__(self, made: Schedule, budget: int, machine: Machine):
        by_eqn = {id(s.eqn): s for s in made.fusion.steps if not isinstance(s, Region)}
        self.steps = [by_eqn[id(s.eqn)] if isinstance(s, OpaqueStep) else s.region for s in made.steps]  # type: ignore[union-attr]
        fusion = replace(made.fusion, steps=self.steps)
        fusion.jaxpr = fusion.in_order()
        assert made.plan.peak_step is not None
        self.at = made.plan.order.index(made.plan.peak_step)
        position = {id(e): i for i, e in enumerate(fusion.jaxpr.eqns)}
        ran = [e for s in self.steps[: self.at + 1] for e in (s.eqns if isinstance(s, Region) else [s.eqn])]
        super().__init__(fusion, max((position[id(e)] for e in ran), default=-1))
        self.machine = machine
        self.excess = made.plan.peak_bytes - budget
        self._read_lives(made, budget)
        self._find_nodes()
        self.levels = self._divide()

    # -- when values are alive ---------------------------------------------------------------------------

    def _read_lives(self, made: Schedule, budget: int) -> None:
        """When each variable in memory is written and read, and how much of the time over budget it waits."""
        self.last_early: dict[Var, int] = {}
        self.first_late: dict[Var, int] = {}
        for i, step in enumerate(self.steps):
            computed = step.roles if isinstance(step, Region) else ()
            if i <= self.at:
                self.last_early.update(dict.fromkeys([*step.outputs, *computed, *step.inputs], i))
            else:
                self.first_late.update((v, i) for v in step.inputs if v not in self.first_late)
        profile = np.zeros(len(self.steps) + 1, np.int64)
        for value, (start, end) in made.plan.spans.items():
            if made.plan.values[value].kind == "temp":
                profile[max(start, 0)] += made.plan.values[value].nbytes
                profile[end + 1 :][:1] -= made.plan.values[value].nbytes
        profile = profile.cumsum()[:-1]
        over = profile + (made.plan.peak_bytes - profile[self.at]) > budget
        self.over = np.concatenate([[0], over.cumsum()])
        unplanned = {made.values[i] for i in made.unplanned}
        aliased = {made.values[i] for pair in made.aliases.items() for i in pair}
        self.fixed = {v for v in unplanned | aliased | self.results if isinstance(v, Var)}

    def price(self, v: Var, until: int) -> int:
        """The bytes that keeping a value from its last early reader to a step costs, by the share of the time over
        budget in between.
        """
        if v in self.fixed:
            return 0
        begin = min(self.last_early[v] + 1, until)
        share = (self.over[until] - self.over[begin]) / self.over[-1]
        return int(nbytes(v) * (share + _ALL * (until - begin) / len(self.steps)))

    # -- what can be computed again ----------------------------------------------------------------------

    def _find_nodes(self) -> None:
        """The equations before the peak that compute something, what each reads in memory, and how long it takes."""
        self.nodes: list[Eqn] = []
        self.reads: dict[Eqn, list[Var]] = {}
        self.seconds: dict[Eqn, float] = {}  # without an entry: it is not computed twice
        for step in self.steps[: self.at + 1]:
            if not isinstance(step, Region):
                self._add(step.eqn, list(dict.fromkeys(step.inputs)), self._seconds_of(step.eqn))
            elif not step.eqns:  # a copy
                (v,) = step.outputs
                self._add(
                    self.maker[v], step.inputs, (nbytes(v) + sum(map(nbytes, step.inputs))) / self._bandwidth
                )
            else:
                written = set(step.outputs)
                for eqn in step.eqns:
                    reads = list(dict.fromkeys(x for a in eqn.invars for x in self.leaves(a)))
                    moved = sum(nbytes(x) for x in reads if x not in step.roles)
                    moved += sum(nbytes(v) for v in eqn.outvars if v in written)
                    seconds = moved / self._bandwidth + arithmetic(eqn) / self.machine.flops
                    self._add(eqn, reads, None if eqn.prim in POINTS else seconds)
        self.place = {e: i for i, e in enumerate(self.nodes)}
        self.node_of = {v: e for e in self.nodes for v in e.outvars}

    @property
    def _bandwidth(self) -> float:
        return self.machine.bandwidth

    def _add(self, eqn: Eqn, reads: list[Var], seconds: float | None) -> None:
        self.nodes.append(eqn)
        self.reads[eqn] = reads
        if seconds is not None and not any(v in self.fixed for v in eqn.outvars):
            self.seconds[eqn] = seconds

    def _seconds_of(self, eqn: Eqn) -> float | None:
        """The time of a library call; None for what is done once: effects, exchanges, calls of the user's functions."""
        once = eqn.effects or meets(eqn) or eqn.prim.opaque or eqn.prim is optimization_barrier_p
        if once or not eqn.outvars or eqn_calls_back(eqn.prim, eqn.params):
            return None
        cost = of_eqn(eqn, "library")
        return None if cost.unbounded else cost.seconds(self.machine)

    # -- segments ----------------------------------------------------------------------------------------

    def _divide(self) -> list[list[range]]:
        """The nodes in 1, 2, 4, ... segments, cut in two where least passes from one half to the other."""
        n = len(self.nodes)
        passing = np.zeros(n + 1, np.int64)  # bytes that cross each border
        last: dict[Var, int] = {}
        for i, eqn in enumerate(self.nodes):
            last.update((v, i) for v in self.reads[eqn])
        waits = np.zeros(n + 1, np.int64)  # of what is needed behind the peak
        for i, eqn in enumerate(self.nodes):
            for v in eqn.outvars:
                if v in last:
                    passing[i + 1] += nbytes(v)
                    passing[last[v] + 1 :][:1] -= nbytes(v)
                waits[i + 1] += nbytes(v) * (v in self.first_late)
        passing, before = passing.cumsum(), waits.cumsum()

        def halves(r: range) -> list[range]:
            whole = before[r.stop] - before[r.start]
            borders = np.arange(r.start + 1, r.stop)
            if not whole or not len(borders):
                return [r]
            share = (before[borders] - before[r.start]) / whole
            fair = (share >= 0.25) & (share <= 0.75)
            if not fair.any():
                return [r]
            best = min(
                borders[fair], key=lambda b: (passing[b], abs(before[b] - before[r.start] - whole / 2))
            )
            return [range(r.start, int(best)), range(int(best), r.stop)]

        levels = [[range(n)]]
        while len(levels) < LEVELS:
            finer = [half for r in levels[-1] for half in halves(r)]
            if len(finer) == len(levels[-1]):
                break
            levels.append(finer)
        return levels

    # -- choosing ----------------------------------------------------------------------------------------

    def choose(self, segments: Sequence[range], rate: float) -> Choice:
        """What is computed again where a byte, for all of the time over budget, is worth ``rate`` seconds."""
        again: dict[Var, int] = {}
        kept: set[Var] = set()
        repeated: dict[Eqn, int] = {}
        for number, segment in enumerate(segments):
            wanted = [
                v for e in self.nodes[segment.start : segment.stop] for v in e.outvars if v in self.first_late
            ]
            if wanted:
                needed, chosen = self._cut(segment, wanted, rate, again, kept)
                repeated.update((e, number) for e in chosen)
                again.update((v, number) for e in chosen for v in e.outvars if v.__class__ is not DropVar)
                kept.update(
                    v for v in needed if v not in again or self.place[self.node_of[v]] < segment.start
                )
                for v in kept & again.keys():
                    del again[v]
        freed = sum(nbytes(v) for v in again if v in self.first_late and self.last_early[v] < self.at)
        freed -= sum(nbytes(v) for v in kept if v not in self.first_late and v not in self.fixed)
        seconds = sum(self.seconds[e] for e in repeated)
        return Choice(again, frozenset(kept), freed, seconds)

    def _cut(
        self, segment: range, wanted: Sequence[Var], rate: float, again: dict[Var, int], kept: set[Var]
    ) -> tuple[list[Var], list[Eqn]]:
        """What of a segment, and before it, is kept, and which equations of it are computed again.

        A node on the source's side is a value that is needed, or an equation that is computed again.
        """
        until = min(self.first_late[v] for v in wanted)
        network = Network()
        values: dict[Var, None] = {}
        equations: set[Eqn] = set()
        pending = list(wanted)
        for v in wanted:
            network.edge("source", v, UNLIMITED)
        while pending:
            v = pending.pop()
            eqn = self.node_of.get(v)
            if v in values or eqn is None:  # an argument is there anyway
                continue
            values[v] = None
            inside = self.place[eqn] in segment
            at_hand = v in kept or (not inside and v in self.first_late and v not in again)
            price = 0 if at_hand else self.price(v, self.first_late.get(v, until))
            if not inside or eqn not in self.seconds:
                network.edge(v, "sink", price)
                continue
            network.edge(v, eqn, price)
            if eqn not in equations:
                equations.add(eqn)
                network.edge(eqn, "sink", 1 + int(self.seconds[eqn] / rate))
                for x in self.reads[eqn]:
                    network.edge(eqn, x, UNLIMITED)
                pending.extend(self.reads[eqn])
        near = network.near_source("source", "sink")
        chosen = [e for e in self.nodes[segment.start : segment.stop] if e in near]
        needed = [v for v in values if v in near and self.node_of[v] not in near]
        return needed, chosen

    def program(self, choice: Choice, origins: dict[Eqn, int]) -> Jaxpr:
        """The program in which that is computed again; its equations are added to ``origins``."""
        base = 1 + max(origins.values(), default=0)
        return self.repeated({v: base + n for v, n in choice.again.items()}, origins, choice.kept)

    def dropped(self, choice: Choice) -> list[Var]:
        """The values that are no longer kept from before the peak to behind it."""
        return [v for v in choice.again if v in self.first_late]
