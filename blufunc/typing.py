"""Type aliases for arguments that are converted to an array, or to a dtype.

A face, with the names of ``jax.typing``. They check and compute nothing. Both work with ``isinstance`` where
their members do: ``isinstance(x, ArrayLike)``.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from blufunc.core.ir.trace import Array

ArrayLike: TypeAlias = Array | np.ndarray | np.bool_ | np.number | bool | int | float | complex
"""Arrays, tracers, NumPy arrays and scalars, and Python scalars."""


@runtime_checkable
class SupportsDType(Protocol):
    """An object with a dtype."""

    @property
    def dtype(self) -> np.dtype:
        """The dtype."""


DTypeLike: TypeAlias = str | type | np.dtype | SupportsDType
"""Dtypes, names of dtypes, scalar types of NumPy and Python, objects with a dtype."""

__all__ = ["ArrayLike", "DTypeLike"]
