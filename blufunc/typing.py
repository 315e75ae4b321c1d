"""Names for annotations: what functions take as an array, and as a dtype.

A face, with the names of ``jax.typing``. Nothing is checked by them, nothing is computed here. Both work with
``isinstance`` where their members do: ``isinstance(x, ArrayLike)``.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from blufunc.core.ir.trace import Value

ArrayLike: TypeAlias = Value | np.ndarray | np.bool_ | np.number | bool | int | float | complex
"""Arrays, also traced ones, NumPy's arrays and numbers, and Python's numbers."""


@runtime_checkable
class SupportsDType(Protocol):
    """What has a dtype."""

    @property
    def dtype(self) -> np.dtype:
        """The dtype."""


DTypeLike: TypeAlias = str | type | np.dtype | SupportsDType
"""Names of dtypes, NumPy's and Python's classes of numbers, dtypes, and what has one."""

__all__ = ["ArrayLike", "DTypeLike"]
