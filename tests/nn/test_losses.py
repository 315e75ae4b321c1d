"""Losses: float64 formulas, extremes, half precision, gradients, errors, optax."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special

import blufunc.numpy as bnp
from blufunc import errors, nn
from blufunc.transforms.autodiff.grad import grad

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 4, 5)) * 3
LABELS = RNG.integers(0, 5, (3, 4))
SOFT = scipy.special.softmax(RNG.normal(size=(3, 4, 5)), -1)


def f64(x):
    return bnp.asarray(x, dtype="float64")


def f32(x):
    return bnp.asarray(x, dtype="float32")


def i32(x):
    return bnp.asarray(x, dtype="int32")


def test_integer_labels():
    log_p = scipy.special.log_softmax(LOGITS, -1)
    expected = -np.take_along_axis(log_p, LABELS[..., None], -1)[..., 0]
    found = nn.softmax_cross_entropy_with_integer_labels(f64(LOGITS), i32(LABELS))
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12)
    moved = nn.softmax_cross_entropy_with_integer_labels(f64(np.moveaxis(LOGITS, -1, 1)), i32(LABELS), axis=1)
    np.testing.assert_allclose(np.asarray(moved), expected, rtol=1e-12)
    one = nn.softmax_cross_entropy_with_integer_labels(f64(LOGITS[0, 0]), int(LABELS[0, 0]))
    np.testing.assert_allclose(float(one), expected[0, 0], rtol=1e-12)


def test_integer_labels_gradient():
    g = grad(lambda x: nn.softmax_cross_entropy_with_integer_labels(x, i32(LABELS)).mean())(f64(LOGITS))
    expected = (scipy.special.softmax(LOGITS, -1) - np.eye(5)[LABELS]) / 12
    np.testing.assert_allclose(np.asarray(g), expected, atol=1e-14)


def test_uniform_logits_cost_log_of_the_classes():
    for dtype in ("float32", "bfloat16", "float16"):
        logits = bnp.zeros((2, 50304), dtype)
        found = nn.softmax_cross_entropy_with_integer_labels(logits, i32([0, 50303]))
        assert found.dtype == np.float32
        np.testing.assert_allclose(np.asarray(found), math.log(50304), rtol=1e-6)


def test_extremes():
    found = nn.softmax_cross_entropy_with_integer_labels(f32([[1e4, -1e4, 0]] * 2), i32([0, 1]))
    np.testing.assert_allclose(np.asarray(found), [0, 2e4])
    masked = nn.softmax_cross_entropy_with_integer_labels(f32([[1.0, 1.0, -np.inf]]), i32([0]))
    np.testing.assert_allclose(np.asarray(masked), [math.log(2)], rtol=1e-6)
    g = grad(lambda x: nn.softmax_cross_entropy_with_integer_labels(x, i32([0])).sum())(
        f32([[1e4, -1e4, -np.inf]])
    )
    np.testing.assert_array_equal(np.asarray(g), [[0, 0, 0]])


def test_where():
    keep = np.array([True, True, False, True, False])
    expected = -scipy.special.log_softmax(LOGITS[..., keep], -1)[..., 0]
    labels = np.zeros((3, 4))
    found = nn.softmax_cross_entropy_with_integer_labels(f64(LOGITS), i32(labels), where=keep)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12)
    soft = nn.softmax_cross_entropy(f64(LOGITS), f64(np.eye(5)[0]), where=keep)
    np.testing.assert_allclose(np.asarray(soft), expected, rtol=1e-12)


def test_soft_labels():
    found = nn.softmax_cross_entropy(f64(LOGITS), f64(SOFT))
    expected = -(SOFT * scipy.special.log_softmax(LOGITS, -1)).sum(-1)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12)
    hard = nn.softmax_cross_entropy(f64(LOGITS), nn.one_hot(i32(LABELS), 5))
    other = nn.softmax_cross_entropy_with_integer_labels(f64(LOGITS), i32(LABELS))
    np.testing.assert_allclose(np.asarray(hard), np.asarray(other), rtol=1e-12)


def test_sigmoid_binary_cross_entropy():
    x, y = np.array([-3.0, -0.1, 0.0, 2.0]), np.array([0.0, 1.0, 0.5, 0.2])
    p = scipy.special.expit(x)
    found = nn.sigmoid_binary_cross_entropy(f64(x), f64(y))
    np.testing.assert_allclose(np.asarray(found), -y * np.log(p) - (1 - y) * np.log1p(-p), rtol=1e-12)
    # for large logits neither value nor gradient cancels
    f = lambda x: nn.sigmoid_binary_cross_entropy(x, f32([1, 0, 1, 0]))
    far = f32([30, -30, -1000, 1000])
    np.testing.assert_allclose(np.asarray(f(far)), [math.exp(-30), math.exp(-30), 1000, 1000], rtol=1e-5)
    g = grad(lambda x: f(x).sum())(far)
    np.testing.assert_allclose(np.asarray(g), [-math.exp(-30), math.exp(-30), -1, 1], rtol=1e-5)


def test_regression_losses():
    a, b = np.array([-2.0, 0.0, 0.5, 1.0, 3.0]), np.array([1.0, 0.0, 0.2, 0.0, 0.0])
    e = a - b
    np.testing.assert_allclose(np.asarray(nn.squared_error(f64(a), f64(b))), e**2, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(nn.squared_error(f64(a))), a**2, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(nn.l2_loss(f64(a), f64(b))), e**2 / 2, rtol=1e-12)


@pytest.mark.parametrize("delta", [1.0, 0.25])
def test_huber_loss(delta):
    e = np.array([-3.0, 0.0, 0.3, 1.0, 3.0])
    expected = np.where(np.abs(e) <= delta, e**2 / 2, delta * (np.abs(e) - delta / 2))
    np.testing.assert_allclose(
        np.asarray(nn.huber_loss(f64(e + 1), f64(np.ones(5)), delta)), expected, rtol=1e-12
    )
    g = grad(lambda e: nn.huber_loss(e, delta=delta).sum())(f64(e))
    np.testing.assert_allclose(np.asarray(g), np.clip(e, -delta, delta), rtol=1e-12)


def test_errors():
    f = nn.softmax_cross_entropy_with_integer_labels
    with pytest.raises(errors.ShapeError, match=r"\(3, 4, 5\) need labels of shape \(3, 4\), not \(4, 3\)"):
        f(f32(LOGITS), i32(LABELS.T))
    with pytest.raises(errors.DtypeError, match="labels must be integers, not float32"):
        f(f32(LOGITS), f32(LABELS))
    with pytest.raises(errors.ShapeError, match=r"\(4,\), targets of shape \(4, 1\)"):
        nn.squared_error(bnp.zeros(4), bnp.zeros((4, 1)))


X32, SOFT32, LABELS32 = LOGITS.astype(np.float32), SOFT.astype(np.float32), LABELS.astype(np.int32)
PEERS = {
    "softmax_cross_entropy": (X32, SOFT32),
    "softmax_cross_entropy_with_integer_labels": (X32, LABELS32),
    "sigmoid_binary_cross_entropy": (X32, SOFT32),
    "squared_error": (X32, SOFT32),
    "l2_loss": (X32, SOFT32),
    "huber_loss": (X32, SOFT32),
}


@pytest.fixture(scope="module")
def peers():
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    both = lambda f, a, b: (f(a, b), jax.grad(lambda a: f(a, b).sum())(a))
    return jax.jit(lambda: {name: both(getattr(optax, name), *PEERS[name]) for name in PEERS})()


@pytest.mark.peer
@pytest.mark.parametrize("name", PEERS)
def test_against_optax(name, peers):
    f = getattr(nn, name)
    a, b = map(bnp.asarray, PEERS[name])
    value, slope = peers[name]
    np.testing.assert_allclose(np.asarray(f(a, b)), np.asarray(value), rtol=1e-5, atol=1e-6)
    found = grad(lambda a: f(a, b).sum())(a)
    np.testing.assert_allclose(np.asarray(found), np.asarray(slope), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [2, -3])
def test_integer_labels_have_the_axis(axis):
    with pytest.raises(errors.ValueRangeError, match="axis"):
        nn.softmax_cross_entropy_with_integer_labels(f32([[1, 2]]), i32([0]), axis=axis)
