"""Cost model of a program: bytes moved and arithmetic of each step.

Kernels, alongside stages 5 to 8. In: a ``Schedule``, or a jaxpr that runs equation by equation. Out: a ``Cost``, a row
per launch and library call. Nothing is compiled or run: these are counts. With the speed of a ``Machine`` they give the
roofline (Williams, Waterman and Patterson 2009), a lower bound of a step's time: the longer of the time to move its
bytes and the time to do its arithmetic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blufunc.core.ir.avals import PINNED_HOST
from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Literal, subjaxprs
from blufunc.core.ops.barrier import optimization_barrier_p
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.offload import offload_p
from blufunc.core.programs.simplify import inline_pointwise, simplify
from blufunc.kernels.fusion.fuse import Region
from blufunc.kernels.fusion.iteration_space import reduces
from blufunc.kernels.fusion.report import equations_of
from blufunc.kernels.loopir.access_map import moves
from blufunc.kernels.loopir.index import Range
from blufunc.kernels.loopir.ir import (
    Accumulate,
    Buffer,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Scan,
    Store,
    Value,
    post_order,
    values_of,
)
from blufunc.kernels.machine import Machine
from blufunc.kernels.ops.pointwise_gemm import dot_pointwise_p
from blufunc.kernels.schedule import GroupStep, KernelStep, Schedule, Step
from blufunc.kernels.tables import count, lines_of, run_lengths, size, table
from blufunc.kernels.target import Target

COPIES = ("copy out", "copy in")
"""Kinds of steps that copy between memories."""


@dataclass(frozen=True)
class StepCost:
    """Cost of one launch, library call, or operation of the reference.

    Attributes:
      name: of the kernel, or of the primitive.
      kind: ``kernel`` (generated), ``library``, ``control`` (a loop, branch or call that runs programs), ``reference``
        (the NumPy definition), ``host`` (the same, although the program runs on another device), ``copy out`` or
        ``copy in`` (to the memory of the host and from it, on a stream of its own) or ``free``.
      ops: the primitives that it computes, in order.
      lines: the user's lines that they came from.
      shape: the points of a kernel, as rows x lanes where it has rows; the type of the result of anything else.
      reads, writes: bytes, each element of memory counted once.
      flops: arithmetic in float additions (a division is 4, an exponential 8), ``products`` included.
      products: multiplications and additions of matmuls and convolutions.
      unbounded: whether it contains a loop without a bound, of which one iteration is counted.
      narrow: whether the operands of its matmuls have 16 bits or less.
    """

    name: str
    kind: str
    ops: tuple[str, ...]
    lines: tuple[str, ...]
    shape: str
    reads: int
    writes: int
    flops: int
    products: int = 0
    unbounded: bool = False
    narrow: bool = False

    @property
    def bytes(self) -> int:
        """Lower bound of the bytes moved."""
        return self.reads + self.writes

    def seconds(self, machine: Machine) -> float:
        """Lower bound of the time, in seconds."""
        if self.kind == "free":
            return 0.0
        if self.kind in COPIES:
            return self.bytes / machine.host_link if machine.host_link else 0.0
        rate = machine.narrow_products if self.narrow and machine.narrow_products else machine.products
        arithmetic = self.products / rate + (self.flops - self.products) / machine.flops
        return max(self.bytes / machine.bandwidth, arithmetic)


@dataclass(frozen=True)
class Cost:
    """The steps of a program, and sums over them.

    Attributes:
      steps: in the order in which they run.
      reads, writes, bytes: bytes read from memory, written to it, and both.
      flops: arithmetic, in float additions.
      products: multiplications and additions of matmuls and convolutions.
      kernels: launches of generated kernels.
      launches: launches and calls of libraries or of the reference.
    """

    steps: tuple[StepCost, ...] = ()
    reads: int = field(init=False, repr=False, compare=False)
    writes: int = field(init=False, repr=False, compare=False)
    bytes: int = field(init=False, repr=False, compare=False)
    flops: int = field(init=False, repr=False, compare=False)
    products: int = field(init=False, repr=False, compare=False)
    kernels: int = field(init=False, repr=False, compare=False)
    launches: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sums = {k: sum(getattr(s, k) for s in self.steps) for k in ("reads", "writes", "flops", "products")}
        sums["bytes"] = sums["reads"] + sums["writes"]
        sums["kernels"] = sum(s.kind == "kernel" for s in self.steps)
        sums["launches"] = sum(s.kind != "free" for s in self.steps)
        for name, value in sums.items():
            object.__setattr__(self, name, value)

    def total(self, row: StepCost, n: int = 1) -> StepCost:
        """A row with the sums of all steps, run ``n`` times."""
        return replace(
            row,
            reads=n * self.reads,
            writes=n * self.writes,
            flops=n * self.flops,
            products=n * self.products,
        )

    def seconds(self, machine: Machine) -> float:
        """Lower bound of the time of the steps, one after another, in seconds.

        Copies of each direction overlap with the other steps.
        """
        streams = ["", *COPIES] if any(s.kind in COPIES for s in self.steps) else [""]
        lane = lambda s: s.kind if s.kind in COPIES else ""
        return max(sum(s.seconds(machine) for s in self.steps if lane(s) == name) for name in streams)

    def __str__(self) -> str:
        rows = [
            (str(n), s.kind, run_lengths(s.ops), s.shape, size(s.reads), size(s.writes), count(s.flops))
            for n, s in enumerate(self.steps)
        ]
        head = ("step", "kind", "computes", "points", "reads", "writes", "flops")
        total = f"{self.launches} launches, {size(self.bytes)} moved, {count(self.flops)} operations"
        return f"{table(head, rows, head[3:])}\n{total}" if rows else "nothing is computed"


def cost_of(
    made: Schedule,
    on_host: Callable[[Eqn], bool] | None = None,
    inner: Callable[[Eqn], Sequence[Cost] | None] = lambda eqn: None,
) -> Cost:
    """The cost of a planned program.

    Args:
      made: the schedule.
      on_host: whether an equation runs on the host; None if the program's device is the host.
      inner: from a loop, branch or call to the costs of its bodies as the device runs them; None: they are fused for
        a neutral target, without kernels for composite operations such as attention.
    """
    return Cost(tuple(_of_step(s, made, on_host, inner) for s in made.steps))


def cost_of_equations(jaxpr: Jaxpr) -> Cost:
    """The cost of a program that runs equation by equation, as NumPy calls."""
    return Cost(tuple(of_eqn(e, "reference") for e in inline_pointwise(jaxpr).eqns))


def _of_step(
    step: Step,
    made: Schedule,
    on_host: Callable[[Eqn], bool] | None,
    inner: Callable[[Eqn], Sequence[Cost] | None],
) -> StepCost:
    if isinstance(step, KernelStep):
        return of_kernel(step.kernel, equations_of(step.region, made.fusion))
    if isinstance(step, GroupStep):
        members = tuple(_of_step(m, made, on_host, inner) for m in step.members)
        lines = tuple(dict.fromkeys(line for m in members for line in m.lines))
        return Cost(members).total(replace(members[0], lines=lines, shape=f"{len(members)} arrays"))
    eqn = step.eqn
    if eqn.prim is optimization_barrier_p:
        return replace(of_eqn(eqn, "free"), reads=0, writes=0, flops=0)
    if eqn.prim is offload_p:
        row = of_eqn(eqn, "copy out" if eqn.params["dst"] == PINNED_HOST else "copy in")
        return replace(row, writes=0)  # its bytes cross the link once
    if on_host is not None and on_host(eqn):
        return of_eqn(eqn, "host")
    return of_eqn(eqn, "library" if step.planned or on_host is not None else "reference", inner(eqn))


# -- kernels -----------------------------------------------------------------------------------------


def of_kernel(kernel: Kernel, eqns: Sequence[Eqn] = ()) -> StepCost:
    """The cost of a kernel of ``eqns``: each value once per point of its ranges."""
    moved: Counter[Buffer] = Counter()
    flops = 0
    counted: set[Value] = set()
    grid = frozenset(kernel.grid)
    bodies = [v for v in post_order(kernel.roots()) if v.op in ("loop", "branch")]  # inner loops first
    for s, ranges in (*_nested(kernel.body, grid), *_nested(kernel.finish, frozenset(kernel.over))):
        if isinstance(s, Store):
            moved[s.buffer] += _points(ranges)
        elif isinstance(s, (Reduce, Accumulate, Scan)):
            flops += _points(ranges)
        tied: set[Value] = set()  # to the grid point: computed from its totals or keeps
        for v in [v for v in post_order(values_of(s)) if v not in counted]:
            counted.add(v)
            if v.op == "read" or not tied.isdisjoint(v.args):
                tied.add(v)
            around = v.ranges()
            for b in bodies:
                around |= b.ranges() if b.attr.turn in around else frozenset()
            times = _points(around | (grid & ranges if v in tied else frozenset()))
            if v.op == "load":
                moved[v.attr[0]] += _points(v.ranges())
            elif v.op == "apply":
                flops += times * v.attr[0].cost
            elif v.op == "fold":
                flops += times * v.attr[1].extent
            elif v.op == "bits":
                flops += times * _THREEFRY
    rows = math.prod(r.extent for r in kernel.grid)
    lanes = max((s.range.extent for s in kernel.statements() if isinstance(s, Lanes)), default=0)
    inner = [s.range.extent for s in kernel.body if isinstance(s, Rows)]
    nbytes = {b: min(n, b.size) * b.dtype.itemsize for b, n in moved.items()}
    return StepCost(
        kernel.name,
        "kernel",
        ops=tuple(e.prim.name for e in eqns),
        lines=lines_of(eqns),
        shape=f"{rows * max(inner, default=1)}x{lanes}" if lanes else str(rows),
        reads=sum(n for b, n in nbytes.items() if not b.written),
        writes=sum(n for b, n in nbytes.items() if b.written),
        flops=flops,
        unbounded=any(v.op == "loop" and v.attr.most is None for v in bodies),
    )


_THREEFRY = 72  # operations on words for 64 bits: 20 rounds of three, and the key schedule


def _points(ranges: frozenset[Range]) -> int:
    return math.prod(r.extent for r in ranges)


def _nested(body: Sequence, ranges: frozenset[Range]) -> Iterator[tuple]:
    """The statements that are not loops, each with the ranges of its loops."""
    for s in body:
        if isinstance(s, (Lanes, Rows)):
            yield from _nested(s.body, ranges | {s.range})
        else:
            yield s, ranges


# -- single equations --------------------------------------------------------------------------------

planner: Any = None
"""``pipeline.schedule``, which sets itself here: bodies are fused, then counted."""

_NEUTRAL = Target(lambda rows, lanes: 1, lambda size: 1, 1 << 18, False, 2048)
"""A target that does not cut reductions, to count a body's cost."""


