"""The Laplace distribution: of density ``exp(-abs(x)) / 2``.

A face, one module of ``scipy.stats``. With ``loc`` and ``scale`` the distribution is that of ``scale`` times such a
number plus ``loc``. Arguments are scalars or arrays that broadcast together; integers become float32.
"""

from __future__ import annotations

from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpdf", "pdf", "cdf"]


def logpdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    x, loc, scale = arguments("laplace.logpdf", x, loc, scale)
    y = bnp.abs(x - loc) / scale
    return -y - bnp.log(scale * 2)


def pdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, loc, scale))


def cdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    x, loc, scale = arguments("laplace.cdf", x, loc, scale)
    y = (x - loc) / scale
    below = y <= 0
    tail = (
        bnp.exp(bnp.where(below, y, -y)) / 2
    )  # a choice, and no abs(y): the derivative is the density at 0 too
    return bnp.where(below, tail, 1 - tail)
