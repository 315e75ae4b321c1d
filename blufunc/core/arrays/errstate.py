"""Floating-point warnings off while NumPy computes for us, at next to no cost per call.

Runtime support of stage 8. Arrays here follow IEEE: overflow is inf and 0/0 is NaN, without a
warning. ``numpy.errstate`` costs a microsecond a use, as much as a small operation; running in a
context in which it was set once costs a tenth of that, and leaves the user's own setting alone.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class _Quiet(threading.local):
    def __init__(self):
        self.context = contextvars.copy_context()
        self.context.run(np.seterr, all="ignore")
        self.inside = False


_quiet = _Quiet()


def quietly(function: Callable, *args: Any) -> Any:
    """``function(*args)`` with NumPy's floating-point warnings off."""
    q = _quiet
    if q.inside:
        return function(*args)
    q.inside = True
    try:
        return q.context.run(function, *args)
    finally:
        q.inside = False


def openly(function: Callable, *args: Any) -> Any:
    """``quietly`` for what calls functions of the user's: these see the context variables of the caller."""
    with np.errstate(all="ignore"):
        return function(*args)
