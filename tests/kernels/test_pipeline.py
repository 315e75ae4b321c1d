"""Schedules: what planning leaves as it was, and what it does once."""

import gc
from dataclasses import replace

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc.core.arrays.array import from_numpy
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.fusion import fuse
from blufunc.kernels.pipeline import schedule
from blufunc.kernels.schedule import GroupStep, KernelStep
from tests.kernels.differential import LIKE_A_GPU, SMALL, case

X = from_numpy(np.ones((6, 8), np.float32))


def planned(fun, *args, target=SMALL):
    return case(fun, *args, target=target, name="planned").schedule


@pytest.mark.parametrize("enabled", [True, False])
def test_planning_leaves_the_garbage_collector_as_it_was(enabled):
    """Also where it fails. While it runs there is none."""
    during = []

    def broken(rows, lanes):
        during.append(gc.isenabled())
        raise ValueError("no chunks")

    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        planned(lambda x: x * 2, X)
        assert gc.isenabled() == enabled
        with pytest.raises(ValueError, match="no chunks"):
            planned(lambda x: x.sum(0), X, target=replace(SMALL, chunks=broken))
        assert gc.isenabled() == enabled and during == [False]
    finally:
        gc.enable() if before else gc.disable()


def test_the_sort_of_an_equation_is_asked_once(monkeypatch):
    """A program with rematerialization is fused twice."""
    asked = []
    sort_of = fuse.sort_of
    monkeypatch.setattr(fuse, "sort_of", lambda e: asked.append(e) or sort_of(e))
    monkeypatch.setattr("blufunc.kernels.pipeline._LEAST_SAVING", 1)
    made = planned(bf.grad(lambda x: bnp.tanh(bnp.sin(x @ x.T)).sum()), X, target=LIKE_A_GPU)
    assert len(asked) == len(set(asked)) >= len(made.jaxpr.eqns)


KEPT = {  # an activation, and the kernels with its tanh: the backward pass reads the matmul's operand, too
    "what is written anyway": (bnp.tanh, 1),
    "what a product has written": (lambda h: h * bnp.tanh(h), 2),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_not_written_for_that_alone(name, monkeypatch):
    """Values of one size: a kernel of the forward pass writes only its result."""
    activation, kernels = KEPT[name]
    monkeypatch.setattr("blufunc.kernels.pipeline._LEAST_SAVING", 1)

    def f(x, w, s, v):
        return (bnp.sin(activation((x @ w) * s) @ v) @ v.T @ w.T).sum()

    args = [bf.ShapeDtypeStruct(s, np.float32) for s in ((64, 8), (8, 512), (512,), (512, 8))]
    jaxpr = simplify(bf.jit(bf.grad(f, (0, 1, 3))).trace(*args).jaxpr)
    made = schedule(jaxpr, (False,) * 4, LIKE_A_GPU, lambda eqn: True)
    found = [s for s in made.steps if isinstance(s, KernelStep) and "tanh" in repr(s.region)]
    assert len(found) == kernels
    assert sum(b.written for b in found[0].kernel.buffers) == 1


@pytest.mark.parametrize("most, groups", [(1 << 24, [4, 4]), (X.nbytes, [4, 4]), (X.nbytes - 1, [4])])
def test_what_is_alive_at_once_is_not_much(most, groups, monkeypatch):
    """A group has memory for all that its members write; results have theirs anyway."""
    monkeypatch.setattr("blufunc.kernels.pipeline._LARGE", most)

    def f(*xs):
        return [x * 2 for x in xs], sum(bnp.tanh(x) @ x.T for x in xs)

    jaxpr = bf.jit(f).trace(*(X + n for n in range(4))).jaxpr
    made = schedule(jaxpr, (False,) * 4, LIKE_A_GPU, lambda eqn: True)
    assert [len(s.members) for s in made.steps if isinstance(s, GroupStep)] == groups


def test_what_is_computed_again_at_the_cost_of_memory_is_not(monkeypatch):
    f = lambda x: bnp.tanh(bnp.sin(x @ x.T)).sum()
    more = lambda x: f(bnp.concatenate([x @ x.T @ x] * 50) @ x.T)
    larger, smaller = (bf.jit(g).trace(X).jaxpr for g in (more, f))
    for given, recomputed in ((smaller, larger), (larger, smaller)):
        monkeypatch.setattr("blufunc.kernels.pipeline._recomputing", lambda *_, chosen=recomputed: chosen)
        made = schedule(given, (False,), LIKE_A_GPU, lambda eqn: True)
        assert [v.aval for v in made.jaxpr.outvars] == [v.aval for v in smaller.outvars]
        assert len(made.jaxpr.eqns) == len(smaller.eqns)
