"""``ops``: segment reductions against loops over rows and JAX, and derivatives."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, ops
from blufunc.core.arrays.array import from_numpy as arr
from blufunc.testing import check_grads

FOLDS = {
    "segment_sum": (np.add, lambda d: 0),
    "segment_prod": (np.multiply, lambda d: 1),
    "segment_max": (np.maximum, lambda d: -np.inf if d.kind == "f" else np.iinfo(d).min),
    "segment_min": (np.minimum, lambda d: np.inf if d.kind == "f" else np.iinfo(d).max),
}
IDS = np.asarray([0, 3, 0, -1, 2, 7, 3, 0, 2, 4], np.int32)


def reference(name, data, ids, n, mode=None):
    fold, identity = FOLDS[name]
    out = np.full((n, *data.shape[1:]), identity(data.dtype), data.dtype)
    for row, i in zip(data, ids):
        i = min(max(i, 0), n - 1) if mode == "clip" else i
        if 0 <= i < n:
            out[i] = fold(out[i], row)
    return out


def sample(dtype, shape=(10, 3)):
    x = np.random.default_rng(0).uniform(-3, 3, shape)
    return x.astype(dtype)


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "int8"])
@pytest.mark.parametrize("mode", [None, "drop", "clip"])
@pytest.mark.parametrize("bucket_size", [None, 1, 4, 10, 99])
def test_values(name, dtype, mode, bucket_size):
    data = sample(dtype)
    f = lambda x, ids: getattr(ops, name)(x, ids, 5, mode=mode, bucket_size=bucket_size)
    expected = reference(name, data, IDS, 5, mode)
    for g in (f, bf.jit(f)):
        out = g(arr(data), bnp.asarray(IDS))
        assert out.dtype == dtype and out.shape == (5, 3)
        np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5 if dtype == "float32" else 1e-13)


def test_number_of_segments():
    assert ops.segment_sum(arr(sample("float32", (3,))), bnp.asarray([0, 4, 1])).shape == (5,)
    assert ops.segment_sum(bnp.zeros((0, 2)), bnp.zeros(0, "int32")).shape == (0, 2)
    assert ops.segment_max(bnp.zeros((0,)), bnp.zeros(0, "uint8"), 2).tolist() == [-np.inf, -np.inf]
    assert ops.segment_sum(bnp.ones(3), bnp.asarray([-5, -1, -2])).shape == (0,)
    assert ops.segment_min(bnp.asarray([True, False]), bnp.asarray([0, 2]), 3).tolist() == [True, True, False]


def test_promises_change_nothing():
    x, ids = arr(sample("float64", (4,))), bnp.asarray([0, 1, 1, 3])
    plain = ops.segment_sum(x, ids, 5)
    assert ops.segment_sum(x, ids, 5, indices_are_sorted=True).tolist() == plain.tolist()
    distinct = bnp.asarray([3, 0, 4, 1])
    assert (
        ops.segment_sum(x, distinct, 5, unique_indices=True).tolist()
        == ops.segment_sum(x, distinct, 5).tolist()
    )


@pytest.mark.parametrize("name", ["segment_sum", "segment_max", "segment_min"])
@pytest.mark.parametrize("bucket_size", [None, 4])
def test_derivatives(name, bucket_size):
    data = np.random.default_rng(1).permutation(np.linspace(-2, 2, 20)).reshape(10, 2)
    ids = bnp.asarray(np.where(IDS < 0, 1, IDS) % 4)  # no empty segments: infinities have no differences

    def f(x):
        return bnp.sin(getattr(ops, name)(x, ids, 4, bucket_size=bucket_size)) if bucket_size is None else (
            bnp.sin(bnp.where(bnp.isfinite(y := getattr(ops, name)(x, ids, 4, bucket_size=bucket_size)), y, 0))
        )  # fmt: skip

    check_grads(f, (arr(data),), order=2)


def test_products_of_distinct_segments_are_differentiated():
    ids = bnp.asarray([2, 0, 1])
    f = lambda x: ops.segment_prod(x, ids, 3, unique_indices=True) ** 2
    check_grads(f, (arr(sample("float64", (3, 2))),), order=2)
    with pytest.raises(errors.GradError, match="no index repeats"):
        bf.grad(lambda x: ops.segment_prod(x, ids, 3).sum())(bnp.ones(3))


def test_batches():
    x, ids = sample("float64", (4, 10, 2)), np.random.default_rng(2).integers(-1, 6, (4, 10)).astype("int32")
    for name in FOLDS:
        f = lambda a, i, name=name: getattr(ops, name)(a, i, 5)
        expected = np.stack([reference(name, a, i, 5) for a, i in zip(x, ids)])
        np.testing.assert_allclose(np.asarray(bf.vmap(f)(arr(x), arr(ids))), expected, rtol=1e-12)
        one = np.stack([reference(name, x[0], i, 5) for i in ids])
        np.testing.assert_allclose(np.asarray(bf.vmap(f, (None, 0))(arr(x[0]), arr(ids))), one, rtol=1e-12)


@pytest.mark.parametrize(
    "error, call",
    [
        (errors.DtypeError, lambda: ops.segment_sum(bnp.ones(3), bnp.ones(3), 2)),
        (errors.ShapeError, lambda: ops.segment_sum(bnp.ones(3), bnp.zeros(2, "int32"), 2)),
        (errors.ShapeError, lambda: ops.segment_sum(bnp.ones(()), bnp.zeros((), "int32"), 2)),
        (errors.DtypeError, lambda: ops.segment_max(bnp.ones(3) * 1j, bnp.zeros(3, "int32"), 2)),
        (errors.ValueRangeError, lambda: ops.segment_sum(bnp.ones(3), bnp.zeros(3, "int32"), -1)),
        (
            errors.ValueRangeError,
            lambda: ops.segment_sum(bnp.ones(3), bnp.zeros(3, "int32"), 2, bucket_size=0),
        ),
        (
            errors.UnsupportedError,
            lambda: ops.segment_sum(bnp.ones(3), bnp.zeros(3, "int32"), 2, out_sharding=1),
        ),
        (
            errors.ConcretizationError,
            lambda: bf.jit(lambda i: ops.segment_sum(bnp.ones(3), i))(bnp.zeros(3, "int32")),
        ),
    ],
)
def test_wrong_arguments(error, call):
    with pytest.raises(error) as caught:
        call()
    assert caught.value.where


@pytest.mark.peer
@pytest.mark.parametrize("name", FOLDS)
def test_as_jax(name):
    jax = pytest.importorskip("jax")
    for dtype in ("float32", "int32", "uint8"):
        data = sample(dtype) if dtype != "uint8" else np.abs(sample("int32")).astype("uint8")
        for options in ({}, {"mode": "clip"}, {"bucket_size": 3}, {"num_segments": None}):
            options = {"num_segments": 5, **options}
            ours = getattr(ops, name)(arr(data), bnp.asarray(IDS), **options)
            theirs = getattr(jax.ops, name)(data, IDS, **options)
            assert ours.dtype == theirs.dtype
            np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-6)
