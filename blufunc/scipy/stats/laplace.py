"""The Laplace distribution, of density ``exp(-abs(x)) / 2``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import exp_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf", "cdf"]


@promoted
def logpdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of the density at ``x``."""
    y = bnp.abs(x - loc) / scale
    return -y - bnp.log(scale * 2)


@promoted
def cdf(x: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The probability of a number of at most ``x``."""
    y = (x - loc) / scale
    below = y <= 0
    # ``where``, not ``abs(y)``: at 0 the derivative is the density
    tail = bnp.exp(bnp.where(below, y, -y)) / 2
    return bnp.where(below, tail, 1 - tail)


pdf = exp_of(logpdf)
