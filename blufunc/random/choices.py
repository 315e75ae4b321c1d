"""Discrete choices: indices, permutations, elements, and geometric waiting times.

A face, above ``random.continuous``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ops import cumulative, gather_scatter, reduce
from blufunc.core.ops import elementwise as ops
from blufunc.core.ops import shape as shape_ops
from blufunc.core.ops import sort as sort_ops
from blufunc.core.ops.windows import GatherDimensionNumbers
from blufunc.core.primitives import linear_ops
from blufunc.random.arguments import (
    Shape,
    axis_of,
    broadcast,
    check_broadcast,
    count_of,
    fresh_key,
    integer_dtype,
    mode_of,
    new_keys,
    real,
    shape_of,
)
from blufunc.random.continuous import GUMBEL_MODES, gumbel_
from blufunc.random.uniforms import bits_, randint_, unit

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array


def categorical(
    key: ArrayLike,
    logits: ArrayLike,
    axis: int = -1,
    shape: Shape | None = None,
    replace: bool = True,
    mode: str | None = None,
) -> Array:
    """Indices of probabilities ``softmax(logits, axis)``, by the Gumbel-max trick.

    Args:
      logits: a floating array.
      axis: the axis of the alternatives.
      shape: of the result: leading axes of any size, then the other axes of ``logits``, which it may broadcast.
        By default no leading axes.
      replace: whether an alternative may be drawn more than once. Without, the leading axes together hold distinct
        indices, the largest ones first, and the other axes are exactly those of ``logits``.
      mode: the noise, see ``gumbel``.
    Returns:
      int32 indices.
    Raises:
      ValueRangeError: more are to be drawn without replacement than there are alternatives.
    """
    name = "categorical"
    key, logits = fresh_key(name, key), lift(logits, "logits")
    if not dtypes.is_floating(logits.dtype):
        raise errors.DtypeError(
            f"categorical takes floating logits, not {logits.aval}.",
            where=source.here(),
            fix="the log of probabilities: log(p)",
        )
    axis, mode = axis_of(name, axis, logits.ndim), mode_of(name, mode, GUMBEL_MODES)
    rest = logits.shape[:axis] + logits.shape[axis + 1 :]
    shape = rest if shape is None else shape_of(name, shape)
    check_broadcast(name, "logits without its axis of alternatives", rest, shape)
    extra = len(shape) - len(rest)
    if not replace:
        return _distinct(key, logits, axis, shape, extra, mode)
    drawn = (*shape[: extra + axis], logits.shape[axis], *shape[extra + axis :])
    noise = gumbel_(key, drawn, logits.dtype, mode)
    found = reduce.argmax(ops.add(noise, linear_ops.broadcast_to(logits, drawn)), extra + axis)
    return ops.convert(found, dtypes.default(int))


def _distinct(key: Any, logits: Any, axis: int, shape: tuple[int, ...], extra: int, mode: str) -> Any:
    """Indices without replacement, by the Gumbel-top-k trick."""
    draws, n, last = math.prod(shape[:extra]), logits.shape[axis], logits.ndim - 1
    if draws > n:
        raise errors.ValueRangeError(
            f"categorical: {draws} of {n} alternatives cannot be drawn without replacement.",
            where=source.here(),
            fix="replace=True",
        )
    noisy = ops.add(logits, gumbel_(key, logits.shape, logits.dtype, mode))
    order = (*[d for d in range(logits.ndim) if d != axis], axis)
    rest = tuple([logits.shape[d] for d in order[:-1]])
    if shape[extra:] != rest:
        raise errors.ShapeError(
            f"categorical: without replacement the shape ends in {rest}, the axes of the logits; it is {shape}.",
            where=source.here(),
            fix="broadcast the logits first",
        )
    _, indices = sort_ops.top_k(linear_ops.transpose(noisy, order), draws)
    return linear_ops.reshape(linear_ops.transpose(indices, (last, *range(last))), shape)


def permutation(key: ArrayLike, x: ArrayLike, axis: int = 0, independent: bool = False) -> Array:
    """Permute ``x`` along an axis: sort by random 32-bit keys, repeatedly if long.

    Args:
      x: an array; or an int n, which stands for 0, 1, ..., n - 1.
      axis: the axis to permute.
      independent: permute every line along the axis independently.
    """
    key = fresh_key("permutation", key)
    if isinstance(x, (int, np.integer)):
        axis_of("permutation", axis, 1)
        return _permuted_range(key, count_of("permutation", x))
    x, axis = _array_and_axis("permutation", "permute", lift(x, "x"), axis)
    return _shuffle(key, x, axis) if independent else _permuted(key, x, axis)


def _array_and_axis(name: str, purpose: str, x: Any, axis: int) -> tuple[Any, int]:
    if not x.ndim:
        raise errors.ArgumentError(
            f"{name} takes an int or an array with an axis to {purpose}, not {x.aval}.",
            where=source.here(),
            fix=f"random.{name}(key, 10) takes 0, ..., 9",
        )
    return x, axis_of(name, axis, x.ndim)


def _permuted(key: Any, x: Any, axis: int) -> Any:
    if x.ndim == 1:
        return _shuffle(key, x, axis)
    return take(x, _permuted_range(key, x.shape[axis]), axis)


def _permuted_range(key: Any, n: int) -> Any:
    return _shuffle(key, shape_ops.iota(dtypes.default(int), (n,), 0), 0)


def _shuffle(key: Any, x: Any, axis: int) -> Any:
    # Two elements keep their order only if their sort keys agree in every round. With c rounds some pair of n does
    # so with a probability of about n**2 / 2**(32c + 1): the number of rounds keeps it below 1/n.
    rounds = math.ceil(3 * math.log(x.aval.size) / math.log(2**32 - 1)) if x.aval.size > 1 else 0
    for _ in range(rounds):
        key, subkey = new_keys(key)
        _, x = sort_ops.sort_key_val(bits_(subkey, 32, x.aval.shape), x, axis)
    return x


def choice(
    key: ArrayLike,
    a: ArrayLike,
    shape: Shape = (),
    replace: bool = True,
    p: Any = None,
    axis: int = 0,
    mode: str | None = None,
) -> Array:
    """Elements of ``a`` drawn at random along an axis.

    Args:
      a: an array; or an int n, which stands for 0, 1, ..., n - 1.
      shape: of the samples.
      replace: whether an element may be drawn more than once.
      p: the probabilities of the elements, of rank 1 and floating; equal by default. With ``replace=False`` at
        least as many must be positive as are drawn.
      axis: the axis of ``a`` to draw along.
      mode: the noise by which elements of given probabilities are drawn without replacement, see ``gumbel``.
    Returns:
      an array of the shape of ``a`` with ``shape`` instead of the axis.
    Raises:
      ValueRangeError: more elements are wanted than there are.
      ShapeError: ``p`` does not have one entry for each element.
      DtypeError: ``p`` is not floating.
    """
    key, shape, mode = (
        fresh_key("choice", key),
        shape_of("choice", shape),
        mode_of("choice", mode, GUMBEL_MODES),
    )
    draws = math.prod(shape)
    if isinstance(a, (int, np.integer)):
        array, n = None, count_of("choice", a)
    else:
        array, axis = _array_and_axis("choice", "draw along", lift(a, "a"), axis)
        n = array.shape[axis]
    if draws and not n:
        raise errors.ValueRangeError(
            "choice: there is nothing to draw from.", where=source.here(), fix="draw nothing: shape=(0,)"
        )
    if not replace and draws > n:
        raise errors.ValueRangeError(
            f"choice: {draws} of {n} elements cannot be drawn without replacement.",
            where=source.here(),
            fix="replace=True",
        )
    if p is not None:
        chosen = _weighted(key, _probabilities(p, n), n, shape, replace, mode)
    elif replace:
        chosen = ops.convert(randint_(key, shape, 0, n, dtypes.int32), dtypes.default(int))
    elif array is None:
        chosen = linear_ops.reshape(shape_ops.slice_in_dim(_permuted_range(key, n), 0, draws), shape)
    else:
        # the elements themselves are permuted, and the first of them taken
        drawn = shape_ops.slice_in_dim(_permuted(key, array, axis), 0, draws, axis=axis)
        return linear_ops.reshape(drawn, array.shape[:axis] + shape + array.shape[axis + 1 :])
    return chosen if array is None else take(array, chosen, axis)


def _probabilities(p: Any, n: int) -> Any:
    p = lift(p, "p")
    if not dtypes.is_floating(p.dtype):
        raise errors.DtypeError(
            f"choice takes floating probabilities p, not {p.aval}.", where=source.here(), fix="p / p.sum()"
        )
    if p.shape != (n,):
        raise errors.ShapeError(
            f"choice takes one probability for each of the {n} elements, not p of type {p.aval}.",
            where=source.here(),
            fix=f"give p the shape ({n},)",
        )
    return p


def _weighted(key: Any, p: Any, n: int, shape: tuple[int, ...], replace: bool, mode: str) -> Any:
    """Indices drawn with probabilities ``p``."""
    draws = math.prod(shape)
    if not draws:
        return linear_ops.full(shape, 0, dtypes.int32)
    if not replace:  # the largest of Gumbel noise plus log probabilities: without replacement, the k largest
        return linear_ops.reshape(
            sort_ops.top_k(ops.add(gumbel_(key, (n,), p.dtype, mode), ops.log(p)), draws)[1], shape
        )
    rising = cumulative.cumsum(p)
    total = linear_ops.reshape(shape_ops.slice_in_dim(rising, n - 1, n), ())
    return linear_ops.reshape(
        _count_below(rising, ops.mul(total, ops.sub(1, unit(key, (draws,), p.dtype)))), shape
    )


def _count_below(rising: Any, queries: Any) -> Any:
    """searchsorted by one stable sort: per query, the count of smaller elements."""
    m, n = queries.aval.size, rising.aval.size
    is_element = shape_ops.concatenate(
        (linear_ops.full((m,), 0, dtypes.int32), linear_ops.full((n,), 1, dtypes.int32)), 0
    )
    merged = (
        shape_ops.concatenate((queries, rising), 0),
        is_element,
        shape_ops.iota(dtypes.int32, (m + n,), 0),
    )
    _, is_element, came_from = sort_ops.sort(
        merged
    )  # stable: a query stands before the elements that equal it
    return shape_ops.slice_in_dim(sort_ops.place_along(cumulative.cumsum(is_element), came_from, 0), 0, m)


def take(x: Any, indices: Any, axis: int) -> Any:
    """The elements of ``x`` at ``indices``, which are in range, along an axis."""
    after = indices.aval.ndim
    offsets = (*range(axis), *range(axis + after, axis + after + x.aval.ndim - axis - 1))
    sizes = (*x.aval.shape[:axis], 1, *x.aval.shape[axis + 1 :])
    numbers = GatherDimensionNumbers(offsets, (axis,), (axis,))
    starts = linear_ops.reshape(indices, (*indices.aval.shape, 1))
    return gather_scatter.gather(x, starts, numbers, sizes, mode="promise_in_bounds")


def geometric(key: ArrayLike, p: ArrayLike, shape: Shape | None = None, dtype: DTypeLike = int) -> Array:
    """Geometric samples 1, 2, ...: trials of probability ``p`` until a success.

    Args:
      p: probabilities that broadcast to ``shape``; samples are drawn in their dtype.
    """
    name = "geometric"
    key, dtype, p = fresh_key(name, key), integer_dtype(name, dtype), real(name, "p", p)
    p = p if dtypes.is_floating(p.dtype) else ops.convert(p, dtypes.float32)
    shape = p.shape if shape is None else shape_of(name, shape)
    p = broadcast(name, "p", p, shape)
    u = unit(key, shape, p.dtype)
    u = ops.select(u == 0, scalar(1, p.dtype), u)
    return ops.convert(ops.floor(ops.log(u) / ops.log1p(-p)) + 1, dtype)
