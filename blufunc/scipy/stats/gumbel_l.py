"""The Gumbel distribution of minima, of CDF ``1 - exp(-exp(x))``."""

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
def logpdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of the density at ``x``."""
    z = (x - loc) / scale
    return bnp.where(scale > 0, z - bnp.exp(z) - bnp.log(scale), math.nan)


@promoted
def cdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number of at most ``x``."""
    z = (x - loc) / scale
    return bnp.where(scale > 0, -bnp.expm1(-bnp.exp(z)), math.nan)


@promoted
def logcdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of ``cdf``."""
    z = (x - loc) / scale
    return bnp.where(scale > 0, log1mexp(bnp.exp(z)), math.nan)


@promoted
def logsf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of ``sf``."""
    z = (x - loc) / scale
    return bnp.where(scale > 0, -bnp.exp(z), math.nan)


@promoted
def ppf(p: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """Quantile function: the inverse of ``cdf``, at probability ``p``."""
    valid = (p > 0) & (p < 1)
    return bnp.where(valid, loc + scale * bnp.log(-bnp.log1p(-p)), math.nan)


pdf = exp_of(logpdf)
sf = exp_of(logsf)
