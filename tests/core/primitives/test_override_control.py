"""``override`` of the impl of loops, branches and barriers, in every executor."""

import numpy as np
import pytest

import blufunc as bf
from blufunc import lax
from blufunc.config import config

X = np.arange(3, dtype=np.float32)


def marked(*operands, **params):
    """Carries plus 100, or the last operand of a branch."""
    first = params.get("n_consts", params.get("n_cond", 0) + params.get("n_body", 0))
    return [np.asarray(x) + 100 for x in (operands[-1:] if "branches" in params else operands[first:])]


CASES = {  # primitive, program, its result and the uses
    "barrier": (lax.optimization_barrier_p, lambda x: lax.optimization_barrier(x * 2) + 1, 2 * X + 101, 1),
    "barrier in a loop": (
        lax.optimization_barrier_p,
        lambda x: lax.fori_loop(0, 3, lambda i, x: lax.optimization_barrier(x * 2) + 1, x),
        8 * X + 707,
        3,
    ),
    "scan": (lax.scan_p, lambda x: lax.fori_loop(0, 5, lambda i, x: x * 2, x) - 1, X + 99, 1),
    "while": (
        lax.while_p,
        lambda x: lax.while_loop(lambda x: x.sum() < 99, lambda x: x * 2, x) - 1,
        X + 99,
        1,
    ),
    "cond": (lax.cond_p, lambda x: lax.cond(x.sum() < 9, lambda x: x * 2, lambda x: x, x) - 1, X + 99, 1),
    "cond in a loop": (
        lax.cond_p,
        lambda x: lax.fori_loop(0, 2, lambda i, x: lax.cond(x[0] < 9, lambda x: x * 2, lambda x: x, x), x),
        X + 200,
        2,
    ),
    "a loop of one value": (
        lax.scan_p,
        lambda x: lax.fori_loop(0, 5, lambda i, s: s * 2, x[1]) + x,
        X + 101,
        1,
    ),
}


@pytest.mark.parametrize("executor", ["eager", "never", "always"])
@pytest.mark.parametrize("name", CASES)
def test_a_replaced_impl_runs(name, executor, monkeypatch):
    prim, fun, want, uses = CASES[name]
    if executor != "eager":
        monkeypatch.setattr(config, "host_compiler", executor)
    calls = []

    def impl(*operands, **params):
        calls.append(params)
        return marked(*operands, **params)

    run = (lambda x: fun(bf.numpy.asarray(x))) if executor == "eager" else bf.jit(fun)
    before = np.asarray(run(X))
    with bf.override(prim, impl=impl):
        np.testing.assert_array_equal(run(X), want)
        assert len(calls) == uses
        with bf.override(prim, impl=marked):  # the innermost applies
            np.testing.assert_array_equal(run(X), want)
        assert len(calls) == uses
    np.testing.assert_array_equal(run(X), before)


def test_the_replaced_rule_can_be_called():
    before = lax.scan_p.reference
    bodies = []

    def impl(*operands, **params):
        bodies.append(params["jaxpr"])
        return before(bf.kernels.backends.numpy.program.interpret, **params)(list(operands))

    with bf.override(lax.scan_p, impl=impl):
        np.testing.assert_array_equal(bf.jit(lambda x: lax.fori_loop(0, 5, lambda i, x: x * 2, x))(X), 32 * X)
    assert [e.prim.name for e in bodies[0].eqns if e.prim.name == "mul"]


def test_equal_overrides_share_programs():
    traces = []

    def fun(x):
        traces.append(1)
        return lax.fori_loop(0, 5, lambda i, x: x * 2, x)

    compiled = bf.jit(fun)
    for _ in range(2):
        with bf.override(lax.scan_p, impl=marked):
            compiled(X)
    assert len(traces) == 1
