"""Families of elementwise functions: how they promote, and how they are named.

Face, below ``elementwise``. In: a primitive, and the public name and docstring of a function. Out: the function.
Operands of one type, the usual case, go straight to the primitive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.trace import Value
from blufunc.core.ops import elementwise as ops
from blufunc.core.primitives.primitive import Primitive
from blufunc.numpy.promotion import inexact, match_shapes, meet


def named(function: Callable, name: str, doc: str) -> Callable:
    """The function under its public name."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    function.__module__ = "blufunc.numpy"
    return function


def unary_inexact(prim: Primitive, name: str, doc: str) -> Callable:
    """A function of real or complex numbers: integers become float32."""

    def function(x: Any, /) -> Value:
        if isinstance(x, Value) and dtypes.is_inexact(x.aval.dtype):
            return prim.bind(x)
        return prim.bind(inexact(x, name))

    return named(function, name, f"{doc} Elementwise; integers and booleans are computed in float32.")


def binary(prim: Primitive, name: str, doc: str, on_bool: Primitive | None = None) -> Callable:
    """A function of two operands; ``on_bool`` is what it means for booleans, where not an error."""
    bind = prim.bind

    def function(x: Any, y: Any, /) -> Value:
        if not (isinstance(x, Value) and isinstance(y, Value) and x.aval is y.aval):
            x, y = meet(x, y, name)
        if on_bool is not None and x.aval.dtype is dtypes.bool_:
            return on_bool.bind(x, y)
        return bind(x, y)

    return named(function, name, f"{doc} Elementwise, with promotion and broadcasting.")


def ordering(prim: Primitive, strict: Primitive, name: str, doc: str) -> Callable:
    """A comparison by order; complex numbers compare by their real, then their imaginary part."""
    bind = prim.bind

    def function(x: Any, y: Any, /) -> Value:
        if not (isinstance(x, Value) and isinstance(y, Value) and x.aval is y.aval):
            x, y = meet(x, y, name)
        if x.aval.dtype.kind != "c":
            return bind(x, y)
        (a, b), (c, d) = [(ops.real(v), ops.imag(v)) for v in (x, y)]
        return ops.or_p.bind(strict.bind(a, c), ops.and_p.bind(ops.eq_p.bind(a, c), bind(b, d)))

    return named(function, name, f"{doc} Elementwise, with promotion and broadcasting.")


def extremum(prim: Primitive, stays: Callable, name: str, doc: str) -> Callable:
    """Select one of two operands by ``stays(x, y)``; complex numbers by the order of ``ordering``."""
    bind = prim.bind

    def function(x: Any, y: Any, /) -> Value:
        if not (isinstance(x, Value) and isinstance(y, Value) and x.aval is y.aval):
            x, y = meet(x, y, name)
        if x.aval.dtype.kind != "c":
            return bind(x, y)
        x, y = match_shapes(name, x, y)
        return ops.select(ops.or_p.bind(stays(x, y), ops.ne_p.bind(x, x)), x, y)

    return named(function, name, f"{doc} Elementwise, with promotion and broadcasting.")


def binary_inexact(prim: Primitive, name: str, doc: str) -> Callable:
    """A function of two real numbers: integers become float32."""

    def function(x: Any, y: Any, /) -> Value:
        x, y = meet(x, y, name, inexact=True)
        return prim.bind(x, y)

    return named(function, name, f"{doc} Elementwise, with promotion (to floats) and broadcasting.")
