"""Activations against formulas in float64, differences for slopes, and jax.nn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special

import blufunc.numpy as bnp
from blufunc import errors, nn
from blufunc.transforms.autodiff.grad import grad

POINTS = np.array([-30.0, -6.5, -2.5, -1.1, -0.3, -1e-3, 1e-3, 0.2, 0.9, 1.3, 5.5, 6.5, 30.0])


def softplus(x):
    return np.logaddexp(x, 0)


def sigmoid(x):
    return scipy.special.expit(x)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def elu(x, alpha=1.0):
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


TABLE = {
    "relu": (nn.relu, lambda x: np.maximum(x, 0)),
    "relu6": (nn.relu6, lambda x: np.clip(x, 0, 6)),
    "leaky_relu": (nn.leaky_relu, lambda x: np.where(x >= 0, x, 0.01 * x)),
    "leaky_relu(0.3)": (lambda x: nn.leaky_relu(x, 0.3), lambda x: np.where(x >= 0, x, 0.3 * x)),
    "elu": (nn.elu, elu),
    "elu(2)": (lambda x: nn.elu(x, 2.0), lambda x: elu(x, 2.0)),
    "selu": (nn.selu, lambda x: 1.0507009873554805 * elu(x, 1.6732632423543772)),
    "celu(2)": (lambda x: nn.celu(x, 2.0), lambda x: np.where(x > 0, x, 2 * np.expm1(np.minimum(x, 0) / 2))),
    "gelu": (nn.gelu, gelu_tanh),
    "gelu(exact)": (lambda x: nn.gelu(x, approximate=False), lambda x: x * scipy.special.ndtr(x)),
    "silu": (nn.silu, lambda x: x * sigmoid(x)),
    "swish": (nn.swish, lambda x: x * sigmoid(x)),
    "sigmoid": (nn.sigmoid, sigmoid),
    "log_sigmoid": (nn.log_sigmoid, lambda x: -softplus(-x)),
    "softplus": (nn.softplus, softplus),
    "soft_sign": (nn.soft_sign, lambda x: x / (1 + np.abs(x))),
    "hard_tanh": (nn.hard_tanh, lambda x: np.clip(x, -1, 1)),
    "tanh": (nn.tanh, np.tanh),
    "mish": (nn.mish, lambda x: x * np.tanh(softplus(x))),
}
SMOOTH = "gelu gelu(exact) silu sigmoid log_sigmoid softplus tanh mish".split()


def f64(x):
    return bnp.asarray(x, dtype="float64")


def f32(x):
    return bnp.asarray(x, dtype="float32")


def slopes(f, x):
    return np.asarray(grad(lambda x: f(x).sum())(x))


@pytest.mark.parametrize("name", TABLE)
def test_values(name):
    f, reference = TABLE[name]
    np.testing.assert_allclose(np.asarray(f(f64(POINTS))), reference(POINTS), rtol=1e-12, atol=1e-15)
    single = f(f32(POINTS))
    assert single.dtype == np.float32
    np.testing.assert_allclose(np.asarray(single), reference(POINTS), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("name", TABLE)
def test_slopes(name):
    f, reference = TABLE[name]
    h = 1e-5
    expected = (reference(POINTS + h) - reference(POINTS - h)) / (2 * h)
    np.testing.assert_allclose(slopes(f, f64(POINTS)), expected, rtol=1e-8, atol=2e-8)


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivatives(name):
    f, reference = TABLE[name]
    h = 1e-3
    expected = (reference(POINTS + h) - 2 * reference(POINTS) + reference(POINTS - h)) / h**2
    second = slopes(lambda x: grad(lambda x: f(x).sum())(x), f64(POINTS))
    np.testing.assert_allclose(second, expected, rtol=1e-4, atol=1e-6)
    at_zero = (reference(h) - 2 * reference(0.0) + reference(-h)) / h**2
    np.testing.assert_allclose(
        slopes(lambda x: grad(lambda x: f(x).sum())(x), f64([0.0])), [at_zero], atol=1e-5
    )


@pytest.mark.parametrize("name", TABLE)
def test_far_out(name):
    f, reference = TABLE[name]
    x = np.array([-1e4, -100.0, 100.0, 1e4])
    np.testing.assert_allclose(np.asarray(f(f32(x))), reference(x), rtol=1e-6, atol=1e-30)
    assert np.isfinite(slopes(f, f32(x))).all()


@pytest.mark.parametrize("name", TABLE)
def test_half_precision_keeps_its_dtype(name):
    f, reference = TABLE[name]
    x = bnp.asarray(POINTS, dtype="bfloat16")
    y = f(x)
    assert y.dtype == x.dtype
    exact = reference(np.asarray(x).astype(np.float64))
    np.testing.assert_allclose(np.asarray(y).astype(np.float64), exact, rtol=0.05, atol=0.05)


def test_integers():
    assert nn.relu(bnp.asarray([-1, 2], dtype="int32")).dtype == np.int32
    assert nn.gelu(bnp.asarray([-1, 2])).dtype == np.float32
    np.testing.assert_allclose(np.asarray(nn.sigmoid(0)), 0.5)


def test_relu_at_zero_and_nan():
    x = f32([0.0, -0.0, np.nan, -1.0])
    np.testing.assert_array_equal(np.asarray(nn.relu(x)), [0, 0, np.nan, 0])
    np.testing.assert_array_equal(slopes(nn.relu, f32([0.0, -0.0])), [0, 0])
    # an infinite cotangent at a dead unit is dropped, not multiplied by 0
    g = grad(lambda x: bnp.where(x > 0, 1, bnp.sqrt(nn.relu(x))).sum())(f32([-1.0, 1.0]))
    np.testing.assert_array_equal(np.asarray(g), [0, 0])


def test_glu():
    x = np.random.default_rng(0).normal(size=(3, 4, 6))
    np.testing.assert_allclose(np.asarray(nn.glu(f64(x))), x[..., :3] * sigmoid(x[..., 3:]), rtol=1e-12)
    np.testing.assert_allclose(np.asarray(nn.glu(f64(x), axis=1)), x[:, :2] * sigmoid(x[:, 2:]), rtol=1e-12)
    with pytest.raises(errors.ShapeError, match=r"axis 0 .* 3 is odd"):
        nn.glu(f64(x), axis=0)


# -- softmax and its variants ----------------------------------------------------------------------

X = np.random.default_rng(1).normal(size=(3, 4, 5)) * 3


@pytest.mark.parametrize("axis", [-1, 0, (0, 2), None])
def test_softmax(axis):
    p = scipy.special.softmax(X, axis)
    np.testing.assert_allclose(np.asarray(nn.softmax(f64(X), axis)), p, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(nn.log_softmax(f64(X), axis)), np.log(p), rtol=1e-12, atol=1e-14)
    c = np.random.default_rng(2).normal(size=X.shape)
    g = grad(lambda x: (nn.softmax(x, axis) * f64(c)).sum())(f64(X))
    expected = p * (c - (p * c).sum(axis, keepdims=True))
    np.testing.assert_allclose(np.asarray(g), expected, atol=1e-12)
    g = grad(lambda x: (nn.log_softmax(x, axis) * f64(c)).sum())(f64(X))
    np.testing.assert_allclose(np.asarray(g), c - p * c.sum(axis, keepdims=True), atol=1e-12)


def test_softmax_second_derivative():
    c = f64(X[0, 0])
    f = lambda x: (nn.softmax(x) * c).sum()
    plain = lambda x: (bnp.exp(x) / bnp.exp(x).sum() * c).sum()
    second = lambda f: np.asarray(grad(lambda x: (grad(f)(x) * c).sum())(c))
    np.testing.assert_allclose(second(f), second(plain), atol=1e-12)


def test_softmax_of_large_numbers():
    x = f32([1e4, 1e4, -1e4])
    np.testing.assert_allclose(np.asarray(nn.softmax(x)), [0.5, 0.5, 0])
    np.testing.assert_allclose(np.asarray(nn.log_softmax(x)), [-math.log(2), -math.log(2), -2e4], rtol=1e-4)


def test_softmax_where():
    keep = np.array([[True, True, False], [False, False, False]])
    x = f32([[0.0, 0.0, 9.0], [1.0, 2.0, 3.0]])
    np.testing.assert_allclose(np.asarray(nn.softmax(x, where=keep)), [[0.5, 0.5, 0], [0, 0, 0]])
    log = np.asarray(nn.log_softmax(x, where=keep))
    np.testing.assert_allclose(log, [[-math.log(2)] * 2 + [-np.inf], [-np.inf] * 3], rtol=1e-6)
    g = grad(lambda x: (nn.softmax(x, where=keep) * x).sum())(x)
    np.testing.assert_allclose(np.asarray(g)[:, 2], 0)
    assert np.isfinite(np.asarray(g)).all()


@pytest.mark.parametrize("axis", [-1, 1, (0, 2), None])
@pytest.mark.parametrize("keepdims", [False, True])
def test_logsumexp(axis, keepdims):
    b = np.abs(np.random.default_rng(3).normal(size=X.shape))
    b[0] = 0
    for factors in (None, b):
        expected = scipy.special.logsumexp(X, axis, factors, keepdims)
        found = nn.logsumexp(f64(X), axis, None if factors is None else f64(factors), keepdims)
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12)


def test_logsumexp_of_infinities():
    assert float(nn.logsumexp(f32([-np.inf, -np.inf]))) == -np.inf
    assert float(nn.logsumexp(f32([np.inf, 0]))) == np.inf
    assert float(nn.logsumexp(f32([1.0, 1.0]), where=np.array([True, False]))) == 1.0
    np.testing.assert_allclose(np.asarray(grad(nn.logsumexp)(f32([1e4, 1e4]))), [0.5, 0.5])


def test_one_hot():
    x = bnp.asarray([[0, 2, 5], [1, -1, 0]])
    found = nn.one_hot(x, 3)
    assert found.shape == (2, 3, 3) and found.dtype == np.float32
    expected = (np.asarray(x)[..., None] == np.arange(3)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(found), expected)
    np.testing.assert_array_equal(np.asarray(nn.one_hot(x, 3, axis=0)), np.moveaxis(expected, -1, 0))
    np.testing.assert_array_equal(np.asarray(nn.one_hot(x, 3, axis=1)), np.moveaxis(expected, -1, 1))
    assert nn.one_hot(x, 3, dtype="int32").dtype == np.int32
    assert nn.one_hot(2, 3).shape == (3,)
    for dtype in ("float32", "float16"):
        assert nn.one_hot(bnp.asarray([1.0, 0.5], dtype), 3).tolist() == [[0, 1, 0], [0, 0, 0]]
    with pytest.raises(errors.DtypeError, match="one_hot takes integers"):
        nn.one_hot(bnp.asarray([0j]), 3)


# -- peers -----------------------------------------------------------------------------------------

PEERS = [*(name for name in TABLE if "(" not in name), "glu", "softmax", "log_softmax", "logsumexp"]
AT = np.concatenate([POINTS, [0.0]]).astype(np.float32)
WEIGHTS = np.linspace(0.5, 2, 14, dtype=np.float32)


def weighted(y):
    return (y * WEIGHTS[: y.size].reshape(y.shape)).sum()


@pytest.fixture(scope="module")
def peers():
    jax = pytest.importorskip("jax")
    value_and_slopes = lambda f, x: (f(x), jax.grad(lambda x: weighted(f(x)))(x))
    return jax.jit(lambda x: {name: value_and_slopes(getattr(jax.nn, name), x) for name in PEERS})(AT)


@pytest.mark.peer
@pytest.mark.parametrize("name", PEERS)
def test_against_jax(name, peers):
    f = getattr(nn, name)
    value, slope = peers[name]
    np.testing.assert_allclose(np.asarray(f(f32(AT))), np.asarray(value), rtol=2e-6, atol=2e-6)
    found = grad(lambda x: weighted(f(x)))(f32(AT))
    np.testing.assert_allclose(np.asarray(found), np.asarray(slope), rtol=1e-5, atol=2e-6)


def test_one_hot_of_narrow_labels():
    for label, dtype in ((127, "int8"), (-1, "int8"), (200, "uint8"), (299, "int16")):
        found = np.asarray(nn.one_hot(bnp.asarray([label], dtype), 300))
        np.testing.assert_array_equal(found, [np.arange(300) == label])


@pytest.mark.parametrize("axis", [2, -3])
def test_one_hot_has_the_axis(axis):
    with pytest.raises(errors.ValueRangeError, match="one_hot: axis"):
        nn.one_hot(bnp.asarray([1, 2]), 3, axis=axis)


@pytest.mark.parametrize(
    "f, x, value, slope, curvature",
    [
        (nn.relu, 0, 0, 0, 0), (nn.relu, 1, 1, 1, 0),
        (nn.relu6, 0, 0, 0, 0), (nn.relu6, 6, 6, 0, 0), (nn.relu6, 1, 1, 1, 0),
        (nn.hard_tanh, -1, -1, 1, 0), (nn.hard_tanh, 1, 1, 1, 0), (nn.hard_tanh, 6, 1, 0, 0),
        (nn.leaky_relu, 0, 0, 1, 0), (nn.leaky_relu, -1, -0.01, 0.01, 0),
        (nn.elu, 0, 0, 1, 1), (nn.elu, 1, 1, 1, 0), (nn.elu, -1, math.expm1(-1), math.exp(-1), math.exp(-1)),
    ],
)  # fmt: skip
def test_kinks(f, x, value, slope, curvature):
    x = f64(x)
    found = [float(f(x)), float(grad(f)(x)), float(grad(grad(f))(x))]
    np.testing.assert_allclose(found, [value, slope, curvature], rtol=1e-12)
