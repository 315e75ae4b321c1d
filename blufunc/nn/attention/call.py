"""Attention as one operation: the primitives of ``dot_product_attention``.

A face, below ``dot_product.py``. An equation holds its definition as a jaxpr, for transforms without a better
rule and for devices without a kernel: compilers inline it. The primitives:

    attention             query, key, value, *extras -> out, lse
    attention_tangent     the tangent of ``out``, linear in those of query, key, value and tables
    attention_grad        query, key, value, out, lse, cotangent of out, *extras -> those of query, key and value
    attention_table_grad  query, key, value, cotangent of out, *extras -> those of some tables

The transpose of the second is the third: reverse mode is one kernel after the other, and the weights of all
pairs are never stored. ``lse`` [B, N, T] is the logsumexp of each row of scores; only ``attention_grad``
reads it, so it has no tangent. Axes as in ``dot_product.py``.

With ``mods``, functions of single scores and pairs (``mods.py``), the **extras** are the indices of the batch
entries int32 [B], those of the query heads int32 [N], and the tables of the functions; else there are none.
Learnt tables get their gradient from ``attention_table_grad``, the differentiated definition.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var, trace_scope
from blufunc.core.primitives.linear_ops import move_dim
from blufunc.core.primitives.sharding import Rule
from blufunc.core.primitives.tangents import Zero, is_linear
from blufunc.nn.activations import softmax, wide_of
from blufunc.nn.attention.mods import Mods, Pairs, modified, seen
from blufunc.transforms.autodiff.grad import vjp
from blufunc.transforms.control_flow.calls import Call, jit_p
from blufunc.transforms.control_flow.composite import Composite, staged

MASKED = -0.7 * 3.4028234663852886e38
"""The score of masked pairs: finite, so that a row without keys yields no NaN."""


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    scale: float,
    is_causal: bool,
    mods: Mods | None = None,
    tables: Sequence[Any] = (),
) -> tuple[Any, Any]:
    """``softmax(query @ key.T * scale) @ value`` as one operation, and the logsumexps.

    Args:
      query: [B, T, N, H].
      key, value: [B, S, K, H].
      mods, tables: mask and score functions, and the arrays that they read.
    Returns:
      the result, and the logsumexp of each row of scores, float32 at least [B, N, T].
    """
    how: dict[str, Any] = {"scale": scale, "is_causal": is_causal}
    if mods is None:
        out, lse = attention_p.at(query, key, value, **how)
        return out, lse
    B, _, N, _ = query.shape
    numbers = [bnp.arange(n, dtype=dtypes.int32) for n in (B, N)]
    out, lse = attention_p.at(query, key, value, *numbers, *tables, **how, mods=mods)
    return out, lse


# -- definitions -----------------------------------------------------------------------------------


def weighed(scores: Any, value: Any) -> Any:
    """``softmax(scores) @ value`` [B, T, N, H], of [B, K, T, S] or [B, K, T, G, S]."""
    return _summed(softmax(scores), value)


def _summed(weights: Any, value: Any) -> Any:
    """``weights @ value`` as [B, T, N, H]."""
    weights = weights.astype(value.dtype)
    out = lax.dot_general(weights, value, (((weights.ndim - 1,), (1,)), ((0, 1), (0, 2))))
    return _joined(out)


def scores_of(query: Any, key: Any, scale: Any) -> Any:
    """``query @ key.T * scale``, float32 at least: [B, K, T, S] or [B, K, T, G, S]."""
    wide = wide_of(query)
    if query.dtype == wide:  # cheaper than scaling the scores, but half precisions would be rounded twice
        query = query * scale
    query = divided(query, key.shape[2])
    last = query.ndim - 1
    scores = lax.dot_general(query, key, (((last,), (3,)), ((0, 2), (0, 2))), preferred_element_type=wide)
    return scores if query.dtype == wide else scores * scale


def causal(T: int, S: int) -> Any:
    """The causal mask [T, S]: a query sees the keys up to its own position."""
    queries, keys = (lax.broadcasted_iota(dtypes.int32, (T, S), axis) for axis in (0, 1))
    return queries >= keys


def divided(x: Any, K: int) -> Any:
    """[B, T, N, H] as [B, T, K, G, H] where several heads share a key head."""
    B, T, N, H = x.shape
    return x if N == K else bnp.reshape(x, (B, T, K, N // K, H))


def _joined(x: Any) -> Any:
    """[B, K, T, H] or [B, K, T, G, H] as [B, T, N, H]."""
    x = bnp.moveaxis(x, 1, 2)
    return bnp.reshape(x, (*x.shape[:2], math.prod(x.shape[2:-1]), x.shape[-1]))


def _counting(scores: Any, queries: int, extras: Sequence[Any], is_causal: bool, mods: Mods | None) -> Any:
    """Scores after masks and score functions, as input of the softmax."""
    if mods is None:
        # Adding is cheaper than selecting, and has no backward pass. It is right because every query sees a
        # key: probabilities of 0 stop the gradient.
        return (
            scores + _like(bnp.where(_causal(scores, queries), bnp.zeros((), scores.dtype), MASKED), scores)
            if is_causal
            else scores
        )
    batch, heads, *tables = extras
    pairs = Pairs(batch, heads, queries, scores.shape[-1], scores.shape[1])
    parts = [seen(mods, tables, pairs), _causal(scores, queries) if is_causal else None]
    visible = [part for part in parts if part is not None]
    if mods.score is not None:
        for each in visible:  # otherwise a non-finite derivative at masked pairs would propagate, as 0 * NaN
            scores = bnp.where(_like(each, scores), scores, 0)
        scores = modified(mods, tables, pairs, scores)
    for each in visible:
        scores = bnp.where(_like(each, scores), scores, -math.inf)
    return scores


def _causal(scores: Any, queries: int) -> Any:
    """``causal``, broadcastable to the scores."""
    visible = causal(queries, scores.shape[-1])
    return visible if scores.ndim == 4 else visible[:, None]


def _like(x: Any, scores: Any) -> Any:
    """``x`` with the shape of the scores, whatever ``numpy_rank_promotion`` allows."""
    return bnp.broadcast_to(x, scores.shape)


def _forward(
    query: Any, key: Any, value: Any, *extras: Any, scale: float, is_causal: bool, mods: Mods | None = None
) -> list[Any]:
    scores = _counting(scores_of(query, key, scale), query.shape[1], extras, is_causal, mods)
    top = lax.stop_gradient(bnp.max(scores, -1, keepdims=True))
    if mods is None:
        lse = bnp.squeeze(top, -1) + bnp.log(bnp.sum(bnp.exp(scores - top), -1))  # [B, K, T] or [B, K, T, G]
        return [weighed(scores, value), _of_queries(lse, query)]
    # a fully masked row has maximum -inf and sum 0: it yields zeros, or NaN
    top = bnp.where(top == -math.inf, 0, top)
    weights = bnp.exp(scores - top)
    total = bnp.sum(weights, -1, keepdims=True)
    some = bnp.where(total > 0, total, 1)
    lse = bnp.squeeze(bnp.where(total > 0, top + bnp.log(some), -math.inf), -1)
    if mods.blind_is_nan:
        some = bnp.where(total > 0, total, math.nan)
    return [_summed(weights / some, value), _of_queries(lse, query)]


def _of_queries(lse: Any, query: Any) -> Any:
    """One value per row of scores, as [B, N, T]."""
    if lse.ndim == 3:
        return lse
    return bnp.reshape(bnp.moveaxis(lse, 3, 2), (lse.shape[0], query.shape[2], query.shape[1]))


def _backward(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    ct: Any,
    *extras: Any,
    scale: float,
    is_causal: bool,
    mods: Mods | None = None,
) -> list[Any]:
    """Cotangents from recomputed weights, as in FlashAttention-2 (arXiv:2307.08691)."""
    products = scores_of(query, key, scale)
    if mods is None or mods.score is None:
        scores, pull = _counting(products, query.shape[1], extras, is_causal, mods), None
    else:
        count = functools.partial(
            _counting, queries=query.shape[1], extras=extras, is_causal=is_causal, mods=mods
        )
        scores, pull = vjp(count, products)
    wide, low, K = scores.dtype, value.dtype, key.shape[2]

    def by_row(x: Any) -> Any:  # [B, N, T] as one value per row of scores
        B, N, T = x.shape
        x = x if N == K else bnp.moveaxis(bnp.reshape(x, (B, K, N // K, T)), 2, 3)
        return bnp.expand_dims(x, -1)

    if mods is not None:  # a fully masked row has the weights exp(-inf)
        lse = bnp.where(lse == -math.inf, 0, lse)
    delta = bnp.moveaxis(bnp.sum(ct.astype(wide) * out.astype(wide), -1), 1, 2)
    weights = bnp.exp(scores - by_row(lse))
    ct, query = divided(ct, K), divided(query, K)
    heads = ((0, 1), (0, 2))
    rows = tuple(range(2, scores.ndim - 1)), tuple(d for d in range(1, ct.ndim - 1) if d != 2)
    d_value = lax.dot_general(weights.astype(low), ct, (rows, heads))
    of_key = (((ct.ndim - 1,), (3,)), ((0, 2), (0, 2)))
    d_weights = lax.dot_general(ct, value, of_key, preferred_element_type=wide)
    d_scores = weights * (d_weights - by_row(delta))
    if pull is not None:
        (d_scores,) = pull(d_scores)
    d_scores = (d_scores * scale).astype(low)
    d_query = lax.dot_general(d_scores, key, (((scores.ndim - 1,), (1,)), heads))
    d_key = lax.dot_general(d_scores, query, (rows, heads))
    return [_joined(d_query), bnp.moveaxis(d_key, 1, 2), bnp.moveaxis(d_value, 1, 2)]


def _reference_backward(query: Any, key: Any, value: Any, ct: Any, *extras: Any, **how: Any) -> Sequence[Any]:
    """The same from the operands alone, for derivatives of the backward pass."""
    _, pull = vjp(lambda *operands: _forward(*operands, *extras, **how)[0], query, key, value)
    return pull(ct)


def _table_gradient(
    query: Any, key: Any, value: Any, ct: Any, *extras: Any, wanted: tuple[int, ...], **how: Any
) -> Sequence[Any]:
    """The cotangents of the extras at ``wanted``; stores the scores of all pairs."""

    def of_wanted(*tables: Any) -> Any:
        operands = list(extras)
        for i, table in zip(wanted, tables, strict=True):
            operands[i] = table
        return _forward(query, key, value, *operands, **how)[0]

    _, pull = vjp(of_wanted, *[extras[i] for i in wanted])
    return pull(ct)


# -- primitives ------------------------------------------------------------------------------------
# ``how`` are the parameters scale and is_causal, and mods if there are any.


class _Whole(Composite):
    """A composite of queries, keys and values."""

    def spelled_out(self, *args: Any, **how: Any) -> Sequence[Any]:
        """The definition as separate operations, differentiable in all operands."""
        return type(self).definition(*args, **how)

    def evaluate(self, args, params):
        """Evaluate as a program of one equation, so that a device may use its kernel."""
        jaxpr: Jaxpr = params["jaxpr"]

        def alone() -> Jaxpr:
            ins, outs = [Var(v.aval) for v in jaxpr.invars], [Var(a.strong()) for a in jaxpr.out_avals]
            return Jaxpr(ins, [Eqn(self, ins, outs, params, None)], outs, name=self.name)

        return super().evaluate(args, {**params, "jaxpr": jaxpr.memoised("alone", alone)})

    def batch(self, axis, args, dims, *, jaxpr, **how):
        """Examples extend the batch; its entries keep their indices."""
        tables = self.whole + 2  # position of the first table, after the index arrays
        if any(d is not None for d in dims[tables:]):
            return jit_p.batch(axis, args, dims, jaxpr=jaxpr, name=self.name)
        n = axis.size
        moved = [
            bnp.broadcast_to(a, (n, *a.aval.shape)) if d is None else move_dim(a, d, 0)
            for a, d in zip(args[: self.whole], dims, strict=False)
        ]
        flat = [bnp.reshape(a, (n * a.shape[1], *a.shape[2:])) for a in moved]
        if len(args) > self.whole:
            batch, heads, *rest = args[self.whole :]
            flat += [bnp.tile(batch, n), heads, *rest]
        outs = self.at(*flat, **how)
        examples = moved[0].shape[1]
        return [bnp.reshape(o, (n, examples, *o.shape[1:])) for o in outs], [0] * len(outs)

    def autocast(self, cells, dtype, *, jaxpr, **how):
        """Mixed precision: all operands but statistics and extras are low."""
        args = [
            c.traced() if i == self.statistic or i >= self.whole else c.cast(dtype)
            for i, c in enumerate(cells)
        ]
        return self.at(*args, **how)

    statistic: int | None = None
    """The position of the operand ``lse``."""

    whole: int
    """The number of operands before the extras."""

    def shard(self, avals, outs, **params) -> Rule:
        """Sequences are independent, and so are heads, or groups that share a key head.

        Tables are replicated: the entries that are read are unknown.
        """
        B, _, N, _ = avals[0].shape
        K = avals[1].shape[2]
        batch, heads, shared = (0,), (1,), (1, 2) if N != K else (1,)
        sizes = (B, K, N // K)
        key, query = (batch, (), heads, ()), (batch, (), shared, ())
        lse = (batch, shared, ())
        operands: tuple = (query, key, key, query, lse, query)[: self.whole]
        if len(avals) > self.whole:
            operands += ((batch,), (shared,), *(((),) * a.ndim for a in avals[self.whole + 2 :]))
        results = (query, lse) if self is attention_p else (query, key, key)
        return Rule(operands, results, sizes, params=self.restaged(avals))


class _AttentionTangent(_Whole):
    name = "attention_tangent"

    def transpose(self, cts, *args, jaxpr, nonzeros, **how):
        (ct,) = cts
        if ct.__class__ is Zero:
            return
        n = len(nonzeros)
        primals, (out, lse), linear = args[:n], args[n : n + 2], args[n + 2 :]
        (query, key, value), extras = primals[:3], primals[3:]
        cotangents = dict(zip([i for i, nonzero in enumerate(nonzeros) if nonzero], linear, strict=True))
        unknown = [i for i, a in cotangents.items() if is_linear(a)]
        if any(i < 3 for i in unknown):
            grads = attention_grad_p.at(query, key, value, out, lse, ct, *extras, **how)
            for i in unknown:
                if i < 3:
                    cotangents[i].add(grads[i])
        of_extras = [i for i in unknown if i >= 3]
        if of_extras:
            operands = [query, key, value, ct, *extras]
            avals = tuple([a.aval.strong() for a in operands])
            places = tuple([i - 3 for i in of_extras])
            body = staged(_table_gradient, avals, True, trace_scope(), wanted=places, **how)
            grads = attention_table_grad_p.bind(*operands, jaxpr=body)
            for i, grad in zip(of_extras, grads, strict=True):
                cotangents[i].add(grad)

    batch = Call.batch  # operand types do not determine the batching
    shard = None  # type: ignore[assignment]  # likewise: its body is divided
    autocast = None  # type: ignore[assignment]


class _Attention(_Whole):
    name, definition, whole, tangent, of_results = "attention", _forward, 3, _AttentionTangent(), True


class _AttentionGrad(_Whole):
    name, definition, statistic, whole, recomputed = "attention_grad", _backward, 4, 6, True
    linearize = None  # type: ignore[assignment]

    def jvp(self, primals, tangents, *, jaxpr, **how):
        """The unchanged value; tangents of the reference, which lacks ``out`` and ``lse``."""
        outs = self.bind(*primals, jaxpr=jaxpr, **how)
        chosen = [i for i in range(len(primals)) if i not in (3, 4)]
        avals = tuple([primals[i].aval.strong() for i in chosen])
        reference = staged(_reference_backward, avals, True, trace_scope(), **how)
        _, out_tangents = jit_p.jvp(
            [primals[i] for i in chosen], [tangents[i] for i in chosen], jaxpr=reference, name=self.name
        )
        return outs, out_tangents


class _AttentionTableGrad(Call):
    """A call of ``_table_gradient``, named so that ``explain`` can report it."""

    name, recomputed = "attention_table_grad", True


attention_p, attention_grad_p = _Attention(), _AttentionGrad()
attention_table_grad_p = _AttentionTableGrad()
