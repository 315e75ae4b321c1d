"""Attributes of functions that are ``ufunc``s in JAX: methods, operand counts.

Face. ``install`` runs when ``blufunc`` is imported; a method imports ``ufuncs`` when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blufunc import _lazy
from blufunc.numpy import elementwise as ew
from blufunc.numpy.promotion import named

with _lazy.modules(globals()):
    from blufunc.numpy import ufuncs


def _deferred(function: Callable, name: str) -> Callable:
    def method(*args: Any, **kwargs: Any) -> Any:
        return getattr(ufuncs.of(function), name)(*args, **kwargs)

    return named(method, f"{function.__name__}.{name}", f"``ufunc.{name}`` of ``{function.__name__}``.")


def _as_ufunc(function: Any, identity: Any, nin: int) -> None:
    function.nin, function.nout, function.nargs, function.identity = nin, 1, nin, identity
    for name in ("reduce", "accumulate", "at", "reduceat", "outer"):
        setattr(function, name, _deferred(function, name))


def install() -> None:
    """Give the functions their attributes."""
    for function, identity in ew.IDENTITIES.items():
        _as_ufunc(function, identity, 2)
    _as_ufunc(ew.negative, None, 1)
