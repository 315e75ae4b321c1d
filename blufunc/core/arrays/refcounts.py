"""Reference counts of buffers: whether a donated array is the sole owner.

Core, before stage 8. Many objects are counted in one pass without Python code per object: a training step
donates hundreds of arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any


def references(objects: Iterable[Any]) -> Iterator[int]:
    """The reference count of each object, including references of the count itself.

    ``ALONE`` is the count of an object with one other reference, if ``objects`` is a C iterator that holds no
    references: ``compress``, ``map``.
    """
    return map(sys.getrefcount, objects)


(ALONE,) = references(compress([object()], [True]))
