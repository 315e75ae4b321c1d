"""Static slicing and joining: slice, pad, concatenate, rev, iota.

Core operations. Slices and pads are each other's transposes. The functions resolve negative and omitted
positions; the primitives take positions that are in range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import ints, sequence, static_int
from blufunc.core.ir.trace import Array
from blufunc.core.ops.elementwise import operand as operand_like
from blufunc.core.ops.elementwise import select, zeros_of
from blufunc.core.primitives.kinds import check_types
from blufunc.core.primitives.linear_ops import (
    Linear,
    all_front,
    batched_front,
    broadcast_in_dim,
    full,
    instantiate,
    reduce_sum,
    reshape,
)
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.sharding import BOTH, FIRST, Factoring, of_results
from blufunc.core.primitives.tangents import Zero, is_linear, zero

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike

_py_slice = slice
_BOOL = np.dtype(np.bool_)


class _Slice(Linear):
    """Elements from ``start_indices`` to ``limit_indices``, by ``strides`` (None: 1)."""

    name, kind = "slice", "movement"
    autocast_class = "widest"

    def shard(self, avals, outs, **params):
        b = Factoring()
        x, out = avals[0].shape, outs[0].shape
        dims = b.each(x, [d for d in range(len(x)) if x[d] != out[d]])

        def local(params, operands, results):
            limits = [
                m if f else limit
                for m, f, limit in zip(operands[0], dims, params["limit_indices"], strict=True)
            ]
            return {**params, "limit_indices": tuple(limits)}

        return b.rule([dims], [dims], params=local, linear=FIRST)

    def impl(self, x, *, start_indices, limit_indices, strides):
        if strides is None:
            return x[tuple(map(_py_slice, start_indices, limit_indices))]
        return x[tuple(map(_py_slice, start_indices, limit_indices, strides))]

    def abstract(self, x, *, start_indices, limit_indices, strides):
        steps = strides or (1,) * x.ndim
        if not len(start_indices) == len(limit_indices) == len(steps) == x.ndim:
            raise errors.ShapeError(
                f"slice of {x} needs {x.ndim} starts, limits and strides, not {start_indices}, {limit_indices} "
                f"and {strides}.",
                fix="give one of each per axis, or use lax.slice_in_dim for a single axis",
            )
        for d, (lo, hi, n) in enumerate(zip(start_indices, limit_indices, x.shape, strict=True)):
            if not 0 <= lo <= hi <= n:
                raise errors.ShapeError(
                    f"slice of {x}: axis {d} has {n} elements, {lo}:{hi} is not within it.",
                    fix="use x[start:limit], which clips, or give 0 <= start <= limit <= size",
                )
        if any(s <= 0 for s in steps):
            raise errors.ShapeError(
                f"slice of {x}: strides must be positive, not {strides}.",
                fix="use lax.rev to turn an axis around",
            )
        shape = tuple(
            -((lo - hi) // s) for lo, hi, s in zip(start_indices, limit_indices, steps, strict=True)
        )
        return ShapedArray(shape, x.dtype)

    def transpose(self, ct, x, *, start_indices, limit_indices, strides):
        if not ct.aval.size:
            return
        if strides is None or all(s == 1 for s in strides):
            x.add_window(ct, start_indices)
        else:
            x.add(embedded(ct, start_indices, x.aval.shape, strides))

    def batch(self, axis, args, dims, *, start_indices, limit_indices, strides):
        d = dims[0]
        out = self.bind(
            args[0],
            start_indices=insert(start_indices, d, 0),
            limit_indices=insert(limit_indices, d, axis.size),
            strides=None if strides is None else insert(strides, d, 1),
        )
        return out, d


class _Pad(Primitive):
    """The operand padded before, after and between elements; negative counts crop."""

    name, kind, fresh = "pad", "movement", True
    linear, autocast_class = BOTH, "widest"

    def shard(self, avals, outs, **params):
        b = Factoring()
        dims = b.each(
            avals[0].shape, [d for d, c in enumerate(params["padding_config"]) if tuple(c) != (0, 0, 0)]
        )
        return b.rule(
            [dims, ()], [dims], linear=BOTH
        )  # an unreduced sum may only be padded with zeros, which are unreduced sums too

    def impl(self, x, value, *, padding_config):
        shape = _padded_shape(x.shape, padding_config)
        value = np.asarray(value)
        if any(value.tobytes()):
            out = np.full(shape, value, x.dtype)
        else:
            out = np.zeros(shape, x.dtype)  # zeroed pages from the OS cost less than filling
        to, of = [], []
        for (lo, _, interior), n, m in zip(padding_config, x.shape, shape, strict=True):
            step = interior + 1  # element i goes to lo + i * step, if that is within [0, m)
            first = max(0, -(lo // step))
            last = min(n, -((lo - m) // step))
            if last <= first:
                return out
            to.append(_py_slice(lo + first * step, lo + (last - 1) * step + 1, step))
            of.append(_py_slice(first, last))
        out[tuple(to)] = x[tuple(of)]
        return out

    def abstract(self, x, value, *, padding_config):
        if value.ndim:
            raise errors.ShapeError(
                f"pad takes one value, not {value}.", fix="pad with a number, or use lax.concatenate"
            )
        if x.dtype != value.dtype:
            raise errors.DtypeError(
                f"pad of {x} needs a padding value of its dtype, not {value}.",
                fix="convert one of them with .astype",
            )
        if len(padding_config) != x.ndim:
            raise errors.ShapeError(
                f"pad of {x} needs {x.ndim} triples (low, high, interior), not {len(padding_config)}.",
                fix="give (0, 0, 0) for axes to leave alone",
            )
        if any(interior < 0 for _, _, interior in padding_config):
            raise errors.ShapeError(
                f"pad of {x}: interior padding cannot be negative: {padding_config}.",
                fix="use lax.slice with strides to leave elements out",
            )
        shape = _padded_shape(x.shape, padding_config)
        if any(n < 0 for n in shape):
            raise errors.ShapeError(
                f"pad of {x} with {padding_config} cuts off more than there is: the shape would be {shape}.",
                fix="let low and high be at least minus the size",
            )
        return ShapedArray(shape, x.dtype)

    def jvp(self, primals, tangents, *, padding_config):
        out = self.bind(*primals, padding_config=padding_config)
        tx, tv = tangents
        if tx.__class__ is Zero and tv.__class__ is Zero:
            return out, zero(out.aval)
        return out, self.bind(instantiate(tx), instantiate(tv), padding_config=padding_config)

    def transpose(self, ct, x, value, *, padding_config):
        if is_linear(x) and x.aval.size:
            grown = pad(ct, zeros_of(ct), [(max(-lo, 0), max(-hi, 0), 0) for lo, hi, _ in padding_config])
            starts = [max(lo, 0) for lo, _, _ in padding_config]
            limits = [n - max(hi, 0) for n, (_, hi, _) in zip(grown.aval.shape, padding_config, strict=True)]
            x.add(slice_(grown, starts, limits, [interior + 1 for _, _, interior in padding_config]))
        if is_linear(value):
            # sum the padding only: subtracting the operand's part from the total would cancel
            padding = _padding_mask(x.aval.shape, padding_config)
            value.add(reduce_sum(select(padding, ct, zeros_of(ct)), tuple(range(ct.aval.ndim))))

    def batch(self, axis, args, dims, *, padding_config):
        (x, value), (dx, dv) = args, dims
        if dv is None:
            return self.bind(x, value, padding_config=insert(padding_config, dx, (0, 0, 0))), dx
        mask = _padding_mask(x.aval.shape if dx is None else _without(x.aval.shape, dx), padding_config)
        shape = (axis.size, *mask.aval.shape)
        x = batched_front(axis, x, dx)
        out = self.bind(x, zeros_of(x), padding_config=((0, 0, 0), *padding_config))
        mask = broadcast_in_dim(mask, shape, tuple(range(1, len(shape))))
        return select(mask, broadcast_in_dim(value, shape, (0,)), out), 0


def _padded_shape(shape: tuple[int, ...], config: tuple) -> tuple[int, ...]:
    return tuple(
        lo + n + hi + interior * max(n - 1, 0) for n, (lo, hi, interior) in zip(shape, config, strict=True)
    )


def embedded(
    x: Any, starts: Sequence[int], shape: Sequence[int], strides: Sequence[int] | None = None
) -> Any:
    """Zeros of ``shape`` with ``x`` at ``starts``: the transpose of a slice."""
    steps = strides or (1,) * x.aval.ndim
    config = tuple(
        (lo, n - lo - (m - 1) * s - 1, s - 1)
        for lo, s, m, n in zip(starts, steps, x.aval.shape, shape, strict=True)
    )
    return pad_p.bind(x, zeros_of(x), padding_config=config)


def _padding_mask(shape: tuple[int, ...], config: tuple) -> Any:
    """True where a pad puts the padding value."""
    return pad_p.bind(full(shape, False, _BOOL), scalar(True, _BOOL), padding_config=config)


class _Concatenate(Primitive):
    """Arrays one after the other along ``dimension``."""

    name, kind, fresh = "concatenate", "movement", True
    autocast_class = "widest"

    def linear_in(self, avals, outs, **params):
        return (frozenset(range(len(avals))),)

    def shard(self, avals, outs, **params):
        b = Factoring()
        dims = b.each(outs[0].shape, [params["dimension"]])
        return b.rule([dims] * len(avals), [dims], linear=self.linear_in(avals, outs))

    def impl(self, *xs, dimension):
        return np.concatenate(xs, axis=dimension)

    def abstract(self, *xs, dimension):
        if not xs:
            raise errors.ArgumentError(
                "concatenate needs at least one array.", fix="check that the list of arrays is not empty"
            )
        first = xs[0]
        if not 0 <= dimension < first.ndim:
            raise errors.ShapeError(
                f"concatenate of {first} along axis {dimension}: it has {first.ndim} axes.",
                fix="use bnp.stack, which adds an axis, or correct the axis",
            )
        total = 0
        for i, x in enumerate(xs):
            if x.dtype != first.dtype:
                raise errors.DtypeError(
                    f"concatenate takes arrays of one dtype, but array 0 is {first} and array {i} is {x}.",
                    fix="use bnp.concatenate, which promotes, or convert with .astype",
                )
            if x.ndim != first.ndim or _without(x.shape, dimension) != _without(first.shape, dimension):
                raise errors.ShapeError(
                    f"concatenate along axis {dimension}: array 0 is {first} and array {i} is {x}.",
                    why="all axes but that one must agree.",
                    fix="reshape, transpose or broadcast the arrays first",
                )
            total += x.shape[dimension]
        return ShapedArray(replace(first.shape, dimension, total), first.dtype)

    def jvp(self, primals, tangents, *, dimension):
        out = self.bind(*primals, dimension=dimension)
        if all(t.__class__ is Zero for t in tangents):
            return out, zero(out.aval)
        return out, self.bind(*map(instantiate, tangents), dimension=dimension)

    def transpose(self, ct, *xs, dimension):
        start = 0
        for x in xs:
            limit = start + x.aval.shape[dimension]
            if is_linear(x):
                x.add(slice_in_dim(ct, start, limit, axis=dimension))
            start = limit

    def batch(self, axis, args, dims, *, dimension):
        d = dims[0]
        if d is not None and all(other == d for other in dims):
            return self.bind(*args, dimension=dimension + (d <= dimension)), d
        return self.bind(*all_front(axis, args, dims), dimension=dimension + 1), 0


class _Rev(Linear):
    """The elements in reverse order along ``dimensions``."""

    name, kind = "rev", "movement"
    autocast_class = "widest"

    def shard(self, avals, outs, **params):
        b = Factoring()
        dims = b.each(avals[0].shape, params["dimensions"])
        return b.rule([dims], [dims], linear=FIRST)

    def impl(self, x, *, dimensions):
        return np.flip(x, dimensions)

    def abstract(self, x, *, dimensions):
        if len(set(dimensions)) != len(dimensions) or any(not 0 <= d < x.ndim for d in dimensions):
            raise errors.ShapeError(
                f"rev of {x} along axes {dimensions}: axes must be distinct and below {x.ndim}.",
                fix="correct the axes",
            )
        return x.strong()

    def transpose(self, ct, x, *, dimensions):
        x.add(self.bind(ct, dimensions=dimensions))

    def batch(self, axis, args, dims, *, dimensions):
        d = dims[0]
        return self.bind(args[0], dimensions=tuple([a + (a >= d) for a in dimensions])), d


def check_positions(name: str, size: int, dtype: np.dtype) -> None:
    """Check that the positions along an axis of ``size`` fit in ``dtype``."""
    if dtypes.is_integer(dtype) and size - 1 > np.iinfo(dtype).max:
        raise errors.ValueRangeError(
            f"{name}: the position {size - 1} does not fit in {dtypes.short_name(dtype)}.",
            why="it would wrap around to another one.",
            fix="positions of a wider dtype, such as 'int64'",
        )


class _Iota(Primitive):
    """0, 1, 2, ... along ``dimension``, repeated along the other axes."""

    name, kind, widens = "iota", "movement", True
    jvp = unsupported("it has no operands")
    transpose = unsupported("it has no operands")
    batch = unsupported("it has no operands")

    def shard(self, avals, outs, **params):
        b = Factoring()
        return b.rule([], [b.each(outs[0].shape)], params=of_results, special="iota")

    def impl(self, *, dtype, shape, dimension):
        line = np.arange(shape[dimension]).astype(dtype)
        return np.broadcast_to(line.reshape(-1, *[1] * (len(shape) - dimension - 1)), shape)

    def abstract(self, *, dtype, shape, dimension):
        out = ShapedArray(shape, dtype)
        check_types("iota", "number", out)
        if not 0 <= dimension < len(shape) or any(n < 0 for n in shape):
            raise errors.ShapeError(
                f"iota of shape {shape} along axis {dimension}: sizes must not be negative, "
                f"and the axis below {len(shape)}.",
                fix="iota('int32', (n,), 0)",
            )
        check_positions("iota", shape[dimension], dtype)
        return out


slice_p = _Slice()
pad_p = _Pad()
concatenate_p = _Concatenate()
rev_p = _Rev()
iota_p = _Iota()


# -- functions: no equation where the operation is the identity ------------------------------------


def slice_(
    operand: ArrayLike,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None = None,
) -> Array:
    """Slice with one start, limit and stride (static ints) per axis."""
    if not isinstance(operand, Array):
        operand = lift(operand)
    start, limit = (
        ints(start_indices, "slice", "start_indices"),
        ints(limit_indices, "slice", "limit_indices"),
    )
    if strides is not None:
        strides = ints(strides, "slice", "strides")
        if all(s == 1 for s in strides) and len(strides) == len(start):
            strides = None
    if strides is None and limit == operand.aval.shape and len(start) == len(limit) and not any(start):
        return operand
    return slice_p.bind(operand, start_indices=start, limit_indices=limit, strides=strides)


def slice_in_dim(
    operand: ArrayLike, start_index: int | None, limit_index: int | None, stride: int = 1, axis: int = 0
) -> Array:
    """``operand[start_index:limit_index:stride]`` along one axis, Python conventions."""
    x = lift(operand)
    shape = x.aval.shape
    axis = canonical_axis(axis, len(shape), "slice_in_dim")
    n = shape[axis]
    lo = 0 if start_index is None else static_int(start_index, "slice_in_dim", "start_index")
    hi = n if limit_index is None else static_int(limit_index, "slice_in_dim", "limit_index")
    lo, hi = lo + n if lo < 0 else lo, hi + n if hi < 0 else hi
    strides = None if stride == 1 else replace((1,) * len(shape), axis, stride)
    return slice_(x, replace((0,) * len(shape), axis, lo), replace(shape, axis, hi), strides)


def index_in_dim(operand: ArrayLike, index: int, axis: int = 0, keepdims: bool = True) -> Array:
    """The elements at static ``index`` along one axis, kept with ``keepdims``."""
    x = lift(operand)
    axis = canonical_axis(axis, x.aval.ndim, "index_in_dim")
    n, i = x.aval.shape[axis], static_int(index, "index_in_dim", "the index")
    if not -n <= i < n:
        raise errors.ValueRangeError(
            f"index_in_dim: {i} is out of range for axis {axis} of {x.aval}.",
            where=source.here(),
            fix=f"give an index in [{-n}, {n})",
        )
    out = slice_in_dim(x, i % n, i % n + 1, axis=axis)
    return out if keepdims else squeeze(out, (axis,))


def pad(
    operand: ArrayLike, padding_value: ArrayLike, padding_config: Sequence[tuple[int, int, int]]
) -> Array:
    """``operand`` with a value around and between its elements.

    Args:
      padding_value: of rank 0 and of the dtype of ``operand``.
      padding_config: per axis the counts before, after and between elements; negative counts before and after
        crop.
    """
    x = lift(operand)
    config = tuple(
        [ints(c, "pad", "padding_config") for c in sequence(padding_config, "pad", "padding_config")]
    )
    if any(len(c) != 3 for c in config):
        raise errors.ArgumentError(
            f"pad: padding_config is one triple (low, high, interior) per axis, not {config}.",
            where=source.here(),
            fix="give (low, high, 0) for padding without any between elements",
        )
    if len(config) == x.aval.ndim and not any(map(any, config)):
        return x
    return pad_p.bind(x, operand_like(padding_value, x), padding_config=config)


def concatenate(operands: Sequence[ArrayLike], dimension: int) -> Array:
    """The arrays ``operands``, of one dtype, one after the other along ``dimension``."""
    if operands.__class__ is not list and operands.__class__ is not tuple:
        operands = sequence(operands, "concatenate", "the first argument", "arrays")
    xs = [x if isinstance(x, Array) else lift(x) for x in operands]
    dimension = static_int(dimension, "concatenate", "dimension")
    if xs and dimension < 0:
        dimension = canonical_axis(dimension, xs[0].aval.ndim, "concatenate")
    if len(xs) == 1 and dimension < xs[0].aval.ndim:
        return xs[0]
    return concatenate_p.bind(*xs, dimension=dimension)


def rev(operand: ArrayLike, dimensions: Sequence[int]) -> Array:
    """``operand`` in reverse order along ``dimensions``."""
    x = lift(operand)
    dims = tuple([canonical_axis(d, x.aval.ndim, "rev") for d in ints(dimensions, "rev", "dimensions")])
    return rev_p.bind(x, dimensions=dims) if dims else x


def iota(dtype: np.dtype, shape: Sequence[int], dimension: int) -> Array:
    """An array of ``shape`` whose elements are their position along ``dimension``."""
    return iota_p.bind(
        dtype=dtype,
        shape=ints(shape, "iota", "a shape"),
        dimension=static_int(dimension, "iota", "dimension"),
    )


def squeeze(array: ArrayLike, dimensions: Sequence[int]) -> Array:
    """``array`` without the axes ``dimensions``, which have size 1."""
    x = lift(array)
    shape = x.aval.shape
    gone = {canonical_axis(d, len(shape), "squeeze") for d in ints(dimensions, "squeeze", "dimensions")}
    if any(shape[d] != 1 for d in gone):
        raise errors.ShapeError(
            f"squeeze of {x.aval}: axes {tuple(sorted(gone))} do not all have size 1.",
            where=source.here(),
            fix="index the axis (x[0]) or reduce over it",
        )
    return reshape(x, tuple([n for d, n in enumerate(shape) if d not in gone]))


def expand_dims(array: ArrayLike, dimensions: Sequence[int]) -> Array:
    """``array`` with new axes of size 1, at positions ``dimensions`` of the result."""
    x, dims = lift(array), ints(dimensions, "expand_dims", "dimensions")
    ndim = x.aval.ndim + len(dims)
    new = {canonical_axis(d, ndim, "expand_dims") for d in dims}
    if len(new) != len(dims):
        raise errors.ShapeError(
            f"expand_dims of {x.aval}: positions {tuple(dims)} repeat.",
            where=source.here(),
            fix="give each once",
        )
    old = iter(x.aval.shape)
    return reshape(x, tuple([1 if d in new else next(old) for d in range(ndim)]))


# -- positions -------------------------------------------------------------------------------------


def canonical_axis(axis: int, ndim: int, name: str) -> int:
    """``axis`` counted from the front; negative ones count from the back."""
    if axis.__class__ is not int:
        axis = static_int(axis, name, "axis")
    if not -ndim <= axis < ndim:
        raise errors.AxisRangeError(
            f"{name}: axis {axis} is out of range for an array of {ndim} axes.",
            where=source.here(),
            fix=f"give an axis in [{-ndim}, {ndim})" if ndim else "give the array an axis first: x[None]",
        )
    return axis + ndim if axis < 0 else axis


def insert(xs: tuple, i: int, x: Any) -> tuple:
    """The tuple with ``x`` inserted at position ``i``."""
    return xs[:i] + (x,) + xs[i:]


def replace(xs: tuple, i: int, x: Any) -> tuple:
    """The tuple with ``x`` replacing position ``i``."""
    return xs[:i] + (x,) + xs[i + 1 :]


def _without(xs: tuple, i: int) -> tuple:
    return xs[:i] + xs[i + 1 :]
