"""Loops and branches at points: which ones kernels compute, and their values."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import jvp, lax, nn, vmap
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import program as host_program
from blufunc.kernels.backends.cpu import renderer, toolchain
from blufunc.kernels.fusion.fuse import Region, fuse
from blufunc.kernels.ops.points import POINTS
from blufunc.kernels.rewrites.loops import pointwise_control_flow
from blufunc.kernels.rewrites.loops.pointwise_control_flow import with_point_control
from blufunc.transforms.staging.jit import jit
from tests.kernels.differential import LIKE_A_GPU, SMALL, as_body, case, compile_all, differences

compiled = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")
RNG = np.random.default_rng(0)
X, Y = (RNG.uniform(0.5, 9, (6, 15)).astype(np.float32) for _ in range(2))
V = X.reshape(-1)
Z = (RNG.uniform(-2, 2, (5, 8)) + 1j * RNG.uniform(-2, 2, (5, 8))).astype(np.complex64)
N = RNG.integers(0, 60, (70,)).astype(np.int32)
ROW, ONE = X[:1], np.float32(1)


def root(x, **bound):
    """Newton's iteration."""
    return lax.while_loop(lambda y: bnp.abs(y * y - x) > 1e-3 * x, lambda y: 0.5 * (y + x / y), x, **bound)


def escape(c):
    """When a point leaves the Mandelbrot set, and where it is then."""
    inside = lambda s: bnp.real(s[0] * bnp.conj(s[0])) < 4
    return lax.while_loop(inside, lambda s: (s[0] * s[0] + c, s[1] + 1), (0 * c, 0), max_steps=30)


