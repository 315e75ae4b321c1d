"""Wrappers of transformations, and foreign ``(init, update)`` pairs."""

import math
from collections import namedtuple

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax, optim, random, tree
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.staging.jit import jit

PARAMS = {"w": bnp.asarray([[1.0, -2.0], [0.5, 3.0]]), "b": bnp.asarray([0.1, 0.2])}


def loss(params):
    return sum((p**2).sum() for p in tree.leaves(params))


def close(found, expected, rtol=1e-6):
    for x, y in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=1e-7)


def run(optimizer, params=PARAMS, steps=4, transform=lambda f: f):
    state, update = optimizer.init(params), transform(optimizer.update)
    for _ in range(steps):
        updates, state = update(grad(loss)(params), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


# -- pairs of others -------------------------------------------------------------------------------

Pair = namedtuple("Pair", "init update")
HeavyBallState = namedtuple("HeavyBallState", "velocity steps")


def heavy_ball(rate, decay):
    """Momentum as someone might write it for optax: operators and ``tree.map`` only."""

    def init(params):
        return HeavyBallState(tree.map(lambda p: p * 0, params), 0)

    def update(updates, state, params=None):
        velocity = tree.map(lambda g, v: v * decay + g, updates, state.velocity)
        return tree.map(lambda v: v * -rate, velocity), HeavyBallState(velocity, state.steps + 1)

    return Pair(init, update)


WRAPPERS = {
    "chain": lambda t: optim.chain(optim.identity(), t),
    "named_chain": lambda t: optim.named_chain(("t", t)),
    "masked": lambda t: optim.masked(t, True),
    "partition": lambda t: optim.partition({"all": t}, "all"),
    "apply_if_finite": lambda t: optim.apply_if_finite(t, 3),
    "accumulate": lambda t: optim.accumulate(t, 1),
    "MultiSteps": lambda t: optim.MultiSteps(t, lambda step: 1),
    "conditionally_mask": lambda t: optim.conditionally_mask(t, lambda step: step >= 0),
    "conditionally_transform": lambda t: optim.conditionally_transform(t, lambda step: step >= 0),
    "inject_hyperparams": lambda t: optim.inject_hyperparams(heavy_ball)(0.1, 0.9),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_pair_of_others_goes_into_wrappers(name):
    expected, _ = run(optim.sgd(0.1, 0.9))
    for transform in (lambda f: f, jit):
        params, state = run(WRAPPERS[name](heavy_ball(0.1, 0.9)), transform=transform)
        close(params, expected)
        assert isinstance(state, tuple) or name == "named_chain"


def test_transformations_unpack_to_pairs_with_plain_states():
    """Other libraries' loops: two functions, flattened states, updates added."""
    for make in (
        optim.adamw,
        optim.lion,
        optim.adafactor,
        optim.muon,
        optim.lamb,
        optim.rmsprop,
        optim.radam,
    ):
        init, update = make(0.01)
        state = init(PARAMS)
        leaves, treedef = tree.flatten(state)
        assert all(hasattr(leaf, "dtype") for leaf in leaves)
        updates, new = update(grad(loss)(PARAMS), tree.unflatten(treedef, leaves), PARAMS)
        assert tree.structure(new) == treedef and tree.structure(updates) == tree.structure(PARAMS)
        moved = tree.map(lambda p, u: p + u, PARAMS, updates)
        assert float(loss(moved)) < float(loss(PARAMS))


@pytest.mark.parametrize("make", [lambda: optim.adam(0.1), lambda: optim.muon(0.1), lambda: optim.adafactor(0.1),
                                  lambda: optim.accumulate(optim.adam(0.1), 2),
                                  lambda: optim.apply_if_finite(optim.rmsprop(0.1), 2)])  # fmt: skip
def test_a_training_loop_is_a_scan(make):
    optimizer = make()

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(grad(loss)(params), state, params)
        return (optim.apply_updates(params, updates), state), loss(params)

    (params, _), _ = jit(lambda c: scan(step, c, None, 6))((PARAMS, optimizer.init(PARAMS)))
    close(params, run(optimizer, steps=6)[0], 1e-5)


# -- accumulation ----------------------------------------------------------------------------------


def test_accumulation_acts_on_the_mean():
    grads = [tree.map(lambda p, i=i: p * 0 + i, PARAMS) for i in (1.0, 2.0, 6.0)]
    optimizer = optim.accumulate(optim.adam(0.1), 3)
    state = optimizer.init(PARAMS)
    for g in grads:
        updates, state = optimizer.update(g, state, PARAMS)
        if g is not grads[-1]:
            close(updates, tree.map(bnp.zeros_like, PARAMS))
    direct = optim.adam(0.1)
    expected, _ = direct.update(tree.map(lambda p: p * 0 + 3.0, PARAMS), direct.init(PARAMS), PARAMS)
    close(updates, expected)
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)
    close(state.acc_grads, tree.map(bnp.zeros_like, PARAMS))
    wrapper = optim.MultiSteps(optim.sgd(0.1), 2)
    state = wrapper.init(PARAMS)
    flags = []
    for _ in range(4):
        _, state = wrapper.update(grads[0], state)
        flags.append(bool(wrapper.has_updated(state)))
    assert flags == [False, True, False, True]


def test_spoilt_gradients_are_left_out():
    bad = tree.map(lambda p: p * math.nan, PARAMS)
    optimizer = optim.apply_if_finite(optim.sgd(0.1), 1)
    state = optimizer.init(PARAMS)
    updates, state = optimizer.update(bad, state)
    close(updates, tree.map(bnp.zeros_like, PARAMS))
    assert (int(state.notfinite_count), int(state.total_notfinite), bool(state.last_finite)) == (1, 1, False)
    updates, state = optimizer.update(bad, state)  # one too many: it is let through
    assert np.isnan(np.asarray(updates["w"])).all()
    updates, state = optimizer.update(PARAMS, state)
    assert (int(state.notfinite_count), int(state.total_notfinite), bool(state.last_finite)) == (0, 2, True)
    limit = lambda u, step, p: optim.skip_large_updates(u, step, p, 10.0)
    wrapper = optim.MultiSteps(optim.sgd(1.0), 1, should_skip_update_fn=limit)
    updates, state = wrapper.update(PARAMS, wrapper.init(PARAMS))
    close(updates, tree.map(bnp.zeros_like, PARAMS))
    assert bool(state.skip_state["should_skip"]) and int(state.gradient_step) == 0
    small = tree.map(lambda p: p * 0.1, PARAMS)
    close(wrapper.update(small, state)[0], tree.map(lambda p: -p, small))


def test_nans_become_zeros():
    optimizer = optim.zero_nans()
    g = {"w": bnp.asarray([1.0, math.nan]), "b": bnp.asarray([2.0])}
    updates, state = optimizer.update(g, optimizer.init(g))
    np.testing.assert_array_equal(updates["w"], [1, 0])
    assert bool(state.found_nan["w"]) and not bool(state.found_nan["b"])


# -- parts of the parameters -----------------------------------------------------------------------


def test_masks_leave_others_alone():
    optimizer = optim.masked(optim.sgd(1.0), lambda p: {"w": True, "b": False})
    updates, _ = optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
    close(updates, {"w": -PARAMS["w"], "b": PARAMS["b"]})
    state = optim.masked(optim.adam(0.1), {"w": True, "b": False}).init(PARAMS)
    assert isinstance(state.inner_state.mu["b"], optim.MaskedNode) and state.inner_state.mu["w"].shape == (
        2,
        2,
    )
    frozen = optim.chain(optim.sgd(1.0), optim.freeze({"w": False, "b": True}))
    updates, _ = frozen.update(PARAMS, frozen.init(PARAMS), PARAMS)
    close(updates, {"w": -PARAMS["w"], "b": PARAMS["b"] * 0})


def test_a_mask_may_stand_for_a_subtree():
    params = {"net": PARAMS, "head": bnp.ones(3)}
    optimizer = optim.partition(
        {"slow": optim.sgd(0.1), "fast": optim.sgd(1.0)}, {"net": "slow", "head": "fast"}
    )
    updates, state = optimizer.update(params, optimizer.init(params), params)
    close(updates, {"net": tree.map(lambda p: p * -0.1, PARAMS), "head": -bnp.ones(3)})
    assert set(state.inner_states) == {"slow", "fast"}
    assert optim.multi_transform is optim.partition


def test_unknown_labels_are_named():
    optimizer = optim.partition({"a": optim.sgd(0.1)}, {"w": "a", "b": "missing"})
    with pytest.raises(errors.ArgumentError, match="missing") as caught:
        optimizer.init(PARAMS)
    assert "test_wrappers.py" in caught.value.where


# -- hyperparameters -------------------------------------------------------------------------------


def test_hyperparameters_can_be_read_and_changed():
    optimizer = optim.inject_hyperparams(optim.sgd)(learning_rate=0.5)
    state = optimizer.init(PARAMS)
    assert float(state.hyperparams["learning_rate"]) == 0.5
    state.hyperparams["learning_rate"] = bnp.asarray(2.0)
    traces = []

    @jit
    def update(g, state):
        traces.append(1)
        return optimizer.update(g, state)

    close(update(PARAMS, state)[0], tree.map(lambda p: p * -2, PARAMS))
    state.hyperparams["learning_rate"] = bnp.asarray(3.0)
    close(update(PARAMS, state)[0], tree.map(lambda p: p * -3, PARAMS))
    assert len(traces) == 1


def test_schedules_show_their_value():
    optimizer = optim.inject_hyperparams(optim.adam, static_args="b2")(optim.linear_schedule(1.0, 0.0, 4))
    state = optimizer.init(PARAMS)
    seen = []
    for _ in range(3):
        _, state = optimizer.update(PARAMS, state)
        seen.append(float(state.hyperparams["learning_rate"]))
    assert seen == [1, 0.75, 0.5] and "b2" not in state.hyperparams and int(state.count) == 3
    with pytest.raises(errors.ArgumentError, match="no argument"):
        optim.inject_hyperparams(optim.adam, static_args=("nothing",))


# -- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 6), (2, 5, 3)])
def test_newton_schulz_gives_singular_values_near_one(shape):
    x = random.normal(random.key(0), shape)
    y = np.asarray(optim.orthogonalize_via_newton_schulz(x))
    values = np.linalg.svd(y, compute_uv=False)
    assert y.shape == shape and values.min() > 0.3 and values.max() < 1.3
    u, _, vt = np.linalg.svd(np.asarray(x), full_matrices=False)
    np.testing.assert_allclose(
        np.swapaxes(u, -1, -2) @ y @ np.swapaxes(vt, -1, -2) * (1 - np.eye(min(shape[-2:]))), 0, atol=1e-4
    )
    with pytest.raises(errors.ShapeError, match="only matrices"):
        optim.orthogonalize_via_newton_schulz(bnp.ones(3))


def test_half_precision_states_are_wide():
    params = {"w": bnp.ones((4, 3), "bfloat16"), "b": bnp.ones(3, "bfloat16")}
    for make in (
        optim.lion,
        optim.rmsprop,
        optim.adafactor,
        optim.muon,
        optim.amsgrad,
        optim.adagrad,
        optim.lamb,
    ):
        optimizer = make(0.1)
        state = optimizer.init(params)
        assert all(x.dtype in (np.float32, np.int32) for x in tree.leaves(state))
        updates, new = optimizer.update(params, state, params)
        assert all(u.dtype == "bfloat16" for u in tree.leaves(updates))
        assert [x.dtype for x in tree.leaves(new)] == [x.dtype for x in tree.leaves(state)]


def test_random_trees():
    keys = optim.tree_utils.tree_split_key_like(random.key(0), PARAMS)
    drawn = optim.tree_utils.tree_random_like(random.key(0), PARAMS)
    close(drawn, tree.map(lambda k, p: random.normal(k, p.shape), keys, PARAMS))
    assert (
        optim.tree_utils.tree_random_like(random.key(0), PARAMS, random.uniform, "float16")["w"].dtype
        == np.float16
    )


def test_conditions_under_cond():
    """A wrapper inside of a branch, traced, does what it does outside."""
    optimizer = optim.accumulate(optim.sgd(0.1), 2)
    state = optimizer.init(PARAMS)
    taken = lax.cond(True, lambda: optimizer.update(PARAMS, state), lambda: (PARAMS, state))
    close(taken, optimizer.update(PARAMS, state))


# -- keyword arguments of update --------------------------------------------------------------------

WRAPPED = {
    "chain": lambda t: optim.chain(optim.sgd(1.0), t),
    "named_chain": lambda t: optim.named_chain(("rate", optim.sgd(1.0)), ("inner", t)),
    "masked": lambda t: optim.masked(t, {"a": True, "b": False}),
    "partition": lambda t: optim.partition({"x": t, "y": optim.sgd(1.0)}, {"a": "x", "b": "y"}),
    "apply_if_finite": lambda t: optim.apply_if_finite(t, 3),
    "conditionally_transform": lambda t: optim.conditionally_transform(t, lambda step: step < 9),
    "MultiSteps": lambda t: optim.MultiSteps(t, 1),
    "dynamic_loss_scale": lambda t: optim.dynamic_loss_scale(t, init_scale=1.0),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_keyword_arguments_reach_what_takes_them(name):
    """Around a transformation that scales by ``value``, and one without it."""

    def update(updates, state, params=None, *, value, **extra):
        return tree.map(lambda u: u * value, updates), state

    by_value = optim.GradientTransformation(lambda params: (), update)
    params = {"a": bnp.ones(3), "b": bnp.ones(2)}
    t = WRAPPED[name](by_value)
    new, _ = t.update(params, t.init(params), params, value=bnp.float32(5.0))
    np.testing.assert_allclose(np.abs(new["a"]), 5.0)
    t = WRAPPED[name](optim.identity())
    new, _ = t.update(params, t.init(params), params, value=bnp.float32(5.0))
    np.testing.assert_allclose(np.abs(new["a"]), 1.0)
