"""The beta distribution: of density proportional to ``x**(a - 1) * (1 - x)**(b - 1)`` on [0, 1].

A face, one module of ``scipy.stats``. ``a`` and ``b`` are positive. With ``loc`` and ``scale`` the distribution is
that of ``scale`` times such a number plus ``loc``. They and the arguments are scalars or arrays that broadcast
together; integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import arguments, log_of

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf"]


def logpdf(x: Any, a: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    x, a, b, loc, scale = arguments("beta.logpdf", x, a, b, loc, scale)
    y = (x - loc) / scale
    inside = (y >= 0) & (y <= 1)
    y = bnp.where(inside, y, 0.5)
    log_p = special.xlogy(a - 1, y) + special.xlog1py(b - 1, -y) - special.betaln(a, b) - bnp.log(scale)
    valid = (a > 0) & (b > 0) & (scale > 0)
    return bnp.where(valid, bnp.where(inside, log_p, -math.inf), math.nan)


def pdf(x: Any, a: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, a, b, loc, scale))


def cdf(x: Any, a: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    x, a, b, loc, scale = arguments("beta.cdf", x, a, b, loc, scale)
    y = (x - loc) / scale
    outside = (y < 0) | (y > 1)
    return bnp.where(outside, bnp.clip(y, 0, 1), special.betainc(a, b, bnp.where(outside, 0.5, y)))


def logcdf(x: Any, a: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``cdf``."""
    return log_of(cdf(x, a, b, loc, scale))


def sf(x: Any, a: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number above ``x``."""
    x, a, b, loc, scale = arguments("beta.sf", x, a, b, loc, scale)
    y = 1 - (x - loc) / scale
    outside = (y < 0) | (y > 1)
    return bnp.where(outside, bnp.clip(y, 0, 1), special.betainc(b, a, bnp.where(outside, 0.5, y)))


def logsf(x: Any, a: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``sf``."""
    return log_of(sf(x, a, b, loc, scale))
