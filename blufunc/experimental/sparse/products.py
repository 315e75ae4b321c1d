"""Contractions of sparse arrays with dense and with sparse ones.

A face, above ``blufunc.numpy``. A sparse operand gathers the rows of the other that its elements meet, and adds the
products to the rows of the result: ``nse`` times the size of a row, whatever the shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.trace import Array
from blufunc.experimental.sparse.base import JAXSparse, refused
from blufunc.experimental.sparse.bcoo import (
    BCOO,
    bcoo_sum_duplicates,
    bcoo_transpose,
    bcoo_update_layout,
    mapped,
)
from blufunc.experimental.sparse.compressed import BCSR

__all__ = ["bcoo_dot_general", "bcoo_dot_general_sampled", "bcsr_dot_general", "matmul"]

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def bcoo_dot_general(
    lhs: Any,
    rhs: Any,
    *,
    dimension_numbers: Dimensions,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Any:
    """As ``lax.dot_general``, of which one or both operands are sparse.

    The result is dense, or sparse if both are. Batch dimensions of a sparse operand are among its own.

    Args:
      precision, out_sharding: accepted for compatibility.
      preferred_element_type: dtype of products, sums and result; default: that of the operands.
    """
    (left, right), (left_batch, right_batch) = dimension_numbers
    left, right, left_batch, right_batch = (
        [d % x.ndim for d in dims]
        for dims, x in ((left, lhs), (right, rhs), (left_batch, lhs), (right_batch, rhs))
    )
    sizes = lambda x, dims: [x.shape[d] for d in dims]
    if sizes(lhs, left) != sizes(rhs, right) or sizes(lhs, left_batch) != sizes(rhs, right_batch):
        raise errors.ShapeError(
            f"bcoo_dot_general of shapes {lhs.shape} and {rhs.shape} over {left} and {right}.",
            where=source.here(),
        )
    if isinstance(lhs, BCOO) and isinstance(rhs, BCOO):
        out = _sparse_sparse(lhs, rhs, left, right, left_batch, right_batch)
        return out if preferred_element_type is None else out.astype(preferred_element_type)
    if isinstance(rhs, BCOO):
        out = _sparse_dense(
            rhs, bnp.asarray(lhs), right, left, right_batch, left_batch, preferred_element_type
        )
        n, rows = len(left_batch), rhs.ndim - len(right) - len(right_batch)
        return bnp.transpose(out, (*range(n), *range(n + rows, out.ndim), *range(n, n + rows)))
    if not isinstance(lhs, BCOO):
        raise refused("bcoo_dot_general of two dense arrays", "lax.dot_general")
    return _sparse_dense(lhs, bnp.asarray(rhs), left, right, left_batch, right_batch, preferred_element_type)


def _canonical(x: BCOO, batch: Sequence[int]) -> tuple[BCOO, list[int]]:
    """An operand with these batch dimensions only, and the order of the others."""
    if any(d >= x.n_batch for d in batch):
        raise refused(
            f"bcoo_dot_general over the batch dimensions {tuple(batch)} of an array with n_batch={x.n_batch}",
            "x.update_layout(n_batch=...)",
        )
    rest = [d for d in range(x.ndim) if d not in batch]
    moved = bcoo_transpose(x, permutation=[*batch, *rest])
    return bcoo_update_layout(moved, n_batch=len(batch), n_dense=0), rest


def _sparse_dense(
    lhs: BCOO,
    rhs: Array,
    left: list[int],
    right: list[int],
    left_batch: list[int],
    right_batch: list[int],
    dtype: Any,
) -> Array:
    lhs, order = _canonical(lhs, left_batch)
    met = [order.index(d) for d in left]
    kept = [n for n in range(len(order)) if n not in met]
    shape = [lhs.shape[len(left_batch) + n] for n in kept]
    free = [d for d in range(rhs.ndim) if d not in (*right, *right_batch)]
    rhs = bnp.transpose(rhs, (*right_batch, *right, *free))
    kind = dtype or bnp.promote_types(lhs.dtype, rhs.dtype)

    def one(data, indices, rows):
        columns = lambda dims: tuple(indices[:, d] for d in dims)
        found = rows.at[columns(met)].get(mode="fill", fill_value=0) if met else rows[None]
        products = data.astype(kind).reshape(-1, *[1] * len(free)) * found.astype(kind)
        if not kept:
            return products.sum(0)
        zeros = bnp.zeros((*shape, *products.shape[1:]), kind)
        return zeros.at[columns(kept)].add(products, mode="drop")

    return mapped(one, len(left_batch))(lhs.data, lhs.indices, rhs)


def _sparse_sparse(
    lhs: BCOO, rhs: BCOO, left: list[int], right: list[int], left_batch: list[int], right_batch: list[int]
) -> BCOO:
    """All pairs of elements that meet; the others are padding."""
    n = len(left_batch)
    (lhs, a_order), (rhs, b_order) = _canonical(lhs, left_batch), _canonical(rhs, right_batch)
    a_met, b_met = [a_order.index(d) for d in left], [b_order.index(d) for d in right]
    a_kept, b_kept = (
        [i for i in range(len(o)) if i not in m] for o, m in ((a_order, a_met), (b_order, b_met))
    )
    shape = [*[lhs.shape[n + i] for i in a_kept], *[rhs.shape[n + i] for i in b_kept]]
    bounds = bnp.asarray(shape, lhs.indices.dtype)
    limits = [bnp.asarray(x.shape[n:], x.indices.dtype) for x in (lhs, rhs)]
    pick = lambda indices, dims: indices[:, np.asarray(dims, int)]

    def one(a, a_at, b, b_at):
        meets = (pick(a_at, a_met)[:, None] == pick(b_at, b_met)[None]).all(-1)
        meets = meets & (a_at < limits[0]).all(-1)[:, None] & (b_at < limits[1]).all(-1)[None]
        data = bnp.where(meets, a[:, None] * b[None], 0).reshape(-1)
        grid = (*meets.shape, -1)
        parts = [
            bnp.broadcast_to(pick(a_at, a_kept)[:, None], (*grid[:2], len(a_kept))),
            bnp.broadcast_to(pick(b_at, b_kept)[None], (*grid[:2], len(b_kept))),
        ]
        at = bnp.where(meets[..., None], bnp.concatenate(parts, -1), bounds)
        return data, at.reshape(data.shape[0], len(shape))

    data, indices = mapped(one, n)(lhs.data, lhs.indices, rhs.data, rhs.indices)
    out = BCOO((data, indices), shape=[*lhs.shape[:n], *shape])
    return bcoo_sum_duplicates(out, nse=min(out.nse, math.prod(shape)))


def bcoo_dot_general_sampled(A: Any, B: Any, indices: Any, *, dimension_numbers: Dimensions) -> Array:
    """Elements of ``lax.dot_general(A, B)`` at indices, without the others.

    Args:
      indices: of shape (batch..., nse, n), where n counts the dimensions of the result that are not batches.
    """
    (left, right), (left_batch, right_batch) = dimension_numbers
    a, b, n = bnp.asarray(A), bnp.asarray(B), len(left_batch)
    a_free = [d for d in range(a.ndim) if d not in (*left, *left_batch)]
    b_free = [d for d in range(b.ndim) if d not in (*right, *right_batch)]
    a, b = bnp.transpose(a, (*left_batch, *a_free, *left)), bnp.transpose(b, (*right_batch, *b_free, *right))

    def one(x, y, at):
        columns = [at[:, d] for d in range(at.shape[-1])]
        rows = x.at[tuple(columns[: len(a_free)])].get(mode="fill", fill_value=0) if a_free else x[None]
        others = y.at[tuple(columns[len(a_free) :])].get(mode="fill", fill_value=0) if b_free else y[None]
        return (rows * others).sum(tuple(range(1, 1 + len(left))))

    return mapped(one, n)(a, b, bnp.asarray(indices))


def bcsr_dot_general(lhs: Any, rhs: Any, *, dimension_numbers: Dimensions, **options: Any) -> Any:
    """As ``bcoo_dot_general``, of which an operand is in compressed rows.

    Returns:
      as ``bcoo_dot_general``.
    """
    lhs, rhs = (x.to_bcoo() if isinstance(x, BCSR) else x for x in (lhs, rhs))
    return bcoo_dot_general(lhs, rhs, dimension_numbers=dimension_numbers, **options)


def matmul(lhs: Any, rhs: Any) -> Any:
    """``lhs @ rhs`` with a sparse operand: leading dimensions are batches.

    Returns:
      an array, or a ``BCOO`` if both operands are sparse.
    """
    lhs, rhs = (
        x.to_bcoo() if isinstance(x, JAXSparse) and not isinstance(x, BCOO) else x for x in (lhs, rhs)
    )
    lhs, rhs = (x if isinstance(x, BCOO) else bnp.asarray(x) for x in (lhs, rhs))
    a, b = lhs.ndim, rhs.ndim
    if not a or not b:
        raise errors.ShapeError("matmul of a number.", where=source.here(), fix="x * y")
    batch = 0 if min(a, b) <= 2 else a - 2
    if batch and a != b:
        raise refused(f"matmul of {a} and {b} dimensions, one of which is sparse", "bcoo_dot_general")
    contract = ([a - 1], [max(b - 2, 0)])
    over = (list(range(batch)), list(range(batch)))
    out = bcoo_dot_general(lhs, rhs, dimension_numbers=(contract, over))
    if b > 2 >= a:  # the batches of the second operand follow the rows of the first
        rows = a - 1
        order = (*range(rows, rows + b - 2), *range(rows), rows + b - 2)
        return bcoo_transpose(out, permutation=order) if isinstance(out, BCOO) else bnp.transpose(out, order)
    return out


JAXSparse.__matmul__ = matmul  # type: ignore[method-assign]
JAXSparse.__rmatmul__ = lambda self, other: matmul(other, self)  # type: ignore[method-assign]
