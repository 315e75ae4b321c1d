"""The Cauchy distribution: of density ``1 / (pi * (1 + x**2))``.

A face, one module of ``scipy.stats``. With ``loc`` and ``scale`` the distribution is that of ``scale`` times such a
number plus ``loc``. Arguments are scalars or arrays that broadcast together; integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf", "ppf", "isf"]


def logpdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    x, loc, scale = arguments("cauchy.logpdf", x, loc, scale)
    y = (x - loc) / scale
    return -bnp.log1p(bnp.square(y)) - bnp.log(scale * math.pi)


def pdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, loc, scale))


def cdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    x, loc, scale = arguments("cauchy.cdf", x, loc, scale)
    y = (x - loc) / scale
    # near 0 in the lower tail, where a sum with 1/2 would cancel
    return bnp.arctan2(1, -y) / math.pi


def logcdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``cdf``."""
    return bnp.log(cdf(x, loc, scale))


def sf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number above ``x``."""
    x, loc, scale = arguments("cauchy.sf", x, loc, scale)
    y = (x - loc) / scale
    return bnp.arctan2(1, y) / math.pi


def logsf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``sf``."""
    return bnp.log(sf(x, loc, scale))


def ppf(q: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """Quantile function: the inverse of ``cdf``, at probability ``q``."""
    q, loc, scale = arguments("cauchy.ppf", q, loc, scale)
    y = bnp.tan((q - 0.5) * math.pi)
    return y * scale + loc


def isf(q: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The number that is exceeded with probability ``q``: the inverse of ``sf``."""
    q, loc, scale = arguments("cauchy.isf", q, loc, scale)
    y = bnp.tan((0.5 - q) * math.pi)
    return y * scale + loc
