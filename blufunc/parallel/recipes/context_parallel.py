"""Context parallelism: attention over sequences sharded over a mesh axis.

A face, for use inside ``shard_map``. In: this rank's queries, keys and values of every sequence. Out: its part of the
attention. Three routings of ``context_parallel_attention`` bring queries and keys together:

- ``all_gather``: each rank gathers all keys and values (Llama 3, arXiv:2407.21783, section 3.3.2);
- ``ring``: keys and values travel on a ring, one block at a time (Liu et al., arXiv:2310.01889);
- ``all_to_all``: ranks swap parts of sequences for heads (Ulysses, arXiv:2309.14509).

Blocks are attended to by ``context_halves.py``, or with functions of pairs by ``context_pairs.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.nn import masks
from blufunc.nn.attention.dot_product import dot_product_attention
from blufunc.parallel.recipes.context_halves import attend_by_halves
from blufunc.parallel.recipes.context_pairs import attend_by_pairs
from blufunc.parallel.recipes.token_order import unzigzag, zigzag
from blufunc.parallel.recipes.varying import ring_of

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

_ROUTINGS = ("all_gather", "ring", "all_to_all")
_ORDERS = ("contiguous", "zigzag")


def context_parallel_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    axis: str,
    *,
    routing: str = "ring",
    order: str | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    mask_mod: Callable | None = None,
    score_mod: Callable | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
) -> Array:
    """``nn.dot_product_attention`` of sharded sequences, inside ``shard_map``.

    ``mask_mod`` and ``score_mod`` get the positions of query and key in the whole sequence, whatever the order of
    tokens, and the indices of this rank's batch entry and query head. Arrays that they read are whole along the
    sequence, such as the documents [B, S] of ``nn.masks.document``, on every rank.

    Args:
      query: [B, T / n, N, H], this rank's part of T queries.
      key, value: [B, T / n, K, H] of the same dtype, where K divides N.
      axis: the mesh axis, of n ranks.
      routing: ``"all_gather"``, ``"ring"`` or ``"all_to_all"``. The last requires n to divide N and K, and sends about
        1 / n of the others' bytes if K is N; the ring needs the least memory, and its matmuls overlap with the block in
        transit.
      order: ``"zigzag"``: the tokens are in the order of ``zigzag``, which balances the work of causal attention; the
        default if ``is_causal``. ``"contiguous"``: rank i has the i-th part; the default otherwise.
      is_causal: mask later tokens.
      scale: factor of the scores; default ``1 / sqrt(H)``.
      mask_mod, score_mod: functions of one pair, as those of ``nn.dot_product_attention``.
      local_window_size: keys visible before and after a query. In contiguous order, with a window that ends at the
        query (or ``is_causal``), keys are sent only to the ranks within it.
      query_seq_lengths, key_value_seq_lengths: int [B], the valid tokens of each whole sequence.
    Returns:
      [B, T / n, N, H], in the dtype of ``query``, differentiable in both modes, and with respect to arrays that
      ``score_mod`` reads.
    Raises:
      ArgumentError: an unknown routing or order.
      AxisNameError: no such mesh axis.
      ShapeError, DtypeError: incompatible operands, or sizes that the routing cannot split.
    """
    _check_choice("routing", routing, _ROUTINGS)
    if order is not None:
        _check_choice("order", order, _ORDERS)
    ring = ring_of(axis, "context_parallel_attention")
    n = ring.size
    query, key, value = bnp.asarray(query), bnp.asarray(key), bnp.asarray(value)
    chunks = 2 if order == "zigzag" or (order is None and is_causal) else 1
    _check(query, key, value, n, routing, chunks)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    reach = n - 1
    if local_window_size is not None:
        before, after = masks.window_of(local_window_size, "context_parallel_attention")
        mask_mod = _both(mask_mod, masks.local_window(before, after))
        if chunks == 1 and (is_causal or not after):
            reach = min(reach, -(-before // query.shape[1]))
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        mask_mod = _both(mask_mod, masks.lengths(query_seq_lengths, key_value_seq_lengths))
    mods: dict[str, Any] = {"mask_mod": mask_mod, "score_mod": score_mod}
    plain = mask_mod is None and score_mod is None
    if n == 1:
        return dot_product_attention(query, key, value, scale=scale, is_causal=is_causal, **mods)
    if routing == "all_to_all":
        return _by_heads(query, key, value, axis, chunks == 2, scale=scale, is_causal=is_causal, **mods)
    if plain and (not is_causal or chunks == 2):
        return attend_by_halves(query, key, value, ring, routing, scale, is_causal)
    if is_causal:
        mods["mask_mod"] = _both(mask_mod, masks.causal)
    return attend_by_pairs(
        query, key, value, ring, routing=routing, scale=scale, chunks=chunks, reach=reach, **mods
    )


def _both(one: Callable | None, other: Callable) -> Callable:
    """The conjunction of two masks; None masks nothing."""
    return other if one is None else lambda *pair: one(*pair) & other(*pair)


def _check_choice(name: str, given: Any, known: tuple[str, ...]) -> None:
    if given not in known:
        raise errors.ArgumentError(
            f"context_parallel_attention: {name} is one of {', '.join(known)}, not {given!r:.60}.",
            where=source.here(),
        )


def _check(query: Any, key: Any, value: Any, n: int, routing: str, chunks: int) -> None:
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
    if T % chunks:
        fail("a rank has two chunks of each sequence", f"pad sequences to a multiple of {2 * n}")
    if routing == "all_to_all" and (N % n or key.shape[2] % n):
        fail(f"{n} ranks cannot share the heads evenly", "use routing='ring' or 'all_gather'")


def _by_heads(
    query: Any,
    key: Any,
    value: Any,
    axis: str,
    zigzagged: bool,
    *,
    scale: float,
    is_causal: bool,
    mask_mod: Callable | None,
    score_mod: Callable | None,
) -> Any:
    """Attend to whole sequences with this rank's heads, between two all-to-alls."""
    n, (B, t, N, H), K = lax.axis_size(axis), query.shape, key.shape[2]
    parts = [x.reshape(B, t, n, x.shape[2] // n, H) for x in (query, key, value)]
    x = lax.all_to_all(bnp.concatenate(parts, 3), axis, 2, 1)  # [B, ranks, t, heads of q, k and v / n, H]
    x = x.reshape(B, n * t, (N + 2 * K) // n, H)
    x = unzigzag(x, n) if zigzagged else x
    q, k, v = bnp.split(x, (N // n, (N + K) // n), axis=2)

    def of_all_heads(fun: Callable | None) -> Callable | None:
        first = lax.axis_index(axis) * (N // n)
        return None if fun is None else lambda *args: fun(*args[:-3], first + args[-3], *args[-2:])

    out = dot_product_attention(
        q, k, v, scale=scale, is_causal=is_causal, mask_mod=of_all_heads(mask_mod), score_mod=of_all_heads(score_mod)
    )  # fmt: skip
    out = zigzag(out, n) if zigzagged else out
    return lax.all_to_all(out.reshape(B, n, t, N // n, H), axis, 1, 2).reshape(B, t, N, H)
