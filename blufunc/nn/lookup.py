"""Dropout with an explicit key, and embedding lookup.

A face, above ``blufunc.random``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc import errors, random
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in, ints
from blufunc.nn.activations import as_inexact

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


def dropout(
    key: ArrayLike,
    x: ArrayLike,
    rate: ArrayLike,
    *,
    deterministic: bool = False,
    broadcast_dims: Sequence[int] = (),
) -> Array:
    """Dropout: zero a fraction of elements, scale the rest by ``1 / (1 - rate)``.

    Args:
      key: one key; not used if ``deterministic``.
      x: an array.
      rate: the probability of a zero, from 0 to 1: a number, or an array of rank 0.
      deterministic: return ``x`` unchanged, as for inference.
      broadcast_dims: axes along which elements share one decision.
    Raises:
      ValueRangeError: the rate is a number outside of [0, 1].
    """
    x = as_inexact(x)
    if isinstance(rate, (int, float)):
        if not 0 <= rate <= 1:
            raise errors.ValueRangeError(
                f"dropout: rate={rate} is not a probability.", where=source.here(), fix="0 <= rate <= 1"
            )
        if rate == 1 and not deterministic:
            return bnp.zeros_like(x)
        rate = float(rate)
    if deterministic or (isinstance(rate, float) and rate == 0):
        return x
    shared = {axis_in(d, x.ndim, "dropout") for d in ints(broadcast_dims, "dropout", "broadcast_dims")}
    shape = tuple([1 if d in shared else n for d, n in enumerate(x.shape)])
    kept = 1 - bnp.asarray(rate, dtype=dtypes.float32)
    if kept.ndim:
        raise errors.ShapeError(
            f"dropout takes one rate, not an array of shape {tuple(kept.shape)}.",
            where=source.here(),
            fix="rate=0.1",
        )
    return bnp.where(random.bernoulli(key, kept, shape), x / kept.astype(x.dtype), 0)


def embedding_lookup(table: ArrayLike, ids: ArrayLike) -> Array:
    """Rows of a table by index: ``table[ids]``.

    Args:
      table: [rows, ...].
      ids: integers from 0 on, of any shape. Those out of range give NaN.
    Returns:
      an array of the shape of ``ids`` followed by that of a row.
    Raises:
      DtypeError: ``ids`` does not hold integers.
      ShapeError: ``table`` has no axis.
    """
    table, ids = bnp.asarray(table), bnp.asarray(ids)
    if not dtypes.is_integer(ids.dtype):
        raise errors.DtypeError(
            f"embedding_lookup takes integers as positions, not {ids.aval}.",
            where=source.here(),
            fix="ids.astype('int32')",
        )
    if not table.ndim:
        raise errors.ShapeError(
            "embedding_lookup takes a table of at least one axis.",
            where=source.here(),
            fix="table of [rows, n]",
        )
    return bnp.take(table, ids, axis=0)
