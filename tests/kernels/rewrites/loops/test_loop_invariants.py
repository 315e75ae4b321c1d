"""Loop-invariant values leave scans and while loops."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.rewrites.loops.loop_invariants import MOST_BYTES, with_hoisted_invariants

RNG = np.random.default_rng(0)
A, X, Y = (RNG.standard_normal(shape).astype(np.float32) / 3 for shape in ((6, 6), (6,), (6,)))


def repeat(body, rounds=5):
    """Program that applies ``body(x, a, y)`` in a ``fori_loop``."""
    return lambda a, x, y: lax.fori_loop(0, rounds, lambda i, x: body(x, a, y), x)


def scanned(a, x, y):
    def step(x, t):
        return x + a @ y + t, bnp.sin(a @ y) * t

    return lax.scan(step, x, y)


def until(a, x, y):
    """A condition and a body with invariant values."""
    going = lambda s: (s[0] < 7) & (abs(s[1]).sum() < 100 * (a @ y * y).sum() ** 2 + 50)
    return lax.while_loop(going, lambda s: (s[0] + 1, s[1] + a @ y), (0, x))


def nested(a, x, y):
    inner = lambda z: lax.fori_loop(0, 3, lambda _, z: z * 0.5 + a @ y, z)
    return lax.fori_loop(0, 4, lambda _, x: x + inner(x) + inner(y), x)


def empty(a, x, y):
    """No round runs."""
    return lax.while_loop(lambda s: s[0] < 0, lambda s: (s[0] + 1, s[1] + bnp.log(y) + a @ y), (0, x))


CASES = {  # a program, and the operations that leave its outermost loops
    "a matmul": (repeat(lambda x, a, y: x + a @ y), ["dot_general"]),
    "of a cheap value": (repeat(lambda x, a, y: x + a @ (2 * y)), ["dot_general", "mul"]),
    "its operand stays as well": (repeat(lambda x, a, y: x * (2 * y) + a @ (2 * y)), ["dot_general", "mul"]),
    "a reduction": (repeat(lambda x, a, y: x / a.sum()), ["reduce_sum"]),
    "an exponential": (repeat(lambda x, a, y: x + bnp.exp(y)), ["exp"]),
    "a sort": (repeat(lambda x, a, y: x + bnp.sort(y)), ["sort"]),
    "random numbers": (
        repeat(lambda x, a, y: x + bf.random.uniform(bf.random.key((9 * y[0]).astype("int32")), (6,))),
        None,
    ),
    "a scan": (scanned, ["dot_general", "sin"]),
    "a while loop": (until, None),
    "nested loops": (nested, None),
    "no rounds": (empty, ["dot_general", "log"]),
    "under vmap": (bf.vmap(repeat(lambda x, a, y: x * (a @ y)), (None, 0, None)), ["dot_general"]),
    "a gradient": (
        bf.grad(lambda a, x, y: (repeat(lambda x, a, y: x * (a @ y))(a, x, y) ** 2).sum(), 1),
        None,
    ),
    "nothing": (repeat(lambda x, a, y: a @ x + 2 * y), []),
    "a carry": (repeat(lambda x, a, y: x + bnp.exp(x) * bnp.sum(x)), []),
    "cheap": (repeat(lambda x, a, y: x + 2 * y + a[0]), []),
}
ARGS = {"under vmap": (A, np.stack([X, 2 * X]), Y)}


def outside(jaxpr):
    return sorted(e.prim.name for e in jaxpr.eqns if e.prim.kind not in ("control", "movement"))


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n][1] is not None])
def test_what_leaves_loops(name):
    fun, expected = CASES[name]
    jaxpr = simplify(bf.jit(fun).trace(*ARGS.get(name, (A, X, Y))).jaxpr)
    before = outside(jaxpr)
    made = with_hoisted_invariants(jaxpr, {})
    assert outside(made) == sorted(before + expected)
    assert (made is jaxpr) == (not expected)


@pytest.mark.parametrize("name", CASES)
def test_values(name, monkeypatch):
    fun, args = CASES[name][0], ARGS.get(name, (A, X, Y))
    monkeypatch.setattr(config, "host_compiler", "never")
    want = bf.tree.leaves(bf.jit(lambda *args: fun(*args))(*args))
    if toolchain.find() is not None:
        monkeypatch.setattr(config, "host_compiler", "always")
    for g, w in zip(bf.tree.leaves(bf.jit(fun)(*args)), want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-6)


def test_values_of_inner_loops_leave_all_loops():
    made = with_hoisted_invariants(simplify(bf.jit(nested).trace(A, X, Y).jaxpr), {})
    assert outside(made).count("dot_general") >= 1
    assert [e.prim.name for e in made.eqns].count("scan") == 2  # the loop of y, and that of x
    (outer,) = (e for e in made.eqns if e.params.get("length") == 4)
    bodies = [
        outer.params["jaxpr"],
        *(e.params["jaxpr"] for e in outer.params["jaxpr"].eqns if "jaxpr" in e.params),
    ]
    assert not [e for b in bodies for e in b.eqns if e.prim.name == "dot_general"]


def test_conditions_lose_their_invariants():
    made = with_hoisted_invariants(simplify(bf.jit(until).trace(A, X, Y).jaxpr), {})
    (loop,) = (e for e in made.eqns if e.prim.name == "while")
    for part in ("cond", "body"):
        assert not [e for e in loop.params[part].eqns if e.prim.name == "dot_general"]


def test_large_values_and_replaced_operations_stay():
    n = int((MOST_BYTES // 4) ** 0.5) + 1
    outer = repeat(lambda x, a, y: (x * bnp.exp(y[:, None] * y)).sum(1), 3)
    shapes = [bf.ShapeDtypeStruct(s, np.float32) for s in ((1, 1), (n,), (n,))]
    jaxpr = simplify(bf.jit(outer).trace(*shapes).jaxpr)
    assert with_hoisted_invariants(jaxpr, {}) is jaxpr
    with bf.override(lax.exp_p, impl=lambda x: np.exp(x)):
        jaxpr = simplify(bf.jit(CASES["an exponential"][0]).trace(A, X, Y).jaxpr)
        assert with_hoisted_invariants(jaxpr, {}) is jaxpr
