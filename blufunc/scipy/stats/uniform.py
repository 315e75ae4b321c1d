"""The uniform distribution on [0, 1].

A face, one module of ``scipy.stats``. With ``loc`` and ``scale`` the distribution is that of ``scale`` times such a
number plus ``loc``. Arguments are scalars or arrays that broadcast together; integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpdf", "pdf", "cdf", "ppf"]


def logpdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    x, loc, scale = arguments("uniform.logpdf", x, loc, scale)
    inside = (x >= loc) & (x <= loc + scale)
    return bnp.where(inside, -bnp.log(scale), -math.inf)


def pdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, loc, scale))


def cdf(x: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The probability of a number of at most ``x``."""
    x, loc, scale = arguments("uniform.cdf", x, loc, scale)
    y = (x - loc) / scale
    # by choices: the derivative is the density, 1 at both ends too
    return bnp.where(y < 0, 0, bnp.where(y > 1, 1, y))


def ppf(q: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """Quantile function: the inverse of ``cdf``, at probability ``q``."""
    q, loc, scale = arguments("uniform.ppf", q, loc, scale)
    valid = (q >= 0) & (q <= 1)
    return bnp.where(valid, loc + scale * q, math.nan)
