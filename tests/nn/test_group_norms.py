"""Batch, group, weight norms; dropout; embeddings; orthogonal initialisers."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import nn, random
from blufunc.nn import initializers
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit
from tests.transforms.common import arr

RNG = np.random.default_rng(2)
X = RNG.normal(1.5, 2, (3, 4, 5, 6))
SCALE, BIAS = RNG.normal(size=6), RNG.normal(size=6)


def test_batch_norm_while_training():
    mean, var = X.mean((0, 1, 2)), X.var((0, 1, 2))
    expected = (X - mean) / np.sqrt(var + 1e-5) * SCALE + BIAS
    old = arr(np.zeros(6)), arr(np.ones(6))
    found = nn.batch_norm(arr(X), *old, arr(SCALE), arr(BIAS), training=True, momentum=0.9)
    np.testing.assert_allclose(found.out, expected, rtol=1e-10)
    np.testing.assert_allclose(found.mean, 0.1 * mean, rtol=1e-10)
    np.testing.assert_allclose(found.variance, 0.9 + 0.1 * var, rtol=1e-10)
    moved = nn.batch_norm(arr(np.moveaxis(X, -1, 1)), *old, arr(SCALE), arr(BIAS), training=True, axis=1)
    np.testing.assert_allclose(np.moveaxis(np.asarray(moved.out), 1, -1), expected, rtol=1e-10)


def test_batch_norm_after_training():
    mean, var = RNG.normal(size=6), RNG.uniform(0.5, 2, 6)
    found = nn.batch_norm(arr(X), arr(mean), arr(var), training=False)
    np.testing.assert_allclose(found.out, (X - mean) / np.sqrt(var + 1e-5), rtol=1e-10)
    np.testing.assert_array_equal(found.mean, mean)
    np.testing.assert_array_equal(found.variance, var)


def test_batch_norm_has_the_derivative_of_its_formula():
    weights = arr(RNG.normal(size=X.shape))
    zeros, ones = arr(np.zeros(6)), arr(np.ones(6))

    def formula(x):
        centred = x - bnp.mean(x, axis=(0, 1, 2))
        return (weights * centred / bnp.sqrt(bnp.mean(bnp.square(centred), axis=(0, 1, 2)) + 1e-5)).sum()

    slope = grad(lambda x: (nn.batch_norm(x, zeros, ones, training=True).out * weights).sum())
    for f in (slope, jit(slope)):
        np.testing.assert_allclose(f(arr(X)), grad(formula)(arr(X)), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_group_norm(groups):
    split = X.reshape(3, 20, groups, 6 // groups)
    expected = (split - split.mean((1, 3), keepdims=True)) / np.sqrt(split.var((1, 3), keepdims=True) + 1e-6)
    expected = expected.reshape(X.shape) * SCALE + BIAS
    np.testing.assert_allclose(nn.group_norm(arr(X), groups, arr(SCALE), arr(BIAS)), expected, rtol=1e-10)
    if groups == 6:
        np.testing.assert_allclose(nn.instance_norm(arr(X), arr(SCALE), arr(BIAS)), expected, rtol=1e-10)
    halves = nn.group_norm(bnp.asarray(X, dtype="bfloat16"), groups)
    assert halves.dtype == "bfloat16"


def test_weight_norm():
    w = X[0, 0]
    expected = w / np.linalg.norm(w, axis=0) * SCALE
    np.testing.assert_allclose(nn.weight_norm(arr(w), arr(SCALE)), expected, rtol=1e-10)
    np.testing.assert_allclose(
        nn.weight_norm(arr(w), axis=0), w / np.linalg.norm(w, axis=1, keepdims=True), rtol=1e-10
    )


def test_spectral_norm_finds_the_largest_singular_value():
    w, u = X[0], arr(RNG.normal(size=6))
    for _ in range(60):
        found = nn.spectral_norm(arr(w), u)
        u = found.u
    top = np.linalg.svd(w.reshape(-1, 6))[1][0]
    np.testing.assert_allclose(float(found.sigma), top, rtol=1e-6)
    np.testing.assert_allclose(found.weight, w / top, rtol=1e-6)
    many = nn.spectral_norm(arr(w), arr(np.ones(6)), n_steps=80)
    np.testing.assert_allclose(float(many.sigma), top, rtol=1e-6)
    # the derivative of the largest singular value is the product of its vectors
    left, _, right = np.linalg.svd(w.reshape(-1, 6), full_matrices=False)
    slope = grad(lambda w: nn.spectral_norm(w, u).sigma)(arr(w))
    np.testing.assert_allclose(np.asarray(slope).reshape(-1, 6), np.outer(left[:, 0], right[0]), atol=1e-5)


# -- dropout ---------------------------------------------------------------------------------------

KEY = random.key(3)


def test_dropout():
    x = bnp.ones((100, 50))
    out = np.asarray(nn.dropout(KEY, x, 0.25))
    assert set(np.unique(out)) == {0, np.float32(1 / 0.75)}
    assert abs((out == 0).mean() - 0.25) < 0.02
    np.testing.assert_array_equal(jit(nn.dropout)(KEY, x, 0.25), out)
    np.testing.assert_array_equal(grad(lambda x: nn.dropout(KEY, x, 0.25).sum())(x), out)


def test_dropout_at_its_ends():
    x = bnp.asarray(X[0, 0], dtype="float32")
    np.testing.assert_array_equal(nn.dropout(KEY, x, 0.0), x)
    np.testing.assert_array_equal(nn.dropout(KEY, x, 1), 0)
    np.testing.assert_array_equal(nn.dropout(None, x, 0.5, deterministic=True), x)
    assert nn.dropout(KEY, x.astype("bfloat16"), 0.5).dtype == "bfloat16"


def test_dropout_of_whole_rows():
    out = np.asarray(nn.dropout(KEY, bnp.ones((50, 7)), 0.5, broadcast_dims=(-1,)))
    assert (out == out[:, :1]).all() and 0 < (out == 0).mean() < 1


def test_embedding_lookup():
    table = RNG.normal(size=(10, 4)).astype(np.float32)
    ids = np.array([[1, 2, 1], [0, 9, 3]])
    np.testing.assert_array_equal(nn.embedding_lookup(table, ids), table[ids])
    slope = np.asarray(grad(lambda t: nn.embedding_lookup(t, ids).sum())(table))
    np.testing.assert_array_equal(slope, np.bincount(ids.ravel(), minlength=10)[:, None] * np.ones(4))
    assert np.isnan(np.asarray(nn.embedding_lookup(table, 10))).all()


# -- initialisers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, axis", [((4, 4), -1), ((6, 3), -1), ((3, 6), -1), ((2, 3, 4), 0), ((2, 3, 4), -1)]
)
def test_orthogonal(shape, axis):
    w = np.asarray(initializers.orthogonal(2.0, axis)(KEY, shape))
    assert w.shape == shape and w.dtype == np.float32
    matrix = np.moveaxis(w, axis, -1).reshape(-1, shape[axis]) / 2
    gram = matrix.T @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.T
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-5)


def test_delta_orthogonal():
    w = np.array(initializers.delta_orthogonal()(KEY, (3, 4, 2, 5)))
    centre = w[1, 1].copy()
    np.testing.assert_allclose(centre @ centre.T, np.eye(2), atol=1e-5)
    w[1, 1] = 0
    assert not w.any()


@pytest.mark.peer
@pytest.mark.parametrize(
    "make",
    [lambda i: (i.orthogonal(1.5), (3, 4, 5)), lambda i: (i.orthogonal(column_axis=0), (7, 4)),
     lambda i: (i.delta_orthogonal(2.0), (3, 2, 4)), lambda i: (i.delta_orthogonal(), (1, 2, 3, 2, 4))],
)  # fmt: skip
def test_as_jax(make):
    import jax

    theirs, shape = make(jax.nn.initializers)
    ours, _ = make(initializers)
    np.testing.assert_allclose(ours(KEY, shape), theirs(jax.random.key(3), shape), rtol=1e-5, atol=1e-6)
