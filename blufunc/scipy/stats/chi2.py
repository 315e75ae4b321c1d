"""The chi-square distribution of ``df > 0`` degrees of freedom.

It is the gamma distribution of shape ``df / 2`` and scale 2.
"""

from __future__ import annotations

from typing import Any

from blufunc.scipy.stats import gamma
from blufunc.scipy.stats.parts import exp_of, log_of, promoted

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf"]


@promoted
def logpdf(x: Any, df: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    half = df / 2
    return gamma.logpdf(x, half, loc, scale * 2)


@promoted
def cdf(x: Any, df: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    half = df / 2
    return gamma.cdf(x, half, loc, scale * 2)


@promoted
def sf(x: Any, df: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number above ``x``."""
    half = df / 2
    return gamma.sf(x, half, loc, scale * 2)


pdf = exp_of(logpdf)
logcdf = log_of(cdf)
logsf = log_of(sf)
