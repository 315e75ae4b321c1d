"""Context parallelism: attention over sequences sharded over a mesh axis.

A face, for use inside ``shard_map``. In: this rank's queries, keys and values of every sequence. Out: its part of the
attention. Three routings of ``context_parallel_attention`` bring queries and keys together:

- ``all_gather``: each rank gathers all keys and values (Llama 3, arXiv:2407.21783, section 3.3.2);
- ``ring``: keys and values travel on a ring, one block at a time (Liu et al., arXiv:2310.01889);
- ``all_to_all``: ranks swap parts of sequences for heads (Ulysses, arXiv:2309.14509).

Causal attention requires the *zigzag* order: of 2n chunks rank i has those at i and 2n - 1 - i. Each rank then sees
exactly half of every other rank's block, so all ranks have equal work: from a preceding rank the first chunk of keys,
for both chunks of queries; from a following rank both chunks of keys, for its second chunk of queries. Either is two
chunk-by-chunk matmuls without a mask, one of which is always (second queries, first keys).

The first two routings share one custom derivative, by the formulas of FlashAttention-2 (arXiv:2307.08691): given the
results and log-sum-exps of whole rows, each block's gradients are independent. Residuals are this rank's data only:
keys and values travel again in the backward pass, and their cotangents travel home with them. Forward mode
differentiates the function directly, and second derivatives the rule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in
from blufunc.nn.attention.call import attention_grad_p, attention_p
from blufunc.nn.attention.dot_product import dot_product_attention
from blufunc.parallel.recipes.varying import Ring, ring_of
from blufunc.transforms.autodiff.grad import jvp
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

# -- the order of tokens ---------------------------------------------------------------------------


def zigzag_order(length: int, ranks: int) -> np.ndarray:
    """Zigzag order of tokens: rank i gets chunks i and 2n - 1 - i.

    Args:
      length: a multiple of twice the number of ranks.
      ranks: n, the size of the mesh axis.
    Returns:
      int32 [length], to shard ``tokens[:, order]``; ``np.argsort(order)`` is its inverse.
    Raises:
      ValueRangeError: ``ranks`` is below 1.
      ShapeError: the length does not divide.
    """
    if ranks < 1:
        raise errors.ValueRangeError(f"zigzag order for {ranks} ranks.", where=source.here(), fix="1 or more")
    if length % (2 * ranks):
        raise errors.ShapeError(
            f"{length} tokens cannot be split into two chunks for each of {ranks} ranks.",
            where=source.here(),
            fix=f"pad the sequence to a multiple of {2 * ranks}",
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * ranks, -1)
    pairs = np.stack([np.arange(ranks), 2 * ranks - 1 - np.arange(ranks)], 1)
    return chunks[pairs.ravel()].ravel()


def zigzag(x: ArrayLike, ranks: int, axis: int = 1) -> Array:
    """Reorder tokens along ``axis`` into ``zigzag_order``, outside ``shard_map``."""
    return _reordered(x, ranks, axis, lambda order: order)


def unzigzag(x: ArrayLike, ranks: int, axis: int = 1) -> Array:
    """The inverse of ``zigzag``."""
    return _reordered(x, ranks, axis, np.argsort)


def _reordered(x: Any, ranks: int, axis: int, of: Callable) -> Any:
    x = bnp.asarray(x)
    axis = axis_in(axis, x.ndim, "zigzag")
    return bnp.take(x, of(zigzag_order(x.shape[axis], ranks)).astype(np.int32), axis=axis)


def zigzag_positions(length: int, axis: str) -> Array:
    """Positions, int32 [length], of this rank's tokens in zigzag order."""
    n, half = lax.axis_size(axis), length // 2
    if length % 2:
        raise errors.ShapeError(
            f"zigzag order has two chunks per rank, and {length} tokens do not split into two.",
            where=source.here(),
        )
    i, within = lax.axis_index(axis), bnp.arange(half, dtype=dtypes.int32)
    return bnp.concatenate([i * half + within, (2 * n - 1 - i) * half + within])


# -- the function of users -------------------------------------------------------------------------


