"""Sparse arrays: batched coordinates and compressed rows, with derivatives.

A face above ``blufunc.numpy``, under JAX's names. Operations are gathers and scatters of the specified elements, as in
JAX: they save memory, and time where few elements are specified.
"""

from blufunc import _lazy
from blufunc.experimental.sparse import products as products  # which gives the classes their ``@``

with _lazy.names(__name__):
    from blufunc.experimental.sparse.base import CuSparseEfficiencyWarning as CuSparseEfficiencyWarning
    from blufunc.experimental.sparse.base import JAXSparse as JAXSparse
    from blufunc.experimental.sparse.base import SparseEfficiencyError as SparseEfficiencyError
    from blufunc.experimental.sparse.base import SparseEfficiencyWarning as SparseEfficiencyWarning
    from blufunc.experimental.sparse.bcoo import BCOO as BCOO
    from blufunc.experimental.sparse.bcoo import bcoo_broadcast_in_dim as bcoo_broadcast_in_dim
    from blufunc.experimental.sparse.bcoo import bcoo_concatenate as bcoo_concatenate
    from blufunc.experimental.sparse.bcoo import bcoo_dynamic_slice as bcoo_dynamic_slice
    from blufunc.experimental.sparse.bcoo import bcoo_extract as bcoo_extract
    from blufunc.experimental.sparse.bcoo import bcoo_fromdense as bcoo_fromdense
    from blufunc.experimental.sparse.bcoo import bcoo_multiply_dense as bcoo_multiply_dense
    from blufunc.experimental.sparse.bcoo import bcoo_multiply_sparse as bcoo_multiply_sparse
    from blufunc.experimental.sparse.bcoo import bcoo_reduce_sum as bcoo_reduce_sum
    from blufunc.experimental.sparse.bcoo import bcoo_reshape as bcoo_reshape
    from blufunc.experimental.sparse.bcoo import bcoo_rev as bcoo_rev
    from blufunc.experimental.sparse.bcoo import bcoo_slice as bcoo_slice
    from blufunc.experimental.sparse.bcoo import bcoo_sort_indices as bcoo_sort_indices
    from blufunc.experimental.sparse.bcoo import bcoo_squeeze as bcoo_squeeze
    from blufunc.experimental.sparse.bcoo import bcoo_sum_duplicates as bcoo_sum_duplicates
    from blufunc.experimental.sparse.bcoo import bcoo_todense as bcoo_todense
    from blufunc.experimental.sparse.bcoo import bcoo_transpose as bcoo_transpose
    from blufunc.experimental.sparse.bcoo import bcoo_update_layout as bcoo_update_layout
    from blufunc.experimental.sparse.compressed import BCSR as BCSR
    from blufunc.experimental.sparse.compressed import bcsr_broadcast_in_dim as bcsr_broadcast_in_dim
    from blufunc.experimental.sparse.compressed import bcsr_concatenate as bcsr_concatenate
    from blufunc.experimental.sparse.compressed import bcsr_extract as bcsr_extract
    from blufunc.experimental.sparse.compressed import bcsr_fromdense as bcsr_fromdense
    from blufunc.experimental.sparse.compressed import bcsr_sum_duplicates as bcsr_sum_duplicates
    from blufunc.experimental.sparse.compressed import bcsr_todense as bcsr_todense
    from blufunc.experimental.sparse.matrices import COO as COO
    from blufunc.experimental.sparse.matrices import CSC as CSC
    from blufunc.experimental.sparse.matrices import CSR as CSR
    from blufunc.experimental.sparse.matrices import coo_fromdense as coo_fromdense
    from blufunc.experimental.sparse.matrices import coo_matmat as coo_matmat
    from blufunc.experimental.sparse.matrices import coo_matvec as coo_matvec
    from blufunc.experimental.sparse.matrices import coo_todense as coo_todense
    from blufunc.experimental.sparse.matrices import csr_fromdense as csr_fromdense
    from blufunc.experimental.sparse.matrices import csr_matmat as csr_matmat
    from blufunc.experimental.sparse.matrices import csr_matvec as csr_matvec
    from blufunc.experimental.sparse.matrices import csr_todense as csr_todense
    from blufunc.experimental.sparse.products import bcoo_dot_general as bcoo_dot_general
    from blufunc.experimental.sparse.products import bcoo_dot_general_sampled as bcoo_dot_general_sampled
    from blufunc.experimental.sparse.products import bcsr_dot_general as bcsr_dot_general
    from blufunc.experimental.sparse.transforms import empty as empty
    from blufunc.experimental.sparse.transforms import eye as eye
    from blufunc.experimental.sparse.transforms import grad as grad
    from blufunc.experimental.sparse.transforms import jacfwd as jacfwd
    from blufunc.experimental.sparse.transforms import jacobian as jacobian
    from blufunc.experimental.sparse.transforms import jacrev as jacrev
    from blufunc.experimental.sparse.transforms import random_bcoo as random_bcoo
    from blufunc.experimental.sparse.transforms import sparsify as sparsify
    from blufunc.experimental.sparse.transforms import todense as todense
    from blufunc.experimental.sparse.transforms import value_and_grad as value_and_grad
