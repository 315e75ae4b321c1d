"""The result of a minimisation.

A face, below ``bfgs.py`` and ``lbfgs.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class OptimizeResults(NamedTuple):
    """The result of ``minimize``.

    Attributes:
      x: the point, (n,).
      success: whether the gradient is as small as was asked for, a boolean.
      status: 0 for success, 1 for too many steps, 2 for too many evaluations, 3 where the line search found no better
        point, 4 where steps gain less than ``ftol``, 5 for NaN.
      fun: the value there.
      jac: the gradient there, (n,).
      hess_inv: an approximation of the inverse Hessian matrix, (n, n); None by L-BFGS, which stores none.
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
