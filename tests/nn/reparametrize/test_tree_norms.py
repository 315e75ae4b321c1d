"""Weight and spectral normalisation of trees."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, nn, random, tree
from blufunc.nn import reparametrize

RNG = np.random.default_rng(0)
PARAMS = {
    "conv": bnp.asarray(RNG.normal(size=(3, 3, 2, 4)), dtype="float32"),
    "dense": {"w": bnp.asarray(RNG.normal(size=(6, 5)), dtype="float32"), "b": bnp.ones(5)},
    "one": bnp.asarray(RNG.normal(size=(6, 1)), dtype="float32"),
    "row": bnp.asarray(RNG.normal(size=(1, 6)), dtype="float32"),
}


def close(x, y):
    for a, b in zip(tree.leaves(x), tree.leaves(y), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [-1, 0])
def test_weight_norm_gives_back_the_weights(axis):
    split = reparametrize.weight_norm(PARAMS, axis=axis)
    close(reparametrize.weights(split), PARAMS)
    assert (
        isinstance(split["dense"]["w"], reparametrize.WeightNorm)
        and split["dense"]["b"] is PARAMS["dense"]["b"]
    )
    doubled = tree.map(lambda x: x * 2, split)
    close(
        reparametrize.weights(doubled)["conv"], PARAMS["conv"] * 2
    )  # twice the length, in the same direction


def test_gradients_are_orthogonal_to_directions():
    split = reparametrize.weight_norm(
        PARAMS, mask={"conv": False, "dense": {"w": True, "b": False}, "one": False, "row": False}
    )
    assert split["conv"] is PARAMS["conv"]
    x = bnp.asarray(RNG.normal(size=(7, 6)), dtype="float32")
    loss = lambda p: bnp.sum(bnp.tanh(x @ reparametrize.weights(p)["dense"]["w"]))
    grads = bf.grad(loss)(split)["dense"]["w"]
    np.testing.assert_allclose(np.sum(grads.direction * split["dense"]["w"].direction, 0), 0, atol=1e-5)
    assert grads.scale.shape == (1, 5) and np.abs(grads.scale).min() > 0


def test_spectral_norm_converges_to_the_largest_singular_values():
    vectors = reparametrize.spectral_vectors(random.key(0), PARAMS)
    assert vectors["dense"]["b"] is None and vectors["conv"].shape == (4,)
    step = bf.jit(lambda vectors: reparametrize.spectral_norm(PARAMS, vectors, n_steps=2))
    for _ in range(20):
        params, vectors = step(vectors)
    for name, w in (("conv", params["conv"]), ("w", params["dense"]["w"]), ("one", params["one"])):
        sigma = np.linalg.svd(np.asarray(w).reshape(-1, w.shape[-1]), compute_uv=False)
        np.testing.assert_allclose(sigma.max(), 1, rtol=1e-3, err_msg=name)
    assert params["dense"]["b"] is not None


def test_errors_name_the_parameter():
    with pytest.raises(errors.ShapeError, match=r"params\['b'\]") as caught:
        reparametrize.weight_norm({"w": bnp.ones((2, 2)), "b": bnp.ones(())}, mask=True)
    assert "test_tree_norms.py" in caught.value.where
    with pytest.raises(errors.ShapeError, match=r"params\['b'\]"):
        reparametrize.spectral_vectors(random.key(0), {"b": bnp.ones(())}, mask={"b": True})
    assert nn.reparametrize is reparametrize
