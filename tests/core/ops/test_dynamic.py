"""Dynamic slices: values, starts of every kind, derivatives, ``vmap``, messages."""

import numpy as np
import pytest

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ops import dynamic
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.core.ops.checks import check, host


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setattr(config, "check", True)


def data(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def integers(low, high, shape, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


WINDOWS = [
    # shape, starts, sizes
    ((5,), (2,), (2,)),
    ((5,), (4,), (3,)),  # clamped from above
    ((4, 6), (-9, 1), (2, 3)),  # clamped from below: the primitive does not wrap negative starts
    ((4, 6), (1, 5), (4, 1)),
    ((4, 6), (0, 0), (4, 6)),
    ((2, 3, 4), (1, 2, 1), (1, 3, 2)),
    ((3, 4), (1, 1), (0, 2)),
    ((), (), ()),
]


def window(shape, starts, sizes):
    starts = [min(max(s, 0), n - size) for s, n, size in zip(starts, shape, sizes)]
    return tuple(slice(s, s + size) for s, size in zip(starts, sizes))


@pytest.mark.parametrize("shape, starts, sizes", WINDOWS)
def test_dynamic_slice(shape, starts, sizes):
    x = data(*shape)
    f = lambda x, *s: dynamic.dynamic_slice(x, s, sizes, allow_negative_indices=False)
    check(f, [x, *map(np.int32, starts)], np.asarray(x[window(shape, starts, sizes)]), vmaps=len(shape) < 3)


@pytest.mark.parametrize("shape, starts, sizes", WINDOWS)
def test_dynamic_update_slice(shape, starts, sizes):
    x, update = data(*shape), data(*sizes, seed=1)
    want = x.copy()
    want[window(shape, starts, sizes)] = update
    f = lambda x, u, *s: dynamic.dynamic_update_slice(x, u, s, allow_negative_indices=False)
    check(f, [x, update, *map(np.int32, starts)], want, vmaps=len(shape) < 3)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_starts_of_every_integer_dtype(dtype):
    """Large ones are clamped, not wrapped; under vmap too."""
    starts = np.array([3, np.iinfo(dtype).max, 0], dtype)
    want = [w.start for s in starts.tolist() for w in window((300,), (s,), (2,))]
    f = lambda s: dynamic.dynamic_slice(from_numpy(np.arange(300)), (s,), (2,))
    assert [f(from_numpy(s)).tolist()[0] for s in starts] == want
    assert host(vmap(f)(from_numpy(starts)))[:, 0].tolist() == want


def test_negative_starts_count_from_the_end():
    a = np.arange(300)
    x = from_numpy(a)
    for s in (-1, from_numpy(np.int8(-1)), from_numpy(np.int64(-1))):
        assert dynamic.dynamic_slice(x, (s,), (1,)).tolist() == [299]
        assert dynamic.dynamic_slice(x, (s,), (1,), allow_negative_indices=False).tolist() == [0]
        assert dynamic.dynamic_index_in_dim(x, s, keepdims=False).item() == 299
        assert host(dynamic.dynamic_update_slice(x, from_numpy(np.array([7])), (s,)))[299] == 7
    assert dynamic.dynamic_slice(x, from_numpy(np.array([-3], np.int32)), (2,)).tolist() == [297, 298]
    assert jit(lambda s: dynamic.dynamic_slice(x, s, (2,)))(from_numpy(np.array([-3]))).tolist() == [297, 298]


def test_in_dim():
    a, u = data(3, 4), data(3, 1, seed=1)
    x = from_numpy(a)
    np.testing.assert_array_equal(host(dynamic.dynamic_slice_in_dim(x, 1, 2, -1)), a[:, 1:3])
    np.testing.assert_array_equal(host(dynamic.dynamic_index_in_dim(x, 1, 1)), a[:, 1:2])
    np.testing.assert_array_equal(host(dynamic.dynamic_index_in_dim(x, 1, 0, keepdims=False)), a[1])
    want = a.copy()
    want[:, 2:3] = u
    for got in (
        dynamic.dynamic_update_slice_in_dim(x, from_numpy(u), 2, 1),
        dynamic.dynamic_update_index_in_dim(x, from_numpy(u), 2, 1),
        dynamic.dynamic_update_index_in_dim(x, from_numpy(u[:, 0]), 2, -1),
    ):
        np.testing.assert_array_equal(host(got), want)


def test_batched_starts_are_one_equation():
    x, s = from_numpy(data(8, 4)), from_numpy(integers(0, 8, (3,)))
    f = vmap(lambda s: dynamic.dynamic_slice(x, (s, 0), (1, 4)))
    assert str(make_jaxpr(f)(s)).count("gather") == 1


def test_an_update_is_made_in_a_copy():
    a = data(4, 2)
    assert not np.shares_memory(dynamic.dynamic_update_slice_p.impl(a, a, np.int32(0), np.int32(0)), a)


ERRORS = [
    (errors.ShapeError, "needs 2 start indices", lambda x: dynamic.dynamic_slice(x, (0,), (1, 1))),
    (errors.ShapeError, "array of rank 1", lambda x: dynamic.dynamic_slice(x, x, (1, 1))),
    (errors.DtypeError, "integers of rank 0", lambda x: dynamic.dynamic_slice(x, (0.5, 0), (1, 1))),
    (errors.ShapeError, "cannot have the sizes", lambda x: dynamic.dynamic_slice(x, (0, 0), (1, 3))),
    (
        errors.ShapeError,
        "does not fit",
        lambda x: dynamic.dynamic_update_slice(x, from_numpy(data(4, 1)), (0, 0)),
    ),
    (
        errors.DtypeError,
        "of its dtype",
        lambda x: dynamic.dynamic_update_slice(x, from_numpy(np.ones((1, 1), int)), (0, 0)),
    ),
    (errors.ShapeError, "cannot take the update", lambda x: dynamic.dynamic_update_index_in_dim(x, x, 0, 0)),
]


@pytest.mark.parametrize("error, text, f", ERRORS)
def test_errors(error, text, f):
    with pytest.raises(error, match=text) as e:
        f(from_numpy(data(3, 2)))
    assert e.value.fix and e.value.where
