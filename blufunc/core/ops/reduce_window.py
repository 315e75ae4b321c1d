"""Sums and extrema over sliding windows.

Core operations, above ``sliding``, which computes window positions. Boxes are reduced axis by axis, so the
cost of a window is the sum of its sizes instead of their product. The sum is linear, and its transpose is a
window sum too. An extremum differentiates through the position of its element, a separate operation. Padding
and holes hold the identity of the reduction, so they never count.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops.elementwise import add, convert, div, eq, ge, logical_and, lt, mul, rem, select, sub
from blufunc.core.ops.gather_scatter import gather, scatter_add
from blufunc.core.ops.reduce import limit
from blufunc.core.ops.shape import insert, iota
from blufunc.core.ops.sliding import Ints, Pads, check_slide, count, padded, transposed_pad
from blufunc.core.ops.windows import GatherDimensionNumbers, GatherScatterMode, ScatterDimensionNumbers
from blufunc.core.primitives.kinds import check_types
from blufunc.core.primitives.linear_ops import Linear, all_front, full, reshape
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.sharding import FIRST, Factoring, of_results
from blufunc.core.primitives.tangents import Zero, zero


class WindowReduction(Primitive):
    """A kind: one result for each window of the operand.

    Parameters: ``window_dimensions``, ``window_strides``, ``padding``, ``base_dilation`` and ``window_dilation``, each
    with an entry for every axis.
    """

    kind, fresh, widens, types = "reduce", True, True, "number"

    def shard(self, avals, outs, **params):
        b = Factoring()
        dims = b.each(avals[0].shape, _moving(**params))
        return b.rule([dims] * len(avals), [dims] * len(outs))

    def abstract(self, x, **params):
        check_types(self.name, self.types, x)
        positive = [k for k in params if k != "padding"]
        check_slide(self.name, x.ndim, params, positive)
        return ShapedArray(_counts(x.shape, **params), self.out_dtype(x.dtype))

    def out_dtype(self, dtype: np.dtype) -> np.dtype:
        """The dtype of the result."""
        return dtype

    def batch(self, axis, args, dims, *, padding, **params):
        d = dims[0]
        params = {k: insert(v, d, 1) for k, v in params.items()}
        return self.bind(args[0], padding=insert(padding, d, (0, 0)), **params), d


class _Sum(Linear, WindowReduction):
    """The sum of each window; half precisions add in float32."""

    name = "reduce_window_sum"
    autocast_class = "float32"

    def impl(self, x, **params):
        half = x.dtype.itemsize <= 2 and dtypes.is_floating(x.dtype)
        out = _along_axes(np.asarray(x, np.float32) if half else x, np.add, 0, **params)
        return out.astype(x.dtype) if half else out

    def transpose(self, ct, x, *, window_dimensions, window_strides, padding, base_dilation, window_dilation):
        if not ct.aval.size or not x.aval.size:
            return
        slides = zip(
            x.aval.shape, window_dimensions, window_strides, padding, base_dilation, window_dilation, ct.aval.shape,
            strict=True,
        )  # fmt: skip
        out = self.bind(
            ct,
            window_dimensions=window_dimensions,
            window_strides=base_dilation,
            padding=tuple([transposed_pad(*slide) for slide in slides]),
            base_dilation=window_strides,
            window_dilation=window_dilation,
        )
        x.add(out)


class _Extremum(WindowReduction):
    """The largest or smallest element of each window; NaN if there is one.

    All of its derivative goes to the first element that it equals, in row-major order, as in XLA.
    """

    types = "ordered"
    autocast_class = "widest"

    def __init__(self, name: str, ufunc: np.ufunc, position: Primitive, largest: bool):
        super().__init__(name)
        self.combine, self.position, self.largest = ufunc, position, largest

    def impl(self, x, **params):
        return _along_axes(x, self.combine, limit(x.dtype, not self.largest), **params)

    def jvp(self, primals, tangents, **params):
        (x,), (t,) = primals, tangents
        out = self.bind(x, **params)
        if t.__class__ is Zero or not x.aval.size:
            return out, zero(out.aval)
        return out, window_pick_p.bind(t, self.position.bind(x, **params), **params)

    transpose = unsupported("it is not linear: it is transposed through its derivative")


class _Position(WindowReduction):
    """Row-major index of the first extremum of each window; NaN counts as extreme."""

    types = "ordered"

    def __init__(self, name: str, beats: np.ufunc, largest: bool):
        super().__init__(name)
        self.beats, self.largest = beats, largest

    def out_dtype(self, dtype):
        return dtypes.int32

    def abstract(self, x, *, window_dimensions, **params):
        if math.prod(window_dimensions) > np.iinfo(np.int32).max:
            raise errors.ShapeError(f"{self.name}: positions in windows of {window_dimensions} exceed int32.")
        return super().abstract(x, window_dimensions=window_dimensions, **params)

    def impl(self, x, **params):
        fill = limit(x.dtype, not self.largest)
        if x.dtype.itemsize <= 2 and dtypes.is_floating(x.dtype):
            x, fill = np.asarray(x, np.float32), np.float32(fill)
        return _positions(x, self.beats, fill, **params)

    def jvp(self, primals, tangents, **params):
        out = self.bind(primals[0], **params)
        return out, zero(out.aval)

    transpose = unsupported("positions are integers, without derivatives")


class _OfPositions(Linear):
    """A kind: one element of each window, at the position that the second operand has."""

    kind, fresh, autocast_class = "index", True, "widest"

    def shard(self, avals, outs, **params):
        b = Factoring()
        dims = b.each(avals[0].shape, _moving(**{k: v for k, v in params.items() if k != "shape"}))
        return b.rule([dims] * 2, [dims], linear=FIRST, params=of_results if "shape" in params else None)

    def batch(self, axis, args, dims, *, padding, **params):
        shape = {"shape": (axis.size, *params.pop("shape"))} if "shape" in params else {}
        params = {k: (1, *v) for k, v in params.items()}
        xs = all_front(axis, args, dims)
        return self.bind(*xs, padding=((0, 0), *padding), **params, **shape), 0


class _Pick(_OfPositions):
    """The element of each window of ``t`` at position ``which``; 0 outside of ``t``.

    It is the tangent of an extremum. GPU kernels select from a window (``kernels/rewrites/unrolled_windows.py``).
    """

    name = "window_pick"

    def abstract(self, t, which, **params):
        check_slide(self.name, t.ndim, params, [k for k in params if k != "padding"])
        if which.shape != _counts(t.shape, **params) or not dtypes.is_integer(which.dtype):
            raise errors.ShapeError(f"{self.name}: {which} are not positions in the windows of {t}.")
        return ShapedArray(which.shape, t.dtype)

    def lower(self, t, which, **params):
        if not t.aval.ndim:  # the only window is the element
            return t
        if not t.aval.size:  # windows are of padding
            return full(which.aval.shape, 0, t.aval.dtype)
        index, disjoint = _indices(t.aval.shape, which, **params)
        return gather(
            reshape(t, (t.aval.size,)),
            index,
            GatherDimensionNumbers((), (0,), (0,)),
            (1,),
            unique_indices=disjoint,
            mode=GatherScatterMode.FILL_OR_DROP,
            fill_value=0,
        )

    def transpose(self, ct, t, which, **params):
        t.add(window_place_p.bind(ct, which, shape=t.aval.shape, **params))


class _Place(_OfPositions):
    """The transpose: each window's ``ct`` added to its element at position ``which``."""

    name = "window_place"

    def abstract(self, ct, which, *, shape, **params):
        check_slide(self.name, len(shape), params, [k for k in params if k != "padding"])
        if not ct.shape == which.shape == _counts(shape, **params) or not dtypes.is_integer(which.dtype):
            raise errors.ShapeError(f"{self.name}: {ct} at {which} are not of the windows of {shape}.")
        return ShapedArray(shape, ct.dtype)

    def lower(self, ct, which, *, shape, **params):
        if not shape:
            return ct
        if not math.prod(shape):
            return full(shape, 0, ct.aval.dtype)
        index, disjoint = _indices(shape, which, **params)
        zeros = full((math.prod(shape),), 0, ct.aval.dtype)
        numbers = ScatterDimensionNumbers((), (0,), (0,))
        summed = scatter_add(
            zeros, index, ct, numbers, unique_indices=disjoint, mode=GatherScatterMode.FILL_OR_DROP
        )
        return reshape(summed, shape)

    def transpose(self, ct, x, which, *, shape, **params):
        x.add(window_pick_p.bind(ct, which, **params))


