"""Short expressions of scalars that lowering is full of: one of two values, a value in another dtype.

Kernels, stage 6, below ``region.py``. In: values of LoopIR. Out: values of LoopIR.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ops.elementwise import and_p, convert_p, select_p
from blufunc.kernels.loopir.ir import (
    Value,
    apply,
)

KEY = np.dtype(np.uint64)
"""The dtype in which kernels hold keys."""


def both(a: Value | None, b: Value | None) -> Value | None:
    """The conjunction; None is true."""
    if a is None or b is None:
        return b if a is None else a
    return apply(and_p, (a, b), {}, dtypes.bool_)


def choose(condition: Value, yes: Value, no: Value, dtype: np.dtype) -> Value:
    """One of two values."""
    return apply(select_p, (condition, yes, no), {}, dtype)


def converted(value: Value, dtype: np.dtype) -> Value:
    """A value in another dtype."""
    return value if value.dtype == dtype else apply(convert_p, (value,), {"dtype": dtype}, dtype)


def wide_for(dtype: np.dtype, op: str) -> np.dtype:
    """The dtype in which a reduction adds up."""
    if op in ("sum", "prod", "logaddexp") and dtype.itemsize <= 2 and dtypes.is_floating(dtype):
        return np.dtype(np.float32)
    return dtype


def held_as(dtype: np.dtype) -> np.dtype:
    """The dtype in which kernels hold values of ``dtype``: keys as uint64, all else as it is."""
    return KEY if dtypes.is_key(dtype) else dtype


def held(value: Any, dtype: np.dtype) -> np.ndarray:
    """A constant of ``dtype`` as kernels hold it."""
    array = np.asarray(value, dtype)
    return array.view(KEY) if dtypes.is_key(dtype) else array
