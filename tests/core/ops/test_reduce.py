"""Reductions, cumulative operations: ties, zeros, infinities, high orders, errors."""

import ml_dtypes
import numpy as np
import pytest

from blufunc import errors
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ops import cumulative as cu
from blufunc.core.ops import reduce as rd
from blufunc.core.ops.elementwise import mul
from blufunc.core.ops.shape import slice_in_dim
from blufunc.core.primitives.linear_ops import reduce_sum
from blufunc.transforms.autodiff.grad import grad, jvp, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit

CUMULATIVE = {
    "cumsum": (cu.cumsum, np.cumsum),
    "cumprod": (cu.cumprod, np.cumprod),
    "cummax": (cu.cummax, np.maximum.accumulate),
    "cummin": (cu.cummin, np.minimum.accumulate),
    "cumlogsumexp": (cu.cumlogsumexp, np.logaddexp.accumulate),
}


def f64(x):
    return from_numpy(np.asarray(x, np.float64))


def numeric_jvp(f, x, t, eps=1e-6):
    return (np.asarray(f(f64(x + eps * t))) - np.asarray(f(f64(x - eps * t)))) / (2 * eps)


def total(f):
    """``f`` weighted and summed, so that every output has a different weight."""

    def scalar(x):
        y = f(x)
        weights = f64(np.arange(1.0, y.size + 1).reshape(y.shape))
        return reduce_sum(mul(y, weights), tuple(range(y.ndim)))

    return scalar


# -- extrema ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("f, extreme", [(rd.reduce_max, 3.0), (rd.reduce_min, -1.0)])
def test_ties_share_the_derivative(f, extreme):
    x = np.array([[extreme, 0, extreme], [1, extreme, 0]])
    dx = np.asarray(vjp(lambda a: f(a, (1,)), f64(x))[1](f64([6, 6]))[0])
    np.testing.assert_array_equal(dx, [[3, 0, 3], [0, 6, 0]])
    dx = np.asarray(grad(lambda a: f(a, (0, 1)))(f64(x)))
    np.testing.assert_allclose(dx, (x == extreme) / 3)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_nan_propagates(dtype):
    x = from_numpy(np.array([[1, np.nan, 3], [4, 5, 2]], dtype))
    for f, at in ((rd.reduce_max, 5), (rd.reduce_min, 2)):
        out = np.asarray(f(x, (1,))).astype(np.float64)
        assert np.isnan(out[0]) and out[1] == at
    assert np.asarray(rd.argmax(x, 1)).tolist() == [1, 1]
    assert np.asarray(rd.argmin(x, 1)).tolist() == [1, 2]


def test_of_nothing():
    empty = lambda dtype: from_numpy(np.zeros((2, 0), dtype))
    assert np.asarray(rd.reduce_max(empty(np.float32), (1,))).tolist() == [-np.inf] * 2
    assert np.asarray(rd.reduce_min(empty(np.int8), (1,))).tolist() == [127] * 2
    assert np.asarray(rd.reduce_max(empty(bool), (1,))).tolist() == [False] * 2
    assert (
        np.asarray(rd.reduce_max(empty(ml_dtypes.float8_e4m3fn), (1,))).astype(float).tolist() == [-448] * 2
    )
    assert np.asarray(rd.reduce_prod(empty(np.float32), (1,))).tolist() == [1, 1]
    assert np.asarray(rd.reduce_and(empty(np.uint8), (1,))).tolist() == [255, 255]
    assert np.asarray(grad(lambda x: reduce_sum(rd.reduce_prod(x, (1,)), (0,)))(empty(np.float32))).shape == (
        2,
        0,
    )


def test_argmax():
    x = from_numpy(np.array([[1, 7, 7], [9, 2, 9]], np.int32))
    first = rd.argmax(x, 1)
    assert first.dtype == np.int32 and np.asarray(first).tolist() == [1, 0]
    assert rd.argmin(x, 0, "int64").dtype == np.int64
    np.testing.assert_array_equal(vmap(lambda r: rd.argmax(r, 0), 1)(x), [1, 0, 1])
    np.testing.assert_array_equal(jit(lambda x: rd.argmin(x, 1))(x), [0, 1])
    assert np.asarray(jvp(lambda x: rd.argmax(x, 0), (f64([1, 2]),), (f64([1, 1]),))[1]).dtype.itemsize == 0


