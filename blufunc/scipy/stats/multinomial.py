"""The multinomial distribution: counts of the outcomes of ``n`` trials.

The outcomes are along the last axis.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.numpy.promotion import promote_dtypes
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpmf", "pmf"]


def logpmf(x: ArrayLike, n: ArrayLike, p: ArrayLike) -> Array:
    """The logarithm of the probability of the counts ``x``.

    It is minus infinity where the sum of the counts is not ``n``.

    Args:
      x: integers, of shape [..., k].
      n: integers, broadcasts to the shape of ``x`` without its last axis.
      p: probabilities, broadcasts to the shape of ``x``.
    Raises:
      DtypeError: ``x`` or ``n`` does not hold integers.
    """
    x, n = promote_dtypes("multinomial.logpmf", x, n)
    (p,) = promote_dtypes("multinomial.logpmf", p, inexact=True)
    if not dtypes.is_integer(x.dtype) or not x.ndim:
        raise errors.DtypeError(
            f"multinomial.logpmf takes integers x and n, x along an axis, not {x.aval} and {n.aval}.",
            where=source.here(),
            fix="x.astype('int32')",
        )
    matches = bnp.sum(x, axis=-1) == n
    x, n = x.astype(p.dtype), n.astype(p.dtype)
    log_p = lax.lgamma(n + 1) + bnp.sum(special.xlogy(x, p) - lax.lgamma(x + 1), axis=-1)
    return bnp.where(matches, log_p, -math.inf)


pmf = exp_of(logpmf)
