"""Types of the arguments of public functions: ``ArrayLike``, ``DTypeLike``.

Core, for annotations: modules import it under ``TYPE_CHECKING``, and ``blufunc.typing`` shows it to users.
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
