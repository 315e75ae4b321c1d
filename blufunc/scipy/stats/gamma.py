"""The gamma distribution: of density ``x**(a - 1) * exp(-x) / gamma(a)`` from 0 on.

A face, one module of ``scipy.stats``. ``a`` is positive. With ``loc`` and ``scale`` the distribution is that of
``scale`` times such a number plus ``loc``. They and the arguments are scalars or arrays that broadcast together;
integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.scipy import special
from blufunc.scipy.stats.parts import arguments, log_of

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf"]


def logpdf(x: Any, a: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    x, a, loc, scale = arguments("gamma.logpdf", x, a, loc, scale)
    y = (x - loc) / scale
    inside = y >= 0
    y = bnp.where(inside, y, 1)
    log_p = special.xlogy(a - 1, y) - y - lax.lgamma(a) - bnp.log(scale)
    return bnp.where(inside, log_p, -math.inf)


def pdf(x: Any, a: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, a, loc, scale))


def cdf(x: Any, a: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    x, a, loc, scale = arguments("gamma.cdf", x, a, loc, scale)
    y = (x - loc) / scale
    below = y < 0
    return bnp.where(below, 0, special.gammainc(a, bnp.where(below, 1, y)))


def logcdf(x: Any, a: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``cdf``."""
    return log_of(cdf(x, a, loc, scale))


def sf(x: Any, a: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number above ``x``."""
    x, a, loc, scale = arguments("gamma.sf", x, a, loc, scale)
    y = (x - loc) / scale
    below = y < 0
    return bnp.where(below, 1, special.gammaincc(a, bnp.where(below, 1, y)))


def logsf(x: Any, a: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``sf``."""
    return log_of(sf(x, a, loc, scale))
