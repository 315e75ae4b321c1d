"""Schedules: the steps of a planned program, from planning to backends.

Kernels, between stages 7 and 8. In: launches of fused kernels and opaque equations, in the order in which they run,
with the place in memory of all their values. ``pipeline.py`` makes schedules. Out: backends compile and run them.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var
from blufunc.core.primitives.kinds import Reduction
from blufunc.core.primitives.primitive import Primitive
from blufunc.errors import HostPrimitiveWarning
from blufunc.kernels.fusion.fuse import Fusion, Region
from blufunc.kernels.loopir.ir import Kernel
from blufunc.kernels.loopir.launch import Launch, Scratch
from blufunc.kernels.memory.overlap import Overlap
from blufunc.kernels.memory.types import Placement, Plan


@dataclass(eq=False)
class KernelStep:
    """One launch; ``values`` are the ids of the values in its buffers."""

    launch: Launch
    values: tuple[int, ...]
    region: Region

    @property
    def kernel(self) -> Kernel:
        """The kernel that is launched."""
        return self.launch.kernel

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each buffer in its value, in bytes."""
        starts = self.launch.starts
        return tuple([starts.get(b, 0) * b.dtype.itemsize for b in self.kernel.buffers])


@dataclass(eq=False)
class GroupStep:
    """One launch of many kernels of one structure on different arrays."""

    members: tuple[KernelStep, ...]

    @property
    def values(self) -> tuple[int, ...]:
        """The ids of the values in all buffers."""
        return tuple(i for m in self.members for i in m.values)

    @property
    def kernel(self) -> Kernel:
        """A representative kernel."""
        return self.members[0].kernel

    @property
    def region(self) -> Region:
        """The region of the last member."""
        return self.members[-1].region


@dataclass(eq=False)
class OpaqueStep:
    """One equation that a library or the reference runs.

    Attributes:
      eqn: the equation.
      operands: for each operand a literal, or the id of a value and the movement equations that make a view of it.
      results: the ids of its results, None for unused ones.
      planned: whether the results are in planned memory; otherwise the executor allocates them.
      scratch: the id of its scratch memory; default None.
      overlapped: the equation of a collective that starts with it, not earlier; default None.
    """

    eqn: Eqn
    operands: list[Literal | tuple[int, list[Eqn]]]
    results: list[int | None]
    planned: bool
    scratch: int | None = None
    overlapped: Eqn | None = None


Step = KernelStep | GroupStep | OpaqueStep


def touched(step: Step) -> list[int]:
    """The values that a step reads or writes."""
    return [value for value, _ in accesses(step)]


def accesses(step: Step) -> list[tuple[int, bool]]:
    """The values that a step reads or writes, and whether it may write them."""
    if isinstance(step, OpaqueStep):
        read = [(o[0], False) for o in step.operands if isinstance(o, tuple)]
        return [*read, *((r, True) for r in (*step.results, step.scratch) if r is not None)]
    members = step.members if isinstance(step, GroupStep) else (step,)
    pairs = [zip(m.values, m.kernel.buffers, strict=True) for m in members]
    return [(value, buffer.written) for pair in pairs for value, buffer in pair]


@dataclass(eq=False)
class Schedule:
    """A planned program, ready except for compilation.

    Attributes:
      jaxpr: the program.
      fusion: its regions.
      steps: in the order in which they run.
      values: the variable, or scratch, of each id.
      ids: the ids of variables.
      plan: the place of each value.
      inputs: the ids of the parameters.
      outputs: literals, or the ids of the results.
      unplanned: the ids of values that the executor allocates.
      aliases: from ids of values that alias others to these.
      peak: a step at which most of the arena is in use.
      notes: for reports: operations that have kernels, but not here, and why.
      bought: the rematerialization for a memory budget, if any: a ``budget_report.Bought``.
      inner: the opaque equations in the bodies of its loops and branches.
      overlap: the copies between memories and their price; None without any.
    """

    jaxpr: Jaxpr
    fusion: Fusion
    steps: list[Step]
    values: list[Var | Scratch]
    ids: dict[Var, int]
    plan: Plan
    inputs: list[int]
    outputs: list[Literal | int]
    unplanned: set[int] = field(default_factory=set)
    aliases: dict[int, int] = field(default_factory=dict)
    peak: Step | None = None
    notes: tuple[str, ...] = ()
    bought: Any = None
    inner: tuple[Eqn, ...] = ()
    overlap: Overlap | None = None

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels in the order in which they are launched; a group counts as one."""
        return [s.kernel for s in self.steps if not isinstance(s, OpaqueStep)]

    @property
    def host_primitives(self) -> list[Eqn]:
        """The first use of each primitive that runs on the host for lack of a lowering."""
        return list({e.prim: e for e in reversed(self.opaque) if _lacks_lower(e)}.values())[::-1]

    @property
    def opaque(self) -> list[Eqn]:
        """The opaque equations, also those in bodies."""
        return [*(s.eqn for s in self.steps if isinstance(s, OpaqueStep)), *self.inner]

    def root(self, value: int) -> int:
        """The value itself, or the one that it is an alias of."""
        while value in self.aliases:
            value = self.aliases[value]
        return value

    def place(self, value: int) -> Placement | None:
        """The memory of a value; None if the executor allocates it."""
        return self.plan.placement.get(value)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector, which finds nothing to free during planning."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _lacks_lower(eqn: Eqn) -> bool:
    prim = eqn.prim
    takes_lower = prim.kind in ("elementwise", "custom") or type(prim) is Reduction
    return takes_lower and prim.lower is None and not prim.monoid and prim.reference is None


def host_notes(eqns: Sequence[Eqn]) -> tuple[str, ...]:
    """Notes for users of primitives that run on the host."""
    return tuple(
        f"{e.prim.name} runs on the host, by NumPy, unfused: it has an impl and nothing else. Give {_option(e.prim)} "
        f"(docs/extending.md). First used at {source.summary(e.source)}"
        for e in eqns
    )


def _option(prim: Primitive) -> str:
    """The argument that lets kernels compute a primitive."""
    if isinstance(prim, Reduction):
        return "monoid=, such as 'sum', or write a Primitive with a definition (lower)"
    return "lower=, its definition in blufunc operations"


_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def warn_of_host(schedule: Schedule) -> None:
    """Warn once per primitive, at the user's line, that it runs on the host."""
    for eqn in schedule.host_primitives:
        if eqn.prim in _warned:
            continue
        _warned.add(eqn.prim)
        line = eqn.source
        where = (line[0].co_filename, source.line_of(line)) if line is not None else ("<unknown>", 1)
        warnings.warn_explicit(host_notes([eqn])[0], HostPrimitiveWarning, *where)
