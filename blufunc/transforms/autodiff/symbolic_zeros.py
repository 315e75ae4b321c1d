"""Symbolic zeros for users' derivative rules, with ``symbolic_zeros=True``.

Transforms, stage 2. In: tangents, of which structural zeros are ``Zero`` internally. Out: for rules of ``custom_jvp``
and ``custom_vjp`` that opt in, ``SymbolicZero``s, so that they can skip work; for other rules, arrays of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blufunc.core.ir.avals import ShapedArray, Typed
from blufunc.core.primitives.linear_ops import instantiate as _instantiate
from blufunc.core.primitives.linear_ops import zeros
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import as_values


class SymbolicZero(Typed):
    """A tangent or cotangent that is zero for all values; a leaf, and not an array.

    Attributes:
      aval: its type; of dtype float0 if the primal is not differentiable.
    """

    __slots__ = ("aval",)

    def __init__(self, aval: ShapedArray):
        self.aval = aval

    def instantiate(self) -> Any:
        """The array of zeros."""
        return zeros(self.aval)

    def __repr__(self) -> str:
        return f"SymbolicZero({self.aval})"


class CustomVJPPrimal:
    """A leaf argument of a ``custom_vjp`` forward rule with ``symbolic_zeros``.

    Attributes:
      value: the argument.
        perturbed: True if it is differentiated; otherwise its cotangent is not used.
    """

    __slots__ = ("perturbed", "value")

    def __init__(self, value: Any, perturbed: bool):
        self.value = value
        self.perturbed = perturbed

    def __repr__(self) -> str:
        return f"CustomVJPPrimal({self.value!r}, perturbed={self.perturbed})"


def instantiate(t: Any) -> Any:
    """A tangent or cotangent as an array."""
    return t.instantiate() if t.__class__ is SymbolicZero else t


def zero_from_primal(x: Any, symbolic_zeros: bool = False) -> Any:
    """The zero tangents of values: of their shapes, and of their dtypes or float0.

    Args:
      x: a pytree of arrays.
      symbolic_zeros: return ``SymbolicZero``s instead of arrays; default False.
    """

    def of_leaf(leaf: Any) -> Any:
        (value,) = as_values([leaf], lambda i: "the primal")
        aval = value.aval.tangent()
        return SymbolicZero(aval) if symbolic_zeros else zeros(aval)

    return tree.map(of_leaf, x)


def for_rule(tangents: Sequence, symbolic: bool) -> list:
    """Tangents or cotangents in the form that a user's rule expects."""
    if not symbolic:
        return [_instantiate(t) for t in tangents]
    return [SymbolicZero(t.aval) if t.__class__ is Zero else t for t in tangents]


def example_zero(z: Zero) -> Zero:
    """The symbolic zero of one example, from one of a batch along axis 0."""
    return zero(z.aval.with_shape(z.aval.shape[1:]))
