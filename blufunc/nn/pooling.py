"""Pooling: reductions of sliding windows over the spatial axes of an array.

A face. Arrays have any number of batch axes, then as many spatial axes as the window, then features, as in
flax.linen: ``(..., *spatial, features)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import ints
from blufunc.core.ops.reduce import limit
from blufunc.core.ops.sliding import read_pads
from blufunc.nn.activations import as_inexact

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

Padding = str | Sequence[tuple[int, int]]


def pool(
    inputs: ArrayLike,
    init: Any,
    reduce_fn: Callable,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> Array:
    """Each window of the spatial axes reduced by a function.

    Args:
      inputs: ``(..., *spatial, features)``, with as many spatial axes as ``window_shape`` has entries.
      init: the identity of ``reduce_fn``, a scalar; padding holds it.
      reduce_fn: an associative function of two scalars, as ``lax.add`` or ``lax.max``.
      window_shape: the size of the windows.
      strides: distance between window starts per spatial axis; 1 by default.
      padding: 'VALID', 'SAME', 'SAME_LOWER' or a pair of ints for each spatial axis.
    Returns:
      ``(..., *windows, features)``, of the dtype of ``inputs``.
    Raises:
      ShapeError: ``inputs`` has too few axes, or strides or padding are not one for each spatial axis.
    """
    return _pool("pool", bnp.asarray(inputs), init, reduce_fn, window_shape, strides, padding)


def _pool(
    name: str, x: Any, init: Any, reduce_fn: Callable, window_shape: Any, strides: Any, padding: Any
) -> Any:
    window = ints(window_shape, name, "window_shape")
    n, lead = len(window), x.ndim - len(window) - 1
    steps = (1,) * n if strides is None else ints(strides, name, "strides")
    pads = padding if isinstance(padding, str) else read_pads(padding, name)
    if lead < 0 or len(steps) != n or not (isinstance(pads, str) or len(pads) == n):
        raise errors.ShapeError(
            f"{name} by windows of {window}: an input of shape {tuple(x.shape)}, strides {steps} and padding "
            f"{padding!r:.60} do not fit.",
            where=source.here(),
            why="the last axes of the input are the spatial ones, as many as the window has, and the features.",
            fix="give one stride and one pair of padding for each axis of the window",
        )
    if not isinstance(pads, str):
        pads = ((0, 0),) * lead + pads + ((0, 0),)
    ones = (1,) * lead
    return lax.reduce_window(x, init, reduce_fn, (*ones, *window, 1), (*ones, *steps, 1), pads)


def avg_pool(
    inputs: ArrayLike,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> Array:
    """The mean of each window.

    Args:
      inputs, window_shape, strides, padding: as in ``pool``; integers become float32.
      count_include_pad: whether padding counts, as zeros, in the mean.
    """
    x = as_inexact(inputs)
    total = _pool("avg_pool", x, 0, lax.add, window_shape, strides, padding)
    if count_include_pad:
        return total / math.prod(ints(window_shape, "avg_pool", "window_shape"))
    # the number of elements per window depends on the spatial axes only
    n = len(ints(window_shape, "avg_pool", "window_shape"))
    ones = bnp.ones((*x.shape[x.ndim - 1 - n : -1], 1), x.dtype)
    return total / _pool("avg_pool", ones, 0, lax.add, window_shape, strides, padding)


def max_pool(
    inputs: ArrayLike,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> Array:
    """Max pooling; the first of ties gets the derivative. Arguments as in ``pool``."""
    x = bnp.asarray(inputs)
    return _pool("max_pool", x, _end(x, "max_pool", False), lax.max, window_shape, strides, padding)


def min_pool(
    inputs: ArrayLike,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> Array:
    """Min pooling; the first of ties gets the derivative. Arguments as in ``pool``."""
    x = bnp.asarray(inputs)
    return _pool("min_pool", x, _end(x, "min_pool", True), lax.min, window_shape, strides, padding)


def _end(x: Any, name: str, largest: bool) -> Any:
    """The largest or smallest value of the dtype of ``x``."""
    if not (dtypes.is_floating(x.dtype) or dtypes.is_integer(x.dtype) or dtypes.is_bool(x.dtype)):
        raise errors.DtypeError(
            f"{name} takes real numbers, not {x.aval}.",
            where=source.here(),
            fix="pool the real and imaginary parts",
        )
    return limit(x.dtype, largest).item()
