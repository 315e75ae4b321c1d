"""The normal distribution.

A face, one module of ``scipy.stats``. With ``loc`` and ``scale`` the distribution is that of ``scale`` times such a
number plus ``loc``. Arguments are scalars or arrays that broadcast together; integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf", "ppf", "isf"]


def logpdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    x, loc, scale = arguments("norm.logpdf", x, loc, scale)
    y = (x - loc) / scale
    return bnp.square(y) * -0.5 - bnp.log(scale) - 0.5 * math.log(2 * math.pi)


def pdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, loc, scale))


def cdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    x, loc, scale = arguments("norm.cdf", x, loc, scale)
    y = (x - loc) / scale
    return special.ndtr(y)


def logcdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``cdf``."""
    x, loc, scale = arguments("norm.logcdf", x, loc, scale)
    y = (x - loc) / scale
    return special.log_ndtr(y)


def sf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number above ``x``."""
    x, loc, scale = arguments("norm.sf", x, loc, scale)
    y = (x - loc) / scale
    return special.ndtr(-y)


def logsf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``sf``."""
    x, loc, scale = arguments("norm.logsf", x, loc, scale)
    y = (x - loc) / scale
    return special.log_ndtr(-y)


def ppf(q: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """Quantile function: the inverse of ``cdf``, at probability ``q``."""
    q, loc, scale = arguments("norm.ppf", q, loc, scale)
    y = special.ndtri(q)
    return y * scale + loc


def isf(q: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The number that is exceeded with probability ``q``: the inverse of ``sf``."""
    q, loc, scale = arguments("norm.isf", q, loc, scale)
    # the distribution is symmetric: a small q keeps its digits
    y = -special.ndtri(q)
    return y * scale + loc
