"""Variants of convolution, over ``conv_general_dilated``.

Face: part of ``blufunc.lax``. Each function computes parameters, and binds the one primitive.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import from_numpy, lift
from blufunc.core.ir import source
from blufunc.core.ir.axes import ints
from blufunc.core.ir.trace import Array
from blufunc.core.ops.convolution import (
    conv_general_dilated,
    layout_of,
)
from blufunc.core.ops.dot import dot_general
from blufunc.core.ops.elementwise import convert
from blufunc.core.ops.shape import rev
from blufunc.core.ops.sliding import dilated, read_factors, read_pads
from blufunc.core.primitives.linear_ops import broadcast_in_dim, reshape, transpose

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike, DTypeLike


def conv(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Any,
    padding: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """``conv_general_dilated`` with axes (batch, features, ...) and (out, in, ...)."""
    return conv_general_dilated(
        lhs,
        rhs,
        window_strides,
        padding,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def conv_with_general_padding(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Any,
    padding: Any,
    lhs_dilation: Any,
    rhs_dilation: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """``conv`` with dilations; None for 1."""
    return conv_general_dilated(
        lhs,
        rhs,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


_CHANNELS_LAST = {
    2: ("NC", "IO", "NC"),
    3: ("NHC", "HIO", "NHC"),
    4: ("NHWC", "HWIO", "NHWC"),
    5: ("NHWDC", "HWDIO", "NHWDC"),
}


def conv_transpose(
    lhs: ArrayLike,
    rhs: ArrayLike,
    strides: Any,
    padding: Any,
    rhs_dilation: Any = None,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    use_consistent_padding: bool = False,
) -> Array:
    """A convolution with fractional strides: the "transposed convolution".

    Args:
      lhs, rhs: as in ``conv_general_dilated``.
      strides: an int per spatial axis: the approximate factor by which the result is larger.
      padding: 'SAME' or 'VALID': the padding of the convolution that this one reverses. Or a pair of ints per
        spatial axis: the padding of the result's own windows, and with ``use_consistent_padding`` that of the
        reversed convolution too.
      rhs_dilation: an int per spatial axis: the distance between kernel elements.
      dimension_numbers: as in ``conv_general_dilated``; by default features last, up to three spatial axes.
      transpose_kernel: reverse the kernel's spatial axes and swap its two feature axes: with it, and consistent
        padding, this is the gradient of a convolution.
      precision, preferred_element_type: as in ``conv_general_dilated``.
      use_consistent_padding: see ``padding``.
    """
    name = "conv_transpose"
    lhs, rhs = lift(lhs), lift(rhs)
    ndim = lhs.aval.ndim
    if dimension_numbers is None:
        if ndim not in _CHANNELS_LAST:
            raise errors.ShapeError(
                f"conv_transpose of {lhs.aval} needs dimension_numbers: they have a default for ranks 2 to 5.",
                where=source.here(),
                fix="give dimension_numbers, as ('NHWC', 'HWIO', 'NHWC')",
            )
        dimension_numbers = _CHANNELS_LAST[ndim]
    d = layout_of(lhs.aval, rhs.aval.shape, dimension_numbers)
    spatial = d.rhs_spec[2:]
    strides = ints(strides, name, "strides")
    dilation = read_factors(rhs_dilation, len(spatial), name, "rhs_dilation")
    named = isinstance(padding, str)
    known = padding in ("SAME", "VALID")
    if len(strides) != len(spatial) or len(dilation) != len(spatial) or (named and not known):
        raise errors.ArgumentError(
            f"conv_transpose along {len(spatial)} axes: strides {strides}, rhs_dilation {dilation} and padding "
            f"{padding!r:.60} do not fit.",
            where=source.here(),
            fix="give one stride and one dilation for each spatial axis, and 'SAME', 'VALID' or pairs as padding",
        )
    pads = None if named else read_pads(padding, name)
    if named or use_consistent_padding:
        reach = [dilated(rhs.aval.shape[a], r) for a, r in zip(spatial, dilation, strict=True)]
        pads = tuple(
            [
                _reversed_padding(k, s, padding if pads is None else pad)
                for k, s, pad in zip(reach, strides, pads or strides, strict=False)
            ]
        )
    if transpose_kernel:
        out_axis, in_axis = d.rhs_spec[:2]
        order = list(range(ndim))
        order[out_axis], order[in_axis] = in_axis, out_axis
        rhs = transpose(rev(rhs, spatial), tuple(order))
    return conv_general_dilated(
        lhs,
        rhs,
        (1,) * len(spatial),
        pads,
        strides,
        dilation,
        d,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def _reversed_padding(k: int, stride: int, padding: Any) -> tuple[int, int]:
    """Padding that reverses a convolution by ``k`` elements, padded by ``padding``."""
    if padding == "VALID":
        return k - 1, stride - 1 + max(k - stride, 0)
    if padding == "SAME":
        total = k + stride - 2
        low = k - 1 if stride > k - 1 else -(-total // 2)
        return low, total - low
    low, high = padding
    return k - 1 - low, k - 1 - high


def conv_general_dilated_patches(
    lhs: ArrayLike,
    filter_shape: Any,
    window_strides: Any,
    padding: Any,
    lhs_dilation: Any = None,
    rhs_dilation: Any = None,
    dimension_numbers: Any = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """The windows that a convolution reads, unfolded along the feature axis (im2col).

    Args:
      lhs: as in ``conv_general_dilated``.
      filter_shape: the sizes of a window along the spatial axes.
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, precision, preferred_element_type: as in
        ``conv_general_dilated``.
    Returns:
      the result of a convolution whose output features are the elements of the window: for each input feature, in
      row-major order.
    """
    lhs = lift(lhs)
    sizes = ints(filter_shape, "conv_general_dilated_patches", "filter_shape")
    d = layout_of(lhs.aval, (1, 1, *sizes), dimension_numbers)
    features, n = lhs.aval.shape[d.lhs_spec[1]], math.prod(sizes)
    if any(s < 1 for s in sizes):
        raise errors.ValueRangeError(
            f"conv_general_dilated_patches: windows of {sizes} are empty.",
            where=source.here(),
            fix="give sizes of 1 or more",
        )
    # one kernel per window element, 1 there and 0 elsewhere
    one_hot = convert(from_numpy(np.eye(n, dtype=np.float32).reshape(n, *sizes)), lhs.dtype)
    kernel = broadcast_in_dim(one_hot, (features, n, *sizes), tuple(range(1, 2 + len(sizes))))
    kernel = reshape(kernel, (features * n, 1, *sizes))
    kernel = transpose(kernel, tuple(int(i) for i in np.argsort(d.rhs_spec)))
    return conv_general_dilated(
        lhs,
        kernel,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        d,
        feature_group_count=features,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def conv_general_dilated_local(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Any,
    padding: Any,
    filter_shape: Any,
    lhs_dilation: Any = None,
    rhs_dilation: Any = None,
    dimension_numbers: Any = None,
    precision: Any = None,
) -> Array:
    """A convolution with a separate kernel per position: a locally connected layer.

    Args:
      rhs: the kernels; its feature axes are output features, and input features times window elements in row-major
        order (as ``conv_general_dilated_patches`` has them). Its spatial axes hold one kernel per result position.
      filter_shape: the sizes of a window along the spatial axes.
      lhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, precision: as in
        ``conv_general_dilated``.
    """
    lhs, rhs = lift(lhs), lift(rhs)
    d = layout_of(lhs.aval, rhs.aval.shape, dimension_numbers)
    first = precision[0] if isinstance(precision, (tuple, list)) and precision else precision
    patches = conv_general_dilated_patches(
        lhs, filter_shape, window_strides, padding, lhs_dilation, rhs_dilation, d, first
    )
    numbers = (((d.out_spec[1],), (d.rhs_spec[1],)), (d.out_spec[2:], d.rhs_spec[2:]))
    out = dot_general(patches, rhs, numbers, precision)  # spatial axes, batch, output features
    return transpose(out, tuple(int(i) for i in np.argsort(d.out_spec[2:] + d.out_spec[:2])))
