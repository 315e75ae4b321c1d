"""Short expressions of scalars that lowering is full of: one of two values, a value in another dtype.

Kernels, stage 6, below ``region.py``. In: values of LoopIR. Out: values of LoopIR.
"""

from __future__ import annotations

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ops.elementwise import and_p, convert_p, select_p
from blufunc.kernels.loopir.ir import (
    Value,
    apply,
)


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
