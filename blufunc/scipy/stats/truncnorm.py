"""The standard normal distribution truncated to [a, b].

``a`` and ``b`` are relative to ``loc``, in units of ``scale``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats import norm
from blufunc.scipy.stats.parts import exp_of, log1mexp, log_difference, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpdf", "pdf", "cdf", "logcdf", "sf", "logsf"]


def _log_mass(a: Any, b: Any) -> Any:
    """The logarithm of the normal probability of [a, b], without cancellation."""
    flip = a > 0
    a, b = bnp.where(flip, -b, a), bnp.where(flip, -a, b)
    central = (a <= 0) & (b > 0)
    tail = log_difference(
        special.log_ndtr(bnp.where(central, -1, b)), special.log_ndtr(bnp.where(central, -2, a))
    )
    return bnp.where(central, bnp.log1p(-special.ndtr(a) - special.ndtr(-b)), tail)


@promoted
def logpdf(x: ArrayLike, a: ArrayLike, b: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of the density at ``x``."""
    y = (x - loc) / scale
    log_p = norm.logpdf(y) - bnp.log(scale) - _log_mass(a, b)
    inside = (y >= a) & (y <= b)
    return bnp.where(a < b, bnp.where(inside, log_p, -math.inf), math.nan)


@promoted
def logcdf(x: ArrayLike, a: ArrayLike, b: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of ``cdf``."""
    y = (x - loc) / scale
    below, above = y <= a, y >= b
    # outside the bounds compute at a point between them, where derivatives are finite
    middle = bnp.where(a == -math.inf, bnp.minimum(b, 1) - 1, a + bnp.minimum(b - a, 2) / 2)
    y = bnp.where(below | above, middle, y)
    whole = _log_mass(a, b)
    lower = _log_mass(a, y) - whole
    # near 1, from the upper side, which keeps its digits
    near = lower > -0.1
    gap = bnp.where(near, whole - _log_mass(y, b), 1)
    log_p = bnp.where(near, log1mexp(gap), lower)
    return bnp.where(a < b, bnp.where(above, 0, bnp.where(below, -math.inf, log_p)), math.nan)


@promoted
def logsf(x: ArrayLike, a: ArrayLike, b: ArrayLike, loc: ArrayLike = 0, scale: ArrayLike = 1) -> Array:
    """The logarithm of ``sf``."""
    y = -x
    return logcdf(y, -b, -a, -loc, scale)


pdf = exp_of(logpdf)
cdf = exp_of(logcdf)
sf = exp_of(logsf)
