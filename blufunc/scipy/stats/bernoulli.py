"""The Bernoulli distribution: 1 with probability ``p``, and 0 otherwise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpmf", "pmf", "cdf", "ppf"]


@promoted
def logpmf(k: ArrayLike, p: ArrayLike, loc: ArrayLike = 0) -> Array:
    """The logarithm of the probability of ``k``."""
    x = k - loc
    log_p = special.xlogy(x, p) + special.xlog1py(1 - x, -p)
    return bnp.where((x == 0) | (x == 1), log_p, -math.inf)


@promoted
def cdf(k: ArrayLike, p: ArrayLike) -> Array:
    """The probability of a number of at most ``k``."""
    valid = (p >= 0) & (p <= 1) & (k == k)
    return bnp.where(valid, bnp.where(k < 0, 0, bnp.where(k < 1, 1 - p, 1)), math.nan)


@promoted
def ppf(q: ArrayLike, p: ArrayLike) -> Array:
    """Quantile function: the inverse of ``cdf``, at probability ``q``."""
    valid = (p >= 0) & (p <= 1) & (q >= 0) & (q <= 1)
    return bnp.where(valid, (q > 1 - p).astype(q.dtype), math.nan)


pmf = exp_of(logpmf)
