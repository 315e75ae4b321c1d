"""Linear operations that all rules use: broadcast, reshape, transpose, sum.

Core operations. They are mutually dual (the transpose of a broadcast is a sum, and vice versa), so they share
a module; all other operations build on them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.primitives.c_form import arithmetic
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.primitives.sharding import (
    BOTH,
    FIRST,
    Factoring,
    common_factors,
    elementwise,
    of_results,
    shard_reduction,
)
from blufunc.core.primitives.tangents import Zero, is_linear, zero


class Linear(Primitive):
    """A kind: operations linear in their first argument and constant in the others."""

    linear: tuple[frozenset[int], ...] = FIRST

    def jvp(self, primals, tangents, **params):
        out = self.bind(*primals, **params)
        t, *rest = tangents
        if t.__class__ is Zero:
            return out, zero(out.aval)
        return out, self.bind(t, *primals[1:], **params)


class _BroadcastInDim(Linear):
    """Broadcast: operand axis i becomes axis ``dims[i]``, new axes repeat it."""

    name, kind = "broadcast_in_dim", "movement"
    autocast_class = "widest"

    def shard(self, avals, outs, **params):
        b = Factoring()
        dims = b.each(outs[0].shape)
        x = [
            dims[d] if n == outs[0].shape[d] else ()
            for n, d in zip(avals[0].shape, params["dims"], strict=True)
        ]
        linear = FIRST if avals[0].size == outs[0].size else ()
        return b.rule([x], [dims], params=of_results, linear=linear)

    def impl(self, x, *, shape, dims):
        strides = [0] * len(shape)
        for size, stride, d in zip(x.shape, x.strides, dims, strict=True):
            strides[d] = stride if size == shape[d] else 0
        if x.dtype.isbuiltin == 1 and x.flags.c_contiguous:  # several times faster than as_strided
            return np.ndarray(shape, x.dtype, x, 0, strides)
        if x.dtype.isbuiltin != 1:  # as_strided does not support ml_dtypes
            return np.broadcast_to(
                x[tuple([slice(None) if d in dims else None for d in range(len(shape))])], shape
            )
        return np.lib.stride_tricks.as_strided(x, shape, strides, writeable=False)

    def abstract(self, x, *, shape, dims):
        rising = all(a < b for a, b in itertools.pairwise(dims))
        if len(dims) != x.ndim or not rising or any(not 0 <= d < len(shape) for d in dims):
            raise errors.ShapeError(
                f"broadcast_in_dim of {x} to {shape} needs {x.ndim} increasing axes of the result, not {dims}."
            )
        for i, d in enumerate(dims):
            if x.shape[i] not in (1, shape[d]):
                raise errors.ShapeError(
                    f"broadcast_in_dim: axis {i} of {x} cannot become axis {d} of {shape}."
                )
        return ShapedArray(shape, x.dtype, x.weak_type)

    def transpose(self, ct, x, *, shape, dims):
        new = tuple(d for d in range(len(shape)) if d not in dims)
        stretched = tuple(d for i, d in enumerate(dims) if x.aval.shape[i] != shape[d])
        ct = reduce_sum(ct, tuple(sorted(new + stretched)))
        x.add(reshape(ct, x.aval.shape))

    def batch(self, axis, args, dims_in, *, shape, dims):
        x = move_dim(args[0], dims_in[0], 0)
        out = self.bind(x, shape=(axis.size, *shape), dims=(0, *[d + 1 for d in dims]))
        return out, 0


class _Reshape(Linear):
    """The same elements, in row-major order, with another shape."""

    name, kind = "reshape", "movement"
    autocast_class = "widest"

    def shard(self, avals, outs, **params):
        b = Factoring()
        before, after = common_factors(avals[0].shape, outs[0].shape, b.new)
        return b.rule([before], [after], params=of_results, linear=FIRST)

    def impl(self, x, *, shape):
        return x.reshape(shape)

    def abstract(self, x, *, shape):
        if math.prod(shape) != x.size or any(n < 0 for n in shape):
            raise errors.ShapeError(
                f"cannot reshape {x} ({x.size} elements) to {shape} ({math.prod(shape)})."
            )
        return ShapedArray(shape, x.dtype, x.weak_type)

    def transpose(self, ct, x, *, shape):
        x.add(reshape(ct, x.aval.shape))

    def batch(self, axis, args, dims, *, shape):
        return self.bind(move_dim(args[0], dims[0], 0), shape=(axis.size, *shape)), 0


class _Transpose(Linear):
    """Permute axes: axis i of the result is axis ``permutation[i]`` of the operand."""

    name, kind = "transpose", "movement"
    autocast_class = "widest"

    def shard(self, avals, outs, **params):
        b = Factoring()
        dims = b.each(avals[0].shape)
        return b.rule([dims], [[dims[p] for p in params["permutation"]]], linear=FIRST)

    def impl(self, x, *, permutation):
        return x.transpose(permutation)

    def abstract(self, x, *, permutation):
        if sorted(permutation) != list(range(x.ndim)):
            raise errors.ShapeError(f"{permutation} is not a permutation of the axes of {x}.")
        return x.with_shape(tuple(x.shape[p] for p in permutation))

    def transpose(self, ct, x, *, permutation):
        x.add(transpose(ct, tuple(int(i) for i in np.argsort(permutation))))

    def batch(self, axis, args, dims, *, permutation):
        d = dims[0]
        shifted = [p + (p >= d) for p in permutation]
        return self.bind(args[0], permutation=(d, *shifted)), 0


class _ReduceSum(Linear):
    """The sum over ``axes``; half-precision floats are accumulated in float32."""

    name, kind, fresh = "reduce_sum", "reduce", True

    monoid = "sum"
    autocast_class = "float32"

    def shard(self, avals, outs, **params):
        return shard_reduction(self.monoid, avals, outs, **params)

    def impl(self, x, *, axes):
        if x.dtype.itemsize <= 2 and dtypes.is_floating(x.dtype):
            return np.add.reduce(x, axes, np.float32).astype(x.dtype)
        return np.add.reduce(x, axes, x.dtype)

    def abstract(self, x, *, axes):
        if not dtypes.is_numeric(x.dtype) or dtypes.is_bool(x.dtype):
            raise errors.DtypeError(f"reduce_sum does not take {x}.", fix="convert first: x.astype('int32')")
        return ShapedArray(reduced_shape(x, axes, "reduce_sum"), x.dtype)

    def transpose(self, ct, x, *, axes):
        kept = tuple(d for d in range(x.aval.ndim) if d not in axes)
        x.add(broadcast_in_dim(ct, x.aval.shape, kept))

    def batch(self, axis, args, dims, *, axes):
        return batch_reduction(self, args[0], dims[0], axes)


class _AddAny(Primitive):
    """The sum of two tangents of one type: differentiation's own addition."""

    name, kind, ufunc, fresh = "add_any", "elementwise", np.add, True
    lower, linear, autocast_class = arithmetic("+"), BOTH, "widest"

    def shard(self, avals, outs, **params):
        return elementwise(avals, outs, self.linear if dtypes.is_inexact(outs[0].dtype) else ())

    def impl(self, x, y):
        return np.add(x, y)

    def abstract(self, x, y):
        if not x.same_type(y):
            raise errors.ShapeError(f"add_any of {x} and {y}")
        return x.strong()

    def jvp(self, primals, tangents):
        return add_any(*primals), add_tangents(*tangents)

    def transpose(self, ct, x, y):
        for arg in (x, y):
            if is_linear(arg):
                arg.add(ct)

    def batch(self, axis, args, dims):
        x, y = (batched_front(axis, a, d) for a, d in zip(args, dims, strict=True))
        return add_any(x, y), 0


