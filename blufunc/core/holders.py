"""Who holds a buffer: reference counts, by which a backend tells whether a donated array is alone with its memory.

Core, before stage 8. Counts are of many objects in one pass without Python for each: a step of training donates hundreds
of arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import compress
from typing import Any


def references(objects: Iterator[Any]) -> list[int]:
    """For each object how many refer to it, those included that do so while it is counted.

    ``ALONE`` is what this tells of an object that one other refers to, if the iterator is one of C's: ``compress``,
    ``map``.
    """
    return list(map(sys.getrefcount, objects))


(ALONE,) = references(compress([object()], [True]))
