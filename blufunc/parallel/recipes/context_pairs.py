"""Attention of sharded sequences with functions of pairs of global positions.

Used by ``context_parallel.py``. The tokens of a rank are C chunks of the sequence: one in natural order, two in zigzag
order. With the C chunks of another rank's block they make C * C pairs, which are entries of the batch of one attention
operation; its functions shift the indices of queries and keys by the first positions of their chunks. These depend on
the entry alone, so a kernel decides whole tiles of a causal or windowed mask and skips what is masked.

The derivative is that of ``context_halves.py``, with one for the arrays that a score function reads. A row that sees no
key of a block has the log-sum-exp -inf there and adds nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir import dtypes
from blufunc.nn.activations import wide_of
from blufunc.nn.attention.call import attention_grad_p, attention_p
from blufunc.nn.attention.mods import Mods, traced
from blufunc.parallel.recipes.context_blocks import Home, Scores, blocks, merged, of_rows
from blufunc.parallel.recipes.varying import Ring
from blufunc.transforms.autodiff.grad import vjp
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp


def attend_by_pairs(
    query: Any,
    key: Any,
    value: Any,
    ring: Ring,
    *,
    routing: str,
    scale: float,
    chunks: int,
    reach: int,
    mask_mod: Callable | None,
    score_mod: Callable | None,
) -> Any:
    """Attention of this rank's queries to keys of all ranks.

    Args:
      query, key, value: this rank's part, [B, T, N, H] and [B, T, K, H].
      ring: the ranks.
      routing: ``"ring"`` or ``"all_gather"``.
      scale: factor of the scores.
      chunks: C: 1 for the natural order, 2 for zigzag.
      reach: the number of preceding ranks whose keys the queries may see.
      mask_mod, score_mod: functions of batch entry, head, and positions in the sequence.
    """
    B, length = query.shape[0], query.shape[1] // chunks
    rank, total = lax.axis_index(ring.axis), ring.size * query.shape[1]

    def starts(rank: Any) -> Callable:
        """The first positions of a rank's chunks, as a function of the chunk."""
        first, last = rank * length, (2 * ring.size - 1 - rank) * length

        def at(chunk: Any) -> Any:
            start = first if chunks == 1 else lax.select(chunk == 0, first, last)
            return lax.clamp(0, start, total)  # no change; says that positions do not wrap around

        return at

    def placed(fun: Callable | None, distance: int) -> Callable | None:
        queries, keys = starts(rank), starts((rank - distance) % ring.size)

        def at(b: Any, h: Any, q: Any, k: Any) -> tuple:
            pair, entry = lax.div(b, B), lax.rem(b, B)
            return entry, h, queries(lax.div(pair, chunks)) + q, keys(lax.rem(pair, chunks)) + k

        return None if fun is None else lambda *args: fun(*args[:-4], *at(*args[-4:]))

    of_blocks = [traced(placed(mask_mod, d), placed(score_mod, d), wide_of(query)) for d in range(reach + 1)]
    how = _How(ring, routing, scale, chunks, tuple([mods for mods, _ in of_blocks]))
    return _attention(query, key, value, tuple([tables for _, tables in of_blocks]), how)


