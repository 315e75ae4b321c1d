"""The binomial distribution: successes in ``n`` trials of probability ``p``."""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, promoted

__all__ = ["logpmf", "pmf"]


@promoted
def logpmf(k: Any, n: Any, p: Any, loc: Any = 0) -> Any:
    """The logarithm of the probability of ``k``."""
    y = k - loc
    inside = (y >= 0) & (y < n + 1)
    y = bnp.where(inside, y, 0)
    ways = lax.lgamma(n + 1) - lax.lgamma(y + 1) - lax.lgamma(n - y + 1)
    log_p = ways + special.xlogy(y, p) + special.xlog1py(n - y, -p)
    return bnp.where(inside, log_p, -math.inf)


pmf = exp_of(logpmf)
