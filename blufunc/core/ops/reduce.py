"""Reductions other than the sum: extrema, products, bits, argmax and argmin.

Core operations. ``reduce_sum`` is in ``core/primitives/linear_ops.py``, since the rules of differentiation
need it. Functions here take static, distinct, nonnegative axes; ``blufunc.numpy`` normalizes others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import ints, static_int
from blufunc.core.ops.elementwise import convert, div, eq, mul, named
from blufunc.core.ops.shape import check_positions, slice_in_dim
from blufunc.core.primitives.kinds import Reduction, check_types
from blufunc.core.primitives.linear_ops import (
    add_any,
    batch_reduction,
    broadcast_in_dim,
    reduce_sum,
    reduced_shape,
    reshape,
    transpose,
)
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.sharding import shard_reduction
from blufunc.core.primitives.tangents import zero

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.signatures import Reduce
    from blufunc.core.ir.trace import Array

# -- extrema ---------------------------------------------------------------------------------------


def _extremum(name: str, ufunc: np.ufunc, largest: bool) -> Reduction:
    def impl(x, axes):
        if x.size:
            return ufunc.reduce(x, axis=axes)
        return ufunc.reduce(x, axis=axes, initial=limit(x.dtype, not largest))

    monoid = name.removeprefix("reduce_")
    return Reduction(name, impl, "ordered", _extremum_deriv, monoid=monoid, autocast="widest")


def limit(dtype: np.dtype, largest: bool) -> Any:
    """The largest or the smallest value of a dtype, as a scalar of it."""
    if dtypes.is_bool(dtype):
        return dtype.type(largest)
    if dtypes.is_floating(dtype):
        infinity = np.asarray(np.inf if largest else -np.inf).astype(dtype)
        if np.isinf(infinity):
            return infinity[()]
        # float8_e4m3fn has no infinities, float8_e8m0fnu no negative numbers either
        info = dtypes.finfo(dtype)
        return dtype.type(info.max if largest else info.min)
    info = dtypes.iinfo(dtype)
    return dtype.type(info.max if largest else info.min)


def _extremum_deriv(t, ans, x, axes):
    # ties share the derivative equally: the symmetric subgradient
    kept = tuple(d for d in range(x.aval.ndim) if d not in axes)
    hit = convert(eq(x, broadcast_in_dim(ans, x.aval.shape, kept)), x.dtype)
    return div(reduce_sum(mul(t, hit), axes), reduce_sum(hit, axes))


reduce_max_p = _extremum("reduce_max", np.maximum, largest=True)
reduce_min_p = _extremum("reduce_min", np.minimum, largest=False)

# -- products --------------------------------------------------------------------------------------


def _prod_impl(x, axes):
    if x.dtype.itemsize <= 2 and dtypes.is_floating(x.dtype):
        return np.multiply.reduce(x, axis=axes, dtype=np.float32).astype(x.dtype)
    return np.multiply.reduce(x, axis=axes, dtype=x.dtype)


def _prod_deriv(t, ans, x, axes):
    """The product rule up a tree of pairwise products.

    It never divides by an element, so it holds where elements are zero, as do its derivatives.
    """
    kept = tuple(d for d in range(x.aval.ndim) if d not in axes)
    count = math.prod([x.aval.shape[d] for d in axes])
    if not count:
        return zero(ans.aval)
    order, flat = (*axes, *kept), (count, *ans.aval.shape)
    value, tangent = (reshape(transpose(a, order), flat) for a in (x, t))
    odd: list[tuple[Any, Any]] = []  # leftover elements of odd lengths
    while count > 1:
        if count % 2:
            odd.append((slice_in_dim(value, count - 1, count), slice_in_dim(tangent, count - 1, count)))
        count //= 2
        value, tangent = _times(
            (slice_in_dim(value, 0, count), slice_in_dim(tangent, 0, count)),
            (slice_in_dim(value, count, 2 * count), slice_in_dim(tangent, count, 2 * count)),
        )
    for pair in odd:
        value, tangent = _times((value, tangent), pair)
    return reshape(tangent, ans.aval.shape)


def _times(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """The product of two values with tangents."""
    (x, tx), (y, ty) = a, b
    return mul(x, y), add_any(mul(tx, y), mul(x, ty))


reduce_prod_p = Reduction(
    "reduce_prod", _prod_impl, "number", deriv=_prod_deriv, monoid="prod", autocast="float32"
)

# -- bits ------------------------------------------------------------------------------------------


def _bits(name: str, ufunc: np.ufunc) -> Reduction:
    impl = lambda x, axes: ufunc.reduce(x, axis=axes)
    return Reduction(name, impl, "bits", monoid=name.removeprefix("reduce_"))


reduce_and_p = _bits("reduce_and", np.bitwise_and)
reduce_or_p = _bits("reduce_or", np.bitwise_or)
reduce_xor_p = _bits("reduce_xor", np.bitwise_xor)

# -- argmax and argmin -----------------------------------------------------------------------------


class _ArgExtremum(Primitive):
    """The index of the first extremum, or the first NaN, along the axis in ``axes``."""

    kind, fresh, widens = "reduce", True, True
    autocast_class = "widest"

    def shard(self, avals, outs, **params):
        return shard_reduction("", avals, outs, **params)

    def __init__(self, name: str, function: Callable):
        super().__init__(name)
        self.function, self.monoid = function, name

    def impl(self, x, *, axes, index_dtype):
        if x.dtype.itemsize <= 2 and dtypes.is_floating(x.dtype):
            x = x.astype(np.float32)  # NumPy finds no NaN in ml_dtypes
        return self.function(x, axis=axes[0]).astype(index_dtype)

    def abstract(self, x, *, axes, index_dtype):
        check_types(self.name, "ordered", x)
        if not dtypes.is_integer(index_dtype):
            raise errors.DtypeError(
                f"{self.name} gives integers, not {dtypes.short_name(index_dtype)}.",
                fix="index_dtype='int32'",
            )
        if len(axes) != 1:
            raise errors.ShapeError(f"{self.name} takes one axis, not {axes}.", fix="reshape the array first")
        out = reduced_shape(x, axes, self.name)
        if not x.shape[axes[0]]:
            raise errors.ShapeError(f"{self.name} of {x} over axis {axes[0]}, which is empty.")
        check_positions(self.name, x.shape[axes[0]], index_dtype)
        return ShapedArray(out, index_dtype)

    def jvp(self, primals, tangents, **params):
        out = self.bind(*primals, **params)
        return out, zero(out.aval)

    transpose = unsupported("its results are integers, which have no derivative")

    def batch(self, axis, args, dims, *, axes, index_dtype):
        return batch_reduction(self, args[0], dims[0], axes, index_dtype=index_dtype)


argmax_p = _ArgExtremum("argmax", np.argmax)
argmin_p = _ArgExtremum("argmin", np.argmin)

# -- functions -------------------------------------------------------------------------------------


def _reduction(prim: Primitive, doc: str) -> Reduce:
    def function(operand: Any, axes: Sequence[int]) -> Any:
        x, axes = lift(operand), ints(axes, prim.name, "axes")
        return prim.bind(x, axes=axes) if axes else x

    return named(function, prim.name, doc)


reduce_max = _reduction(
    reduce_max_p, "The largest element over ``axes``; NaN if any is; -inf or the least of none."
)
reduce_min = _reduction(
    reduce_min_p, "The smallest element over ``axes``; NaN if any is; inf or the largest of none."
)
reduce_prod = _reduction(
    reduce_prod_p, "The product of ``x`` over ``axes``; half precisions multiply in float32."
)
reduce_and = _reduction(reduce_and_p, "The bitwise (of booleans: logical) and over ``axes``.")
reduce_or = _reduction(reduce_or_p, "The bitwise (of booleans: logical) or over ``axes``.")
reduce_xor = _reduction(reduce_xor_p, "The bitwise (of booleans: logical) exclusive or over ``axes``.")


def argmax(operand: ArrayLike, axis: int, index_dtype: DTypeLike = "int32") -> Array:
    """The index of the first largest element along ``axis``; NaN counts as largest."""
    return argmax_p.bind(
        lift(operand), axes=(static_int(axis, "argmax", "axis"),), index_dtype=dtypes.as_dtype(index_dtype)
    )


def argmin(operand: ArrayLike, axis: int, index_dtype: DTypeLike = "int32") -> Array:
    """The index of the first smallest element along ``axis``; NaN counts as smallest."""
    return argmin_p.bind(
        lift(operand), axes=(static_int(axis, "argmin", "axis"),), index_dtype=dtypes.as_dtype(index_dtype)
    )
