"""Parsing of memory sizes: ``"12GB"`` is 12e9 bytes, ``"12GiB"`` is 12 * 2**30.

Transforms, used by ``jit.py``. In: a user's ``memory_budget``. Out: bytes.
"""

from __future__ import annotations

import operator
import re
from typing import Any

from blufunc import errors
from blufunc.core.ir import source

_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**n for n, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**n for n, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", re.IGNORECASE)


def budget_in_bytes(size: Any, what: str = "jit: memory_budget") -> int:
    """The bytes of a ``memory_budget``: a positive integer, or a number with a unit.

    Args:
      what: the function and its argument, for the message.

    Raises:
      ArgumentError: it is neither.
    """
    found = None
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match and unit:
            found = int(float(match[1]) * unit)
    elif not isinstance(size, bool):
        try:
            found = operator.index(size)
        except TypeError:
            found = None
    if found is None or found <= 0:
        raise errors.ArgumentError(
            f"{what}={size!r:.60} is not a memory size.",
            where=source.here(),
            fix=f'{what.split()[-1]}="12GB" for 12e9 bytes, "12GiB" for 12 * 2**30, or bytes as an int',
        )
    return found
