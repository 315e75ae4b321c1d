"""Inspection of the array API standard: capabilities, devices and dtypes.

Face; ``blufunc.numpy`` is the namespace, of version 2024.12. ``docs/array-api.md`` lists what departs from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.ir import dtypes, source
from blufunc.numpy.creation import parse_device
from blufunc.numpy.types import bool_, isdtype

__array_api_version__ = "2024.12"
bool = bool_  # the standard's name

_DTYPES: dict[str, np.dtype] = {
    d.name: d
    for d in (
        dtypes.bool_, dtypes.int8, dtypes.int16, dtypes.int32, dtypes.int64, dtypes.uint8, dtypes.uint16, dtypes.uint32,
        dtypes.uint64, dtypes.float32, dtypes.float64, dtypes.complex64, dtypes.complex128,
    )
}  # fmt: skip
"""The dtypes of the standard. There are more: float16, bfloat16 and two of 8 bits."""


class Info:
    """The answers about this namespace."""

    __slots__ = ()

    def capabilities(self) -> dict[str, Any]:
        """Capabilities: shapes of results may depend on values, outside of traces."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> backend.Device:
        """The default device of new arrays."""
        return backend.default_device()

    def default_dtypes(self, *, device: Any = None) -> dict[str, np.dtype]:
        """The default dtypes of every device: 32-bit, but in the wide mode."""
        parse_device(device)
        return {
            "real floating": dtypes.default(float),
            "complex floating": dtypes.default(complex),
            "integral": dtypes.default(int),
            "indexing": dtypes.default(int),
        }

    def devices(self) -> list[backend.Device]:
        """The devices of the default backend."""
        return list(backend.get().devices())

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, np.dtype]:
        """The standard's dtypes by name, of a ``kind`` of ``isdtype``; all by default."""
        parse_device(device)
        if kind is not None and not isinstance(kind, (str, tuple)):
            raise errors.ArgumentError(
                f"dtypes: kind is a name or a tuple of names, not {kind!r:.60}.",
                where=source.here(),
                fix="kind='real floating'",
            )
        return {name: d for name, d in _DTYPES.items() if kind is None or isdtype(d, kind)}


def __array_namespace_info__() -> Info:
    """This namespace's answers, under the names of the array API standard."""
    return Info()
