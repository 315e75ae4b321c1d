"""Min-cut choice of the values to save or recompute around the peak of a plan.

Kernels, between stages 5 and 7, below ``budget.py``. In: a planned program, and the budget that it exceeds. Out, for
a price of a byte in seconds and a segmentation of the program: the values that are recomputed after the peak, and the
time of that.

The peak splits the program. Each value that is computed before it and read after it is either saved, which costs
bytes, or recomputed, which costs time and needs the operands of its equation. The cheapest choice at a given price is
a minimum cut: the project selection problem (J. Picard, "Maximal Closure of a Graph", 1976). So chains, matmuls, and
dead values from which much else can be computed compete on equal terms. A byte counts by the fraction of the time
over budget in which no step reads the value: a value read right before and right after the peak frees nothing.

A cut ignores the memory of the recomputation itself: recomputing all from the program's arguments saves least, and
needs all of that memory again. So the part before the peak is split into segments, where little passes from one to
the next. Each is recomputed from values saved in it and before it, as by ``checkpoint`` on blocks of layers or on
parts of one (T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Var
from blufunc.kernels.machine import Machine
from blufunc.kernels.recompute.epilogue import result_of, with_activations_again
from blufunc.kernels.recompute.min_cut import UNLIMITED, Network
from blufunc.kernels.recompute.recompute_cost import Link, Repeatable
from blufunc.kernels.recompute.repeat import nbytes
from blufunc.kernels.rewrites.activation_sums import Kernel
from blufunc.kernels.schedule import Schedule

LEVELS = 7
"""Segmentations of the program: into 1, 2, 4, ... segments."""


@dataclass(frozen=True)
class Choice:
    """Values to recompute.

    Attributes:
      recomputed: the values, and for each the index of its segment.
      kept: values that are saved for that, whatever else is recomputed.
      instead: of ``recomputed``, the activations that are recomputed from their argument without their GEMM.
      freed: bytes that this frees at the peak, less those of the values saved for it.
      seconds: estimated time of the recomputation.
    """

    recomputed: dict[Var, int]
    kept: frozenset[Var]
    instead: frozenset[Var]
    freed: int
    seconds: float


@dataclass
class _Side:
    """Source side of a cut, and values next to it: as in ``Choice``, of one segment."""

    equations: list[Eqn]
    instead: list[Var] = field(default_factory=list)
    kept: list[Var] = field(default_factory=list)
    seconds: float = 0.0


class Cuts(Repeatable):
    """The recomputation choices of a program.

    Args:
      made: the program as it was planned, with one step for each of its fusion.
      budget: bytes for its planned peak, which is more.
      machine: the machine of the time estimates.
      kernel: from a GEMM with an activation to its kernel, if there is one.

    Attributes:
      levels: for each segmentation of the part before the peak, its segments: ranges of positions in ``nodes``.
    """

    def __init__(self, made: Schedule, budget: int, machine: Machine, kernel: Kernel = lambda eqn: None):
        super().__init__(made, budget, machine, kernel)
        self.levels = self._divide()

    # -- segments ----------------------------------------------------------------------------------------

    def _divide(self) -> list[list[range]]:
        """The nodes in 1, 2, 4, ... segments, bisected where the fewest bytes cross."""
        n = len(self.nodes)
        passing = np.zeros(n + 1, np.int64)  # bytes that cross each border
        last: dict[Var, int] = {}
        for i, eqn in enumerate(self.nodes):
            last.update((v, i) for v in self.reads[eqn])
        waits = np.zeros(n + 1, np.int64)  # of values that are read after the peak
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
        """Values to recompute at a price of ``rate`` seconds per byte over the budget."""
        recomputed: dict[Var, int] = {}
        kept: set[Var] = set()
        instead: set[Var] = set()
        seconds = 0.0
        for number, segment in enumerate(segments):
            wanted = [
                v for e in self.nodes[segment.start : segment.stop] for v in e.outvars if v in self.first_late
            ]
            if wanted:
                side = self._cut(segment, wanted, rate, recomputed, kept)
                results = [v for e in side.equations for v in e.outvars if v.__class__ is not DropVar]
                recomputed.update((v, number) for v in [*results, *side.instead])
                kept.update(
                    v for v in side.kept if v not in recomputed or self.place[self.node_of[v]] < segment.start
                )
                for v in kept & recomputed.keys():
                    del recomputed[v]
                instead.update(side.instead)
                seconds += side.seconds
        freed = sum(nbytes(v) for v in recomputed if v in self.first_late and self.last_early[v] < self.at)
        freed -= sum(nbytes(v) for v in kept if v not in self.first_late and v not in self.fixed)
        return Choice(recomputed, frozenset(kept), frozenset(instead & recomputed.keys()), freed, seconds)

    def _cut(
        self, segment: range, wanted: Sequence[Var], rate: float, recomputed: dict[Var, int], kept: set[Var]
    ) -> _Side:
        """Values of a segment to recompute, and values in and before it to save for that.

        A node on the source's side is a value that is read, an equation that is recomputed, or a link of one.
        """
        network = Network()
        values: dict[Var, None] = {}
        equations: set[Eqn] = set()
        links: dict[Link, Eqn | str] = {}  # and the node that makes each free
        # and the last step that reads it, if no step after the peak reads the original; the latest first
        pending = sorted(((v, self.first_late[v]) for v in wanted), key=lambda pair: pair[1])
        for v in wanted:
            network.edge("source", v, UNLIMITED)

        def link(found: Link) -> None:
            """Charge a link's time unless its operand is recomputed as well."""
            if found not in links:
                free = found.maker is not None and self._is_repeatable(found.maker, segment)
                links[found] = found.maker if free else "sink"  # type: ignore[assignment]
                network.edge(found, links[found], int(found.seconds / rate))

        while pending:
            v, until = pending.pop()
            eqn = self.node_of.get(v)
            if v in values or eqn is None:  # an argument is alive anyway
                continue
            values[v] = None
            at_hand = v in kept or (
                self.place[eqn] not in segment and v in self.first_late and v not in recomputed
            )
            until = self.first_late.get(v, until)
            price = 0 if at_hand else self.price(v, until)
            cheaper = self.activations.get(v) if self.place[eqn] in segment and v not in self.fixed else None
            if cheaper is not None:
                network.edge(v, cheaper, price)
                link(cheaper)
                network.edge(cheaper, cheaper.operand, UNLIMITED)
                pending.append((cheaper.operand, until))
            elif not self._is_repeatable(eqn, segment):
                network.edge(v, "sink", price)
            else:
                waiting = int(self.waiting.get(v, 0.0) / rate)
                # time that would be saved is no reason by itself to recompute a value
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
        side.instead = [v for v in values if self.activations.get(v) in begun]
        side.kept = [v for v in values if v in near and self.node_of[v] not in near and v not in side.instead]
        side.seconds = sum(self.seconds[e] for e in side.equations) + sum(found.seconds for found in begun)
        return side

    def _is_repeatable(self, eqn: Eqn, segment: range) -> bool:
        return eqn in self.seconds and self.place[eqn] in segment

    def program(self, choice: Choice, origins: dict[Eqn, int]) -> Jaxpr:
        """The program with this recomputation; its equations are added to ``origins``."""
        base = 1 + max(origins.values(), default=0)
        instead = {v: self.activations[v].eqns for v in choice.instead}
        recomputed = {v: base + n for v, n in choice.recomputed.items()}
        jaxpr = self.repeated(recomputed, origins, choice.kept, instead, with_readers=True)
        return with_activations_again(jaxpr, origins)

    def ways(self, choice: Choice, jaxpr: Jaxpr) -> dict[Var, str]:
        """For reports: how a choice recomputes activations without their GEMMs."""
        by_products = {e.invars[2] for e in jaxpr.eqns if result_of(e) is not None}
        argument = {v: self.activations[v].operand for v in choice.instead}
        by_product, by_kernel = ", by the product with its derivative,", ", from its argument,"
        return {v: by_product if x in by_products else by_kernel for v, x in argument.items()}

    def dropped(self, choice: Choice) -> list[Var]:
        """The values that are no longer alive across the peak."""
        return [v for v in choice.recomputed if v in self.first_late]