def collatz(n):
    """Steps to 1; a cond in the body."""
    after = lambda n: lax.cond(n % 2 == 1, lambda n: 3 * n + 1, lambda n: n // 2, n)
    return lax.while_loop(lambda s: s[0] > 1, lambda s: (after(s[0]), s[1] + 1), (n, 0))[1]


def digits(n):
    """Nested loops that end independently: the powers of 2 in all m <= n."""

    def twos(m):
        even = lambda s: (s[0] > 0) & (s[0] % 2 == 0)
        return lax.while_loop(even, lambda s: (s[0] // 2, s[1] + 1), (m, 0))[1]

    return lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, s[1] + twos(s[0])), (n, 0))[1]


def flagged(x):
    """A carry that is the condition itself."""
    return lax.while_loop(lambda s: s[0], lambda s: (s[1] < 40, s[1] * 1.5), (x < 5, x))[1]


def turned(n, x, y):
    """A computed number of iterations; a scalar counter next to array carries."""
    return lax.fori_loop(0, n, lambda i, s: (s[1] + i, s[0] * 0.5), (x, y))


POWERS = lambda x, y: lax.scan(lambda s, _: ((s[0] * y, s[1] + s[0]), None), (x, x * 0), length=6)[0]
SIDES = (bnp.exp, lambda x: x + 1, lambda x: lax.fori_loop(0, 3, lambda i, y: y * x - i, x))


def pendulum(x):
    """Steps of a pendulum with friction: functions that are calls."""
    slope = lambda y: bnp.sin(y) - 0.1 * y
    return lax.fori_loop(0, 5, lambda i, y: y + 0.05 * (slope(y) + slope(y + 0.1 * slope(y))), x)


def wait_for(of):
    """Continues for all while any is small; ``of`` decides where."""

    def body(x):
        small = of(x < 5)
        return bnp.where(x < 5, bnp.where(small, x * 2, x + 1), x)

    return lambda x: lax.while_loop(lambda x: bnp.any(x < 5), body, x)


PROGRAMS = {
    "steps that call functions": (pendulum, [X]),
    "roots": (vmap(root), [V]),
    "roots of a batch of batches": (vmap(vmap(root)), [X]),
    "roots of batches of batches of batches": (vmap(vmap(vmap(root))), [X.reshape(2, 3, 15)]),
    "roots with a bound": (vmap(lambda x: root(x, max_steps=3)), [V]),
    "a root": (root, [V[3]]),
    "two results": (vmap(vmap(escape)), [Z]),
    "one of two results": (lambda z: vmap(vmap(escape))(z)[1], [Z]),
    "a cond in a loop": (vmap(collatz), [N]),
    "a loop in a loop": (vmap(digits), [N]),
    "a carry that is the condition": (vmap(flagged), [V]),
    "steps": (POWERS, [X, Y]),
    "no steps": (lambda x: lax.fori_loop(3, 3, lambda i, y: y + x, x), [X]),
    "a count that is computed": (turned, [np.int32(5), X, Y]),
    "a loop of numbers": (lambda n: lax.while_loop(lambda m: m < 100, lambda m: m * 3, n + 1), [np.int32(2)]),
    "what does not vary": (
        lambda x, row: lax.fori_loop(0, 4, lambda i, y: y * bnp.exp(-row * row) + bnp.sum(row), x),
        [X, ROW],
    ),
    "what is computed before and behind": (lambda x: nn.silu(vmap(vmap(root))(x * x + 1)) - x, [X]),
    "what is done while any of the row goes on": (
        wait_for(lambda s: lax.broadcast_in_dim(s.any(1), s.shape, (0,))), [X[:6, :6]]
    ),
    "a derivative": (lambda x: jvp(vmap(root), (x,), (x,))[1], [V]),
    "carries that trade places": (lambda x: lax.fori_loop(0, 3, lambda i, s: (s[1], s[0], s[2]), (x, x * 2, x)), [X]),
    "a number of which nothing else is read": (
        lambda x: lax.fori_loop(0, 3, lambda i, s: (s[0] * s[1], s[1] + 1), (x, 2.0))[1], [X]
    ),
    "a branch": (lambda p, x, y: lax.cond(p > 0, lambda x, y: x * y, lambda x, y: x - y, x, y), [ONE, X, Y]),
    "the other branch": (lambda p, x, y: lax.cond(p < 0, lambda x, y: x * y, lambda x, y: x - y, x, y), [ONE, X, Y]),
    "an operand of one side only": (
        lambda p, x, y: lax.cond(p > 0, lambda x, y: y, lambda x, y: x * 2, x, y), [ONE, X, Y]
    ),
    "a number or an operand": (lambda p, x: lax.cond(p > 0, lambda x: x * 0 + 1, lambda x: x, x), [ONE, X]),
    "branches of two results": (
        lambda p, x: lax.cond(p > 0, lambda x: (x, x * 2), lambda x: (x + 1, x), x), [ONE, X]
    ),
    "one of many": (lambda n, x: lax.switch(n, SIDES, x * 2) - x, [np.int32(2), X]),
    "one beyond many": (lambda n, x: lax.switch(n, SIDES, x * 2) - x, [np.int32(9), X]),
    "a branch of no batch": (vmap(lambda p, x: lax.cond(p > 0, bnp.sin, lambda x: x, x), (None, 0)), [ONE, V]),
}  # fmt: skip


def program(name, target=SMALL):
    fun, args = PROGRAMS[name]
    return case(fun, *map(from_numpy, map(np.asarray, args)), target=target, name=name)


def check(c, results, exact=True):
    assert not differences(results, c.expected(), exact), c.name


@pytest.mark.parametrize("target", [SMALL, LIKE_A_GPU], ids=["small", "like a GPU"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_in_kernels(name, target):
    """All of it is computed in kernels, and what they mean is what the program means."""
    c = program(name, target)
    assert len(c.schedule.steps) == len(c.schedule.kernels)
    check(c, c.interpreted())


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "what does not vary"])
def test_in_one_kernel(name):
    assert len(program(name).schedule.steps) == 1


@pytest.fixture(scope="module")
def made():
    """All of them in one source; and once more with small chunks for threads."""
    cases = [program(name) for name in PROGRAMS]
    return {c.name: (c, functions) for c, functions in zip(cases, compile_all(cases), strict=True)}


@compiled
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled(made, name):
    c, functions = made[name]
    check(c, c.run(functions), exact=False)


@compiled
def test_compiled_for_threads(monkeypatch):
    for constant, value in {"PARALLEL_WORK": 1, "_BLOCK": 4, "_POINTS_FOR_THREADS": 3}.items():
        monkeypatch.setattr(renderer, constant, value)
    cases = [program(name) for name in PROGRAMS]
    for c, functions in zip(cases, compile_all(cases), strict=True):
        check(c, c.run(functions), exact=False)


# -- what else a loop may do ---------------------------------------------------------------------------


def all_near(x):
    """Goes on for all while any is far: not what each would do alone."""
    return lax.while_loop(lambda y: bnp.any(bnp.abs(y * y - x) > 1e-3), lambda y: 0.5 * (y + x / y), x)


REFUSED = {
    "a neighbour's condition": (wait_for(lambda small: small[::-1]), [V]),
    "the condition of another place": (wait_for(lambda small: small.T), [X[:6, :6]]),
    "whether another row goes on": (wait_for(lambda s: lax.broadcast_in_dim(s.any(1), s.shape, (1,))), [X[:6, :6]]),
    "whether any of a column goes on": (wait_for(lambda s: lax.broadcast_in_dim(s.any(0), s.shape, (0,))), [X[:6, :6]]),
    "a loop for all while any goes on": (all_near, [V]),
    "a loop that counts the turns of all": (
        lambda x: lax.while_loop(
            lambda s: bnp.any(s[0] < 50),
            lambda s: (bnp.where(s[0] < 50, s[0] * 2, s[0]), s[1] + 1),
            (x, 0),
        ),
        [V],
    ),
    "a condition of all and a count": (
        lambda x: lax.while_loop(
            lambda s: bnp.any(s[0] < 50) & (s[1] < 9), lambda s: (s[0] * 2, s[1] + 1), (x, 0)
        )[0],
        [V],
    ),
    "another place": (lambda x: lax.fori_loop(0, 3, lambda i, y: y[::-1] + x, x), [V]),
    "a transposed carry": (lambda x: lax.fori_loop(0, 3, lambda i, y: y.T * 2, x), [X[:6, :6]]),
    "a sum": (lambda x: lax.fori_loop(0, 3, lambda i, y: y / y.sum(), x), [V]),
    "two shapes": (lambda x, v: lax.fori_loop(0, 3, lambda i, s: (s[0] + 1, s[1] * 2), (x, v)), [X, V[:7]]),
    "a number that is returned": (lambda x: lax.fori_loop(0, 3, lambda i, s: (s[0] * 2, s[1] + 1), (x, 0)), [X]),
    "outputs of steps": (lambda x: lax.scan(lambda s, _: (s * 2, s), x, length=3), [X]),
    "a branch that sums": (lambda p, x: lax.cond(p > 0, lambda x: x / x.sum(), lambda x: x, x), [ONE, V]),
    "no elements": (lambda x: lax.fori_loop(0, 3, lambda i, y: y + 1, x), [V[:0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_loops_stay(name, monkeypatch):
    monkeypatch.setattr(host_program, "compile_program", as_body)
    fun, args = REFUSED[name]
    c = case(fun, *map(from_numpy, map(np.asarray, args)), target=SMALL, name=name)
    control = ("while", "scan", "cond")
    assert {e.prim.name for e in c.schedule.jaxpr.eqns if e.prim in POINTS or e.prim.name in control} <= set(
        control
    )
    check(c, c.interpreted(), exact=False)


def test_bodies_may_not_be_too_long(monkeypatch):
    monkeypatch.setattr(pointwise_control_flow, "MOST_EQUATIONS", 2)
    c = program("roots")
    assert [e.prim.name for e in c.schedule.jaxpr.eqns] == ["while"]


# -- how they are joined -------------------------------------------------------------------------------


def fused(fun, *args):
    return fuse(with_point_control(simplify(jit(fun).trace(*args).jaxpr), {}))


def test_results_of_one_loop_are_of_one_region():
    """Even if only positions relate them: the initial values are computed from these."""

    def fun(x):
        start = bnp.arange(12.0)
        return lax.fori_loop(0, 3, lambda i, s: (s[1], s[0] + 1), (start, start * 2))

    (region,) = fused(fun, X).steps
    assert isinstance(region, Region) and len(region.eqns) == 2


def test_a_reduction_joins_the_loop():
    (region,) = fused(lambda x: vmap(vmap(root))(x).sum(1), X).steps
    assert [e.prim.name for e in region.eqns] == ["mul", "loop", "reduce_sum"]


def test_what_a_body_computes_of_constants_is_computed_once():
    """Before the loop: the exponential of a row, and its sum, a kernel of its own."""
    c = program("what does not vary")
    loops = [e for e in c.schedule.jaxpr.eqns if e.prim in POINTS]
    (loop,) = loops
    assert not {"exp", "reduce_sum"} & {e.prim.name for e in loop.params["control"].body.eqns}


def test_a_loop_in_a_loop_is_not_moved_before_it():
    """If the outer one has no iteration, the inner one, of constants, might not end."""

    def fun(x, y):
        endless = lambda: vmap(lambda y: lax.while_loop(lambda z: z > 0, lambda z: z + 1, y))(y)
        return vmap(lambda x, y: lax.while_loop(lambda s: s < 0, lambda s: s + endless()[0], x))(x, y)

    c = case(fun, from_numpy(V), from_numpy(V), target=SMALL, name="endless")
    assert [e.prim.name for e in c.schedule.jaxpr.eqns if e.prim.kind in ("control", "points")] == ["while"]


# -- random loops --------------------------------------------------------------------------------------

BINARY = (bnp.add, bnp.subtract, bnp.multiply, bnp.maximum, bnp.minimum)


def random_loop(seed):
    """A loop of three carries that ends per point, or a branch, of exact operations."""
    rng = np.random.default_rng(seed)

    def grown(values, n):
        values = list(values)
        for _ in range(n):
            a, b, c = (values[i] for i in rng.integers(0, len(values), 3))
            kind = rng.integers(0, 7)
            values.append(
                bnp.where(a < b, c, b) if kind == 5 else bnp.abs(a) * 0.5 if kind == 6 else BINARY[kind](a, b)
            )
        return values

    def point(x, y):
        state = rng.bit_generator.state

        def body(s):
            rng.bit_generator.state = state  # a body may be traced more than once
            return tuple(v * 0.25 for v in grown([*s[:2], x, y], 5)[-2:]) + (s[2] + bnp.abs(x),)

        count = lambda s: (s[2] < 6) & (s[0] < 50)
        bound = {"max_steps": 4} if seed % 3 == 0 else {}
        s = lax.while_loop(count, body, (x, y, x * 0), **bound)
        return s if seed % 2 else s[0] - s[1]

    def fun(p, x, y):
        s = vmap(vmap(point))(x, y)
        if seed % 4 == 0:
            return lax.cond(p > 0, lambda a: grown([a, x], 3)[-1] + 1, lambda a: a * 2, s)
        return s

    args = [np.float32(rng.normal()), *rng.normal(size=(2, 5, 14)).astype(np.float32)]
    return case(
        fun,
        *map(from_numpy, map(np.asarray, args)),
        target=(SMALL, LIKE_A_GPU)[seed % 2],
        name=f"loop {seed}",
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_loops_interpreted(first):
    for seed in range(first, first + 20):
        c = random_loop(seed)
        assert len(c.schedule.steps) == len(c.schedule.kernels)
        check(c, c.interpreted())


@pytest.mark.slow
@compiled
def test_random_loops_compiled():
    cases = [random_loop(seed) for seed in range(100, 140)]
    for c, functions in zip(cases, compile_all(cases), strict=True):
        check(c, c.run(functions))


def test_an_array_of_one_number_stays_an_array_before_the_loop(monkeypatch):
    """A window update by a constant does not depend on the loop.

    Its points know the constant alone.
    """
    monkeypatch.setattr(config, "host_compiler", "always")

    def fun(x):
        def body(i, c):
            window = bnp.broadcast_to(bnp.float32(0.25) * 2, (1, 4))
            return c * 0.5 + lax.dynamic_update_slice(x, window, (1, 0))

        return lax.fori_loop(0, 3, body, x)

    x = np.ones((300, 4), np.float32)
    want = x.copy()
    for _ in range(3):
        new = x.copy()
        new[1] = 0.5
        want = want * 0.5 + new
    np.testing.assert_allclose(jit(fun)(x), want, rtol=1e-6)
