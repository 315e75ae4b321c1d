"""Arrays as the standard's array objects; functions of shapes and values."""

import operator

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.transforms.staging.jit import jit

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
INDICES = [
    0, -1, slice(1, None), slice(None, None, -1), (0, 1), (slice(None), 2), (Ellipsis, 1), (None, 0),
    (0, None, Ellipsis),
    (slice(0, 2), slice(2, 0, -1), slice(None, None, 2)), (), Ellipsis, X > 5, (np.array([1, 0]), np.array([2, 1])),
    (0, np.array([2, 1])), (slice(None), np.array([[0], [2]])),
]  # fmt: skip
CALLS = {
    "broadcast_to": lambda n, x: n.broadcast_to(x, (5, 2, 3, 4)),
    "broadcast_arrays": lambda n, x: n.broadcast_arrays(x, x[0, :1])[1],
    "clip": lambda n, x: n.clip(x, 3, None),
    "concat": lambda n, x: n.concat([x, x], axis=None),
    "concat-axis": lambda n, x: n.concat((x, x), axis=-1),
    "cumulative_sum": lambda n, x: n.cumulative_sum(x, axis=1, include_initial=True),
    "cumulative_prod": lambda n, x: n.cumulative_prod(x, axis=0, include_initial=True),
    "diff": lambda n, x: n.diff(x, axis=1, n=2, prepend=x[:, :1], append=x[:, -1:]),
    "expand_dims": lambda n, x: n.expand_dims(x, axis=-1),
    "flip": lambda n, x: n.flip(x, axis=(0, 2)),
    "matmul": lambda n, x: n.matmul(x, n.matrix_transpose(x)),
    "meshgrid": lambda n, x: n.meshgrid(x[0, 0], x[0, 1], indexing="ij")[1],
    "moveaxis": lambda n, x: n.moveaxis(x, (0, 1), (-1, 0)),
    "permute_dims": lambda n, x: n.permute_dims(x, (2, 0, 1)),
    "repeat": lambda n, x: n.repeat(x, n.asarray([1, 0, 2]), axis=1),
    "reshape": lambda n, x: n.reshape(x, (4, -1), copy=True),
    "roll": lambda n, x: n.roll(x, (1, -2), axis=(0, 1)),
    "searchsorted": lambda n, x: n.searchsorted(x[0, 0], x[0] / 2, side="right"),
    "searchsorted-sorter": lambda n, x: n.searchsorted(-x[0, 0], x[0] - 3, sorter=n.asarray([3, 2, 1, 0])),
    "sort": lambda n, x: n.sort(x, axis=1, stable=True),
    "squeeze": lambda n, x: n.squeeze(x[:1, :, :1], axis=(0, 2)),
    "stack": lambda n, x: n.stack([x, x], axis=-1),
    "take": lambda n, x: n.take(x, n.asarray([2, 0]), axis=1),
    "take_along_axis": lambda n, x: n.take_along_axis(x, n.argsort(-x, axis=1), axis=1),
    "tensordot": lambda n, x: n.tensordot(x, x, axes=((0, 1), (0, 1))),
    "tile": lambda n, x: n.tile(x, (2, 1, 1, 3)),
    "tril": lambda n, x: n.tril(x, k=-1),
    "triu": lambda n, x: n.triu(x, k=1),
    "unstack": lambda n, x: n.unstack(x, axis=-1)[1],
    "vecdot": lambda n, x: n.vecdot(x, x, axis=1),
    "where": lambda n, x: n.where(x > 4, x, 0.0),
}


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing(index):
    got, want = bnp.asarray(X)[index], X[index]
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", CALLS)
def test_shapes_and_values(name):
    got, want = CALLS[name](bnp, bnp.asarray(X)), CALLS[name](np, X)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_attributes():
    x = bnp.asarray(X)
    assert (x.shape, x.ndim, x.size, x.dtype) == ((2, 3, 4), 3, 24, bnp.float32)
    np.testing.assert_array_equal(x.mT, np.swapaxes(X, 1, 2))
    np.testing.assert_array_equal(x[0].T, X[0].T)
    assert x.device == bnp.__array_namespace_info__().default_device()
    assert x.to_device(x.device, stream=None) is x and bnp.zeros(2, device=x.device).device == x.device
    assert x.__array_namespace__(api_version="2024.12") is bnp
    with pytest.raises(errors.ValueRangeError, match="2030"):
        x.__array_namespace__(api_version="2030.01")


