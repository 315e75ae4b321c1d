"""The order of tokens of causal context parallelism: zigzag.

A face, with ``context_parallel.py``. Of 2n chunks of a sequence rank i has those at i and 2n - 1 - i: with a causal
mask each rank then sees exactly half of every other rank's block, so all ranks have equal work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


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
