"""Segment reductions: reductions of the rows of an array by segment index.

A face above ``blufunc.numpy`` and ``lax``, with the names of ``jax.ops``. Each is one scatter into the identity of its
operation, so that gradients are gathers. In: rows and their segment indices. Out: one row per segment; empty
segments hold the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.ir.trace import Tracer
from blufunc.core.ops.reduce import limit

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    out_sharding: None = None,
) -> Array:
    """Sum the rows of ``data`` by ``segment_ids``; 0 for empty segments.

    Args:
      data: an array of rank 1 or more; its first axis is split into segments, which need not be contiguous.
      segment_ids: integers of shape ``(data.shape[0],)``: the segment of each row.
      num_segments: the number of segments, the size of the result's first axis; None for one more than the largest
        index, which requires concrete ``segment_ids``.
      indices_are_sorted, unique_indices: promises about ``segment_ids``.
      bucket_size: the number of rows to reduce at a time, before their results; long sums are more precise.
      mode: the treatment of out-of-range indices: by default their rows are dropped; with ``"clip"`` they go
        to the first or the last segment.
      out_sharding: None.
    Returns:
      an array of shape ``(num_segments, *data.shape[1:])`` and of the dtype of ``data``.
    Raises:
      ConcretizationError: ``num_segments`` is None, and ``segment_ids`` is traced.
      DtypeError: ``segment_ids`` are not integers, or the operation does not take the dtype of ``data``.
      ShapeError: ``segment_ids`` is not one index per row.
      ValueRangeError: a negative ``num_segments``, or a ``bucket_size`` less than 1.
      UnsupportedError: an ``out_sharding``.
    """
    options = (num_segments, indices_are_sorted, unique_indices, bucket_size, mode, out_sharding)
    return _segmented("segment_sum", lax.scatter_add, bnp.sum, data, segment_ids, *options)


def segment_prod(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    out_sharding: None = None,
) -> Array:
    """Multiply the rows of each segment; 1 for empty ones. See ``segment_sum``.

    It can be differentiated with ``unique_indices=True``.
    """
    options = (num_segments, indices_are_sorted, unique_indices, bucket_size, mode, out_sharding)
    return _segmented("segment_prod", lax.scatter_mul, bnp.prod, data, segment_ids, *options)


def segment_max(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    out_sharding: None = None,
) -> Array:
    """Maximum over the rows of each segment; -inf, or the least integer, if empty.

    See ``segment_sum``. Ties share the derivative.
    """
    options = (num_segments, indices_are_sorted, unique_indices, bucket_size, mode, out_sharding)
    return _segmented("segment_max", lax.scatter_max, bnp.max, data, segment_ids, *options)


def segment_min(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    out_sharding: None = None,
) -> Array:
    """Minimum over the rows of each segment; inf, or the greatest integer, if empty.

    See ``segment_sum``. Ties share the derivative.
    """
    options = (num_segments, indices_are_sorted, unique_indices, bucket_size, mode, out_sharding)
    return _segmented("segment_min", lax.scatter_min, bnp.min, data, segment_ids, *options)


def _identity(name: str, dtype: np.dtype) -> Any:
    """The value of empty segments."""
    if name in ("segment_sum", "segment_prod"):
        return name == "segment_prod"
    return limit(dtype, name == "segment_min").item()


def _segmented(
    name: str, scatter: Callable, reduce: Callable, data: Any, segment_ids: Any, num_segments: Any,
    indices_are_sorted: bool, unique_indices: bool, bucket_size: Any, mode: Any, out_sharding: Any,
) -> Any:  # fmt: skip
    if out_sharding is not None:
        raise errors.UnsupportedError(
            f"{name}: there are no shardings yet.", where=source.here(), fix="leave out_sharding out"
        )
    data, ids = lift(data, "data"), lift(segment_ids, "segment_ids")
    dtype, rows = data.aval.dtype, data.aval.shape[:1]
    if not dtypes.is_integer(ids.aval.dtype):
        raise errors.DtypeError(
            f"{name}: segment_ids are integers, not {ids.aval}.",
            where=source.here(),
            fix="segment_ids.astype('int32')",
        )
    if not rows or ids.aval.shape != rows:
        raise errors.ShapeError(
            f"{name}: segment_ids are one number for each row of data, not {ids.aval} for {data.aval}.",
            where=source.here(),
        )
    if name in ("segment_max", "segment_min") and dtypes.is_complex(dtype):
        raise errors.DtypeError(
            f"{name} takes numbers that have an order, not {data.aval}.", where=source.here()
        )
    size = _number_of_segments(name, ids, num_segments)
    buckets = 1 if bucket_size is None else static_int(bucket_size, name, "bucket_size")
    if buckets < 1:
        raise errors.ValueRangeError(
            f"{name}: bucket_size is {bucket_size}.", where=source.here(), fix="bucket_size=64, or None"
        )
    shape: tuple[int, ...] = (size, *data.aval.shape[1:])
    if not size:
        return bnp.zeros(shape, dtype)
    index = bnp.expand_dims(ids, 1)
    window = tuple(range(1, data.aval.ndim))
    numbers = lax.ScatterDimensionNumbers(window, (0,), (0,))
    if bucket_size is not None:
        bucket = bnp.arange(rows[0], dtype=ids.aval.dtype) // buckets
        index = bnp.stack([bucket, ids], 1)
        shape = (-(-rows[0] // buckets), *shape)
        numbers = lax.ScatterDimensionNumbers(window, (0, 1), (0, 1))
    result = scatter(
        bnp.full(shape, _identity(name, dtype), dtype),
        index,
        data,
        numbers,
        indices_are_sorted=indices_are_sorted,
        unique_indices=unique_indices,
        mode=mode,
    )
    if bucket_size is None:
        return result
    return reduce(result, axis=0, initial=_identity(name, dtype)).astype(dtype)


def _number_of_segments(name: str, ids: Any, num_segments: Any) -> int:
    if num_segments is None:
        if isinstance(ids, Tracer):
            raise errors.ConcretizationError(
                f"{name} without num_segments, of segment_ids that are traced ({ids.aval}).",
                where=source.here(),
                why="the shape of the result would depend on their values.",
                fix=f"{name}(data, segment_ids, num_segments=n)",
            )
        host = np.asarray(ids)
        return int(max(host.max() + 1, 0)) if host.size else 0
    size = static_int(num_segments, name, "num_segments")
    if size < 0:
        raise errors.ValueRangeError(
            f"{name}: num_segments is {size}.", where=source.here(), fix="num_segments=n, at least 0"
        )
    return size


__all__ = ["segment_max", "segment_min", "segment_prod", "segment_sum"]
