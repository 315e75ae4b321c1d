"""``lax.linalg``: matrix decompositions and solvers, under the names of JAX.

Face over ``core.ops.linalg``. Functions here are strict, as all of ``lax``: matrices, in the last two axes, of
float32, float64, complex64 or complex128, with equal leading batch axes. ``blufunc.numpy.linalg`` promotes.
"""

from __future__ import annotations

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
from blufunc.core.ops.linalg.solve import lu_solve_p
from blufunc.core.ops.linalg.spectral import eig, eig_p, eigh, eigh_p, svd, svd_p
from blufunc.core.ops.linalg.triangular import triangular_solve, triangular_solve_p
from blufunc.core.ops.linalg.tridiagonal import tridiagonal_solve, tridiagonal_solve_p

__all__ = [
    "cholesky", "eig", "eigh", "lu", "lu_pivots_to_permutation", "qr", "svd", "triangular_solve",
    "tridiagonal_solve",
    # primitives
    "cholesky_p", "eig_p", "eigh_p", "lu_p", "lu_pivots_to_permutation_p", "lu_solve_p", "qr_p", "svd_p",
    "triangular_solve_p", "tridiagonal_solve_p",
]  # fmt: skip
