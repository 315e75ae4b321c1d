"""Type aliases for arguments that are converted to an array, or to a dtype.

A face, with the names of ``jax.typing``. They check and compute nothing. Both work with ``isinstance`` where
their members do: ``isinstance(x, ArrayLike)``.
"""

from __future__ import annotations

from blufunc.core.ir.array_like import ArrayLike as ArrayLike
from blufunc.core.ir.array_like import DTypeLike as DTypeLike
from blufunc.core.ir.array_like import SupportsDType as SupportsDType

__all__ = ["ArrayLike", "DTypeLike"]
