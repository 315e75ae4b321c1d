"""The Pareto distribution: of density ``b * x**(-b - 1)`` from 1 on.

A face, one module of ``scipy.stats``. ``b`` is positive. With ``loc`` and ``scale`` the distribution is that of
``scale`` times such a number plus ``loc``. They and the arguments are scalars or arrays that broadcast together;
integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import arguments, log1mexp

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf", "ppf"]


def logpdf(x: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    x, b, loc, scale = arguments("pareto.logpdf", x, b, loc, scale)
    y = (x - loc) / scale
    log_p = bnp.log(b / scale) - (b + 1) * bnp.log(bnp.maximum(y, 1))
    return bnp.where(y < 1, -math.inf, log_p)


def pdf(x: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, b, loc, scale))


def cdf(x: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    x, b, loc, scale = arguments("pareto.cdf", x, b, loc, scale)
    y = bnp.maximum((x - loc) / scale, 1)
    return -bnp.expm1(-b * bnp.log(y))


def logcdf(x: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``cdf``."""
    x, b, loc, scale = arguments("pareto.logcdf", x, b, loc, scale)
    y = (x - loc) / scale
    below = y < 1
    return bnp.where(below, -math.inf, log1mexp(b * bnp.log(bnp.where(below, 2, y))))


def sf(x: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number above ``x``."""
    return bnp.exp(logsf(x, b, loc, scale))


def logsf(x: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of ``sf``."""
    x, b, loc, scale = arguments("pareto.logsf", x, b, loc, scale)
    y = bnp.maximum((x - loc) / scale, 1)
    return -b * bnp.log(y)


def ppf(q: Any, b: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """Quantile function: the inverse of ``cdf``, at probability ``q``."""
    q, b, loc, scale = arguments("pareto.ppf", q, b, loc, scale)
    valid = (q >= 0) & (q <= 1)
    return bnp.where(valid, loc + scale * (1 - q) ** (-1 / b), math.nan)
