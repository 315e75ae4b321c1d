"""Compositions in ``lax`` against NumPy."""

import functools

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from tests.transforms.common import arr, close, draw

X = draw(3, 4)
NX = np.asarray(X)


def test_shapes():
    assert lax.broadcast_shapes((2, 1), (3,), ()) == (2, 3)
    close(lax.tile(X, (2, 3)), arr(np.tile(NX, (2, 3))))
    close(lax.stack([X, X + 1], 1), arr(np.stack([NX, NX + 1], 1)))
    for got, want in zip(lax.split(X, (1, 0, 3), 1), np.split(NX, (1, 1), 1), strict=True):
        close(got, arr(want))
    assert lax.dtype(1.0) == np.float32 and lax.dtype(X) == np.float64


def test_reciprocal():
    close(bf.grad(lambda x: lax.reciprocal(x).sum())(X), -1 / X**2)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_clz(dtype):
    bits = np.dtype(dtype).itemsize * 8
    values = [0, 1, 2, 3, 77, np.iinfo(dtype).max]
    want = [bits - v.bit_length() for v in map(int, values)]
    np.testing.assert_array_equal(np.asarray(lax.clz(arr(values, dtype))), want)
    if dtype.startswith("int"):
        assert int(lax.clz(arr(-1, dtype))) == 0


@pytest.mark.parametrize("axis", [0, -1])
def test_approximate_extrema_are_exact(axis):
    for f, sign in ((lax.approx_max_k, -1), (lax.approx_min_k, 1)):
        values, places = f(X, 2, axis, recall_target=0.9)
        order = np.argsort(sign * NX, axis=axis, kind="stable").take([0, 1], axis)
        np.testing.assert_array_equal(np.asarray(places), order)
        np.testing.assert_array_equal(np.asarray(values), np.take_along_axis(NX, order, axis))
    np.testing.assert_array_equal(np.asarray(lax.approx_min_k(arr([0, 3], "uint8"), 1)[0]), [0])


def test_scatter_apply():
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    rows = bnp.array([[2], [0], [9]])  # the last lies outside
    apply = lambda x: lax.scatter_apply(x, rows, lambda v: v**2, numbers, update_shape=(3, 4))
    want = NX.copy()
    want[[0, 2]] **= 2
    close(apply(X), arr(want))
    g = np.ones_like(NX)
    g[[0, 2]] = 2 * NX[[0, 2]]
    close(bf.grad(lambda x: apply(x).sum())(X), arr(g))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: lax.broadcast_shapes((2,), (3,)), errors.ShapeError, "broadcast"),
        (lambda: lax.tile(X, (2,)), errors.ShapeError, "one count"),
        (lambda: lax.split(X, (1, 1), 1), errors.ShapeError, "sum"),
        (lambda: lax.clz(X), errors.DtypeError, "integers"),
        (lambda: lax.stack([]), errors.ArgumentError, "one at least"),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_collapse():
    x = bnp.ones((2, 3, 4))
    assert lax.collapse(x, 0, 2).shape == (6, 4) and lax.collapse(x, -2).shape == (2, 12)
    assert lax.collapse(x, 0, -1).shape == (6, 4) and lax.collapse(x, 1, 1).shape == (2, 1, 3, 4)
    assert lax.collapse(x, 0, 5).shape == (24,)  # bounds are those of a slice
    with pytest.raises(errors.ValueRangeError, match="precedes"):
        lax.collapse(x, 2, 1)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_upper_halves_of_products(dtype):
    limits = np.iinfo(dtype)
    x, y = np.random.default_rng(0).integers(limits.min, limits.max, (2, 40), dtype, endpoint=True)
    x[:4], y[:4] = [limits.min, limits.max, limits.min, 0], [limits.min, limits.max, limits.max, 1]
    want = [(int(a) * int(b)) >> limits.bits for a, b in zip(x, y, strict=True)]
    x, y = (bnp.asarray(v, dtype=dtype) for v in (x, y))
    for f in (lax.mulhi, bf.jit(lax.mulhi)):
        np.testing.assert_array_equal(f(x, y), np.array(want, dtype))
    assert lax.mulhi(x[:, None], y[None]).shape == (40, 40)
    with pytest.raises(errors.DtypeError):
        lax.mulhi(x, y.astype("float32"))


def test_shapes_of_names():
    a = np.random.default_rng(0).normal(size=(3, 4, 5)).astype("float32")
    got = lax.index_take(a, [np.array([0, -1, 5]), np.array([1, 2, -3])], (0, 2))
    np.testing.assert_array_equal(got, a[[0, 2, 2], :, [1, 2, 2]])
    assert lax.broadcast_to_rank(a, 5).shape == (1, 1, 3, 4, 5) and lax.broadcast_to_rank(1.0, 0).ndim == 0
    assert lax.broadcast_like(a[:1, :1], a).shape == a.shape
    for i, part in enumerate(lax.unstack(a, -1)):
        np.testing.assert_array_equal(part, a[..., i])
    assert lax.empty(3, "int8").shape == (3,) and lax.empty((2, 3), "float32").dtype == "float32"
    assert lax.stage(1.0).weak_type
    for call in (
        lambda: lax.broadcast_to_rank(a, 2),
        lambda: lax.broadcast_like(a, a[0]),
        lambda: lax.index_take(a, [np.array([0])], (0, 1)),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()


def test_composites():
    @functools.partial(lax.composite, name="my.power", version=1)
    def power(x, /, *, n):
        return x**n

    assert "my.power.v1" in str(bf.make_jaxpr(lambda x: power(x, n=3))(2.0))
    assert power(2.0, n=3) == bf.jit(lambda x: power(x, n=3))(2.0) == 8
    assert bf.grad(lambda x: power(x, n=3))(2.0) == 12
    with pytest.raises(errors.StaticArgumentError):
        power(2.0, n=bnp.ones(2))
    with pytest.raises(errors.ArgumentError):
        lax.composite(power, name=3)


def test_broadcast_in_dim_permutes():
    x = np.arange(6).reshape(3, 2)
    got = lax.broadcast_in_dim(x, (2, 3, 4), broadcast_dimensions=(1, 0))
    np.testing.assert_array_equal(got, np.broadcast_to(x.T[:, :, None], (2, 3, 4)))
    with pytest.raises(errors.ShapeError):
        lax.broadcast_in_dim(x, (3, 3), (0, 0))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float16"])
def test_windows_start_at_infinity(dtype):
    x = bnp.arange(6).astype(dtype)
    for start, function, want in ((-np.inf, lax.max, [0, 2, 4, 5]), (np.inf, lax.min, [0, 1, 3, 5])):
        got = lax.reduce_window(x, start, function, (2,), (2,), ((1, 1),))  # of the edges, one is padding
        assert got.dtype == x.dtype and got.tolist() == want
    with pytest.raises(errors.DtypeError, match="does not fit"):
        lax.reduce_window(bnp.arange(6), 0.5, lax.max, (2,), (2,), "SAME")
