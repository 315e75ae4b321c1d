"""Program reports: the fusion, memory, cost and times of a program on any device.

Kernels, alongside stages 5 to 8. In: a simplified jaxpr and a device. Out: what ``jit(f).lower()``, ``.compile()`` and
``explain`` show. A backend with a ``draft`` method lowers a jaxpr without compiling it; other backends compile it. Both
results have ``schedule`` and ``source()``; a program also has ``timings(buffers, repeats)``: ``name`` and ``ms`` of
each step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from blufunc.core.arrays.backend import Device
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var, line_of
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cuda.dispatch import kernel_of
from blufunc.kernels.backends.cuda.library.control_flow import loops
from blufunc.kernels.backends.cuda.library.control_flow.bodies import nested
from blufunc.kernels.cache import plans as plan_store
from blufunc.kernels.cost import Cost, cost_of, cost_of_equations
from blufunc.kernels.fusion.report import Fused
from blufunc.kernels.machine import Machine
from blufunc.kernels.memory.overlap import Overlap
from blufunc.kernels.memory.types import Plan
from blufunc.kernels.pipeline import fused
from blufunc.kernels.recompute.budget_report import RematChoice
from blufunc.kernels.schedule import OpaqueStep, Schedule, host_notes
from blufunc.kernels.tables import StepTable, count, duration, run_lengths, size, step_table


class Memory:
    """Memory of a program: ``lower().memory``.

    Attributes:
      plan: the plan, with the place of every value.
      why_not_compiled: why the program runs as unplanned NumPy calls; empty otherwise.
      peak_bytes: arguments, results and arena together.
      argument_bytes: bytes of the caller's arguments, donated or not.
      output_bytes: results that take over no donated argument.
      arena_bytes: the one block for everything else.
      unplanned_bytes: results that loops, branches and the reference allocate; those alive at once add to the peak.
      host_bytes: bytes in page-locked memory of the host, which are no part of the peak.
      overlap: the copies between memories and their price; None if there are none.
      bought: the rematerialization for ``jit(memory_budget=)``: both peaks, the values and the cost; None if there is
        none.
    """

    def __init__(
        self,
        plan: Plan,
        why_not_compiled: str = "",
        unplanned_bytes: int = 0,
        bought: RematChoice | None = None,
        overlap: Overlap | None = None,
    ):
        self.plan, self.why_not_compiled, self.bought = plan, why_not_compiled, bought
        self.unplanned_bytes = unplanned_bytes
        self.peak_bytes, self.argument_bytes = plan.peak_bytes, plan.argument_bytes
        self.output_bytes, self.arena_bytes = plan.output_bytes, plan.arena_bytes
        self.host_bytes, self.overlap = plan.host_bytes, overlap

    def report(self, n: int = 10) -> str:
        """The sums, the ``n`` largest values at the peak, and the recomputed values."""
        head, *rest = self.plan.report(n).splitlines()
        besides = (
            f"; {size(self.unplanned_bytes)} in results of calls besides" if self.unplanned_bytes else ""
        )
        price = [] if self.overlap is None else [_copies(self.overlap)]
        price += [self.bought.report(n)] if self.bought is not None else []
        return "\n".join([head + besides, *rest, *price])

    def __str__(self) -> str:
        why = self.why_not_compiled
        head = (
            f"runs as NumPy calls, which allocate as they go: {why}. Compiled it would be:\n" if why else ""
        )
        return head + self.report()


def _copies(overlap: Overlap) -> str:
    """The copies between memories as a line."""
    o = overlap
    ways = [
        (o.copies_out, "to the host", o.bytes_out, o.seconds_out),
        (o.copies_in, "from it", o.bytes_in, o.seconds_in),
    ]
    moved = ", ".join(f"{n} {way} ({size(b)}, {duration(s)} on its stream)" for n, way, b, s in ways if n)
    waits = f"other steps take {duration(o.step_seconds)} and wait {duration(o.exposed_seconds)} for copies"
    return f"copies between memories: {moved}; {waits}, as estimated"


class Sight:
    """Report on a program for a device before it runs.

    Args:
      jaxpr: simplified.
      donated: the parameters whose memory results may take.
      device: where it will run.
      budget: limit of its planned peak, in bytes; default None: no limit.

    Attributes:
      program: the executable, once there is one.
    """

    def __init__(self, jaxpr: Jaxpr, donated: Sequence[bool], device: Device, budget: int | None = None):
        self.jaxpr, self.donated, self.device, self.budget = jaxpr, donated, device, budget
        self.program: Any = None

    @functools.cached_property
    def draft(self) -> Any:
        """An object with ``schedule`` and ``source()``."""
        make = getattr(self.device.backend, "draft", None)
        if make is not None:
            return make(self.jaxpr, self.donated, self.budget)
        if self.program is None:
            self.program = self.device.backend.compile(self.jaxpr, self.donated, self.budget)
        return self.program

    @property
    def schedule(self) -> Schedule:
        """The steps and their memory."""
        return self.draft.schedule

    @property
    def why_not_compiled(self) -> str:
        """The reason that it runs as NumPy calls; empty if it does not."""
        return getattr(self.draft, "why_not_compiled", "")

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on operations without a kernel here, and why its plan is not cached."""
        # plan first: planning may find a reason
        notes = (*self.schedule.notes, *host_notes(self.schedule.host_primitives))
        if self.device.platform != "cpu":
            notes += tuple(self._loop_notes())
        reason = "" if self.why_not_compiled else plan_store.why_not(self.jaxpr)
        return (*notes, f"planned anew in each process: {reason}") if reason else tuple(notes)

    def _loop_notes(self) -> Iterator[str]:
        """The loops and branches that the host drives on a GPU, and why."""
        for n, step in enumerate(self.schedule.steps):
            if isinstance(step, OpaqueStep) and step.eqn.prim.kind == "control":
                inside = [b.sight for b in self.bodies if b.step == n]
                reason = next(filter(None, (s.why_not_captured for s in inside)), None)
                if reason is None and step.eqn.prim.name != "scan":
                    reason = loops.why_no_node(step.eqn)
                if reason is not None:
                    yield f"the host drives the {step.eqn.prim.name} at {line_of(step.eqn)}: {reason}"

    @functools.cached_property
    def why_not_captured(self) -> str | None:
        """Reason that no CUDA graph can hold the program; None if one can."""
        opaque = [step.eqn for step in self.schedule.steps if isinstance(step, OpaqueStep)]
        own = (kernel_of(eqn).why_not_captured(eqn) for eqn in opaque)
        return next(filter(None, (*own, *(b.sight.why_not_captured for b in self.bodies))), None)

    @functools.cached_property
    def fusion(self) -> Fused:
        """The fused steps, and why others are not fused."""
        return fused(self.schedule)

    @functools.cached_property
    def memory(self) -> Memory:
        """The memory plan as a report."""
        schedule = self.schedule
        values = [schedule.values[i] for i in schedule.unplanned]
        unplanned = sum(v.aval.nbytes for v in values if isinstance(v, Var))
        return Memory(schedule.plan, self.why_not_compiled, unplanned, schedule.bought, schedule.overlap)

    @functools.cached_property
    def cost(self) -> Cost:
        """The bytes and the arithmetic of each step."""
        if self.device.platform == "cpu":
            return cost_of(self.schedule)
        return cost_of(self.schedule, lambda eqn: kernel_of(eqn).on_host, self._body_costs)

    def _body_costs(self, eqn: Eqn) -> list[Cost] | None:
        """The costs of an equation's bodies on a GPU; None if no program runs one."""
        planned = {id(b.jaxpr): b.sight for b in self.bodies}
        programs = [id(n.jaxpr) for n in nested(eqn)]
        if not all(p in planned for p in programs):
            return None
        # a round of a while has the next condition
        return [planned[p].cost for p in programs[eqn.prim.name == "while" :]]

    @functools.cached_property
    def bodies(self) -> list[Body]:
        """Nested programs, each once: the bodies of loops, branches and calls."""
        on_gpu = self.device.platform != "cpu"
        found: dict[int, Body] = {}
        for n, step in enumerate(self.schedule.steps):
            if not isinstance(step, OpaqueStep) or kernel_of(step.eqn).composite:
                continue  # without a body, or a kernel replaces it
            if on_gpu and kernel_of(step.eqn).on_host:
                continue
            roles = list(_roles(step.eqn))
            if on_gpu:
                programs = list(nested(step.eqn))
            else:
                programs = [(jaxpr, (False,) * len(jaxpr.invars)) for _, jaxpr in roles]
            for (role, _), (jaxpr, donated) in zip(roles, programs, strict=True):
                sight = Sight(simplify(jaxpr), donated, self.device)
                found.setdefault(id(jaxpr), Body(n, role, sight, jaxpr))
        return list(found.values())

    def source(self) -> str:
        """The source of the kernels, then of each body's kernels."""
        parts = [(self.program or self.draft).source()]
        for body in self.bodies:
            comment = "#" if body.sight.why_not_compiled else "//"
            parts += [f"{comment} ---- {body.title} ----", body.sight.source()]
        return "\n".join(parts)

    def timings(self, buffers: Sequence[Any], machine: Machine, repeats: int) -> Timings:
        """Measured times of the program's steps, with their costs."""
        times = self.program.timings(buffers, repeats)
        compiled = hasattr(self.program, "schedule")
        cost = self.cost if compiled else cost_of_equations(self.device.backend.chosen(self.jaxpr))
        rows = [
            TimedStep(
                t.name, c.lines, t.ms, c.bytes, c.flops, 1e3 * c.seconds(machine) / t.ms if t.ms else 0.0
            )
            for c, t in zip(cost.steps, times, strict=True)
        ]
        return Timings(rows, machine, "" if compiled else self.why_not_compiled)


