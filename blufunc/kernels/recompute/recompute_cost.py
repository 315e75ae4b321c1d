"""Time to recompute each value before the peak of a plan, and time of a plan.

Kernels, between stages 5 and 7, below ``budget_cuts.py``, which chooses. In: a planned program. Out: its equations
before the peak, with the variables in memory that each reads and the seconds to compute it once more. All times are
estimates for a ``Machine``, the roofline of each library call and kernel, so matmuls and elementwise kernels compare.

A recomputed equation is fused into the kernel after the peak that reads it. If only one kernel reads the result, it is
then neither written nor read; a library call needs it written. Reading the operands costs their traffic once per
kernel. Operands from the same kernel before the peak cost it only where recomputation begins: that is a ``Link``.
Another kind of link leads from a result of a matmul's epilogue to the values that it is computed from elementwise. If
these are saved, a kernel recomputes the result without the matmul, or the epilogue of another matmul that reads them
anyway does (``epilogue.py``).
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
from blufunc.kernels.recompute.repeat import AroundPeak
from blufunc.kernels.schedule import OpaqueStep, Schedule

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


class Repeatable(AroundPeak):
    """The equations before the peak of a plan, with the time to recompute them.

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
        """The link to an operand, free if a late kernel reads it anyway or if only this region computes it."""
        if x not in region.roles:
            return Link((x,), self._moving(x))
        free = x in self._late_kernels or x not in region.outputs
        return Link((x,), 0.0 if free else self._moving(x), self.maker[x])

    def _waiting(self, v: Var, region: Region, fused: bool) -> float:
        """Time of kernels to write a saved value, if no early step reads it, and to read it.

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
        """Time of a library call; None for effects, collectives and callbacks, which run once."""
        once = eqn.effects or communicates(eqn) or eqn.prim.opaque or eqn.prim is optimization_barrier_p
        if once or not eqn.outvars or eqn_calls_back(eqn.prim, eqn.params):
            return None
        return None if of_eqn(eqn, "library").unbounded else _library_seconds(eqn, self.machine)


def plan_seconds(made: Schedule, machine: Machine) -> float:
    """Estimated time of a schedule whose steps run one after another."""
    return sum(_step_seconds(s, machine) for s in made.fusion.steps)


def _step_seconds(step: Step, machine: Machine) -> float:
    if isinstance(step, Region):
        moved = sum(v.aval.nbytes for v in dict.fromkeys([*step.inputs, *step.outputs]))
        work = sum(map(arithmetic, step.eqns)) / machine.flops
        return machine.launch + max(moved / machine.bandwidth, work)
    return 0.0 if step.eqn.prim is optimization_barrier_p else _library_seconds(step.eqn, machine)


def _library_seconds(eqn: Eqn, machine: Machine) -> float:
    """Time of a library call, with the traffic of all but the first result of an epilogue."""
    # measured: a matmul of 32768 x 3072 x 768 with GELU takes 280 us, 221 by its arithmetic (H200)
    seconds = machine.launch + of_eqn(eqn, "library").seconds(machine)
    more = eqn.outvars[1 : len(eqn.params["epilogue"].jaxpr.outvars)] if eqn.prim is dot_pointwise_p else []
    return seconds + sum(v.aval.nbytes for v in more) / machine.bandwidth
