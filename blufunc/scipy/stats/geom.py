"""The geometric distribution: trials of probability ``p`` up to a success."""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import exp_of, promoted

__all__ = ["logpmf", "pmf"]


@promoted
def logpmf(k: Any, p: Any, loc: Any = 0) -> Any:
    """The logarithm of the probability of ``k``."""
    x = k - loc
    inside = x > 0
    log_p = special.xlog1py(bnp.where(inside, x - 1, 0), -p) + bnp.log(p)
    return bnp.where(inside, log_p, -math.inf)


pmf = exp_of(logpmf)
