"""The chi-square distribution of ``df > 0`` degrees of freedom.

It is the gamma distribution of shape ``df / 2`` and scale 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blufunc.scipy.stats import gamma
from blufunc.scipy.stats.parts import exp_of, log_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf"]


@promoted
def logpdf(x: ArrayLike, df: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of the density at ``x``."""
    half = df / 2
    return gamma.logpdf(x, half, loc, scale * 2)


@promoted
def cdf(x: ArrayLike, df: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number of at most ``x``."""
    half = df / 2
    return gamma.cdf(x, half, loc, scale * 2)


@promoted
def sf(x: ArrayLike, df: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number above ``x``."""
    half = df / 2
    return gamma.sf(x, half, loc, scale * 2)


pdf = exp_of(logpdf)
logcdf = log_of(cdf)
logsf = log_of(sf)
