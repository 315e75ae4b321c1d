"""Student's t distribution of ``df > 0`` degrees of freedom."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.scipy.stats.parts import exp_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf"]


@promoted
def logpdf(x: ArrayLike, df: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of the density at ``x``."""
    y, half = (x - loc) / scale, df / 2
    normalizer = lax.lgamma(half) - lax.lgamma(half + 0.5) + bnp.log(df * math.pi) / 2 + bnp.log(scale)
    return -normalizer - (half + 0.5) * bnp.log1p(bnp.square(y) / df)


pdf = exp_of(logpdf)
