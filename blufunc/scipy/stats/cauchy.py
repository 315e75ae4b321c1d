"""The Cauchy distribution, of density ``1 / (pi * (1 + x**2))``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import exp_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf", "ppf", "isf"]


@promoted
def logpdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of the density at ``x``."""
    y = (x - loc) / scale
    return -bnp.log1p(bnp.square(y)) - bnp.log(scale * math.pi)


@promoted
def cdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number of at most ``x``."""
    y = (x - loc) / scale
    # near 0 in the lower tail, where a sum with 1/2 would cancel
    return bnp.arctan2(1, -y) / math.pi


def logcdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of ``cdf``."""
    return bnp.log(cdf(x, loc, scale))


@promoted
def sf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number above ``x``."""
    y = (x - loc) / scale
    return bnp.arctan2(1, y) / math.pi


def logsf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of ``sf``."""
    return bnp.log(sf(x, loc, scale))


@promoted
def ppf(q: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """Quantile function: the inverse of ``cdf``, at probability ``q``."""
    y = bnp.tan((q - 0.5) * math.pi)
    return y * scale + loc


@promoted
def isf(q: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The number that is exceeded with probability ``q``: the inverse of ``sf``."""
    y = bnp.tan((0.5 - q) * math.pi)
    return y * scale + loc


pdf = exp_of(logpdf)
