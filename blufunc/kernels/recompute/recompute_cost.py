"""What can be computed again behind the peak of a plan, and how long that takes; how long a plan takes.

Kernels, between stages 5 and 7, below ``budget_cuts.py``, which chooses. In: a planned program. Out: its equations
before the peak, each with what it reads in memory and with the seconds that computing it once more takes; and what
waits for whom. All times are estimates for a ``Machine``: a library call takes its roofline, and so does a kernel. So
products, which do arithmetic, and operations on elements, which move bytes, are weighed on one scale.

An equation that is computed again becomes part of the kernel behind the peak that reads it. So where only kernels read
its result, that is not written then, nor read, as it is if it is kept; for a library call it is written. What it reads
costs its time once for a kernel; and, if it is of the same kernel before the peak, only where computing again begins,
which is what a ``Link`` says. Another kind of link goes from a result of a matmul's epilogue to the values that it is
computed from elementwise: where these are kept, a kernel recomputes it without the matmul, or the epilogue of another
matmul, which reads them anyway, does so as well (``epilogue.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from blufunc.core.ir.jaxpr import Eqn, Var, communicates
from blufunc.core.ops.barrier import optimization_barrier_p
from blufunc.core.primitives.effects import eqn_calls_back
from blufunc.kernels.cost import arithmetic, of_eqn
from blufunc.kernels.fusion.fuse import Opaque, Region, Step
from blufunc.kernels.machine import Machine
from blufunc.kernels.ops.points import POINTS
from blufunc.kernels.ops.pointwise_gemm import dot_pointwise_p
from blufunc.kernels.recompute import epilogue
from blufunc.kernels.recompute.repeat import Divided, nbytes
from blufunc.kernels.schedule import OpaqueStep, Schedule

Able = Callable[[Eqn], bool]

_ALL = 1 / 8
"""What a byte counts that is free for all of the time, beside one that is for all of the time over budget: of values
that are worth the same, those go first that are not needed for longest.
"""


@dataclass(frozen=True, eq=False)
class Link:
    """What it takes to begin with a value, where it is not computed again itself.

    Attributes:
      operands: the value; of a result of an epilogue, all values that it is computed from.
      seconds: how long it takes to read it, and to do what ``eqns`` do.
      maker: its equation, if that makes it free to be computed again; None: it is never free.
      eqns: the equations that compute another result of that equation from it; none if it is only read.
    """

    operands: tuple[Var, ...]
    seconds: float
    maker: Eqn | None = None
    eqns: tuple[Eqn, ...] = ()


class Repeatable(Divided):
    """What is before the peak of a plan, as far as it can be computed again.

    Args:
      made: the program as it was planned, with one step for each of its fusion.
      budget: bytes for its planned peak, which is more.
      machine: what time is estimated for.
      able: whether there is a kernel for a matmul with an epilogue.

    Attributes:
      steps: those of the fusion, in the order in which they run.
      at: the place of that of the peak.
      excess: bytes to be freed there.
      last_early: of each variable, the last step before the peak that writes or reads it.
      first_late: the first one behind it that reads it.
      nodes: the equations before the peak that compute something.
      reads: the variables in memory that each reads.
      seconds: how long each takes once more, but for its links; none for what is not computed twice.
      links: what equations of kernels take besides, for each of their operands.
      waiting: how long it takes kernels to write and to read a value only because it is kept.
      elementwise: for results of epilogues, the link by which they are computed without the matmul.
    """

    def __init__(self, made: Schedule, budget: int, machine: Machine, able: Able = lambda eqn: False):
        by_eqn = {id(s.eqn): s for s in made.fusion.steps if isinstance(s, Opaque)}
        self.steps = [by_eqn[id(s.eqn)] if isinstance(s, OpaqueStep) else s.region for s in made.steps]  # type: ignore[union-attr]
        fusion = replace(made.fusion, steps=self.steps)
        fusion.jaxpr = fusion.in_order()
        assert made.plan.peak_step is not None
        self.at = made.plan.order.index(made.plan.peak_step)
        position = {id(e): i for i, e in enumerate(fusion.jaxpr.eqns)}
        ran = [e for s in self.steps[: self.at + 1] for e in (s.eqns if isinstance(s, Region) else [s.eqn])]
        super().__init__(fusion, max((position[id(e)] for e in ran), default=-1))
        self.machine, self.able = machine, able
        self.excess = made.plan.peak_bytes - budget
        self._read_lives(made, budget)
        self._find_nodes()

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

    # -- what can be computed again, and how long it takes -------------------------------------------------

    def _find_nodes(self) -> None:
        """The equations before the peak that compute something, what each reads in memory, and how long it takes."""
        self.nodes: list[Eqn] = []
        self.reads: dict[Eqn, list[Var]] = {}
        self.seconds: dict[Eqn, float] = {}
        self.links: dict[Eqn, list[Link]] = {}
        self.waiting: dict[Var, float] = {}
        self.elementwise: dict[Var, Link] = {}
        self._kernels: dict[Var, int] = {}  # how many behind the peak read a value
        late = {e for s in self.steps[self.at + 1 :] if not isinstance(s, Region) for e in [s.eqn]}
        self._late_matmuls = [e for e in self.jaxpr.eqns if e in late and e.prim is dot_pointwise_p]
        self._by_library: set[Var] = set()
        self._fused: set[Var] = set()
        self._read_early = {v for step in self.steps[: self.at + 1] for v in step.inputs}
        for i, step in enumerate(self.steps):
            if not isinstance(step, Region):
                self._by_library.update(step.inputs)
            elif i > self.at:
                self._kernels.update((v, self._kernels.get(v, 0) + 1) for v in step.inputs)
        for step in self.steps[: self.at + 1]:
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
        return sum(map(nbytes, values)) / self.machine.bandwidth

    def _add(self, eqn: Eqn, reads: list[Var], seconds: float | None) -> None:
        self.nodes.append(eqn)
        self.reads[eqn] = reads
        if seconds is not None and not any(v in self.fixed for v in eqn.outvars):
            self.seconds[eqn] = seconds

    def _add_region(self, region: Region) -> None:
        """The equations of a kernel: as parts of one that reads their results, or some of them, behind the peak."""
        reads = {e: list(dict.fromkeys(x for a in e.invars for x in self.leaves(a))) for e in region.eqns}
        readers = Counter(x for found in reads.values() for x in found)
        links = {x: link for x in readers if (link := self._link(x, region)).seconds}
        fused = not any(x in self._fused for x in readers if x not in region.roles)
        for eqn in region.eqns:
            seconds = arithmetic(eqn) / self.machine.flops
            written = [v for v in eqn.outvars if v in region.outputs and self._is_written(v)]
            seconds += self._moving(*written) + self.machine.launch * len(written)
            found = [links[x] for x in reads[eqn] if x in links]
            alone = [link for link in found if link.maker is None and readers[link.operands[0]] == 1]
            seconds += sum(link.seconds for link in alone)
            self._add(eqn, reads[eqn], None if eqn.prim in POINTS else seconds)
            self.links[eqn] = [link for link in found if link not in alone]
            self.waiting.update((v, self._waiting(v, region, fused)) for v in eqn.outvars)
        if fused:
            self._fused.update(v for v in region.roles if v in self._kernels)

    def _link(self, x: Var, region: Region) -> Link:
        """What reading a value takes, for a part of a kernel: nothing, if another kernel reads it there anyway, or if
        it is not in memory before.
        """
        if x not in region.roles:
            return Link((x,), self._moving(x))
        free = x in self._kernels or x not in region.outputs
        return Link((x,), 0.0 if free else self._moving(x), self.maker[x])

    def _waiting(self, v: Var, region: Region, fused: bool) -> float:
        """What keeping a value takes kernels: to write it, if nobody wants it in memory before, and to read it.

        Of values that are made one from the other, as the stream of a network is, only every second one is taken for
        computed by its reader (``fused``): the reader of what is made from it comes first, and would have to write it.
        """
        if v not in region.outputs:
            return 2 * self._moving(v)
        return self._moving(v) * ((v not in self._read_early) + (fused and v in self._kernels))

    def _is_written(self, v: Var) -> bool:
        """Whether a kernel that computes a value again has to write it."""
        return v in self._by_library or self._kernels.get(v, 0) != 1

    def _add_elementwise(self, eqn: Eqn) -> None:
        """The ways to the results of an epilogue without its matmul: by the epilogue of a matmul after the peak that
        reads what they are computed from, if there is a kernel, which writes them as well; else by a kernel of its own.
        """
        for call in epilogue.recomputing(eqn):
            (result,), operands = call.outvars, tuple(a for a in call.invars if isinstance(a, Var))
            able = (
                self.able(epilogue.with_result(e, call)) for e in epilogue.hosts(self._late_matmuls, call)
            )
            if any(able):
                self.elementwise[result] = Link(operands, self._moving(result), eqn, (call,))
                continue
            eqns = epilogue.equations(call)
            work = sum(map(arithmetic, eqns)) / self.machine.flops
            seconds = self.machine.launch + max(self._moving(result, *operands), work)
            self.elementwise[result] = Link(operands, seconds, eqn, eqns)

    def _seconds_of(self, eqn: Eqn) -> float | None:
        """The time of a library call; None for what is done once: effects, exchanges, calls of the user's functions."""
        once = eqn.effects or communicates(eqn) or eqn.prim.opaque or eqn.prim is optimization_barrier_p
        if once or not eqn.outvars or eqn_calls_back(eqn.prim, eqn.params):
            return None
        cost = of_eqn(eqn, "library")
        return None if cost.unbounded else _library_seconds(eqn, self.machine)


def plan_seconds(made: Schedule, machine: Machine) -> float:
    """How long an estimated schedule takes if its steps run one after another, each as fast as it can."""
    return sum(_step_seconds(s, machine) for s in made.fusion.steps)


def _step_seconds(step: Step, machine: Machine) -> float:
    if isinstance(step, Region):
        moved = sum(nbytes(v) for v in dict.fromkeys([*step.inputs, *step.outputs]))
        work = sum(map(arithmetic, step.eqns)) / machine.flops
        return machine.launch + max(moved / machine.bandwidth, work)
    return 0.0 if step.eqn.prim is optimization_barrier_p else _library_seconds(step.eqn, machine)


def _library_seconds(eqn: Eqn, machine: Machine) -> float:
    """The time of a library call. The traffic of an epilogue's results but for the first adds to it."""
    # measured: a matmul of 32768 x 3072 x 768 with GELU takes 280 us, 221 by its arithmetic (H200)
    seconds = machine.launch + of_eqn(eqn, "library").seconds(machine)
    more = eqn.outvars[1 : len(eqn.params["epilogue"].jaxpr.outvars)] if eqn.prim is dot_pointwise_p else []
    return seconds + sum(map(nbytes, more)) / machine.bandwidth
