"""Choice of the values to save and to recompute within a memory budget.

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

Times are estimates for a ``Machine``, the roofline of each library call and kernel. A recomputed equation is fused into
the kernel after the peak that reads it. If only one kernel reads the result, it is then neither written nor read; a
library call needs it written. Reading the operands costs their traffic once per kernel. Operands from the same kernel
before the peak cost it only where recomputation begins: that is a ``Link``. Another kind of link leads from a result of
a matmul's epilogue to the values that it is computed from elementwise. If these are saved, a kernel recomputes the
result without the matmul, or the epilogue of another matmul that reads them anyway does (``epilogue.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from blufunc.core.ir.avals import DEVICE
from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Var, communicates
from blufunc.core.ops.barrier import optimization_barrier_p
from blufunc.core.primitives.effects import eqn_calls_back
from blufunc.kernels.cost import arithmetic, library_seconds, of_eqn
from blufunc.kernels.fusion.fuse import Opaque, Region, Step
from blufunc.kernels.machine import Machine
from blufunc.kernels.ops.points import POINTS
from blufunc.kernels.ops.pointwise_gemm import dot_pointwise_p
from blufunc.kernels.recompute import epilogue
from blufunc.kernels.recompute.budget_report import Dropped
from blufunc.kernels.recompute.min_cut import UNLIMITED, Network
from blufunc.kernels.recompute.repeat import AroundPeak
from blufunc.kernels.schedule import OpaqueStep, Schedule

LEVELS = 7
"""Divisions of the program that are tried: 1, 2, 4, ... segments."""

_WHOLE_TIME = 1 / 8
"""Weight of the share of the whole time for which a byte is free.

