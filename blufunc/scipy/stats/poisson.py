"""The Poisson distribution of mean ``mu``.

A face, one module of ``scipy.stats``. ``mu`` is a number from 0 on. With ``loc`` the distribution is that of such a
number plus ``loc``. They and the arguments are scalars or arrays that broadcast together; integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.scipy import special
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpmf", "pmf", "cdf"]


def logpmf(k: Any, mu: Any, loc: Any = 0) -> Any:
    """The logarithm of the probability of ``k``."""
    k, mu, loc = arguments("poisson.logpmf", k, mu, loc)
    x = k - loc
    inside = (x >= 0) & (bnp.round(k) == k)
    x = bnp.where(inside, x, 0)
    return bnp.where(inside, special.xlogy(x, mu) - lax.lgamma(x + 1) - mu, -math.inf)


def pmf(k: Any, mu: Any, loc: Any = 0) -> Any:
    """The probability of ``k``."""
    return bnp.exp(logpmf(k, mu, loc))


def cdf(k: Any, mu: Any, loc: Any = 0) -> Any:
    """The probability of a number of at most ``k``."""
    k, mu, loc = arguments("poisson.cdf", k, mu, loc)
    x = k - loc
    p = special.gammaincc(bnp.floor(bnp.maximum(x, 0) + 1), mu)
    return bnp.where(x < 0, 0, p)
