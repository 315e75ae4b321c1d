"""L-BFGS, its line search, and transformations that take the loss."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, optim, tree

RNG = np.random.default_rng(0)
START = {
    "a": bnp.asarray(RNG.normal(size=3), dtype="float32"),
    "b": [bnp.asarray(RNG.normal(size=(2, 2)), dtype="float32")],
}


def vector(params):
    return bnp.concatenate([params["a"], params["b"][0].reshape(-1)])


def rosenbrock(params):
    x = vector(params)
    return bnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def quartic(params):
    """Not convex."""
    x = vector(params)
    return bnp.sum(x**4 - 3 * x**2 + x)


def bowl(params):
    x = vector(params)
    return bnp.sum(x**2 * bnp.arange(1, 8)) + bnp.sum(x) ** 2


def run(loss, optimizer, steps, params=START):
    """The last parameters and state, and the loss ahead of each step."""
    value_and_grad = optim.value_and_grad_from_state(loss)

    @bf.jit
    def step(params, state):
        value, grad = value_and_grad(params, state=state)
        updates, state = optimizer.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        return optim.apply_updates(params, updates), state, value

    state, values = optimizer.init(params), []
    for _ in range(steps):
        params, state, value = step(params, state)
        values.append(float(value))
    return params, state, np.array(values)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss, least", [(rosenbrock, 0.0), (bowl, 0.0), (quartic, None)])
def test_losses_fall_in_every_step_to_a_minimum(loss, least):
    params, state, values = run(loss, optim.lbfgs(), 60)
    assert (np.diff(values) <= 1e-4 * np.abs(values[:-1])).all()
    grads = tree.leaves(bf.grad(loss)(params))
    assert max(float(abs(g).max()) for g in grads) < 2e-2
    if least is not None:
        assert values[-1] - least < 1e-5
    search = state[-1]
    assert 1 <= int(search.evaluations) <= 20
    np.testing.assert_allclose(float(search.value), float(loss(params)), rtol=1e-4, atol=1e-6)


def test_few_steps_as_scipy_minimizes():
    """The same method on one vector, in as many evaluations."""
    from blufunc.scipy.optimize import minimize

    flat, unravel = bf.flatten_util.ravel_pytree(START)
    want = minimize(lambda x: rosenbrock(unravel(x)), flat, method="L-BFGS", options={"maxiter": 40})
    _, _, values = run(rosenbrock, optim.lbfgs(), 41)
    assert values[-1] < 10 * float(want.fun) + 1e-4


def test_the_loss_is_evaluated_once_for_the_next_step():
    params, state, _ = run(bowl, optim.lbfgs(), 2)
    calls = []

    def spy(p):
        bf.debug.callback(lambda: calls.append(1))
        return bowl(p)

    value, grad = bf.jit(optim.value_and_grad_from_state(spy))(params, state=state)
    np.testing.assert_allclose(float(value), float(bowl(params)), rtol=1e-5)
    for x, y in zip(tree.leaves(grad), tree.leaves(bf.grad(bowl)(params)), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-4)
    assert not calls
    optim.value_and_grad_from_state(spy)(params, state=optim.lbfgs().init(params))
    assert calls == [1]


def test_chains_pass_arguments_to_those_that_take_them():
    seen = []

    def update(updates, state, params=None, *, value=None, **extra):
        seen.append((value, sorted(extra)))
        return updates, state

    spy = optim.GradientTransformation(lambda params: (), update)
    chained = optim.named_chain(("a", optim.chain(optim.sgd(0.1), spy)), ("b", optim.clip(1.0)))
    state = chained.init(START)
    chained.update(START, state, START, value=3.0, other=1)
    chained.update(START, state, START)
    assert seen == [(3.0, ["other"]), (None, [])]


VALUES = [5.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0]
PLATEAUS = {
    "patience": {"patience": 2, "factor": 0.5},
    "cooldown": {"patience": 1, "cooldown": 2, "factor": 0.5},
    "means": {"patience": 1, "accumulation_size": 3, "factor": 0.5},
    "least": {"patience": 1, "min_scale": 0.3, "factor": 0.5},
    "tolerances": {"patience": 2, "rtol": 0.0, "atol": 1.5, "factor": 0.1},
}
SCALES = {
    "patience": [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125, 0.0625, 0.0625],
    "least": [1, 1, 0.5, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3],
}


@pytest.mark.parametrize("name", SCALES)
def test_the_scale_falls_on_plateaus(name):
    optimizer = optim.reduce_on_plateau(**PLATEAUS[name])
    state, update = optimizer.init(START), bf.jit(optimizer.update)
    found = []
    for value in VALUES:
        updates, state = update({"x": bnp.ones(2)}, state, value=value)
        found.append(float(updates["x"][0]))
    np.testing.assert_allclose(found, SCALES[name], rtol=1e-6)


@pytest.mark.peer
@pytest.mark.parametrize("name", PLATEAUS)
def test_plateaus_as_optax(name):
    import optax

    ours, theirs = (
        optim.reduce_on_plateau(**PLATEAUS[name]),
        optax.contrib.reduce_on_plateau(**PLATEAUS[name]),
    )
    params = {"x": np.ones(2, np.float32)}
    state, other = ours.init(params), theirs.init(params)
    for value in VALUES:
        updates, state = ours.update(params, state, value=value)
        want, other = theirs.update(params, other, value=value)
        np.testing.assert_allclose(np.asarray(updates["x"]), np.asarray(want["x"]), rtol=1e-6)
    for field in other._fields:
        np.testing.assert_allclose(
            np.asarray(getattr(state, field)), np.asarray(getattr(other, field)), err_msg=field
        )


@pytest.mark.peer
@pytest.mark.parametrize("scaled", [True, False])
def test_directions_as_optax(scaled):
    """Without a line search, on a convex function, beyond the size of the memory."""
    import jax
    import optax

    params = tree.map(lambda x: np.asarray(x), START)
    ours, theirs = (o.lbfgs(0.05, 3, scaled, None) for o in (optim, optax))
    state, other, mine, yours = ours.init(params), theirs.init(params), params, params
    for _ in range(7):
        updates, state = ours.update(bf.grad(bowl)(mine), state, mine)
        grads = jax.tree.map(np.asarray, bf.grad(bowl)(tree.map(lambda x: bnp.asarray(np.asarray(x)), yours)))
        want, other = theirs.update(grads, other, yours)
        for x, y in zip(tree.leaves(updates), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-3, atol=1e-4)
        mine, yours = optim.apply_updates(mine, updates), optax.apply_updates(yours, want)


ERRORS = {
    "no memory": (lambda: optim.scale_by_lbfgs(0), errors.ValueRangeError, "memory_size=10"),
    "no steps": (lambda: optim.scale_by_zoom_linesearch(0), errors.ValueRangeError, "0 steps"),
    "no loss": (
        lambda: optim.lbfgs().update(START, optim.lbfgs().init(START), START), errors.ArgumentError, "value_fn=loss"
    ),
    "no value": (
        lambda: optim.reduce_on_plateau().update(START, optim.reduce_on_plateau().init(START)), errors.ArgumentError,
        "value=loss",
    ),
    "a state without a search": (
        lambda: optim.value_and_grad_from_state(bowl)(START, state=()), errors.ArgumentError, "no line search"
    ),
    "a factor of 1": (lambda: optim.reduce_on_plateau(1.0), errors.ValueRangeError, "factor"),
    "no tolerance": (lambda: optim.reduce_on_plateau(rtol=0.0), errors.ValueRangeError, "rtol or atol"),
    "no number": (lambda: optim.reduce_on_plateau(patience="few"), errors.ArgumentError, "patience"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "test_lbfgs.py" in caught.value.where