class Body(NamedTuple):
    """A nested program.

    Attributes:
      step: the index of the step that runs it.
      role: its role and place: ``the body of scan at model.py:3 (f), 20 times``.
      sight: the report on it.
      jaxpr: the same program in the parameters of the equation.
    """

    step: int
    role: str
    sight: Sight
    jaxpr: Jaxpr

    @property
    def title(self) -> str:
        """A title: its step and role."""
        return f"step {self.step} runs {self.role}"


def _roles(eqn: Eqn) -> Iterator[tuple[str, Jaxpr]]:
    """The nested programs of an equation, with their roles."""
    name = eqn.prim.name
    rounds = (
        f", {eqn.params['length']} times" if name == "scan" else ", each round" if name == "while" else ""
    )
    for key, value in eqn.params.items():
        several = value if isinstance(value, tuple) else (value,)
        for i, jaxpr in enumerate(several):
            if isinstance(jaxpr, Jaxpr):
                which = "body" if key == "jaxpr" else f"{key}[{i}]" if isinstance(value, tuple) else key
                yield f"the {which} of {name} at {line_of(eqn)}{rounds}", jaxpr


class TimedStep(NamedTuple):
    """A step and its time.

    Attributes:
      name: the kernel, or the primitive.
      lines: the user's lines.
      ms: milliseconds.
      bytes: the bytes that it must move.
      flops: its arithmetic operations.
      share: of the roofline: the least possible time divided by the measured time.
    """

    name: str
    lines: tuple[str, ...]
    ms: float
    bytes: int
    flops: int
    share: float

    @property
    def gbps(self) -> float:
        """Gigabytes per second."""
        return self.bytes / self.ms / 1e6 if self.ms else 0.0


