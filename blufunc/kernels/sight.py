"""One look at a program: its fusion, memory, cost and times, on whatever device it runs.

Kernels, beside stages 5 to 8. ``jit(f).lower()``, ``.compile()`` and ``explain`` show what is gathered here. A backend
with a ``draft`` method says what it would make of a jaxpr without compiling it; of another the program is made. Both
have ``schedule`` and ``source()``; a program has ``timings(buffers, repeats)`` too: the name and ``ms`` of each step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from blufunc.core.backend import Device
from blufunc.core.jaxpr import Eqn, Jaxpr
from blufunc.kernels import cuda_library
from blufunc.kernels.cost import Cost, StepCost, cost_of, cost_of_equations
from blufunc.kernels.machine import Machine
from blufunc.kernels.plan import Plan
from blufunc.kernels.report import Fused, count, duration, run_lengths, size, table
from blufunc.kernels.steps import Schedule


class Memory:
    """Where the bytes of a program are: ``lower().memory``.

    Attributes:
      plan: the plan, with the place of every value.
      why_not_compiled: why the program runs as NumPy calls, for which nothing is planned; empty otherwise.
      peak_bytes: arguments, results and arena together.
      argument_bytes: what the caller holds in arguments, donated or not.
      output_bytes: results that take over no donated argument.
      arena_bytes: the one block for everything else.
    """

    def __init__(self, plan: Plan, why_not_compiled: str = ""):
        self.plan, self.why_not_compiled = plan, why_not_compiled
        self.peak_bytes: int = plan.peak_bytes
        self.argument_bytes: int = plan.argument_bytes
        self.output_bytes: int = plan.output_bytes
        self.arena_bytes: int = plan.arena_bytes

    def report(self, n: int = 10) -> str:
        """The sums, and the ``n`` largest values alive at the peak with the lines that they come from."""
        return self.plan.report(n)

    def __str__(self) -> str:
        return "\n".join([*_as_numpy(self.why_not_compiled), self.report()])


def _as_numpy(why: str) -> list[str]:
    return [f"runs as NumPy calls, which allocate as they go: {why}. Compiled it would be:"] if why else []


class Sight:
    """What can be said of a program for a device before it is run.

    Args:
      jaxpr: simplified.
      donated: the parameters whose memory results may take.
      device: where it will run.
      program: the executable, where there is one already.
    """

    def __init__(self, jaxpr: Jaxpr, donated: Sequence[bool], device: Device, program: Any = None):
        self.jaxpr, self.donated, self.device, self._program = jaxpr, donated, device, program

    @functools.cached_property
    def draft(self) -> Any:
        """What has ``schedule`` and ``source()``."""
        make = getattr(self.device.backend, "draft", None)
        if make is not None:
            return make(self.jaxpr, self.donated)
        return self._program or self.device.backend.compile(self.jaxpr, self.donated)

    @property
    def schedule(self) -> Schedule:
        """The steps and their memory."""
        return self.draft.schedule

    @property
    def why_not_compiled(self) -> str:
        """Why it runs as NumPy calls; empty if it does not."""
        return getattr(self.draft, "why_not_compiled", "")

    @functools.cached_property
    def fusion(self) -> Fused:
        """What runs together, and why not."""
        return Fused(self.schedule.fusion)

    @functools.cached_property
    def memory(self) -> Memory:
        """Where the bytes are."""
        return Memory(self.schedule.plan, self.why_not_compiled)

    @functools.cached_property
    def cost(self) -> Cost:
        """The bytes and the arithmetic of each step."""
        return cost_of(self.schedule, None if self.device.platform == "cpu" else on_host)

    def timings(self, program: Any, buffers: Sequence[Any], machine: Machine, repeats: int) -> Timings:
        """The measured times of an executable's steps, beside what they cost."""
        times = program.timings(buffers, repeats)
        compiled = hasattr(program, "schedule")
        cost = self.cost if compiled else cost_of_equations(self.jaxpr)
        rows = [_row(c, t.name, t.ms, machine) for c, t in zip(cost.steps, times, strict=True)]
        return Timings(rows, machine, "" if compiled else self.why_not_compiled)


