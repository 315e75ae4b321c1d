"""L-BFGS: the inverse Hessian matrix as the last few steps.

A face, below ``minimize``. J. Nocedal and S. J. Wright, "Numerical Optimization" (2006), 7.4 and 7.5. The last ``n``
steps and changes of the gradient are rows of arrays, the oldest first.
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
    steps_taken: Any  # s, (n, d): changes of the point
    changes: Any  # y, (n, d): changes of the gradient
    rho: Any  # 1 / (y @ s), (n,); 0 of a row without a step
    steps: Any
    evaluations: Any
    stuck: Any
    slow: Any


def _direction(s: _State) -> Any:
    """Minus the approximated inverse Hessian times the gradient: two loops."""

    def last_to_first(q, row):
        step, change, rho = row
        alpha = rho * (step @ q)
        return q - alpha * change, alpha

    rows = (s.steps_taken, s.changes, s.rho)
    q, alphas = lax.scan(last_to_first, s.g, rows, reverse=True)
    newest = s.changes[-1]
    curvature = newest @ newest
    scale = bnp.where(s.rho[-1] > 0, 1 / bnp.where(s.rho[-1] > 0, s.rho[-1] * curvature, 1), 1)

    def first_to_last(r, row):
        (step, change, rho), alpha = row
        return r + step * (alpha - rho * (change @ r)), None

    return -lax.scan(first_to_last, scale * q, (rows, alphas))[0]


def lbfgs(
    fun: Callable,
    x: Any,
    *,
    gtol: float,
    ftol: float,
    norm: Any,
    maxiter: Any,
    maxfun: Any,
    n_history: int,
    search_steps: int,
) -> OptimizeResults:
    """Minimize a function by L-BFGS with ``n_history`` steps."""
    both = value_and_grad(fun)

    def going(s: _State):
        small = bnp.linalg.norm(s.g, norm) <= gtol
        spent = (s.steps >= maxiter) | (s.evaluations >= maxfun)
        return ~small & ~spent & ~s.stuck & ~s.slow & bnp.isfinite(s.f)

    def step(s: _State):
        direction = _direction(s)
        uphill = s.g @ direction >= 0  # rounding may have spoilt the history: begin anew along the gradient
        direction = bnp.where(uphill, -s.g, direction)
        found = line_search(both, s.x, direction, s.f, s.g, search_steps)
        dx, dg = found.a * direction, found.g - s.g
        curvature = dx @ dg
        safe = found.ok & (curvature > 0)
        rho = 1 / bnp.where(safe, curvature, 1)
        pushed = lambda rows, row: bnp.where(safe, bnp.concatenate([rows[1:], row[None]]), rows)
        return _State(
            bnp.where(found.ok, s.x + dx, s.x),
            bnp.where(found.ok, found.f, s.f),
            bnp.where(found.ok, found.g, s.g),
            pushed(bnp.where(uphill, 0, s.steps_taken), dx),
            pushed(bnp.where(uphill, 0, s.changes), dg),
            pushed(bnp.where(uphill, 0, s.rho), rho),
            s.steps + 1,
            s.evaluations + found.evaluations,
            ~found.ok,
            s.f - found.f < ftol,
        )

    f, g = both(x)
    history = bnp.zeros((n_history, x.aval.size), x.aval.dtype)
    no = bnp.asarray(False)
    s = lax.while_loop(going, step, _State(x, f, g, history, history, history[:, 0], 0, 1, no, no))
    success = bnp.linalg.norm(s.g, norm) <= gtol
    reasons = [(s.evaluations >= maxfun, 2), (s.steps >= maxiter, 1), (s.slow, 4), (s.stuck, 3)]
    status: Any = 1
    for happened, code in [*reasons, (~bnp.isfinite(s.f), 5), (success, 0)]:
        status = bnp.where(happened, code, status)
    return OptimizeResults(s.x, success, status, s.f, s.g, None, s.evaluations, s.evaluations, s.steps)
