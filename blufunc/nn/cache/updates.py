"""Writes of new positions to a cache.

A face, above ``layouts``. One position for all entries is a window, which programs update in place
(``kernels/rewrites/updates_in_place.py``); different ones, and chunks that wrap around or end early, are a scatter,
in place too, that drops what must not be written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.nn.cache.layouts import C, Contiguous, Paged, Ring, checked, per_entry

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike


def update(
    cache: C, key: ArrayLike, value: ArrayLike, position: ArrayLike, *, lengths: ArrayLike | None = None
) -> C:
    """The cache with new keys and values from ``position`` on.

    Args:
      cache: a ``Contiguous``, ``Ring`` or ``Paged`` cache.
      key, value: [B, T, K, H]; they are converted to the dtype of the cache.
      position: the position of the first of the T, an integer or one for each entry: int32 [B].
      lengths: n valid positions of each entry, of the T, int [B]; the others are padding, and are not written. All by
        default.
    Returns:
      a cache of the same shapes. Negative positions, and those beyond its end, are not written. But one ``position``
      for all entries, without ``lengths``, is moved until the T positions fit a contiguous cache, as by
      ``dynamic_update_slice``, and to 0 where it is negative, of one position in a ring, too.
    Raises:
      ArgumentError: ``cache`` is none, or ``position`` or ``lengths`` are not integers of that shape.
      ShapeError: the shapes do not match, or T positions do not fit.
      ValueRangeError: ``position`` is a negative number.
    """
    key, value = bnp.asarray(key), bnp.asarray(value)
    if key.ndim != 4 or tuple(key.shape) != tuple(value.shape):
        raise errors.ShapeError(
            f"update: keys of shape {tuple(key.shape)} and values of shape {tuple(value.shape)} are not both "
            "[batch, positions, key heads, features].",
            where=source.here(),
            fix="key[:, None] for one position",
        )
    B, T, K, H = key.shape
    checked("update", cache, B, K, H)
    size, is_ring = cache.keys.shape[1], isinstance(cache, Ring)
    first = int(position) if isinstance(position, int | np.integer) else 0
    if first < 0:
        raise errors.ValueRangeError(
            f"update: the position {first}.",
            where=source.here(),
            why="positions are counted from the first token of a sequence, not from the end of the cache.",
            fix="a position from 0 on",
        )
    if isinstance(cache, Contiguous) and lengths is None:
        if first + T > size:
            raise errors.ShapeError(
                f"update: {T} positions from {first} on do not fit a cache of {size}.",
                where=source.here(),
                fix="a longer cache, or nn.cache.ring for a sliding window",
            )
    start = per_entry("update", "position", position, B)
    count = None if lengths is None else per_entry("update", "lengths", lengths, B)
    news = [x.astype(old.dtype) for x, old in ((key, cache.keys), (value, cache.values))]
    if is_ring and count is None and size < T:
        news, start, T = [x[:, T - size :] for x in news], start + (T - size), size
    one_window = count is None and not start.ndim and not isinstance(cache, Paged)
    if one_window and (T == 1 or not is_ring):
        start = bnp.maximum(start, 0)
        at = (0, start % size if is_ring else start, 0, 0)
        keys, values = (
            lax.dynamic_update_slice(old, x, at)
            for old, x in zip((cache.keys, cache.values), news, strict=True)
        )
    else:
        where = _slots(cache, start, count, B, T)
        keys, values = (
            old.at[where].set(x, mode="drop", unique_indices=True)
            for old, x in zip((cache.keys, cache.values), news, strict=True)
        )
    return cache._replace(keys=keys, values=values)


def _slots(cache: Any, start: Any, count: Any, B: int, T: int) -> tuple[Any, Any]:
    """Indices [B, T] of the first two axes; out of range for what is dropped."""
    size = cache.keys.shape[1]
    offsets = bnp.arange(T, dtype=dtypes.int32)
    positions = bnp.broadcast_to(start.reshape((-1, 1)) + offsets, (B, T))
    kept = positions >= 0
    if count is not None:
        kept = kept & (offsets < bnp.broadcast_to(count, (B,))[:, None])
    if isinstance(cache, Paged):
        pages = cache.tables.shape[1]
        page = bnp.take_along_axis(cache.tables, bnp.clip(positions // size, 0, pages - 1), axis=1)
        inside = kept & (page >= 0) & (positions < pages * size)
        return bnp.where(inside, page, cache.keys.shape[0]), positions % size
    rows = bnp.broadcast_to(bnp.arange(B, dtype=dtypes.int32)[:, None], (B, T))
    if isinstance(cache, Ring):
        if count is not None:  # of a longer chunk, the last ones: a slot must not occur twice
            kept = kept & (offsets >= bnp.broadcast_to(count, (B,))[:, None] - size)
        positions = positions % size
    return rows, bnp.where(kept, positions, size)
