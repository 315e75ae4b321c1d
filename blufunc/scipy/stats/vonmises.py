"""The von Mises distribution on a circle, of ``kappa > 0``.

Its density is proportional to ``exp(kappa * cos(x))``.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, promoted

__all__ = ["logpdf", "pdf"]


@promoted
def logpdf(x: Any, kappa: Any) -> Any:
    """The logarithm of the density at ``x``."""
    log_p = kappa * (bnp.cos(x) - 1) - bnp.log(special.i0e(kappa) * (2 * math.pi))
    return bnp.where(kappa > 0, log_p, math.nan)


pdf = exp_of(logpdf)
