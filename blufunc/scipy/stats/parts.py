"""Shared by the distributions of ``scipy.stats``: decorators, and logarithms.

In: arguments of users. Out: floating values of one dtype, whose shapes agree or are ().
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.nn.activations import log1mexp as log1mexp
from blufunc.numpy.promotion import match_shapes, promote_dtypes

if TYPE_CHECKING:
    from blufunc.core.ir.trace import Array

P = ParamSpec("P")


def promoted(f: Callable[P, Any]) -> Callable[P, Array]:
    """Decorator: promote the arguments to one real floating dtype, and broadcast them.

    The function raises:
      DtypeError: an argument is complex.
      ShapeError: the arguments do not broadcast together.
    """
    name = f"{f.__module__.rpartition('.')[2]}.{f.__name__}"
    signature = inspect.signature(f)
    defaults = [p.default for p in signature.parameters.values()]

    @functools.wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        given: Any = (*args, *defaults[len(args) :])
        if kwargs or len(args) > len(defaults) or any(x is inspect.Parameter.empty for x in given):
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as e:
                raise TypeError(f"{name}: {e}") from None
            bound.apply_defaults()
            given = bound.args
        values = match_shapes(name, *promote_dtypes(name, *given, inexact=True))
        if dtypes.is_complex(values[0].aval.dtype):
            raise errors.DtypeError(
                f"{name} takes real numbers.", where=source.here(), fix="pass the real part: x.real"
            )
        return f(*values)  # type: ignore[arg-type, call-arg]

    return call


_EXPONENTIALS = {
    "pdf": "The density at ``{}``; parameters as of ``logpdf``.",
    "pmf": "The probability of ``{}``; parameters as of ``logpmf``.",
    "cdf": "The probability of a number of at most ``{}``.",
    "sf": "The probability of a number above ``{}``.",
}


def exp_of(log_f: Callable[P, Any]) -> Callable[P, Array]:
    """``pdf`` from ``logpdf``, and so on, with the same signature."""
    name = log_f.__name__.removeprefix("log")
    first = next(iter(inspect.signature(log_f).parameters))
    return _renamed(log_f, bnp.exp, name, _EXPONENTIALS[name].format(first))


def log_of(f: Callable[P, Any]) -> Callable[P, Array]:
    """``logcdf`` from ``cdf``, and so on; its derivative where ``f`` is 0 is 0."""

    def log(p):
        zero = p == 0
        return bnp.where(zero, -math.inf, bnp.log(bnp.where(zero, 1, p)))

    return _renamed(f, log, f"log{f.__name__}", f"The logarithm of ``{f.__name__}``.")


def _renamed(f: Callable[P, Any], then: Callable, name: str, doc: str) -> Callable[P, Array]:
    @functools.wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return then(f(*args, **kwargs))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    return call


def log_difference(log_x: Any, log_y: Any) -> Array:
    """``log(x - y)`` from logarithms of x and y; ``y`` is the smaller one."""
    equal = log_x == log_y  # also two of minus infinity, whose difference is not a number
    distance = bnp.where(equal, 1, log_x - log_y)
    return bnp.where(equal, -math.inf, log_x + log1mexp(distance))
