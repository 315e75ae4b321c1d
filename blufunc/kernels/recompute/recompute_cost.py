"""Recomputable values after the peak of a plan, and the time of recomputing each.

Kernels, between stages 5 and 7, below ``budget_cuts.py``, which chooses. In: a planned program. Out: its equations
before the peak, each with the values it reads in memory and the seconds to recompute it; and the dependencies. All
times are estimates for a ``Machine``: a library call takes its roofline, and so does a kernel. So GEMMs, which do
arithmetic, and elementwise operations, which move bytes, are weighed on one scale.

A recomputed equation becomes part of the kernel after the peak that reads it. So where only kernels read its result,
that is neither stored nor loaded, unlike a saved one; a library call stores it. A kernel pays for each of its
operands once; if the operand is of the same kernel before the peak, only where recomputation begins, which is what a
``Link`` says. Another kind of link goes from the activation in a GEMM's epilogue to its argument, which the GEMM
stores as well. From that, a kernel recomputes the activation alone, or the GEMM with its derivative stores it too
(``epilogue.py``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from blufunc.core.ir.jaxpr import Eqn, Var, communicates
from blufunc.core.ops.barrier import optimization_barrier_p
from blufunc.core.primitives.effects import eqn_calls_back
from blufunc.kernels.cost import arithmetic, of_eqn
from blufunc.kernels.fusion.fuse import Opaque, Region, Step
from blufunc.kernels.machine import Machine
from blufunc.kernels.ops.points import POINTS
from blufunc.kernels.recompute import epilogue
from blufunc.kernels.recompute.repeat import Divided, nbytes
from blufunc.kernels.rewrites.activation_epilogue import from_argument
from blufunc.kernels.rewrites.activation_sums import Kernel
from blufunc.kernels.schedule import OpaqueStep, Schedule

_ALL = 1 / 8
"""Weight of a byte freed throughout, relative to one freed while over budget.
Of equally expensive values, those that are not needed for longest go first.
"""


@dataclass(frozen=True, eq=False)
class Link:
    """The cost to start recomputation from a value that is not recomputed itself.

    Attributes:
      operand: the value.
      seconds: time to load it, and to run ``eqns``.
      maker: its equation, if recomputing that makes the link free; None: it is never free.
      eqns: the equations that compute another result of that equation from it; none if it is only read.
    """

    operand: Var
    seconds: float
    maker: Eqn | None = None
    eqns: tuple[Eqn, ...] = ()


class Repeatable(Divided):
    """The recomputable part of a plan before its peak.

    Args:
      made: the program as it was planned, with one step for each of its fusion.
      budget: bytes for its planned peak, which is more.
      machine: the machine of the time estimates.
      kernel: from a GEMM with an activation to its kernel, if there is one.

    Attributes:
      steps: those of the fusion, in execution order.
      at: the position of the peak's step.
      excess: bytes to be freed there.
      last_early: of each variable, the last step up to the peak that writes or reads it.
      first_late: the first step after it that reads it.
      nodes: the equations before the peak that compute values.
      reads: the variables in memory that each reads.
      seconds: time to recompute each, without its links; absent for equations that must run once.
      links: additional costs of equations of kernels, for each of their operands.
      waiting: time that kernels spend to store and load a value only because it is saved.
      activations: of a GEMM's result, the link to its argument, from which it is recomputed without the GEMM.
    """

    def __init__(self, made: Schedule, budget: int, machine: Machine, kernel: Kernel = lambda eqn: None):
        by_eqn = {id(s.eqn): s for s in made.fusion.steps if isinstance(s, Opaque)}
        self.steps = [by_eqn[id(s.eqn)] if isinstance(s, OpaqueStep) else s.region for s in made.steps]  # type: ignore[union-attr]
        fusion = replace(made.fusion, steps=self.steps)
        fusion.jaxpr = fusion.in_order()
        assert made.plan.peak_step is not None
        self.at = made.plan.order.index(made.plan.peak_step)
        position = {id(e): i for i, e in enumerate(fusion.jaxpr.eqns)}
        ran = [e for s in self.steps[: self.at + 1] for e in (s.eqns if isinstance(s, Region) else [s.eqn])]
        super().__init__(fusion, max((position[id(e)] for e in ran), default=-1))
        self.machine, self._kernel = machine, kernel
        self.excess = made.plan.peak_bytes - budget
        self._read_lives(made, budget)
        self._find_nodes()

    # -- when values are alive ---------------------------------------------------------------------------

    def _read_lives(self, made: Schedule, budget: int) -> None:
        """Find the live range of each variable, and its share of the time over budget."""
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
        """Bytes of saving a value up to a step, by its share of the time over budget."""
        if v in self.fixed:
            return 0
        begin = min(self.last_early[v] + 1, until)
        share = (self.over[until] - self.over[begin]) / self.over[-1]
        return int(nbytes(v) * (share + _ALL * (until - begin) / len(self.steps)))

    # -- recomputable equations and their times ------------------------------------------------------------------

    def _find_nodes(self) -> None:
        """Collect the equations before the peak, their operands in memory, their times."""
        self.nodes: list[Eqn] = []
        self.reads: dict[Eqn, list[Var]] = {}
        self.seconds: dict[Eqn, float] = {}
        self.links: dict[Eqn, list[Link]] = {}
        self.waiting: dict[Var, float] = {}
        self.activations: dict[Var, Link] = {}
        self._kernels: dict[Var, int] = {}  # number of kernels after the peak that read a value
        self._with_derivative = epilogue.products_with_derivative(self.jaxpr.eqns)
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
                self._add_activation(step.eqn)
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
        """Add a kernel's equations, as parts of their reader's kernel after the peak."""
        reads = {e: list(dict.fromkeys(x for a in e.invars for x in self.leaves(a))) for e in region.eqns}
        readers = Counter(x for found in reads.values() for x in found)
        links = {x: link for x in readers if (link := self._link(x, region)).seconds}
        fused = not any(x in self._fused for x in readers if x not in region.roles)
        for eqn in region.eqns:
            seconds = arithmetic(eqn) / self.machine.flops
            written = [v for v in eqn.outvars if v in region.outputs and self._is_written(v)]
            seconds += self._moving(*written) + self.machine.launch * len(written)
            found = [links[x] for x in reads[eqn] if x in links]
            alone = [link for link in found if link.maker is None and readers[link.operand] == 1]
            seconds += sum(link.seconds for link in alone)
            self._add(eqn, reads[eqn], None if eqn.prim in POINTS else seconds)
            self.links[eqn] = [link for link in found if link not in alone]
            self.waiting.update((v, self._waiting(v, region, fused)) for v in eqn.outvars)
        if fused:
            self._fused.update(v for v in region.roles if v in self._kernels)

    def _link(self, x: Var, region: Region) -> Link:
        """The cost of reading a value: 0 if it is read there anyway, or not in memory."""
        if x not in region.roles:
            return Link(x, self._moving(x))
        free = x in self._kernels or x not in region.outputs
        return Link(x, 0.0 if free else self._moving(x), self.maker[x])

    def _waiting(self, v: Var, region: Region, fused: bool) -> float:
        """Time for kernels to store a saved value, unless stored anyway, and to load it.

        In a chain of such values, as a residual stream, only every second one counts as recomputed by its reader
        (``fused``): the reader of the next one comes first, and would have to store it.
        """
        if v not in region.outputs:
            return 2 * self._moving(v)
        return self._moving(v) * ((v not in self._read_early) + (fused and v in self._kernels))

    def _is_written(self, v: Var) -> bool:
        """True if a kernel that recomputes a value has to store it."""
        return v in self._by_library or self._kernels.get(v, 0) != 1

    def _add_activation(self, eqn: Eqn) -> None:
        """Add the link from the argument of a GEMM's activation to the activation.

        The GEMM after the peak that multiplies by its derivative stores it too, if a kernel can; else a kernel of its
        own does.
        """
        if not (eqns := from_argument(eqn)):
            return
        result, argument = eqn.outvars
        call = epilogue.of_argument(eqn)
        product = self._with_derivative.get(argument)
        if product is not None and self.made[product.outvars[0]] > self.peak:
            if self._kernel(epilogue.with_result(product, call)) is not None:
                self.activations[result] = Link(argument, self._moving(result), eqn, (call,))
                return
        work = sum(map(arithmetic, eqns)) / self.machine.flops
        seconds = self.machine.launch + max(self._moving(result, argument), work)
        self.activations[result] = Link(argument, seconds, eqn, eqns)

    def _seconds_of(self, eqn: Eqn) -> float | None:
        """Time of a library call; None for effects, collectives, user functions: run once."""
        once = eqn.effects or communicates(eqn) or eqn.prim.opaque or eqn.prim is optimization_barrier_p
        if once or not eqn.outvars or eqn_calls_back(eqn.prim, eqn.params):
            return None
        cost = of_eqn(eqn, "library")
        return None if cost.unbounded else _library_seconds(eqn, self.machine)


def plan_seconds(made: Schedule, machine: Machine) -> float:
    """Time of an estimated schedule whose steps run in sequence, each at its roofline."""
    return sum(_step_seconds(s, machine) for s in made.fusion.steps)


def _step_seconds(step: Step, machine: Machine) -> float:
    if isinstance(step, Region):
        moved = sum(nbytes(v) for v in dict.fromkeys([*step.inputs, *step.outputs]))
        work = sum(map(arithmetic, step.eqns)) / machine.flops
        return machine.launch + max(moved / machine.bandwidth, work)
    return 0.0 if step.eqn.prim is optimization_barrier_p else _library_seconds(step.eqn, machine)


def _library_seconds(eqn: Eqn, machine: Machine) -> float:
    """The time of a library call; a GEMM does not hide its activation."""
    seconds = machine.launch + of_eqn(eqn, "library").seconds(machine)
    activation = eqn.outvars[0] if from_argument(eqn) else epilogue.result_of(eqn)
    return seconds + (0.0 if activation is None else nbytes(activation) / machine.bandwidth)
