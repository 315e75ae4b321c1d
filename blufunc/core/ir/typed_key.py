"""Keys that tell apart what ``==`` does not.

Core, before stage 1. In Python 1, 1.0 and True are equal, but a function traced with one of them computes in another
dtype than with the others, and 1/0.0 is not 1/-0.0. So where something is kept under a value, its key is ``exact`` of
it.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import numpy as np

_NUMBERS = bool, int, float, complex, np.generic


def exact(value: Any) -> Any:
    """A key that tells numbers apart by class and sign: by themselves, and in tuples, frozensets and dataclasses."""
    if isinstance(value, _NUMBERS):
        return (value.__class__, repr(value))
    if isinstance(value, tuple):
        return (value.__class__, *map(exact, value))
    if isinstance(value, frozenset):
        return (value.__class__, frozenset(map(exact, value)))
    made = getattr(value.__class__, "__dataclass_params__", None)
    if made is None or not made.eq:
        return value
    fields = [exact(getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare]
    key = (value.__class__, value, *fields)
    try:
        hash(key)
    except TypeError:  # a class may have a hash of its own
        return value
    return key


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, and ``exact`` of them too."""
    if a is b:
        return True
    if a.__class__ is tuple is b.__class__ and len(a) == len(b) and all(map(operator.is_, a, b)):
        return True  # the most frequent case, at the speed of C
    return bool(a == b) and exact(a) == exact(b)


def shown(key: Any) -> str:
    """The value that ``exact`` made a key of, as it is written."""
    if not isinstance(key, tuple):
        return repr(key)
    kind, first, *rest = (*key, None) if len(key) == 1 else key
    if issubclass(kind, tuple):
        parts = [shown(k) for k in key[1:]]
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    if issubclass(kind, frozenset):
        return f"frozenset({{{', '.join(sorted(map(shown, first)))}}})"
    return first if issubclass(kind, _NUMBERS) else repr(first)
