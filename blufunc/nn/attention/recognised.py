"""Recognizer of hand-written attention, replaced by the operation with kernels.

A face, above ``patterns.py``, called by ``core/programs/alternatives.py``. In: a jaxpr. Out: the same with an
``either`` equation (``transforms/control_flow/platform_variants.py``) in place of each attention. Its bodies
are the original, and ``attention`` (``call.py``) with the required changes of layout. Attention without a
kernel on any device, or whose weights have other readers, is left unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var, line_of
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.shape import iota_p
from blufunc.core.primitives.linear_ops import transpose_p
from blufunc.core.programs import alternatives, simplify
from blufunc.core.programs.alternatives import Found
from blufunc.core.programs.stage import stage
from blufunc.nn.activations import softmax_over, wide_of
from blufunc.nn.attention import call as attention_call
from blufunc.nn.attention.mods import traced
from blufunc.nn.attention.patterns import (
    FEATURES,
    FEW,
    FEW_FEATURES,
    HIDING,
    ROW,
    Label,
    Match,
    Miss,
    Operand,
    match,
)
from blufunc.nn.attention.point_graph import Graph, Place, Point
from blufunc.nn.attention.position_masks import two_valued
from blufunc.transforms.control_flow.calls import jit_p
from blufunc.transforms.control_flow.platform_variants import either_p

_LEAST = -(2.0**14)
"""Replacement of finite masking scores where a row may have no other.
Kernels keep the logsumexp of a row in float32: next to -1e9 the number of terms would be lost."""


def recognise(jaxpr: Jaxpr) -> Found:
    """A jaxpr with attention replaced, and a line for each near miss."""
    whole, jaxpr = (
        jaxpr,
        simplify.inline_calls(jaxpr, only=jit_p),
    )  # other calls have custom derivatives
    if sum(e.prim is dot_general_p for e in jaxpr.eqns) < 2:
        return Found(whole)
    graph = Graph(jaxpr, [softmax_over])
    misses: dict[str, None] = {}
    for eqn in jaxpr.eqns:
        try:
            found = match(graph, eqn)
            if found is not None:
                last, call = _replacement(graph, found)
                graph.replace(last, call)
        except Miss as miss:
            if source.is_backward(eqn.source):
                continue  # already reported for the forward pass
            misses[f"not recognised as attention at {line_of(eqn)}: {miss}"] = None
    if not any(e.prim is either_p for e in graph.eqns):
        return Found(whole, tuple(misses))
    return Found(simplify.dce(jaxpr.replace(eqns=graph.eqns)), tuple(misses))


# -- the replaced region ---------------------------------------------------------------------------


def _replacement(graph: Graph, found: Match) -> tuple[Eqn, Eqn]:
    """The last equation of the replaced region, and its replacement.

    Raises:
      Miss: there is no kernel, or a dropped value has other readers.
    """
    last, out = _extended(graph, found)
    tables = _tables(graph, found)
    arrays = [graph.outward(x.atom) for x in (found.query, found.key, found.value)]
    operands = list(dict.fromkeys([*arrays, *map(graph.outward, tables)]))
    kernel = stage(
        source.at(
            last.source, lambda *xs: [_attention(graph, found, out, dict(zip(operands, xs, strict=True)))]
        ),
        [v.aval for v in operands],
        "attention",
    )
    assert not kernel.consts, "it is a function of its operands"
    written = Jaxpr(operands, _region(graph, found, last, operands), last.outvars, name="attention")
    held = tuple([v not in arrays for v in operands])
    params = {"jaxpr": written, "preferred": kernel, "parts": (1, 0, 0), "held": held}
    return last, Eqn(either_p, operands, last.outvars, params, last.source)


def _extended(graph: Graph, found: Match) -> tuple[Eqn, Operand]:
    """The result after the transposes and conversions that all its readers share."""
    last, out, low = found.last, found.out, found.value.atom.aval.dtype
    while True:
        (v,) = last.outvars
        readers = graph.readers(v)
        if len(readers) != 1 or v in graph.jaxpr.outvars:
            break
        (reader,) = readers
        if reader.prim is transpose_p:
            out = Operand(reader.outvars[0], tuple([out.labels[d] for d in reader.params["permutation"]]))
        elif reader.prim is ew.convert_p and out.atom.aval.dtype != low == reader.outvars[0].aval.dtype:
            out = Operand(reader.outvars[0], out.labels)
        else:
            break
        last = reader
    if out.atom.aval.dtype != low:
        raise Miss(
            f"its result is {out.atom.aval.dtype.name}, and that of kernels is {low.name} as the values are"
        )
    return last, out


def _region(graph: Graph, found: Match, last: Eqn, operands: Sequence[Var]) -> list[Eqn]:
    """The equations from the operands to the result.

    Raises:
      Miss: it depends on other operands, or an intermediate value has other readers.
    """
    makers: dict[Any, Eqn] = {v: e for e in graph.eqns for v in e.outvars}
    inside: dict[int, Eqn] = {id(last): last}
    waiting = [last]
    while waiting:
        for v in waiting.pop().invars:
            if v.__class__ is Literal or v in operands:
                continue
            maker = makers.get(v)
            if maker is None or maker.effects:
                raise Miss("its softmax depends on more than scores and masks")
            if id(maker) not in inside:
                inside[id(maker)] = maker
                waiting.append(maker)
    eqns = [e for e in graph.eqns if id(e) in inside]
    product = graph.maker(found.product.atom)
    assert product is not None
    scored = set(graph.outer(product).outvars)
    for e in eqns:
        if any(v in scored for v in e.invars):
            scored |= set(e.outvars)
    for v in scored - set(last.outvars):
        others = [e for e in graph.readers(v) if id(e) not in inside]
        if others and source.is_backward(others[0].source):
            raise Miss(
                "its weights are kept for a backward pass: it was differentiated in a shard_map, or outside of jit, "
                "or with respect to what its masks or biases are computed of"
            )
        if others:
            raise Miss(f"its scores or weights are read at {line_of(others[0])}, too")
        if v in graph.jaxpr.outvars:
            raise Miss("its scores or weights are returned, too")
    return eqns


def _tables(graph: Graph, found: Match) -> list[Any]:
    """The arrays that masks and changes of scores read."""
    tables: dict[Any, None] = {}
    seen: set[Point] = set()
    waiting = [found.changed, *[h.mask for h in found.hidden]]
    while waiting:
        point = graph.moved(waiting.pop())
        if point in seen or point == found.score or point.atom.__class__ is Literal:
            continue
        seen.add(point)
        producer, maker = graph.operands(point), graph.maker(point.atom)
        if producer is not None:
            waiting += producer[1]
        elif maker is None or maker.prim is not iota_p:
            tables[point.atom] = None
    return list(tables)


# -- the replacement -------------------------------------------------------------------------------


def _attention(graph: Graph, found: Match, out: Operand, env: dict[Any, Any]) -> Any:
    """The match as a call of ``attention``, from the values of its operands."""
    value_of = lambda x: env[graph.outward(x.atom)]
    of_queries, of_keys = found.query.sizes, found.key.sizes
    batch, heads = _divided(found)
    sizes = {**of_queries, found.columns: of_keys[found.columns]}
    query = _laid_out(value_of(found.query), found.query, batch, found.rows, heads)
    key = _laid_out(value_of(found.key), found.key, batch, found.columns, heads)
    value = _laid_out(value_of(found.value), found.value, batch, found.columns, heads)
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    if key.shape != value.shape:
        raise Miss(
            f"its keys are [batch, keys, heads, features] = {list(key.shape)}, its values {list(value.shape)}"
        )
    if S <= H:
        raise Miss(
            f"its {S} keys are no more than the {H} features of a head, so that its weights are no large array"
        )
    if query.dtype not in (dtypes.bfloat16, dtypes.float16):
        raise Miss(f"its elements are {query.dtype.name}, and only those of 16 bits are recognised")
    refused = alternatives.refusals["attention"]((B, T, S, N, K, H), query.dtype)
    if refused is not None:
        raise Miss(f"no kernel: {refused}")

    def scalars(numbers: tuple) -> _Scalars:
        b, h, q, k = numbers
        positions = {found.rows: q, found.columns: k}
        positions |= _unravelled(b, batch, sizes) | _unravelled(h, heads, sizes)
        return _Scalars(graph, env, positions)

    def mask_mod(*numbers: Any) -> Any:
        at = scalars(numbers)
        seen = [~at(h.mask) if h.negated else at(h.mask) for h in found.hidden]
        return functools.reduce(lambda x, y: x & y, seen)

    def score_mod(score: Any, *numbers: Any) -> Any:
        at = scalars(numbers)
        at.known[found.score] = score, True
        return at(found.changed) * found.factor

    changed = found.changed != found.score
    mods, tables = traced(mask_mod if found.hidden else None, score_mod if changed else None, wide_of(query))
    decodes = H in FEW_FEATURES and T * N <= FEW * K
    if not found.certain and decodes and mods is not None:
        mods = dataclasses.replace(mods, blind_is_nan=True)
    result, lse = attention_call.attention(
        query, key, value, scale=found.scale, is_causal=found.is_causal, mods=mods, tables=tables
    )
    if not found.certain and not decodes:  # a row of -inf only is NaN in the original
        blind = bnp.expand_dims(bnp.swapaxes(lse == -math.inf, 1, 2), -1)
        result = bnp.where(blind, math.nan, result)
    axes = (*batch, *([] if found.rows == ROW else [found.rows]), *heads, FEATURES)
    result = bnp.reshape(result, [H if a == FEATURES else sizes[a] for a in axes])
    result = lax.transpose(result, [axes.index(label) for label in out.labels if label is not None])
    return bnp.reshape(result, out.atom.aval.shape)


def _divided(found: Match) -> tuple[list[Label], list[Label]]:
    """Batch axes and head axes, among those other than queries, keys and features.

    Axes that precede the queries in memory are batch, so that nothing is transposed; of one query, those that precede
    the keys. Heads that share keys are heads, after those that do not.
    """
    mine, theirs = found.query.sizes, found.key.sizes
    others = [a for a in found.query.labels if a in mine and a not in (found.rows, FEATURES)]
    if found.rows == ROW:
        before = [a for a in others if all(_precedes(a, found.columns, x) for x in (found.key, found.value))]
    else:
        before = others[: found.query.labels.index(found.rows)]
    shares = lambda a: theirs.get(a, 0) != mine[a]
    batch = [a for a in before if not shares(a)]
    heads = sorted((a for a in others if a not in batch), key=lambda a: (shares(a), a not in theirs))
    if sum(a in theirs and shares(a) for a in heads) > 1:
        raise Miss("its heads share keys along two axes")
    return batch, heads


def _precedes(label: Label, other: Label, operand: Operand) -> bool:
    """True if an axis of an operand precedes another one in memory."""
    labels = operand.labels
    return label in labels and labels.index(label) < labels.index(other)


def _laid_out(x: Any, operand: Operand, batch: Sequence[Label], own: Label, heads: Sequence[Label]) -> Any:
    """An operand as [batch, queries or keys, heads, features]."""
    sizes = operand.sizes
    if any(a not in sizes for a in batch):
        raise Miss("its keys or values are shared along an axis before the heads")
    present = [a for a in operand.labels if a is not None]
    x = bnp.reshape(x, [sizes[a] for a in present])
    held = [a for a in heads if a in sizes]
    x = lax.transpose(x, [present.index(a) for a in (*batch, own, *held, FEATURES) if a in sizes])
    product = lambda axes: math.prod(sizes[a] for a in axes)
    return bnp.reshape(x, (product(batch), sizes.get(own, 1), product(held), sizes[FEATURES]))


def _unravelled(number: Any, axes: Sequence[Label], sizes: dict[Label, int]) -> dict[Label, Any]:
    """Unravel an index along merged axes into a position per axis."""
    positions: dict[Label, Any] = {}
    for n, a in reversed(list(enumerate(axes))):
        positions[a] = lax.rem(number, bnp.int32(sizes[a])) if n else number
        number = lax.div(number, bnp.int32(sizes[a])) if n else number
    return positions


def _hides(number: Any) -> bool:
    return math.isfinite(number) and float(number) <= HIDING  # which no float16 is


class _Scalars:
    """The values of points at one position along each axis.

    Args:
      env: the arrays that are read, by variable.
      positions: int32 indices by axis label.

    Attributes:
      known: computed values, and whether they depend on the score: those have its precision.
    """

    def __init__(self, graph: Graph, env: dict[Any, Any], positions: dict[Label, Any]):
        self.graph, self.env, self.positions = graph, env, positions
        self.known: dict[Point, tuple[Any, bool]] = {}

    def __call__(self, point: Point) -> Any:
        return self._value(point)[0]

    def _value(self, point: Point) -> tuple[Any, bool]:
        point = self.graph.moved(point)
        if point not in self.known:
            self.known[point] = self._computed(point)
        return self.known[point]

    def _computed(self, point: Point) -> tuple[Any, bool]:
        atom = point.atom
        if isinstance(atom, Literal):
            return atom.array, False
        producer, maker = self.graph.operands(point), self.graph.maker(atom)
        if producer is not None:
            return self._operation(*producer)
        if maker is not None and maker.prim is iota_p:
            place = point.places[maker.params["dimension"]]
            return bnp.asarray(self._position(place)).astype(maker.params["dtype"]), False
        table = self.env[self.graph.outward(atom)]
        return table[tuple(map(self._position, point.places))] if point.places else table, False

    def _operation(self, eqn: Eqn, operands: Sequence[Point]) -> tuple[Any, bool]:
        """Apply an operation; functions of the score keep the score's wider precision."""
        found = [self._value(p) for p in operands]
        if not any(of_score for _, of_score in found):
            return eqn.prim.bind(*[x for x, _ in found], **eqn.params), False
        if eqn.prim is ew.convert_p and dtypes.is_floating(eqn.params["dtype"]):
            return found[0]
        wide = next(x.dtype for x, of_score in found if of_score and dtypes.is_floating(x.dtype))
        if eqn.prim in (ew.select_p, ew.add_p):
            found = [
                (x if of_score else self._moderate(p, x), of_score)
                for p, (x, of_score) in zip(operands, found, strict=True)
            ]
        values = [x.astype(wide) if dtypes.is_floating(x.dtype) else x for x, _ in found]
        out = eqn.prim.bind(*values, **eqn.params)
        return out, dtypes.is_floating(out.dtype)

    def _moderate(self, point: Point, x: Any) -> Any:
        """A masking scalar, replaced by one that preserves sums if a row has no other."""
        known = two_valued(self.graph, point)
        number = self.graph.constant(point)
        if number is not None:
            return bnp.asarray(_LEAST, x.dtype) if _hides(number) else x
        if known is None or not (_hides(known.true) or _hides(known.false)):
            return x
        cases = [bnp.asarray(_LEAST if _hides(c) else c, x.dtype) for c in (known.true, known.false)]
        return bnp.where(self(known.condition), *cases)

    def _position(self, place: Place) -> Any:
        if place.label is None:
            return place.start
        position = self.positions[place.label]
        return position if place == Place(place.label) else position * place.stride + place.start
