"""The beta-binomial distribution: successes of beta-distributed probability.

``n`` is the number of trials; ``a`` and ``b``, of the beta distribution, are positive.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpmf", "pmf"]


@promoted
def logpmf(k: ArrayLike, n: ArrayLike, a: ArrayLike, b: ArrayLike, loc: ArrayLike = 0) -> Array:
    """The logarithm of the probability of ``k``."""
    y = bnp.floor(k) - loc
    inside = (y >= 0) & (y <= n)
    y = bnp.where(inside, y, 0)
    ways = -bnp.log1p(n) - special.betaln(n - y + 1, y + 1)
    log_p = ways + special.betaln(y + a, n - y + b) - special.betaln(a, b)
    valid = (n >= 0) & (a > 0) & (b > 0)
    return bnp.where(valid, bnp.where(inside, log_p, -math.inf), math.nan)


pmf = exp_of(logpmf)
