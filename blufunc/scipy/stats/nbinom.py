"""The negative binomial distribution: failures before ``n > 0`` successes.

``p`` is the probability of a success.
"""

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

__all__ = ["logpmf", "pmf"]


@promoted
def logpmf(k: ArrayLike, n: ArrayLike, p: ArrayLike, loc: ArrayLike = 0) -> Array:
    """The logarithm of the probability of ``k``."""
    y = k - loc
    inside = y >= 0
    y = bnp.where(inside, y, 0)
    ways = lax.lgamma(y + n) - lax.lgamma(n) - lax.lgamma(y + 1)
    log_p = ways + special.xlogy(n, p) + special.xlog1py(y, -p)
    return bnp.where(inside, log_p, -math.inf)


pmf = exp_of(logpmf)
