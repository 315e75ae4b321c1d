"""Refs: cells that hold an array, under the names of JAX's ``ref``.

Face over ``core.programs.refs``. ``jit``, loops and branches carry the cells that functions take or close over.
"""

from __future__ import annotations

from typing import Any

import blufunc.numpy as bnp
from blufunc.core.ir.trace import Array
from blufunc.core.programs.refs import AbstractRef, Ref, View, ds

__all__ = [
    "AbstractRef",
    "Ref",
    "addupdate",
    "ds",
    "empty_ref",
    "free_ref",
    "freeze",
    "get",
    "new_ref",
    "set",
    "swap",
]


def new_ref(init_val: Any, *, memory_space: Any = None, kind: str | None = None) -> Ref:
    """Make a cell that holds an array.

    Args:
      init_val: an array or number.
      memory_space, kind: accepted for compatibility: cells are of device memory.
    """
    return Ref(bnp.asarray(init_val))


def empty_ref(ty: Any, memory_space: Any = None) -> Ref:
    """Make a cell that holds zeros.

    Args:
      ty: the type, an object with a shape and a dtype.
      memory_space: accepted for compatibility: cells are of device memory.
    """
    return Ref(bnp.zeros(ty.shape, ty.dtype))


def get(ref: Ref | View, idx: Any = None) -> Array:
    """Read a cell, or the part at an index."""
    return ref[... if idx is None else idx]


def set(ref: Ref | View, idx: Any, value: Any) -> None:
    """Write a cell, or the part at an index."""
    ref[... if idx is None else idx] = value


def swap(ref: Ref | View, idx: Any, value: Any) -> Array:
    """Write a cell, or the part at an index, and return what was there."""
    before = get(ref, idx)
    set(ref, idx, value)
    return before


def addupdate(ref: Ref | View, idx: Any, x: Any) -> None:
    """Add to a cell, or to the part at an index."""
    ref.addupdate(... if idx is None else idx, x)


def freeze(ref: Ref) -> Array:
    """The last value of a cell.

    Args:
      ref: the cell, which cannot be used from now on.
    """
    value = ref.value
    ref._freed = True
    return value


def free_ref(ref: Ref) -> None:
    """End the use of a cell.

    Args:
      ref: the cell.
    """
    freeze(ref)
