"""``scipy.integrate``: integrals of samples.

A face above ``blufunc.numpy``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import blufunc.numpy as bnp
from blufunc.core.ir.trace import Array

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

__all__ = ["trapezoid"]


def trapezoid(y: ArrayLike, x: ArrayLike | None = None, dx: ArrayLike = 1.0, axis: int = -1) -> Array:
    """The integral of samples y at points x, or ``dx`` apart; see ``bnp.trapezoid``."""
    return bnp.trapezoid(y, x, dx, axis)
