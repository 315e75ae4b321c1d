"""Loops of few points on the CPU, as loops of runs of rounds in a kernel."""

import functools

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.rewrites.loops import pointwise_control_flow
from blufunc.kernels.rewrites.loops.pointwise_control_flow import with_point_control

LEAST = 256


def pendulum(n):
    def body(s):
        t, q, p = s
        p = p - 0.01 * bnp.sin(q)
        return t + 1, q + 0.01 * p, p

    return lambda q, p: lax.while_loop(lambda s: s[0] < n, body, (0, q, p))


def orbit(n):
    """A state of two values."""
    step = lambda i, s: s + 0.01 * bnp.stack([s[1], (1 - s[0] ** 2) * s[1] - s[0]])
    return lambda q, p: lax.fori_loop(0, n, step, bnp.stack([q, p]))


def counted(n):
    return lambda q, p: lax.fori_loop(0, n, lambda i, s: (s[0] + s[1], bnp.cos(s[0] + i)), (q, p))


def endless_inside(n):
    """A loop without a limit in a loop."""
    inner = lambda q: lax.while_loop(lambda q: q > 1, lambda q: q * 0.5, q + 3)
    return lambda q, p: lax.fori_loop(0, n, lambda i, s: (inner(s[0] + s[1]), s[1] * 0.9), (q, p))


def at_most(n):
    return lambda q, p: lax.while_loop(lambda q: q < 9e9, lambda q: q + p * p, q, max_steps=n)


PROGRAMS = {f.__name__: f for f in (pendulum, orbit, counted, endless_inside, at_most)}
ONE = np.float32(1.1), np.float32(0.7)


def control(fun, *args):
    jaxpr = with_point_control(simplify(bf.jit(fun).trace(*args).jaxpr), {}, LEAST)
    return [e for e in jaxpr.eqns if e.prim.kind in ("control", "points")]


@pytest.mark.parametrize(
    ("name", "rounds", "expected"),
    [
        ("pendulum", 100, ["while"]),
        ("orbit", 100, ["loop"]),
        ("orbit", 10**9, ["scan"]),
        ("counted", 100, ["loop"]),
        ("counted", 10**9 + 7, ["scan", "loop"]),  # runs, and the rounds that remain
        ("endless_inside", 100, ["scan"]),
        ("at_most", 100, ["loop"]),
        ("at_most", 10**9, ["while"]),
    ],
)
def test_loops_of_a_point(name, rounds, expected):
    found = control(PROGRAMS[name](rounds), *ONE)
    assert list(dict.fromkeys(e.prim.name for e in found)) == expected
    scans = [e for e in found if e.prim.name == "scan" and e.params["length"] > 1]
    if rounds > 10**8:
        assert all(e.params["length"] < 10**5 for e in scans)


def test_runs_end_soon():
    """The rounds of all runs are those of the loop, and no run takes long."""
    runs, *last = control(counted(10**9 + 7), *ONE)
    (inner,) = runs.params["jaxpr"].eqns
    rest = last[0].params["control"].most if last else 0
    assert runs.params["length"] * inner.params["length"] + rest == 10**9 + 7
    assert inner.params["length"] < 2**23
    (outer,) = control(pendulum(10**9), *ONE)
    (inner,) = outer.params["body"].eqns
    assert inner.prim.name == "while" and inner.params["max_steps"] < 2**23


@pytest.mark.parametrize(
    ("points", "inside"), [(1, True), (4, True), (8, False), (31, False), (32, True), (300, True)]
)
def test_points_that_run_in_a_kernel(points, inside):
    x = np.linspace(0, 1, points, dtype=np.float32)
    found = control(lambda x: lax.fori_loop(0, 50, lambda i, x: bnp.sin(x) + 1, x), x)
    assert {e.prim.name for e in found} == {"loop" if inside else "scan"}


@pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")
@pytest.mark.parametrize("cost", [64, 1 << 23])
@pytest.mark.parametrize("rounds", [0, 1, 7, 100])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name, rounds, cost, monkeypatch):
    monkeypatch.setattr(pointwise_control_flow, "_RUN_COST", cost)  # runs of a few rounds, or of all
    fun = PROGRAMS[name](rounds)
    for args in (ONE, tuple(np.float32(x) * np.arange(1, 5, dtype=np.float32) for x in ONE)):
        if args is not ONE:
            fun = bf.vmap(fun)
        monkeypatch.setattr(config, "host_compiler", "never")
        want = bf.tree.leaves(bf.jit(lambda *args, fun=fun: fun(*args))(*args))
        monkeypatch.setattr(config, "host_compiler", "always")
        for g, w in zip(bf.tree.leaves(bf.jit(fun)(*args)), want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")
@pytest.mark.parametrize("fun", [bnp.sin, bnp.cos], ids=["sin", "cos"])
def test_sines_of_one_value_are_those_of_many(fun, monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "always")
    one = bf.jit(lambda x: fun(x) * 1.5)
    assert f"bf_{fun.__name__}_alone" in one.lower(np.float32(1)).source()
    scales = 1e-30, 1e-3, 1, 10, 1e3, 1e5, 1e7, 1e30
    edges = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        np.pi / 4,
        np.pi / 2,
        np.pi,
        2**20,
        1048575.9,
        11,
        22 * np.pi,
        1e-45,
    ]
    rng = np.random.default_rng(0)
    xs = np.concatenate([*(rng.normal(size=30) * s for s in scales), edges]).astype(np.float32)
    many = np.asarray(bf.jit(lambda x: fun(x) * 1.5)(xs))
    single = np.array([one(x) for x in xs])
    np.testing.assert_array_max_ulp(single[np.isfinite(many)], many[np.isfinite(many)], 1)
    np.testing.assert_array_equal(np.isnan(single), np.isnan(many))
    np.testing.assert_array_equal(np.signbit(single[:-13]), np.signbit(many[:-13]))


def test_a_double_and_a_complex_value_alone(monkeypatch):
    if toolchain.find() is not None:
        monkeypatch.setattr(config, "host_compiler", "always")
    for x in (np.complex64(1 + 2j), np.complex64(-0.5j)):
        got = bf.jit(lambda x: functools.reduce(lambda a, f: f(a) + 1, [bnp.sin, bnp.cos], x))(x)
        np.testing.assert_allclose(got, np.cos(np.sin(x) + 1) + 1, rtol=1e-5)
