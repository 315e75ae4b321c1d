"""Names of ``jax.numpy`` that stand for dtypes without arrays.

Under the face ``as_jax``. Programs compare dtypes with them; making an array of one is an error, here and in JAX.
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
    "float6_e2m3fn",
    "float6_e3m2fn",
    "iinfo",
    "int1",
    "reshape",
    "shape",
    "uint1",
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


def reshape(a: Any, shape: Any, order: Any = "C", *, copy: Any = None, **options: Any) -> Any:
    """``a`` in another shape; an array of NumPy stays one, as in JAX."""
    if isinstance(a, np.ndarray):
        return a.reshape(shape, order=order, copy=copy)
    return manipulation.reshape(a, shape, order, copy=copy, **options)


def shape(a: Any) -> tuple[int, ...]:
    """The shape of an array, and of None, which JAX still admits: ``()``."""
    return () if a is None else manipulation.shape(a)


float6_e2m3fn, float6_e3m2fn = ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn
int1, uint1 = ml_dtypes.int1, ml_dtypes.uint1
