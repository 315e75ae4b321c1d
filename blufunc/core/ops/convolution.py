"""``conv_general_dilated``: convolutions over any number of spatial axes.

Core operations, above ``sliding``, which computes window positions. The NumPy definition is in
``correlation``. Transposes are convolutions too, with strides and dilations swapped. A batch axis joins the
batch, the features, or the feature groups, so that derivatives and ``vmap`` need no other primitive.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import ints, static_int
from blufunc.core.ops import correlation
from blufunc.core.ops.dot import Contraction, check_precision, compute_dtype, plain, result_dtype, rounded
from blufunc.core.ops.elementwise import convert
from blufunc.core.ops.shape import rev
from blufunc.core.ops.sliding import (
    Ints,
    Pads,
    check_slide,
    count,
    dilated,
    padtype_to_pads,
    read_factors,
    read_pads,
    transposed_pad,
)
from blufunc.core.primitives.kinds import check_types
from blufunc.core.primitives.linear_ops import full, move_dim, reshape
from blufunc.core.primitives.sharding import Factoring
from blufunc.core.primitives.tangents import is_linear

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike
    from blufunc.core.ir.trace import Array


@dataclass(frozen=True, slots=True)
class ConvDimensionNumbers:
    """Axis order of a convolution's operands and result.

    Attributes:
      lhs_spec: the axes of the operand that are batch, features, and then each spatial axis.
      rhs_spec: the axes of the kernel that are output features, input features, and then each spatial axis.
      out_spec: the axes of the result that are batch, features, and then each spatial axis.
    """

    lhs_spec: Ints
    rhs_spec: Ints
    out_spec: Ints

    def __str__(self) -> str:
        return f"({self.lhs_spec}, {self.rhs_spec}, {self.out_spec})"


class _ConvGeneralDilated(Contraction):
    """Sliding-window dot products with a kernel; see ``conv_general_dilated``."""

    name = "conv_general_dilated"

    def flops(self, lhs, rhs, **params) -> int:
        # besides output features, the axes of a kernel are the terms of one result element
        terms = rhs.size // max(1, rhs.shape[params["dimension_numbers"].rhs_spec[0]])
        return 2 * terms * self.abstract(lhs, rhs, **params).size * (4 if dtypes.is_complex(lhs.dtype) else 1)

    def shard(self, avals, outs, **params):
        b = Factoring()
        numbers = params["dimension_numbers"]
        dims: list[list] = [[()] * a.ndim for a in (*avals, *outs)]
        lhs, rhs, out = dims
        (n, c), (o, i), (on, oc) = (s[:2] for s in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
        if params["batch_group_count"] == 1:
            lhs[n] = out[on] = b.new(avals[0].shape[n])
            if params["feature_group_count"] == 1:
                rhs[o] = out[oc] = b.new(avals[1].shape[o])
                lhs[c] = rhs[i] = b.new(avals[0].shape[c], "sum")
        return b.rule([lhs, rhs], [out])

    def impl(self, lhs, rhs, *, dimension_numbers, precision, preferred_element_type, **slide):
        out = preferred_element_type or lhs.dtype
        compute = compute_dtype(lhs.dtype, out)
        d = dimension_numbers
        result = correlation.correlate(
            np.asarray(lhs, compute), np.asarray(rhs, compute), d.lhs_spec, d.rhs_spec, d.out_spec, **slide
        )
        return rounded(result, out)

    def abstract(self, lhs, rhs, *, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
                 feature_group_count, batch_group_count, precision, preferred_element_type):  # fmt: skip
        d = dimension_numbers
        check_types(self.name, "number", lhs, rhs)
        check_layout(d, lhs.shape, rhs.shape)
        fields = {
            "window_strides": window_strides,
            "padding": padding,
            "lhs_dilation": lhs_dilation,
            "rhs_dilation": rhs_dilation,
        }
        check_slide(self.name, lhs.ndim - 2, fields, ("window_strides", "lhs_dilation", "rhs_dilation"))
        batch, features, *sizes = [lhs.shape[a] for a in d.lhs_spec]
        out_features, in_features, *kernel = [rhs.shape[a] for a in d.rhs_spec]
        _check_groups(
            lhs, rhs, batch, features, out_features, in_features, feature_group_count, batch_group_count
        )
        dtype = result_dtype(self.name, lhs.dtype, rhs.dtype, preferred_element_type)
        check_precision(self.name, precision, _PRECISIONS)
        slides = zip(sizes, kernel, window_strides, padding, lhs_dilation, rhs_dilation, strict=True)
        shape = [0] * lhs.ndim
        for axis, n in zip(
            d.out_spec,
            (batch // batch_group_count, out_features, *[count(*slide) for slide in slides]),
            strict=True,
        ):
            shape[axis] = n
        return ShapedArray(tuple(shape), dtype)

    def transpose(self, ct, lhs, rhs, **params):
        if not ct.aval.size or not lhs.aval.size or not rhs.aval.size:
            return
        if is_linear(lhs):
            lhs.add(_lhs_cotangent(ct, rhs, lhs.aval, **params))
        if is_linear(rhs):
            rhs.add(_rhs_cotangent(ct, lhs, rhs.aval, **params))

    def batch(self, axis, args, dims, *, dimension_numbers, feature_group_count, batch_group_count, **params):
        (lhs, rhs), (dl, dr) = args, dims
        d, b = dimension_numbers, axis.size
        features, batches = feature_group_count, batch_group_count
        if not b:  # there are no groups of no features
            avals = [x.aval if at is None else _example(x.aval, at) for x, at in zip(args, dims, strict=True)]
            out = self.abstract(*avals, dimension_numbers=d, feature_group_count=features,
                                batch_group_count=batches, **params)  # fmt: skip
            return full((0, *out.shape), 0, out.dtype), 0
        # position of the batch axis, and the groups of that axis that stay outside of it
        to, outer = 1, 1
        if dl is not None and dr is not None:  # every example has its own kernel: one more group dimension
            if batches > 1:
                lhs, batches = _fold(lhs, dl, d.lhs_spec[0], 1), batches * b
            else:
                lhs, features = _fold(lhs, dl, d.lhs_spec[1], 1), features * b
            rhs = _fold(rhs, dr, d.rhs_spec[0], 1)
        elif dl is not None:
            lhs, to = _fold(lhs, dl, d.lhs_spec[0], batches), 0
        else:
            outer = features * batches
            rhs = _fold(rhs, dr, d.rhs_spec[0], outer)
        out = self.bind(
            lhs,
            rhs,
            dimension_numbers=d,
            feature_group_count=features,
            batch_group_count=batches,
            **params,
        )
        return _unfold(out, d.out_spec[to], outer, b), 0


conv_general_dilated_p = _ConvGeneralDilated()


# -- rules -----------------------------------------------------------------------------------------


def _example(aval: ShapedArray, axis: int) -> ShapedArray:
    """The type of one element along ``axis``."""
    return ShapedArray(aval.shape[:axis] + aval.shape[axis + 1 :], aval.dtype)


def _lhs_cotangent(ct, rhs, aval, *, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
                   feature_group_count, batch_group_count, precision, preferred_element_type):  # fmt: skip
    """The cotangent convolved with the reversed kernel, feature axes swapped."""
    d = dimension_numbers
    groups = feature_group_count * batch_group_count
    out_axis, in_axis, *spatial = d.rhs_spec
    pads = tuple(
        [
            transposed_pad(aval.shape[x], rhs.aval.shape[k], s, p, ld, rd, ct.aval.shape[o])
            for x, k, o, s, p, ld, rd in zip(
                d.lhs_spec[2:], spatial, d.out_spec[2:], window_strides, padding, lhs_dilation, rhs_dilation,
                strict=True,
            )
        ]
    )  # fmt: skip
    kernel = rev(_move_groups(rhs, groups, out_axis, in_axis), spatial)
    out = conv_general_dilated_p.bind(
        ct,
        convert(kernel, ct.dtype),
        window_strides=lhs_dilation,
        padding=pads,
        lhs_dilation=window_strides,
        rhs_dilation=rhs_dilation,
        dimension_numbers=ConvDimensionNumbers(d.out_spec, (in_axis, out_axis, *spatial), d.lhs_spec),
        feature_group_count=groups,
        batch_group_count=1,
        precision=precision,
        preferred_element_type=None if ct.dtype == aval.dtype else aval.dtype,
    )
    # batch groups come out as feature groups
    return _move_groups(out, batch_group_count, d.lhs_spec[1], d.lhs_spec[0])


def _rhs_cotangent(ct, lhs, aval, *, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
                   feature_group_count, batch_group_count, precision, preferred_element_type):  # fmt: skip
    """The lhs convolved with the cotangent; batch/features and strides/dilations swap."""
    d = dimension_numbers
    pads = []
    for x, k, o, s, (low, _), ld, rd in zip(
        d.lhs_spec[2:], d.rhs_spec[2:], d.out_spec[2:], window_strides, padding, lhs_dilation, rhs_dilation, strict=True
    ):  # fmt: skip
        # one window, of the size of the result, per kernel element
        reach = dilated(aval.shape[k], rd) + dilated(ct.aval.shape[o], s) - 1
        pads.append((low, reach - dilated(lhs.aval.shape[x], ld) - low))
    return conv_general_dilated_p.bind(
        convert(lhs, ct.dtype),
        ct,
        window_strides=rhs_dilation,
        padding=tuple(pads),
        lhs_dilation=lhs_dilation,
        rhs_dilation=window_strides,
        dimension_numbers=ConvDimensionNumbers(
            _swapped(d.lhs_spec), _swapped(d.out_spec), _swapped(d.rhs_spec)
        ),
        feature_group_count=batch_group_count,
        batch_group_count=feature_group_count,
        precision=precision,
        preferred_element_type=None if ct.dtype == aval.dtype else aval.dtype,
    )


def _swapped(spec: Ints) -> Ints:
    """A layout with its first two axes swapped."""
    return (spec[1], spec[0], *spec[2:])


def _split(x: Any, axis: int, sizes: Ints) -> Any:
    """``x`` with one axis split into several."""
    return reshape(x, x.aval.shape[:axis] + sizes + x.aval.shape[axis + 1 :])


def _merge(x: Any, axis: int, n: int) -> Any:
    """``x`` with ``n`` adjacent axes from ``axis`` on merged into one."""
    shape = x.aval.shape
    size = functools.reduce(lambda a, b: a * b, shape[axis : axis + n])
    return reshape(x, shape[:axis] + (size,) + shape[axis + n :])


def _move_groups(x: Any, groups: int, src: int, dst: int) -> Any:
    """Move the groups of axis ``src`` to axis ``dst``, as the outer part of both."""
    if groups == 1:
        return x
    x = _split(x, src, (groups, x.aval.shape[src] // groups))
    return _merge(move_dim(x, src, dst), dst, 2)


def _fold(x: Any, d: int, axis: int, groups: int) -> Any:
    """Merge batch axis ``d`` into ``axis`` (counted without it), within each group."""
    x = move_dim(x, d, axis)  # precedes the axis
    if groups == 1:
        return _merge(x, axis, 2)
    x = _split(x, axis + 1, (groups, x.aval.shape[axis + 1] // groups))
    return _merge(move_dim(x, axis, axis + 1), axis, 3)


def _unfold(x: Any, axis: int, groups: int, size: int) -> Any:
    """The inverse of ``_fold``, with the batch axis in front."""
    x = _split(x, axis, (groups, size, x.aval.shape[axis] // (groups * size)))
    return _merge(move_dim(x, axis + 1, 0), axis + 1, 2)


# -- checks ----------------------------------------------------------------------------------------

_PRECISIONS = (None, "default", "high", "highest", "fastest")


def check_layout(d: ConvDimensionNumbers, lhs_shape: Ints, rhs_shape: Ints) -> None:
    """Raise ShapeError unless ranks agree and the dimension numbers name all axes."""
    ndim = len(lhs_shape)
    if len(rhs_shape) != ndim or ndim < 2:
        raise errors.ShapeError(
            f"a convolution takes operands of one rank, of 2 or more, not of shapes {lhs_shape} and {rhs_shape}.",
            where=source.here(),
            fix="give both two axes for batch and features, and the same spatial axes",
        )
    for spec in (d.lhs_spec, d.rhs_spec, d.out_spec):
        if sorted(spec) != list(range(ndim)):
            raise errors.ShapeError(
                f"each part of the dimension numbers {d} of a convolution must name the {ndim} axes once.",
                where=source.here(),
                fix="use lax.conv_dimension_numbers(lhs.shape, rhs.shape, ('NHWC', 'HWIO', 'NHWC'))",
            )


def layout_of(lhs: ShapedArray, rhs_shape: Ints, dimension_numbers: Any) -> ConvDimensionNumbers:
    """Checked ``conv_dimension_numbers``."""
    d = conv_dimension_numbers(lhs.shape, rhs_shape, dimension_numbers)
    check_layout(d, lhs.shape, rhs_shape)
    return d


def _check_groups(lhs, rhs, batch, features, out_features, in_features, feature_groups, batch_groups) -> None:
    problem = None
    if feature_groups < 1 or batch_groups < 1:
        problem = (
            f"feature_group_count {feature_groups} and batch_group_count {batch_groups} must be at least 1"
        )
    elif feature_groups > 1 and batch_groups > 1:
        problem = "features and batch cannot both be in groups"
    elif in_features * feature_groups != features:
        groups = f" in {feature_groups} groups" if feature_groups > 1 else ""
        problem = f"the lhs has {features} features{groups}, the kernel takes {in_features}"
    elif out_features % feature_groups or out_features % batch_groups:
        problem = (
            f"the {out_features} output features do not divide into {feature_groups * batch_groups} groups"
        )
    elif batch % batch_groups:
        problem = f"the batch of {batch} does not divide into {batch_groups} groups"
    if problem:
        raise errors.ShapeError(
            f"conv_general_dilated of {lhs} with {rhs}: {problem}.",
            fix="check the order of the axes: dimension_numbers=('NHWC', 'HWIO', 'NHWC'), for example",
        )


# -- functions -------------------------------------------------------------------------------------


def conv_dimension_numbers(lhs_shape: Any, rhs_shape: Any, dimension_numbers: Any) -> ConvDimensionNumbers:
    """Dimension numbers from the letters of each axis.

    Args:
      lhs_shape, rhs_shape: the shapes of operand and kernel.
      dimension_numbers: three strings, for operand, kernel and result: ``("NHWC", "HWIO", "NHWC")``. N is the batch, C
        the features, O and I output and input features of the kernel; all other letters are spatial axes, in the
        order in which the kernel has them. None for batch, features, and then the spatial axes (the kernel: output
        features, input features). Dimension numbers are returned as they are.
    Raises:
      ArgumentError, ShapeError: there are not three strings, or not those letters.
    """
    if isinstance(dimension_numbers, ConvDimensionNumbers):
        return dimension_numbers
    lhs_shape, rhs_shape = (
        ints(s, "conv_dimension_numbers", what)
        for s, what in ((lhs_shape, "lhs_shape"), (rhs_shape, "rhs_shape"))
    )
    ndim = len(lhs_shape)
    if len(rhs_shape) != ndim:
        raise errors.ShapeError(
            f"a convolution takes operands of one rank, not of shapes {lhs_shape} and {rhs_shape}.",
            where=source.here(),
            fix="give both two axes for batch and features, and the same spatial axes",
        )
    if dimension_numbers is None:
        order = tuple(range(ndim))
        return ConvDimensionNumbers(order, order, order)
    fix = "give three strings, as ('NHWC', 'HWIO', 'NHWC')"
    if (
        not isinstance(dimension_numbers, (tuple, list))
        or len(dimension_numbers) != 3
        or not all(isinstance(s, str) for s in dimension_numbers)
    ):
        raise errors.ArgumentError(
            f"dimension_numbers are three strings, for lhs, rhs and result, not {dimension_numbers!r:.60}.",
            where=source.here(),
            fix=fix,
        )
    lhs, rhs, out = dimension_numbers
    spatial = [c for c in rhs if c not in "OI"]
    for letters, pair in ((lhs, "NC"), (rhs, "OI"), (out, "NC")):
        if len(letters) != ndim or set(letters) != {*pair, *spatial} or len({*pair, *spatial}) != ndim:
            raise errors.ShapeError(
                f"dimension_numbers {tuple(dimension_numbers)} do not fit operands of rank {ndim}: {letters!r} must "
                f"have each of {pair[0]}, {pair[1]} and the spatial axes of the kernel, {''.join(spatial)!r}, once.",
                where=source.here(),
                fix=fix,
            )
    return ConvDimensionNumbers(
        tuple(lhs.index(c) for c in ("N", "C", *spatial)),
        tuple(rhs.index(c) for c in ("O", "I", *spatial)),
        tuple(out.index(c) for c in ("N", "C", *spatial)),
    )


def conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Any,
    padding: Any,
    lhs_dilation: Any = None,
    rhs_dilation: Any = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Sliding-window dot products with a kernel: convolution in neural networks.

    The kernel is not reversed. With n spatial axes, both operands have rank n + 2.

    Args:
      lhs: the operand, with a batch axis, a feature axis and n spatial axes.
      rhs: the kernel, with output features, input features and n spatial axes; of the dtype of ``lhs``.
      window_strides: n ints: distance between window starts.
      padding: 'VALID', 'SAME', 'SAME_LOWER' (see ``padtype_to_pads``), or n pairs of ints, the zeros to insert
        before and after; negative ones crop.
      lhs_dilation: n ints: put this many less one zeros between elements of the operand. A name as ``padding`` does
        not go with it.
      rhs_dilation: n ints: likewise for the kernel.
      dimension_numbers: the order of the axes: see ``conv_dimension_numbers``. By default batch, features, spatial
        axes; the kernel's are output features, input features, spatial axes.
      feature_group_count: features of the operand and output features are in this many groups; each group of
        outputs sees its group of inputs alone.
      batch_group_count: batch and output features are in this many groups, likewise.
      precision: None or 'default', 'high', 'highest', or one for each operand: how exactly devices that have a
        choice must multiply float32.
      preferred_element_type: the dtype of the result; the operands' by default. Half precisions are summed in
        float32 either way.
    Returns:
      an array with batch axis (divided by ``batch_group_count``), output features, and along each spatial axis as
      many elements as windows fit.
    Raises:
      ShapeError: ranks, features or groups do not go together.
      DtypeError: the operands have different dtypes.
    """
    name = "conv_general_dilated"
    lhs, rhs = lift(lhs), lift(rhs)
    numbers = layout_of(lhs.aval, rhs.aval.shape, dimension_numbers)
    n = lhs.aval.ndim - 2
    strides = ints(window_strides, name, "window_strides")
    lhs_dilation = read_factors(lhs_dilation, n, name, "lhs_dilation")
    rhs_dilation = read_factors(rhs_dilation, n, name, "rhs_dilation")
    if isinstance(padding, str):
        if any(f != 1 for f in lhs_dilation):
            raise errors.UnsupportedError(
                f"conv_general_dilated: padding {padding!r} has no meaning with lhs_dilation {lhs_dilation}.",
                where=source.here(),
                fix="give pairs of ints as padding, or use lax.conv_transpose",
            )
        pads = _named_pads(lhs.aval, rhs.aval, numbers, strides, rhs_dilation, padding)
    else:
        pads = read_pads(padding, name)
    dtype = None if preferred_element_type is None else dtypes.as_dtype(preferred_element_type)
    return conv_general_dilated_p.bind(
        lhs,
        rhs,
        window_strides=strides,
        padding=pads,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=numbers,
        feature_group_count=static_int(feature_group_count, name, "feature_group_count"),
        batch_group_count=static_int(batch_group_count, name, "batch_group_count"),
        precision=plain(precision),
        preferred_element_type=None if dtype == lhs.aval.dtype else dtype,
    )


def _named_pads(
    lhs: ShapedArray,
    rhs: ShapedArray,
    d: ConvDimensionNumbers,
    strides: Ints,
    rhs_dilation: Ints,
    padding: str,
) -> Pads:
    """The padding for a name."""
    n = lhs.ndim - 2
    if not len(strides) == len(rhs_dilation) == n:
        return ((0, 0),) * n  # the primitive raises for the one that does not fit
    sizes = [lhs.shape[a] for a in d.lhs_spec[2:]]
    windows = [dilated(rhs.shape[a], f) for a, f in zip(d.rhs_spec[2:], rhs_dilation, strict=True)]
    return tuple(padtype_to_pads(sizes, windows, strides, padding))
