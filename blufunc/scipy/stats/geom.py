"""The geometric distribution: trials of probability ``p`` up to a success."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, promoted

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = ["logpmf", "pmf"]


@promoted
def logpmf(k: ArrayLike, p: ArrayLike, loc: ArrayLike = 0) -> Array:
    """The logarithm of the probability of ``k``."""
    x = k - loc
    inside = x > 0
    log_p = special.xlog1py(bnp.where(inside, x - 1, 0), -p) + bnp.log(p)
    return bnp.where(inside, log_p, -math.inf)


pmf = exp_of(logpmf)
