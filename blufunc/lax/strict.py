"""Functions of ``lax`` that normalize user arguments before binding a primitive.

Face: part of ``blufunc.lax``. Each checks its arguments and makes about one equation.
"""

from __future__ import annotations

import builtins
import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import ConcreteArray, from_numpy, is_number, lift, number, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import ints, shape_of, static_int
from blufunc.core.ir.trace import EVAL, Array, state
from blufunc.core.ops import elementwise
from blufunc.core.ops import shape as shapes
from blufunc.core.ops.dot import dot_general
from blufunc.core.ops.elementwise import eq, select
from blufunc.core.primitives import linear_ops
from blufunc.core.primitives.linear_ops import broadcast_in_dim_p
from blufunc.core.pytree import tree

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike

T = TypeVar("T")

complex, slice = elementwise.complex_, shapes.slice_  # under their names in ``lax``

# -- conversion ------------------------------------------------------------------------------------


def convert_element_type(operand: ArrayLike, new_dtype: DTypeLike) -> Array:
    """Convert to another dtype: floats truncate, complex loses its imaginary part."""
    return elementwise.convert(operand, dtypes.as_dtype(new_dtype))


def bitcast_convert_type(operand: ArrayLike, new_dtype: DTypeLike) -> Array:
    """The bits as another dtype: narrower adds a last axis of parts, wider drops it."""
    return elementwise.bitcast(operand, dtypes.as_dtype(new_dtype))


class RoundingMethod(enum.IntEnum):
    """Rounding direction of ties between two integers."""

    AWAY_FROM_ZERO = 0
    TO_NEAREST_EVEN = 1


def round(x: ArrayLike, rounding_method: RoundingMethod = RoundingMethod.AWAY_FROM_ZERO) -> Array:
    """Floats rounded to the nearest integer; ``rounding_method`` decides ties."""
    if rounding_method not in (RoundingMethod.AWAY_FROM_ZERO, RoundingMethod.TO_NEAREST_EVEN):
        raise errors.ValueRangeError(
            f"round: {rounding_method!r:.60} is not a rounding method.",
            where=source.here(),
            fix="lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)",
        )
    even = elementwise.round(x)
    if rounding_method == RoundingMethod.TO_NEAREST_EVEN:
        return even
    # where ties-to-even rounded half a unit towards 0, add one; the difference is exact
    x = lift(x)
    rest = elementwise.sub(x, even)
    inward = elementwise.ge(elementwise.mul(rest, elementwise.sign(x)), 0.5)
    return select(inward, elementwise.add(even, elementwise.sign(x)), even)


def stop_gradient(x: T) -> T:
    """x, a pytree, as a constant to every derivative."""
    return tree.map(elementwise.stop_gradient, x)


def select_n(which: ArrayLike, *cases: ArrayLike) -> Array:
    """Elementwise ``cases[which]``; ``which`` is boolean (two cases) or int32."""
    which = lift(which)
    if dtypes.is_bool(which.aval.dtype):
        if len(cases) != 2:
            raise errors.ArgumentError(
                f"select_n by a boolean takes 2 cases, not {len(cases)}.",
                where=source.here(),
                fix="convert which to int32",
            )
        return select(which, cases[1], cases[0])
    if not cases:
        raise errors.ArgumentError("select_n needs a case.", where=source.here())
    result = lift(cases[-1])
    for i in range(len(cases) - 2, -1, -1):
        result = select(eq(which, i), cases[i], result)
    return result


# -- shapes ----------------------------------------------------------------------------------------


def broadcast_in_dim(operand: ArrayLike, shape: Sequence[int], broadcast_dimensions: Sequence[int]) -> Array:
    """``operand`` with axis i as ``broadcast_dimensions[i]``, repeated along others."""
    x = lift(operand)
    shape = shape_of(ints(shape, "broadcast_in_dim", "shape"), "broadcast_in_dim")
    dims = ints(broadcast_dimensions, "broadcast_in_dim", "broadcast_dimensions")
    if len(dims) == x.aval.ndim and list(dims) != sorted(dims):
        order = sorted(range(len(dims)), key=lambda i: dims[i])
        x, dims = linear_ops.transpose(x, tuple(order)), tuple(sorted(dims))
    return linear_ops.broadcast_in_dim(x, shape, dims)


def broadcast(operand: ArrayLike, sizes: Sequence[int]) -> Array:
    """The operand repeated along new leading axes of the given sizes."""
    x, sizes = lift(operand), shape_of(ints(sizes, "broadcast", "sizes"), "broadcast")
    n = len(sizes)
    return linear_ops.broadcast_in_dim(x, (*sizes, *x.aval.shape), tuple(range(n, n + x.aval.ndim)))


def reshape(operand: ArrayLike, new_sizes: Sequence[int], dimensions: Sequence[int] | None = None) -> Array:
    """The elements in row-major order (of axes ``dimensions``) with another shape."""
    x = lift(operand)
    if dimensions is not None:
        x = linear_ops.transpose(x, ints(dimensions, "reshape", "dimensions"))
    return linear_ops.reshape(x, ints(new_sizes, "reshape", "new_sizes"))


def transpose(operand: ArrayLike, permutation: Sequence[int]) -> Array:
    """Permute axes: axis i of the result is axis ``permutation[i]``."""
    return linear_ops.transpose(lift(operand), ints(permutation, "transpose", "permutation"))


