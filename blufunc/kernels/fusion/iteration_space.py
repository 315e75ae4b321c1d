"""Iteration spaces of fused regions, and the equations that fit them.

Kernels, stage 5, called by ``fuse.py``. In: an equation, and the frame of a region that it might join. Out: the role of
its result there (an element, a row, a column or a total, as ``fuse.py`` defines them), the frame with it, and the place
of a role's values. ``sort_of`` says whether an equation is virtual, a node of a region or opaque; passes before fusion
call it too.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.dynamic import dynamic_slice_p, dynamic_update_slice_p
from blufunc.core.ops.gather_scatter import gather_p, scatter_add_p
from blufunc.core.ops.random_bits import (
    random_bits_p,
    random_fold_in_p,
    random_seed_p,
    random_split_p,
    random_unwrap_p,
    random_wrap_p,
)
from blufunc.core.ops.shape import concatenate_p, iota_p, pad_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.primitives.primitive import Primitive
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.loopir.access_map import Place, moves, source_of
from blufunc.kernels.loopir.index import ZERO, Index, Range, flat, of, unflat
from blufunc.kernels.ops.points import POINTS

# -- iteration spaces -------------------------------------------------------------------------------


def reduces(prim: Primitive) -> str:
    """The LoopIR operation of a reduction; empty if kernels do not reduce it."""
    return prim.monoid if prim.kind == "reduce" else ""


def scans_by(prim: Primitive) -> str:
    """The LoopIR operation of a cumulative primitive; empty for all others."""
    return prim.monoid if prim.kind == "cumulative" else ""


ONE_ROW = 1 << 16
"""Maximum size of a full reduction that one row of lanes does."""

_SCANNED_ROWS, _SCANNED_COLUMNS = 16, 128
"""Rows fewer and longer than this are scanned in chunks.
Kernels scan at least that many columns.
"""


@dataclass(frozen=True)
class Frame:
    """The points of a region: ``size``, or ``outer * rows`` rows of ``lanes``.

    ``outer`` is None until a reduction over rows fixes it. ``order`` is None while rows may run in any order and in
    parts. ``"whole"``: the lanes of a row are reduced, or share a value. ``"down"`` and ``"up"``: each column is
    scanned, from its first or from its last row. ``"chunks"``: a row is scanned that is long enough for several points.
    """

    size: int
    lanes: int | None = None
    outer: int | None = None
    total: bool = False
    order: str | None = None

    @property
    def rows(self) -> int:
        """All rows, the outer ones included."""
        return self.size // self.lanes if self.lanes else self.size


def sums_of_long_rows(frame: Frame, most: int) -> bool:
    """True if rows of over ``most`` lanes are reduced both over lanes and over rows."""
    return frame.order == "whole" and frame.outer is not None and (frame.lanes or 0) > most


def reduction_pattern(shape: Sequence[int], axes: Sequence[int]) -> list[tuple[int, bool]]:
    """The shape of a reduction, adjacent axes merged: sizes, and whether reduced."""
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
    """The role of a result in a frame, and the frame with it; None if it does not fit."""
    if reduces(eqn.prim):
        return _reduction_role(eqn, frame)
    if scans(eqn):
        return _scan_role(eqn, frame)
    n = eqn.outvars[0].aval.size
    if n == frame.size:
        return "element", frame
    if frame.lanes is not None and n == frame.rows:
        return _in_order("row", frame, "whole")
    return None


def scans(eqn: Eqn) -> bool:
    """True for a cumulative operation over more than one element."""
    return bool(scans_by(eqn.prim)) and scanned_axes(eqn)[1] > 1


def scanned_axes(eqn: Eqn) -> tuple[int, int, int]:
    """Elements before, along and after the axis of a cumulative operation."""
    shape, axis = eqn.invars[0].aval.shape, eqn.params["axis"]
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def can_be_scanned(eqn: Eqn) -> bool:
    """True if a scan is worth a kernel: libraries do better on few, long columns.

    A product of few long rows is opaque too: its chunks could overflow where the whole does not.
    """
    outer, n, inner = scanned_axes(eqn)
    if inner == 1:
        return not _is_few(eqn) or scans_by(eqn.prim) != "prod"
    return outer * inner >= _SCANNED_COLUMNS or n * inner <= ONE_ROW


def _is_few(eqn: Eqn) -> bool:
    """True if rows are so few, and so long, that each is scanned in chunks."""
    outer, n, _ = scanned_axes(eqn)
    return outer < _SCANNED_ROWS and n > ONE_ROW


def _scan_role(eqn: Eqn, frame: Frame) -> tuple[str, Frame] | None:
    outer, n, inner = scanned_axes(eqn)
    if outer * n * inner != frame.size:
        return None
    if inner > 1:
        fitted = _with_lanes(frame, inner, "element", outer)
        return fitted and _in_order(*fitted, "up" if eqn.params["reverse"] else "down")
    fitted = _with_lanes(frame, n, "element")
    if not _is_few(eqn):
        return fitted and _in_order(*fitted, "whole")
    return fitted and _in_order(*fitted, "chunks") if frame.outer is None else None


def _in_order(role: str, frame: Frame, order: str) -> tuple[str, Frame] | None:
    """The frame with an order of its rows, if it has no other."""
    return (role, replace(frame, order=order)) if frame.order in (None, order) else None


def _reduction_role(eqn: Eqn, frame: Frame) -> tuple[str, Frame] | None:
    x = eqn.invars[0].aval
    if frame.lanes is not None and x.size == frame.rows and eqn.outvars[0].aval.size == 1 < x.size:
        return None if "index_dtype" in eqn.params else _in_order("total", frame, "whole")
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
            fitted = _with_lanes(frame, n, "row")
            return fitted and _in_order(*fitted, "whole")
        case [(_, True), (n, False)] if not positional:
            return _with_lanes(frame, n, "column", outer=1)
        case [(outer, False), (_, True), (n, False)] if not positional:
            return _with_lanes(frame, n, "column", outer=outer)
    return None


def _with_lanes(frame: Frame, lanes: int, role: str, outer: int | None = None) -> tuple[str, Frame] | None:
    if frame.total or frame.lanes not in (None, lanes) or (frame.order == "chunks" and outer is not None):
        return None
    if None not in (frame.outer, outer) and frame.outer != outer:
        return None
    return role, replace(frame, lanes=lanes, outer=frame.outer if outer is None else outer)


def common(a: Frame, b: Frame) -> Frame | None:
    """The frame of two merged regions: the larger, if its rows are the other's points."""
    for big, small in ((a, b), (b, a)):
        if big.lanes and not small.lanes and not small.total and small.size == big.rows:
            return big
    if a.size != b.size or (a.total and b.lanes) or (b.total and a.lanes):
        return None
    if a.lanes and b.lanes and a.lanes != b.lanes:
        return None
    if a.outer and b.outer and a.outer != b.outer:
        return None
    if a.order and b.order and a.order != b.order:
        return None
    return Frame(a.size, a.lanes or b.lanes, a.outer or b.outer, a.total or b.total, a.order or b.order)