def on_host(eqn: Eqn) -> bool:
    """Whether a program on a CUDA device has the host compute an equation, because nothing there does."""
    prim = eqn.prim
    if hasattr(prim, "cuda_source") or prim.kind == "contract" or prim.name in _CONTROL:
        return False
    if prim.reference is not None:
        return prim.kind != "call"
    types = [a.aval.dtype for a in eqn.invars]
    return not types or cuda_library.is_host_fallback(prim, types, eqn.params)


_CONTROL = ("scan", "while", "cond")


class TimedStep(NamedTuple):
    """A step and its time.

    Attributes:
      name: the kernel, or the primitive.
      lines: the user's lines.
      ms: milliseconds.
      bytes: what it must move.
      flops: its arithmetic.
      share: of the roofline: the least time that the machine allows, as a part of the time taken.
    """

    name: str
    lines: tuple[str, ...]
    ms: float
    bytes: int
    flops: int
    share: float

    @property
    def gbps(self) -> float:
        """Gigabytes a second."""
        return self.bytes / self.ms / 1e6 if self.ms else 0.0


def _row(c: StepCost, name: str, ms: float, machine: Machine) -> TimedStep:
    return TimedStep(name, c.lines, ms, c.bytes, c.flops, 1e3 * c.seconds(machine) / ms if ms else 0.0)


class Timings:
    """The times of a program's steps: ``compile().timings(...)``; a sequence of ``TimedStep``.

    Attributes:
      steps: in the order in which they run.
      machine: what shares of the roofline are relative to.
      ms: the sum over the steps, in milliseconds.
    """

    def __init__(self, steps: Sequence[TimedStep], machine: Machine, why_not_compiled: str = ""):
        self.steps, self.machine, self.why_not_compiled = tuple(steps), machine, why_not_compiled
        self.ms = sum(s.ms for s in steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, i: int) -> TimedStep:
        return self.steps[i]

    def __str__(self) -> str:
        rows = [
            (
                str(n), s.name, f"{s.ms:.4g}", f"{s.ms / self.ms:.0%}" if self.ms else "", size(s.bytes),
                f"{s.gbps:.4g}", f"{s.share:.0%}", "; ".join(s.lines),
            )
            for n, s in enumerate(self.steps)
        ]  # fmt: skip
        head = ("step", "name", "ms", "of all", "bytes", "GB/s", "roofline", "lines")
        parts = [table(head, rows, ("step", "ms", "of all", "bytes", "GB/s", "roofline"))]
        parts.append(f"{self.ms:.4g} ms in {len(self.steps)} steps; roofline of {self.machine}")
        if self.why_not_compiled:
            parts.append(f"run as NumPy calls: {self.why_not_compiled}")
        return "\n".join(parts)


def cost_table(cost: Cost, machine: Machine, timings: Timings | None = None) -> str:
    """A row for each step; with ``timings`` of the same steps, measured times and shares of the roofline."""
    head = ["step", "kernel", "computes", "points", "bytes", "flops", "at least"]
    head += ["measured", "roofline", "lines"] if timings else ["lines"]
    rows = []
    for n, c in enumerate(cost.steps):
        name = c.name if c.kind == "kernel" else f"({c.kind})"
        least = duration(c.seconds(machine)) + (" a round" if c.unbounded else "")
        row = [str(n), name, run_lengths(c.ops), c.shape, size(c.bytes), count(c.flops), least]
        if timings:
            row += [duration(timings[n].ms / 1e3), f"{timings[n].share:.0%}"]
        rows.append([*row, "; ".join(c.lines)])
    return table(head, rows, ("step", "points", "bytes", "flops", "at least", "measured", "roofline"))
