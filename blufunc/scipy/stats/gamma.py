"""The gamma distribution of shape ``a > 0``.

Its density is ``x**(a - 1) * exp(-x) / gamma(a)`` for ``x >= 0``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, log_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf"]


@promoted
def logpdf(x: ArrayLike, a: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of the density at ``x``."""
    y = (x - loc) / scale
    inside = y >= 0
    y = bnp.where(inside, y, 1)
    log_p = special.xlogy(a - 1, y) - y - lax.lgamma(a) - bnp.log(scale)
    return bnp.where(inside, log_p, -math.inf)


@promoted
def cdf(x: ArrayLike, a: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number of at most ``x``."""
    y = (x - loc) / scale
    below = y < 0
    return bnp.where(below, 0, special.gammainc(a, bnp.where(below, 1, y)))


@promoted
def sf(x: ArrayLike, a: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number above ``x``."""
    y = (x - loc) / scale
    below = y < 0
    return bnp.where(below, 1, special.gammaincc(a, bnp.where(below, 1, y)))


pdf = exp_of(logpdf)
logcdf = log_of(cdf)
logsf = log_of(sf)