class Timings:
    """Times of a program's steps: ``compile().timings(...)``, a sequence.

    Attributes:
      steps: in the order in which they run.
      machine: the roofline that shares are relative to.
      ms: the sum over the steps, in milliseconds.
    """

    def __init__(self, steps: Sequence[TimedStep], machine: Machine, why_not_compiled: str = ""):
        self.steps, self.machine, self.why_not_compiled = tuple(steps), machine, why_not_compiled
        self.ms = sum(s.ms for s in steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, i: int) -> TimedStep:
        return self.steps[i]

    def __iter__(self) -> Iterator[TimedStep]:
        return iter(self.steps)

    def __str__(self) -> str:
        def row(group: list[int]) -> list[str]:
            s, ms = self.steps[group[0]], sum(self.steps[n].ms for n in group)
            share = sum(self.steps[n].share * self.steps[n].ms for n in group) / ms if ms else 0.0
            rate = f"{len(group) * s.bytes / ms / 1e6:.4g}" if ms else ""
            part = f"{ms / self.ms:.0%}" if self.ms else ""
            moved = size(len(group) * s.bytes)
            return [s.name, f"{ms:.4g}", part, moved, rate, f"{share:.0%}", "; ".join(s.lines)]

        figures = ("ms", "of all", "bytes", "GB/s", "roofline")
        keys = [(s.name, s.lines, s.bytes, s.flops) for s in self.steps]
        parts = [str(step_table(("name", *figures, "lines"), keys, row, figures))]
        parts.append(f"{self.ms:.4g} ms in {len(self.steps)} steps; roofline of {self.machine}")
        if self.why_not_compiled:
            parts.append(f"run as NumPy calls: {self.why_not_compiled}")
        return "\n".join(parts)


def cost_table(cost: Cost, machine: Machine, timings: Timings | None = None) -> StepTable:
    """A table of steps and costs; with ``timings``, also times and roofline shares.

    In long programs, identical steps share a row, with the sums of their bytes, operations and times.
    """
    measured = ("measured", "roofline") if timings else ()
    figures = ("bytes", "flops", "at least", *measured)

    def row(group: list[int]) -> list[str]:
        c, n = cost.steps[group[0]], len(group)
        least = n * c.seconds(machine)
        cells = [c.name if c.kind == "kernel" else f"({c.kind})", run_lengths(c.ops), c.shape]
        cells += [
            size(n * c.bytes),
            count(n * c.flops),
            duration(least) + (" a round" if c.unbounded else ""),
        ]
        if timings:
            taken = sum(timings[i].ms for i in group) / 1e3
            cells += [duration(taken), f"{least / taken:.0%}" if taken else ""]
        return [*cells, "; ".join(c.lines)]

    return step_table(
        ("kernel", "computes", "points", *figures, "lines"), cost.steps, row, ("points", *figures)
    )
