"""Loops outside of ``jit``: interpreted, or compiled if they last."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.kernels.backends.cpu import eager_loops

X = np.array([0.5, 1.5], np.float32)


@pytest.fixture
def compiled(monkeypatch):
    """The loops that are compiled, where a loop lasts from 10 calls of NumPy on."""
    found = []
    make = eager_loops._compiled

    def counting(compile, prim, operands, params, outs):
        found.append((prim.name, params.get("length", params.get("max_steps"))))
        return make(compile, prim, operands, params, outs)

    monkeypatch.setattr(eager_loops, "_compiled", counting)
    monkeypatch.setattr(eager_loops, "_COMPILING", 10 * eager_loops._CALL)
    return found


def step(x):
    return x * 0.9 + 0.1


def scan(n):
    return lax.scan(lambda c, y: (step(c), c * y), X, np.arange(n, dtype=np.float32))


def until(n, **options):
    return lax.while_loop(lambda c: c[1] < n, lambda c: (step(c[0]), c[1] + 1), (X, 0), **options)


LOOPS = {  # a loop, and what is compiled of it
    "short scan": (lambda: scan(3), []),
    "long scan": (lambda: scan(40), [("scan", 40)]),
    "reversed": (
        lambda: lax.scan(lambda c, y: (step(c) + y, c), X, np.arange(9, dtype="float32"), reverse=True),
        [("scan", 9)],
    ),
    "short while": (lambda: until(2), []),
    "long while": (lambda: until(40), [("while", None)]),
    "bounded while": (lambda: until(40, max_steps=20), [("while", 18)]),
    "short bound": (lambda: until(40, max_steps=2), []),
}


@pytest.mark.parametrize("name", LOOPS)
def test_results_are_those_of_interpreting(compiled, name):
    loop, expected = LOOPS[name]
    found = loop()
    assert compiled == expected
    with config.overridden(host_compiler="never"):
        want = loop()
    for a, b in zip(bf.tree.leaves(found), bf.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert a.aval == b.aval


def test_callbacks_are_interpreted(compiled):
    seen = []

    def body(c, _):
        bf.debug.callback(lambda c: seen.append(float(c)), c)
        return c + 1, None

    last, _ = lax.scan(body, np.float32(0), length=30)
    assert float(last) == 30 and seen == list(range(30)) and compiled == []


def test_a_loop_that_ends_where_it_would_be_compiled(compiled):
    rounds = int(
        eager_loops._COMPILING / eager_loops._CALL / 4
    )  # four calls of NumPy: a condition and a body
    x, n = until(rounds)
    assert int(n) == rounds and compiled == []
    np.testing.assert_allclose(x, bnp.ones(2) - 0.9**rounds * (1 - X), rtol=1e-6)