class Canonical(dict[str, Index]):
    """The row-major position at which the value of each role is computed."""

    def __init__(self, frame: Frame):
        if frame.lanes is None:
            super().__init__(element=of(Range("i", frame.size)))
        else:
            r = of(Range("r", frame.rows))
            super().__init__(element=r * frame.lanes + of(Range("k", frame.lanes)), row=r)
        self.places: dict[tuple, Place] = {}
        self.met: dict[tuple, bool] = {}

    def place(self, role: str, shape: tuple[int, ...]) -> Place:
        """The same position as an index per axis of an array."""
        found = self.places.get((role, shape))
        if found is None:
            found = self.places[role, shape] = unflat(self[role], shape)
        return found

    def source_of(self, eqn: Eqn, place: Place) -> Place:
        """The operand's index that a movement equation maps to ``place``."""
        key = (eqn.prim, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, *eqn.params.items(), place)
        found = self.places.get(key)
        if found is None:
            found = self.places[key] = source_of(eqn, place)
        return found

    def meets(self, role: str, place: Place, shape: tuple[int, ...]) -> bool:
        """True if an array at ``place`` is read where a role's values are computed."""
        key = role, place, shape
        found = self.met.get(key)
        if found is None:
            found = self.met[key] = flat(place, shape) == self[role]
        return found


