"""The beta distribution on [0, 1], of positive ``a`` and ``b``.

Its density is proportional to ``x**(a - 1) * (1 - x)**(b - 1)``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, log_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf"]


@promoted
def logpdf(x: ArrayLike, a: ArrayLike, b: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of the density at ``x``."""
    y = (x - loc) / scale
    inside = (y >= 0) & (y <= 1)
    y = bnp.where(inside, y, 0.5)
    log_p = special.xlogy(a - 1, y) + special.xlog1py(b - 1, -y) - special.betaln(a, b) - bnp.log(scale)
    valid = (a > 0) & (b > 0) & (scale > 0)
    return bnp.where(valid, bnp.where(inside, log_p, -math.inf), math.nan)


@promoted
def cdf(x: ArrayLike, a: ArrayLike, b: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number of at most ``x``."""
    y = (x - loc) / scale
    outside = (y < 0) | (y > 1)
    return bnp.where(outside, bnp.clip(y, 0, 1), special.betainc(a, b, bnp.where(outside, 0.5, y)))


@promoted
def sf(x: ArrayLike, a: ArrayLike, b: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number above ``x``."""
    y = 1 - (x - loc) / scale
    outside = (y < 0) | (y > 1)
    return bnp.where(outside, bnp.clip(y, 0, 1), special.betainc(b, a, bnp.where(outside, 0.5, y)))


pdf = exp_of(logpdf)
logcdf = log_of(cdf)
logsf = log_of(sf)
