"""Sorting: special values, several keys, PRNG keys, derivatives, errors."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blufunc import errors, random
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ops import sort as so
from blufunc.core.ops.elementwise import mul
from blufunc.transforms.autodiff.grad import jvp, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit

NAN, INF = np.nan, np.inf


def f64(x):
    return from_numpy(np.asarray(x, np.float64))


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ml_dtypes.float8_e5m2]
)
def test_nan_comes_last_and_zeros_are_equal(dtype):
    x = from_numpy(np.array([3, NAN, 0.0, -INF, -0.0, INF, NAN, -1], dtype))
    assert np.asarray(so.argsort(x)).tolist() == [3, 7, 2, 4, 0, 5, 1, 6]
    out = np.asarray(so.sort(x)).astype(np.float64)
    np.testing.assert_array_equal(out, [-INF, -1, 0, 0, 3, INF, NAN, NAN])
    assert np.signbit(out[3]) and not np.signbit(out[2])  # stable: 0.0 preceded -0.0


@pytest.mark.parametrize("dimension", [0, 1, -1])
@pytest.mark.parametrize("dtype", ["float32", "int8", "uint32", "bool", "bfloat16"])
def test_axes_and_dtypes(dtype, dimension):
    x = (np.random.default_rng(0).normal(size=(5, 7)) * 10).astype(np.dtype(dtype))
    want = np.sort(x.astype(np.float64), dimension)
    got = so.sort(x, dimension)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), want)
    np.testing.assert_array_equal(
        so.argsort(x, dimension), np.argsort(x.astype(np.float64), dimension, kind="stable")
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
def test_several_keys_sort_like_tuples(pairs):
    a, b = (np.array(column, np.int32) for column in zip(*pairs))
    payload = np.arange(len(pairs), dtype=np.int32)
    got = so.sort((a, b, payload), num_keys=2)
    want = sorted((*pair, i) for i, pair in enumerate(pairs))
    assert list(zip(*[np.asarray(x).tolist() for x in got])) == want


def test_operands_that_are_not_compared_may_be_anything():
    keys = random.split(random.key(0), 3)
    order = np.array([2, 0, 1], np.int32)
    _, permuted = so.sort_key_val(order, keys)
    np.testing.assert_array_equal(random.key_data(permuted), np.asarray(random.key_data(keys))[[1, 2, 0]])


def test_derivatives_permute():
    x = np.array([[3.0, 1, 2], [5, 6, 4]])
    t = np.array([[10.0, 20, 30], [40, 50, 60]])
    out, tangent = jvp(lambda a: so.sort(a, 1), (f64(x),), (f64(t),))
    np.testing.assert_array_equal(out, [[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(tangent, [[20, 30, 10], [60, 40, 50]])
    (ct,) = vjp(lambda a: so.sort(a, 1), f64(x))[1](f64(t))
    np.testing.assert_array_equal(ct, [[30, 10, 20], [50, 60, 40]])


def test_derivative_of_a_payload_only():
    keys = np.array([2, 0, 1], np.int32)
    f = lambda v: so.sort((keys, v))[1]
    np.testing.assert_array_equal(vjp(f, f64([1, 2, 3]))[1](f64([10, 20, 30]))[0], [30, 10, 20])


def test_second_derivative():
    x, t, u = np.random.default_rng(0).normal(size=(3, 6))
    f = lambda a: mul(so.sort(a), so.sort(mul(a, a)))
    first = lambda a: jvp(f, (a,), (f64(t),))[1]
    got = np.asarray(jvp(first, (f64(x),), (f64(u),))[1])
    eps = 1e-6
    want = (np.asarray(first(f64(x + eps * u))) - np.asarray(first(f64(x - eps * u)))) / (2 * eps)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jit(first)(f64(x)), first(f64(x)))


@pytest.mark.parametrize("dims", [(0, 0), (1, 1), (2, 2), (0, 2), (1, None), (None, 0)])
@pytest.mark.parametrize("dimension", [0, 1])
def test_vmap(dims, dimension):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, size=(2, 3, 4)).astype(np.int32)
    args = [x[0] if d is None else np.moveaxis(x + i, 0, d) for i, d in enumerate(dims)]
    f = lambda a, b: so.sort((a, b), dimension)
    each = [f(*[a if d is None else np.take(a, i, d) for a, d in zip(args, dims)]) for i in range(2)]
    for got, want in zip(vmap(f, dims)(*args), zip(*each)):
        np.testing.assert_array_equal(got, np.stack(want))


# -- the largest -----------------------------------------------------------------------------------


def test_top_k():
    x = np.array([[3, 9, 1, 9], [NAN, 2, INF, 5]], np.float32)
    values, index = so.top_k(x, 3)
    np.testing.assert_array_equal(values, [[9, 9, 3], [NAN, INF, 5]])
    assert np.asarray(index).tolist() == [[1, 3, 0], [0, 2, 3]] and index.dtype == np.int32
    (ct,) = vjp(lambda a: so.top_k(a, 2)[0], f64(x[0]))[1](f64([10, 20]))
    np.testing.assert_array_equal(ct, [0, 10, 0, 20])
    np.testing.assert_array_equal(vmap(lambda a: so.top_k(a, 1)[1], 1)(x), [[1], [0], [1], [0]])
    assert so.top_k(x, 0)[0].shape == (2, 0)


def by_sorting(x, k):
    """The definition of ``top_k``: a stable descending sort of all, NaN first."""
    wide = x.astype(np.float64) if dtypes.is_floating(x.dtype) else x
    order = np.argsort(wide[..., ::-1], axis=-1, stable=True)[..., ::-1][..., :k]
    index = x.shape[-1] - 1 - order
    return np.take_along_axis(x, index, -1), index


LEVELS = [0.0, -0.0, 1.0, -1.0, 3.0, INF, -INF, NAN, -NAN]


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", "float16", "bfloat16", "float8_e5m2", "int8", "int32", "uint32", "int64", "bool"],
)
@pytest.mark.parametrize("values", ["distinct", "tied", "extreme"])
def test_top_k_selects_what_a_sort_does(dtype, values):
    """Large enough for selection: ties by index, NaN first, and both zeros equal."""
    dtype = dtypes.as_dtype(dtype)
    rng = np.random.default_rng(0)
    for shape in ((2100,), (9, 300), (3, 2, 400), (512, 4), (2, 0), (0, 9)):
        n = shape[-1]
        if dtypes.is_floating(dtype):
            pool = rng.standard_normal(4 * n + 1) if values == "distinct" else np.array(LEVELS)
        elif dtypes.is_bool(dtype):
            pool = np.array([False, True])
        else:
            ends = np.iinfo(dtype)
            pool = np.arange(127 if values == "distinct" else 3)
            pool = np.array([ends.min, ends.max, 0, 1], dtype) if values == "extreme" else pool
        # the largest values are rare in the first lines, and frequent in the last ones
        picks = (
            rng.random(shape) ** np.linspace(1, 4, num=shape[0])[(..., *[None] * (len(shape) - 1))]
        ) * len(pool)
        x = pool[picks.astype(int)].astype(dtype)
        for k in sorted({0, 1, 2, n // 7, n // 4, n // 2, n} & set(range(n + 1))):
            got, index = so.top_k_p.impl(x, k=k)
            want, order = by_sorting(x, k)
            np.testing.assert_array_equal(index, order)
            assert index.dtype == np.int32 and got.dtype == dtype
            assert got.tobytes() == want.tobytes()  # signs of zeros, too


@pytest.mark.peer
def test_as_jax():
    import jax

    rng = np.random.default_rng(0)
    x = rng.integers(0, 5, size=(4, 6)).astype(np.float32)
    x[0, 2], x[1, 3], x[2, 0] = NAN, -0.0, INF
    for got, want in zip(so.sort((x, 2 * x), 0), jax.lax.sort((x, 2 * x), dimension=0)):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(so.top_k(x, 4), jax.lax.top_k(x, 4)):
        np.testing.assert_array_equal(got, want)
    iota = np.arange(24, dtype=np.int32).reshape(4, 6)
    for got, want in zip(so.sort((x, -x, iota), 1, num_keys=2), jax.lax.sort((x, -x, iota), num_keys=2)):
        np.testing.assert_array_equal(got, want)


# -- picking and placing ---------------------------------------------------------------------------


def test_picking_and_placing_are_transposes():
    x = np.arange(10.0).reshape(2, 5)
    index = np.array([[4, 0, 2], [1, 2, 3]], np.int32)
    picked = np.asarray(so.pick_along(f64(x), index, 1))
    np.testing.assert_array_equal(picked, np.take_along_axis(x, index, 1))
    (ct,) = vjp(lambda a: so.pick_along(a, index, 1), f64(x))[1](f64(picked))
    placed = so.place_along(f64(picked), index, 1, size=5)
    np.testing.assert_array_equal(ct, placed)
    np.testing.assert_array_equal(so.pick_along(placed, index, 1), picked)
    np.testing.assert_array_equal(
        vjp(lambda a: so.place_along(a, index, 1, 5), f64(picked))[1](f64(x))[0], picked
    )


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda: so.sort(np.zeros(3), 1), errors.AxisRangeError, "axis 1"),
        (lambda: so.sort((np.zeros(3), np.zeros(4))), errors.ShapeError, "one shape"),
        (lambda: so.sort(()), errors.ArgumentError, "at least one"),
        (lambda: so.sort((np.zeros(3),), num_keys=2), errors.ValueRangeError, "by 2 keys"),
        (lambda: so.sort(random.split(random.key(0), 3)), errors.DtypeError, "sort takes"),
        (lambda: so.top_k(np.zeros(3), 4), errors.ShapeError, "k = 4"),
        (lambda: so.top_k(np.zeros(3, np.complex64), 1), errors.DtypeError, "top_k takes"),
        (lambda: so.pick_along(np.zeros((3, 2)), np.zeros((2, 3), int), 0), errors.ShapeError, "must agree"),
        (lambda: so.pick_along(np.zeros(3), np.zeros(3), 0), errors.DtypeError, "integer index"),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()
