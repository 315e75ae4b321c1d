"""The logistic distribution, of CDF ``1 / (1 + exp(-x))``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf", "cdf", "sf", "ppf", "isf"]


@promoted
def logpdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of the density at ``x``."""
    half = (x - loc) / scale / 2
    return bnp.logaddexp(half, -half) * -2 - bnp.log(scale)


@promoted
def cdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number of at most ``x``."""
    y = (x - loc) / scale
    return special.expit(y)


@promoted
def sf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number above ``x``."""
    y = (x - loc) / scale
    return special.expit(-y)


@promoted
def ppf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """Quantile function: the inverse of ``cdf``, at probability ``x``."""
    y = special.logit(x)
    return y * scale + loc


@promoted
def isf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The number that is exceeded with probability ``x``: the inverse of ``sf``."""
    y = -special.logit(x)
    return y * scale + loc


pdf = exp_of(logpdf)
