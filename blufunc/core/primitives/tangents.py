"""Symbolic zeros and cotangent accumulators: operands of differentiation rules.

Core. ``jvp`` rules receive ``Zero`` for tangents known to vanish; ``transpose`` rules receive an
``Accumulator`` for each argument that the operation is linear in.
"""

from __future__ import annotations

from typing import Any

from blufunc.core.ir.avals import ShapedArray


class Zero:
    """A tangent or cotangent that is zero by construction, never computed."""

    __slots__ = ("aval",)

    def __init__(self, aval: ShapedArray):
        self.aval = aval

    def __repr__(self) -> str:
        return f"Zero({self.aval})"


_zeros: dict[ShapedArray, Zero] = {}


def zero(aval: ShapedArray) -> Zero:
    """The symbolic zero in the tangent space of values of type ``aval``."""
    found = _zeros.get(aval)
    if found is None:
        found = _zeros[aval] = Zero(aval.tangent())
    return found


def is_nonzero(t: Any) -> bool:
    """True for a tangent or cotangent that is a value, not a symbolic zero."""
    return t.__class__ is not Zero


class Accumulator:
    """The cotangent of one variable during transposition: rules ``add`` to it.

    Attributes:
      aval: the type of the variable.
    """

    __slots__ = ("aval",)

    def __init__(self, aval: ShapedArray):
        self.aval = aval

    def add(self, ct: Any) -> None:
        """Add a cotangent; None and ``Zero`` add nothing."""
        raise NotImplementedError

    def add_window(self, ct: Any, starts: tuple[int, ...]) -> None:
        """Add the cotangent of the elements from ``starts`` on, one start per axis."""
        raise NotImplementedError


def is_linear(arg: Any) -> bool:
    """True if a transpose rule must transpose with respect to this argument."""
    return isinstance(arg, Accumulator)