def test_python_numbers():
    assert bool(bnp.asarray(0.0)) is False and int(bnp.asarray(3)) == 3 and float(bnp.asarray(2)) == 2.0
    assert complex(bnp.asarray(1j)) == 1j and operator.index(bnp.asarray(7)) == 7
    assert [10, 20, 30][bnp.asarray(1)] == 20
    with pytest.raises(TypeError):
        operator.index(bnp.asarray(1.0))
    with pytest.raises(TypeError):
        bool(bnp.asarray([1, 2]))


def test_arrays_are_immutable_and_operators_in_place_make_new_ones():
    x = y = bnp.ones(3)
    y += 1
    assert x.tolist() == [1, 1, 1] and y.tolist() == [2, 2, 2]
    with pytest.raises(errors.ImmutableArrayError, match="at"):
        x[0] = 2


def test_dlpack():
    x = bnp.asarray(X)
    assert x.__dlpack_device__() == (1, 0)
    other = np.from_dlpack(x)
    np.testing.assert_array_equal(other, X)
    back = bnp.from_dlpack(other, copy=None)
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back, X)
    assert bnp.from_dlpack(x) is x
    assert x.__dlpack__(stream=None, max_version=(1, 0), dl_device=(1, 0), copy=True) is not None
    assert x.__dlpack__(copy=False) is not None
    assert bnp.from_dlpack(other, copy=False).tolist() == x.tolist()
    with pytest.raises(BufferError, match="strides"):
        bnp.from_dlpack(np.ones((2, 3)).T, copy=False)
    with pytest.raises(errors.ArgumentError):
        bnp.from_dlpack(3.0)


def test_sets_of_the_standard_count_each_nan():
    x = bnp.asarray([2.0, np.nan, 1.0, 2.0, np.nan])
    values, indices, inverse, counts = bnp.unique_all(x)
    assert values.shape == (4,) and counts.tolist() == [1, 2, 1, 1] and indices.tolist()[:2] == [2, 0]
    assert inverse.shape == x.shape
    np.testing.assert_array_equal(values[inverse], x)
    assert bnp.unique_counts(x).counts.tolist() == counts.tolist()
    assert bnp.unique_inverse(x).inverse_indices.tolist() == inverse.tolist()
    assert bnp.unique_values(bnp.asarray([[3, 1], [1, 3]])).tolist() == [1, 3]


def test_stable_sorts_both_ways():
    x = bnp.asarray([1, 0, 1, 0])
    assert bnp.argsort(x, stable=True).tolist() == [1, 3, 0, 2]
    assert bnp.argsort(x, descending=True, stable=True).tolist() == [0, 2, 1, 3]
    assert bnp.sort(x, descending=True).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "f", [bnp.nonzero, bnp.unique_values, bnp.unique_all, lambda x: x[x > 0], lambda x: bnp.repeat(x, x)]
)
def test_shapes_that_depend_on_values_are_refused_while_tracing(f):
    """The one thing that a traced program cannot do: see docs/array-api.md."""
    x = bnp.asarray([1, 2, 0])
    f(x)
    with pytest.raises(errors.ConcretizationError):
        jit(f)(x)


def test_a_traced_array_leaves_its_device_open():
    assert jit(lambda x: bnp.zeros(2, device=x.device) + x)(1.0).tolist() == [1.0, 1.0]
