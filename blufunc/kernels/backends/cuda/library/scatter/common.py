"""Reductions of scatters: their types and macros.

Kernels, stage 8, below ``rows.py`` and ``bins.py``. In: a reduction and dtypes. Out: parts of sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.kernels.codegen import scalar_ops, source_files

Own = Callable[[tuple[int, ...], np.dtype], Any]
"""Gives device memory of a shape and dtype, which lives as long as the scatter."""

COMBINE = {
    "set": "(u)",
    "add": "((acc) + (u))",
    "mul": "((acc) * (u))",
    "max": "(((u) != (u) || (u) > (acc)) ? (u) : (acc))",  # NaN propagates: no value compares greater
    "min": "(((u) != (u) || (u) < (acc)) ? (u) : (acc))",
}


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype that elements are combined in."""
    return np.dtype(np.float32) if scalar_ops.is_small_float(dtype) else dtype


def macros(how: str, dtype: np.dtype) -> dict[str, str]:
    """Conversions and the reduction."""
    return {
        "LOADED(x)": scalar_ops.loaded("(x)", dtype),
        "STORED(x)": scalar_ops.stored("(x)", dtype),
        "COMBINED(acc, u)": COMBINE[how],
    }


def types(index: str, dtype: np.dtype | None = None, **constants: Any) -> str:
    """Declarations of types and constants."""
    own = {} if dtype is None else {
        "Storage": scalar_ops.storage_type(dtype), "Wide": scalar_ops.register_type(dtype)
    }  # fmt: skip
    return source_files.declared(**constants, Index={"int32": "int", "int64": "long long"}[index], **own)


def takes(how: str, dtype: np.dtype) -> bool:
    """True if the kernels support a dtype: complex has no order, keys no arithmetic."""
    if dtypes.is_key(dtype) or dtypes.is_bool(dtype):
        return False
    return not (dtypes.is_complex(dtype) and how in ("max", "min"))
