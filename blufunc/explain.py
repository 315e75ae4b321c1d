"""``explain``: a table of how a function runs, and what it costs.

Face. In: a function and its arguments. Out: the reports of ``jit(f).lower()`` for a device: a row per launch or library
call, why neighbours are not fused, what is free, what runs on the host, and memory by use.
"""

from __future__ import annotations

import html
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from blufunc.core.arrays import backend
from blufunc.kernels.cost import Cost
from blufunc.kernels.fusion.report import Fused
from blufunc.kernels.inspect.drawing import mixed
from blufunc.kernels.inspect.program import Body, Memory, Timings, cost_table
from blufunc.kernels.inspect.roofline import machine_of
from blufunc.kernels.machine import Machine
from blufunc.kernels.tables import StepTable, count, duration, size
from blufunc.transforms.arguments import check_callable
from blufunc.transforms.staging.jit import Jitted, jit
from blufunc.transforms.staging.stages import device_or_default

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """How a function runs; ``print`` it, or ``show()`` it on a terminal.

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
        return "\n".join(str(part) for part in self._parts())

    def show(self, file: TextIO | None = None) -> None:
        """Print it for a terminal: as wide as the terminal, and coloured.

        Red steps take most of the time, yellow ones a part of it. Without a terminal, or with ``NO_COLOR`` set, this
        is ``print``.

        Args:
          file: the output; default the standard output.
        """
        out = sys.stdout if file is None else file
        if not out.isatty() or "NO_COLOR" in os.environ:
            out.write(f"{self}\n")
            return
        width = shutil.get_terminal_size().columns
        for part in self._parts():
            out.write(
                (_wrapped(part, width) if isinstance(part, str) else self._coloured(part, width)) + "\n"
            )

    def to_html(self) -> str:
        """The report as an HTML fragment: tables whose rows are coloured by share."""
        parts = []
        for part in self._parts():
            if isinstance(part, str):
                parts.append(f"<pre>{html.escape(part)}</pre>" if part else "")
            else:
                parts.append(self._html_table(part))
        return '<div class="blufunc-explanation">' + "\n".join(parts) + "</div>"

    def _repr_html_(self) -> str:
        return self.to_html()

    def _parts(self) -> Iterator[str | _Steps]:
        """Lines of text, and the tables between them."""
        yield self._head()
        timed = None if self.why_not_compiled else self.timings
        yield _steps(self.cost, self.machine, timed)
        if self.timings and timed is None:
            yield from ("", "measured, as NumPy calls:", str(self.timings))
        reasons = [*self.notes, *self.fusion.reasons(), *self._on_host()]
        yield from ["", *reasons] if reasons else []
        for body in self.bodies:
            yield from _of_body(body, self.machine)
        yield from ("", self.memory.report())

    def _coloured(self, steps: _Steps, width: int) -> str:
        head, *rows = str(steps.table.cut(width)).split("\n")
        pairs = zip(rows, steps.shares, strict=True)
        return "\n".join([f"\x1b[1m{head}\x1b[0m", *(f"{_ansi(share)}{row}\x1b[0m" for row, share in pairs)])

    def _html_table(self, steps: _Steps) -> str:
        table = steps.table
        cell = lambda tag, name, text: (
            f'<{tag} style="text-align:{"right" if name in table.right else "left"}">{html.escape(text)}</{tag}>'
        )
        head = "".join(cell("th", name, name) for name in table.head)
        rows = [
            f'<tr style="background:{mixed(share)};color:#1c2733">'
            + "".join(cell("td", n, c) for n, c in zip(table.head, row, strict=True))
            + "</tr>"
            for row, share in zip(table.rows, steps.shares, strict=True)
        ]
        return f"<table><tr>{head}</tr>{''.join(rows)}</table>"

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


@dataclass(frozen=True)
class _Steps:
    """A table of steps, with the share of each row in the time of all."""

    table: StepTable
    shares: Sequence[float]

    def __str__(self) -> str:
        return str(self.table)


def _steps(cost: Cost, machine: Machine, timings: Timings | None = None) -> _Steps | str:
    if not cost.steps:
        return "nothing is computed"
    table = cost_table(cost, machine, timings)
    seconds = [t.ms / 1e3 for t in timings.steps] if timings else [s.seconds(machine) for s in cost.steps]
    total = sum(seconds)
    return _Steps(table, [sum(seconds[i] for i in g) / total if total else 0.0 for g in table.groups])


def _wrapped(text: str, width: int) -> str:
    """Text whose long lines go on below, indented."""
    lines = text.split("\n")
    return "\n".join(
        textwrap.fill(x, max(width, 20), subsequent_indent="  ") if len(x) > width else x for x in lines
    )


def _ansi(share: float) -> str:
    """The colour of a row: red from a fifth of the time on, yellow from a twentieth."""
    return "\x1b[31m" if share >= 0.2 else "\x1b[33m" if share >= 0.05 else ""


def _of_body(body: Body, machine: Machine, outer: str = "") -> Iterator[str | _Steps]:
    """The parts of a body and its nested bodies; for a loop, per iteration."""
    sight = body.sight
    number = f"{outer}{body.step}"
    yield from ("", f"step {number} runs {body.role}:")
    yield _steps(sight.cost, machine)
    reasons = [*sight.notes, *sight.fusion.reasons()]
    yield from ["", *reasons] if reasons else []
    for inner in sight.bodies:
        yield from _of_body(inner, machine, f"{number}.")


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
