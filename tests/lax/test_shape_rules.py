"""Shapes of convolutions and windows, against those of the operations."""

import itertools

import numpy as np
import pytest

from blufunc import errors, lax

NHWC = ("NHWC", "HWIO", "NHWC")
SIZES = [
    ((2, 8, 9, 3), (3, 2, 3, 4), (2, 3)),
    ((1, 5, 5, 2), (1, 4, 2, 3), (1, 2)),
    ((1, 7, 6, 2), (2, 2, 2, 1), (3, 3)),
]


@pytest.mark.parametrize(
    "sizes, padding", list(itertools.product(SIZES, ["SAME", "VALID", [(1, 0), (2, 1)]]))
)
def test_convolutions(sizes, padding):
    lhs, rhs, strides = sizes
    x, w = np.ones(lhs, "float32"), np.ones(rhs, "float32")
    want = lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=NHWC).shape
    assert lax.conv_general_shape_tuple(lhs, rhs, strides, padding, NHWC) == want
    order = lambda shape, axes: tuple(shape[i] for i in axes)
    of_lhs, of_rhs, of_out = lax.conv_general_permutations(NHWC)
    found = lax.conv_shape_tuple(order(lhs, of_lhs), order(rhs, of_rhs), strides, padding)
    assert found == order(want, of_out)
    swapped = (*rhs[:2], rhs[3], rhs[2])  # JAX names the features of the kernel the other way round
    want = lax.conv_transpose(x, w, strides, padding, dimension_numbers=NHWC).shape
    assert lax.conv_transpose_shape_tuple(lhs, swapped, strides, padding, NHWC) == (*want[:3], rhs[2])


def test_windows():
    x = np.ones((8, 9), "float32")
    for pads, base, spread in itertools.product([((1, 1), (0, 0))], [None, (2, 1)], [None, (2, 3)]):
        want = lax.reduce_window(x, 0.0, lax.add, (3, 2), (2, 1), pads, base, spread).shape
        assert lax.reduce_window_shape_tuple(x.shape, (3, 2), (2, 1), pads, base, spread) == want
    np.testing.assert_array_equal(lax.shape_as_value((2, 3)), [2, 3])


def test_errors():
    with pytest.raises(errors.ShapeError, match="spatial axis"):
        lax.conv_shape_tuple((2, 3, 8), (4, 3, 3), (1, 1), [(0, 0)])
    with pytest.raises(errors.ShapeError, match="groups"):
        lax.conv_shape_tuple((3, 3, 8), (4, 3, 3), (1,), "SAME", batch_group_count=2)
    assert lax.conv_shape_tuple((4, 3, 8), (4, 3, 3), (1,), "SAME", batch_group_count=2) == (2, 4, 8)