@dataclass(frozen=True)
class _How:
    """The static parameters of an attention.

    Attributes:
      mods: the functions for each distance on the ring, from this rank on.
    """

    ring: Ring
    routing: str
    scale: float
    chunks: int
    mods: tuple[Mods | None, ...]

    def every(self, key: Any, value: Any) -> list[tuple[int, tuple[Any, Any]]]:
        """The blocks, this rank's first."""
        others = blocks(self.ring, key, value, self.routing, len(self.mods) - 1)
        return [(0, (key, value)), *others]

    def scores(self, distance: int) -> Scores:
        return Scores(self.scale, mods=self.mods[distance])

    def divided(self, x: Any, dim: int = 1) -> Any:
        """``x``, with tokens along ``dim``, as [C, ...]."""
        shape = x.shape
        parts = bnp.reshape(x, (*shape[:dim], self.chunks, shape[dim] // self.chunks, *shape[dim + 1 :]))
        return bnp.moveaxis(parts, dim, 0)

    def joined(self, x: Any, dim: int = 1) -> Any:
        """The inverse of ``divided``."""
        x = bnp.moveaxis(x, 0, dim)
        return bnp.reshape(x, (*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]))

    def queries(self, x: Any, dim: int = 1) -> Any:
        """Arrays along queries as entries of the batch, one for each chunk of keys."""
        return self._paired(bnp.expand_dims(self.divided(x, dim), 1))

    def keys(self, x: Any) -> Any:
        """Keys or values as entries of the batch."""
        return self._paired(bnp.expand_dims(self.divided(x), 0))

    def _paired(self, x: Any) -> Any:
        C = self.chunks
        x = bnp.broadcast_to(x, (C, C, *x.shape[2:]))
        return bnp.reshape(x, (C * C * x.shape[2], *x.shape[3:]))

    def pairs(self, x: Any) -> Any:
        """Results of entries as [chunks of queries, chunks of keys, B, ...]."""
        C = self.chunks
        return bnp.reshape(x, (C, C, x.shape[0] // (C * C), *x.shape[1:]))

    def indices(self, query: Any) -> list[Any]:
        """The indices of entries and heads that the functions get."""
        sizes = self.chunks**2 * query.shape[0], query.shape[2]
        return [bnp.arange(n, dtype=dtypes.int32) for n in sizes]


@functools.partial(custom_vjp, nondiff_argnums=(4,))
def _attention(query: Any, key: Any, value: Any, tables: tuple, how: _How) -> Any:
    return _attend(query, key, value, tables, how)[0]


def _forward(query: Any, key: Any, value: Any, tables: tuple, how: _How) -> tuple:
    out, lse = _attend(query, key, value, tables, how)
    return out, (query, key, value, tables, out, lse)


def _attend(query: Any, key: Any, value: Any, tables: tuple, how: _How) -> tuple[Any, Any]:
    """Result [B, T, N, H], and log-sum-exp of each row of scores [B, N, T]."""
    queries, indices, total = how.queries(query), how.indices(query), None
    for distance, (k, v) in how.every(key, value):
        parts = of_rows(
            attention_p, how.scores(distance), queries, how.keys(k), how.keys(v), *indices, *tables[distance]
        )
        outs, lses = (how.pairs(x) for x in parts)
        for i in range(how.chunks):
            part = outs[:, i].astype(lses.dtype), lses[:, i]
            total = part if total is None else merged(total, part, blind=True)
    assert total is not None
    return how.joined(total[0]).astype(query.dtype), how.joined(total[1], 2)


def _backward(how: _How, residuals: tuple, ct: Any) -> tuple:
    query, key, value, tables, out, lse = residuals
    wide, indices, home, of_tables = lse.dtype, how.indices(query), Home(how.ring, how.routing), []
    of_rows_alone = [how.queries(query), how.queries(out), how.queries(lse, 2), how.queries(ct)]
    d_query: Any = 0
    d_own: Any = None
    for distance, (k, v) in how.every(key, value):
        queries, *statistics = of_rows_alone
        operands, scores = (queries, how.keys(k), how.keys(v)), how.scores(distance)
        dq, dk, dv = (
            how.pairs(d).astype(wide)
            for d in of_rows(attention_grad_p, scores, *operands, *statistics, *indices, *tables[distance])
        )
        d_query = d_query + bnp.sum(dq, 1)
        d_block = bnp.stack([how.joined(bnp.sum(d, 0)) for d in (dk, dv)])
        if distance:
            home.send(d_block)
        else:
            d_own = d_block
        of_tables.append(_of_tables(scores, operands, statistics, indices, tables[distance]))
    d_key, d_value = home.added_to(d_own)
    cts = how.joined(d_query), d_key, d_value
    return *[d.astype(x.dtype) for d, x in zip(cts, (query, key, value), strict=True)], tuple(of_tables)


def _of_tables(
    scores: Scores, operands: Sequence[Any], statistics: Sequence[Any], indices: Sequence[Any], tables: tuple
) -> tuple:
    """Cotangents of the tables from one block, None of integers.

    The row's result is the sum over blocks of exp(lse of the block - lse) times the block's result; its derivative
    gives the cotangents of both. Stores the scores of all pairs of the block; dead code unless a table is learnt.
    """
    floats = [i for i, table in enumerate(tables) if dtypes.is_floating(table.dtype)]
    cotangents: list[Any] = [None] * len(tables)
    if not floats:
        return tuple(cotangents)

    def of_floats(*chosen: Any) -> tuple:
        held = list(tables)
        for i, table in zip(floats, chosen, strict=True):
            held[i] = table
        return tuple(attention_p.spelled_out(*operands, *indices, *held, **scores.params))

    out, lse, ct = statistics
    (part, part_lse), pull = vjp(of_floats, *[tables[i] for i in floats])
    of = bnp.where(lse == -math.inf, 0, lse)
    weight = bnp.swapaxes(bnp.exp(part_lse - of), 1, 2)
    ct = ct.astype(lse.dtype)
    d_lse = bnp.sum(ct * (part.astype(lse.dtype) - out.astype(lse.dtype)), -1) * weight
    grads = pull(((ct * weight[..., None]).astype(part.dtype), bnp.swapaxes(d_lse, 1, 2)))
    for i, grad in zip(floats, grads, strict=True):
        cotangents[i] = grad
    return tuple(cotangents)


_attention.defvjp(_forward, _backward, forward_mode=True)
