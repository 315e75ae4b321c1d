"""Attention of sharded sequences to all keys, or causal in zigzag order.

Used by ``context_parallel.py``. Without a mask each rank's queries see all of another rank's block. With a causal one,
and tokens in zigzag order, they see half of it: from a preceding rank the first chunk of keys, for both chunks of
queries; from a following rank both chunks of keys, for the second chunk of queries. Either is two chunk-by-chunk
matmuls without a mask, one of which is always (second queries, first keys), so all ranks run one program without
branches.

The derivative is custom, by the formulas of FlashAttention-2 (arXiv:2307.08691): given the results and log-sum-exps of
whole rows, each block's gradients are independent. Residuals are this rank's data only: keys and values travel again in
the backward pass, and their cotangents travel home with them. Forward mode differentiates the function directly, and
second derivatives the rule.
"""

from __future__ import annotations

import functools
from typing import Any

import blufunc.numpy as bnp
from blufunc.nn.attention.call import attention_grad_p, attention_p
from blufunc.parallel.recipes.context_blocks import Home, Scores, blocks, merged, of_rows
from blufunc.parallel.recipes.varying import Ring
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp


@functools.partial(custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def attend_by_halves(
    query: Any, key: Any, value: Any, ring: Ring, routing: str, scale: float, is_causal: bool
) -> Any:
    """Attention of this rank's queries to all ranks' keys: [B, T, N or K, H]."""
    out, _ = _attend(query, key, value, ring, routing, scale, is_causal)
    return out


def _forward(
    query: Any, key: Any, value: Any, ring: Ring, routing: str, scale: float, is_causal: bool
) -> tuple:
    out, lse = _attend(query, key, value, ring, routing, scale, is_causal)
    return out, (query, key, value, out, lse)


def _attend(
    query: Any, key: Any, value: Any, ring: Ring, routing: str, scale: float, is_causal: bool
) -> tuple[Any, Any]:
    """Result [B, T, N, H], and log-sum-exp of each row of scores [B, N, T]."""
    out, lse = of_rows(attention_p, Scores(scale, is_causal), query, key, value)
    total = out.astype(lse.dtype), lse
    for distance, (k, v) in blocks(ring, key, value, routing, ring.size - 1):
        halves = _Halves(ring, distance, is_causal)
        part, part_lse = of_rows(
            attention_p, Scores(scale), halves.queries(query), halves.keys(k), halves.keys(v)
        )
        total = halves.merged(total, (part, part_lse))
    return total[0].astype(query.dtype), total[1]


def _backward(ring: Ring, routing: str, scale: float, is_causal: bool, residuals: tuple, ct: Any) -> tuple:
    query, key, value, out, lse = residuals
    accumulator = lse.dtype
    own = of_rows(attention_grad_p, Scores(scale, is_causal), query, key, value, out, lse, ct)
    d_query, *d_own = (g.astype(accumulator) for g in own)
    home = Home(ring, routing)
    for distance, (k, v) in blocks(ring, key, value, routing, ring.size - 1):
        halves = _Halves(ring, distance, is_causal)
        dq, dk, dv = of_rows(
            attention_grad_p, Scores(scale), halves.queries(query), halves.keys(k), halves.keys(v),
            halves.queries(out), halves.queries(lse, 2), halves.queries(ct),
        )  # fmt: skip
        d_query = d_query + halves.of_queries(dq.astype(accumulator))
        home.send(bnp.stack([halves.of_keys(g.astype(accumulator)) for g in (dk, dv)]))
    d_key, d_value = home.added_to(bnp.stack(d_own))
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)


attend_by_halves.defvjp(_forward, _backward, forward_mode=True)


class _Halves:
    """The interacting parts of queries and of a block ``distance`` ranks away.

    Without causality, all of them. With it, two pairs of chunks, as described above: the second queries with the first
    keys; and, if the block's rank precedes or follows this one, both first or both second chunks.
    """

    def __init__(self, ring: Ring, distance: int, is_causal: bool):
        self.earlier = ring.rank() >= distance if is_causal else None

    def queries(self, x: Any, dim: int = 1) -> Any:
        """The part of ``x``, with queries along ``dim``, that attends to ``keys``."""
        if self.earlier is None:
            return x
        first, second = bnp.split(x, 2, axis=dim)
        return bnp.concatenate([second, bnp.where(self.earlier, first, second)])

    def keys(self, x: Any) -> Any:
        """The visible part of keys or values [B, T, K, H]."""
        if self.earlier is None:
            return x
        first, second = bnp.split(x, 2, axis=1)
        return bnp.concatenate([first, bnp.where(self.earlier, first, second)])

    def of_queries(self, d: Any) -> Any:
        """The transpose of ``queries``."""
        if self.earlier is None:
            return d
        a, b = bnp.split(d, 2)
        return bnp.concatenate([bnp.where(self.earlier, b, 0), bnp.where(self.earlier, a, a + b)], 1)

    def of_keys(self, d: Any) -> Any:
        """The transpose of ``keys``."""
        if self.earlier is None:
            return d
        a, b = bnp.split(d, 2)
        return bnp.concatenate([bnp.where(self.earlier, a + b, a), bnp.where(self.earlier, 0, b)], 1)

    def merged(self, total: tuple[Any, Any], part: tuple[Any, Any]) -> tuple[Any, Any]:
        """Merge a ``part`` of the queries into ``total``, of all rows."""
        if self.earlier is None:
            return merged(total, part)
        (out_1, out_2), (lse_1, lse_2) = bnp.split(total[0], 2, axis=1), bnp.split(total[1], 2, axis=2)
        (out_a, out_b), (lse_a, lse_b) = bnp.split(part[0], 2), bnp.split(part[1], 2)
        out_2, lse_2 = merged((out_2, lse_2), (out_a, lse_a))
        chosen = bnp.where(self.earlier, out_1, out_2), bnp.where(self.earlier, lse_1, lse_2)
        out, lse = merged(chosen, (out_b, lse_b))
        where = functools.partial(bnp.where, self.earlier)
        outs, lses = (where(out, out_1), where(out_2, out)), (where(lse, lse_1), where(lse_2, lse))
        return bnp.concatenate(outs, 1), bnp.concatenate(lses, 2)
