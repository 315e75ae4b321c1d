"""The von Mises distribution: of density proportional to ``exp(kappa * cos(x))`` on a circle.

A face, one module of ``scipy.stats``. ``kappa`` is positive. They and the arguments are numbers or arrays that
broadcast together; integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpdf", "pdf"]


def logpdf(x: Any, kappa: Any) -> Any:
    """The logarithm of the density at ``x``."""
    x, kappa = arguments("vonmises.logpdf", x, kappa)
    log_p = kappa * (bnp.cos(x) - 1) - bnp.log(special.i0e(kappa) * (2 * math.pi))
    return bnp.where(kappa > 0, log_p, math.nan)


def pdf(x: Any, kappa: Any) -> Any:
    """The density at ``x``."""
    return bnp.exp(logpdf(x, kappa))
