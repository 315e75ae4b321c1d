"""``optimizers`` and ``stax`` by their definitions, and against JAX's."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, random
from blufunc.example_libraries import optimizers, stax

MAKERS = {
    "sgd": (0.1,), "momentum": (0.1, 0.9), "nesterov": (0.02, 0.9), "adagrad": (0.3,), "rmsprop": (0.1,),
    "rmsprop_momentum": (0.1,), "adam": (0.1,), "adamax": (0.1,), "sm3": (0.3,),
}  # fmt: skip
SCHEDULES = {
    "constant": (0.1,), "exponential_decay": (0.1, 5, 0.9), "inverse_time_decay": (0.1, 5, 0.5),
    "polynomial_decay": (0.1, 5, 0.01, 2.0), "piecewise_constant": ([2, 4], [0.3, 0.2, 0.1]),
}  # fmt: skip
PARAMS = {
    "w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "b": np.float32([0.5]),
    "c": np.float32(2.0),
}


def run(lib, jit, grad, numpy, name, steps=6):
    """The parameters after some steps of a sum of fourth powers."""
    init, update, get = getattr(lib, name)(*MAKERS[name])
    loss = lambda p: sum(numpy.sum((x - 0.3) ** 4) for x in p.values())
    step = jit(lambda i, s: update(i, grad(loss)(get(s)), s))
    state = init(PARAMS)
    for i in range(steps):
        state = step(i, state)
    return {k: np.asarray(v) for k, v in get(state).items()}


@pytest.mark.parametrize("name", MAKERS)
def test_optimizers_descend(name):
    got = run(optimizers, bf.jit, bf.grad, bnp, name)
    size = lambda p: sum(np.sum((np.asarray(x) - 0.3) ** 4) for x in p.values())
    assert size(got) < size(PARAMS)


def test_states_are_packed_and_unpacked():
    init, update, get = optimizers.adam(0.1)
    state = init(PARAMS)
    marked = optimizers.unpack_optimizer_state(state)
    assert set(marked) == set(PARAMS) and len(marked["w"].subtree) == 3
    repeated = optimizers.pack_optimizer_state(marked)
    assert bf.tree.structure(repeated) == bf.tree.structure(state)
    with pytest.raises(errors.TreeError, match="gradients"):
        update(0, {"w": PARAMS["w"]}, state)
    with pytest.raises(errors.ArgumentError):
        optimizers.pack_optimizer_state(PARAMS)
    with pytest.raises(errors.ArgumentError):
        optimizers.sgd(bnp.ones(2))
    with pytest.raises(errors.ShapeError):
        optimizers.piecewise_constant([1, 2], [0.1, 0.2])


def test_schedules_and_norms():
    at = lambda name, i: float(getattr(optimizers, name)(*SCHEDULES[name])(i))
    assert [at("piecewise_constant", i) for i in (0, 3, 9)] == pytest.approx([0.3, 0.2, 0.1])
    assert at("exponential_decay", 5) == pytest.approx(0.09)
    assert at("inverse_time_decay", 10) == pytest.approx(0.05)
    assert float(optimizers.inverse_time_decay(0.1, 5, 0.5, staircase=True)(9)) == pytest.approx(0.1 / 1.5)
    assert [at("polynomial_decay", i) for i in (0, 5, 9)] == pytest.approx([0.1, 0.01, 0.01])
    norm = np.sqrt(sum(np.sum(x**2) for x in PARAMS.values()))
    assert float(optimizers.l2_norm(PARAMS)) == pytest.approx(norm, rel=1e-6)
    assert float(optimizers.l2_norm(optimizers.clip_grads(PARAMS, 0.5))) == pytest.approx(0.5, rel=1e-6)
    assert bf.tree.all(
        bf.tree.map(lambda a, b: bool((a == b).all()), optimizers.clip_grads(PARAMS, 9.0), PARAMS)
    )


def net(lib):
    return lib.serial(
        lib.Conv(4, (3, 3), padding="SAME"),
        lib.BatchNorm(),
        lib.Relu,
        lib.MaxPool((2, 2), (2, 2)),
        lib.AvgPool((2, 2), padding="SAME"),
        lib.FanOut(2),
        lib.parallel(lib.Identity, lib.serial(lib.ConvTranspose(4, (3, 3), padding="SAME"), lib.Gelu)),
        lib.FanInConcat(),
        lib.shape_dependent(lambda shape: lib.Dense(shape[-1] // 2)),
        lib.Flatten,
        lib.Dropout(0.8),
        lib.Dense(5),
        lib.LogSoftmax,
    )


X = np.random.default_rng(0).normal(size=(3, 8, 8, 2)).astype(np.float32)


def test_a_network():
    init, apply = net(stax)
    shape, params = init(random.key(0), (-1, 8, 8, 2))
    assert shape == (-1, 5)
    y = bf.jit(lambda p, x: apply(p, x, rng=random.key(1)))(params, X)
    np.testing.assert_allclose(np.exp(np.asarray(y)).sum(-1), 1, rtol=1e-5)
    grads = bf.grad(lambda p: apply(p, X, rng=random.key(1))[:, 0].sum())(params)
    assert bf.tree.structure(grads) == bf.tree.structure(params)
    with pytest.raises(errors.ArgumentError, match="key"):
        apply(params, X)


def test_fans_and_pools():
    x = bnp.asarray(X)
    assert stax.FanInSum[1]((), [x, x]).tolist() == (2 * x).tolist()
    shape, _ = stax.SumPool((2, 2), spec="NHWC")[0](None, (-1, 8, 8, 2))
    assert shape == (-1, 7, 7, 2)
    ones = stax.AvgPool((3, 3), padding="SAME")[1]((), bnp.ones_like(x))
    assert bool((ones == 1).all())
    assert stax.Dropout(0.5, mode="test")[1]((), x, rng=random.key(0)) is x


@pytest.mark.peer
@pytest.mark.parametrize("name", MAKERS)
def test_optimizers_against_jax(name):
    jax = pytest.importorskip("jax")
    from jax.example_libraries import optimizers as theirs

    # the state of sm3 there holds sizes, which jit would trace
    want = run(theirs, jax.jit if name != "sm3" else lambda f: f, jax.grad, jax.numpy, name)
    got = run(optimizers, bf.jit, bf.grad, bnp, name)
    for k, w in want.items():
        np.testing.assert_allclose(got[k], w, rtol=2e-5, atol=2e-6)


@pytest.mark.peer
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_against_jax(name):
    pytest.importorskip("jax")
    from jax.example_libraries import optimizers as theirs

    for i in range(8):
        args = [np.asarray(a) if isinstance(a, list) else a for a in SCHEDULES[name]]
        want = getattr(theirs, name)(*args)(i)
        assert float(getattr(optimizers, name)(*args)(i)) == pytest.approx(float(want), rel=1e-6)


@pytest.mark.peer
def test_networks_against_jax():
    jax = pytest.importorskip("jax")
    from jax.example_libraries import stax as theirs

    shape, want = net(theirs)[0](jax.random.key(0), (-1, 8, 8, 2))
    ours, got = net(stax)[0](random.key(0), (-1, 8, 8, 2))
    assert tuple(shape[1:]) == ours[1:]
    for a, b in zip(bf.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    y = net(stax)[1](got, X, rng=random.key(1))
    z = net(theirs)[1](want, X, rng=jax.random.key(1))
    np.testing.assert_allclose(np.asarray(y), np.asarray(z), rtol=1e-4, atol=1e-4)
