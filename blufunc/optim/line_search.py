"""A line search by the strong Wolfe conditions.

A face, below ``lbfgs.py`` and ``scipy.optimize``. J. Nocedal and S. J. Wright, "Numerical Optimization" (2006), 3.5
and 3.6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import lax

_SUFFICIENT, _CURVATURE = 1e-4, 0.9  # the constants of the strong Wolfe conditions


class Search(NamedTuple):
    """State of a line search: the trial, and once known, a bracket of a good step."""

    a: Any
    f: Any
    g: Any
    low: Any
    f_low: Any
    slope_low: Any
    high: Any
    f_high: Any
    bracketed: Any
    ok: Any
    evaluations: Any
    best: Any
    f_best: Any
    g_best: Any


def line_search(both: Callable, x: Any, direction: Any, f0: Any, g0: Any, steps: int) -> Search:
    """A step by the strong Wolfe conditions; after ``steps`` trials, the best descent."""
    slope0 = g0 @ direction
    decimals = 4 * bnp.finfo(x.aval.dtype).eps * bnp.abs(f0)  # differences below are rounding

    def going(s: Search):
        return ~s.ok & (s.evaluations < steps)

    def step(s: Search):
        f, g = both(x + s.a * direction)
        slope = g @ direction
        descends = f <= f0 + _SUFFICIENT * s.a * slope0 + decimals
        flat = bnp.abs(slope) <= -_CURVATURE * slope0
        ok = descends & flat & bnp.isfinite(f)
        too_far = ~descends | (f > s.f_low) | ~bnp.isfinite(f)
        # the trial becomes one end of the interval: the far one, or, descending still, the near one
        turn = ~too_far & (slope * bnp.where(s.bracketed, s.high - s.low, 1) >= 0)
        high = bnp.where(too_far, s.a, bnp.where(turn, s.low, s.high))
        f_high = bnp.where(too_far, f, bnp.where(turn, s.f_low, s.f_high))
        low = bnp.where(too_far, s.low, s.a)
        f_low = bnp.where(too_far, s.f_low, f)
        slope_low = bnp.where(too_far, s.slope_low, slope)
        bracketed = s.bracketed | too_far | turn
        # the minimum of the parabola through the near end, kept away from both ends
        width = high - low
        drop = f_high - f_low - slope_low * width
        inside = low + bnp.where(
            drop > 0, -slope_low * width**2 / (2 * bnp.where(drop > 0, drop, 1)), width / 2
        )
        ends = bnp.sort(bnp.stack([low + 0.1 * width, high - 0.1 * width]))
        inside = bnp.where(bnp.isfinite(inside), bnp.clip(inside, ends[0], ends[1]), low + width / 2)
        trial = bnp.where(bracketed, inside, 2 * s.a)
        improves = bnp.isfinite(f) & (f < s.f_best)
        return Search(
            bnp.where(ok, s.a, trial),
            f,
            g,
            low,
            f_low,
            slope_low,
            high,
            f_high,
            bracketed,
            ok,
            s.evaluations + 1,
            bnp.where(improves | ok, s.a, s.best),
            bnp.where(improves | ok, f, s.f_best),
            bnp.where(improves | ok, g, s.g_best),
        )

    no, zero, one = bnp.asarray(False), bnp.zeros_like(f0), bnp.ones_like(f0)
    s = lax.while_loop(going, step, Search(one, f0, g0, zero, f0, slope0, zero, f0, no, no, 0, zero, f0, g0))
    return s._replace(a=s.best, f=s.f_best, g=s.g_best, ok=s.ok | (s.f_best < f0))
