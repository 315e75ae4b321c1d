"""Normalisation: float64 formulas, numerical gradients, half precision, errors."""

from __future__ import annotations

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, nn
from blufunc.transforms.autodiff.grad import grad

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4, 6)) * 2 + 5
SCALE, BIAS = RNG.normal(size=6), RNG.normal(size=6)


def f64(x):
    return bnp.asarray(x, dtype="float64")


def layer_norm(x, scale=1.0, bias=0.0, eps=1e-5, axis=-1):
    centred = x - x.mean(axis, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis, keepdims=True) + eps) * scale + bias


def rms_norm(x, scale=1.0, eps=1e-6, axis=-1):
    return x / np.sqrt((x**2).mean(axis, keepdims=True) + eps) * scale


def differences(f, x, h=1e-5):
    flat = np.zeros(x.size)
    for i in range(x.size):
        e = np.zeros(x.size)
        e[i] = h
        flat[i] = (f(x + e.reshape(x.shape)) - f(x - e.reshape(x.shape))) / (2 * h)
    return flat.reshape(x.shape)


@pytest.mark.parametrize("axis", [-1, 1, (1, 2), (-1, 0)])
def test_values(axis):
    np.testing.assert_allclose(
        np.asarray(nn.layer_norm(f64(X), axis=axis)), layer_norm(X, axis=axis), rtol=1e-12
    )
    np.testing.assert_allclose(np.asarray(nn.rms_norm(f64(X), axis=axis)), rms_norm(X, axis=axis), rtol=1e-12)
    np.testing.assert_allclose(np.asarray(nn.standardize(f64(X), axis)), layer_norm(X, axis=axis), rtol=1e-12)


def test_scale_and_bias():
    np.testing.assert_allclose(
        np.asarray(nn.layer_norm(f64(X), f64(SCALE), f64(BIAS), 0.1)),
        layer_norm(X, SCALE, BIAS, 0.1),
        rtol=1e-12,
    )
    np.testing.assert_allclose(
        np.asarray(nn.rms_norm(f64(X), f64(SCALE), 0.1)), rms_norm(X, SCALE, 0.1), rtol=1e-12
    )
    only_bias = nn.layer_norm(f64(X), bias=f64(BIAS))
    np.testing.assert_allclose(np.asarray(only_bias), layer_norm(X, 1, BIAS), rtol=1e-12)


def test_given_moments():
    found = nn.standardize(f64(X), mean=5.0, variance=4.0, epsilon=0.0)
    np.testing.assert_allclose(np.asarray(found), (X - 5) / 2, rtol=1e-12)
    found = nn.standardize(f64(X), mean=5.0, epsilon=0.5)
    expected = (X - 5) / np.sqrt(((X - 5) ** 2).mean(-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12)


@pytest.mark.parametrize("axis", [-1, (0, 1)])
def test_gradients(axis):
    c = RNG.normal(size=X.shape)
    scale, bias = (SCALE, BIAS) if axis == -1 else (RNG.normal(size=(3, 4, 1)), RNG.normal(size=(3, 4, 1)))
    ours = lambda x, s, b: (nn.layer_norm(x, s, b, axis=axis) * f64(c)).sum()
    gx, gs, gb = grad(ours, (0, 1, 2))(f64(X), f64(scale), f64(bias))
    theirs = lambda x, s, b: (layer_norm(x, s, b, axis=axis) * c).sum()
    np.testing.assert_allclose(np.asarray(gx), differences(lambda x: theirs(x, scale, bias), X), atol=1e-8)
    np.testing.assert_allclose(np.asarray(gs), differences(lambda s: theirs(X, s, bias), scale), atol=1e-8)
    np.testing.assert_allclose(np.asarray(gb), differences(lambda b: theirs(X, scale, b), bias), atol=1e-8)
    g = grad(lambda x: (nn.rms_norm(x, f64(scale), axis=axis) * f64(c)).sum())(f64(X))
    expected = differences(lambda x: (rms_norm(x, scale, axis=axis) * c).sum(), X)
    np.testing.assert_allclose(np.asarray(g), expected, atol=1e-8)


def test_second_derivative():
    x, c = X[0, :2], RNG.normal(size=(2, 6))
    first = lambda x: (grad(lambda x: (nn.layer_norm(x) * f64(c)).sum())(x) * f64(c)).sum()
    second = grad(first)(f64(x))
    expected = differences(lambda x: float(first(f64(x))), x)
    np.testing.assert_allclose(np.asarray(second), expected, atol=1e-7)


def test_constant_rows_have_finite_gradients():
    x = f64(np.full((2, 6), 3.0))
    np.testing.assert_array_equal(np.asarray(nn.layer_norm(x)), 0)
    assert np.isfinite(np.asarray(grad(lambda x: nn.layer_norm(x)[0, 0])(x))).all()
    assert np.isfinite(np.asarray(grad(lambda x: nn.rms_norm(x * 0)[0, 0])(x))).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_normalised_in_float32(dtype):
    x = bnp.asarray(X * 300, dtype=dtype)  # squares overflow float16
    y = nn.layer_norm(x, bnp.asarray(SCALE, dtype="float32"), bnp.asarray(BIAS, dtype="float32"))
    assert y.dtype == x.dtype
    expected = layer_norm(np.asarray(x).astype(np.float64), SCALE, BIAS)
    np.testing.assert_allclose(np.asarray(y).astype(np.float64), expected, rtol=8e-3, atol=2e-3)
    g = grad(lambda x: (nn.layer_norm(x) ** 2).sum().astype("float32"))(x)
    assert g.dtype == x.dtype


def test_far_from_zero_does_not_cancel():
    x = np.array([[1e4, 1e4 + 1, 1e4 + 2]], np.float32)
    np.testing.assert_allclose(
        np.asarray(nn.layer_norm(bnp.asarray(x))), layer_norm(x.astype(np.float64)), rtol=1e-5
    )
    np.testing.assert_allclose(
        np.asarray(nn.standardize(bnp.asarray(x))), layer_norm(x.astype(np.float64)), rtol=1e-5
    )


def test_errors():
    with pytest.raises(errors.ShapeError, match=r"scale of shape \(4,\) does not broadcast .*\(3, 4, 6\)"):
        nn.layer_norm(f64(X), f64(np.ones(4)))
    with pytest.raises(errors.ShapeError, match="bias"):
        nn.layer_norm(f64(X), bias=f64(np.ones((2, 3, 4, 6))))
    with pytest.raises(errors.ValueRangeError, match="axis 3"):
        nn.rms_norm(f64(X), axis=3)


@pytest.mark.peer
def test_against_jax():
    jax = pytest.importorskip("jax")
    x = X.astype(np.float32)
    c = RNG.normal(size=X.shape).astype(np.float32)
    peer = lambda x: jax.nn.standardize(x, algorithm="stable")
    theirs, other = jax.jit(lambda x: (peer(x), jax.grad(lambda x: (peer(x) * c).sum())(x)))(x)
    np.testing.assert_allclose(
        np.asarray(nn.layer_norm(bnp.asarray(x))), np.asarray(theirs), rtol=1e-5, atol=1e-6
    )
    mine = grad(lambda x: (nn.standardize(x) * c).sum())(bnp.asarray(x))
    np.testing.assert_allclose(np.asarray(mine), np.asarray(other), atol=2e-6)