def _moving(*, window_dimensions, window_strides, padding, base_dilation, window_dilation) -> list[int]:
    """The axes along which windows are more than elements."""
    slides = zip(window_dimensions, window_strides, padding, base_dilation, strict=True)
    return [d for d, (w, s, p, holes) in enumerate(slides) if (w, s, tuple(p), holes) != (1, 1, (0, 0), 1)]


reduce_window_sum_p = _Sum()
window_argmax_p = _Position("window_argmax", np.greater, largest=True)
window_argmin_p = _Position("window_argmin", np.less, largest=False)
reduce_window_max_p = _Extremum("reduce_window_max", np.maximum, window_argmax_p, largest=True)
reduce_window_min_p = _Extremum("reduce_window_min", np.minimum, window_argmin_p, largest=False)
window_pick_p, window_place_p = _Pick(), _Place()


# -- in NumPy --------------------------------------------------------------------------------------


def _counts(
    shape: Ints, *, window_dimensions, window_strides, padding, base_dilation, window_dilation
) -> Ints:
    """The number of windows along each axis."""
    slides = zip(
        shape, window_dimensions, window_strides, padding, base_dilation, window_dilation, strict=True
    )
    return tuple([count(*slide) for slide in slides])


def _along(x: np.ndarray, axis: int, start: int, n: int, step: int) -> np.ndarray:
    """``n`` elements along an axis, every ``step``-th."""
    return x[(slice(None),) * axis + (slice(start, start + (n - 1) * step + 1, step),)]


