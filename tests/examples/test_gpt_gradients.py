"""The gradient of the model, against float64 differences and JAX on its source."""

import numpy as np
import pytest

import blufunc as bf
from blufunc import tree
from blufunc.core.arrays.array import from_numpy
from examples.gpt import model

CONFIG = model.Config(layers=2, heads=2, width=16, context=12, vocab=31)


def randomised(dtype, seed=0):
    """Parameters with every leaf random (a fresh model has zero biases), and tokens."""
    rng = np.random.default_rng(seed)
    shapes = bf.eval_shape(lambda k: model.init(k, CONFIG), bf.random.key(0))
    params = tree.map(lambda s: from_numpy((0.3 * rng.normal(size=s.shape)).astype(dtype)), shapes)
    tokens = from_numpy(rng.integers(0, CONFIG.vocab, (3, CONFIG.context + 1)).astype(np.int32))
    return params, tokens


def loss(params, tokens):
    return model.loss(params, tokens, CONFIG)


def moved(params, direction, step):
    return tree.map(lambda p, d: from_numpy(np.asarray(p) + step * d), params, direction)


@pytest.mark.parametrize("wrap", [lambda f: f, bf.jit, bf.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_gradient_agrees_with_central_differences(wrap):
    params, tokens = randomised(np.float64)
    grads = wrap(bf.grad(wrap(loss)))(params, tokens)
    f = bf.jit(loss)
    rng = np.random.default_rng(1)
    leaves, treedef = tree.flatten(grads)
    assert all(g.dtype == np.float64 for g in leaves)
    # one direction through all parameters, then one through each parameter array alone
    directions = [tree.map(lambda g: rng.normal(size=g.shape), grads)]
    for i in range(len(leaves)):
        parts = [rng.normal(size=g.shape) if i == j else np.zeros(g.shape) for j, g in enumerate(leaves)]
        directions.append(tree.unflatten(treedef, parts))
    for direction in directions:
        step = 1e-5 / max(np.abs(d).max() for d in tree.leaves(direction))
        # fourth-order differences: the truncation error is far below what is asked
        near = float(f(moved(params, direction, step), tokens)) - float(
            f(moved(params, direction, -step), tokens)
        )
        far = float(f(moved(params, direction, 2 * step), tokens)) - float(
            f(moved(params, direction, -2 * step), tokens)
        )
        numerical = (8 * near - far) / (12 * step)
        exact = sum(float(np.sum(np.asarray(g) * d)) for g, d in zip(leaves, tree.leaves(direction)))
        assert abs(exact - numerical) <= 1e-6 * max(abs(numerical), 1e-3)


@pytest.mark.peer
def test_loss_and_gradient_agree_with_jax():
    jax = pytest.importorskip("jax")
    pytest.importorskip("optax")
    from benchmarks.suites import gpt_in_jax

    params, tokens = randomised(np.float32)
    value, grads = bf.jit(bf.value_and_grad(loss))(params, tokens)
    host = tree.map(np.asarray, params)
    j_loss = lambda p: gpt_in_jax.model.loss(p, np.asarray(tokens), CONFIG)
    j_value, j_grads = jax.jit(jax.value_and_grad(j_loss))(host)
    np.testing.assert_allclose(float(value), float(j_value), rtol=2e-6)
    for a, b in zip(tree.leaves(grads), jax.tree.leaves(j_grads)):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(a - b).max() <= 2e-5 * max(np.abs(b).max(), 1e-3)


def test_presets_are_gpt2():
    gpt2 = model.PRESETS["gpt2-124m"]
    assert gpt2 == model.Config(layers=12, heads=12, width=768, context=1024, vocab=50304)
    shapes = bf.eval_shape(lambda k: model.init(k, gpt2), bf.random.key(0))
    assert len(tree.leaves(shapes)) == 148
    assert sum(s.size for s in tree.leaves(shapes)) == 124_475_904
