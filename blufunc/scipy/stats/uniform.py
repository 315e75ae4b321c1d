"""The uniform distribution on [0, 1]."""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import exp_of, promoted

__all__ = ["logpdf", "pdf", "cdf", "ppf"]


@promoted
def logpdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    inside = (x >= loc) & (x <= loc + scale)
    return bnp.where(inside, -bnp.log(scale), -math.inf)


@promoted
def cdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    y = (x - loc) / scale
    # ``where``, not ``clip``: at both ends the derivative is the density, 1
    return bnp.where(y < 0, 0, bnp.where(y > 1, 1, y))


@promoted
def ppf(q: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """Quantile function: the inverse of ``cdf``, at probability ``q``."""
    valid = (q >= 0) & (q <= 1)
    return bnp.where(valid, loc + scale * q, math.nan)


pdf = exp_of(logpdf)
