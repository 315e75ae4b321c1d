"""The generalised normal distribution of shape ``beta > 0``.

Its density is proportional to ``exp(-abs(x)**beta)``.
"""

from __future__ import annotations

from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, promoted

__all__ = ["logpdf", "pdf", "cdf"]


@promoted
def logpdf(x: Any, beta: Any) -> Any:
    """The logarithm of the density at ``x``."""
    power = bnp.abs(x) ** beta
    return bnp.log(beta / 2) - lax.lgamma(1 / beta) - power


@promoted
def cdf(x: Any, beta: Any) -> Any:
    """The probability of a number of at most ``x``."""
    power = bnp.abs(x) ** beta
    return (bnp.sign(x) * special.gammainc(1 / beta, power) + 1) / 2


pdf = exp_of(logpdf)