# -- products --------------------------------------------------------------------------------------

PRODUCTS = [[2, 3, 4, 5, 6], [2, 0, 4, 5, 6], [2, 0, 4, 0, 6], [0, 0, 0, 5, 6], [0.5], [0.0]]


@pytest.mark.parametrize("x", PRODUCTS)
def test_derivatives_of_products(x):
    """Exact, zeros or not, in first, second and third order."""
    x = np.asarray(x, float)
    n = len(x)
    prod = lambda x: rd.reduce_prod(x, (0,))
    without = lambda *gone: 0.0 if len(set(gone)) < len(gone) else float(np.prod(np.delete(x, gone)))
    first = grad(prod)
    np.testing.assert_allclose(first(f64(x)), [without(i) for i in range(n)])
    for i in range(n):
        e_i = f64(np.eye(n)[i])
        second = lambda x, e_i=e_i: jvp(first, (x,), (e_i,))[1]
        np.testing.assert_allclose(second(f64(x)), [without(i, j) for j in range(n)])
        third = jvp(second, (f64(x),), (f64(np.eye(n)[0]),))[1]
        np.testing.assert_allclose(third, [without(0, i, j) for j in range(n)])
    np.testing.assert_allclose(jit(first)(f64(x)), first(f64(x)))


def test_products_over_several_axes():
    x, t = np.random.default_rng(0).normal(size=(2, 2, 3, 5))
    f = lambda a: rd.reduce_prod(a, (2, 0))
    np.testing.assert_allclose(f(f64(x)), x.prod((0, 2)))
    np.testing.assert_allclose(jvp(f, (f64(x),), (f64(t),))[1], numeric_jvp(f, x, t), atol=1e-8)


@pytest.mark.parametrize("prim", [rd.reduce_prod_p, rd.reduce_max_p])
def test_not_linear(prim):
    with pytest.raises(errors.GradError, match="not linear"):
        prim.transpose(f64(1), None, axes=(0,))


def test_bits():
    x = np.array([[12, 10], [6, 3]], np.uint8)
    for f, ufunc in (
        (rd.reduce_and, np.bitwise_and),
        (rd.reduce_or, np.bitwise_or),
        (rd.reduce_xor, np.bitwise_xor),
    ):
        for axes in ((0,), (1,), (0, 1)):
            np.testing.assert_array_equal(f(x, axes), ufunc.reduce(x, axes))
            np.testing.assert_array_equal(f(x > 6, axes), ufunc.reduce(x > 6, axes))
    assert np.asarray(rd.reduce_xor(np.array([True, True, True]), (0,))).item() is True


# -- cumulative ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("name", CUMULATIVE)
def test_cumulative(name, n, reverse):
    f, reference = CUMULATIVE[name]
    g = lambda x: f(x, 1, reverse)
    x, t, u = np.random.default_rng(n).normal(size=(3, 2, n))
    flip = (lambda a: a[:, ::-1]) if reverse else (lambda a: a)
    np.testing.assert_allclose(g(f64(x)), flip(reference(flip(x), axis=1)))
    np.testing.assert_allclose(jvp(g, (f64(x),), (f64(t),))[1], numeric_jvp(g, x, t), rtol=1e-6, atol=1e-7)
    first = grad(total(g))
    np.testing.assert_allclose(
        np.vdot(first(f64(x)), t), jvp(total(g), (f64(x),), (f64(t),))[1], rtol=1e-10, atol=1e-12
    )
    second = jvp(first, (f64(x),), (f64(u),))[1]
    np.testing.assert_allclose(second, numeric_jvp(first, x, u), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jit(first)(f64(x)), first(f64(x)), rtol=1e-12)
    for d in range(3):
        stacked = from_numpy(np.stack([x, t, u], d))
        looped = np.stack([np.asarray(g(f64(a))) for a in (x, t, u)])
        np.testing.assert_allclose(vmap(g, d)(stacked), looped)


def test_cumulative_product_with_zeros():
    x = np.array([2.0, 0, 3, 0, 4])
    jacobian = np.stack([np.asarray(jvp(cu.cumprod, (f64(x),), (f64(e),))[1]) for e in np.eye(5)], 1)
    want = [[np.prod(np.delete(x[: i + 1], j)) if j <= i else 0 for j in range(5)] for i in range(5)]
    np.testing.assert_allclose(jacobian, want)


