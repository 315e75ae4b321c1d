"""Lowering: each fused region to LoopIR kernels, identical regions once.

Kernels, stage 6. In: the regions of a ``Fusion``, one at a time, and a ``Target``. Out: ``Launch``es: one kernel, and a
second one if a reduction over rows was cut in chunks with partial results too large for the finish.

The iteration space of the region selects ``pointwise.py`` or ``rows.py``. ``values.py`` computes a variable at an
index, with the rules of ``indexed_reads.py`` for operations that read other elements.
A part of an array that a kernel reads becomes a buffer of its own, a **window** whose start belongs to the launch:
kernels that differ only in the offsets of slices are compiled once. Regions with equal **canonical keys** share
kernels: a key holds all that lowering reads of a region, with variables numbered in order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from blufunc.config import config
from blufunc.core.ir.jaxpr import Eqn, Literal, Var, exact
from blufunc.kernels.fusion.fuse import Fusion, Region
from blufunc.kernels.loopir.index import Index
from blufunc.kernels.loopir.ir import (
    Buffer,
    Kernel,
    Lanes,
    Rows,
    Substitution,
    Value,
    computed_in,
    dependencies,
    post_order,
)
from blufunc.kernels.loopir.launch import Launch, Scratch
from blufunc.kernels.loopir.verify import check_kernel
from blufunc.kernels.lower.pointwise import in_total, pointwise
from blufunc.kernels.lower.rows import in_rows
from blufunc.kernels.lower.values import Lowering, stem_of
from blufunc.kernels.target import Target

# -- windows ----------------------------------------------------------------------------------------


ALIGNMENT = 32
"""Alignment of buffers, in bytes: vector loads (``backends/cuda/render``) rely on
it.
"""


class _Window(NamedTuple):
    buffer: Buffer
    start: int  # in elements of the array


def with_windows(launch: Launch) -> Launch:
    """The launch with a window in place of each array that it reads a part of."""
    kernel = launch.kernel
    windows = _windows(kernel)
    if not windows:
        return launch
    moved = _Moved(windows)
    body, finish = (tuple(map(moved.statement, part)) for part in (kernel.body, kernel.finish))
    operands = {windows[b].buffer if b in windows else b: x for b, x in launch.operands.items()}
    kernel = replace(kernel, buffers=tuple(operands), body=body, finish=finish)
    return Launch(kernel, operands, {w.buffer: w.start for w in windows.values()})


def _windows(kernel: Kernel) -> dict[Buffer, _Window]:
    loads: dict[Buffer, list[Value]] = {}
    for v in post_order(kernel.roots()):
        if v.op == "load" and not v.attr[0].written:
            loads.setdefault(v.attr[0], []).append(v)
    scalar_loads = _scalar_loads(kernel)
    found: dict[Buffer, _Window] = {}
    for b, reads in loads.items():
        bounds = [v.attr[1].bounds() for v in reads]
        start, end = min(low for low, _ in bounds), min(b.size, max(high for _, high in bounds) + 1)
        if not scalar_loads.issuperset(reads):
            start -= start % (ALIGNMENT // b.dtype.itemsize)
        if 0 <= start < end and end - start < b.size:
            found[b] = _Window(replace(b, size=end - start), start)
    return found


def _scalar_loads(kernel: Kernel) -> set[Value]:
    """The loads that are never vectorized, whatever their alignment.

    In kernels with loops over lanes, which are what is vectorized, these are the loads of points and rows.
    """
    if not any(isinstance(s, (Lanes, Rows)) for s in kernel.body):
        return set()
    points = {*kernel.grid, *(s.range for s in kernel.body if isinstance(s, Rows))}
    in_finish = post_order(replace(kernel, body=()).roots())
    loads = {v for v in post_order(kernel.roots()) if v.op == "load" and v.ranges() <= points}
    return loads.difference(in_finish)


class _Moved(Substitution):
    """Substitute windows for arrays."""

    def __init__(self, windows: dict[Buffer, _Window]):
        super().__init__({})
        self.windows = windows

    def __call__(self, value: Value) -> Value:
        for v in post_order([value]):
            if v not in self.done:
                moved = v.op == "load" and v.attr[0] in self.windows
                same = not moved and all(self.done[d] is d for d in dependencies(v))
                self.done[v] = v if same else self._rebuilt(v)
        return self.done[value]

    def index(self, index: Index) -> Index:
        return index if all(self(c) is c for c in computed_in(index)) else super().index(index)

    def _rebuilt(self, v: Value) -> Value:
        rebuilt = super()._rebuilt(v)
        if v.op == "load" and v.attr[0] in self.windows:
            window, start = self.windows[v.attr[0]]
            rebuilt.attr = window, rebuilt.attr[1] - start
        return rebuilt


# -- a region ---------------------------------------------------------------------------------------


def lower(region: Region, fusion: Fusion, target: Target) -> list[Launch]:
    """The kernels of a region."""
    return [with_windows(launch) for launch in _lowered(region, fusion, target)]


def _lowered(region: Region, fusion: Fusion, target: Target) -> list[Launch]:
    low = Lowering(region, fusion, target)
    if region.frame.total:
        return [in_total(low)]
    if region.frame.lanes:
        return in_rows(low)
    return [pointwise(low)]


# -- structurally identical regions -----------------------------------------------------------------


class Lowered:
    """Lower the regions of one fusion for one target, identical ones once."""

    def __init__(self, fusion: Fusion, target: Target):
        self.fusion, self.target = fusion, target
        self.paths = dict(zip(fusion.jaxpr.invars, fusion.jaxpr.arg_names, strict=False))
        self.heads: dict[Eqn, int] = {}
        self.numbers: dict[Any, int] = {}  # by operation, without its operands
        self.known: dict[tuple, tuple[list[Launch], dict[Var, int]]] = {}

    def launches(self, region: Region) -> list[Launch]:
        """The kernels of a region."""
        key, variables = self.canonical(region)
        found = self.known.get(key)
        if found is None:
            launches = lower(region, self.fusion, self.target)
            if config.check:
                for launch in launches:
                    check_kernel(launch.kernel)
            self.known[key] = launches, {v: n for n, v in enumerate(variables)}
            return launches
        launches, numbers = found
        scratch = {
            x: Scratch(x.dtype, x.size)
            for launch in launches
            for x in launch.operands.values()
            if isinstance(x, Scratch)
        }
        return [
            Launch(
                launch.kernel,
                {
                    b: scratch[x] if isinstance(x, Scratch) else variables[numbers[x]]
                    for b, x in launch.operands.items()
                },
                launch.starts,
            )
            for launch in launches
        ]

    def canonical(self, region: Region) -> tuple[tuple, list[Var]]:
        """The canonical key of a region, and its variables in the order of their numbers."""
        numbers: dict[Var, int] = {}
        parts: list[Any] = []
        virtual = self.fusion.virtual

        def operand(atom: Any) -> Any:
            number = numbers.get(atom)
            if number is not None:
                return number
            if atom.__class__ is Literal:
                return atom.aval, atom.value.tobytes()
            eqn = virtual.get(atom)
            if eqn is None:
                parts.append((atom.aval, stem_of(self.paths.get(atom))))
            else:
                parts.append((self.head(eqn), *map(operand, eqn.invars)))
            numbers[atom] = len(numbers)
            return numbers[atom]

        for eqn in region.eqns:
            out = eqn.outvars[0]
            parts.append((self.head(eqn), region.roles[out], *map(operand, eqn.invars)))
            numbers[out] = len(numbers)
        ends = tuple(map(operand, region.outputs)), tuple(map(operand, region.numbers))
        roles = tuple([numbers[v] for v in region.roles])
        return (region.frame, roles, ends, *parts), list(numbers)

    def head(self, eqn: Eqn) -> int:
        """A number for an operation: its primitive, parameters, result and line."""
        number = self.heads.get(eqn)
        if number is None:
            params = tuple([(k, exact(v)) for k, v in eqn.params.items()])
            line = eqn.source and (id(eqn.source[0]), *eqn.source[1:])  # code is compared by its bytes alone
            key = eqn.prim, params, eqn.outvars[0].aval, line
            number = self.heads[eqn] = self.numbers.setdefault(key, len(self.numbers))
        return number
