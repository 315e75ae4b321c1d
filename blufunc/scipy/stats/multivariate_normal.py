"""The normal distribution of vectors.

The vectors are along the last axis.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import source
from blufunc.numpy.promotion import promote_dtypes

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf"]


def logpdf(x: ArrayLike, mean: ArrayLike, cov: ArrayLike, allow_singular: bool | None = None) -> Array:
    """The logarithm of the density at ``x``.

    Args:
      x: of shape [..., n].
      mean: of shape [..., n]; or a number, for the normal distribution of numbers.
      cov: positive definite matrices, of shape [..., n, n]; or a number, the variance of all n of them.
      allow_singular: must be None: the density of a singular distribution is not supported.
    Returns:
      an array of the leading axes together.
    Raises:
      ShapeError: the shapes do not go together.
    """
    if allow_singular is not None:
        raise errors.UnsupportedError(
            "multivariate_normal.logpdf does not support allow_singular.",
            where=source.here(),
            why="whether a covariance is singular depends on its values.",
            fix="leave it out, and add a multiple of the identity to the covariance",
        )
    x, mean, cov = promote_dtypes("multivariate_normal.logpdf", x, mean, cov, inexact=True)
    if not mean.ndim:
        return (bnp.square(x - mean) / cov + bnp.log(cov * (2 * math.pi))) * -0.5
    n = mean.shape[-1]
    y = x - mean
    if not cov.ndim:
        return (bnp.sum(bnp.square(y), axis=-1) / cov + bnp.log(cov * (2 * math.pi)) * n) * -0.5
    if cov.ndim < 2 or cov.shape[-2:] != (n, n) or y.shape[-1] != n:
        raise errors.ShapeError(
            f"multivariate_normal.logpdf: x, mean and cov of types {x.aval}, {mean.aval} and {cov.aval} do not go "
            "together.",
            where=source.here(),
            fix="x and mean of shape [..., n], cov of shape [..., n, n]",
        )
    factor = bnp.linalg.cholesky(cov)
    batch = bnp.broadcast_shapes(y.shape[:-1], cov.shape[:-2])
    white = lax.linalg.triangular_solve(
        bnp.broadcast_to(factor, (*batch, n, n)),
        bnp.broadcast_to(y, (*batch, n))[..., None],
        left_side=True,
        lower=True,
    )[..., 0]
    log_root = bnp.sum(bnp.log(bnp.diagonal(factor, axis1=-2, axis2=-1)), axis=-1)
    return bnp.sum(bnp.square(white), axis=-1) * -0.5 - log_root - 0.5 * n * math.log(2 * math.pi)


def pdf(x: ArrayLike, mean: ArrayLike, cov: ArrayLike) -> Array:
    """The density at ``x``: see ``logpdf``."""
    return bnp.exp(logpdf(x, mean, cov))
