"""Frames: the points that a fused region works on, and what its values are in them.

Kernels, stage 5, below ``fuse.py``. In: an equation, and the frame of a region that it might join. Out: the role of its
result there (an element, a row, a column or a total; ``fuse.py`` says what these are), the frame with it, and the place
of a role's values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from blufunc.core.jaxpr import Eqn
from blufunc.core.ops.reduce import (
    argmax_p,
    argmin_p,
    reduce_and_p,
    reduce_max_p,
    reduce_min_p,
    reduce_or_p,
    reduce_prod_p,
    reduce_xor_p,
)
from blufunc.core.structure import reduce_sum_p
from blufunc.kernels.access import Place, source_of
from blufunc.kernels.indices import Index, Range, flat, of, unflat

REDUCES = {
    reduce_sum_p: "sum",
    reduce_prod_p: "prod",
    reduce_max_p: "max",
    reduce_min_p: "min",
    reduce_and_p: "and",
    reduce_or_p: "or",
    reduce_xor_p: "xor",
    argmax_p: "argmax",
    argmin_p: "argmin",
}
"""Reductions, and what LoopIR calls them."""

ONE_ROW = 1 << 16
"""Up to as many elements, a reduction of everything is that of one row, whose lanes can meet."""


@dataclass(frozen=True)
class Frame:
    """The points that a region works on: ``size`` of them; with reductions, ``outer * rows`` rows of ``lanes``.

    ``outer`` is None while nothing says how rows divide: only reductions over rows do.
    """

    size: int
    lanes: int | None = None
    outer: int | None = None
    total: bool = False

    @property
    def rows(self) -> int:
        """All rows, the outer ones included."""
        return self.size // self.lanes if self.lanes else self.size


def reduction_pattern(shape: Sequence[int], axes: Sequence[int]) -> list[tuple[int, bool]]:
    """The shape of a reduction with neighbours of one sort merged: sizes, and whether they are summed."""
    pattern: list[tuple[int, bool]] = []
    for d, n in enumerate(shape):
        if n == 1:
            continue
        reduced = d in axes
        if pattern and pattern[-1][1] == reduced:
            pattern[-1] = (pattern[-1][0] * n, reduced)
        else:
            pattern.append((n, reduced))
    return pattern


def role_of(eqn: Eqn, frame: Frame) -> tuple[str, Frame] | None:
    """The role of an equation's result in a frame, and the frame with it; None where it has none."""
    if eqn.prim in REDUCES:
        return _reduction_role(eqn, frame)
    n = eqn.outvars[0].aval.size
    if n == frame.size:
        return "element", frame
    if frame.lanes is not None and n == frame.rows:
        return "row", frame
    return None


def _reduction_role(eqn: Eqn, frame: Frame) -> tuple[str, Frame] | None:
    x = eqn.invars[0].aval
    if frame.lanes is not None and x.size == frame.rows and eqn.outvars[0].aval.size == 1 < x.size:
        return None if "index_dtype" in eqn.params else ("total", frame)
    if x.size != frame.size:
        return None
    pattern = reduction_pattern(x.shape, eqn.params["axes"])
    positional = "index_dtype" in eqn.params
    match pattern:
        case [(n, True)] if n > ONE_ROW and not positional:
            if frame.lanes is None:
                return "total", Frame(frame.size, total=True)
            return None
        case [(n, True)] | [_, (n, True)] if len(pattern) <= 2:
            return _with_lanes(frame, n, "row")
        case [(_, True), (n, False)] if not positional:
            return _with_lanes(frame, n, "column", outer=1)
        case [(outer, False), (_, True), (n, False)] if not positional:
            return _with_lanes(frame, n, "column", outer=outer)
    return None


def _with_lanes(frame: Frame, lanes: int, role: str, outer: int | None = None) -> tuple[str, Frame] | None:
    if frame.total or frame.lanes not in (None, lanes):
        return None
    if None not in (frame.outer, outer) and frame.outer != outer:
        return None
    return role, Frame(frame.size, lanes, frame.outer if outer is None else outer)


def common(a: Frame, b: Frame) -> Frame | None:
    """The frame that serves two regions: that of the larger, where the points of the other are its rows."""
    for big, small in ((a, b), (b, a)):
        if big.lanes and not small.lanes and not small.total and small.size == big.rows:
            return big
    if a.size != b.size or (a.total and b.lanes) or (b.total and a.lanes):
        return None
    if a.lanes and b.lanes and a.lanes != b.lanes:
        return None
    if a.outer and b.outer and a.outer != b.outer:
        return None
    return Frame(a.size, a.lanes or b.lanes, a.outer or b.outer, a.total or b.total)


class Canonical(dict[str, Index]):
    """Where the value of a role is computed, as a position in row-major order."""

    def __init__(self, frame: Frame):
        if frame.lanes is None:
            super().__init__(element=of(Range("i", frame.size)))
        else:
            r = of(Range("r", frame.rows))
            super().__init__(element=r * frame.lanes + of(Range("k", frame.lanes)), row=r)
        self.places: dict[tuple, Place] = {}
        self.met: dict[tuple, bool] = {}

    def place(self, role: str, shape: tuple[int, ...]) -> Place:
        """The same in an array, as an index for each axis."""
        found = self.places.get((role, shape))
        if found is None:
            found = self.places[role, shape] = unflat(self[role], shape)
        return found

    def source_of(self, eqn: Eqn, place: Place) -> Place:
        """The index of the operand's element that a movement equation puts at ``place``."""
        key = (eqn.prim, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, *eqn.params.items(), place)
        found = self.places.get(key)
        if found is None:
            found = self.places[key] = source_of(eqn, place)
        return found

    def meets(self, role: str, place: Place, shape: tuple[int, ...]) -> bool:
        """Whether an array read at ``place`` is read where the values of a role are computed."""
        key = role, place, shape
        found = self.met.get(key)
        if found is None:
            found = self.met[key] = flat(place, shape) == self[role]
        return found


canonical_of = functools.lru_cache(256)(Canonical)