def context_parallel_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    axis: str,
    *,
    routing: str = "ring",
    is_causal: bool = False,
    scale: float | None = None,
) -> Array:
    """``nn.dot_product_attention`` of sharded sequences, inside ``shard_map``.

    Args:
      query: [B, T / n, N, H], this rank's part of T queries.
      key, value: [B, T / n, K, H] of the same dtype, where K divides N.
      axis: the mesh axis, of n ranks.
      routing: ``"all_gather"``, ``"ring"`` or ``"all_to_all"``. The last requires n to divide N and K, and sends about
        1 / n of the others' bytes if K is N; the ring needs the least memory, and its matmuls overlap with the block in
        transit.
      is_causal: mask later tokens. The sequence must then be in zigzag order (``zigzag``).
      scale: factor of the scores; default ``1 / sqrt(H)``.
    Returns:
      [B, T / n, N, H], in the dtype of ``query``, differentiable in both modes.
    Raises:
      ArgumentError: an unknown routing.
      AxisNameError: no such mesh axis.
      ShapeError, DtypeError: incompatible operands, or sizes that the routing cannot split.
    """
    if routing not in _ROUTINGS:
        raise errors.ArgumentError(
            f"context_parallel_attention: routing is one of {', '.join(_ROUTINGS)}, not {routing!r:.60}.",
            where=source.here(),
        )
    ring = ring_of(axis, "context_parallel_attention")
    n = ring.size
    query, key, value = bnp.asarray(query), bnp.asarray(key), bnp.asarray(value)
    _check(query, key, value, n, routing, is_causal)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if n == 1:
        return dot_product_attention(query, key, value, scale=scale, is_causal=is_causal)
    if routing == "all_to_all":
        return _by_heads(query, key, value, axis, scale=scale, is_causal=is_causal)
    return _by_blocks(query, key, value, ring, routing, scale, is_causal)


_ROUTINGS = ("all_gather", "ring", "all_to_all")


def _check(query: Any, key: Any, value: Any, n: int, routing: str, is_causal: bool) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"

    def fail(why: str, fix: str | None = None) -> None:
        raise errors.ShapeError(f"context_parallel_attention: {why}: {shapes}.", where=source.here(), fix=fix)

    if not query.ndim == key.ndim == value.ndim == 4 or tuple(key.shape) != tuple(value.shape):
        fail("operands are [batch, tokens, heads, features], with key and value of one shape")
    B, T, N, H = query.shape
    if key.shape[:2] != (B, T) or key.shape[3] != H or key.shape[2] == 0 or N % key.shape[2]:
        fail("each rank has as many keys as queries, and key heads divide the query heads")
    if not query.dtype == key.dtype == value.dtype or not dtypes.is_floating(query.dtype):
        raise errors.DtypeError(
            "context_parallel_attention takes operands of one floating dtype, not "
            f"{query.dtype}, {key.dtype} and {value.dtype}.",
            where=source.here(),
            fix="convert with .astype",
        )
    if is_causal and T % 2:
        fail("a rank has two chunks of each sequence", f"pad sequences to a multiple of {2 * n}")
    if routing == "all_to_all" and (N % n or key.shape[2] % n):
        fail(f"{n} ranks cannot share the heads evenly", "use routing='ring' or 'all_gather'")


# -- heads for sequences ---------------------------------------------------------------------------


