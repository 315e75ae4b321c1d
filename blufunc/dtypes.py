"""Dtypes under the names of JAX's ``dtypes``: kinds, promotion and limits.

Face over ``core.ir.dtypes``.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.dtypes import extended, float0, prng_key
from blufunc.errors import DtypeError as TypePromotionError
from blufunc.numpy.types import ScalarType, bfloat16, common_type, finfo, iinfo, issubdtype

__all__ = [
    "TypePromotionError",
    "bfloat16",
    "canonicalize_dtype",
    "extended",
    "finfo",
    "float0",
    "iinfo",
    "issubdtype",
    "itemsize_bits",
    "prng_key",
    "result_type",
    "scalar_type_of",
]


@overload
def result_type(*args: Any, return_weak_type_flag: Literal[False] = False) -> np.dtype: ...
@overload
def result_type(*args: Any, return_weak_type_flag: Literal[True]) -> tuple[np.dtype, bool]: ...


def result_type(*args: Any, return_weak_type_flag: bool = False) -> Any:
    """The dtype of arithmetic between arrays, Python scalars and dtypes.

    Args:
      return_weak_type_flag: return the pair of the dtype and whether it is weak; default False.
    """
    dtype, weak = common_type(*args)
    return (dtype, weak) if return_weak_type_flag else dtype


def canonicalize_dtype(dtype: Any, allow_extended_dtype: bool = False) -> np.dtype:
    """The ``np.dtype`` of arrays for which ``dtype`` was requested: 64 bits are kept.

    Raises:
      DtypeError: there are no such arrays, or it is a key's and ``allow_extended_dtype`` is False.
    """
    found = dtypes.as_dtype(dtype)
    if dtypes.is_key(found) and not allow_extended_dtype:
        raise errors.DtypeError(
            "canonicalize_dtype of the dtype of random keys.",
            where=source.here(),
            fix="canonicalize_dtype(dtype, allow_extended_dtype=True)",
        )
    return found


_KINDS = (
    (dtypes.is_bool, bool),
    (dtypes.is_integer, int),
    (dtypes.is_floating, float),
    (dtypes.is_complex, complex),
)


def scalar_type_of(x: Any) -> type:
    """The Python type of a value's, or dtype's, elements: bool, int, float or complex."""
    named = isinstance(x, (str, type, np.dtype, ScalarType))
    dtype = dtypes.as_dtype(x) if named else common_type(x)[0]
    for test, kind in _KINDS:
        if test(dtype):
            return kind
    raise errors.DtypeError(
        f"{dtypes.short_name(dtype)} has no scalars.", where=source.here(), fix="pass an array of numbers"
    )


def itemsize_bits(dtype: Any) -> int:
    """The number of bits that an element of the dtype holds; 8 of a boolean."""
    found = dtypes.as_dtype(dtype)
    if dtypes.is_integer(found):
        return int(iinfo(found).bits)
    return 8 * found.itemsize
