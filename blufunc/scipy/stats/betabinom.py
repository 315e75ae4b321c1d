"""The beta-binomial distribution: of ``n`` trials whose probability of success is beta-distributed.

A face, one module of ``scipy.stats``. ``a`` and ``b`` are positive. With ``loc`` the distribution is that of such a
number plus ``loc``. They and the arguments are scalars or arrays that broadcast together; integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpmf", "pmf"]


def logpmf(k: Any, n: Any, a: Any, b: Any, loc: Any = 0) -> Any:
    """The logarithm of the probability of ``k``."""
    k, n, a, b, loc = arguments("betabinom.logpmf", k, n, a, b, loc)
    y = bnp.floor(k) - loc
    inside = (y >= 0) & (y <= n)
    y = bnp.where(inside, y, 0)
    ways = -bnp.log1p(n) - special.betaln(n - y + 1, y + 1)
    log_p = ways + special.betaln(y + a, n - y + b) - special.betaln(a, b)
    valid = (n >= 0) & (a > 0) & (b > 0)
    return bnp.where(valid, bnp.where(inside, log_p, -math.inf), math.nan)


def pmf(k: Any, n: Any, a: Any, b: Any, loc: Any = 0) -> Any:
    """The probability of ``k``."""
    return bnp.exp(logpmf(k, n, a, b, loc))
