"""The Poisson distribution of mean ``mu >= 0``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpmf", "pmf", "cdf", "entropy"]


@promoted
def logpmf(k: ArrayLike, mu: ArrayLike, loc: ArrayLike = 0) -> Array:
    """The logarithm of the probability of ``k``."""
    x = k - loc
    inside = (x >= 0) & (bnp.round(k) == k)
    x = bnp.where(inside, x, 0)
    return bnp.where(inside, special.xlogy(x, mu) - lax.lgamma(x + 1) - mu, -math.inf)


@promoted
def cdf(k: ArrayLike, mu: ArrayLike, loc: ArrayLike = 0) -> Array:
    """The probability of a number of at most ``k``."""
    x = k - loc
    p = special.gammaincc(bnp.floor(bnp.maximum(x, 0) + 1), mu)
    return bnp.where(x < 0, 0, p)


@promoted
def entropy(mu: ArrayLike, loc: ArrayLike = 0) -> Array:
    """The entropy in nats, NaN unless ``mu > 0``; ``loc`` has no part in it.

    Below 100 it is a sum over all numbers whose probability is not below rounding, else its asymptotic series (R. J.
    Evans, J. Boersma, N. M. Blachman and A. A. Jagers, "The entropy of a Poisson distribution" (1988)).
    """
    small = mu < 100
    m = bnp.where(small & (mu > 0), mu, 1)

    def term(k, total):
        k = k.astype(m.dtype)
        log_p = k * bnp.log(m) - m - lax.lgamma(k + 1)
        return total - bnp.exp(log_p) * log_p

    summed = lax.fori_loop(0, 220, term, bnp.zeros_like(m))  # 220: 12 standard deviations above 100
    r = 1 / bnp.where(small, 100, mu)
    series = bnp.log(2 * math.pi * math.e / r) / 2 - r / 12 - r**2 / 24 - 19 * r**3 / 360
    return bnp.where(mu > 0, bnp.where(small, summed, series), math.nan) + 0 * loc


pmf = exp_of(logpmf)
