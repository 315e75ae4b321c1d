"""The logistic distribution: of distribution function ``1 / (1 + exp(-x))``.

A face, one module of ``scipy.stats``. With ``loc`` and ``scale`` the distribution is that of ``scale`` times such a
number plus ``loc``. Arguments are scalars or arrays that broadcast together; integers become float32.
"""

from __future__ import annotations

from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpdf", "pdf", "cdf", "sf", "ppf", "isf"]


def logpdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    x, loc, scale = arguments("logistic.logpdf", x, loc, scale)
    half = (x - loc) / scale / 2
    return bnp.logaddexp(half, -half) * -2 - bnp.log(scale)


def pdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, loc, scale))


def cdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    x, loc, scale = arguments("logistic.cdf", x, loc, scale)
    y = (x - loc) / scale
    return special.expit(y)


def sf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number above ``x``."""
    x, loc, scale = arguments("logistic.sf", x, loc, scale)
    y = (x - loc) / scale
    return special.expit(-y)


def ppf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """Quantile function: the inverse of ``cdf``, at probability ``x``."""
    x, loc, scale = arguments("logistic.ppf", x, loc, scale)
    y = special.logit(x)
    return y * scale + loc


def isf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The number that is exceeded with probability ``x``: the inverse of ``sf``."""
    x, loc, scale = arguments("logistic.isf", x, loc, scale)
    y = -special.logit(x)
    return y * scale + loc
