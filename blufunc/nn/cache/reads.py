"""Attention to a cache: masks of positions, and views of keys and values.

A face, above ``layouts`` and ``nn.attention``. Masks are functions of pairs of which bounds over tiles are known, so
that kernels read only the tiles that a query sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.axes import static_int
from blufunc.nn.attention.dot_product import dot_product_attention
from blufunc.nn.cache.layouts import Cache, Contiguous, Paged, Ring, check_is_cache, checked, per_entry

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


def attention(
    query: ArrayLike,
    cache: Cache,
    position: ArrayLike,
    *,
    lengths: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    score_mod: Callable | None = None,
) -> Array:
    """Attention of new positions to all positions up to their own.

    A prompt at the static position 0 of a contiguous cache is causal attention to its own positions.

    Args:
      query: [B, T, N, H], of the T positions that ``update`` has written last; K divides N.
      cache: a cache, after that ``update``.
      position: the position of the first query, as for ``update``.
      lengths: as for ``update``. Results of padding are arbitrary.
      window: the number of positions that a query sees, its own included; None for all. Of a ring, at most S - T + 1,
        and S by default, for one query.
      scale: factor of the scores; ``1 / sqrt(H)`` by default.
      score_mod: see ``dot_product_attention``.
    Returns:
      an array of the shape and dtype of ``query``.
    Raises:
      ArgumentError, ShapeError: see ``update``.
      ValueRangeError: the window is less than 1, or does not fit a ring.
    """
    query = bnp.asarray(query)
    if query.ndim != 4:
        raise errors.ShapeError(
            f"attention to a cache: queries of shape {tuple(query.shape)}.",
            where=source.here(),
            fix="queries are [batch, positions, heads, features]: query[:, None] for one position",
        )
    B, T, _, H = query.shape
    keys, values = view(cache)
    checked("attention", cache, B, keys.shape[2], H)
    if not isinstance(cache, Ring) and window is None and isinstance(position, int) and position == 0:
        keys, values = keys[:, :T], values[:, :T]
        return dot_product_attention(query, keys, values, scale=scale, is_causal=True, score_mod=score_mod)
    seen = mask_mod(cache, position, T, lengths=lengths, window=window)
    return dot_product_attention(query, keys, values, scale=scale, mask_mod=seen, score_mod=score_mod)


def view(cache: Cache) -> tuple[Array, Array]:
    """Keys and values [B, S, K, H] of a cache, for ``dot_product_attention``.

    Those of a paged cache are copied: S is the number of positions of all pages of an entry.

    Args:
      cache: a cache.
    """
    check_is_cache("view", cache)
    if not isinstance(cache, Paged):
        return cache.keys, cache.values
    B, n = cache.tables.shape
    pages = [bnp.take(x, cache.tables, axis=0, mode="clip") for x in (cache.keys, cache.values)]
    keys, values = (x.reshape((B, n * x.shape[2], *x.shape[3:])) for x in pages)
    return keys, values


def mask_mod(
    cache: Cache,
    position: ArrayLike,
    queries: int = 1,
    *,
    lengths: ArrayLike | None = None,
    window: int | None = None,
) -> Callable:
    """The ``mask_mod`` of ``attention``, for a call of ``dot_product_attention``.

    Args:
      cache: a cache, after the ``update`` of these positions.
      position: the position of the first query.
      queries: T, the number of queries.
      lengths, window: see ``attention``.
    Returns:
      a function (b, h, q, k) -> boolean of the keys of ``view``.
    Raises:
      ValueRangeError: the window is less than 1, or does not fit a ring.
    """
    check_is_cache("mask_mod", cache)
    B = cache.tables.shape[0] if isinstance(cache, Paged) else cache.keys.shape[0]
    start = per_entry("attention", "position", position, B)
    of = lambda x, b: x[b] if x.ndim else x
    if window is not None:
        window = static_int(window, "attention", "window")
    if isinstance(cache, (Contiguous, Paged)):
        _check_window(window, 1)
        # distances of small numbers are compared: sums with a position could overflow, and have no bounds
        if window is None:
            return lambda b, h, q, k: k - q <= of(start, b)
        before = start - window
        return lambda b, h, q, k: (k - q <= of(start, b)) & (k - q > of(before, b))
    size = cache.keys.shape[1]
    width = size if window is None else window
    _check_window(width, queries, size)
    if width == size:  # of one query: every slot that has been written
        return lambda b, h, q, k: k <= of(start, b)
    count = per_entry("attention", "lengths", queries if lengths is None else lengths, B)
    last = start + count - 1

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        held = of(last, b) - (of(last, b) - k) % size  # the position in slot k
        own = of(start, b) + q
        return (held >= 0) & (held <= own) & (held > own - width)

    return seen


def _check_window(window: int | None, queries: int, size: int | None = None) -> None:
    if window is not None and window < 1:
        raise errors.ValueRangeError(
            f"attention: a window of {window} positions.",
            where=source.here(),
            fix="1 or more: a query sees itself",
        )
    if size is not None and window is not None and window + queries - 1 > size:
        raise errors.ValueRangeError(
            f"attention: {queries} queries with a window of {window} see {window + queries - 1} positions, and the "
            f"ring has {size}.",
            where=source.here(),
            why="an update of several positions replaces what its first query still sees.",
            fix=f"nn.cache.ring(batch, {window + queries - 1}, ...) and window={window}, or fewer queries at once",
        )