broadcast_in_dim_p = _BroadcastInDim()
reshape_p = _Reshape()
transpose_p = _Transpose()
reduce_sum_p = _ReduceSum()
add_any_p = _AddAny()


def reduced_shape(x: ShapedArray, axes: tuple[int, ...], name: str) -> tuple[int, ...]:
    """The shape of ``x`` without ``axes``, which must be distinct and in range."""
    if len(set(axes)) != len(axes) or any(not 0 <= a < x.ndim for a in axes):
        raise errors.ShapeError(f"{name} of {x} over axes {axes}: axes must be distinct and below {x.ndim}.")
    return tuple(n for d, n in enumerate(x.shape) if d not in axes)


def batch_reduction(prim: Primitive, x: Any, d: int, axes: tuple[int, ...], **params: Any) -> tuple[Any, int]:
    """The batching rule of a reduction over ``axes``."""
    shifted = tuple(a + (a >= d) for a in axes)
    out = prim.bind(x, axes=shifted, **params)
    return out, d - sum(a < d for a in shifted)


# -- functions: no equation where the operation is the identity ------------------------------------


def broadcast_in_dim(x: Any, shape: tuple[int, ...], dims: tuple[int, ...]) -> Any:
    """``x`` with axis i as axis ``dims[i]`` of ``shape``, repeated along other axes."""
    if x.aval.shape == shape and dims == tuple(range(len(shape))):
        return x
    return broadcast_in_dim_p.bind(x, shape=shape, dims=dims)


