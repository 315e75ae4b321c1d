"""The standard normal distribution restricted to [a, b].

A face, one module of ``scipy.stats``. ``a`` and ``b`` are in units of ``scale``, from ``loc``. With ``loc`` and
``scale`` the distribution is that of ``scale`` times such a number plus ``loc``. They and the arguments are numbers
or arrays that broadcast together; integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats import norm
from blufunc.scipy.stats.parts import arguments, log1mexp, log_difference

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf"]


def _log_mass(a: Any, b: Any) -> Any:
    """The logarithm of the probability of a normal number in [a, b], on the side where nothing cancels."""
    flip = a > 0
    a, b = bnp.where(flip, -b, a), bnp.where(flip, -a, b)
    central = (a <= 0) & (b > 0)
    tail = log_difference(
        special.log_ndtr(bnp.where(central, -1, b)), special.log_ndtr(bnp.where(central, -2, a))
    )
    return bnp.where(central, bnp.log1p(-special.ndtr(a) - special.ndtr(-b)), tail)


def logpdf(x: Any, a: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    x, a, b, loc, scale = arguments("truncnorm.logpdf", x, a, b, loc, scale)
    y = (x - loc) / scale
    log_p = norm.logpdf(y) - bnp.log(scale) - _log_mass(a, b)
    inside = (y >= a) & (y <= b)
    return bnp.where(a < b, bnp.where(inside, log_p, -math.inf), math.nan)


def pdf(x: Any, a: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, a, b, loc, scale))


def cdf(x: Any, a: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    return bnp.exp(logcdf(x, a, b, loc, scale))


def logcdf(x: Any, a: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``cdf``."""
    x, a, b, loc, scale = arguments("truncnorm.logcdf", x, a, b, loc, scale)
    y = (x - loc) / scale
    before, behind = y <= a, y >= b
    # what is not chosen is computed at a place between the bounds, where derivatives are finite
    middle = bnp.where(a == -math.inf, bnp.minimum(b, 1) - 1, a + bnp.minimum(b - a, 2) / 2)
    y = bnp.where(before | behind, middle, y)
    whole = _log_mass(a, b)
    below = _log_mass(a, y) - whole
    # near 1 from the other side, which keeps its digits
    near = below > -0.1
    gap = bnp.where(near, whole - _log_mass(y, b), 1)
    log_p = bnp.where(near, log1mexp(gap), below)
    return bnp.where(a < b, bnp.where(behind, 0, bnp.where(before, -math.inf, log_p)), math.nan)


def sf(x: Any, a: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number above ``x``."""
    return bnp.exp(logsf(x, a, b, loc, scale))


def logsf(x: Any, a: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``sf``."""
    x, a, b, loc, scale = arguments("truncnorm.logsf", x, a, b, loc, scale)
    y = -x
    return logcdf(y, -b, -a, -loc, scale)
