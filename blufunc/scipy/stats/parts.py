"""Shared by the distributions of ``scipy.stats``: arguments, and logarithms of differences.

A face, below the other modules of this package. In come what users write; out come floating values of one dtype, whose
shapes agree or are ().
"""

from __future__ import annotations

import math
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.nn.activations import log1mexp as log1mexp
from blufunc.numpy.promotion import match_shapes, promote_dtypes


def arguments(name: str, *xs: Any) -> list[Any]:
    """The arguments of ``scipy.stats.<name>``, promoted and broadcast.

    Raises:
      DtypeError: one of them is complex.
      ShapeError: they do not broadcast together.
    """
    values = match_shapes(name, *promote_dtypes(name, *xs, inexact=True))
    if dtypes.is_complex(values[0].aval.dtype):
        raise errors.DtypeError(
            f"{name} takes real numbers.", where=source.here(), fix="pass the real part: x.real"
        )
    return values


def log_difference(log_x: Any, log_y: Any) -> Any:
    """``log(x - y)`` from logarithms of x and y; ``y`` is the smaller one."""
    equal = log_x == log_y  # also two of minus infinity, whose difference is not a number
    distance = bnp.where(equal, 1, log_x - log_y)
    return bnp.where(equal, -math.inf, log_x + log1mexp(distance))


def log_of(p: Any) -> Any:
    """``log(p)`` of a probability: where it is 0, minus infinity, of derivative 0."""
    none = p == 0
    return bnp.where(none, -math.inf, bnp.log(bnp.where(none, 1, p)))
