"""Builders of short scalar expressions: selections, conversions, conjunctions.

Kernels, stage 6, used by all of ``lower``. In: values of LoopIR. Out: values of LoopIR.
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
    """The conjunction of two conditions; None is true."""
    if a is None or b is None:
        return b if a is None else a
    return apply(and_p, (a, b), {}, dtypes.bool_)


def choose(condition: Value, yes: Value, no: Value, dtype: np.dtype) -> Value:
    """A select: ``yes`` where a condition holds, else ``no``."""
    return apply(select_p, (condition, yes, no), {}, dtype)


def converted(value: Value, dtype: np.dtype) -> Value:
    """A value converted to another dtype."""
    return value if value.dtype == dtype else apply(convert_p, (value,), {"dtype": dtype}, dtype)


def wide_for(dtype: np.dtype, op: str) -> np.dtype:
    """The dtype in which a reduction accumulates."""
    if op in ("sum", "prod", "logaddexp") and dtype.itemsize <= 2 and dtypes.is_floating(dtype):
        return np.dtype(np.float32)
    return dtype


def held_as(dtype: np.dtype) -> np.dtype:
    """The dtype in which kernels hold values of ``dtype``: uint64 for keys."""
    return KEY if dtypes.is_key(dtype) else dtype


def held(value: Any, dtype: np.dtype) -> np.ndarray:
    """A constant of ``dtype`` as kernels hold it."""
    array = np.asarray(value, dtype)
    return array.view(KEY) if dtypes.is_key(dtype) else array