def of_eqn(eqn: Eqn, kind: str, bodies: Sequence[Cost] | None = None) -> StepCost:
    """The cost of an equation without a generated kernel; ``kind`` as in ``StepCost``.

    ``bodies`` are the costs of its bodies; None: those for a neutral target.
    """
    shape = ", ".join(str(v.aval) for v in eqn.outvars) or "()"
    row = StepCost(eqn.prim.name, kind, (eqn.prim.name,), lines_of([eqn]), shape, 0, 0, 0)
    whole = kind == "library" and eqn.prim.body is not None  # a call with a kernel
    if not whole and any(True for _ in subjaxprs(eqn.params)):
        return _of_control(eqn, row, bodies or [_of_body(j) for j in subjaxprs(eqn.params)])
    reads = sum(a.aval.nbytes for a in dict.fromkeys(eqn.invars) if a.__class__ is not Literal)
    writes = sum(v.aval.nbytes for v in eqn.outvars if v.__class__ is not DropVar)
    if whole:
        products = _of_body(eqn.params[eqn.prim.body]).products
        products //= 2 if eqn.params.get("is_causal") else 1  # masked pairs are skipped
    else:
        products = eqn.prim.flops(*[a.aval for a in eqn.invars], **eqn.params) if eqn.prim.flops else 0
    narrow = bool(products) and eqn.invars[0].aval.dtype.itemsize <= 2
    flops = products or arithmetic(eqn)
    return replace(row, reads=reads, writes=writes, flops=flops, products=products, narrow=narrow)


