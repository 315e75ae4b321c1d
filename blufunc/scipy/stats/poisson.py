"""The Poisson distribution of mean ``mu >= 0``."""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, promoted

__all__ = ["logpmf", "pmf", "cdf"]


@promoted
def logpmf(k: Any, mu: Any, loc: Any = 0) -> Any:
    """The logarithm of the probability of ``k``."""
    x = k - loc
    inside = (x >= 0) & (bnp.round(k) == k)
    x = bnp.where(inside, x, 0)
    return bnp.where(inside, special.xlogy(x, mu) - lax.lgamma(x + 1) - mu, -math.inf)


@promoted
def cdf(k: Any, mu: Any, loc: Any = 0) -> Any:
    """The probability of a number of at most ``k``."""
    x = k - loc
    p = special.gammaincc(bnp.floor(bnp.maximum(x, 0) + 1), mu)
    return bnp.where(x < 0, 0, p)


pmf = exp_of(logpmf)
