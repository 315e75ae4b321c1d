"""Names of ``jax.numpy`` that stand for dtypes without arrays in blufunc.

Under the face ``as_jax``. Libraries compare dtypes with them; making an array of one is an error that says so.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from blufunc.numpy import manipulation

__all__ = [
    "dtype",
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
