"""Losses and activations against optax and JAX with derivatives; manual losses."""

import itertools
import math

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, nn
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit
from tests.transforms.common import arr

RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(4, 5)).astype(np.float32) * 2, RNG.normal(size=(4, 5)).astype(np.float32)
SIGNS = np.sign(Y)
P = np.exp(Y) / np.exp(Y).sum(-1, keepdims=True)
SPARSE = np.where(P < 0.1, 0, P).astype(np.float32)
LABELS = np.array([0, 3, 4, 1], np.int32)
HALVES = (RNG.uniform(size=(4, 5)) < 0.5).astype(np.float32)
WHERE = np.array([True, True, False, True, True])

LOSSES = {
    "hinge_loss": lambda l, x: l.hinge_loss(x, SIGNS),
    "perceptron_loss": lambda l, x: l.perceptron_loss(x, SIGNS),
    "sparsemax_loss": lambda l, x: l.sparsemax_loss(x, HALVES),
    "multiclass_hinge_loss": lambda l, x: l.multiclass_hinge_loss(x, LABELS),
    "multiclass_perceptron_loss": lambda l, x: l.multiclass_perceptron_loss(x, LABELS),
    "smooth_labels": lambda l, x: l.smooth_labels(x, 0.2),
    "safe_softmax_cross_entropy": lambda l, x: l.safe_softmax_cross_entropy(x, SPARSE),
    "poly_loss_cross_entropy": lambda l, x: l.poly_loss_cross_entropy(x, P),
    "poly_loss_cross_entropy of some": lambda l, x: l.poly_loss_cross_entropy(x, P, epsilon=-1.0, axis=0),
    "sigmoid_focal_loss": lambda l, x: l.sigmoid_focal_loss(x, HALVES),
    "sigmoid_focal_loss weighted": lambda l, x: l.sigmoid_focal_loss(x, HALVES, alpha=0.3, gamma=0.7),
    "kl_divergence": lambda l, x: l.kl_divergence(x, SPARSE),
    "kl_divergence of some": lambda l, x: l.kl_divergence(x, P, 1, WHERE),
    "kl_divergence_with_log_targets": lambda l, x: l.kl_divergence_with_log_targets(x, Y),
    "generalized_kl_divergence": lambda l, x: l.generalized_kl_divergence(x, P),
    "log_cosh": lambda l, x: l.log_cosh(x, Y),
    "log_cosh of errors": lambda l, x: l.log_cosh(x * 50),
    "cosine_similarity": lambda l, x: l.cosine_similarity(x, Y),
    "cosine_similarity of some": lambda l, x: l.cosine_similarity(x, Y, epsilon=30.0, axis=0, where=HALVES > 0),
    "cosine_distance": lambda l, x: l.cosine_distance(x, Y, epsilon=1e-6),
    "triplet_margin_loss": lambda l, x: l.triplet_margin_loss(x, Y, Y[::-1], margin=3.0),
    "triplet_margin_loss of 4": lambda l, x: l.triplet_margin_loss(x, Y, Y[::-1], 0, 4, 2.0, 1e-3),
    "ntxent": lambda l, x: l.ntxent(x, np.array([0, 1, 0, 0])),
    "ntxent warm": lambda l, x: l.ntxent(x, np.array([0, 1, 0, 1]), 0.5),
}  # fmt: skip


@pytest.mark.peer
@pytest.mark.parametrize("name", LOSSES)
def test_losses_as_optax(name):
    import jax
    import optax

    want, pullback = jax.vjp(lambda x: LOSSES[name](optax.losses, x), X)
    found = LOSSES[name](nn, X)
    assert found.dtype == np.float32 and found.shape == want.shape
    np.testing.assert_allclose(np.asarray(found), np.asarray(want), rtol=2e-5, atol=2e-6)
    slope = grad(lambda x: LOSSES[name](nn, x).sum())
    for f in (slope, jit(slope)):
        np.testing.assert_allclose(
            np.asarray(f(X)), np.asarray(pullback(np.ones_like(want))[0]), rtol=5e-5, atol=5e-6
        )


ACTIVATIONS = {
    "identity": {}, "hard_sigmoid": {}, "hard_silu": {}, "hard_swish": {}, "sparse_plus": {}, "sparse_sigmoid": {},
    "squareplus": {"b": 2.0}, "logmeanexp": {"axis": 1, "keepdims": True},
}  # fmt: skip


@pytest.mark.peer
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_as_jax(name):
    import jax

    options = ACTIVATIONS[name]
    want = lambda x: getattr(jax.nn, name)(x, **options)
    found = lambda x: getattr(nn, name)(x, **options)
    np.testing.assert_allclose(np.asarray(found(X)), np.asarray(want(X)), rtol=1e-5, atol=1e-6)
    theirs = np.asarray(jax.grad(lambda x: (want(x) * Y[:, :1]).sum())(X))
    np.testing.assert_allclose(
        np.asarray(grad(lambda x: (found(x) * Y[:, :1]).sum())(X)), theirs, rtol=1e-5, atol=1e-6
    )


