"""The generalised normal distribution: of density proportional to ``exp(-abs(x)**beta)``.

A face, one module of ``scipy.stats``. ``beta`` is positive. They and the arguments are numbers or arrays that
broadcast together; integers become float32.
"""

from __future__ import annotations

from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.scipy import special
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpdf", "pdf", "cdf"]


def logpdf(x: Any, beta: Any) -> Any:
    """The logarithm of the density at ``x``."""
    x, beta = arguments("gennorm.logpdf", x, beta)
    power = bnp.abs(x) ** beta
    return bnp.log(beta / 2) - lax.lgamma(1 / beta) - power


def pdf(x: Any, beta: Any) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, beta))


def cdf(x: Any, beta: Any) -> Any:
    """The probability of a number of at most ``x``."""
    x, beta = arguments("gennorm.cdf", x, beta)
    power = bnp.abs(x) ** beta
    return (bnp.sign(x) * special.gammainc(1 / beta, power) + 1) / 2