def broadcast_to(x: Any, shape: tuple[int, ...]) -> Any:
    """``x`` broadcast to ``shape`` by NumPy's rules (axes align at the right)."""
    if x.aval.shape == shape:
        return x
    return broadcast_in_dim_p.bind(x, shape=shape, dims=tuple(range(len(shape) - x.aval.ndim, len(shape))))


def reshape(x: Any, shape: tuple[int, ...]) -> Any:
    """The elements of ``x`` in row-major order under ``shape``."""
    return x if x.aval.shape == shape else reshape_p.bind(x, shape=shape)


def transpose(x: Any, permutation: tuple[int, ...]) -> Any:
    """``x`` with its axes in the order of ``permutation``."""
    if permutation == tuple(range(x.aval.ndim)):
        return x
    return transpose_p.bind(x, permutation=permutation)


def reduce_sum(x: Any, axes: tuple[int, ...]) -> Any:
    """The sum of ``x`` over ``axes``."""
    return reduce_sum_p.bind(x, axes=axes) if axes else x


def add_any(x: Any, y: Any) -> Any:
    """The sum of two tangents."""
    return add_any_p.bind(x, y)


def add_tangents(x: Any, y: Any) -> Any:
    """The sum of two tangents, either of which may be ``Zero``."""
    if x.__class__ is Zero:
        return y
    if y.__class__ is Zero:
        return x
    return add_any_p.bind(x, y)


def full(shape: tuple[int, ...], value: Any, dtype: np.dtype) -> Any:
    """An array of ``shape`` filled with a Python scalar."""
    return broadcast_to(scalar(value, dtype), shape)


def zeros(aval: ShapedArray) -> Any:
    """Zeros of a type; an inert placeholder for ``float0``."""
    if aval.dtype == dtypes.float0:
        return broadcast_to(scalar(np.zeros((), dtypes.float0)[()], dtypes.float0), aval.shape)
    return full(aval.shape, 0, aval.dtype)


def instantiate(t: Any) -> Any:
    """A tangent or cotangent as a value: ``Zero`` becomes zeros."""
    return zeros(t.aval) if t.__class__ is Zero else t


def unbroadcast(ct: Any, aval: ShapedArray) -> Any:
    """The cotangent of a rank-0 operand that an elementwise operation broadcast."""
    if ct.aval.ndim and not aval.ndim:
        return reduce_sum(ct, tuple(range(ct.aval.ndim)))
    return ct


# -- moving batch axes -----------------------------------------------------------------------------


def move_dim(x: Any, src: int, dst: int) -> Any:
    """``x`` with axis ``src`` moved to position ``dst``."""
    if src == dst:
        return x
    order = [d for d in range(x.aval.ndim) if d != src]
    order.insert(dst, src)
    return transpose(x, tuple(order))


def batched_front(axis: Any, x: Any, d: int | None) -> Any:
    """``x`` with a leading batch axis; repeated along it if unbatched."""
    if d is None:
        return broadcast_in_dim(x, (axis.size, *x.aval.shape), tuple(range(1, x.aval.ndim + 1)))
    return move_dim(x, d, 0)


def all_front(axis: Any, args: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """``batched_front`` of each argument."""
    return [batched_front(axis, a, d) for a, d in zip(args, dims, strict=True)]
