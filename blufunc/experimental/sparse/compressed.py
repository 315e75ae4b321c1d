"""Compressed rows: the class ``BCSR``, a ``BCOO`` with the ends of its rows.

A face, above ``blufunc.numpy``. The rows are the first of two sparse dimensions, in order. Operations convert to
coordinates, for which they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.trace import Array
from blufunc.experimental.sparse import bcoo
from blufunc.experimental.sparse.base import JAXSparse, shape_of_children
from blufunc.tree_util import register_pytree_with_keys_class

__all__ = [
    "BCSR", "bcsr_broadcast_in_dim", "bcsr_concatenate", "bcsr_extract", "bcsr_fromdense", "bcsr_sum_duplicates",
    "bcsr_todense",
]  # fmt: skip


@register_pytree_with_keys_class
class BCSR(JAXSparse):
    """A batched sparse array in compressed rows.

    Args:
      args: ``(data, indices, indptr)``: elements, their columns, and where each row begins, then ends.
      shape: of the array: (batch..., rows, columns, dense...).
      indices_sorted: whether the columns of each row are in order.
      unique_indices: whether no place occurs twice.
    """

    def __init__(
        self,
        args: tuple[Any, Any, Any],
        *,
        shape: Sequence[int],
        indices_sorted: bool = False,
        unique_indices: bool = False,
    ):
        self.data, self.indices, self.indptr = (bnp.asarray(x) if hasattr(x, "shape") else x for x in args)
        self.indices_sorted, self.unique_indices = indices_sorted, unique_indices
        super().__init__(tuple(shape))
        if all(hasattr(x, "shape") for x in args):
            batch = self.shape[: self.indices.ndim - 1]
            if self.indptr.shape != (*batch, self.shape[len(batch)] + 1):
                raise errors.ShapeError(
                    f"BCSR of shape {self.shape}: indptr has the shape {self.indptr.shape}.",
                    where=source.here(),
                    why="it has one more element than there are rows.",
                )

    n_sparse = 2
    nse = property(lambda self: self.indices.shape[-1], doc="The number of specified elements in each batch.")
    n_batch = property(lambda self: self.indices.ndim - 1, doc="The number of leading batch dimensions.")
    n_dense = property(
        lambda self: self.data.ndim - self.indices.ndim, doc="The number of trailing dense dimensions."
    )
    dtype = property(lambda self: self.data.dtype, doc="The dtype of the elements.")

    def tree_flatten_with_keys(self) -> tuple[list[tuple[str, Any]], tuple]:
        """The arrays, which are its children."""
        arrays = [("data", self.data), ("indices", self.indices), ("indptr", self.indptr)]
        n_batch = self.n_batch if hasattr(self.indices, "shape") else 0
        return arrays, (self.shape, n_batch, self.indices_sorted, self.unique_indices)

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: Sequence[Any]) -> BCSR:
        """The array of children."""
        shape, n_batch, indices_sorted, unique = aux
        shape = shape_of_children(shape, n_batch, children[1], 1)
        return cls(tuple(children), shape=shape, indices_sorted=indices_sorted, unique_indices=unique)

    @classmethod
    def fromdense(cls, mat: Any, **options: Any) -> BCSR:
        """As ``bcsr_fromdense``."""
        return bcsr_fromdense(mat, **options)

    @classmethod
    def from_bcoo(cls, arr: bcoo.BCOO) -> BCSR:
        """The array with two sparse dimensions in coordinates, in compressed rows."""
        if arr.n_sparse != 2:
            raise errors.ShapeError(
                f"BCSR of a BCOO with n_sparse={arr.n_sparse}.", where=source.here(), fix="2"
            )
        arr = arr if arr.indices_sorted else bcoo.bcoo_sort_indices(arr)
        rows = arr.shape[arr.n_batch]
        count = lambda indices: bnp.searchsorted(indices[:, 0], bnp.arange(rows + 1, dtype=indices.dtype))
        indptr = bcoo.mapped(count, arr.n_batch)(arr.indices).astype(arr.indices.dtype)
        return cls(
            (arr.data, arr.indices[..., 1], indptr), shape=arr.shape, unique_indices=arr.unique_indices
        )

    @classmethod
    def from_scipy_sparse(
        cls, mat: Any, *, index_dtype: Any = None, n_dense: int = 0, n_batch: int = 0
    ) -> BCSR:
        """A matrix of SciPy."""
        return cls.from_bcoo(
            bcoo.BCOO.from_scipy_sparse(mat, index_dtype=index_dtype, n_dense=n_dense, n_batch=n_batch)
        )

    def to_bcoo(self) -> bcoo.BCOO:
        """The array in coordinates."""
        rows = self.shape[self.n_batch]

        def one(indices, indptr):
            row = bnp.searchsorted(indptr, bnp.arange(indices.shape[0], dtype=indptr.dtype), side="right") - 1
            return bnp.stack([bnp.minimum(row, rows).astype(indices.dtype), indices], -1)

        indices = bcoo.mapped(one, self.n_batch)(self.indices, self.indptr)
        return bcoo.BCOO((self.data, indices), shape=self.shape, unique_indices=self.unique_indices)

    def todense(self) -> Array:
        """The array with all elements."""
        return bcsr_todense(self)

    def transpose(self, axes: Sequence[int] | None = None) -> bcoo.BCOO:
        """The array with its dimensions in another order, in coordinates."""
        return self.to_bcoo().transpose(axes)

    def sum_duplicates(self, nse: int | None = None, remove_zeros: bool = True) -> BCSR:
        """As ``bcsr_sum_duplicates``."""
        return bcsr_sum_duplicates(self, nse)


def bcsr_fromdense(
    mat: Any, *, nse: int | None = None, n_batch: int = 0, n_dense: int = 0, index_dtype: Any = "int32"
) -> BCSR:
    """The elements of an array that are not zero; as ``bcoo_fromdense``."""
    found = bcoo.bcoo_fromdense(mat, nse=nse, n_batch=n_batch, n_dense=n_dense, index_dtype=index_dtype)
    return BCSR.from_bcoo(found)


def bcsr_todense(mat: BCSR) -> Array:
    """The array with all elements."""
    return bcoo.bcoo_todense(mat.to_bcoo())


def bcsr_extract(indices: Any, indptr: Any, mat: Any) -> Array:
    """The elements of an array at the places of compressed rows."""
    mat, indices = bnp.asarray(mat), bnp.asarray(indices)
    n_batch = indices.ndim - 1
    blank = bnp.zeros((*indices.shape, *mat.shape[n_batch + 2 :]), mat.dtype)
    place = BCSR((blank, indices, indptr), shape=mat.shape)
    return bcoo.at_indices(place.to_bcoo(), mat)


def bcsr_sum_duplicates(mat: BCSR, nse: int | None = None, remove_zeros: bool = True) -> BCSR:
    """The same array in which no place occurs twice."""
    return BCSR.from_bcoo(bcoo.bcoo_sum_duplicates(mat.to_bcoo(), nse))


def bcsr_broadcast_in_dim(
    mat: BCSR, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], sharding: Any = None
) -> BCSR:
    """As ``lax.broadcast_in_dim``; new leading dimensions are batches."""
    out = bcoo.bcoo_broadcast_in_dim(mat.to_bcoo(), shape=shape, broadcast_dimensions=broadcast_dimensions)
    return BCSR.from_bcoo(out)


def bcsr_concatenate(operands: Sequence[BCSR], *, dimension: int) -> BCSR:
    """Arrays one after another along a dimension that is of batches, or sparse."""
    return BCSR.from_bcoo(bcoo.bcoo_concatenate([x.to_bcoo() for x in operands], dimension=dimension))
