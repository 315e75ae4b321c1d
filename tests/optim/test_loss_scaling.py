"""Dynamic loss scaling: the course of the scale, and gradients in float16."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, optim, tree

PARAMS = {"w": bnp.asarray([[1.0, -2.0], [0.5, 3.0]]), "b": bnp.asarray([0.1, 0.2])}


def close(found, expected):
    for x, y in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-6)


def test_the_scale_grows_and_shrinks():
    """The scale after each gradient, in one program."""
    optimizer = optim.dynamic_loss_scale(
        optim.adam(0.1), 8.0, growth_interval=2, min_scale=4.0, max_scale=16.0
    )
    update = bf.jit(optimizer.update)
    state = optimizer.init(PARAMS)
    bad = bnp.inf
    table = [
        (1, 8),
        (bad, 4),
        (1, 4),
        (1, 8),
        (1, 8),
        (1, 16),
        (1, 16),
        (1, 16),
        (bad, 8),
        (bad, 4),
        (bad, 4),
    ]
    plain, inner = optim.adam(0.1), None
    for factor, scale in table:
        before = state
        grads = tree.map(lambda p, s=state.scale, f=factor: p * s * f, PARAMS)
        updates, state = update(grads, state, PARAMS)
        assert float(state.scale) == scale
        if factor == 1:
            want, inner = plain.update(PARAMS, inner or plain.init(PARAMS), PARAMS)
            close(updates, want)
        else:
            close(updates, tree.map(bnp.zeros_like, PARAMS))
            close(state.inner_state, before.inner_state)
    assert int(state.skipped) == 4 and int(state.inner_state.count) == 7


def test_gradients_that_float16_cannot_hold():
    params = {"w": bnp.ones(4, "float16")}
    tiny = lambda p: bnp.sum((p["w"] * bnp.asarray(1e-4, "float16")) * bnp.asarray(1e-5, "float16"))
    assert not np.asarray(bf.grad(tiny)(params)["w"]).any()
    seen = []
    spy = optim.GradientTransformation(
        lambda p: (), lambda u, s, p=None: (seen.append(u["w"]) or tree.map(bnp.sign, u), s)
    )
    optimizer = optim.dynamic_loss_scale(spy, 2.0**10)
    state = optimizer.init(params)
    grads = bf.grad(lambda p: optim.scale_loss(tiny(p), state))(params)
    updates, state = optimizer.update(grads, state, params)
    assert seen[0].dtype == np.float32 and updates["w"].dtype == np.float16
    assert (np.asarray(updates["w"]) == 1).all()


def test_a_scaled_loop_is_the_plain_one():
    loss = lambda p: sum((x**2).sum() for x in tree.leaves(p))

    def run(optimizer, scaled):
        params, state = PARAMS, optimizer.init(PARAMS)

        @bf.jit
        def step(params, state):
            grads = bf.grad(lambda p: scaled(loss(p), state))(params)
            updates, state = optimizer.update(grads, state, params)
            return optim.apply_updates(params, updates), state

        for _ in range(4):
            params, state = step(params, state)
        return params

    close(
        run(optim.dynamic_loss_scale(optim.adam(0.1)), optim.scale_loss),
        run(optim.adam(0.1), lambda x, state: x),
    )
    state = optim.dynamic_loss_scale(optim.sgd(1.0)).init({})
    assert optim.scale_loss(bnp.asarray(2.0, "float16"), state).dtype == np.float32


@pytest.mark.parametrize(
    "how", [{"factor": 1.0}, {"growth_interval": 0}, {"init_scale": 0.5}, {"max_scale": 2.0}]
)
def test_errors_of_loss_scaling(how):
    with pytest.raises(errors.ValueRangeError, match="min_scale <= init_scale") as caught:
        optim.dynamic_loss_scale(optim.sgd(0.1), **how)
    assert "test_loss_scaling.py" in caught.value.where
    with pytest.raises(errors.ArgumentError, match="not a gradient transformation"):
        optim.dynamic_loss_scale(optim.sgd)
