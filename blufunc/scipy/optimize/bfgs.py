"""BFGS: a dense approximation of the inverse Hessian matrix.

A face, below ``minimize``. J. Nocedal and S. J. Wright, "Numerical Optimization" (2006), 6.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.optim.line_search import line_search
from blufunc.scipy.optimize.results import OptimizeResults
from blufunc.transforms.autodiff.grad import value_and_grad


class _State(NamedTuple):
    x: Any
    f: Any
    g: Any
    inverse: Any
    steps: Any
    evaluations: Any
    stuck: Any


def bfgs(fun: Callable, x: Any, gtol: float, maxiter: int, norm: Any, search_steps: int) -> OptimizeResults:
    """Minimize a function by BFGS."""
    both = value_and_grad(fun)
    eye = bnp.eye(x.aval.size, dtype=x.aval.dtype)

    def going(s: _State):
        return (bnp.linalg.norm(s.g, norm) > gtol) & (s.steps < maxiter) & ~s.stuck & bnp.isfinite(s.f)

    def step(s: _State):
        direction = -(s.inverse @ s.g)
        slope = s.g @ direction
        # rounding may have spoilt the approximation: begin anew along the gradient
        uphill = slope >= 0
        inverse = bnp.where(uphill, eye, s.inverse)
        direction = bnp.where(uphill, -s.g, direction)
        found = line_search(both, s.x, direction, s.f, s.g, search_steps)
        dx, dg = found.a * direction, found.g - s.g
        curvature = dx @ dg
        # the update keeps the matrix positive definite only where the curvature is positive
        safe = curvature > 0
        rho = bnp.where(safe, 1 / bnp.where(safe, curvature, 1), 0)
        left = eye - rho * bnp.outer(dx, dg)
        # the first approximation gets the scale of the curvature that the first step met (Nocedal and Wright, 6.20)
        scale = bnp.where(safe, curvature / bnp.where(safe, dg @ dg, 1), 1)
        inverse = bnp.where(s.steps == 0, scale * eye, inverse)
        updated = left @ inverse @ left.T + rho * bnp.outer(dx, dx)
        better = found.ok
        return _State(
            bnp.where(better, s.x + dx, s.x),
            bnp.where(better, found.f, s.f),
            bnp.where(better, found.g, s.g),
            bnp.where(better & safe, updated, inverse),
            s.steps + 1,
            s.evaluations + found.evaluations,
            ~better,
        )

    f, g = both(x)
    s = lax.while_loop(going, step, _State(x, f, g, eye, 0, 1, bnp.asarray(False)))
    success = bnp.linalg.norm(s.g, norm) <= gtol
    status = bnp.where(success, 0, bnp.where(~bnp.isfinite(s.f), 5, bnp.where(s.stuck, 3, 1)))
    return OptimizeResults(s.x, success, status, s.f, s.g, s.inverse, s.evaluations, s.evaluations, s.steps)
