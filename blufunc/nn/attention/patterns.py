"""Patterns of hand-written attention in a jaxpr, matched from output to inputs.

A face, above ``point_graph.py`` and ``position_masks.py``, below ``recognised.py``. In: a graph, and a
contraction that may be ``weights @ values``. Out: a ``Match``, or a ``Miss`` with the reason why a similar
computation is not attention.

    out = weights . value                        a ``dot_general``
    weights = e / sum(e), e = exp(x - constant)  NORMALISED and SHIFTED: a softmax along the keys
    x = scores, hidden, scaled, changed          CHANGES: a mask, a factor; else any function of single scores
    scores = query . key                         a ``dot_general``

Points (``point_graph.py``) trace through everything between these, past transposes and broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.primitives.linear_ops import broadcast_in_dim_p, reduce_sum_p, reshape_p, transpose_p
from blufunc.nn.attention.point_graph import FIRST, Graph, Place, Point, places_of
from blufunc.nn.attention.position_masks import Condition, conditions, every_row_sees, two_valued

Label = Hashable
FEATURES = "features"
ROW = "row"
"""Label of an axis of queries that the arrays do not have: of one query."""

FEW, FEW_FEATURES = 16, (64, 128)
"""Most queries of a key head that kernels for decoding take, and their features."""

HIDING = -9e8
"""Upper bound of finite scores that mask: added or selected, they give weight 0.
A visible pair's exponential makes that of a masked one vanish, as with -inf; so does a dtype's least value. It is
-1e9 rounded to few bits."""


class Miss(Exception):
    """A near miss of attention; ``args`` hold the reason."""


class Operand(NamedTuple):
    """Queries, keys or values in their original layout.

    Attributes:
      atom: the array.
      labels: of each dimension; None for one of size 1 without meaning.
    """

    atom: Any
    labels: tuple[Label | None, ...]

    @property
    def sizes(self) -> dict[Label, int]:
        """Sizes by label."""
        pairs = zip(self.labels, self.atom.aval.shape, strict=True)
        return {label: n for label, n in pairs if label is not None}


class Hidden(NamedTuple):
    """Masked pairs: those where ``mask`` equals ``negated``."""

    mask: Point
    negated: bool
    value: float


@dataclass(frozen=True)
class Match:
    """A recognized attention.

    Attributes:
      query, key, value: the arrays.
      rows, columns: the labels of the axes of queries and keys. If the former is ``ROW``, all axes that queries have
        and keys have not are heads.
      out: the result, and the labels of its dimensions.
      last: the equation that computes it.
      product: the contraction of query and key.
      score: the contraction, scaled if the scale comes first.
      changed: the modified score, up to a factor: ``score`` itself if it is not modified otherwise.
      scale: the factor from a contraction of the arrays to ``score``.
      factor: the factor of ``changed``.
      hidden: masks.
      is_causal: whether their conjunction is the causal mask.
      certain: whether every query is known to see a key, or has zeros where it does not.
    """

    query: Operand
    key: Operand
    value: Operand
    rows: Label
    columns: Label
    out: Operand
    last: Eqn
    product: Point
    score: Point
    changed: Point
    scale: float
    factor: float
    hidden: tuple[Hidden, ...]
    is_causal: bool
    certain: bool


# -- softmax ---------------------------------------------------------------------------------------


def _ratio(eqn: Eqn, graph: Graph, operands: Sequence[Point]) -> list[tuple[Point, Point]]:
    """x / y as (x, y)."""
    return [(operands[0], operands[1])]


def _inverse(eqn: Eqn, graph: Graph, operands: Sequence[Point]) -> list[tuple[Point, Point]]:
    """x * (1 / y) as (x, y), the factors in either order."""
    pairs = []
    for x, y in (operands, operands[::-1]):
        producer = graph.operands(graph.thin(y))
        if producer is None:
            continue
        inner, parts = producer
        if inner.prim is ew.div_p and graph.constant(parts[0]) == 1:
            pairs.append((x, parts[1]))
        if inner.prim is ew.integer_pow_p and inner.params["exponent"] == -1:
            pairs.append((x, parts[0]))
    return pairs


NORMALISED: dict[Any, Callable] = {ew.div_p: _ratio, ew.mul_p: _inverse}
"""Normalizations by the sum: pairs of dividend and divisor."""

SHIFTED: dict[Any, tuple[tuple[int, int], ...]] = {ew.sub_p: ((0, 1),), ew.add_p: ((0, 1), (1, 0))}
"""Shifts that softmax ignores: position of the scores, and of the shift."""


def _without_zeros(graph: Graph, weights: Point) -> tuple[Point, Point | None]:
    """Weights before masked ones were zeroed (``softmax(..., where=)``), and the mask."""
    producer = graph.operands(graph.thin(weights))
    if producer is None or producer[0].prim is not ew.select_p or graph.constant(producer[1][2]) != 0:
        return weights, None
    mask, inner, _ = producer[1]
    return inner, graph.moved(mask)


def _softmax_of(graph: Graph, weights: Point, column: Label) -> Point | None:
    """The scores of which a point is the softmax along an axis."""
    weights = graph.thin(weights)
    producer = graph.operands(weights)
    if producer is None or producer[0].prim not in NORMALISED:
        return None
    for part, total in NORMALISED[producer[0].prim](producer[0], graph, producer[1]):
        part, total = graph.thin(part), graph.thin(total)
        eqn = graph.maker(total.atom)
        if eqn is None or eqn.prim is not reduce_sum_p or len(eqn.params["axes"]) != 1:
            continue
        (axis,) = eqn.params["axes"]
        summed = Point(eqn.invars[0], (*total.places[:axis], Place(column), *total.places[axis:]))
        producer = graph.operands(part)
        if graph.thin(summed) == part and producer is not None and producer[0].prim is ew.exp_p:
            return _unshifted(graph, producer[1][0], column)
    return None


def _unshifted(graph: Graph, x: Point, column: Label) -> Point:
    """Scores without shifts of whole rows."""
    while True:
        x = graph.thin(x)
        producer = graph.operands(x)
        if producer is None:
            return x
        eqn, operands = producer
        for scores, constant in SHIFTED.get(eqn.prim, ()):
            if column not in graph.thin(operands[constant]).labels:
                x = operands[scores]
                break
        else:
            return x


# -- scores ----------------------------------------------------------------------------------------


def hides(number: float, dtype: np.dtype) -> bool:
    """True if a score of this value, in the dtype of the scores, masks its pair."""
    return number <= HIDING or (dtypes.is_floating(dtype) and number <= float(dtypes.finfo(dtype).min))


class _Changes:
    """Walk from the softmax's input to the contraction that collects modifications.

    Args:
      masks: whether masks are collected; otherwise they are a modification like any other.
    """

    def __init__(self, graph: Graph, masks: bool):
        self.graph, self.masks = graph, masks
        self.scale = 1.0
        self.hidden: list[Hidden] = []

    def follow(self, x: Point) -> Point:
        """The innermost point reached: the contraction, if all was scales and masks."""
        while True:
            x = self.graph.thin(x)
            producer = self.graph.operands(x)
            if producer is None or producer[0].prim not in _CHANGES:
                return x
            before = _CHANGES[producer[0].prim](self, *producer)
            if before is None:
                return x
            x = before

    def times(self, eqn: Eqn, operands: Sequence[Point]) -> Point | None:
        """Multiplication by a scalar."""
        return self._scaled(operands, lambda c: c) or self._scaled(operands[::-1], lambda c: c)

    def over(self, eqn: Eqn, operands: Sequence[Point]) -> Point | None:
        """Division by a scalar."""
        return self._scaled(operands, lambda c: 1 / c)

    def _scaled(self, operands: Sequence[Point], factor: Callable[[float], float]) -> Point | None:
        number = self.graph.constant(operands[1])
        if number is None or not math.isfinite(number) or not number > 0:
            return None
        self.scale *= factor(float(number))
        return operands[0]

    def choice(self, eqn: Eqn, operands: Sequence[Point]) -> Point | None:
        """Selection of a scalar in place of scores."""
        mask, *cases = operands
        for scores, other, negated in ((0, 1, False), (1, 0, True)):
            if self._hide(mask, negated, self.graph.constant(cases[other]), eqn):
                return cases[scores]
        return None

    def sum(self, eqn: Eqn, operands: Sequence[Point]) -> Point | None:
        """Addition of a zero bias, or of a masking scalar."""
        one, other = operands
        return self._biased(eqn, one, other) or self._biased(eqn, other, one)

    def difference(self, eqn: Eqn, operands: Sequence[Point]) -> Point | None:
        """Subtraction of these."""
        return self._biased(eqn, operands[0], operands[1], -1)

    def _biased(self, eqn: Eqn, scores: Point, bias: Point, sign: int = 1) -> Point | None:
        found = two_valued(self.graph, self.graph.thin(bias))
        if found is None or 0 not in (found.true, found.false):
            return None
        negated = bool(found.true != 0)
        number = sign * float(found.true if negated else found.false)
        return scores if self._hide(found.condition, negated, number, eqn) else None

    def _hide(self, mask: Point, negated: bool, number: Any, eqn: Eqn) -> bool:
        if not self.masks or number is None:
            return False
        value = float(number)
        if not hides(value, eqn.outvars[0].aval.dtype) or value * self.scale > -1e3:
            return False
        self.hidden.append(Hidden(mask, negated, value))
        return True


_CHANGES: dict[Any, Callable[..., Point | None]] = {
    ew.mul_p: _Changes.times,
    ew.div_p: _Changes.over,
    ew.select_p: _Changes.choice,
    ew.add_p: _Changes.sum,
    ew.sub_p: _Changes.difference,
}
"""Recognized modifications of scores: for each operation, the step to its input."""


def product_in(graph: Graph, changed: Point, axes: frozenset[Label]) -> Point | None:
    """The only contraction in an elementwise function that varies along ``axes``.

    Raises:
      Miss: there are two.
    """
    found: set[Point] = set()
    seen: set[Point] = set()
    waiting = [changed]
    while waiting:
        point = graph.moved(waiting.pop())
        if point in seen:
            continue
        seen.add(point)
        producer = graph.operands(point)
        if producer is not None:
            waiting += producer[1]
            continue
        eqn = graph.maker(point.atom)
        whole = all(p in (Place(p.label), FIRST) for p in point.places) and len(point.labels) == len(axes)
        if eqn is not None and eqn.prim is dot_general_p and whole and axes == set(point.labels):
            found.add(point)
    if len(found) > 1:
        raise Miss("its scores are of two products")
    return next(iter(found), None)


def _scaled(graph: Graph, changed: Point, product: Point) -> tuple[Point, float]:
    """The contraction with an immediate scale, and the factor."""
    readers: dict[Point, set[Point]] = {}
    waiting = [graph.thin(changed)]
    while waiting:
        point = waiting.pop()
        producer = graph.operands(point)
        for operand in map(graph.thin, producer[1] if producer is not None else ()):
            if operand not in readers:
                waiting.append(operand)
            readers.setdefault(operand, set()).add(point)
    score, scale = product, 1.0
    while len(readers.get(score, ())) == 1:
        (reader,) = readers[score]
        eqn = graph.maker(reader.atom)
        scaling = _number(graph, eqn) if eqn is not None and eqn.prim in (ew.mul_p, ew.div_p) else None
        if scaling is None:
            break
        score, scale = reader, scale * scaling[1]
    return score, scale


# -- queries, keys and values ----------------------------------------------------------------------


def _sides(eqn: Eqn) -> list[tuple[Atom, tuple[int, ...], tuple[int, ...], list[int]]]:
    """Each operand of a contraction: array, contracted, batch and free dimensions."""
    contracted, batch = eqn.params["dimension_numbers"]
    found = []
    for x, c, b in zip(eqn.invars, contracted, batch, strict=True):
        found.append((x, c, b, [d for d in range(x.aval.ndim) if d not in c and d not in b]))
    return found


def _peeled(
    graph: Graph,
    atom: Atom,
    labels: Sequence[Label | None],
    low: np.dtype,
    batch: frozenset[Label],
    scaled: bool = True,
) -> tuple[Operand, float]:
    """An operand before transposes, widening, scaling and repeats along ``batch``.

    Returns:
      the operand, and its scalar factor.
    """
    scale = 1.0
    labels = tuple(labels)
    while True:
        atom = graph.named(atom)
        eqn = graph.maker(atom)
        if eqn is None:
            break
        if eqn.prim is transpose_p:
            permutation = eqn.params["permutation"]
            labels = tuple([labels[permutation.index(d)] for d in range(len(labels))])
            atom = eqn.invars[0]
        elif eqn.prim is ew.convert_p and atom.aval.dtype != low and eqn.invars[0].aval.dtype == low:
            atom = eqn.invars[0]
        elif scaled and eqn.prim in (ew.mul_p, ew.div_p):
            factor = _number(graph, eqn)
            if factor is None:
                break
            scale *= factor[1]
            atom = factor[0]
        else:
            repeated = _repeated(graph, eqn, labels, batch)
            if repeated is None:
                break
            atom, labels = repeated
    return Operand(atom, labels), scale


def _number(graph: Graph, eqn: Eqn) -> tuple[Atom, float] | None:
    """The array and scalar factor of a product or quotient."""
    x, y = eqn.invars
    for array, other in ((x, y), (y, x)) if eqn.prim is ew.mul_p else ((x, y),):
        number = graph.constant(Point(other, (FIRST,) * other.aval.ndim))
        if number is not None and array.aval.ndim and math.isfinite(number) and number > 0:
            return array, float(number) if eqn.prim is ew.mul_p else 1 / float(number)
    return None


def _repeated(
    graph: Graph, eqn: Eqn, labels: tuple[Label | None, ...], batch: frozenset[Label]
) -> tuple[Atom, tuple[Label | None, ...]] | None:
    """Heads before a repeat for sharing, by a broadcast and an optional merge of axes."""
    if eqn.prim is reshape_p:
        (x,) = eqn.invars
        inner, shape = graph.maker(x), eqn.outvars[0].aval.shape
        if inner is None or inner.prim is not broadcast_in_dim_p:
            return None
        for d, label in enumerate(labels):  # [..., K, G, ...] became [..., K * G, ...] at d
            wide = x.aval.shape
            if label in batch and (*wide[:d], wide[d] * wide[d + 1], *wide[d + 2 :]) == shape:
                split = (*labels[: d + 1], _REPEATS, *labels[d + 1 :])
                return _broadcast_operand(inner, split, frozenset([_REPEATS]))
        return None
    return _broadcast_operand(eqn, labels, batch) if eqn.prim is broadcast_in_dim_p else None


_REPEATS = "repeats"


def _broadcast_operand(
    eqn: Eqn, labels: tuple[Label | None, ...], may: frozenset[Label]
) -> tuple[Atom, tuple[Label | None, ...]] | None:
    """The operand of a broadcast along axes in ``may``, or of size 1, only."""
    (x,), dims = eqn.invars, eqn.params["dims"]
    new = {d for d in range(len(labels)) if d not in dims}
    new |= {d for i, d in enumerate(dims) if x.aval.shape[i] == 1 != eqn.outvars[0].aval.shape[d]}
    if not x.aval.ndim or any(labels[d] is not None and labels[d] not in may for d in new):
        return None
    return x, tuple([None if d in new else labels[d] for d in dims])


# -- the whole pattern -----------------------------------------------------------------------------


def match(graph: Graph, last: Eqn) -> Match | None:
    """The attention whose last equation this is, if any.

    Raises:
      Miss: a near miss.
    """
    if last.prim is not dot_general_p:
        return None
    left, right = _sides(last)
    return _match(graph, last, left, right, 0) or _match(graph, last, right, left, 1)


def _match(graph: Graph, last: Eqn, of_weights: tuple, of_values: tuple, place: int) -> Match | None:
    weights, w_contracted, w_batch, w_free = of_weights
    values, v_contracted, v_batch, v_free = of_values
    if len(w_contracted) != 1 or len(v_free) != 1 or not w_free:
        return None
    (column,) = w_contracted
    whole = Point(weights, places_of(weights.aval.shape))
    inner, zeroed = _without_zeros(graph, whole)
    x = _softmax_of(graph, inner, column)
    if x is None:
        _check_changed(graph, whole, column)
        return None
    product = product_in(graph, x, frozenset(whole.labels))
    if product is None:
        return None
    of_batch = [whole.places[d].label for d in w_batch]
    value_labels = dict(zip(v_batch, of_batch, strict=True)) | {v_contracted[0]: column, v_free[0]: FEATURES}
    low = values.aval.dtype
    query, key, own_scale = _query_and_key(graph, product, column, low)
    batch = frozenset(of_batch)
    own_labels = [value_labels[d] for d in range(values.aval.ndim)]
    value, _ = _peeled(graph, values, own_labels, low, batch, scaled=False)
    of_free = [whole.places[d].label for d in w_free]
    rows = [d for d in of_free if d is not None and d not in key.sizes]
    _check_types(query, key, value, weights)

    row = rows[-1] if rows else ROW
    n_rows = weights.aval.shape[row] if rows else 1
    sizes = n_rows, weights.aval.shape[column]
    changes, changed, is_causal, certain = _counting(graph, x, zeroed, row, column, sizes)
    few = math.prod(weights.aval.shape[d] for d in rows) <= FEW and value.sizes[FEATURES] in FEW_FEATURES
    if few and not is_causal:
        row = ROW
    ends = [*of_free, FEATURES] if place == 0 else [FEATURES, *of_free]
    factor, of_score = changes.scale, 1.0
    if changed == product:
        score, factor, of_score = product, 1.0, changes.scale
    else:
        score, of_score = _scaled(graph, changed, product)
    return Match(
        query,
        key,
        value,
        row,
        column,
        Operand(last.outvars[0], (*of_batch, *ends)),
        last,
        product,
        score,
        changed,
        own_scale * of_score,
        factor,
        () if is_causal else tuple(changes.hidden),
        is_causal,
        certain,
    )


def _counting(
    graph: Graph, x: Point, zeroed: Point | None, row: Label, column: int, sizes: tuple[int, int]
) -> tuple[_Changes, Point, bool, bool]:
    """Modifications of scores, their start, causality, and visibility of all rows.

    Args:
      x: the input of the softmax.
      zeroed: the mask where its weights are set to 0.
      sizes: of rows and columns.
    """
    changes = _Changes(graph, masks=True)
    changed = changes.follow(x)
    masks = {graph.moved(h.mask) for h in changes.hidden if h.value == -math.inf and not h.negated}
    if zeroed is not None and zeroed not in masks:
        raise Miss(_CHANGED.format("select"))
    is_causal, certain = _visible(graph, changes.hidden, row, column, sizes)
    if zeroed is not None and not certain:
        if len(changes.hidden) > 1:
            raise Miss("its softmax has a mask for where=, and another one")
        certain = True
    if certain or all(h.value == -math.inf for h in changes.hidden):
        return changes, changed, is_causal, certain
    changes = _Changes(graph, masks=False)  # a row of masking scalars only has uniform weights
    return changes, changes.follow(x), False, True


_CHANGED = "{} changes its weights before they meet the values, as dropout does"


def _check_changed(graph: Graph, weights: Point, column: Label, depth: int = 4) -> None:
    """Raise Miss if weights are a modified softmax."""
    producer = graph.operands(graph.thin(weights))
    if producer is None or not depth:
        return
    eqn, operands = producer
    for p in operands:
        if _softmax_of(graph, p, column) is not None:
            raise Miss(_CHANGED.format(eqn.prim.name))
        _check_changed(graph, p, column, depth - 1)


def _query_and_key(
    graph: Graph, scores: Point, column: Label, low: np.dtype
) -> tuple[Operand, Operand, float]:
    """The operands of the score contraction, and their scale."""
    product = graph.maker(scores.atom)
    assert product is not None
    labels = iter([p.label for p in scores.places])
    batch = [next(labels) for _ in product.params["dimension_numbers"][1][0]]
    found = []
    for x, contracted, batch_dims, free in _sides(product):
        if len(contracted) != 1:
            raise Miss("its queries and keys are contracted along several axes, or none")
        own = dict(zip(batch_dims, batch, strict=True)) | {d: next(labels) for d in free}
        found.append((x, [*({**own, contracted[0]: FEATURES}[d] for d in range(x.aval.ndim))]))
    of_keys = [column in names for _, names in found]
    if of_keys not in ([True, False], [False, True]):
        raise Miss("its softmax is along an axis that queries and keys share")
    (q, q_labels), (k, k_labels) = found if of_keys[1] else found[::-1]
    if any(d not in (None, column, FEATURES, *batch) for d in k_labels):
        raise Miss("its keys have more axes than one of their own")
    query, scale = _peeled(graph, q, q_labels, low, frozenset())
    key, other = _peeled(graph, k, k_labels, low, frozenset(batch))
    return query, key, scale * other


def _check_types(query: Operand, key: Operand, value: Operand, weights: Atom) -> None:
    """Raise Miss unless attention of these is at least as precise as the original."""
    types = [x.atom.aval.dtype for x in (query, key, value)]
    low, high = types[0], weights.aval.dtype
    if low.itemsize < high.itemsize:
        raise Miss(
            f"its weights meet the values in {high.name}, and kernels round them to {low.name}, "
            "as weights.astype(queries.dtype) does"
        )
    if len({*types, high}) > 1:
        raise Miss(f"its queries, keys and values are {', '.join(t.name for t in types)}")


def _visible(
    graph: Graph, hidden: Sequence[Hidden], row: Label, column: int, sizes: tuple[int, int]
) -> tuple[bool, bool]:
    """Whether masks amount to a causal one, and whether every query sees a key."""
    if not hidden:
        return False, True
    found: list[Condition] = []
    for h in hidden:
        part = conditions(graph, h.mask, h.negated)
        if part is None:
            return False, False
        found += part
    causal = None if row == ROW else Condition(tuple(sorted(((row, 1), (column, -1)))), 0)
    needed = [c for c in dict.fromkeys(found) if c.factors]
    return needed == [causal], every_row_sees(found, row, column, *sizes)
