"""Minimisation of functions of a vector: ``minimize`` by BFGS.

A face above ``blufunc.lax``. Everything is traced, so that it can be jitted and mapped; J. Nocedal and S. J. Wright,
"Numerical Optimization" (2006) has the algorithms: 6.1 for BFGS, 3.5 and 3.6 for the line search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.transforms.autodiff.grad import value_and_grad

_SUFFICIENT, _CURVATURE = 1e-4, 0.9  # the constants of the strong Wolfe conditions


class OptimizeResults(NamedTuple):
    """The result of ``minimize``.

    Attributes:
      x: the point, (n,).
      success: whether the gradient is as small as was asked for, a boolean.
      status: 0 for success, 1 for too many steps, 3 where the line search found no better point, 5 for NaN.
      fun: the value there.
      jac: the gradient there, (n,).
      hess_inv: an approximation of the inverse Hessian matrix, (n, n).
      nfev, njev: how often the function and its gradient were computed.
      nit: the number of steps.
    """

    x: Any
    success: Any
    status: Any
    fun: Any
    jac: Any
    hess_inv: Any
    nfev: Any
    njev: Any
    nit: Any


def minimize(
    fun: Callable,
    x0: Any,
    args: tuple = (),
    *,
    method: str,
    tol: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> OptimizeResults:
    """A local minimum of ``fun(x, *args)``.

    Args:
      fun: from an array (n,) to a real of rank 0.
      x0: where to begin, (n,), floats.
      args: further arguments of ``fun``.
      method: "BFGS".
      tol: it ends when no element of the gradient is larger; 1e-5 by default.
      options: ``gtol`` (as ``tol``), ``maxiter`` (200 steps an unknown by default), ``norm`` (the order of the norm of
        the gradient, infinity by default), ``line_search_maxiter`` (10).
    """
    if not isinstance(method, str) or method.lower() != "bfgs":
        raise errors.UnsupportedError(
            f"minimize has the method 'BFGS', not {method!r:.60}.", where=source.here(), fix='method="BFGS"'
        )
    x = lift(x0, "x0")
    if x.aval.ndim != 1 or not dtypes.is_floating(x.aval.dtype):
        raise errors.ShapeError(
            f"minimize: x0 is an array of floats of rank 1, not {x.aval}.",
            where=source.here(),
            fix="flatten_util.ravel_pytree makes one of a pytree",
        )
    if not isinstance(args, tuple):
        raise errors.ArgumentError("minimize: args is a tuple.", where=source.here(), fix="args=(a,)")
    settings: dict[str, Any] = {
        "gtol": 1e-5 if tol is None else tol,
        "maxiter": 200 * x.aval.size,
        "norm": bnp.inf,
        "line_search_maxiter": 10,
    }
    unknown = set(options or {}) - set(settings)
    if unknown:
        raise errors.ArgumentError(
            f"minimize has no option {', '.join(sorted(map(str, unknown)))}.",
            where=source.here(),
            fix=f"the options are {', '.join(settings)}",
        )
    settings.update(options or {})
    return _bfgs(
        lambda v: fun(v, *args),
        x,
        settings["gtol"],
        static_int(settings["maxiter"], "minimize", "maxiter"),
        settings["norm"],
        static_int(settings["line_search_maxiter"], "minimize", "line_search_maxiter"),
    )


class _State(NamedTuple):
    x: Any
    f: Any
    g: Any
    inverse: Any
    steps: Any
    evaluations: Any
    stuck: Any


def _bfgs(fun: Callable, x: Any, gtol: float, maxiter: int, norm: Any, search_steps: int) -> OptimizeResults:
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
        found = _line_search(both, s.x, direction, s.f, s.g, search_steps)
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


class _Search(NamedTuple):
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


def _line_search(both: Callable, x: Any, direction: Any, f0: Any, g0: Any, steps: int) -> _Search:
    """A step by the strong Wolfe conditions; after ``steps`` trials, the best descent."""
    slope0 = g0 @ direction
    decimals = 4 * bnp.finfo(x.aval.dtype).eps * bnp.abs(f0)  # differences below are rounding

    def going(s: _Search):
        return ~s.ok & (s.evaluations < steps)

    def step(s: _Search):
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
        return _Search(
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
    s = lax.while_loop(going, step, _Search(one, f0, g0, zero, f0, slope0, zero, f0, no, no, 0, zero, f0, g0))
    return s._replace(a=s.best, f=s.f_best, g=s.g_best, ok=s.ok | (s.f_best < f0))


__all__ = ["OptimizeResults", "minimize"]
