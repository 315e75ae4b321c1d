"""The generalised normal distribution of shape ``beta > 0``.

Its density is proportional to ``exp(-abs(x)**beta)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf", "cdf"]


@promoted
def logpdf(x: ArrayLike, beta: ArrayLike) -> Array:
    """The logarithm of the density at ``x``."""
    power = bnp.abs(x) ** beta
    return bnp.log(beta / 2) - lax.lgamma(1 / beta) - power


@promoted
def cdf(x: ArrayLike, beta: ArrayLike) -> Array:
    """The probability of a number of at most ``x``."""
    power = bnp.abs(x) ** beta
    return (bnp.sign(x) * special.gammainc(1 / beta, power) + 1) / 2


pdf = exp_of(logpdf)
