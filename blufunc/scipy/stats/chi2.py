"""The chi-square distribution of ``df`` degrees of freedom.

A face, one module of ``scipy.stats``. ``df`` is positive. It is the gamma distribution of shape ``df / 2`` and scale
2. With ``loc`` and ``scale`` the distribution is that of ``scale`` times such a number plus ``loc``. They and the
arguments are scalars or arrays that broadcast together; integers become float32.
"""

from __future__ import annotations

from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy.stats import gamma
from blufunc.scipy.stats.parts import arguments, log_of

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf"]


def logpdf(x: Any, df: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    x, df, loc, scale = arguments("chi2.logpdf", x, df, loc, scale)
    half = df / 2
    return gamma.logpdf(x, half, loc, scale * 2)


def pdf(x: Any, df: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, df, loc, scale))


def cdf(x: Any, df: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    x, df, loc, scale = arguments("chi2.cdf", x, df, loc, scale)
    half = df / 2
    return gamma.cdf(x, half, loc, scale * 2)


def logcdf(x: Any, df: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``cdf``."""
    return log_of(cdf(x, df, loc, scale))


def sf(x: Any, df: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number above ``x``."""
    x, df, loc, scale = arguments("chi2.sf", x, df, loc, scale)
    half = df / 2
    return gamma.sf(x, half, loc, scale * 2)


def logsf(x: Any, df: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``sf``."""
    return log_of(sf(x, df, loc, scale))