def _by_heads(query: Any, key: Any, value: Any, axis: str, *, scale: float, is_causal: bool) -> Any:
    """Attend to whole sequences with this rank's heads, between two all-to-alls."""
    n, (B, t, N, H), K = lax.axis_size(axis), query.shape, key.shape[2]
    parts = [x.reshape(B, t, n, x.shape[2] // n, H) for x in (query, key, value)]
    x = lax.all_to_all(bnp.concatenate(parts, 3), axis, 2, 1)  # [B, ranks, t, heads of q, k and v / n, H]
    x = x.reshape(B, n * t, (N + 2 * K) // n, H)
    x = unzigzag(x, n) if is_causal else x
    q, k, v = bnp.split(x, (N // n, (N + K) // n), axis=2)
    out = dot_product_attention(q, k, v, scale=scale, is_causal=is_causal)
    out = zigzag(out, n) if is_causal else out
    return lax.all_to_all(out.reshape(B, n, t, N // n, H), axis, 1, 2).reshape(B, t, N, H)


# -- blocks of keys and values, one rank after another ---------------------------------------------


@functools.partial(custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _by_blocks(
    query: Any, key: Any, value: Any, ring: Ring, routing: str, scale: float, is_causal: bool
) -> Any:
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
    out, lse = _of_rows(attention_p, scale, is_causal, query, key, value)
    total = out.astype(lse.dtype), lse
    for distance, (k, v) in _blocks(ring, key, value, routing):
        halves = _Halves(ring, distance, is_causal)
        part, part_lse = _of_rows(
            attention_p, scale, False, halves.queries(query), halves.keys(k), halves.keys(v)
        )
        total = halves.merged(total, (part, part_lse))
    return total[0].astype(query.dtype), total[1]


def _backward(ring: Ring, routing: str, scale: float, is_causal: bool, residuals: tuple, ct: Any) -> tuple:
    query, key, value, out, lse = residuals
    accumulator = lse.dtype
    own = _of_rows(attention_grad_p, scale, is_causal, query, key, value, out, lse, ct)
    d_query, *d_own = (g.astype(accumulator) for g in own)
    home = _Home(ring, routing)
    for distance, (k, v) in _blocks(ring, key, value, routing):
        halves = _Halves(ring, distance, is_causal)
        dq, dk, dv = _of_rows(
            attention_grad_p, scale, False, halves.queries(query), halves.keys(k), halves.keys(v),
            halves.queries(out), halves.queries(lse, 2), halves.queries(ct),
        )  # fmt: skip
        d_query = d_query + halves.of_queries(dq.astype(accumulator))
        home.send(bnp.stack([halves.of_keys(g.astype(accumulator)) for g in (dk, dv)]))
    d_key, d_value = bnp.stack(d_own) + home.arrived()
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)


@functools.partial(custom_jvp, nondiff_argnums=(0, 1, 2))
def _of_rows(operation: Any, scale: float, is_causal: bool, *operands: Any) -> tuple:
    """Attention, or its backward pass, on one of the blocks of keys that rows see.

    The derivatives of ``operation`` assume rows that see one block: they ignore the cotangent of the log-sum-exp, and
    treat ``out`` and ``lse`` in the backward pass as functions of its other operands. Here all of these count.
    """
    return tuple(operation.at(*operands, scale=scale, is_causal=is_causal))


@_of_rows.defjvp
def _tangents_of_rows(
    operation: Any, scale: float, is_causal: bool, primals: tuple, tangents: tuple
) -> tuple:
    spelled_out = functools.partial(operation.spelled_out, scale=scale, is_causal=is_causal)
    _, of_results = jvp(lambda *operands: tuple(spelled_out(*operands)), primals, tangents)
    return _of_rows(operation, scale, is_causal, *primals), of_results


_by_blocks.defvjp(_forward, _backward, forward_mode=True)


def _blocks(ring: Ring, key: Any, value: Any, routing: str) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """Keys and values of the preceding ranks on the ring, at distance 1 to n - 1."""
    both = bnp.stack([key, value])
    if routing == "all_gather":
        everyone = ring.gather(both)
    for distance in range(1, ring.size):
        if routing == "ring":
            both = ring.permute(both, ring.following())
        else:
            both = lax.dynamic_index_in_dim(everyone, (ring.rank() - distance) % ring.size, 0, keepdims=False)
        yield distance, (both[0], both[1])


class _Home:
    """Sends cotangents of other ranks' blocks, in ``_blocks`` order, to their owners."""

    def __init__(self, ring: Ring, routing: str):
        self.ring, self.routing = ring, routing
        self._found: list[Any] = []

    def send(self, d: Any) -> None:
        """Send the cotangent of the next block."""
        if self.routing == "ring" and self._found:  # with the block, which moved on by one rank
            d = self.ring.permute(self._found.pop(), self.ring.following()) + d
        self._found.append(d)

    def arrived(self) -> Any:
        """The sum of the cotangents that other ranks sent to this one."""
        if self.routing == "ring":
            return self.ring.permute(self._found[0], self.ring.following())
        ring = self.ring
        by_distance = bnp.stack([bnp.zeros_like(self._found[0]), *self._found])
        ranks = (ring.rank() - bnp.arange(ring.size, dtype=dtypes.int32)) % ring.size
        return ring.scatter_sum(bnp.take(by_distance, ranks, axis=0))


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
            return _merged(total, part)
        (out_1, out_2), (lse_1, lse_2) = bnp.split(total[0], 2, axis=1), bnp.split(total[1], 2, axis=2)
        (out_a, out_b), (lse_a, lse_b) = bnp.split(part[0], 2), bnp.split(part[1], 2)
        out_2, lse_2 = _merged((out_2, lse_2), (out_a, lse_a))
        chosen = bnp.where(self.earlier, out_1, out_2), bnp.where(self.earlier, lse_1, lse_2)
        out, lse = _merged(chosen, (out_b, lse_b))
        where = functools.partial(bnp.where, self.earlier)
        outs, lses = (where(out, out_1), where(out_2, out)), (where(lse, lse_1), where(lse_2, lse))
        return bnp.concatenate(outs, 1), bnp.concatenate(lses, 2)


def _merged(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Merge attention to two sets of keys, weighted by their sums of exponentials."""
    lse = bnp.logaddexp(one[1], other[1])
    first, second = (bnp.moveaxis(bnp.exp(x[1] - lse), 1, 2)[..., None] for x in (one, other))
    return one[0] * first + other[0] * second, lse
