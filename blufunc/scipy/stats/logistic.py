"""The logistic distribution, of CDF ``1 / (1 + exp(-x))``."""

from __future__ import annotations

from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, promoted

__all__ = ["logpdf", "pdf", "cdf", "sf", "ppf", "isf"]


@promoted
def logpdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    half = (x - loc) / scale / 2
    return bnp.logaddexp(half, -half) * -2 - bnp.log(scale)


@promoted
def cdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    y = (x - loc) / scale
    return special.expit(y)


@promoted
def sf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number above ``x``."""
    y = (x - loc) / scale
    return special.expit(-y)


@promoted
def ppf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """Quantile function: the inverse of ``cdf``, at probability ``x``."""
    y = special.logit(x)
    return y * scale + loc


@promoted
def isf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The number that is exceeded with probability ``x``: the inverse of ``sf``."""
    y = -special.logit(x)
    return y * scale + loc


pdf = exp_of(logpdf)
