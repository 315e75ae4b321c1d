"""Primitives of ``jax.experimental.sparse``, on the arrays of their operands.

Under the face ``as_jax``. ``spinfo`` is what JAX calls ``SparseInfo``: an object with the shape of the array.
"""

from __future__ import annotations

from typing import Any

from blufunc.as_jax.extras.composed import Composed
from blufunc.core.pytree import tree
from blufunc.experimental import sparse

__all__ = [
    "bcoo_dot_general_p", "bcoo_dot_general_sampled_p", "bcoo_extract_p", "bcoo_fromdense_p", "bcoo_sort_indices_p",
    "bcoo_spdot_general_p", "bcoo_todense_p", "bcoo_transpose_p", "bcsr_dot_general_p", "bcsr_extract_p",
    "bcsr_fromdense_p", "bcsr_todense_p", "coo_fromdense_p", "coo_matmat_p", "coo_matvec_p", "coo_todense_p",
    "csr_fromdense_p", "csr_matmat_p", "csr_matvec_p", "csr_todense_p", "todense_p",
]  # fmt: skip


def _bcoo(data: Any, indices: Any, spinfo: Any) -> sparse.BCOO:
    return sparse.BCOO((data, indices), shape=spinfo.shape)


def _bcsr(data: Any, indices: Any, indptr: Any, spinfo: Any) -> sparse.BCSR:
    return sparse.BCSR((data, indices, indptr), shape=spinfo.shape)


def _dot(
    data: Any, indices: Any, rhs: Any, *, dimension_numbers: Any, lhs_spinfo: Any, **options: Any
) -> Any:
    kept = {"preferred_element_type": options.get("preferred_element_type")}
    lhs = _bcoo(data, indices, lhs_spinfo)
    return sparse.bcoo_dot_general(lhs, rhs, dimension_numbers=dimension_numbers, **kept)


def _sparse_dot(
    *arrays: Any, lhs_spinfo: Any, rhs_spinfo: Any, dimension_numbers: Any, **options: Any
) -> list[Any]:
    (a, a_at, b, b_at) = arrays
    lhs, rhs = _bcoo(a, a_at, lhs_spinfo), _bcoo(b, b_at, rhs_spinfo)
    out = sparse.bcoo_dot_general(lhs, rhs, dimension_numbers=dimension_numbers)
    return [out.data, out.indices]


def _compressed_dot(*arrays: Any, dimension_numbers: Any, lhs_spinfo: Any, **options: Any) -> Any:
    data, indices, indptr, rhs = arrays
    lhs = _bcsr(data, indices, indptr, lhs_spinfo)
    return sparse.bcsr_dot_general(lhs, rhs, dimension_numbers=dimension_numbers)


def _sorted(data: Any, indices: Any, *, spinfo: Any) -> list[Any]:
    out = sparse.bcoo_sort_indices(_bcoo(data, indices, spinfo))
    return [out.data, out.indices]


def _transposed(data: Any, indices: Any, *, permutation: Any, spinfo: Any) -> list[Any]:
    out = sparse.bcoo_transpose(_bcoo(data, indices, spinfo), permutation=permutation)
    return [out.data, out.indices]


def _extracted(indices: Any, mat: Any, *, assume_unique: bool = True) -> Any:
    n_batch, n_sparse = indices.ndim - 2, indices.shape[-1]
    blank = sparse.bcoo_fromdense(
        0 * mat, nse=indices.shape[-2], n_batch=n_batch, n_dense=mat.ndim - n_batch - n_sparse
    )
    at = sparse.BCOO((blank.data, indices), shape=mat.shape)
    return sparse.bcoo_extract(at, mat, assume_unique=assume_unique).data


def _fromdense(make: Any, names: str) -> Any:
    def found(mat: Any, **options: Any) -> list[Any]:
        out = make(mat, **options)
        return [getattr(out, n) for n in names.split()]

    return found


def _of_matrix(cls: type, function: Any) -> Any:
    """A function of a matrix as one of its arrays."""

    def of_arrays(*args: Any, shape: Any = None, spinfo: Any = None, **options: Any) -> Any:
        mat = cls(args[:3], shape=shape or spinfo.shape)
        return function(mat, *args[3:], **options)

    return of_arrays


bcoo_todense_p = Composed(
    "bcoo_todense", lambda data, indices, *, spinfo: _bcoo(data, indices, spinfo).todense()
)
bcoo_fromdense_p = Composed("bcoo_fromdense", _fromdense(sparse.bcoo_fromdense, "data indices"), True)
bcoo_extract_p = Composed("bcoo_extract", _extracted)
bcoo_dot_general_p = Composed("bcoo_dot_general", _dot)
bcoo_dot_general_sampled_p = Composed("bcoo_dot_general_sampled", sparse.bcoo_dot_general_sampled)
bcoo_spdot_general_p = Composed("bcoo_spdot_general", _sparse_dot, True)
bcoo_sort_indices_p = Composed("bcoo_sort_indices", _sorted, True)
bcoo_transpose_p = Composed("bcoo_transpose", _transposed, True)
bcsr_todense_p = Composed("bcsr_todense", lambda x, at, ends, *, spinfo: _bcsr(x, at, ends, spinfo).todense())
bcsr_fromdense_p = Composed("bcsr_fromdense", _fromdense(sparse.bcsr_fromdense, "data indices indptr"), True)
bcsr_extract_p = Composed("bcsr_extract", sparse.bcsr_extract)
bcsr_dot_general_p = Composed("bcsr_dot_general", _compressed_dot)
coo_todense_p = Composed("coo_todense", _of_matrix(sparse.COO, sparse.coo_todense))
coo_fromdense_p = Composed("coo_fromdense", _fromdense(sparse.coo_fromdense, "data row col"), True)
coo_matvec_p = Composed("coo_matvec", _of_matrix(sparse.COO, sparse.coo_matvec))
coo_matmat_p = Composed("coo_matmat", _of_matrix(sparse.COO, sparse.coo_matmat))
csr_todense_p = Composed("csr_todense", _of_matrix(sparse.CSR, sparse.csr_todense))
csr_fromdense_p = Composed("csr_fromdense", _fromdense(sparse.csr_fromdense, "data indices indptr"), True)
csr_matvec_p = Composed("csr_matvec", _of_matrix(sparse.CSR, sparse.csr_matvec))
csr_matmat_p = Composed("csr_matmat", _of_matrix(sparse.CSR, sparse.csr_matmat))
todense_p = Composed("todense", lambda *arrays, tree: _rebuilt(tree, arrays).todense())


def _rebuilt(structure: Any, arrays: Any) -> Any:
    return tree.unflatten(structure, arrays)
