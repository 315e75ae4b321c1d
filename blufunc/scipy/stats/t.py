"""Student's t distribution of ``df > 0`` degrees of freedom."""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.scipy.stats.parts import exp_of, promoted

__all__ = ["logpdf", "pdf"]


@promoted
def logpdf(x: Any, df: Any, loc: Any = 0, scale: Any = 1) -> Any:
    """The logarithm of the density at ``x``."""
    y, half = (x - loc) / scale, df / 2
    normalizer = lax.lgamma(half) - lax.lgamma(half + 0.5) + bnp.log(df * math.pi) / 2 + bnp.log(scale)
    return -normalizer - (half + 0.5) * bnp.log1p(bnp.square(y) / df)


pdf = exp_of(logpdf)
