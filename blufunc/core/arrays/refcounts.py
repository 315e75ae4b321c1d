"""Who holds a buffer: reference counts, by which a backend tells whether a donated array is alone with its memory.

Core, before stage 8. Many objects are counted in one pass, without Python for each: a step of training donates
hundreds of arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any


def references(objects: Iterable[Any]) -> Iterator[int]:
    """For each object how many refer to it, those included that do so while it is counted.

    ``ALONE`` is what this tells of an object that one other refers to, if ``objects`` is an iterator of C's that
    keeps none of them: ``compress``, ``map``.
    """
    return map(sys.getrefcount, objects)


(ALONE,) = references(compress([object()], [True]))
