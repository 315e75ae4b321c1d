"""Scans as their rounds: which are replaced, and that results stay the same."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.programs.simplify import inline_bodies, simplify
from blufunc.kernels.backends.cuda.device_model import H200
from blufunc.kernels.machine import Machine
from blufunc.kernels.rewrites.loops import unrolled_scans
from blufunc.memory import Space


def uniform(*shape, seed=0):
    return from_numpy(np.random.default_rng((seed, *shape)).uniform(-1, 1, shape).astype(np.float32))


SLOW = Machine("a slow device", bandwidth=1e6, flops=1e6, products=1e6)
W, X = uniform(4, 8, 8), uniform(6, 8)
out = lambda x: bf.device_put(x, Space.Host)
back = lambda x: bf.device_put(x, Space.Device)


def pair(first, second, **options):
    """Two scans: the first stacks ``first(h)``, and ``second`` reads it from its end."""

    def f(w, x):
        x, hs = lax.scan(lambda x, w: (bnp.tanh(x @ w), first(x)), x, w, **options)
        turned = {"reverse": not options.get("reverse", False)}
        return lax.scan(lambda x, h: (x + second(h), None), x, hs, **turned)[0]

    return f


def returned(w, x):
    """A residual on the host that is a result: a stack."""
    x, hs = lax.scan(lambda x, w: (bnp.tanh(x @ w), out(x)), x, w)
    return lax.scan(lambda x, h: (x + back(h), None), x, hs)[0], hs


def constant(w, x):
    """A residual on the host that a scan reads whole."""
    x, hs = lax.scan(lambda x, w: (bnp.tanh(x @ w), out(x)), x, w)
    return lax.scan(lambda x, w: (x @ w + back(hs).sum(), None), x, w)[0]


def carried(w, x):
    """A carry on the host."""
    body = lambda c, w: ((bnp.tanh(c[0] @ w), out(back(c[1]) + 1)), out(c[0]))
    (x, m), hs = lax.scan(body, (x, out(x)), w)
    return lax.scan(lambda x, h: (x + back(h), None), x + back(m), hs)[0]


def three(w, x):
    """The third reads the stacks of the first two; the last is alone."""
    x, hs = lax.scan(lambda x, w: (bnp.tanh(x @ w), out(x)), x, w)
    x, ks = lax.scan(lambda x, w: (bnp.tanh(x @ w), x), x, w, reverse=True)
    x, _ = lax.scan(lambda x, hk: (x + back(hk[0]) * hk[1], None), x, (hs, ks))
    return x, lax.scan(lambda x, w: (bnp.tanh(x @ w), x.sum(0)), x, w)


def outputs(w, x):
    """Stacks that are results: of floats, integers and booleans, written row by row."""

    def body(c, w):
        x, n = c
        return (bnp.tanh(x @ w), n + 1), (out(x), n, x[0] > 0, x.sum(0), bnp.float32(2))

    (x, n), (hs, *ys) = lax.scan(body, (x, bnp.int32(3)), w, reverse=True)
    return lax.scan(lambda x, h: (x + back(h), None), x, hs, reverse=True)[0], n, ys


CASES = {  # the program, scans that are left without a budget, and with one
    "host": (pair(out, back), 0, 0),
    "host, reverse": (pair(out, back, reverse=True), 0, 0),
    "device": (pair(lambda x: x, lambda h: h), 2, 0),
    "both": (pair(lambda x: (x, out(x)), lambda h: h[0] * back(h[1])), 0, 0),
    "unread": (lambda w, x: lax.scan(lambda x, w: (bnp.tanh(x @ w), None), x, w)[0], 1, 1),
    "returned": (returned, 2, 2),
    "constant": (constant, 2, 2),
    "carried": (carried, 2, 2),
    "three": (three, 2, 1),
    "outputs": (outputs, 0, 0),
}


@pytest.mark.parametrize("budget", [False, True], ids=["policy", "budget"])
@pytest.mark.parametrize("case", CASES)
def test_scans_are_their_rounds(case, budget):
    f, *left = CASES[case]
    jaxpr, consts = bf.make_jaxpr(f)(W, X).hoist()
    jaxpr, origins = inline_bodies(simplify(jaxpr))
    made = unrolled_scans.with_unrolled_scans(jaxpr, origins, SLOW if budget else None)
    check_jaxpr(made)
    scans = [e for e in made.eqns if e.prim.name == "scan"]
    assert len(scans) == left[budget] and (made is jaxpr) == (left[budget] == len(_scans(jaxpr)))
    for got, want in zip(eval_jaxpr(made, [*consts, W, X]), bf.tree.leaves(f(W, X)), strict=True):
        assert got.aval.same_type(want.aval)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    shapes = [v.aval.shape for e in made.eqns for v in e.outvars]
    if case == "host":  # rows are not stacked
        assert (4, 6, 8) not in shapes and shapes.count((6, 8)) > 4


def _scans(jaxpr):
    return [e for e in jaxpr.eqns if e.prim.name == "scan"]


def test_rounds_have_a_limit(monkeypatch):
    """Both scans of a pair stay, if one of them is too long."""
    jaxpr, _ = inline_bodies(simplify(bf.make_jaxpr(CASES["host"][0])(W, X)))
    assert not _scans(unrolled_scans.with_unrolled_scans(jaxpr, {}))
    counts = sorted(4 * len(e.params["jaxpr"].eqns) for e in _scans(jaxpr))
    monkeypatch.setattr(unrolled_scans, "MOST_EQNS", counts[-1] - 1)
    assert counts[0] < counts[-1] and unrolled_scans.with_unrolled_scans(jaxpr, {}) is jaxpr


def test_short_rounds_stay_a_loop_under_a_budget():
    """They may be one kernel; those that offload are replaced all the same."""
    for case, left in (("device", 2), ("host", 0)):
        jaxpr, origins = inline_bodies(simplify(bf.make_jaxpr(CASES[case][0])(W, X)))
        assert len(_scans(unrolled_scans.with_unrolled_scans(jaxpr, origins, H200))) == left


def test_rounds_of_a_recomputed_scan_are_recomputed():
    jaxpr, _ = inline_bodies(simplify(bf.make_jaxpr(CASES["host"][0])(W, X)))
    origins = dict.fromkeys(_scans(jaxpr), 7)
    made = unrolled_scans.with_unrolled_scans(jaxpr, origins)
    assert {origins.get(e) for e in made.eqns if e.prim.name in ("tanh", "offload", "dot_general")} == {7}
