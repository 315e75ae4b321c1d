"""Samples by linear algebra: multivariate normal vectors, orthogonal matrices.

A face, above ``random.continuous`` and ``blufunc.numpy.linalg``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.random.arguments import (
    Shape,
    check_broadcast,
    common_shape,
    float_dtype,
    fresh_key,
    mode_of,
    real,
    shape_of,
)
from blufunc.random.continuous import inexact_dtype, normal_

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array


def multivariate_normal(
    key: ArrayLike,
    mean: ArrayLike,
    cov: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    method: str = "cholesky",
) -> Array:
    """Samples from the normal distribution of a given mean and covariance.

    Args:
      mean: of shape [..., n].
      cov: symmetric and positive semidefinite matrices, of shape [..., n, n]; the result is differentiable in both.
      shape: of the result without its last axis, to which the leading axes of ``mean`` and ``cov`` broadcast; by
        default theirs together.
      dtype: a real floating dtype; by default that of ``mean`` and ``cov`` together.
      method: how the covariance is factored: ``"cholesky"``, the fastest, which needs a positive definite matrix;
        ``"eigh"`` or ``"svd"``.
    Raises:
      ShapeError: shapes that do not go together.
    """
    name = "multivariate_normal"
    key = fresh_key(name, key)
    mean, cov = real(name, "mean", mean), real(name, "cov", cov)
    method = mode_of(name, method, ("svd", "eigh", "cholesky"))
    if mean.ndim < 1 or cov.ndim < 2 or cov.shape[-2:] != (mean.shape[-1],) * 2:
        raise errors.ShapeError(
            f"random.multivariate_normal takes a mean of shape [..., n] and a covariance of shape [..., n, n], not "
            f"{mean.aval} and {cov.aval}.",
            where=source.here(),
            fix="mean = bnp.zeros(n), cov = bnp.eye(n)",
        )
    wide = bnp.result_type(mean, cov)
    wide = wide if dtypes.is_floating(wide) else dtypes.float32
    dtype = wide if dtype is None else float_dtype(name, dtype)
    mean, cov = mean.astype(wide), cov.astype(wide)
    batches = {"mean": mean.shape[:-1], "cov": cov.shape[:-2]}
    if shape is None:
        shape = common_shape(name, batches)
    else:
        shape = shape_of(name, shape)
        for what, batch in batches.items():
            check_broadcast(name, f"{what} without its own axes", batch, shape)
    drawn = normal_(key, (*shape, mean.shape[-1]), dtype)
    moved = bnp.einsum("...ij,...j->...i", _factor(cov, method), drawn)
    return bnp.broadcast_to(mean, moved.shape) + moved


def _factor(cov: Any, method: str) -> Any:
    """A matrix whose product with its own transpose is ``cov``."""
    if method == "cholesky":
        return bnp.linalg.cholesky(cov)
    if method == "eigh":
        values, vectors = bnp.linalg.eigh(cov)
    else:
        vectors, values, _ = bnp.linalg.svd(cov)
    return vectors * bnp.sqrt(values[..., None, :])


def orthogonal(
    key: ArrayLike, n: int, shape: Shape = (), dtype: DTypeLike = float, m: int | None = None
) -> Array:
    """Orthogonal (or unitary) matrices, uniform in the sense of Haar's measure.

    F. Mezzadri, "How to generate random matrices from the classical compact groups", arXiv:math-ph/0609050.

    Args:
      n: the number of rows.
      shape: of the array of matrices.
      dtype: floating or complex.
      m: the number of columns; ``n`` by default. Of a matrix that is not square, the columns are orthonormal if it
        is tall, else the rows.
    Returns:
      an array of shape ``(*shape, n, m)``.
    """
    name = "orthogonal"
    key, shape, dtype = fresh_key(name, key), shape_of(name, shape), inexact_dtype(name, dtype)
    rows = static_int(n, "random.orthogonal", "n")
    columns = rows if m is None else static_int(m, "random.orthogonal", "m")
    if rows < 0 or columns < 0:
        raise errors.ValueRangeError(
            f"random.orthogonal: there are no matrices of {rows} rows and {columns} columns.",
            where=source.here(),
            fix="give 0 or more",
        )
    q, r = bnp.linalg.qr(normal_(key, (*shape, max(rows, columns), min(rows, columns)), dtype))
    # a factorisation is only unique up to these signs: taken as they come, they are not uniform
    x = q * bnp.sign(bnp.diagonal(r, axis1=-2, axis2=-1))[..., None, :]
    return bnp.matrix_transpose(x) if rows < columns else x
