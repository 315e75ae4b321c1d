"""Zeros and perturbations as users' derivative rules see them, with ``symbolic_zeros=True``.

Transforms, stage 2, between ``core/primitives/tangents.py`` and the rules of ``custom_jvp`` and ``custom_vjp``. Inside,
a tangent that is zero by construction is a ``Zero``; a rule that asks to be told gets a ``SymbolicZero`` in its
place and can leave out work; any other rule gets zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.primitives.linear_ops import instantiate as _instantiate
from blufunc.core.primitives.linear_ops import zeros
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.transforms.arguments import as_values


class SymbolicZero:
    """A tangent or cotangent that is zero whatever the values are; a leaf, and not an array.

    Attributes:
      aval: its type.
    """

    __slots__ = ("aval",)

    def __init__(self, aval: ShapedArray):
        self.aval = aval

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, a tuple of int."""
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype; float0 where the primal has no derivative."""
        return self.aval.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.aval.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.aval.size

    def instantiate(self) -> Any:
        """The array of zeros that it stands for."""
        return zeros(self.aval)

    def __repr__(self) -> str:
        return f"SymbolicZero({self.aval})"


class CustomVJPPrimal:
    """An argument of the forward rule of a ``custom_vjp`` that was defined with ``symbolic_zeros=True``; a leaf.

    Attributes:
      value: the argument.
      perturbed: whether it is being differentiated; if not, its cotangent is not used.
    """

    __slots__ = ("perturbed", "value")

    def __init__(self, value: Any, perturbed: bool):
        self.value = value
        self.perturbed = perturbed

    def __repr__(self) -> str:
        return f"CustomVJPPrimal({self.value!r}, perturbed={self.perturbed})"


def instantiate(t: Any) -> Any:
    """A tangent or cotangent as an array: zeros for a ``SymbolicZero``."""
    return t.instantiate() if t.__class__ is SymbolicZero else t


def zero_from_primal(x: Any, symbolic_zeros: bool = False) -> Any:
    """The zero tangent of a value: of its shape, and of its dtype or float0.

    Args:
      x: an array.
      symbolic_zeros: whether to return a ``SymbolicZero`` instead of an array.
    """
    (value,) = as_values([x], lambda i: "the primal")
    aval = value.aval.tangent()
    return SymbolicZero(aval) if symbolic_zeros else zeros(aval)


def for_rule(tangents: Sequence, symbolic: bool) -> list:
    """Tangents or cotangents as a user's rule gets them."""
    if not symbolic:
        return [_instantiate(t) for t in tangents]
    return [SymbolicZero(t.aval) if t.__class__ is Zero else t for t in tangents]


def example_zero(z: Zero) -> Zero:
    """A symbolic zero of one example, from that of a batch along axis 0."""
    return zero(z.aval.with_shape(z.aval.shape[1:]))
