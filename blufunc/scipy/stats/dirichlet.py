"""The Dirichlet distribution: positive numbers whose sum is 1.

The numbers are along the first axis, as in SciPy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import source
from blufunc.numpy.promotion import promote_dtypes
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf"]


def logpdf(x: ArrayLike, alpha: ArrayLike) -> Array:
    """The logarithm of the density at ``x``.

    It is minus infinity where the numbers are not positive or do not add up to 1.

    Args:
      x: of shape [n, ...]; or [n - 1, ...], without the last number, which follows from the sum.
      alpha: the concentrations, positive, of shape [n].
    Returns:
      an array of the shape of ``x`` without its first axis.
    Raises:
      ShapeError: the shapes do not go together.
    """
    x, alpha = promote_dtypes("dirichlet.logpdf", x, alpha, inexact=True)
    if alpha.ndim != 1 or not x.ndim or x.shape[0] not in (alpha.shape[0], alpha.shape[0] - 1):
        raise errors.ShapeError(
            f"dirichlet.logpdf takes x of shape [n, ...] or [n - 1, ...] and alpha of shape [n], not {x.aval} and "
            f"{alpha.aval}.",
            where=source.here(),
            fix="move the axis of the numbers to the front: bnp.moveaxis(x, -1, 0)",
        )
    if x.shape[0] != alpha.shape[0]:
        x = bnp.concatenate([x, 1 - bnp.sum(x, axis=0, keepdims=True)])
    inside = bnp.all(x > 0, axis=0) & (bnp.abs(bnp.sum(x, axis=0) - 1) < 1e-6)
    normalizer = bnp.sum(lax.lgamma(alpha)) - lax.lgamma(bnp.sum(alpha))
    powers = alpha.reshape((-1,) + (1,) * (x.ndim - 1)) - 1
    return bnp.where(inside, bnp.sum(special.xlogy(powers, x), axis=0) - normalizer, -math.inf)


pdf = exp_of(logpdf)
