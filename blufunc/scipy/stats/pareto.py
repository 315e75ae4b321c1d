"""The Pareto distribution, of density ``b * x**(-b - 1)`` for ``x >= 1``.

``b`` is positive.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import exp_of, log1mexp, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf", "ppf"]


@promoted
def logpdf(x: ArrayLike, b: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of the density at ``x``."""
    y = (x - loc) / scale
    log_p = bnp.log(b / scale) - (b + 1) * bnp.log(bnp.maximum(y, 1))
    return bnp.where(y < 1, -math.inf, log_p)


@promoted
def cdf(x: ArrayLike, b: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number of at most ``x``."""
    y = bnp.maximum((x - loc) / scale, 1)
    return -bnp.expm1(-b * bnp.log(y))


@promoted
def logcdf(x: ArrayLike, b: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of ``cdf``."""
    y = (x - loc) / scale
    below = y < 1
    return bnp.where(below, -math.inf, log1mexp(b * bnp.log(bnp.where(below, 2, y))))


@promoted
def logsf(x: ArrayLike, b: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of ``sf``."""
    y = bnp.maximum((x - loc) / scale, 1)
    return -b * bnp.log(y)


@promoted
def ppf(q: ArrayLike, b: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """Quantile function: the inverse of ``cdf``, at probability ``q``."""
    valid = (q >= 0) & (q <= 1)
    return bnp.where(valid, loc + scale * (1 - q) ** (-1 / b), math.nan)


pdf = exp_of(logpdf)
sf = exp_of(logsf)
