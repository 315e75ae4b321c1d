"""Student's t distribution of ``df`` degrees of freedom.

A face, one module of ``scipy.stats``. ``df`` is positive. With ``loc`` and ``scale`` the distribution is that of
``scale`` times such a number plus ``loc``. They and the arguments are scalars or arrays that broadcast together;
integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpdf", "pdf"]


def logpdf(x: Any, df: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    x, df, loc, scale = arguments("t.logpdf", x, df, loc, scale)
    y, half = (x - loc) / scale, df / 2
    normalizer = lax.lgamma(half) - lax.lgamma(half + 0.5) + bnp.log(df * math.pi) / 2 + bnp.log(scale)
    return -normalizer - (half + 0.5) * bnp.log1p(bnp.square(y) / df)


def pdf(x: Any, df: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, df, loc, scale))
