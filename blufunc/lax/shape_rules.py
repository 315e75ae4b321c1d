"""Shapes of convolutions and windows, and names of types of arguments.

Face: part of ``blufunc.lax``, without operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.axes import ints
from blufunc.core.ops.convolution import ConvDimensionNumbers, conv_dimension_numbers
from blufunc.core.ops.dot import DotAlgorithmPreset, Precision
from blufunc.core.ops.sliding import count, padtype_to_pads, read_factors, read_pads

Ints = tuple[int, ...]

DotDimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
ConvGeneralDilatedDimensionNumbers = tuple[str, str, str] | ConvDimensionNumbers | None
PrecisionLike = None | str | Precision | tuple[str, str] | tuple[Precision, Precision] | DotAlgorithmPreset


def conv_general_permutations(dimension_numbers: Any) -> tuple[Ints, Ints, Ints]:
    """The axes of operand, kernel and result that are batch, features and spatial.

    Args:
      dimension_numbers: three strings, as for ``conv_dimension_numbers``.
    """
    if not isinstance(dimension_numbers, (tuple, list)) or [type(s) for s in dimension_numbers] != [str] * 3:
        raise errors.ArgumentError(
            f"dimension_numbers are three strings, for lhs, rhs and result, not {dimension_numbers!r:.60}.",
            where=source.here(),
            fix="give three strings, as ('NHWC', 'HWIO', 'NHWC')",
        )
    sizes = (1,) * len(dimension_numbers[1])
    d = conv_dimension_numbers(sizes, sizes, dimension_numbers)
    return d.lhs_spec, d.rhs_spec, d.out_spec


def conv_shape_tuple(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    strides: Sequence[int],
    pads: Any,
    batch_group_count: int = 1,
) -> Ints:
    """The shape of a convolution with axes (batch, features, ...) and (out, in, ...)."""
    lhs, rhs = (
        ints(lhs_shape, "conv_shape_tuple", "lhs_shape"),
        ints(rhs_shape, "conv_shape_tuple", "rhs_shape"),
    )
    steps = ints(strides, "conv_shape_tuple", "strides")
    pairs = tuple(padtype_to_pads(lhs[2:], rhs[2:], steps, pads)) if isinstance(pads, str) else None
    pairs = read_pads(pads, "conv_shape_tuple") if pairs is None else pairs
    if not len(lhs) - 2 == len(rhs) - 2 == len(steps) == len(pairs):
        raise errors.ShapeError(
            f"conv_shape_tuple: shapes {lhs} and {rhs}, strides {steps} and padding {pairs}.",
            where=source.here(),
            fix="give a size, a stride and a pair of padding for each spatial axis",
        )
    if lhs[0] % batch_group_count:
        raise errors.ShapeError(
            f"conv_shape_tuple: a batch of {lhs[0]} in {batch_group_count} groups.", where=source.here()
        )
    windows = [count(n, w, s, p, 1, 1) for n, w, s, p in zip(lhs[2:], rhs[2:], steps, pairs, strict=True)]
    return (lhs[0] // batch_group_count, rhs[0], *windows)


def conv_general_shape_tuple(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: Any,
    dimension_numbers: Any,
) -> Ints:
    """The shape of a convolution with axes in the order of ``dimension_numbers``."""
    lhs, rhs, out = conv_general_permutations(dimension_numbers)
    shapes = _ordered(lhs_shape, lhs), _ordered(rhs_shape, rhs)
    found = conv_shape_tuple(*shapes, window_strides, padding)
    return _placed(found, out)


def conv_transpose_shape_tuple(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: Any,
    dimension_numbers: Any,
) -> Ints:
    """The shape of a transposed convolution.

    Explicit padding is that of the dilated operand.
    """
    lhs, rhs, out = conv_general_permutations(dimension_numbers)
    (batch, _, *sizes), (features, _, *windows) = _ordered(lhs_shape, lhs), _ordered(rhs_shape, rhs)
    steps = ints(window_strides, "conv_transpose_shape_tuple", "window_strides")
    if isinstance(padding, str):
        # as conv_transpose pads: VALID covers each window whole, SAME gives size times stride
        same = padding.upper() == "SAME"
        spatial = [
            n * s if same else (n - 1) * s + max(w, s) for n, w, s in zip(sizes, windows, steps, strict=True)
        ]
    else:
        pairs = read_pads(padding, "conv_transpose_shape_tuple")
        spatial = [count(n, w, 1, p, s, 1) for n, w, s, p in zip(sizes, windows, steps, pairs, strict=True)]
    return _placed((batch, features, *spatial), out)


def _ordered(shape: Sequence[int], axes: Ints) -> Ints:
    sizes = ints(shape, "the shape of a convolution", "a shape")
    if len(sizes) != len(axes):
        raise errors.ShapeError(
            f"a shape {sizes} for the {len(axes)} axes of dimension_numbers.",
            where=source.here(),
            fix="give one letter for each axis",
        )
    return tuple([sizes[i] for i in axes])


def _placed(sizes: Sequence[int], axes: Ints) -> Ints:
    return tuple([int(sizes[axes.index(i)]) for i in range(len(axes))])


def reduce_window_shape_tuple(
    operand_shape: Sequence[int],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Any,
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> Ints:
    """The shape of ``reduce_window`` with these pairs of padding."""
    name = "reduce_window_shape_tuple"
    shape = ints(operand_shape, name, "operand_shape")
    window, steps = (
        ints(window_dimensions, name, "window_dimensions"),
        ints(window_strides, name, "window_strides"),
    )
    base = read_factors(base_dilation, len(shape), name, "base_dilation")
    spread = read_factors(window_dilation, len(shape), name, "window_dilation")
    sizes = zip(shape, window, steps, read_pads(padding, name), base, spread, strict=True)
    return tuple([count(*each) for each in sizes])


def shape_as_value(shape: Sequence[int]) -> np.ndarray:
    """A shape as an array of int32."""
    return np.asarray(ints(shape, "shape_as_value", "shape"), np.int32)
