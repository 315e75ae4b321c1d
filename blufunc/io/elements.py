"""Elements in files: dtypes as safetensors stores them, and Python scalars.

Below the file format. In: a NumPy dtype, or a scalar. Out: a dtype code of safetensors with the number of stored values
for each element, or text; and back. What safetensors has no code for is stored as unsigned integers or as pairs, in one
more dimension, and named in the metadata.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from blufunc.core.ir import dtypes

CODES: dict[str, np.dtype] = {
    "BOOL": dtypes.bool_,
    "U8": dtypes.uint8, "U16": dtypes.uint16, "U32": dtypes.uint32, "U64": dtypes.uint64,
    "I8": dtypes.int8, "I16": dtypes.int16, "I32": dtypes.int32, "I64": dtypes.int64,
    "F8_E4M3": dtypes.float8_e4m3fn, "F8_E5M2": dtypes.float8_e5m2,
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz), "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F16": dtypes.float16, "BF16": dtypes.bfloat16, "F32": dtypes.float32, "F64": dtypes.float64,
    "C64": dtypes.complex64,
}  # fmt: skip
"""The dtypes of safetensors, but for packed kinds of 4 and 6 bits."""

# Codes that all readers know: the fp8 kinds but two, and C64, are younger than many readers.
_COMMON = {
    d: code for code, d in CODES.items() if code not in ("C64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
}
_PAIRS = {dtypes.key: "U32", dtypes.complex64: "F32", dtypes.complex128: "F64"}


def stored_as(dtype: np.dtype) -> tuple[str, int]:
    """Code of safetensors, and its values per element; 1 adds no dimension.

    Raises:
      TypeError: elements without a fixed number of bytes that mean something to another process.
    """
    if dtype in _COMMON:
        return _COMMON[dtype], 1
    if dtype in _PAIRS:
        return _PAIRS[dtype], 2
    if (
        not dtype.itemsize
        or dtype.hasobject
        or dtype.names
        or dtype.subdtype
        or (dtype.kind == "V" and not _of_ml_dtypes(dtype))
    ):
        raise TypeError(f"elements of dtype {dtype}")
    return "U8", dtype.itemsize


def name_of(dtype: np.dtype) -> str:
    """Name of a dtype in the metadata of a file."""
    if dtype == dtypes.key or dtype in dtypes.ALL:
        return dtypes.short_name(dtype) if dtype == dtypes.key else dtype.name
    return dtype.name if _of_ml_dtypes(dtype) else dtype.str


def named(name: Any) -> np.dtype:
    """The dtype with this name.

    Raises:
      ValueError: there is none, or its elements are Python objects.
    """
    if name == dtypes.short_name(dtypes.key):
        return dtypes.key
    if not isinstance(name, str):
        raise ValueError(f"{name!r:.60} is no dtype")
    try:
        found = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError as error:
        raise ValueError(f"{name!r:.60} is no dtype") from error
    if found.hasobject or found.names or not found.itemsize:
        raise ValueError(f"{name!r:.60} is no dtype of a file")
    return found


def _of_ml_dtypes(dtype: np.dtype) -> bool:
    return dtype.type.__module__ == "ml_dtypes"


SCALARS = (bool, int, float, complex, str, bytes)
"""Python values that are leaves of a file."""


def scalar_text(value: Any) -> list[str]:
    """Name of the type and exact text of a Python scalar, of subclasses their base."""
    kind = kind_of(value)
    return [kind.__name__, _TO[kind](value)]


def kind_of(value: Any) -> type:
    """The type of ``SCALARS`` of a Python scalar."""
    return next(kind for kind in SCALARS if isinstance(value, kind))


def scalar_of(record: Any) -> Any:
    """The Python scalar that ``scalar_text`` described.

    Raises:
      ValueError: the record is malformed.
    """
    match record:
        case [str(kind), str(text)] if kind in _FROM:
            return _FROM[kind](text)
    raise ValueError(f"{record!r:.60} is no scalar")


def _complex(text: str) -> complex:
    real, imaginary = text.split()
    return complex(float.fromhex(real), float.fromhex(imaginary))


_TO: dict[type, Any] = {
    bool: lambda x: str(int(x)),
    int: lambda x: hex(int(x)),  # decimal digits are limited to 4,300
    float: lambda x: float(x).hex(),
    complex: lambda x: f"{x.real.hex()} {x.imag.hex()}",
    str: str,
    bytes: lambda x: bytes(x).hex(),
}
_FROM: dict[str, Any] = {
    "bool": lambda text: bool(int(text)),
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": _complex,
    "str": str,
    "bytes": bytes.fromhex,
}
