"""Checking and conversion of sampler arguments: keys, shapes, dtypes, parameters.

A face, the first file of ``random``. In come what users write; out go one key, a tuple of ints, a dtype, and values of
the dtype of the samples that are of rank 0 or of their shape. ``name`` is the sampler and ``what`` the argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import axes, dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import random_bits as rb
from blufunc.core.ops import shape as shape_ops
from blufunc.core.primitives import linear_ops
from blufunc.numpy.promotion import fits
from blufunc.random.reuse import consume

Shape = int | Sequence[int]


# -- keys ------------------------------------------------------------------------------------------


def is_words(keys: Any) -> bool:
    """True for keys in JAX's older form: uint32 words, a last axis of 2."""
    is_array = isinstance(keys, (Array, np.ndarray))
    return is_array and keys.dtype == dtypes.uint32 and keys.ndim > 0 and keys.shape[-1] == 2


def any_keys(name: str, keys: Any) -> Any:
    """Keys of any shape."""
    if is_words(keys):
        return rb.random_wrap_p.bind(lift(keys))
    if isinstance(keys, Array):
        if dtypes.is_key(keys.dtype):
            return keys
        text = f"an array {keys.aval}"
    elif isinstance(keys, (np.ndarray, np.void)) and dtypes.is_key(keys.dtype):
        return lift(keys)
    else:
        text = f"{keys!r:.60}" if isinstance(keys, (int, float, str)) else f"a {type(keys).__name__}"
    raise errors.ArgumentError(
        f"random.{name} takes a key, not {text}.",
        where=source.here(),
        fix="make one from a seed: random.key(seed), or from raw words: random.wrap_key_data(words)",
    )


def one_key(name: str, key: Any) -> Any:
    """One key, from which others are derived."""
    key = any_keys(name, key)
    if key.aval.ndim:
        raise errors.ShapeError(
            f"random.{name} takes one key, not {key.aval}.",
            where=source.here(),
            fix=f"for one result per key: vmap(lambda k: random.{name}(k, ...))(keys)",
        )
    return key


def fresh_key(name: str, key: Any) -> Any:
    """One key, consumed by this call; ``config.debug_key_reuse`` refuses reuse."""
    key = one_key(name, key)
    if config.debug_key_reuse:
        consume(name, key)
    return key


def new_keys(key: Any, num: int = 2) -> tuple[Any, ...]:
    """``num`` new keys from one."""
    keys = rb.random_split_p.bind(key, shape=(num,))
    return tuple([linear_ops.reshape(shape_ops.slice_in_dim(keys, i, i + 1), ()) for i in range(num)])


# -- options ---------------------------------------------------------------------------------------


def shape_of(name: str, shape: Shape) -> tuple[int, ...]:
    """A shape, from an int or a sequence of them."""
    return axes.shape_of(shape, f"random.{name}")


def axis_of(name: str, axis: int, ndim: int) -> int:
    """An axis from 0 to ``ndim - 1``."""
    axis = axes.static_int(axis, f"random.{name}", "axis")
    if not -ndim <= axis < ndim:
        raise errors.AxisRangeError(
            f"random.{name}: axis {axis} is out of range for an array of {ndim} axes.",
            where=source.here(),
            fix=f"use an axis from {-ndim} to {ndim - 1}",
        )
    return axis % ndim


def count_of(name: str, n: Any) -> int:
    """A number of elements."""
    if n < 0:
        raise errors.ValueRangeError(
            f"random.{name}: {n} elements.", where=source.here(), fix="ask for 0 or more"
        )
    return int(n)


def mode_of(name: str, mode: Any, known: Sequence[str]) -> str:
    """One of a few names; the last of them for None."""
    if mode is None:
        return known[-1]
    if not isinstance(mode, str) or mode not in known:
        raise errors.ValueRangeError(
            f"random.{name}: {mode!r:.60} is not one of {', '.join(known)}.",
            where=source.here(),
            fix=f"mode={known[0]!r}",
        )
    return mode


def float_dtype(name: str, dtype: Any) -> np.dtype:
    """A real floating dtype; float32 for None."""
    dtype = dtypes.default(float) if dtype is None else dtypes.as_dtype(dtype)
    if not dtypes.is_floating(dtype):
        raise errors.DtypeError(
            f"random.{name} gives floating numbers, not {dtypes.short_name(dtype)}.",
            where=source.here(),
            fix="random.randint or random.bits give integers"
            if dtypes.is_integer(dtype)
            else "dtype='float32'",
        )
    return dtype


def integer_dtype(name: str, dtype: Any) -> np.dtype:
    """An integer dtype; int32 for None."""
    dtype = dtypes.default(int) if dtype is None else dtypes.as_dtype(dtype)
    if not dtypes.is_integer(dtype):
        raise errors.DtypeError(
            f"random.{name} gives integers, not {dtypes.short_name(dtype)}.",
            where=source.here(),
            fix="dtype='int32', and convert the result",
        )
    return dtype


# -- parameters ------------------------------------------------------------------------------------


def real(name: str, what: str, x: Any) -> Any:
    """A real parameter in its own shape and dtype."""
    x = lift(x, what)
    if not (dtypes.is_floating(x.dtype) or dtypes.is_integer(x.dtype)):
        raise errors.DtypeError(
            f"random.{name} takes a real {what}, not {x.aval}.",
            where=source.here(),
            fix=f"pass {what} as a number or an array of them",
        )
    return x


def parameter(name: str, what: str, x: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """A real parameter in the samples' dtype, of rank 0 or of their shape."""
    if isinstance(x, (int, float)):
        return scalar(x, dtype)
    return ops.convert(broadcast(name, what, real(name, what, x), shape), dtype)


def parameters(
    name: str, shape: Shape | None, dtype: np.dtype, **params: Any
) -> tuple[tuple[int, ...], list[Any]]:
    """The samples' shape (default: that of the parameters), and the parameters in it."""
    shapes = {
        what: () if isinstance(x, (int, float)) else real(name, what, x).shape for what, x in params.items()
    }
    sizes = common_shape(name, shapes) if shape is None else shape_of(name, shape)
    return sizes, [
        linear_ops.broadcast_to(parameter(name, what, x, sizes, dtype), sizes) for what, x in params.items()
    ]


def broadcast(name: str, what: str, x: Any, shape: tuple[int, ...]) -> Any:
    """``x`` in ``shape``; rank 0 may stay."""
    check_broadcast(name, what, x.aval.shape, shape)
    return linear_ops.broadcast_to(x, shape) if x.aval.ndim else x


def check_broadcast(name: str, what: str, own: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise ShapeError unless the shape ``own`` broadcasts to ``shape``."""
    if not fits(own, shape):
        raise errors.ShapeError(
            f"random.{name}: {what} of shape {own} does not broadcast to shape={shape}.",
            where=source.here(),
            fix="shape=None takes the shape of the parameters"
            if name != "uniform"
            else f"give {what} the shape {shape}, or () for one number",
        )


def common_shape(name: str, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that parameters of these shapes, by their names, broadcast to."""
    try:
        return np.broadcast_shapes(*shapes.values())
    except ValueError:
        listed = " and ".join(f"{s} ({what})" for what, s in shapes.items())
        raise errors.ShapeError(
            f"random.{name}: parameters of shapes {listed} do not broadcast together.",
            where=source.here(),
            fix="insert an axis where one is missing (x[:, None])",
        ) from None
