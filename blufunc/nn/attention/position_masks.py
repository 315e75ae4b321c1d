"""Symbolic form of masks: inequalities between positions along axes.

A face, above ``point_graph.py`` and below ``patterns.py``. A **condition** is ``a . positions + c >= 0``: a
causal mask is ``q - k >= 0``, a window of w keys adds ``w - 1 - q + k >= 0``. Every spelling reduces to the
same condition: comparisons of positions either way round, ``tril``, a selection of 1 or 0 that is compared
later, a bias that is 0 where a pair is visible.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.shape import iota_p
from blufunc.nn.attention.point_graph import Graph, Point


class Condition(NamedTuple):
    """``sum(a * position) + start >= 0``.

    Attributes:
      factors: pairs of the label of an axis and its a, not 0, sorted.
      start: the constant.
    """

    factors: tuple[tuple[Hashable, int], ...]
    start: int

    def holds(self, positions: Mapping[Hashable, int]) -> bool:
        """True if it holds at these positions."""
        return sum(a * positions[label] for label, a in self.factors) + self.start >= 0


class TwoValued(NamedTuple):
    """A point with one scalar where a comparison holds, and another where it does not."""

    condition: Point
    true: Any
    false: Any


_COMPARISONS: dict[Any, Callable[[dict, dict], dict]] = {
    ew.ge_p: lambda x, y: _less(x, y),
    ew.gt_p: lambda x, y: _less(_less(x, y), _ONE),
    ew.le_p: lambda x, y: _less(y, x),
    ew.lt_p: lambda x, y: _less(_less(y, x), _ONE),
}
"""For integer comparisons: the expression that is nonnegative where they hold."""

_CONSTANT = None
_ONE: dict = {_CONSTANT: 1}


def _less(x: dict, y: dict) -> dict:
    return {k: x.get(k, 0) - y.get(k, 0) for k in {*x, *y}}


def _scaled(x: dict, y: dict) -> dict | None:
    if set(x) - {_CONSTANT}:
        x, y = y, x
    return None if set(x) - {_CONSTANT} else {k: a * x.get(_CONSTANT, 0) for k, a in y.items()}


_SUMS: dict[Any, Callable[..., dict | None]] = {
    ew.add_p: lambda x, y: _less(x, _less({}, y)),
    ew.sub_p: _less,
    ew.neg_p: lambda x: _less({}, x),
    ew.mul_p: _scaled,
}


def _affine(graph: Graph, point: Point) -> dict | None:
    """An integer as an affine function: factors by label, the constant by None."""
    point = graph.thin(point)
    number = graph.constant(point)
    if number is not None:
        return {_CONSTANT: int(number)} if np.isfinite(number) and number == np.rint(number) else None
    eqn = graph.maker(point.atom)
    if eqn is not None and eqn.prim is iota_p:
        place = point.places[eqn.params["dimension"]]
        steps = {} if place.label is None else {place.label: place.stride}
        return {**steps, _CONSTANT: place.start}
    producer = graph.operands(point)
    if producer is None or producer[0].prim not in _SUMS:
        return None
    if dtypes.is_unsigned(point.atom.aval.dtype):
        return None  # differences wrap around
    parts = [_affine(graph, p) for p in producer[1]]
    return None if None in parts else _SUMS[producer[0].prim](*parts)


def two_valued(graph: Graph, point: Point) -> TwoValued | None:
    """A point with two known values, and the comparison that selects; or None."""
    point = graph.moved(point)
    producer = graph.operands(point)
    if producer is None:
        return None
    eqn, operands = producer
    if eqn.prim in _COMPARISONS:
        found = [two_valued(graph, p) for p in operands]
        if not any(found):
            return TwoValued(point, np.True_, np.False_)
    constants = [graph.constant(p) for p in operands]
    known = [two_valued(graph, p) if c is None else None for p, c in zip(operands, constants, strict=True)]
    deciding = [k for k in known if k is not None]
    if not deciding or any(c is None and k is None for c, k in zip(constants, known, strict=True)):
        return None
    if any(k.condition != deciding[0].condition for k in deciding):
        return None
    types = [p.atom.aval.dtype for p in operands]

    def value(which: str) -> Any:
        inputs = [c if k is None else getattr(k, which) for c, k in zip(constants, known, strict=True)]
        with np.errstate(all="ignore"):
            return np.asarray(
                eqn.prim.impl(*[np.asarray(x, d) for x, d in zip(inputs, types, strict=True)], **eqn.params)
            )[()]

    return TwoValued(deciding[0].condition, value("true"), value("false"))


def conditions(graph: Graph, mask: Point, negated: bool = False) -> list[Condition] | None:
    """A mask as a conjunction of conditions; None if it is not known to be one.

    Args:
      mask: a boolean.
      negated: whether pairs are visible where it is False.
    """
    mask = graph.moved(mask)
    number = graph.constant(mask)
    if number is not None:
        return [] if bool(number) != negated else None
    producer = graph.operands(mask)
    if producer is None:
        return None
    eqn, operands = producer
    if eqn.prim is ew.not_p:
        return conditions(graph, operands[0], not negated)
    if eqn.prim is (ew.or_p if negated else ew.and_p):
        parts = [conditions(graph, p, negated) for p in operands]
        return None if None in parts else [c for part in parts for c in part or ()]
    found = two_valued(graph, mask)
    if found is None or bool(found.true) == bool(found.false):
        return None
    holds = bool(found.true) != negated
    comparison = graph.operands(found.condition)
    assert comparison is not None, "a comparison is what two-valued points go by"
    left, right = [_affine(graph, p) for p in comparison[1]]
    if left is None or right is None:
        return None
    total = _COMPARISONS[comparison[0].prim](left, right)
    if not holds:
        total = _less({_CONSTANT: -1}, total)
    start = total.pop(_CONSTANT, 0)
    return [Condition(tuple(sorted((k, a) for k, a in total.items() if a)), start)]


def every_row_sees(
    found: Sequence[Condition], row: Hashable, column: Hashable, rows: int, columns: int
) -> bool:
    """True if each row has a column where all conditions hold.

    Tests the first column and the diagonal; conditions are affine, so the ends of a line suffice.
    """
    if any(label not in (row, column) for c in found for label, _ in c.factors):
        return False
    last = min(rows, columns) - 1
    diagonal = [(0, 0), (last, last), (rows - 1, last)]
    lines = (diagonal, [(0, 0), (rows - 1, 0)])
    return any(all(c.holds({row: r, column: k}) for c in found for r, k in line) for line in lines)
