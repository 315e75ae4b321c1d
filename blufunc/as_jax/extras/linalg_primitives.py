"""Composed primitives of ``jax.lax.linalg``. Under the face ``as_jax``."""

from blufunc.as_jax.extras.composed import (
    cholesky_update_p,
    hessenberg_p,
    householder_product_p,
    schur_p,
    symmetric_product_p,
    tridiagonal_p,
)
from blufunc.as_jax.extras.window_primitives import ormqr_p

__all__ = [
    "cholesky_update_p",
    "hessenberg_p",
    "householder_product_p",
    "ormqr_p",
    "schur_p",
    "symmetric_product_p",
    "tridiagonal_p",
]
