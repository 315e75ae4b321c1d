"""The uniform distribution on [0, 1]."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import exp_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf", "cdf", "ppf"]


@promoted
def logpdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of the density at ``x``."""
    inside = (x >= loc) & (x <= loc + scale)
    return bnp.where(inside, -bnp.log(scale), -math.inf)


@promoted
def cdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number of at most ``x``."""
    y = (x - loc) / scale
    # ``where``, not ``clip``: at both ends the derivative is the density, 1
    return bnp.where(y < 0, 0, bnp.where(y > 1, 1, y))


@promoted
def ppf(q: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """Quantile function: the inverse of ``cdf``, at probability ``q``."""
    valid = (q >= 0) & (q <= 1)
    return bnp.where(valid, loc + scale * q, math.nan)


pdf = exp_of(logpdf)
