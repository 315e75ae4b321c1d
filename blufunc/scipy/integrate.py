"""``scipy.integrate``: integrals of samples.

A face above ``blufunc.numpy``.
"""

from __future__ import annotations

from typing import Any

import blufunc.numpy as bnp
from blufunc.core.ir.trace import Array

__all__ = ["trapezoid"]


def trapezoid(y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Array:
    """The integral of samples y at points x, or ``dx`` apart; see ``bnp.trapezoid``."""
    return bnp.trapezoid(y, x, dx, axis)
