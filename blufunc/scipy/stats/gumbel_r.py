"""The Gumbel distribution of largest values: of distribution function ``exp(-exp(-x))``.

A face, one module of ``scipy.stats``. With ``loc`` and ``scale`` the distribution is that of ``scale`` times such a
number plus ``loc``. Arguments are scalars or arrays that broadcast together; integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import arguments, log1mexp

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf", "ppf"]


def logpdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    x, loc, scale = arguments("gumbel_r.logpdf", x, loc, scale)
    z = (x - loc) / scale
    return bnp.where(scale > 0, -bnp.log(scale) - z - bnp.exp(-z), math.nan)


def pdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, loc, scale))


def cdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    return bnp.exp(logcdf(x, loc, scale))


def logcdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``cdf``."""
    x, loc, scale = arguments("gumbel_r.logcdf", x, loc, scale)
    z = (x - loc) / scale
    return bnp.where(scale > 0, -bnp.exp(-z), math.nan)


def sf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number above ``x``."""
    x, loc, scale = arguments("gumbel_r.sf", x, loc, scale)
    z = (x - loc) / scale
    return bnp.where(scale > 0, -bnp.expm1(-bnp.exp(-z)), math.nan)


def logsf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``sf``."""
    x, loc, scale = arguments("gumbel_r.logsf", x, loc, scale)
    z = (x - loc) / scale
    return bnp.where(scale > 0, log1mexp(bnp.exp(-z)), math.nan)


def ppf(p: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """Quantile function: the inverse of ``cdf``, at probability ``p``."""
    p, loc, scale = arguments("gumbel_r.ppf", p, loc, scale)
    valid = (p > 0) & (p < 1)
    return bnp.where(valid, loc - scale * bnp.log(-bnp.log(p)), math.nan)