canonical_of = functools.lru_cache(256)(Canonical)


# -- sorts of equations -----------------------------------------------------------------------------


RANDOM = (
    frozenset(
        (random_bits_p, random_split_p, random_fold_in_p, random_seed_p, random_wrap_p, random_unwrap_p)
    )
    if sys.byteorder == "little"
    else frozenset()
)
"""The random primitives that kernels compute, on little-endian machines."""

READERS = frozenset((gather_p, concatenate_p, pad_p, dynamic_slice_p, dynamic_update_slice_p, *RANDOM))
"""Nodes that read their operands at other elements than their own."""


def sort_of(eqn: Eqn) -> str:
    """Classify an equation: ``virtual``, ``node`` or ``opaque``."""
    prim = eqn.prim
    if prim.multiple_results or eqn.effects or prim.opaque or len(eqn.outvars) != 1:
        return "opaque"
    if is_replaced(prim, "impl"):
        return "opaque"
    for a in (*eqn.invars, *eqn.outvars):
        if not a.aval.size or not _plain(a.aval.dtype):
            return "opaque"
    if moves(eqn) or prim is iota_p:
        return "virtual"
    if isinstance(prim, Elementwise) or prim is add_any_p:
        if not scalar_ops.known(prim, eqn.params, [a.aval.dtype for a in eqn.invars]):
            return "opaque"
        return "virtual" if eqn.outvars[0].aval.size == 1 else "node"
    if reduces(prim):
        return "opaque" if dtypes.is_complex(eqn.invars[0].aval.dtype) or positions_apart(eqn) else "node"
    if scans_by(prim):
        return "node" if can_be_scanned(eqn) and not dtypes.is_complex(eqn.invars[0].aval.dtype) else "opaque"
    if prim in READERS or prim in POINTS or one_hot(eqn):
        return "node"
    return "opaque"


@functools.cache
def _plain(dtype: Any) -> bool:
    return dtypes.is_numeric(dtype) or dtypes.is_bool(dtype) or dtypes.is_key(dtype)


def one_hot(eqn: Eqn) -> bool:
    """True for a ``scatter_add`` of a scalar per row: each element can test for it."""
    if eqn.prim is not scatter_add_p:
        return False
    d = eqn.params["dimension_numbers"]
    x, indices, updates = (a.aval for a in eqn.invars)
    return (
        not d.update_window_dims
        and len(d.scatter_dims_to_operand_dims) == 1
        and d.inserted_window_dims == d.scatter_dims_to_operand_dims
        and len(d.operand_batching_dims) == x.ndim - 1
        and indices.shape[-1] == 1
        and updates.size * x.shape[d.scatter_dims_to_operand_dims[0]] == x.size
    )


def one_hot_batch(eqn: Eqn, place: Place) -> Place:
    """The place of the index and of the update for an element's row."""
    d = eqn.params["dimension_numbers"]
    batch = [ZERO] * (eqn.invars[1].aval.ndim - 1)
    for a, b in zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True):
        batch[b] = place[a]
    return tuple(batch)


def positions_apart(eqn: Eqn) -> bool:
    """True for an arg-reduction along an axis that is not the last."""
    if "index_dtype" not in eqn.params:
        return False
    pattern = reduction_pattern(eqn.invars[0].aval.shape, eqn.params["axes"])
    return not pattern or not pattern[-1][1] or len(pattern) > 2
