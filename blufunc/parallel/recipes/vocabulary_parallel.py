"""Embedding and loss of a language model with a sharded vocabulary.

A face, for use inside ``shard_map`` (Shoeybi et al., arXiv:1909.08053, section 3). In: V / n consecutive rows of a
table [V, C] per rank. Out: embeddings, by a masked lookup on each rank and a sum; or losses, for which ranks reduce two
scalars per token of the logits [..., V / n]: the maximum, and the sum of exponentials with the label's logit. A
vocabulary that does not divide is padded (``pad_vocabulary``), and the loss takes its true size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in
from blufunc.parallel.recipes.varying import same_on_all

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


def pad_vocabulary(table: Array, ranks: int) -> Array:
    """Pad a table [V, ...] with zero rows to a multiple of ``ranks``, eagerly."""
    table = bnp.asarray(table)
    missing = -table.shape[0] % ranks
    return bnp.pad(table, [(0, missing)] + [(0, 0)] * (table.ndim - 1)) if missing else table


def vocabulary_parallel_embedding(
    table: Array, ids: ArrayLike, axis: str, *, scatter_dim: int | None = None
) -> Array:
    """``table[ids]`` of a table with sharded rows, inside ``shard_map``.

    Args:
      table: [V / n, C], this rank's rows.
      ids: integers of any shape, in [0, V), the same on all ranks of the axis. Out of range gives zeros.
      axis: the mesh axis.
      scatter_dim: the token dimension of ``ids`` along which each rank gets its part of the result, for sequence
        parallelism between layers; by default all ranks get all.
    Returns:
      [*ids.shape, C], the same on all ranks, by one ``psum``; or a part of it, by one ``psum_scatter``.
    Raises:
      DtypeError: ids that are not integers.
      ShardingError: ids that vary over the axis.
    """
    ids = bnp.asarray(ids)
    _check_integers(ids, "vocabulary_parallel_embedding", "ids")
    ids = same_on_all(ids, axis)
    local, here = _own(ids, table.shape[0], axis)
    rows = bnp.where(here[..., None], table[local], bnp.zeros((), table.dtype))
    if scatter_dim is None:
        return lax.psum(rows, axis)
    dim = axis_in(scatter_dim, ids.ndim, "vocabulary_parallel_embedding")
    return lax.psum_scatter(rows, axis, scatter_dimension=dim, tiled=True)


def vocabulary_parallel_cross_entropy(
    logits: ArrayLike, labels: ArrayLike, axis: str, vocabulary: int | None = None
) -> Array:
    """Softmax cross entropy of sharded logits, inside ``shard_map``; as in ``nn``.

    Args:
      logits: [..., V / n], this rank's classes; half precisions are converted to float32.
      labels: integers [...], in [0, V), the same on all ranks of the axis. Out of range the loss is NaN, or infinite
        for a padding class.
      axis: the mesh axis.
      vocabulary: the number of classes, if the last ones are padding; by default all count.
    Returns:
      the losses [...], the same on all ranks: one ``pmax`` and one ``psum``, and none for the gradient.
    Raises:
      ShapeError, DtypeError: labels that are not integers, or not of the logits' shape.
      ShardingError: labels that vary over the axis.
      ValueRangeError: ``vocabulary`` is not between 1 and the number of classes.
    """
    name = "vocabulary_parallel_cross_entropy"
    logits, labels = bnp.asarray(logits), bnp.asarray(labels)
    _check_integers(labels, name, "labels")
    if not logits.ndim or tuple(labels.shape) != tuple(logits.shape[:-1]):
        raise errors.ShapeError(
            f"{name}: logits of shape {tuple(logits.shape)} need labels of shape {tuple(logits.shape[:-1])}, "
            f"not {tuple(labels.shape)}.",
            where=source.here(),
        )
    labels = same_on_all(labels, axis)
    size = logits.shape[-1]
    classes = size * lax.axis_size(axis)
    if vocabulary is not None and not 0 < vocabulary <= classes:
        raise errors.ValueRangeError(
            f"{name}: a vocabulary of {vocabulary}, and logits of {classes} classes.", where=source.here()
        )
    logits = logits.astype(bnp.promote_types(logits.dtype, dtypes.float32))
    if vocabulary is not None:
        own = lax.axis_index(axis) * size + bnp.arange(size, dtype=dtypes.int32)
        logits = bnp.where(own < vocabulary, logits, -math.inf)
    top = lax.pmax(lax.stop_gradient(bnp.max(logits, -1)), axis)
    logits = logits - top[..., None]
    local, here = _own(labels, size, axis)
    picked = bnp.squeeze(bnp.take_along_axis(logits, local[..., None], -1), -1)
    sums = bnp.stack([bnp.sum(bnp.exp(logits), -1), bnp.where(here, picked, 0)])
    total, of_label = lax.psum(sums, axis)
    return bnp.where((labels >= 0) & (labels < classes), bnp.log(total) - of_label, math.nan)


def _own(ids: Any, size: int, axis: str) -> tuple[Any, Any]:
    """Row indices on this rank (0 for others), and a mask of its own rows."""
    local = ids - lax.axis_index(axis) * size
    here = (local >= 0) & (local < size)
    return bnp.where(here, local, 0), here


def _check_integers(x: Any, function: str, what: str) -> None:
    if not dtypes.is_integer(x.dtype):
        raise errors.DtypeError(
            f"{function}: the {what} must be integers, not {x.dtype}.", where=source.here()
        )