def collapse(operand: ArrayLike, start_dimension: int, stop_dimension: int | None = None) -> Array:
    """Merge the axes of the slice ``start_dimension:stop_dimension`` into one."""
    x = lift(operand)
    s = x.aval.shape
    bounds = [static_int(start_dimension, "collapse", "start_dimension"), None]
    if stop_dimension is not None:
        bounds[1] = static_int(stop_dimension, "collapse", "stop_dimension")
    start, stop, _ = builtins.slice(*bounds).indices(len(s))
    if stop < start:
        raise errors.ValueRangeError(
            f"collapse of {x.aval}: axis {stop} precedes axis {start}.",
            where=source.here(),
            fix="give a stop_dimension of at least start_dimension",
        )
    return linear_ops.reshape(x, (*s[:start], math.prod(s[start:stop]), *s[stop:]))


def reduce_sum(operand: ArrayLike, axes: Sequence[int]) -> Array:
    """The sum over ``axes``, in the operand's dtype; half precisions add in float32."""
    return linear_ops.reduce_sum(lift(operand), ints(axes, "reduce_sum", "axes"))


def batch_matmul(lhs: ArrayLike, rhs: ArrayLike, precision: Any = None) -> Array:
    """Batched matmul over the last two axes; the other axes agree."""
    x, y = lift(lhs), lift(rhs)
    n = x.aval.ndim
    if n < 2 or y.aval.ndim != n:
        raise errors.ShapeError(
            f"batch_matmul takes two arrays of one rank, of 2 or more, not {x.aval} and {y.aval}.",
            where=source.here(),
            fix="use bnp.matmul, which broadcasts",
        )
    lead = tuple(range(n - 2))
    return dot_general(x, y, (((n - 1,), (n - 2,)), (lead, lead)), precision)


# -- creation --------------------------------------------------------------------------------------


def _int_of(x: int, dtype: np.dtype) -> np.ndarray:
    try:
        if dtypes.is_narrow(dtype):
            dtypes.check_narrow(x, dtype)
        return np.asarray(x, dtype)
    except OverflowError:
        raise errors.ValueRangeError(
            f"full: the Python int {x} does not fit in {dtypes.short_name(dtype)}.",
            where=source.here(),
            fix="fill a wider dtype, then convert: full(shape, x, 'int64').astype(dtype)",
        ) from None


def full(
    shape: Sequence[int], fill_value: ArrayLike, dtype: DTypeLike | None = None, *, device: Any = None
) -> Array:
    """An array of ``shape`` filled with a scalar, of its dtype or ``dtype``."""
    shape = shape_of(ints(shape, "full", "shape"), "full")
    if not shape and dtype is None and device is None and not isinstance(fill_value, Array):
        fill_value = lift(fill_value, "the fill value")  # weakly typed if it is a Python number
        if fill_value.__class__ is ConcreteArray and is_number(fill_value):
            # an array of its own: traces tell arrays from the numbers that ``lift`` shares
            weak = fill_value.aval.weak_type
            return number(from_numpy(np.asarray(fill_value), backend.host_device(), weak))
    if isinstance(fill_value, Array):
        value = fill_value if dtype is None else convert_element_type(fill_value, dtype)
        return linear_ops.broadcast_to(value, shape)
    kind = None if dtype is None else dtypes.as_dtype(dtype)
    # a Python int takes a wider dtype as it is, not by way of 32 bits
    own = (
        _int_of(fill_value, kind)
        if fill_value.__class__ is int and kind
        else lift(fill_value, "the fill value").aval
    )
    kind = kind or own.dtype
    if own.ndim:
        raise errors.ShapeError(
            f"full takes one number, not {own}.", where=source.here(), fix="use bnp.broadcast_to(x, shape)"
        )
    if dtypes.is_complex(own.dtype) and not dtypes.is_complex(kind):
        raise errors.DtypeError(
            f"full: {fill_value!r:.60} is complex and cannot become {dtypes.short_name(kind)}.",
            where=source.here(),
            fix="fill with the real part, or ask for dtype='complex64'",
        )
    if state.trace is EVAL:
        # move the scalar first, so that the array is created on its device; never the memoized constant
        # itself
        place = device or backend.default_device()
        return linear_ops.broadcast_to(from_numpy(np.asarray(fill_value, kind), place), shape)
    if device is not None and device != backend.default_device():
        # an operand on the device, where the program then runs
        there = from_numpy(np.full((1,), fill_value, kind), device)
        return linear_ops.broadcast_to(linear_ops.reshape(there, ()), shape)
    return broadcast_in_dim_p.bind(scalar(np.asarray(fill_value).item(), kind), shape=shape, dims=())


def full_like(
    x: ArrayLike, fill_value: ArrayLike, dtype: DTypeLike | None = None, shape: Sequence[int] | None = None
) -> Array:
    """An array filled with a scalar, with the shape and dtype of x by default."""
    aval = lift(x).aval
    return full(aval.shape if shape is None else shape, fill_value, aval.dtype if dtype is None else dtype)


def iota(dtype: DTypeLike, size: int) -> Array:
    """``0, 1, ..., size - 1``: an array of rank 1."""
    return shapes.iota(dtypes.as_dtype(dtype), (size,), 0)


def broadcasted_iota(dtype: DTypeLike, shape: Sequence[int], dimension: int) -> Array:
    """An array of ``shape`` whose elements are their position along ``dimension``."""
    return shapes.iota(dtypes.as_dtype(dtype), shape, dimension)
