"""Adapters: trees, equality of merged and applied weights, memory, and training."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, nn, optim, random, tree
from blufunc.nn import lora

RNG = np.random.default_rng(0)
PARAMS = {
    "blocks": [{"w": bnp.asarray(RNG.normal(size=(8, 6)), dtype="float32"), "b": bnp.zeros(6)}],
    "stacked": bnp.asarray(RNG.normal(size=(3, 6, 6)), dtype="float32"),
    "head": bnp.asarray(RNG.normal(size=(6, 4)), dtype="float32"),
}
ONLY = {"blocks": [{"w": True, "b": False}], "stacked": True, "head": False}
X = bnp.asarray(RNG.normal(size=(5, 8)), dtype="float32")


def model(params, x):
    h = lora.matmul(x, params["blocks"][0]["w"]) + params["blocks"][0]["b"]
    h, _ = lax.scan(lambda h, w: (nn.silu(lora.matmul(h, w)), None), h, params["stacked"])
    return lora.matmul(h, params["head"])


def adapters(mask=None, rank=2):
    """Adapters that change something."""
    made = lora.init(random.key(0), PARAMS, rank, mask=mask)
    return tree.map(lambda x: x + bnp.asarray(RNG.normal(size=x.shape), dtype="float32"), made)


def close(x, y, rtol=1e-5):
    for a, b in zip(tree.leaves(x), tree.leaves(y), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=1e-5)


@pytest.mark.parametrize(
    "mask", [None, ONLY, lambda p: ONLY, {"blocks": False, "stacked": True, "head": True}]
)
def test_at_first_nothing_changes(mask):
    made = lora.init(random.key(0), PARAMS, 2, mask=mask)
    close(lora.merge(PARAMS, made, alpha=7), PARAMS)
    close(model(lora.apply(PARAMS, made), X), model(PARAMS, X))
    assert (made["head"] is None) == (mask is not None and not (mask(0) if callable(mask) else mask)["head"])
    a = np.asarray(made["stacked"].a)
    assert a.shape == (3, 6, 2) and np.abs(a).max() <= 6**-0.5 and a.std() > 0.15


@pytest.mark.parametrize("alpha", [None, 5.0])
def test_merged_and_applied_are_the_same(alpha):
    made = adapters()
    merged = lora.merge(PARAMS, made, alpha=alpha)
    w, (a, b) = PARAMS["head"], made["head"]
    close(merged["head"], w + a @ b * (1 if alpha is None else alpha / 2))
    close(model(lora.apply(PARAMS, made, alpha=alpha), X), model(merged, X), 1e-4)
    loss = lambda f: lambda made: bnp.sum(model(f(PARAMS, made, alpha=alpha), X) ** 2)
    close(bf.grad(loss(lora.apply))(made), bf.grad(loss(lora.merge))(made), 1e-3)
    close(lora.split(lora.apply(PARAMS, made))[0], PARAMS, 0)
    close(lora.split(lora.apply(PARAMS, made))[1], made, 0)


def test_half_precision_is_rounded_once():
    half = tree.map(lambda x: x.astype("bfloat16"), PARAMS)
    made = adapters()
    merged = lora.merge(half, made)["head"]
    want = half["head"].astype("float32") + made["head"].a @ made["head"].b
    assert merged.dtype == bnp.bfloat16
    np.testing.assert_array_equal(np.asarray(merged), np.asarray(want.astype("bfloat16")))
    assert lora.matmul(X.astype("bfloat16"), lora.apply(half, made)["blocks"][0]["w"]).dtype == bnp.bfloat16


def test_neither_the_product_nor_a_gradient_of_the_weight_is_an_array():
    w = bnp.zeros((64, 48))
    made = lora.init(random.key(0), w, 4)
    grad = bf.grad(lambda made: bnp.sum(lora.matmul(bnp.ones((5, 64)), lora.apply(w, made)) ** 2))
    shapes = [v.aval.shape for e in bf.make_jaxpr(grad)(made).jaxpr.eqns for v in e.outvars]
    assert (64, 48) not in shapes and (48, 64) not in shapes and (5, 4) in shapes


def test_a_weight_may_be_a_subtree():
    """Quantized ones, with the shapes of the original."""
    w = PARAMS["head"]
    quantized = {"codes": bnp.round(w * 16).astype("int8"), "scale": bnp.asarray(1 / 16)}
    made = lora.init(random.key(0), bf.ShapeDtypeStruct((6, 4), "float32"), 2)
    made = made._replace(b=bnp.ones((2, 4)))
    times = lambda x, w: x @ (w["codes"].astype("float32") * w["scale"])
    h = bnp.ones((3, 6))
    got = lora.matmul(h, lora.apply(quantized, made, alpha=4), matmul=times)
    close(got, times(h, quantized) + h @ made.a @ made.b * 2)
    with pytest.raises(errors.DtypeError, match="dequantized"):
        lora.merge(quantized, made)


def test_training_in_place_leaves_the_weights():
    params = lora.apply(PARAMS, adapters(ONLY), alpha=4)
    others = lambda p: tree.map(lambda m: not m, lora.mask(p))
    optimizer = optim.chain(
        optim.masked(optim.adamw(1e-2, weight_decay=0.1), lora.mask), optim.freeze(others)
    )
    target = model(PARAMS, X)
    loss = lambda p: bnp.mean((model(p, X) - target) ** 2)
    state = optimizer.init(params)

    @bf.jit
    def step(params, state):
        value, grads = bf.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    first = float(loss(params))
    trained = params
    for _ in range(30):
        trained, state, value = step(trained, state)
    assert float(value) < 0.5 * first
    (before, _), (after, made) = lora.split(params), lora.split(trained)
    close(after, before, 0)
    assert made["head"] is None and sum(x.size for x in tree.leaves(state)) < 2.2 * sum(
        x.size for x in tree.leaves(made)
    )


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: lora.init(random.key(0), PARAMS, 0), errors.ValueRangeError, "rank 0"),
        (lambda: lora.init(random.key(0), PARAMS, 2, mask=True), errors.ShapeError, r"\['b'\]"),
        (lambda: lora.apply({"head": 1}, adapters()), errors.TreeError, "structure of the adapters"),
    ],
)
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "test_lora.py" in caught.value.where
