"""DLPack, under the names of JAX's ``dlpack``.

Face over ``numpy`` and ``core.arrays``.
"""

from __future__ import annotations

from typing import Any

from blufunc.core.arrays import dlpack
from blufunc.core.ir import dtypes
from blufunc.numpy.interchange import from_dlpack

__all__ = ["from_dlpack", "is_supported_dtype"]


def is_supported_dtype(dtype: Any) -> bool:
    """True if arrays of a dtype can be given to other libraries."""
    return dlpack.has_name(dtypes.as_dtype(dtype))
