"""Loops whose carries are short stacks, split into their rows."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import planning, toolchain
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.ops.points import POINTS
from blufunc.kernels.rewrites import parts
from blufunc.kernels.rewrites.loops.pointwise_control_flow import with_point_control

N = planning.HOST.least_points
X = np.random.default_rng(0).uniform(0.5, 1.5, (3, N)).astype(np.float32)


def lorenz(s):
    x, y, z = s
    return s + 0.01 * bnp.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])


def fixed(step):
    return lambda x: lax.fori_loop(0, 7, lambda i, s: step(s), x)


def until(step):
    return lambda x: lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 1, step(c[1])), (0, x))[1]


def two_carries(x):
    def step(_, c):
        q, p = c
        p = p - 0.1 * bnp.stack([q[0] * q[1], q[1] - q[2], bnp.sin(q[0])])
        return q + 0.1 * p, p

    return lax.fori_loop(0, 5, step, (x, bnp.zeros_like(x)))


APART = {  # they loop at points
    "rows": fixed(lorenz),
    "a while": until(lorenz),
    "columns": lambda x: fixed(lambda s: lorenz(s.T).T)(x.T),
    "a batch": lambda x: bf.vmap(fixed(lorenz))(x.T),
    "another axis": lambda x: fixed(lambda s: bnp.concatenate([s[:, 1:] * 0.5, s[:, :1] + 1], 1))(
        bnp.stack([x, x + 1])
    ),
    "two carries, one of them never apart": two_carries,
    "sums over the rows": fixed(lambda s: s / (1 + (s[0] * s).sum(0)) + s.max(0)),
    "a row for all": fixed(lambda s: s * s[:1] - bnp.flip(s, 0)),
    "some rows": fixed(lambda s: bnp.concatenate([s[1:] + s[:2], bnp.tanh(s[:1])])),
    "numbers": fixed(lambda s: bnp.stack([s[1], s[2] * 0.9, s[0]]) + 1),
}
WHOLE = {  # each element reads others of its row
    "a condition on all": lambda x: lax.while_loop(lambda s: s.max() < 50, lambda s: s * 1.5 + s[0], x),
    "a matmul": fixed(lambda s: bnp.tanh(s[0] + bnp.ones((3, 3)) @ s)),
    "a sum over points": fixed(lambda s: s[0] / s.sum() + s),
    "no rows": fixed(lambda s: bnp.concatenate([s[:0], s[1:], s[:1] * 0.9])),
    "a sum of no rows": fixed(lambda s: bnp.concatenate([s[1:], s[:1]]) + (s[:0] * 2).sum(0)),
    "many more rows": fixed(
        lambda s: s[::-1] + bnp.concatenate([s, bnp.ones((parts.MOST_JOINED, N), "float32")])[2:5]
    ),
    "sorted points": fixed(lambda s: bnp.sort(s, 1) * s[0]),
    "rows by number": lambda x: lax.fori_loop(0, 3, lambda i, s: s[0] + s.at[i].set(1), x),
}


def control(fun):
    """Names of the loops of a program, after those at points are found."""
    jaxpr = simplify(bf.jit(fun).trace(X).jaxpr)
    made = with_point_control(jaxpr, {})
    names = ["points" if e.prim in POINTS else e.prim.name for e in made.eqns]
    return [name for name in names if name in ("points", "scan", "while")]


@pytest.mark.parametrize("name", APART)
def test_they_loop_at_points(name):
    assert set(control(APART[name])) == {"points"}


@pytest.mark.parametrize("name", WHOLE)
def test_a_stack_that_is_needed_stays(name):
    assert "points" not in control(WHOLE[name])


@pytest.mark.parametrize("name", [*APART, *WHOLE])
def test_values(name, monkeypatch):
    fun = {**APART, **WHOLE}[name]
    monkeypatch.setattr(config, "host_compiler", "never")
    want = bf.tree.leaves(bf.jit(lambda x: fun(x))(X))
    if toolchain.find() is not None:
        monkeypatch.setattr(config, "host_compiler", "always")
    for g, w in zip(bf.tree.leaves(bf.jit(fun)(X)), want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-6)


@pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("reduce", [bnp.sum, bnp.prod])
def test_short_floats_are_accumulated_in_float32(dtype, reduce, monkeypatch):
    x = bnp.stack([bnp.full(N, 60000), bnp.full(N, 40000), bnp.full(N, -60001)])
    x = (x / 50000 if reduce is bnp.prod else x).astype(dtype)  # 100000 is no float16
    fun = lambda x: lax.fori_loop(0, 1, lambda i, s: bnp.stack([reduce(s, axis=0), s[0], s[1]]), x)
    assert set(control(lambda x: fun(x.astype(dtype)))) == {"points"}
    monkeypatch.setattr(config, "host_compiler", "never")
    want = bf.jit(lambda x: fun(x))(x)
    monkeypatch.setattr(config, "host_compiler", "always")
    np.testing.assert_array_equal(bf.jit(fun)(x), want)


@pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")
@pytest.mark.parametrize("prim", [lax.sin_p, lax.reduce_sum_p, lax.concatenate_p], ids=str)
def test_replaced_definitions_are_called(prim, monkeypatch):
    step = lambda s: bnp.sin(s) + 0.1 * bnp.concatenate([s[1:], s[:1]]) + 0.01 * s.sum(0)
    before = prim.impl
    with bf.override(prim, impl=lambda *args, **params: before(*args, **params) * 2):
        monkeypatch.setattr(config, "host_compiler", "never")
        want = bf.jit(fixed(step))(X)
        monkeypatch.setattr(config, "host_compiler", "always")
        np.testing.assert_allclose(bf.jit(fixed(step))(X), want, rtol=2e-5)


def test_on_a_gpu_it_is_a_kernel_and_a_concatenation():
    jaxpr = bf.jit(APART["rows"]).trace(X).jaxpr
    assert len(Draft(jaxpr, (False,), "sm_90a").schedule.steps) == 2


def test_derivatives_are_those_of_the_loop():
    loss = lambda x: (APART["rows"](x) ** 2).sum()
    want = bf.grad(loss)(X)
    np.testing.assert_allclose(bf.jit(bf.grad(loss))(X), want, rtol=1e-4, atol=1e-4)
