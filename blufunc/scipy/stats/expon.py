"""The exponential distribution, of density ``exp(-x)`` for ``x >= 0``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import exp_of, log1mexp, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf", "ppf"]


def _from_zero(y: Any) -> Any:
    """``max(y, 0)`` of derivative 1 at 0: there a CDF's derivative is the density."""
    return bnp.where(y < 0, 0, y)


@promoted
def logpdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of the density at ``x``."""
    y = (x - loc) / scale
    return bnp.where(y < 0, -math.inf, -y - bnp.log(scale))


@promoted
def cdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number of at most ``x``."""
    y = (x - loc) / scale
    return -bnp.expm1(-_from_zero(y))


@promoted
def logcdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of ``cdf``."""
    y = (x - loc) / scale
    below = y < 0
    return bnp.where(below, -math.inf, log1mexp(bnp.where(below, 1, y)))


@promoted
def logsf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of ``sf``."""
    y = (x - loc) / scale
    return -_from_zero(y)


@promoted
def ppf(q: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """Quantile function: the inverse of ``cdf``, at probability ``q``."""
    valid = (q >= 0) & (q <= 1)
    return bnp.where(valid, loc - scale * bnp.log1p(-q), math.nan)


pdf = exp_of(logpdf)
sf = exp_of(logsf)
