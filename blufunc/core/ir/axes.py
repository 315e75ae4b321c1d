"""Validation of user-given axes, sizes and shapes: ints and tuples of int.

Core. Every function that takes an axis, a shape or sizes reads them here, so that error messages agree.
``name`` is the function and ``what`` the argument, for messages.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import source


def static_int(x: Any, name: str, what: str) -> int:
    """A Python integer passed as an option of a function."""
    if x.__class__ is int:
        return x
    try:
        return int(operator.index(x))
    except errors.ConcretizationError:  # a traced value: its own error explains
        raise
    except TypeError:
        raise errors.ArgumentError(
            f"{name}: {what} is an int, not {x!r:.60}.", where=source.here(), fix="pass a Python int"
        ) from None


def static_number(x: Any, name: str, what: str) -> int | float:
    """A real Python or NumPy scalar passed as an option of a function."""
    if isinstance(x, (int, float)):
        return x
    if isinstance(x, (np.integer, np.floating)):
        return x.item()
    raise errors.ArgumentError(
        f"{name}: {what} is a number, not {x!r:.60}.", where=source.here(), fix="pass a Python number"
    )


def only_none(name: str, what: str, given: Any, why: str = "") -> None:
    """Reject an argument that exists only for compatibility with NumPy's signatures."""
    if given is not None and given is not False:
        raise errors.UnsupportedError(
            f"{name} does not support {what}=, here {given!r:.60}.",
            where=source.here(),
            why=why or ("arrays are immutable: results are returned." if what == "out" else ""),
            fix=f"leave {what} out",
        )


def ints(xs: Any, name: str, what: str) -> tuple[int, ...]:
    """A tuple of Python integers from any sequence."""
    if xs.__class__ is not tuple:
        xs = sequence(xs, name, what)
    for x in xs:
        if x.__class__ is not int:
            return tuple([static_int(x, name, f"each of {what}") for x in xs])
    return xs


def axis_in(axis: Any, ndim: int, name: str) -> int:
    """An axis normalized to 0 .. ``ndim - 1``; negative ones count from the end."""
    a = static_int(axis, name, "axis")
    if not -ndim <= a < ndim:
        raise errors.AxisRangeError(
            f"{name}: axis {a} is out of range for an array of rank {ndim}.",
            where=source.here(),
            fix=f"use an axis from {-ndim} to {ndim - 1}"
            if ndim
            else "the array has no axes: reshape it first",
        )
    return a % ndim


def is_several(axis: Any) -> bool:
    """True for a tuple, list, range or other iterable of axes or sizes; False for one."""
    if isinstance(axis, (tuple, list, range)):
        return True
    return (
        isinstance(axis, Iterable)
        and not isinstance(axis, (str, bytes, dict))
        and (not hasattr(axis, "__index__") or getattr(axis, "ndim", 0) == 1)
    )


def axes_in(axis: Any, ndim: int, name: str) -> tuple[int, ...]:
    """``axis`` (None for all, an int, or several) as a sorted tuple of axes."""
    if axis is None:
        return tuple(range(ndim))
    if is_several(axis):
        axis = tuple(axis)
        axes = [axis_in(a, ndim, name) for a in axis]
        if len(set(axes)) != len(axes):
            raise errors.ValueRangeError(
                f"{name}: axis {axis} names an axis twice.",
                where=source.here(),
                fix="name each axis once",
            )
        return tuple(sorted(axes))
    return (axis_in(axis, ndim, name),)


def shape_of(shape: Any, name: str, open: bool = False) -> tuple[int, ...]:
    """A shape from an int or a sequence of int; ``open`` allows a size of -1."""
    if isinstance(shape, (tuple, list)):
        sizes = tuple([static_int(n, name, "a size") for n in shape])
    elif getattr(shape, "ndim", 0) == 1:  # an array of sizes, which has __index__, too
        sizes = ints(shape, name, "a shape")
    elif hasattr(shape, "__index__"):
        sizes = (static_int(shape, name, "a shape"),)
    elif is_several(shape):
        sizes = ints(shape, name, "a shape")
    else:
        raise errors.ArgumentError(
            f"{name}: a shape is an int or a tuple of ints, not {shape!r:.60}.",
            where=source.here(),
            fix="give a tuple, such as (3,)",
        )
    if not open and any(n < 0 for n in sizes):
        raise errors.ValueRangeError(
            f"{name}: the shape {sizes} has a negative size.",
            where=source.here(),
            fix="give sizes of 0 or more",
        )
    return sizes


def sequence(xs: Any, name: str, what: str, of: str = "ints") -> tuple:
    """The elements of any iterable but a string or a dict."""
    try:
        if not isinstance(xs, (str, bytes, dict)):
            return tuple(xs)
    except errors.ConcretizationError:
        raise
    except TypeError:
        pass
    raise errors.ArgumentError(
        f"{name}: {what} is a sequence of {of}, not {xs!r:.60}.",
        where=source.here(),
        fix="pass a tuple or a list",
    )
