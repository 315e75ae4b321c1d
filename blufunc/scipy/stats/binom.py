"""The binomial distribution: the successes in ``n`` trials of success probability ``p``.

A face, one module of ``scipy.stats``. ``n`` is a number from 0 on, ``p`` a probability. With ``loc`` the distribution
is that of such a number plus ``loc``. They and the arguments are scalars or arrays that broadcast together; integers
become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.scipy import special
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpmf", "pmf"]


def logpmf(k: Any, n: Any, p: Any, loc: Any = 0) -> Any:
    """The logarithm of the probability of ``k``."""
    k, n, p, loc = arguments("binom.logpmf", k, n, p, loc)
    y = k - loc
    inside = (y >= 0) & (y < n + 1)
    y = bnp.where(inside, y, 0)
    ways = lax.lgamma(n + 1) - lax.lgamma(y + 1) - lax.lgamma(n - y + 1)
    log_p = ways + special.xlogy(y, p) + special.xlog1py(n - y, -p)
    return bnp.where(inside, log_p, -math.inf)


def pmf(k: Any, n: Any, p: Any, loc: Any = 0) -> Any:
    """The probability of ``k``."""
    return bnp.exp(logpmf(k, n, p, loc))