def test_log1mexp():
    x = np.array([1e-12, 1e-3, 0.5, math.log(2), 1.0, 30.0, 700.0])
    expected = np.where(x < 1, np.log(-np.expm1(-x)), np.log1p(-np.exp(-x)))
    np.testing.assert_allclose(nn.log1mexp(arr(x)), expected, rtol=1e-12)
    np.testing.assert_allclose(grad(lambda x: nn.log1mexp(x).sum())(arr(x)), 1 / np.expm1(x), rtol=1e-12)
    assert float(nn.log1mexp(0.0)) == -math.inf


def test_logmeanexp_of_some():
    found = nn.logmeanexp(X, 1, WHERE)
    np.testing.assert_allclose(found, np.log(np.exp(X[:, WHERE]).mean(1)), rtol=1e-5)
    np.testing.assert_allclose(float(nn.logmeanexp(X)), np.log(np.exp(X).mean()), rtol=1e-5)


def test_impossible_classes():
    logits = np.array([[1.0, -math.inf, 2.0]], np.float32)
    loss = lambda x: nn.safe_softmax_cross_entropy(x, np.array([[0.5, 0.0, 0.5]], np.float32)).sum()
    np.testing.assert_allclose(float(loss(logits)), math.log(math.e + math.e**2) - 1.5, rtol=1e-6)
    assert np.isfinite(np.asarray(grad(loss)(logits))).all()


def test_smooth_labels_of_some():
    found = np.asarray(nn.smooth_labels(np.eye(5, dtype=np.float32)[:2], 0.4, where=WHERE))
    np.testing.assert_allclose(found[0], [0.7, 0.1, 0, 0.1, 0.1], rtol=1e-6)


# -- CTC -------------------------------------------------------------------------------------------


def by_enumeration(log_p, labels, blank=0):
    """The sum over all paths of one class a frame that collapse to the labels."""
    total = 0.0
    for path in itertools.product(range(log_p.shape[1]), repeat=log_p.shape[0]):
        collapsed = [c for c, _ in itertools.groupby(path) if c != blank]
        if collapsed == list(labels):
            total += math.exp(sum(log_p[t, c] for t, c in enumerate(path)))
    return -math.log(total) if total else math.inf


@pytest.mark.parametrize("labels", [[1, 2], [1, 1], [2], []])
def test_ctc_is_the_sum_over_paths(labels):
    logits = RNG.normal(size=(4, 3))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    padded = np.array([[*labels, *[1] * (3 - len(labels))]], np.int32)
    pads = np.array([[0.0] * len(labels) + [1.0] * (3 - len(labels))])
    frames = np.concatenate([logits, RNG.normal(size=(2, 3))])[None]
    found = nn.ctc_loss(arr(frames), np.array([[0, 0, 0, 0, 1, 1]]), padded, pads)
    np.testing.assert_allclose(float(found[0]), by_enumeration(log_p, labels), rtol=1e-10)


@pytest.mark.peer
def test_ctc_as_optax():
    import jax
    import optax

    logits = RNG.normal(size=(3, 9, 6)).astype(np.float32)
    paddings = (np.arange(9) >= np.array([[9], [7], [5]])).astype(np.float32)
    labels = np.array([[1, 2, 2, 3], [5, 5, 1, 0], [4, 1, 0, 0]], np.int32)
    label_paddings = (np.arange(4) >= np.array([[4], [3], [2]])).astype(np.float32)
    args = (paddings, labels, label_paddings)
    want, slope = jax.value_and_grad(lambda x: optax.losses.ctc_loss(x, *args).sum())(logits)
    loss = lambda x: nn.ctc_loss(x, *args).sum()
    np.testing.assert_allclose(float(loss(logits)), float(want), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(grad(loss)(logits)), np.asarray(slope), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(float(jit(loss)(logits)), float(want), rtol=1e-5)


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: nn.log_cosh(X, X[0]), errors.ShapeError),
        (lambda: nn.multiclass_hinge_loss(X, LABELS[:2]), errors.ShapeError),
        (lambda: nn.ntxent(X, LABELS[:2]), errors.ShapeError),
        (lambda: nn.ctc_loss(X, X, LABELS, LABELS), errors.ShapeError),
        (lambda: nn.group_norm(X, 2), errors.ShapeError),
        (lambda: nn.dropout(None, X, 1.5), errors.ValueRangeError),
        (lambda: nn.embedding_lookup(X, X), errors.DtypeError),
        (lambda: nn.batch_norm(X, bnp.zeros(4), bnp.ones(5), training=True), errors.ShapeError),
    ],
)
def test_bad_arguments(call, error):
    with pytest.raises(error) as caught:
        call()
    assert caught.value.fix or caught.value.why
    assert "test_as_optax.py" in caught.value.where
