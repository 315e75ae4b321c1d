"""``lax.linalg``: matrix decompositions and solvers, under the names of JAX.

Face over ``core.ops.linalg`` and ``factorizations``. Functions here are strict, as all of ``lax``: matrices, in the
last two axes, of float32, float64, complex64 or complex128, with equal leading batch axes. ``blufunc.numpy.linalg``
promotes.
"""

from __future__ import annotations

from blufunc.core.ops.linalg.algorithms import EighImplementation, EigImplementation, SvdAlgorithm
from blufunc.core.ops.linalg.factor import (
    cholesky,
    cholesky_p,
    lu,
    lu_p,
    lu_pivots_to_permutation,
    lu_pivots_to_permutation_p,
    qr,
    qr_p,
)
from blufunc.core.ops.linalg.reduction import hessenberg_p, schur_p, tridiagonal_p
from blufunc.core.ops.linalg.solve import lu_solve_p
from blufunc.core.ops.linalg.spectral import eig, eig_p, eigh, eigh_p, svd, svd_p
from blufunc.core.ops.linalg.triangular import triangular_solve, triangular_solve_p
from blufunc.core.ops.linalg.tridiagonal import tridiagonal_solve_p
from blufunc.lax.factorizations import (
    cholesky_update,
    hessenberg,
    householder_product,
    ormqr,
    qdwh,
    schur,
    symmetric_product,
    tridiagonal,
    tridiagonal_solve,
)

__all__ = [
    "EigImplementation", "EighImplementation", "SvdAlgorithm", "cholesky", "cholesky_update", "eig", "eigh",
    "hessenberg", "householder_product", "lu", "lu_pivots_to_permutation", "ormqr", "qdwh", "qr", "schur", "svd",
    "symmetric_product", "triangular_solve", "tridiagonal", "tridiagonal_solve",
    # primitives
    "cholesky_p", "eig_p", "eigh_p", "hessenberg_p", "lu_p", "lu_pivots_to_permutation_p", "lu_solve_p", "qr_p",
    "schur_p", "svd_p", "triangular_solve_p", "tridiagonal_p", "tridiagonal_solve_p",
]  # fmt: skip
