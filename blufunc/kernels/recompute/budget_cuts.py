"""Choice of the values to save and to recompute when a plan exceeds its memory budget.

Kernels, between stages 5 and 7, below ``budget.py``. In: a planned program, and the budget that it exceeds. Out, for a
rate (the seconds that a byte is worth) and a division of the program in segments: the values that are recomputed after
the peak, and the time for it.

Equations after the peak need values from before it. Each is either saved, which costs bytes, or recomputed, which costs
time and needs the operands of its equation. At a given rate, the cheapest choice is a minimum cut: the project
selection problem (J. Picard, "Maximal Closure of a Graph", 1976). So elementwise chains, matmuls, and dead values from
which much else can be computed compete on equal terms. A byte counts by the share of the time over budget for which no
step reads the value: values that are read right before and right after the peak free nothing.

A cut ignores the memory that recomputation needs itself. Recomputing everything from the arguments saves least, and
then all values are alive once more. So the part before the peak is divided in segments, at places where few bytes pass
from one to the next. Each is recomputed from its own saved values and those before it: as ``checkpoint`` does for
layers, for blocks of many layers or parts of one (T. Chen et al., "Training Deep Nets with Sublinear Memory Cost",
2016).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Var
from blufunc.kernels.machine import Machine
from blufunc.kernels.recompute.budget_report import Dropped
from blufunc.kernels.recompute.epilogue import recomputed, with_recomputed_results
from blufunc.kernels.recompute.min_cut import UNLIMITED, Network
from blufunc.kernels.recompute.recompute_cost import Link, Repeatable
from blufunc.kernels.schedule import Schedule

LEVELS = 7
"""Divisions of the program that are tried: 1, 2, 4, ... segments."""


@dataclass(frozen=True)
class Choice:
    """The values to recompute.

    Attributes:
      recomputed: the values, each with the index of its segment.
      kept: values that are saved for them, whatever else is recomputed.
      instead: of ``recomputed``, the results of epilogues that are computed elementwise, without their matmuls.
      freed: bytes at the peak that this frees, less the bytes that are saved instead.
      seconds: estimated time of recomputation.
    """

    recomputed: dict[Var, int]
    kept: frozenset[Var]
    instead: frozenset[Var]
    freed: int
    seconds: float


class Cuts(Repeatable):
    """The possible choices for a program; ``Args`` as in ``Repeatable``.

    Attributes:
      levels: for each division of the program before the peak, its segments: ranges of indices of ``nodes``.
    """

    def __init__(
        self, made: Schedule, budget: int, machine: Machine, able: Callable[[Eqn], bool] = lambda eqn: False
    ):
        super().__init__(made, budget, machine, able)
        self.levels = self._divide()

    # -- segments ----------------------------------------------------------------------------------------

    def _divide(self) -> list[list[range]]:
        """The nodes in 1, 2, 4, ... segments, halved where the fewest bytes pass."""
        n = len(self.nodes)
        passing = np.zeros(n + 1, np.int64)  # bytes that cross each border
        last = {v: i for i, eqn in enumerate(self.nodes) for v in self.reads[eqn]}
        saved = np.zeros(n + 1, np.int64)  # bytes of values that are read after the peak
        for i, eqn in enumerate(self.nodes):
            for v in eqn.outvars:
                if v in last:
                    passing[i + 1] += v.aval.nbytes
                    passing[last[v] + 1 :][:1] -= v.aval.nbytes
                saved[i + 1] += v.aval.nbytes * (v in self.first_late)
        passing, saved = passing.cumsum(), saved.cumsum()

        def halves(r: range) -> list[range]:
            whole = saved[r.stop] - saved[r.start]
            borders = np.arange(r.start + 1, r.stop)
            if not whole or not len(borders):
                return [r]
            share = (saved[borders] - saved[r.start]) / whole
            fair = (share >= 0.25) & (share <= 0.75)
            if not fair.any():
                return [r]
            unfairness = lambda b: abs(saved[b] - saved[r.start] - whole / 2)
            best = int(min(borders[fair], key=lambda b: (passing[b], unfairness(b))))
            return [range(r.start, best), range(best, r.stop)]

        levels = [[range(n)]]
        while len(levels) < LEVELS:
            finer = [half for r in levels[-1] for half in halves(r)]
            if len(finer) == len(levels[-1]):
                break
            levels.append(finer)
        return levels

    # -- choosing ----------------------------------------------------------------------------------------

    def choose(self, segments: Sequence[range], rate: float) -> Choice:
        """The choice if a byte, free for all of the time over budget, is worth ``rate`` seconds."""
        chosen: dict[Var, int] = {}
        kept: set[Var] = set()
        instead: set[Var] = set()
        seconds = 0.0
        for index, segment in enumerate(segments):
            nodes = self.nodes[segment.start : segment.stop]
            needed = [v for e in nodes for v in e.outvars if v in self.first_late]
            if not needed:
                continue
            near, values, begun = self._cut(segment, needed, rate, chosen, kept)
            equations = [e for e in nodes if e in near]
            elementwise = [v for v in values if self.elementwise.get(v) in begun]
            results = [v for e in equations for v in e.outvars if v.__class__ is not DropVar]
            chosen.update(dict.fromkeys([*results, *elementwise], index))
            saved = [v for v in values if v in near and self.node_of[v] not in near and v not in elementwise]
            kept.update(v for v in saved if v not in chosen or self.place[self.node_of[v]] < segment.start)
            for v in kept & chosen.keys():
                del chosen[v]
            instead.update(elementwise)
            seconds += sum(self.seconds[e] for e in equations) + sum(link.seconds for link in begun)
        freed = sum(v.aval.nbytes for v in chosen if v in self.first_late and self.last_early[v] < self.at)
        freed -= sum(v.aval.nbytes for v in kept if v not in self.first_late and v not in self.fixed)
        return Choice(chosen, frozenset(kept), frozenset(instead & chosen.keys()), freed, seconds)

    def _cut(
        self, segment: range, needed: Sequence[Var], rate: float, chosen: dict[Var, int], kept: set[Var]
    ) -> tuple[set, dict[Var, None], set[Link]]:
        """The source's side of the cut of a segment, its values, and the links that are paid for.

        Nodes on the source's side are values that are needed, equations that are recomputed, and links of these.
        """
        network = Network()
        values: dict[Var, None] = {}
        equations: set[Eqn] = set()
        links: dict[Link, Eqn | str] = {}  # and the node that makes each free
        # with the step until which a value is needed, for values that no late step reads; the latest first
        pending = sorted(((v, self.first_late[v]) for v in needed), key=lambda pair: pair[1])
        for v in needed:
            network.edge("source", v, UNLIMITED)

        def add(link: Link) -> None:
            if link not in links:
                free = link.maker is not None and self._is_repeatable(link.maker, segment)
                links[link] = link.maker if free else "sink"  # type: ignore[assignment]
                network.edge(link, links[link], int(link.seconds / rate))

        while pending:
            v, until = pending.pop()
            eqn = self.node_of.get(v)
            if v in values or eqn is None:  # an argument is always in memory
                continue
            values[v] = None
            within, repeatable = self.place[eqn] in segment, self._is_repeatable(eqn, segment)
            in_memory = v in kept or (not within and v in self.first_late and v not in chosen)
            until = self.first_late.get(v, until)
            price = 0 if in_memory else self.price(v, until)
            cheaper = self.elementwise.get(v) if within and v not in self.fixed else None
            if cheaper is not None:
                network.edge(v, cheaper, price)
                add(cheaper)
                for x in cheaper.operands:
                    network.edge(cheaper, x, UNLIMITED)
                    pending.append((x, until))
            elif not repeatable:
                network.edge(v, "sink", price)
            else:
                waiting = int(self.waiting.get(v, 0.0) / rate)
                # saved time alone is no reason to recompute
                network.edge(v, eqn, price + (min(price, waiting) if v in self.first_late else waiting))
            if eqn not in equations and repeatable:
                equations.add(eqn)
                network.edge(eqn, "sink", 1 + int(self.seconds[eqn] / rate))
                for x in self.reads[eqn]:
                    network.edge(eqn, x, UNLIMITED)
                for link in self.links.get(eqn, ()):
                    network.edge(eqn, link, UNLIMITED)
                    add(link)
                pending.extend((x, until) for x in self.reads[eqn])
        near = network.near_source("source", "sink")
        return near, values, {link for link, free in links.items() if link in near and free not in near}

    def _is_repeatable(self, eqn: Eqn, segment: range) -> bool:
        return eqn in self.seconds and self.place[eqn] in segment

    def program(self, choice: Choice, origins: dict[Eqn, int]) -> Jaxpr:
        """The program of a choice; the recomputed equations are added to ``origins``."""
        base = 1 + max(origins.values(), default=0)
        instead = {v: self.elementwise[v].eqns for v in choice.instead}
        chosen = {v: base + n for v, n in choice.recomputed.items()}
        jaxpr = self.repeated(chosen, origins, choice.kept, instead, with_readers=True)
        return with_recomputed_results(jaxpr, origins, self.able)

    def dropped(self, choice: Choice, jaxpr: Jaxpr) -> list[Dropped]:
        """Entries of the report: the values that the program of a choice does not save."""
        by_matmuls = [set(e.invars) for e in jaxpr.eqns if recomputed(e)]

        def way(v: Var) -> str:
            if v not in choice.instead:
                return ""
            operands = set(self.elementwise[v].operands)
            is_host = any(operands <= m for m in by_matmuls)
            return ", by the epilogue of another matmul," if is_host else ", elementwise,"

        return [Dropped.of(v, self.maker[v], way(v)) for v in choice.recomputed if v in self.first_late]
