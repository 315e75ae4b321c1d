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
from dataclasses import dataclass, field

import numpy as np

from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Var
from blufunc.kernels.machine import Machine
from blufunc.kernels.recompute.epilogue import recomputed, with_recomputed_results
from blufunc.kernels.recompute.min_cut import UNLIMITED, Network
from blufunc.kernels.recompute.recompute_cost import Able, Link, Repeatable
from blufunc.kernels.recompute.repeat import nbytes
from blufunc.kernels.schedule import Schedule

LEVELS = 7
"""Ways to divide the program: in 1, 2, 4, ... segments."""


@dataclass(frozen=True)
class Choice:
    """What is computed again.

    Attributes:
      again: the values, and for each the number of its segment.
      kept: values that are kept for that, whatever else is computed again.
      instead: of ``again``, the results of epilogues that are computed elementwise and not with their matmul.
      freed: bytes that are not alive at the peak for it, less those that are alive instead.
      seconds: how long it takes to compute them, estimated.
    """

    again: dict[Var, int]
    kept: frozenset[Var]
    instead: frozenset[Var]
    freed: int
    seconds: float


@dataclass
class _Side:
    """What is on the source's side of a cut, or next to it: as in ``Choice``, of one segment."""

    equations: list[Eqn]
    instead: list[Var] = field(default_factory=list)
    kept: list[Var] = field(default_factory=list)
    seconds: float = 0.0


class Cuts(Repeatable):
    """The choices that there are for a program.

    Args:
      made: the program as it was planned, with one step for each of its fusion.
      budget: bytes for its planned peak, which is more.
      machine: what time is estimated for.
      able: whether there is a kernel for a matmul with an epilogue.

    Attributes:
      levels: for each way to divide what is before the peak, its segments: ranges of places in ``nodes``.
    """

    def __init__(self, made: Schedule, budget: int, machine: Machine, able: Able = lambda eqn: False):
        super().__init__(made, budget, machine, able)
        self.levels = self._divide()

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
        instead: set[Var] = set()
        seconds = 0.0
        for number, segment in enumerate(segments):
            wanted = [
                v for e in self.nodes[segment.start : segment.stop] for v in e.outvars if v in self.first_late
            ]
            if wanted:
                side = self._cut(segment, wanted, rate, again, kept)
                results = [v for e in side.equations for v in e.outvars if v.__class__ is not DropVar]
                again.update((v, number) for v in [*results, *side.instead])
                kept.update(
                    v for v in side.kept if v not in again or self.place[self.node_of[v]] < segment.start
                )
                for v in kept & again.keys():
                    del again[v]
                instead.update(side.instead)
                seconds += side.seconds
        freed = sum(nbytes(v) for v in again if v in self.first_late and self.last_early[v] < self.at)
        freed -= sum(nbytes(v) for v in kept if v not in self.first_late and v not in self.fixed)
        return Choice(again, frozenset(kept), frozenset(instead & again.keys()), freed, seconds)

    def _cut(
        self, segment: range, wanted: Sequence[Var], rate: float, again: dict[Var, int], kept: set[Var]
    ) -> _Side:
        """What of a segment is computed again, and what of it and before it is kept for that.

        A node on the source's side is a value that is needed, an equation that is computed again, or a link of one.
        """
        network = Network()
        values: dict[Var, None] = {}
        equations: set[Eqn] = set()
        links: dict[Link, Eqn | str] = {}  # and what makes each free
        # and until when it is needed, of what nobody reads behind the peak as it is; the latest first
        pending = sorted(((v, self.first_late[v]) for v in wanted), key=lambda pair: pair[1])
        for v in wanted:
            network.edge("source", v, UNLIMITED)

        def link(found: Link) -> None:
            """Its time is lost unless what it begins with is computed again as well."""
            if found not in links:
                free = found.maker is not None and self._is_repeatable(found.maker, segment)
                links[found] = found.maker if free else "sink"  # type: ignore[assignment]
                network.edge(found, links[found], int(found.seconds / rate))

        while pending:
            v, until = pending.pop()
            eqn = self.node_of.get(v)
            if v in values or eqn is None:  # an argument is there anyway
                continue
            values[v] = None
            at_hand = v in kept or (
                self.place[eqn] not in segment and v in self.first_late and v not in again
            )
            until = self.first_late.get(v, until)
            price = 0 if at_hand else self.price(v, until)
            cheaper = self.elementwise.get(v) if self.place[eqn] in segment and v not in self.fixed else None
            if cheaper is not None:
                network.edge(v, cheaper, price)
                link(cheaper)
                for x in cheaper.operands:
                    network.edge(cheaper, x, UNLIMITED)
                    pending.append((x, until))
            elif not self._is_repeatable(eqn, segment):
                network.edge(v, "sink", price)
            else:
                waiting = int(self.waiting.get(v, 0.0) / rate)
                # time that would be saved is no reason by itself to compute something again
                network.edge(v, eqn, price + (min(price, waiting) if v in self.first_late else waiting))
            if eqn not in equations and self._is_repeatable(eqn, segment):
                equations.add(eqn)
                network.edge(eqn, "sink", 1 + int(self.seconds[eqn] / rate))
                for x in self.reads[eqn]:
                    network.edge(eqn, x, UNLIMITED)
                for found in self.links.get(eqn, ()):
                    network.edge(eqn, found, UNLIMITED)
                    link(found)
                pending.extend((x, until) for x in self.reads[eqn])
        near = network.near_source("source", "sink")
        begun = {found for found, free in links.items() if found in near and free not in near}
        side = _Side([e for e in self.nodes[segment.start : segment.stop] if e in near])
        side.instead = [v for v in values if self.elementwise.get(v) in begun]
        side.kept = [v for v in values if v in near and self.node_of[v] not in near and v not in side.instead]
        side.seconds = sum(self.seconds[e] for e in side.equations) + sum(found.seconds for found in begun)
        return side

    def _is_repeatable(self, eqn: Eqn, segment: range) -> bool:
        return eqn in self.seconds and self.place[eqn] in segment

    def program(self, choice: Choice, origins: dict[Eqn, int]) -> Jaxpr:
        """The program in which that is computed again; its equations are added to ``origins``."""
        base = 1 + max(origins.values(), default=0)
        instead = {v: self.elementwise[v].eqns for v in choice.instead}
        again = {v: base + n for v, n in choice.again.items()}
        jaxpr = self.repeated(again, origins, choice.kept, instead, with_readers=True)
        return with_recomputed_results(jaxpr, origins, self.able)

    def ways(self, choice: Choice, jaxpr: Jaxpr) -> dict[Var, str]:
        """How the program of a choice recomputes results of epilogues without their matmuls, for people."""
        by_matmuls = [set(e.invars) for e in jaxpr.eqns if recomputed(e)]
        by_matmul, by_kernel = ", by the epilogue of another matmul,", ", elementwise,"
        operands = {v: set(self.elementwise[v].operands) for v in choice.instead}
        return {v: by_matmul if any(x <= m for m in by_matmuls) else by_kernel for v, x in operands.items()}

    def dropped(self, choice: Choice) -> list[Var]:
        """The values that are no longer kept from before the peak to behind it."""
        return [v for v in choice.again if v in self.first_late]
