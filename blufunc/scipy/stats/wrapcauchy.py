"""The Cauchy distribution wrapped around [0, 2 pi], of ``c`` in (0, 1)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc.scipy.stats.parts import exp_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf"]


@promoted
def logpdf(x: ArrayLike, c: ArrayLike) -> Array:
    """The logarithm of the density at ``x``."""
    square = bnp.square(c)
    log_p = bnp.log((1 - square) / (1 + square - c * bnp.cos(x) * 2)) - math.log(2 * math.pi)
    inside = (x >= 0) & (x <= 2 * math.pi)
    return bnp.where((c > 0) & (c < 1), bnp.where(inside, log_p, -math.inf), math.nan)


pdf = exp_of(logpdf)
