"""The exponential distribution: of density ``exp(-x)`` from 0 on.

A face, one module of ``scipy.stats``. With ``loc`` and ``scale`` the distribution is that of ``scale`` times such a
number plus ``loc``. Arguments are scalars or arrays that broadcast together; integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import arguments, log1mexp

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf", "ppf"]


def _from_zero(y: Any) -> Any:
    """``max(y, 0)`` whose derivative at 0 is 1, so that those of probabilities are the density there too."""
    return bnp.where(y < 0, 0, y)


def logpdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    x, loc, scale = arguments("expon.logpdf", x, loc, scale)
    y = (x - loc) / scale
    return bnp.where(y < 0, -math.inf, -y - bnp.log(scale))


def pdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, loc, scale))


def cdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    x, loc, scale = arguments("expon.cdf", x, loc, scale)
    y = (x - loc) / scale
    return -bnp.expm1(-_from_zero(y))


def logcdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``cdf``."""
    x, loc, scale = arguments("expon.logcdf", x, loc, scale)
    y = (x - loc) / scale
    below = y < 0
    return bnp.where(below, -math.inf, log1mexp(bnp.where(below, 1, y)))


def sf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number above ``x``."""
    return bnp.exp(logsf(x, loc, scale))


def logsf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``sf``."""
    x, loc, scale = arguments("expon.logsf", x, loc, scale)
    y = (x - loc) / scale
    return -_from_zero(y)


def ppf(q: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """Quantile function: the inverse of ``cdf``, at probability ``q``."""
    q, loc, scale = arguments("expon.ppf", q, loc, scale)
    valid = (q >= 0) & (q <= 1)
    return bnp.where(valid, loc - scale * bnp.log1p(-q), math.nan)
