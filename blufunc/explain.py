"""``explain``: a table of how a function runs, and what it costs.

Face. In: a function and its arguments. Out: the reports of ``jit(f).lower()`` for a device: a row per launch or library
call, why neighbours are not fused, what is free, what runs on the host, and memory by use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blufunc.core.arrays import backend
from blufunc.kernels.cost import Cost
from blufunc.kernels.fusion.report import Fused
from blufunc.kernels.inspect.program import Body, Memory, Timings, cost_table
from blufunc.kernels.inspect.roofline import machine_of
from blufunc.kernels.machine import Machine
from blufunc.kernels.tables import count, duration, size
from blufunc.transforms.arguments import check_callable
from blufunc.transforms.staging.jit import Jitted, jit
from blufunc.transforms.staging.stages import device_or_default

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """How a function runs; ``print`` it.

    Attributes:
      name: of the function.
      fusion: the fused regions, and why other equations do not fuse.
      cost: bytes and arithmetic of each step.
      memory: the planned peak, and its composition.
      machine: the measured speed of the device.
      timings: the measured times of the steps; None unless the function was run.
      why_not_compiled: why the program runs as NumPy calls; empty if it is compiled.
      bodies: the programs of its loops and branches.
      notes: composite operations that run without their kernels here, and why.
    """

    name: str
    fusion: Fused
    cost: Cost
    memory: Memory
    machine: Machine
    timings: Timings | None
    why_not_compiled: str
    bodies: Sequence[Body] = ()
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        parts = [self._head()]
        timed = None if self.why_not_compiled else self.timings
        parts.append(cost_table(self.cost, self.machine, timed) if self.cost.steps else "nothing is computed")
        if self.timings and timed is None:
            parts += ["", "measured, as NumPy calls:", str(self.timings)]
        reasons = [*self.notes, *self.fusion.reasons(), *self._on_host()]
        if reasons:
            parts += ["", *reasons]
        for body in self.bodies:
            parts += _of_body(body, self.machine)
        return "\n".join([*parts, "", self.memory.report()])

    def _head(self) -> str:
        c = self.cost
        text = (
            f"{self.name}: {_many(c.kernels, 'kernel')}, {_many(c.launches - c.kernels, 'other call')}, "
            f"{size(c.bytes)} moved, "
            f"{count(c.flops)} operations; at least {duration(c.seconds(self.machine))} on {self.machine}"
        )
        if self.timings:
            text += f"; measured {duration(self.timings.ms / 1e3)}"
        if self.why_not_compiled:
            text += f"\nThis is how it would be compiled. It runs as NumPy calls: {self.why_not_compiled}."
        return text

    def _on_host(self) -> list[str]:
        steps = [f"{n} ({s.name})" for n, s in enumerate(self.cost.steps) if s.kind == "host"]
        return (
            [f"computed on the host, with copies there and back: steps {', '.join(steps)}"] if steps else []
        )


def _of_body(body: Body, machine: Machine, outer: str = "") -> list[str]:
    """The tables of a body and its nested bodies; for a loop, per iteration."""
    sight = body.sight
    number = f"{outer}{body.step}"
    lines = ["", f"step {number} runs {body.role}:"]
    lines.append(cost_table(sight.cost, machine) if sight.cost.steps else "nothing is computed")
    reasons = [*sight.notes, *sight.fusion.reasons()]
    lines += ["", *reasons] if reasons else []
    for inner in sight.bodies:
        lines += _of_body(inner, machine, f"{number}.")
    return lines


def _many(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def explain(
    fun: Callable, *args: Any, run: bool = False, device: backend.Device | str | None = None, **kwargs: Any
) -> Explanation:
    """Report how ``fun`` runs under ``jit``: kernels, fusion, and cost of each step.

    Args:
      fun: a function, under ``jit`` or not.
      args, kwargs: its arguments: arrays, or ``ShapeDtypeStruct`` where nothing is run.
      run: run the program step by step on the arguments, which stay intact, and time it; default False.
      device: the device, or an architecture that need not be present: ``"cuda:sm_90"``; default the arguments'
        device, or the default one.
    Returns:
      an ``Explanation``, which prints as a table: for each launch or library call its computation, its points, the
      bytes that it must move, its arithmetic, the lower bound of the time for these (the roofline), and its source
      lines. With ``run``, the measured time and the share of the roofline too.
    Raises:
      ArgumentError: ``fun`` is not a function, ``device`` not a device, or an argument to run with has no values.
    """
    check_callable(fun, "explain")
    function = fun if isinstance(fun, Jitted) else jit(fun)
    lowered = function.lower(*args, **kwargs)
    device = device_or_default(device or lowered.traced.device, "explain")
    sight = lowered.sight(device)
    timings = lowered.compile(device).timings(*args, **kwargs) if run else None
    return Explanation(
        function.name,
        sight.fusion,
        sight.cost,
        sight.memory,
        machine_of(device.own),
        timings,
        sight.why_not_compiled,
        sight.bodies,
        sight.notes,
    )