Its share of the time over budget weighs 1. Of equally valuable values, those that are unused for longest go first.
"""


@dataclass(frozen=True, eq=False)
class Link:
    """The cost to begin recomputation with a saved value.

    Attributes:
      operands: the value; for the result of an epilogue, all values that it is computed from.
      seconds: time to read it, and to run ``eqns``.
      maker: its equation: recomputing that makes the link free; default None: it is never free.
      eqns: the equations that compute another result of ``maker`` from it; default none, if it is only read.
    """

    operands: tuple[Var, ...]
    seconds: float
    maker: Eqn | None = None
    eqns: tuple[Eqn, ...] = ()


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


class Cuts(AroundPeak):
    """The possible choices for a planned program.

    Args:
      made: the planned program, with one step per step of its fusion.
      budget: bytes for its planned peak, which is larger.
      machine: the device that times are estimated for.
      able: whether there is a kernel for a matmul with an epilogue; default: for none.

    Attributes:
      steps: those of the fusion, in the order in which they run.
      at: the index of the step at the peak.
      excess: bytes to be freed there.
      last_early: by variable, the last step up to the peak that writes or reads it.
      first_late: by variable, the first step after the peak that reads it.
      nodes: the equations up to the peak that compute something.
      reads: by node, the variables in memory that it reads.
      seconds: by node, the time to recompute it, without its links; absent if it cannot be computed twice.
      links: by node in a kernel, the extra time for each operand.
      waiting: by variable, the time of kernels to write and to read it only because it is saved.
      elementwise: by result of an epilogue, the link that computes it without the matmul.
      levels: for each division of the program before the peak, its segments: ranges of indices of ``nodes``.
    """

    def __init__(
        self, made: Schedule, budget: int, machine: Machine, able: Callable[[Eqn], bool] = lambda eqn: False
    ):
        opaque = {id(s.eqn): s for s in made.fusion.steps if isinstance(s, Opaque)}
        self.steps: list[Step] = [
            opaque[id(s.eqn)] if isinstance(s, OpaqueStep) else s.region for s in made.steps
        ]
        fusion = replace(made.fusion, steps=self.steps)
        fusion.jaxpr = fusion.in_order()
        assert made.plan.peak_step is not None
        self.at = made.plan.order.index(made.plan.peak_step)
        position = {id(e): i for i, e in enumerate(fusion.jaxpr.eqns)}
        ran = [e for s in self.steps[: self.at + 1] for e in (s.eqns if isinstance(s, Region) else [s.eqn])]
        super().__init__(fusion, max((position[id(e)] for e in ran), default=-1))
        self.machine, self.able = machine, able
        self.excess = made.plan.peak_bytes - budget
        self._find_lifetimes(made, budget)
        self._find_nodes()
        self.levels = self._divide()

    def _find_lifetimes(self, made: Schedule, budget: int) -> None:
        """Find when variables are written and read, and which steps are over budget."""
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
            if made.plan.values[value].kind == "temp" and not made.plan.values[value].on_host:
                profile[max(start, 0)] += made.plan.values[value].nbytes
                profile[end + 1 :][:1] -= made.plan.values[value].nbytes
        profile = profile.cumsum()[:-1]
        over = profile + (made.plan.peak_bytes - profile[self.at]) > budget
        self.over = np.concatenate([[0], over.cumsum()])
        unplanned = {made.values[i] for i in made.unplanned}
        aliased = {made.values[i] for pair in made.aliases.items() for i in pair}
        on_host = {v for v in made.values if isinstance(v, Var) and v.aval.memory != DEVICE}
        self.fixed = {v for v in unplanned | aliased | on_host | self.results if isinstance(v, Var)}

    def price(self, v: Var, until: int) -> int:
        """Bytes of a saved value, weighted by the time that it waits.

        That is from its last early reader until a step; the share of the time over budget counts most.
        """
        if v in self.fixed:
            return 0
        begin = min(self.last_early[v] + 1, until)
        share = (self.over[until] - self.over[begin]) / self.over[-1]
        return int(v.aval.nbytes * (share + _WHOLE_TIME * (until - begin) / len(self.steps)))

    # -- time to recompute -------------------------------------------------------------------------------

    def _find_nodes(self) -> None:
        self.nodes: list[Eqn] = []
        self.reads: dict[Eqn, list[Var]] = {}
        self.seconds: dict[Eqn, float] = {}
        self.links: dict[Eqn, list[Link]] = {}
        self.waiting: dict[Var, float] = {}
        self.elementwise: dict[Var, Link] = {}
        early, late = self.steps[: self.at + 1], self.steps[self.at + 1 :]
        self._late_kernels = Counter(v for s in late if isinstance(s, Region) for v in s.inputs)
        late_eqns = {s.eqn for s in late if not isinstance(s, Region)}
        self._late_matmuls = [e for e in self.jaxpr.eqns if e in late_eqns and e.prim is dot_pointwise_p]
        self._by_library = {v for s in self.steps if not isinstance(s, Region) for v in s.inputs}
        self._read_early = {v for s in early for v in s.inputs}
        self._fused: set[Var] = set()
        for step in early:
            if not isinstance(step, Region):
                self._add(step.eqn, list(dict.fromkeys(step.inputs)), self._seconds_of(step.eqn))
                self._add_elementwise(step.eqn)
            elif not step.eqns:  # a copy
                (v,) = step.outputs
                self._add(self.maker[v], step.inputs, self.machine.launch + self._moving(v, *step.inputs))
            else:
                self._add_region(step)
        self.place = {e: i for i, e in enumerate(self.nodes)}
        self.node_of = {v: e for e in self.nodes for v in e.outvars}

    def _moving(self, *values: Var) -> float:
        return sum(v.aval.nbytes for v in values) / self.machine.bandwidth

    def _add(self, eqn: Eqn, reads: list[Var], seconds: float | None) -> None:
        self.nodes.append(eqn)
        self.reads[eqn] = reads
        if seconds is not None and not any(v in self.fixed for v in eqn.outvars):
            self.seconds[eqn] = seconds

    def _add_region(self, region: Region) -> None:
        """Add the equations of a kernel, as parts of the kernel that reads them later."""
        reads = {e: list(dict.fromkeys(x for a in e.invars for x in self.leaves(a))) for e in region.eqns}
        readers = Counter(x for found in reads.values() for x in found)
        links = {x: link for x in readers if (link := self._link(x, region)).seconds}
        fused = not any(x in self._fused for x in readers if x not in region.roles)
        for eqn in region.eqns:
            seconds = arithmetic(eqn) / self.machine.flops
            written = [
                v
                for v in eqn.outvars
                if v in region.outputs and (v in self._by_library or self._late_kernels[v] != 1)
            ]
            seconds += self._moving(*written) + self.machine.launch * len(written)
            found = [links[x] for x in reads[eqn] if x in links]
            alone = [link for link in found if link.maker is None and readers[link.operands[0]] == 1]
            seconds += sum(link.seconds for link in alone)
            self._add(eqn, reads[eqn], None if eqn.prim in POINTS else seconds)
            self.links[eqn] = [link for link in found if link not in alone]
            self.waiting.update((v, self._waiting(v, region, fused)) for v in eqn.outvars)
        if fused:
            self._fused.update(v for v in region.roles if v in self._late_kernels)

    def _link(self, x: Var, region: Region) -> Link:
        """The link to an operand; free if a late kernel reads it, or if it is not stored."""
        if x not in region.roles:
            return Link((x,), self._moving(x))
        free = x in self._late_kernels or x not in region.outputs
        return Link((x,), 0.0 if free else self._moving(x), self.maker[x])

    def _waiting(self, v: Var, region: Region, fused: bool) -> float:
        """Time to write a saved value, if no early step reads it, and to read it.

        In a chain of values such as a residual stream, only every second one counts as computed by its reader
        (``fused``): the reader of the next value runs first, and would have to write this one.
        """
        if v not in region.outputs:
            return 2 * self._moving(v)
        return self._moving(v) * ((v not in self._read_early) + (fused and v in self._late_kernels))

    def _add_elementwise(self, eqn: Eqn) -> None:
        """Add the links to results of an epilogue without its matmul.

        The epilogue of a matmul after the peak that reads the same operands writes such a result as well, if there is
        a kernel for that; otherwise a kernel of its own does.
        """
        for call in epilogue.recomputing(eqn):
            (result,), operands = call.outvars, tuple(a for a in call.invars if isinstance(a, Var))
            hosts = epilogue.hosts(self._late_matmuls, call)
            eqns, seconds = (call,), self._moving(result)
            if not any(self.able(epilogue.with_result(e, call)) for e in hosts):
                eqns = epilogue.equations(call)
                work = sum(map(arithmetic, eqns)) / self.machine.flops
                seconds = self.machine.launch + max(self._moving(result, *operands), work)
            self.elementwise[result] = Link(operands, seconds, eqn, eqns)

    def _seconds_of(self, eqn: Eqn) -> float | None:
        """Time of a library call; None for collectives and effects, which run once."""
        once = eqn.effects or communicates(eqn) or eqn.prim.opaque or eqn.prim is optimization_barrier_p
        if once or not eqn.outvars or eqn_calls_back(eqn.prim, eqn.params):
            return None
        return None if of_eqn(eqn, "library").unbounded else library_seconds(eqn, self.machine)

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
        """The choice at ``rate`` seconds per byte that is free all the time over budget."""
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
        """The source's side of a segment's cut, its values, and the links to pay for.

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
        return epilogue.with_recomputed_results(jaxpr, origins, self.able)

    def dropped(self, choice: Choice, jaxpr: Jaxpr) -> list[Dropped]:
        """Entries of the report: the values that the program of a choice does not save."""
        by_matmuls = [set(e.invars) for e in jaxpr.eqns if epilogue.recomputed(e)]

        def way(v: Var) -> str:
            if v not in choice.instead:
                return ""
            operands = set(self.elementwise[v].operands)
            is_host = any(operands <= m for m in by_matmuls)
            return ", by the epilogue of another matmul," if is_host else ", elementwise,"

        return [Dropped.of(v, self.maker[v], way(v)) for v in choice.recomputed if v in self.first_late]
