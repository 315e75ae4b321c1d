"""The von Mises distribution on a circle, of ``kappa > 0``.

Its density is proportional to ``exp(kappa * cos(x))``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf"]


@promoted
def logpdf(x: ArrayLike, kappa: ArrayLike) -> Array:
    """The logarithm of the density at ``x``."""
    log_p = kappa * (bnp.cos(x) - 1) - bnp.log(special.i0e(kappa) * (2 * math.pi))
    return bnp.where(kappa > 0, log_p, math.nan)


pdf = exp_of(logpdf)
