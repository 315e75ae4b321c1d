"""Masks for ``dot_product_attention(mask_mod=...)``: keys visible to a query.

A face. Each is, or returns, a user-style function (b, h, q, k) -> boolean of the indices of batch entry,
query head, query and key. They combine by ``&`` in a user function, and with ``is_causal=True``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import source

__all__ = ["causal", "document", "lengths", "local_window", "prefix_lm", "sliding_window"]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A query sees the keys up to its own position, as with ``is_causal=True``."""
    return q >= k


def sliding_window(n: int) -> Callable:
    """A query sees its own and the preceding ``n - 1`` positions (arXiv:2004.05150).

    Raises:
      ValueRangeError: ``n`` is less than 1.
    """
    if n < 1:
        raise errors.ValueRangeError(
            f"sliding_window: a window of {n} positions.",
            where=source.here(),
            fix="1 or more: a query sees itself",
        )
    return lambda b, h, q, k: (q >= k) & (q - k < n)


def local_window(before: int, after: int) -> Callable:
    """A query sees the ``before`` preceding and ``after`` following positions.

    Raises:
      ValueRangeError: a number is negative.
    """
    if before < 0 or after < 0:
        raise errors.ValueRangeError(
            f"local_window: {before} positions before a query and {after} behind it.",
            where=source.here(),
            fix="0 or more",
        )
    return lambda b, h, q, k: (q - k <= before) & (k - q <= after)


def window_of(size: Any, name: str) -> tuple[int, int]:
    """The keys before and after a query that ``local_window_size`` says.

    Args:
      size: two integers, or one for both.
      name: the function that was given it.
    Raises:
      ArgumentError: it is neither.
    """
    both = (size, size) if isinstance(size, int) else size
    if not (isinstance(both, (tuple, list)) and len(both) == 2 and all(isinstance(n, int) for n in both)):
        raise errors.ArgumentError(
            f"{name}: local_window_size is an integer or two, not {size!r:.60}.",
            where=source.here(),
            fix="local_window_size=(before, after)",
        )
    return both[0], both[1]


def lengths(queries: Any = None, keys: Any = None) -> Callable:
    """The first ``queries[b]`` queries see the first ``keys[b]`` keys of entry b.

    Args:
      queries, keys: integers [B]; None: all.
    Raises:
      ShapeError: they have not one axis.
    """
    queries, keys = (None if n is None else bnp.asarray(n) for n in (queries, keys))
    for n in (queries, keys):
        if n is not None and n.ndim != 1:
            raise errors.ShapeError(
                f"lengths: an array of shape {tuple(n.shape)}.", where=source.here(), fix="lengths are [B]"
            )

    def within(b: Any, h: Any, q: Any, k: Any) -> Any:
        inside = [i < n[b] for i, n in ((q, queries), (k, keys)) if n is not None]
        return functools.reduce(operator.and_, inside, bnp.asarray(True))

    return within


def prefix_lm(n: Any) -> Callable:
    """Prefix LM: the first ``n`` keys, and causal beyond (arXiv:1910.10683, 3.2.1).

    Args:
      n: an integer, or one for each batch entry: int [B].
    """
    length = bnp.asarray(n)
    return lambda b, h, q, k: (k < (length[b] if length.ndim else length)) | (q >= k)


def document(ids: Any) -> Callable:
    """A query sees the keys of its own document, for sequences packed into one.

    Args:
      ids: the document index of each position, integers [T] or [B, T]; queries and keys are the same positions.
    Raises:
      ShapeError: ``ids`` is neither of rank 1 nor 2.
    """
    ids = bnp.asarray(ids)
    if ids.ndim not in (1, 2):
        raise errors.ShapeError(
            f"document: ids of shape {tuple(ids.shape)}.", where=source.here(), fix="ids are [T] or [B, T]"
        )

    if ids.ndim == 1:
        return lambda b, h, q, k: ids[q] == ids[k]
    return lambda b, h, q, k: ids[b, q] == ids[b, k]
