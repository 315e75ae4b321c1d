"""Matrices in coordinates, and in compressed rows and columns.

A face, above ``blufunc.numpy``. Each has two dimensions and converts to ``BCOO``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.trace import Array
from blufunc.experimental.sparse import bcoo
from blufunc.experimental.sparse.base import JAXSparse
from blufunc.experimental.sparse.compressed import BCSR
from blufunc.tree_util import register_pytree_with_keys_class

__all__ = [
    "COO", "CSC", "CSR", "coo_fromdense", "coo_matmat", "coo_matvec", "coo_todense", "csr_fromdense", "csr_matmat",
    "csr_matvec", "csr_todense",
]  # fmt: skip


class Matrix(JAXSparse):
    """A sparse matrix of three arrays."""

    _names: ClassVar[tuple[str, str, str]]
    row: Any
    col: Any
    indices: Any
    indptr: Any

    def __init__(self, args: tuple[Any, Any, Any], *, shape: Sequence[int], **flags: bool):
        for name, x in zip(self._names, args, strict=True):
            setattr(self, name, bnp.asarray(x) if hasattr(x, "shape") else x)
        self.flags = flags
        super().__init__(tuple(shape))
        if len(self.shape) != 2:
            raise errors.ShapeError(
                f"{type(self).__name__} of shape {self.shape}.", where=source.here(), fix="BCOO"
            )

    dtype = property(lambda self: self.data.dtype, doc="The dtype of the elements.")

    def tree_flatten_with_keys(self) -> tuple[list[tuple[str, Any]], tuple]:
        """The arrays, which are its children."""
        return [(n, getattr(self, n)) for n in self._names], (self.shape, tuple(self.flags.items()))

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: Sequence[Any]) -> Any:
        """The matrix of children."""
        return cls(tuple(children), shape=aux[0], **dict(aux[1]))

    def to_bcoo(self) -> bcoo.BCOO:
        """The matrix as a ``BCOO``."""
        raise NotImplementedError

    def todense(self) -> Array:
        """The matrix with all elements."""
        return self.to_bcoo().todense()


@register_pytree_with_keys_class
class COO(Matrix):
    """A matrix as ``(data, row, col)``: elements with their rows and columns.

    Args:
      args: these arrays.
      shape: of the matrix.
      flags: ``rows_sorted`` and ``cols_sorted``.
    """

    _names = ("data", "row", "col")

    @classmethod
    def fromdense(cls, mat: Any, *, nse: int | None = None, index_dtype: Any = "int32") -> COO:
        """As ``coo_fromdense``."""
        return coo_fromdense(mat, nse=nse, index_dtype=index_dtype)

    def to_bcoo(self) -> bcoo.BCOO:
        return bcoo.BCOO((self.data, bnp.stack([self.row, self.col], -1)), shape=self.shape)

    def transpose(self, axes: Any = None) -> COO:
        """The transposed matrix."""
        return COO((self.data, self.col, self.row), shape=self.shape[::-1])


@register_pytree_with_keys_class
class CSR(Matrix):
    """A matrix as elements, their columns, and the bounds of the rows.

    Args:
      args: these arrays.
      shape: of the matrix.
      flags: none.
    """

    _names = ("data", "indices", "indptr")

    @classmethod
    def fromdense(cls, mat: Any, *, nse: int | None = None, index_dtype: Any = "int32") -> CSR:
        """As ``csr_fromdense``."""
        return csr_fromdense(mat, nse=nse, index_dtype=index_dtype)

    def to_bcoo(self) -> bcoo.BCOO:
        return BCSR((self.data, self.indices, self.indptr), shape=self.shape).to_bcoo()

    def transpose(self, axes: Any = None) -> CSC:
        """The transposed matrix, whose columns are these rows."""
        return CSC((self.data, self.indices, self.indptr), shape=self.shape[::-1])


@register_pytree_with_keys_class
class CSC(Matrix):
    """A matrix as elements, their rows, and the bounds of the columns.

    Args:
      args: these arrays.
      shape: of the matrix.
      flags: none.
    """

    _names = ("data", "indices", "indptr")

    @classmethod
    def fromdense(cls, mat: Any, *, nse: int | None = None, index_dtype: Any = "int32") -> CSC:
        """The elements of a matrix that are not zero, in compressed columns."""
        return csr_fromdense(bnp.asarray(mat).T, nse=nse, index_dtype=index_dtype).transpose()

    def to_bcoo(self) -> bcoo.BCOO:
        return self.transpose().to_bcoo().transpose()

    def transpose(self, axes: Any = None) -> CSR:
        """The transposed matrix, whose rows are these columns."""
        return CSR((self.data, self.indices, self.indptr), shape=self.shape[::-1])


def coo_fromdense(mat: Any, *, nse: int | None = None, index_dtype: Any = "int32") -> COO:
    """The elements of a matrix that are not zero, with their rows and columns."""
    found = bcoo.bcoo_fromdense(mat, nse=nse, index_dtype=index_dtype)
    return COO((found.data, found.indices[:, 0], found.indices[:, 1]), shape=found.shape, rows_sorted=True)


def csr_fromdense(mat: Any, *, nse: int | None = None, index_dtype: Any = "int32") -> CSR:
    """The elements of a matrix that are not zero, in compressed rows."""
    found = BCSR.from_bcoo(bcoo.bcoo_fromdense(mat, nse=nse, index_dtype=index_dtype))
    return CSR((found.data, found.indices, found.indptr), shape=found.shape)


def coo_todense(mat: COO) -> Array:
    """The matrix with all elements."""
    return mat.todense()


csr_todense = coo_todense


def coo_matvec(mat: Matrix, v: Any, transpose: bool = False) -> Array:
    """The matrix, or its transposed, times a vector."""
    return (mat.transpose() if transpose else mat) @ v


csr_matvec = coo_matmat = csr_matmat = coo_matvec
