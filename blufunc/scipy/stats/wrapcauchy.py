"""The Cauchy distribution wrapped around a circle, on [0, 2 pi].

A face, one module of ``scipy.stats``. ``c`` is in (0, 1). They and the arguments are scalars or arrays that broadcast
together; integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpdf", "pdf"]


def logpdf(x: Any, c: Any) -> Any:
    """The logarithm of the density at ``x``."""
    x, c = arguments("wrapcauchy.logpdf", x, c)
    square = bnp.square(c)
    log_p = bnp.log((1 - square) / (1 + square - c * bnp.cos(x) * 2)) - math.log(2 * math.pi)
    inside = (x >= 0) & (x <= 2 * math.pi)
    return bnp.where((c > 0) & (c < 1), bnp.where(inside, log_p, -math.inf), math.nan)


def pdf(x: Any, c: Any) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, c))
