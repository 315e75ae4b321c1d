"""Matmuls fused with an all-gather or a reduce-scatter, one step per rank.

A face, for use inside ``shard_map``: the two ends of a tensor-parallel pair of layers with sequence parallelism
(Korthikanti et al., arXiv:2205.05198). In: operands sharded over a mesh axis. Out: the matmul of the gathered operand,
or its reduce-scattered sum. The plain forms communicate everything before or after the matmul. Here each step
multiplies one part and sends another, independent of it, so a device can overlap both (Wang et al., ASPLOS 2023,
doi:10.1145/3567955.3567959). The two are transposes in the left operand, so derivatives overlap as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import axis_in

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


def all_gather_matmul(x: ArrayLike, weight: ArrayLike, axis: str, dim: int = -2) -> Array:
    """``all_gather(x, axis, axis=dim, tiled=True) @ weight``, part by part.

    For use inside ``shard_map``.

    Args:
      x: [..., t, ..., C], with dimension ``dim`` (not the last) sharded over the mesh axis.
      weight: [C, F], this rank's columns.
      axis: the mesh axis, of n ranks.
      dim: the gathered dimension; default -2.
    Returns:
      [..., n * t, ..., F], varying over the axis.
    Raises:
      ShapeError, ValueRangeError: incompatible operands, or no such dimension of rows.
    """
    x, weight = bnp.asarray(x), bnp.asarray(weight)
    dim = _row_dimension(x, weight, dim, "all_gather_matmul")
    n = lax.axis_size(axis)
    parts = []
    for distance in range(n):  # x came from the rank at this distance
        sent = lax.ppermute(x, axis, _onwards(n)) if distance < n - 1 else x
        parts.append(x @ weight)
        x = sent
    distances = (
        lax.axis_index(axis) - bnp.arange(n, dtype=dtypes.int32)
    ) % n  # of each rank's part from this rank
    whole = bnp.take(bnp.stack(parts, dim), distances, axis=dim)
    shape = whole.shape
    return whole.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


def matmul_reduce_scatter(x: ArrayLike, weight: ArrayLike, axis: str, dim: int = -2) -> Array:
    """``psum_scatter(x @ weight, axis, tiled=True)`` along ``dim``, part by part.

    For use inside ``shard_map``. A sum travels around the ranks, each of which adds its matmul, and ends at its owner.

    Args:
      x: [..., n * t, ..., F], this rank's columns; dimension ``dim`` (not the last) is scattered.
      weight: [F, C], this rank's rows.
      axis: the mesh axis, of n ranks.
      dim: the scattered dimension; default -2.
    Returns:
      [..., t, ..., C], varying over the axis; sums are rounded to the dtype of the matmul on each rank.
    Raises:
      ShapeError, ValueRangeError: incompatible operands, or a dimension that does not divide.
    """
    x, weight = bnp.asarray(x), bnp.asarray(weight)
    dim = _row_dimension(x, weight, dim, "matmul_reduce_scatter")
    n = lax.axis_size(axis)
    if x.shape[dim] % n:
        raise errors.ShapeError(
            f"matmul_reduce_scatter: dimension {dim} of {x.aval} cannot be split among {n} ranks.",
            where=source.here(),
            fix=f"make it a multiple of {n}",
        )
    size, rank = x.shape[dim] // n, lax.axis_index(axis)
    total: Any = None
    for step in range(n):
        part = (
            rank - 1 - step
        ) % n  # the part whose sum is here: the first rank to add to it follows its owner
        product = lax.dynamic_slice_in_dim(x, part * size, size, dim) @ weight
        total = product if total is None else lax.ppermute(total, axis, _onwards(n)) + product
    return total


def _onwards(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]


def _row_dimension(x: Any, weight: Any, dim: int, what: str) -> int:
    """``dim`` counted from 0, after checking the operands."""
    if x.ndim < 2 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise errors.ShapeError(
            f"{what} takes [..., rows, n] and [n, columns], not {x.aval} and {weight.aval}.",
            where=source.here(),
        )
    dim = axis_in(dim, x.ndim, what)
    if dim == x.ndim - 1:
        raise errors.ShapeError(
            f"{what}: dimension {dim} of {x.aval} is the one that is contracted.",
            where=source.here(),
            fix="dim=-2, or another dimension of rows",
        )
    return dim
