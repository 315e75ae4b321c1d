"""Averages of parameters, and optimizers that need no schedule or rate."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, optim, tree

PARAMS = {"w": bnp.asarray([[1.0, -2.0], [0.5, 3.0]]), "b": bnp.asarray([0.1, 0.2])}


def close(found, expected, rtol=1e-5):
    for x, y in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x, "float64"), np.asarray(y, "float64"), rtol=rtol, atol=1e-6)


def loss(params):
    return sum((p**2).sum() for p in tree.leaves(params))


def run(optimizer, params, steps):
    """States and parameters of a jitted loop that gives its arguments away."""

    @bf.jit(donate_argnums=(0, 1))
    def step(params, state):
        updates, state = optimizer.update(bf.grad(loss)(params), state, params)
        return optim.apply_updates(params, updates), state

    params = tree.map(bnp.copy, params)
    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
        yield state, params


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("decay", [0.9, lambda count: 0.5 + 0.1 * count])
def test_the_average_follows_the_parameters(decay, warmup):
    optimizer = optim.chain(optim.sgd(0.1, 0.5), optim.params_ema(decay, warmup=warmup))
    want = PARAMS
    for t, (state, params) in enumerate(run(optimizer, PARAMS, 5)):
        d = decay(t) if callable(decay) else decay
        d = min(d, (1 + t) / (10 + t)) if warmup else d
        want = tree.map(lambda m, p, d=d: m * d + p * (1 - d), want, params)
        close(state[-1].ema, want)
    assert int(state[-1].count) == 5


def test_averages_of_half_precision_move():
    """A change of 1e-4 is below the precision of bfloat16."""
    params = {"w": bnp.ones(3, "bfloat16")}
    ema = optim.params_ema(0.9999, warmup=False)
    state = ema.init(params)
    for _ in range(3):
        _, state = ema.update({"w": bnp.ones(3, "bfloat16")}, state, params)
    assert state.ema["w"].dtype == np.float32
    np.testing.assert_allclose(state.ema["w"], 1 + 1e-4 * (1 + 0.9999 + 0.9999**2), rtol=1e-6)


def test_updates_of_target_networks():
    new = tree.map(lambda x: x + 1, PARAMS)
    close(optim.incremental_update(new, PARAMS, 0.25), tree.map(lambda x: x + 0.25, PARAMS))
    f = bf.jit(lambda n: optim.periodic_update(new, PARAMS, n, 3))
    close(f(4), PARAMS)
    close(f(6), new)
    half = optim.incremental_update(new, tree.map(lambda x: x.astype("float16"), PARAMS), 0.5)
    assert half["w"].dtype == np.float16
    with pytest.raises(errors.TreeError, match="new_tensors and old_tensors"):
        optim.incremental_update({"w": new["w"]}, PARAMS, 0.1)


SCHEDULE_FREE = {
    "sgd": (lambda: optim.schedule_free_sgd(0.1), 0.1, None),
    "sgd, warmed up": (lambda: optim.schedule_free_sgd(0.1, 4, b1=0.8), 0.1, 4),
}


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedule_free_is_an_average_of_iterates(name):
    """The definition, with x, y and z apart, in float64."""
    make, rate, warmup = SCHEDULE_FREE[name]
    b1 = 0.9 if warmup is None else 0.8
    x = z = {k: np.asarray(v, np.float64) for k, v in PARAMS.items()}
    y, total, largest = x, 0.0, 0.0
    for t, (state, params) in enumerate(run(make(), PARAMS, 8)):
        now = rate if warmup is None else rate * min((t + 1) / warmup, 1)
        base = rate if warmup is None else rate * min(t / warmup, 1)  # whose count begins at 0
        largest = max(largest, now)
        total += largest**2
        z = {k: z[k] - base * 2 * y[k] for k in z}
        c = largest**2 / total
        x = {k: x[k] * (1 - c) + z[k] * c for k in x}
        y = {k: b1 * x[k] + (1 - b1) * z[k] for k in x}
        close(params, y, 1e-4)
        close(optim.schedule_free_eval_params(state, params), x, 1e-4)


def test_schedule_free_adamw_converges_without_a_schedule():
    *_, (state, params) = run(optim.schedule_free_adamw(0.3, 5), PARAMS, 60)
    assert float(loss(optim.schedule_free_eval_params(state, params))) < 0.05 * float(loss(PARAMS))


@pytest.mark.parametrize(
    "make", [optim.schedule_free_adamw, optim.prodigy, lambda: optim.adopt(0.1), lambda: optim.ademamix(0.1)]
)
def test_states_of_half_precision_are_float32(make):
    params = tree.map(lambda x: x.astype("bfloat16"), PARAMS)
    *_, (state, params) = run(make(), params, 3)
    assert all(x.dtype == bnp.bfloat16 for x in tree.leaves(params))
    kept = [x for path, x in tree.leaves_with_path(state) if "params0" not in tree.keystr(path)]
    floats = [x for x in kept if bnp.issubdtype(x.dtype, bnp.floating)]
    assert floats and all(x.dtype == np.float32 for x in floats)


def test_errors_of_schedule_free():
    with pytest.raises(errors.ValueRangeError, match="0 < b1"):
        optim.schedule_free_sgd(b1=0.0)
    with pytest.raises(errors.ArgumentError, match="ScheduleFreeState"):
        optim.schedule_free_eval_params(optim.adam(0.1).init(PARAMS), PARAMS)
    with pytest.raises(errors.ValueRangeError, match="standard, dion"):
        optim.muon(0.1, "polar")


def test_prodigy_finds_its_rate():
    """From an estimate that is a million times too small."""
    *_, (state, params) = run(optim.prodigy(), PARAMS, 150)
    assert float(state.estim_lr) > 1e-2 and float(loss(params)) < 0.1 * float(loss(PARAMS))


def test_prodigy_waits_for_gradients():
    optimizer = optim.prodigy(eps=0.0)
    state = optimizer.init(PARAMS)
    zeros = tree.map(bnp.zeros_like, PARAMS)
    updates, state = optimizer.update(zeros, state, PARAMS)
    close(updates, zeros)
    assert float(state.estim_lr) == np.float32(1e-6)


def test_the_first_step_of_adopt_only_begins_its_state():
    optimizer = optim.adopt(0.1)
    updates, state = optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
    close(updates, tree.map(bnp.zeros_like, PARAMS))
    close(state[0].nu, tree.map(bnp.square, PARAMS))
    *_, (_, params) = run(optimizer, PARAMS, 60)
    assert float(loss(params)) < 0.05 * float(loss(PARAMS))


def test_ademamix_converges():
    *_, (_, params) = run(optim.ademamix(0.1, b3=0.9, alpha=1.0), PARAMS, 60)
    assert float(loss(params)) < 0.05 * float(loss(PARAMS))
