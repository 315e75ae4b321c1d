"""Names of ``jax.dtypes`` and of JAX's registry of pytrees.

Under the face ``as_jax``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blufunc import dtypes
from blufunc.core.pytree.nodes import KINDS

__all__ = ["_registry", "DType", "ExtendedDType", "canonicalize_dtype"]

DType = np.dtype


def canonicalize_dtype(dtype: Any, allow_extended_dtype: bool = False) -> np.dtype:
    """The dtype that an array of ``dtype`` has in the mode in force; None is float."""
    return dtypes.canonicalize_dtype(float if dtype is None else dtype, allow_extended_dtype)


class ExtendedDType:
    """Base of dtypes that libraries declare for JAX; no array of blufunc has one."""


class _Registry:
    """The classes that are pytree nodes."""

    def __contains__(self, cls: type) -> bool:
        return KINDS[cls] is not None


_registry = _Registry()