def arithmetic(eqn: Eqn) -> int:
    """Operations of an equation without matmuls; 0 for movement and unknown ones."""
    if moves(eqn) or len(eqn.outvars) != 1:
        return 0
    if reduces(eqn.prim):
        return eqn.invars[0].aval.size
    return eqn.outvars[0].aval.size * eqn.prim.cost if eqn.prim.kind == "elementwise" else 0


def _of_control(eqn: Eqn, row: StepCost, bodies: Sequence[Cost]) -> StepCost:
    """A loop, branch or call: its bodies times iterations; the dearest branch."""
    name = eqn.prim.name
    if name == "cond":
        bodies = [max(bodies, key=lambda c: c.bytes)]
    whole = Cost(tuple(s for c in bodies for s in c.steps))
    times = eqn.params["length"] if name == "scan" else eqn.params.get("max_steps") or 1
    kind = "control" if row.kind in ("library", "reference") else row.kind
    unbounded = (name == "while" and times == 1) or any(s.unbounded for s in whole.steps)
    return whole.total(replace(row, kind=kind, unbounded=unbounded), times)


def _of_body(jaxpr: Jaxpr) -> Cost:
    """The cost of a body, fused by itself."""

    def make() -> Cost:
        donated = (False,) * len(jaxpr.invars)
        return cost_of(planner(simplify(jaxpr), donated, _NEUTRAL, lambda e: e.prim is dot_general_p))

    return jaxpr.memoised("cost", make)