def _padded_along(x: np.ndarray, axis: int, pad: tuple[int, int], dilation: int, fill: Any) -> np.ndarray:
    rest = x.ndim - axis - 1
    pads: Pads = ((0, 0),) * axis + (pad,) + ((0, 0),) * rest
    return padded(x, pads, (1,) * axis + (dilation,) + (1,) * rest, fill)


def _along_axes(
    x: np.ndarray, ufunc: np.ufunc, identity: Any, *, window_dimensions, window_strides, padding, base_dilation,
    window_dilation
) -> np.ndarray:  # fmt: skip
    """The reduction of each window, axis by axis."""
    out = x
    slides = zip(window_dimensions, window_strides, padding, base_dilation, window_dilation, strict=True)
    for axis, (window, stride, pad, holes, spacing) in enumerate(slides):
        if window == stride == holes == 1 and pad == (0, 0):
            continue
        m = count(out.shape[axis], window, stride, pad, holes, spacing)
        if not m:
            shape = list(out.shape)
            shape[axis] = 0
            out = np.empty(shape, x.dtype)
            continue
        source = _padded_along(out, axis, pad, holes, identity)
        if m < window:  # few windows: reduce each separately
            out = np.empty(source.shape[:axis] + (m,) + source.shape[axis + 1 :], x.dtype)
            for i in range(m):
                line = _along(source, axis, i * stride, window, spacing)
                ufunc.reduce(line, axis, out=_along(out, axis, i, 1, 1), keepdims=True)
            continue
        out = np.array(_along(source, axis, 0, m, stride))
        for k in range(1, window):
            ufunc(out, _along(source, axis, k * spacing, m, stride), out=out)
    return np.array(x) if out is x else out


def _positions(
    x: np.ndarray, beats: np.ufunc, identity: Any, *, window_dimensions, window_strides, padding, base_dilation,
    window_dilation
) -> np.ndarray:  # fmt: skip
    """Position of the first extremum in each window, from the innermost axis outwards."""
    nans = dtypes.is_floating(x.dtype)
    best, at = x, np.zeros(x.shape, np.int32)
    inside = 1
    slides = list(
        zip(window_dimensions, window_strides, padding, base_dilation, window_dilation, strict=True)
    )
    for axis in reversed(range(x.ndim)):
        window, stride, pad, holes, spacing = slides[axis]
        m = count(best.shape[axis], window, stride, pad, holes, spacing)
        if not m:
            return np.zeros(
                _counts(x.shape, window_dimensions=window_dimensions, window_strides=window_strides,
                        padding=padding, base_dilation=base_dilation, window_dilation=window_dilation),
                np.int32,
            )  # fmt: skip
        values = _padded_along(best, axis, pad, holes, identity)
        places = _padded_along(at, axis, pad, holes, 0)
        best = np.array(_along(values, axis, 0, m, stride))
        at = np.array(_along(places, axis, 0, m, stride))
        for k in range(1, window):
            value = _along(values, axis, k * spacing, m, stride)
            wins = beats(value, best)
            if nans:
                wins |= np.isnan(value) & ~np.isnan(best)
            np.copyto(best, value, where=wins)
            np.copyto(at, _along(places, axis, k * spacing, m, stride) + np.int32(k * inside), where=wins)
        inside *= window
    return at


# -- positions in the operand ---------------------------------------------------------------------


def _indices(
    shape: Ints, which: Any, *, window_dimensions, window_strides, padding, base_dilation, window_dilation
) -> tuple[Any, bool]:
    """Flat positions (..., 1) of one element of each window, and whether all differ.

    -1 outside of the operand, whose shape is given.
    """
    counts, size = which.aval.shape, math.prod(shape)
    dtype = dtypes.int32 if size <= np.iinfo(np.int32).max else dtypes.int64
    which = convert(which, dtype)
    flat: Any = None
    valid: Any = None
    disjoint = True  # windows do not overlap
    inside, stride = math.prod(window_dimensions), size
    slides = zip(window_dimensions, window_strides, padding, base_dilation, window_dilation, strict=True)
    for axis, (window, step, (low, high), holes, spacing) in enumerate(slides):
        disjoint &= step > (window - 1) * spacing
        inside //= window
        stride //= max(shape[axis], 1)
        position = mul(iota(dtype, counts, axis), step)
        if window > 1:
            position = add(position, mul(rem(div(which, inside), window), spacing))
        position = sub(position, low)
        if low > 0 or high > 0 or holes > 1:
            there = logical_and(ge(position, 0), lt(position, (shape[axis] - 1) * holes + 1))
            if holes > 1:
                there = logical_and(there, eq(rem(position, holes), 0))
                position = div(position, holes)
            valid = there if valid is None else logical_and(valid, there)
        position = mul(position, stride)
        flat = position if flat is None else add(flat, position)
    if valid is not None:
        flat = select(valid, flat, -1)
    return reshape(flat, (*counts, 1)), disjoint