@pytest.mark.parametrize("f, sign", [(cu.cummax, 1), (cu.cummin, -1)])
def test_cumulative_ties_share_equally(f, sign):
    x = f64(np.array([1, 3, 3, 0, 3.0]) * sign)
    jacobian = np.stack([np.asarray(jvp(f, (x,), (f64(e),))[1]) for e in np.eye(5)], 1)
    third = [0, 1 / 3, 1 / 3, 0, 1 / 3]
    np.testing.assert_allclose(
        jacobian, [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0, 0], third]
    )


def test_cumlogsumexp_at_extremes():
    x = np.array([-np.inf, -np.inf, 0, 1000, 1000, -1000])
    out, t = jvp(cu.cumlogsumexp, (f64(x),), (f64(np.ones(6)),))
    np.testing.assert_allclose(out, [-np.inf, -np.inf, 0, 1000, 1000 + np.log(2), 1000 + np.log(2)])
    np.testing.assert_allclose(np.asarray(t)[2:], 1)
    last = lambda x: reduce_sum(slice_in_dim(cu.cumlogsumexp(x), 5, 6), (0,))
    np.testing.assert_allclose(grad(last)(f64(x)), [0, 0, 0, 0.5, 0.5, 0])


def test_half_precision_is_accumulated_in_float32():
    ones = np.ones(4000, ml_dtypes.bfloat16)
    assert float(np.asarray(cu.cumsum(ones))[-1]) == 4000
    assert float(np.asarray(rd.reduce_prod(np.full(8, 1.0078125, ml_dtypes.bfloat16), (0,)))) == 1.0625


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda: rd.reduce_max(np.zeros(3, np.complex64), (0,)), errors.DtypeError, "reduce_max takes real"),
        (lambda: rd.reduce_prod(np.zeros(3, bool), (0,)), errors.DtypeError, "reduce_prod takes numbers"),
        (lambda: rd.reduce_and(np.zeros(3, np.float32), (0,)), errors.DtypeError, "integers and booleans"),
        (lambda: rd.reduce_max(np.zeros(3), (1,)), errors.ShapeError, "distinct and below 1"),
        (lambda: rd.reduce_max(np.zeros((3, 2)), (0, 0)), errors.ShapeError, "distinct"),
        (lambda: rd.argmax(np.zeros((3, 0)), 1), errors.ShapeError, "which is empty"),
        (lambda: rd.argmax(np.zeros(3), 0, "float32"), errors.DtypeError, "gives integers, not f32"),
        (lambda: rd.argmax_p.bind(f64(np.zeros((3, 2))), axes=(0, 1), index_dtype=np.dtype("i4")),
         errors.ShapeError, "takes one axis"),
        (lambda: cu.cumsum(np.zeros(3), 1), errors.ShapeError, "along axis 1, which it does not have"),
        (lambda: cu.cumsum(np.zeros(3, bool)), errors.DtypeError, "cumsum takes numbers"),
        (lambda: cu.cumlogsumexp(np.zeros(3, np.int32)), errors.DtypeError, "floating"),
    ],
)  # fmt: skip
def test_errors(call, error, match):
    with pytest.raises(error, match=match) as raised:
        call()
    assert "test_reduce.py" in raised.value.where


@pytest.mark.peer
def test_derivatives_as_jax():
    import jax

    x = np.array([[1, 3, 3, -2], [0, 5, 0, 1]], np.float32)
    t = np.array([[1, 2, 4, 8], [-1, 1, 3, 2]], np.float32)
    pairs = [
        (lambda a: rd.reduce_max(a, (1,)), lambda a: jax.numpy.max(a, 1)),
        (lambda a: rd.reduce_prod(a, (1,)), lambda a: jax.numpy.prod(a, 1)),
        (lambda a: cu.cummax(a, 1), lambda a: jax.lax.cummax(a, 1)),
    ]
    for ours, theirs in pairs:
        for got, want in zip(jvp(ours, (x,), (t,)), jax.jvp(theirs, (x,), (t,))):
            np.testing.assert_allclose(got, want, rtol=1e-5)
