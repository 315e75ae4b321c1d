"""``odeint`` against SciPy and closed forms; derivatives against differences."""

import numpy as np
import pytest
import scipy.integrate

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.arrays.array import from_numpy
from blufunc.experimental.ode import odeint

exact = lambda x: from_numpy(np.asarray(x))
T = exact([0.0, 0.5, 1.2, 3.0])


def pendulum(y, t, a, b):
    return {"u": y["v"], "v": -a * bnp.sin(y["u"]) + b * t}


Y0 = {"u": exact(0.3), "v": exact(0.1)}


def test_states():
    got = bf.jit(odeint, static_argnums=0)(pendulum, Y0, T, exact(2.0), exact(0.1))
    f = lambda t, y: [y[1], -2 * np.sin(y[0]) + 0.1 * t]
    want = scipy.integrate.solve_ivp(f, (0, 3), [0.3, 0.1], t_eval=np.asarray(T), rtol=1e-10, atol=1e-10).y
    np.testing.assert_allclose(np.asarray(got["u"]), want[0], atol=1e-7)
    np.testing.assert_allclose(np.asarray(got["v"]), want[1], atol=1e-7)


def test_complex_states_and_integers():
    got = odeint(lambda y, t: 1j * y, exact([1.0 + 0j]), T)
    np.testing.assert_allclose(np.asarray(got)[:, 0], np.exp(1j * np.asarray(T)), atol=1e-7)
    got = odeint(lambda y, t, n: y / n, exact(1.0), T, 2)
    np.testing.assert_allclose(np.asarray(got), np.exp(np.asarray(T) / 2), rtol=1e-7)
    single = odeint(lambda y, t: -y, bnp.ones(2), bnp.asarray([0.0, 1.0]), rtol=1e-6, atol=1e-6)
    assert single.dtype == "float32" and abs(float(single[1, 0]) - np.exp(-1)) < 1e-5
    assert odeint(lambda y, t: -y, exact(1.0), T[:1]).tolist() == [1.0]


def loss(y0, t, a, b):
    ys = odeint(pendulum, y0, t, a, b)
    return ys["u"].sum() + ys["v"][2]


@pytest.mark.slow
def test_derivatives_by_the_adjoint():
    args = (Y0, T, exact(2.0), exact(0.1))
    grads = bf.jit(bf.grad(loss, (0, 1, 2, 3)))(*args)
    leaves, structure = bf.tree.flatten(args)
    h = 1e-4
    f = bf.jit(lambda *leaves: loss(*bf.tree.unflatten(structure, leaves)))
    for i, (x, g) in enumerate(zip(leaves, bf.tree.leaves(grads), strict=True)):
        t = np.random.default_rng(i).normal(size=x.shape)
        moved = [f(*[v + s * h * t if j == i else v for j, v in enumerate(leaves)]) for s in (1, -1)]
        np.testing.assert_allclose(np.sum(np.asarray(g) * t), float(moved[0] - moved[1]) / (2 * h), atol=1e-6)


@pytest.mark.slow
def test_closures_batches_and_second_derivatives():
    y0 = exact([1.0, 2.0])
    f = lambda b: odeint(lambda y, t: -b * y, y0, T[:2])[-1].sum()
    value = lambda b: 3 * np.exp(-b / 2)
    np.testing.assert_allclose(float(bf.grad(f)(exact(1.5))), -0.5 * value(1.5), rtol=1e-6)
    np.testing.assert_allclose(float(bf.grad(bf.jit(f))(exact(1.5))), -0.5 * value(1.5), rtol=1e-6)
    np.testing.assert_allclose(float(bf.grad(bf.grad(f))(exact(1.5))), 0.25 * value(1.5), rtol=1e-5)
    b = exact([0.5, 1.0, 20.0])
    np.testing.assert_allclose(np.asarray(bf.vmap(f)(b)), value(np.asarray(b)), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        np.asarray(bf.vmap(bf.grad(f))(b)), -0.5 * value(np.asarray(b)), rtol=1e-5, atol=1e-7
    )


def test_bounds_of_steps():
    calls = []

    def f(y, t):
        bf.debug.callback(lambda t: calls.append(float(t)), t)
        return -y

    odeint(f, exact(1.0), T, rtol=1e-3, atol=1e-3)
    coarse = len(calls)
    calls.clear()
    odeint(f, exact(1.0), T, rtol=1e-3, atol=1e-3, hmax=0.05)
    assert len(calls) > 60 * 6 > coarse
    calls.clear()
    odeint(f, exact(1.0), T, mxstep=2)
    assert len(calls) <= 3 * 2 * 6 + 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: odeint(3, exact(1.0), T),
        lambda: odeint(lambda y, t: y, 1, T),
        lambda: odeint(lambda y, t: y, exact(1.0), 3.0),
        lambda: odeint(lambda y, t: (y, y), exact(1.0), T),
        lambda: odeint(lambda y, t: 1j * y, exact(1.0), T),
        lambda: odeint(lambda y, t: y[:1], exact([1.0, 2.0]), T),
        lambda: odeint(lambda y, t: y, exact(1.0), T, rtol=-1.0),
    ],
)
def test_errors(call):
    with pytest.raises(errors.BlufuncError, match="at:"):
        call()


def test_decreasing_times():
    """Backward in time, states and all derivatives are those of closed forms."""
    decay = lambda y, t, k: -k * y * bnp.cos(t)
    at = lambda t, k: np.exp(-k * (np.sin(t) - np.sin(1.0)))
    ts = bnp.asarray(np.array([1.0, 0.6, 0.5, -0.4]), dtype="float64")
    y0, k = (bnp.asarray(np.float64(x), dtype="float64") for x in (1.0, 0.7))
    solve = lambda y0, ts, k: odeint(decay, y0, ts, k)
    np.testing.assert_allclose(solve(y0, ts, k), at(np.asarray(ts), 0.7), rtol=1e-6)
    np.testing.assert_allclose(bf.jit(solve)(y0, ts, k), at(np.asarray(ts), 0.7), rtol=1e-6)
    last = lambda y0, ts, k: solve(y0, ts, k)[-1]
    dy, dt, dk = bf.grad(last, argnums=(0, 1, 2))(y0, ts, k)
    end = at(-0.4, 0.7)
    np.testing.assert_allclose(dy, end, rtol=1e-6)
    np.testing.assert_allclose(dk, -(np.sin(-0.4) - np.sin(1.0)) * end, rtol=1e-5)
    np.testing.assert_allclose(dt[-1], -0.7 * end * np.cos(-0.4), rtol=1e-5)
    there = odeint(decay, solve(y0, ts, k)[-1], ts[::-1], k)
    np.testing.assert_allclose(there[-1], 1.0, rtol=1e-6)
    with pytest.raises(errors.ValueRangeError, match="both ways"):
        odeint(decay, y0, ts[bnp.array([0, 2, 1])], k)
