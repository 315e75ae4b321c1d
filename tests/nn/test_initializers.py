"""Initialisers: shapes, dtypes, moments, fans, errors, and the same values as JAX."""

from __future__ import annotations

import numpy as np
import pytest

from blufunc import errors, random
from blufunc.nn import initializers as I

SHAPE = (200, 300)
VARIANCES = {
    "glorot_normal": 2 / 500, "glorot_uniform": 2 / 500, "xavier_normal": 2 / 500, "xavier_uniform": 2 / 500,
    "he_normal": 2 / 200, "he_uniform": 2 / 200, "kaiming_normal": 2 / 200, "kaiming_uniform": 2 / 200,
    "lecun_normal": 1 / 200, "lecun_uniform": 1 / 200,
}  # fmt: skip


def test_constants():
    key = random.key(0)
    np.testing.assert_array_equal(np.asarray(I.zeros(key, (2, 3))), np.zeros((2, 3)))
    np.testing.assert_array_equal(np.asarray(I.ones(key, (2, 3), "float16")), np.ones((2, 3)))
    np.testing.assert_array_equal(np.asarray(I.constant(7.0)(key, (2,))), [7, 7])
    assert I.ones(key, (2,), "float16").dtype == np.float16


@pytest.mark.parametrize("name", VARIANCES)
def test_recipes(name):
    w = np.asarray(getattr(I, name)()(random.key(1), SHAPE))
    assert w.shape == SHAPE and w.dtype == np.float32
    deviation = VARIANCES[name] ** 0.5
    assert abs(w.mean()) < 0.02 * deviation
    np.testing.assert_allclose(w.std(), deviation, rtol=0.02)
    bound = 3**0.5 if name.endswith("uniform") else 2 / 0.8796
    assert 0.95 * bound < np.abs(w).max() / deviation <= bound * 1.0001


def test_simple_distributions():
    key = random.key(2)
    w = np.asarray(I.normal(0.5)(key, SHAPE))
    np.testing.assert_allclose([w.mean(), w.std()], [0, 0.5], atol=0.01)
    w = np.asarray(I.uniform(0.5)(key, SHAPE))
    assert w.min() >= 0 and w.max() < 0.5
    np.testing.assert_allclose(w.mean(), 0.25, atol=0.01)
    w = np.asarray(I.truncated_normal(2.0, lower=-1, upper=3)(key, SHAPE))
    assert -2 < w.min() < -1.99 and 5 < w.max() < 6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype):
    for init in (I.normal(), I.he_normal(), I.glorot_uniform(dtype=dtype), I.truncated_normal()):
        w = init(random.key(3), (8, 8), dtype)
        assert w.dtype.name == dtype and np.isfinite(np.asarray(w).astype(np.float32)).all()
    assert I.he_uniform(dtype=dtype)(random.key(0), (2, 2)).dtype.name == dtype


def test_fans():
    # a convolution of 3 x 3: the receptive field counts on both sides
    w = np.asarray(I.he_normal()(random.key(4), (3, 3, 64, 128)))
    np.testing.assert_allclose(w.std(), (2 / (9 * 64)) ** 0.5, rtol=0.02)
    w = np.asarray(I.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)(random.key(5), (10, 50, 60)))
    np.testing.assert_allclose(w.std(), (1 / 50) ** 0.5, rtol=0.02)
    w = np.asarray(
        I.variance_scaling(1.0, "fan_geo_avg", "normal", in_axis=(0, 1), out_axis=2)(
            random.key(6), (4, 25, 400)
        )
    )
    np.testing.assert_allclose(w.std(), 200**-0.5, rtol=0.02)


def test_errors():
    with pytest.raises(errors.ShapeError, match="at least 2 axes"):
        I.he_normal()(random.key(0), (3,))
    with pytest.raises(errors.ShapeError, match="no axis 5"):
        I.he_normal(in_axis=5)(random.key(0), (3, 3))
    with pytest.raises(errors.ValueRangeError, match="fan_sum"):
        I.variance_scaling(1.0, "fan_sum", "normal")
    with pytest.raises(errors.ValueRangeError, match="gaussian"):
        I.variance_scaling(1.0, "fan_in", "gaussian")


@pytest.mark.peer
@pytest.mark.parametrize("name", [*VARIANCES, "normal", "uniform", "truncated_normal"])
def test_against_jax(name):
    jax = pytest.importorskip("jax")
    theirs = getattr(jax.nn.initializers, name)()(jax.random.key(7), (16, 24), np.float32)
    mine = getattr(I, name)()(random.key(7), (16, 24))
    np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("distribution", ["truncated_normal", "normal", "uniform"])
def test_complex_weights(distribution):
    init = I.variance_scaling(2.0, "fan_in", distribution)
    w = np.asarray(init(random.key(0), (100, 300), "complex64"))
    assert w.dtype == np.complex64 and abs(w.mean()) < 2e-3
    variance = 2 / 100
    np.testing.assert_allclose((np.abs(w) ** 2).mean(), variance, rtol=0.04)
    if distribution != "normal":
        most = np.sqrt(2 * variance) if distribution == "uniform" else 2 * np.sqrt(variance) / 0.953
        assert np.abs(w).max() <= most * 1.0001
    assert abs((w**2).mean()) < 1e-3  # all directions
