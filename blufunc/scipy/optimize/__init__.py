"""Minimisation of functions of a vector: ``minimize`` by BFGS and L-BFGS.

A face above ``blufunc.lax``. Everything is traced, so that it can be jitted and mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.scipy.optimize.bfgs import bfgs
from blufunc.scipy.optimize.lbfgs import lbfgs
from blufunc.scipy.optimize.results import OptimizeResults

_LIMITED = ("l-bfgs", "l-bfgs-experimental-do-not-rely-on-this")
"""Names of L-BFGS, the second of them JAX's."""


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
      method: "BFGS", or "L-BFGS", which stores the last steps instead of a matrix (n, n); it is also known as
        "l-bfgs-experimental-do-not-rely-on-this".
      tol: it ends when no element of the gradient is larger; 1e-5 by default.
      options: ``gtol`` (as ``tol``), ``maxiter`` (200 steps an unknown by default), ``norm`` (the order of the norm of
        the gradient, infinity by default). Of BFGS ``line_search_maxiter`` (10). Of L-BFGS ``maxls`` (20), the same;
        ``maxcor`` (10), the number of steps that are stored; ``ftol`` (2.2e-9): it ends when a step gains less;
        ``maxfun`` and ``maxgrad``, numbers of evaluations (no limit).
    """
    name = method.lower() if isinstance(method, str) else method
    if name != "bfgs" and name not in _LIMITED:
        raise errors.UnsupportedError(
            f"minimize has the methods 'BFGS' and 'L-BFGS', not {method!r:.60}.",
            where=source.here(),
            fix='method="BFGS"',
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
        "gtol": 1e-5 if tol is None else tol, "maxiter": None, "norm": bnp.inf,
        **({"line_search_maxiter": 10} if name == "bfgs" else
           {"maxls": 20, "maxcor": 10, "ftol": 2.220446049250313e-09, "maxfun": None, "maxgrad": None}),
    }  # fmt: skip
    unknown = set(options or {}) - set(settings)
    if unknown:
        raise errors.ArgumentError(
            f"minimize by {method} has no option {', '.join(sorted(map(str, unknown)))}.",
            where=source.here(),
            fix=f"the options are {', '.join(settings)}",
        )
    settings.update(options or {})

    def count(option: str, default: Any = None) -> Any:
        value = settings[option]
        return default if value is None else static_int(value, "minimize", option)

    of_x = lambda v: fun(v, *args)
    n = x.aval.size
    if name == "bfgs":
        steps, search = count("maxiter", 200 * n), count("line_search_maxiter")
        return bfgs(of_x, x, settings["gtol"], steps, settings["norm"], search)
    unlimited = 2**31 - 1
    evaluations = min(count("maxfun", unlimited), count("maxgrad", unlimited))
    return lbfgs(
        of_x,
        x,
        gtol=settings["gtol"],
        ftol=settings["ftol"],
        norm=settings["norm"],
        maxiter=count("maxiter", 200 * n if evaluations == unlimited else unlimited),
        maxfun=evaluations,
        n_history=count("maxcor"),
        search_steps=count("maxls"),
    )


__all__ = ["OptimizeResults", "minimize"]
