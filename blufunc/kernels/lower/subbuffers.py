"""Parts of arrays that kernels read become buffers of their own: a loss in 16 chunks of tokens has one kernel for all.

Kernels, stage 6, behind ``region.py``. In: a launch whose kernel reads less than all of an array. Out: one whose buffer
is that part, a **window** of the array; where it begins is not the kernel's, but the launch's. So kernels that differ
in the offsets of slices alone have one text, and are compiled once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

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
from blufunc.kernels.loopir.launch import Launch

ALIGNMENT = 32
"""Alignment of a buffer's memory, in bytes: kernels with vector loads rely on it (``backends/cuda/render``)."""


class _Window(NamedTuple):
    buffer: Buffer
    start: int  # in elements of the array


def with_windows(launch: Launch) -> Launch:
    """The launch, each array of which it reads a part given as that part."""
    kernel = launch.kernel
    windows = _windows(kernel)
    if not windows:
        return launch
    moved = _Moved(windows)
    body, finish = (tuple(map(moved.statement, part)) for part in (kernel.body, kernel.finish))
    given = {windows[b].buffer if b in windows else b: x for b, x in launch.operands.items()}
    made = replace(kernel, buffers=tuple(given), body=body, finish=finish)
    return Launch(made, given, {w.buffer: w.start for w in windows.values()})


def _windows(kernel: Kernel) -> dict[Buffer, _Window]:
    loads: dict[Buffer, list[Value]] = {}
    for v in post_order(kernel.roots()):
        if v.op == "load" and not v.attr[0].written:
            loads.setdefault(v.attr[0], []).append(v)
    alone = _one_at_a_time(kernel)
    found: dict[Buffer, _Window] = {}
    for b, many in loads.items():
        bounds = [v.attr[1].bounds() for v in many]
        start, end = min(low for low, _ in bounds), min(b.size, max(high for _, high in bounds) + 1)
        if not alone.issuperset(many):
            start -= start % (ALIGNMENT // b.dtype.itemsize)
        if 0 <= start < end and end - start < b.size:
            found[b] = _Window(replace(b, size=end - start), start)
    return found


def _one_at_a_time(kernel: Kernel) -> set[Value]:
    """The loads that are never part of a vector, whatever their alignment: those of points and rows, where a kernel has
    loops over lanes, for these are what is cut in vectors.
    """
    if not any(isinstance(s, (Lanes, Rows)) for s in kernel.body):
        return set()
    points = {*kernel.grid, *(s.range for s in kernel.body if isinstance(s, Rows))}
    in_finish = post_order(replace(kernel, body=()).roots())
    loads = {v for v in post_order(kernel.roots()) if v.op == "load" and v.ranges() <= points}
    return loads.difference(in_finish)


class _Moved(Substitution):
    """Puts windows in the place of arrays."""

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
        made = super()._rebuilt(v)
        if v.op == "load" and v.attr[0] in self.windows:
            window, start = self.windows[v.attr[0]]
            made.attr = window, made.attr[1] - start
        return made
