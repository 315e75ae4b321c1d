"""The Bernoulli distribution: 1 with probability ``p``, and 0 otherwise.

A face, one module of ``scipy.stats``. ``p`` is a probability. With ``loc`` the distribution is that of such a number
plus ``loc``. They and the arguments are scalars or arrays that broadcast together; integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpmf", "pmf", "cdf", "ppf"]


def logpmf(k: Any, p: Any, loc: Any = 0) -> Any:
    """The logarithm of the probability of ``k``."""
    k, p, loc = arguments("bernoulli.logpmf", k, p, loc)
    x = k - loc
    log_p = special.xlogy(x, p) + special.xlog1py(1 - x, -p)
    return bnp.where((x == 0) | (x == 1), log_p, -math.inf)


def pmf(k: Any, p: Any, loc: Any = 0) -> Any:
    """The probability of ``k``."""
    return bnp.exp(logpmf(k, p, loc))


def cdf(k: Any, p: Any) -> Any:
    """The probability of a number of at most ``k``."""
    k, p = arguments("bernoulli.cdf", k, p)
    valid = (p >= 0) & (p <= 1) & (k == k)
    return bnp.where(valid, bnp.where(k < 0, 0, bnp.where(k < 1, 1 - p, 1)), math.nan)


def ppf(q: Any, p: Any) -> Any:
    """Quantile function: the inverse of ``cdf``, at probability ``q``."""
    q, p = arguments("bernoulli.ppf", q, p)
    valid = (p >= 0) & (p <= 1) & (q >= 0) & (q <= 1)
    return bnp.where(valid, (q > 1 - p).astype(q.dtype), math.nan)
