"""Sizes of memory as people write them: ``"12GB"`` is 12e9 bytes, ``"12GiB"`` is 12 * 2**30.

Transforms, beside ``jit.py``. In: what was given for ``memory_budget``. Out: bytes.
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


def budget_in_bytes(given: Any) -> int:
    """The bytes of a ``memory_budget``: a positive whole number, or a number with a unit.

    Raises:
      ArgumentError: it is neither.
    """
    found = None
    if isinstance(given, str):
        match = _SIZE.fullmatch(given)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match and unit:
            found = int(float(match[1]) * unit)
    elif not isinstance(given, bool):
        try:
            found = operator.index(given)
        except TypeError:
            found = None
    if found is None or found <= 0:
        raise errors.ArgumentError(
            f"jit: memory_budget={given!r:.60} is no size of memory.",
            where=source.here(),
            fix='memory_budget="12GB" for 12e9 bytes, "12GiB" for 12 * 2**30, or bytes as an int',
        )
    return found
