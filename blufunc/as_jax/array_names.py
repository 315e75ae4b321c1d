"""Names of ``jax.numpy`` that stand for dtypes without arrays in blufunc.

Under the face ``as_jax``. Libraries compare dtypes with them; making an array of one is an error that says so.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from blufunc.core.ir import dtypes
from blufunc.numpy import manipulation

__all__ = [
    "dtype",
    "finfo",
    "iinfo",
    "reshape",
    "shape",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int2",
    "int4",
    "uint2",
    "uint4",
]

dtype = np.dtype


def _own_dtype(x: Any) -> Any:
    """The dtype of an array, or ``x``, which is not truncated to 32 bits."""
    found = getattr(x, "dtype", None)
    return found if isinstance(found, np.dtype) else x


def finfo(dtype: Any) -> Any:
    """Limits of a floating dtype or array, as NumPy's scalars of that dtype."""
    return ml_dtypes.finfo(dtypes.as_dtype(float) if dtype is float else _own_dtype(dtype))


def iinfo(int_type: Any) -> Any:
    """Limits of an integer dtype or of an array's."""
    return ml_dtypes.iinfo(dtypes.as_dtype(int) if int_type is int else _own_dtype(int_type))


def reshape(a: Any, shape: Any, order: Any = "C", **options: Any) -> Any:
    """``a`` in another shape; an array of NumPy stays one, as in JAX."""
    if isinstance(a, np.ndarray):
        return a.reshape(shape, order=order)
    return manipulation.reshape(a, shape, order, **options)


def shape(a: Any) -> tuple[int, ...]:
    """The shape of an array, and of None, which JAX still admits: ``()``."""
    return () if a is None else manipulation.shape(a)


float4_e2m1fn = ml_dtypes.float4_e2m1fn
float8_e3m4 = ml_dtypes.float8_e3m4
float8_e4m3 = ml_dtypes.float8_e4m3
float8_e4m3b11fnuz = ml_dtypes.float8_e4m3b11fnuz
float8_e4m3fnuz = ml_dtypes.float8_e4m3fnuz
float8_e5m2fnuz = ml_dtypes.float8_e5m2fnuz
float8_e8m0fnu = ml_dtypes.float8_e8m0fnu
int2, int4 = ml_dtypes.int2, ml_dtypes.int4
uint2, uint4 = ml_dtypes.uint2, ml_dtypes.uint4