# -- estimated schedules -------------------------------------------------------------------------------


def plan_seconds(made: Schedule, machine: Machine) -> float:
    """Estimated time of a schedule without kernels, its steps one after another.

    Copies between memories count as far as other steps wait for them.
    """
    seconds = 0.0
    for step in made.fusion.steps:
        if isinstance(step, Region):
            seconds += _region_seconds(step, machine)
        elif step.eqn.prim is not optimization_barrier_p and step.eqn.prim is not offload_p:
            seconds += library_seconds(step.eqn, machine)
    return seconds + (made.overlap.exposed_seconds if made.overlap is not None else 0.0)


def step_seconds(step: Step, machine: Machine) -> float:
    """Estimated time of a step; of a region with several launches, its share."""
    if isinstance(step, GroupStep):
        moved = {v for m in step.members for v in (*m.region.inputs, *m.region.outputs)}
        return machine.launch + sum(v.aval.nbytes for v in moved) / machine.bandwidth
    if isinstance(step, KernelStep):
        return _region_seconds(step.region, machine)
    return 0.0 if step.eqn.prim is optimization_barrier_p else library_seconds(step.eqn, machine)


def _region_seconds(region: Region, machine: Machine) -> float:
    moved = sum(v.aval.nbytes for v in dict.fromkeys([*region.inputs, *region.outputs]))
    work = sum(map(arithmetic, region.eqns)) / machine.flops
    return machine.launch + max(moved / machine.bandwidth, work)


def library_seconds(eqn: Eqn, machine: Machine) -> float:
    """Time of a library call, with the traffic of an epilogue's additional results.

    Of a copy between memories, the time of the link.
    """
    if eqn.prim is offload_p:
        return machine.copy + eqn.outvars[0].aval.nbytes / machine.host_link
    # measured: a matmul of 32768 x 3072 x 768 with GELU takes 280 us, 221 by its arithmetic (H200)
    seconds = machine.launch + of_eqn(eqn, "library").seconds(machine)
    more = eqn.outvars[1 : len(eqn.params["epilogue"].jaxpr.outvars)] if eqn.prim is dot_pointwise_p else []
    return seconds + sum(v.aval.nbytes for v in more) / machine.bandwidth
