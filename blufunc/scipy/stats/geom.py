"""The geometric distribution: the trials of success probability ``p`` until the first success.

A face, one module of ``scipy.stats``. ``p`` is a probability. With ``loc`` the distribution is that of such a number
plus ``loc``. They and the arguments are scalars or arrays that broadcast together; integers become float32.
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc.scipy import special
from blufunc.scipy.stats.parts import arguments

__all__ = ["logpmf", "pmf"]


def logpmf(k: Any, p: Any, loc: Any = 0) -> Any:
    """The logarithm of the probability of ``k``."""
    k, p, loc = arguments("geom.logpmf", k, p, loc)
    x = k - loc
    inside = x > 0
    log_p = special.xlog1py(bnp.where(inside, x - 1, 0), -p) + bnp.log(p)
    return bnp.where(inside, log_p, -math.inf)


def pmf(k: Any, p: Any, loc: Any = 0) -> Any:
    """The probability of ``k``."""
    return bnp.exp(logpmf(k, p, loc))
