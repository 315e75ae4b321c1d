"""Reductions that pass over NaN: nansum, nanmean, nanmax and their kin.

Face over ``reductions``: NaN are masked, as ``where`` masks. In come arrays of any dtype; those without NaN go
straight to the function that the name is made from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.axes import only_none
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.numpy import elementwise as ew
from blufunc.numpy import reductions as red
from blufunc.numpy.promotion import constant, named, value_of

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.signatures import Extremum, Position, Running, Total


def _valid(x: Any, where: Any, name: str) -> tuple[Array, Any]:
    """x and its mask of elements that count: not NaN and in ``where``; None for all."""
    x = value_of(x, name)
    if not dtypes.is_inexact(x.aval.dtype):
        return x, where
    mask = ew.logical_not(ew.isnan(x))
    return x, mask if where is None else ew.logical_and(mask, where)


def _total(function: Callable, name: str, doc: str) -> Total:
    def wrapper(
        a: Any,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        keepdims: bool = False,
        initial: Any = None,
        where: Any = None,
    ) -> Array:
        only_none(name, "out", out)
        x, mask = _valid(a, where, name)
        return function(x, axis, dtype, keepdims=keepdims, initial=initial, where=mask)

    return named(wrapper, name, doc)


nansum = _total(red.sum, "nansum", "``sum`` over the elements that are not NaN.")
nanprod = _total(red.prod, "nanprod", "``prod`` over the elements that are not NaN.")


def nanmean(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> Array:
    """``mean`` over the elements that are not NaN; NaN where there are none."""
    only_none("nanmean", "out", out)
    x, mask = _valid(a, where, "nanmean")
    return red.mean(x, axis, dtype, keepdims=keepdims, where=mask)


def nanvar(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    ddof: float = 0,
    keepdims: bool = False,
    where: ArrayLike | None = None,
    mean: ArrayLike | None = None,
) -> Array:
    """``var`` over the elements that are not NaN."""
    only_none("nanvar", "out", out)
    x, mask = _valid(a, where, "nanvar")
    if mask is not None:  # NaN that does not count would reach the gradient through the square
        x = ew.choose(mask, x, constant(0, x.aval.dtype))
    return red.var(x, axis, dtype, ddof=ddof, keepdims=keepdims, where=mask, mean=mean)


def nanstd(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    ddof: float = 0,
    keepdims: bool = False,
    where: ArrayLike | None = None,
    mean: ArrayLike | None = None,
) -> Array:
    """``std`` over the elements that are not NaN."""
    only_none("nanstd", "out", out)
    variance = nanvar(a, axis, dtype, ddof=ddof, keepdims=keepdims, where=where, mean=mean)
    return ops.sqrt_p.bind(variance)


def _extremum(function: Callable, name: str, lowest: bool) -> Extremum:
    def wrapper(
        a: Any,
        axis: Any = None,
        out: Any = None,
        keepdims: bool = False,
        initial: Any = None,
        where: Any = None,
    ) -> Array:
        only_none(name, "out", out)
        x, mask = _valid(a, where, name)
        if mask is None or not dtypes.is_inexact(x.aval.dtype):
            return function(x, axis, keepdims=keepdims, initial=initial, where=mask)
        dtype = x.aval.dtype
        limit = constant(red.extreme_of(dtype, not lowest), dtype)
        # filled, and not masked with an initial value: nothing shares the derivative of an infinite extremum
        result = function(ops.select(mask, x, limit), axis, keepdims=keepdims, initial=initial)
        if initial is not None:
            return result
        return ops.select(red.any(mask, axis, keepdims=keepdims), result, constant(math.nan, dtype))

    return named(
        wrapper, name, f"``{name[3:]}`` over the elements that are not NaN; NaN where there are none."
    )


nanmax = _extremum(red.max, "nanmax", True)
nanmin = _extremum(red.min, "nanmin", False)


def _position(function: Callable, name: str, worst: float) -> Position:
    def wrapper(a: Any, axis: int | None = None, out: Any = None, keepdims: bool = False) -> Array:
        only_none(name, "out", out)
        x, mask = _valid(a, None, name)
        if mask is None:
            return function(x, axis, keepdims=keepdims)
        at = function(ops.select(mask, x, constant(worst, x.aval.dtype)), axis, keepdims=keepdims)
        some = red.any(mask, axis, keepdims=keepdims)
        return ops.select(some, at, constant(-1, at.aval.dtype))

    return named(
        wrapper,
        name,
        f"``{name[3:]}`` over the elements that are not NaN, as int32; -1 where there are none.",
    )


nanargmax = _position(red.argmax, "nanargmax", -math.inf)
nanargmin = _position(red.argmin, "nanargmin", math.inf)


def _running(function: Callable, name: str, neutral: int) -> Running:
    def wrapper(a: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Array:
        only_none(name, "out", out)
        x, mask = _valid(a, None, name)
        kept = x if mask is None else ops.select(mask, x, constant(neutral, x.aval.dtype))
        return function(kept, axis, dtype)

    return named(wrapper, name, f"``{name[3:]}`` with NaN counted as {neutral}.")


nancumsum = _running(red.cumsum, "nancumsum", 0)
nancumprod = _running(red.cumprod, "nancumprod", 1)
