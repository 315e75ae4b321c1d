"""``jax.experimental.hijax``: declarations of types, none of which can be used.

Under the face ``as_jax``. Flax declares three such primitives at import and uses them only with ``hijax=True``; binding
one here is an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blufunc import errors
from blufunc.as_jax.differentiation import Zero, instantiate_zeros
from blufunc.as_jax.primitives import is_undefined_primal
from blufunc.core.ir.avals import AbstractValue
from blufunc.core.programs.refs import AbstractRef
from blufunc.core.programs.refs import View as TransformedRef

__all__ = [
    "AbstractRef",
    "AbstractValue",
    "AvalMutableQDD",
    "AvalQDD",
    "HiPrimitive",
    "HiType",
    "MutableHiType",
    "TransformedRef",
    "Zero",
    "aval_method",
    "aval_property",
    "control_flow_allowed_effects",
    "instantiate_zeros",
    "is_undefined_primal",
    "register_hitype",
]


def _unsupported(what: str) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        f"{what}: blufunc has no types besides arrays (jax.experimental.hijax).",
        fix="leave out hijax=True: variables are then plain Python objects",
    )


class HiPrimitive:
    """A primitive on values of other types than arrays."""

    multiple_results = False

    def __init__(self, name: str):
        self.name = name

    def bind(self, *args: Any, **params: Any) -> Any:
        raise _unsupported(f"the primitive {self.name}")


class HiType:
    """A type besides those of arrays."""


class MutableHiType(HiType):
    """A type of objects with state."""


class AvalQDD(HiType):
    """A type, and a state of its values."""

    def __init__(self, *args: Any):
        raise _unsupported("AvalQDD")


AvalMutableQDD = AvalQDD


class _Effects:
    """The classes of effects that loops admit: here effects are strings."""

    def __init__(self) -> None:
        self.types: list[type] = []

    def add_type(self, cls: type) -> None:
        """Declare a class of effects."""
        self.types.append(cls)


control_flow_allowed_effects = _Effects()
_types: dict[type, Callable] = {}


def register_hitype(cls: type, typeof: Callable) -> None:
    """Declare the type of the objects of a class."""
    _types[cls] = typeof


class aval_method:
    """A method of tracers of a type."""

    def __init__(self, fun: Callable):
        self.fun = fun


class aval_property:
    """A property of tracers of a type."""

    def __init__(self, fget: Callable):
        self.fget = fget
