"""Stream assignment: conflicting steps are ordered, independent ones overlap."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.programs.simplify import simplify
from blufunc.core.programs.stage import stage
from blufunc.kernels.backends.cuda import streams as cuda_streams
from blufunc.kernels.backends.cuda.device_model import H200, MATMUL, MATMUL_TF32
from blufunc.kernels.backends.cuda.streams import Access, Task, dependencies, turns
from tests.emulation import fake_cuda


def conflict(a, b):
    """True if the order of two tasks matters."""
    if a.accesses is None or b.accesses is None:
        return True
    return any(
        x.root == y.root and x.start < y.end and y.start < x.end and (x.written or y.written)
        for x in a.accesses
        for y in b.accesses
    )


def before(n, direct):
    """For each step, all steps that precede it, given its direct predecessors."""
    done = []
    for m in range(n):
        done.append(set().union(*({d} | done[d] for d in direct[m])))
    return done


ACCESS = st.builds(
    lambda root, start, size, written: Access(root, start, start + size, written),
    st.integers(-1, 1),
    st.integers(0, 6),
    st.integers(1, 4),
    st.booleans(),
)
TASK = st.builds(
    Task,
    st.one_of(st.none(), st.tuples(), st.lists(ACCESS, max_size=3).map(tuple)),
    st.sampled_from([2e-6, 9e-6]),
    st.booleans(),
)


@pytest.mark.slow
@given(st.lists(st.tuples(TASK, st.none() | st.integers(0, 3)), max_size=14), st.integers(1, 4))
@settings(max_examples=400)
def test_what_conflicts_keeps_its_order(drawn, streams):
    """Some tasks overlap with an earlier collective."""
    tasks, exchanges = [], []
    for task, which in drawn:
        if task.collective:
            exchanges.append(len(tasks))
        elif which is not None and exchanges:
            task = replace(task, overlapped=exchanges[which % len(exchanges)])
        tasks.append(task)
    n = len(tasks)
    needed = dependencies(tasks)
    implied = before(n, needed)
    order = turns(tasks, streams)
    on_stream = [
        [max((m for m in range(k) if order[m].stream == order[k].stream), default=-1)] for k in range(n)
    ]
    follows = [[*order[k].waits, *(m for m in on_stream[k] if m >= 0)] for k in range(n)]
    done = before(n, follows)
    for k in range(n):
        for m in range(k):
            if conflict(tasks[m], tasks[k]):
                assert m in implied[k], "a dependency is missing"
                assert m in done[k], "a wait is missing"
        if tasks[k].overlapped is not None:
            assert done[k].issuperset(implied[tasks[k].overlapped]), "it begins before its exchange may"
        assert all(order[m].stream != order[k].stream for m in order[k].waits)
        alone = tasks[k].collective and tasks[k].accesses is not None
        assert (order[k].stream == streams) == alone
        assert not tasks[k].collective or done[k] >= {m for m in range(k) if tasks[m].collective}, (
            "out of order"
        )
    if streams == 1 and not any(t.collective for t in tasks):
        assert all(turn == (0, ()) for turn in ((t.stream, t.waits) for t in order))


def task(*accesses, seconds=1e-5):
    return Task(tuple(Access(0, at, at + 1, written) for at, written in accesses), seconds)


def test_independent_steps_fork_and_join():
    tasks = [
        task((0, True)),
        task((0, False), (1, True)),
        task((0, False), (2, True)),
        task((1, False), (2, False), (3, True)),
    ]
    order = turns(tasks, 2)
    assert [t.stream for t in order] == [0, 0, 1, 0]
    assert [t.waits for t in order] == [(), (), (0,), (2,)]


def test_a_chain_stays_on_one_stream():
    order = turns([task((n, False), (n + 1, True)) for n in range(6)], 4)
    assert {t.stream for t in order} == {0} and not any(t.waits for t in order)


def test_short_steps_do_not_get_a_stream():
    order = turns([task((n, True), seconds=1e-7) for n in range(6)], 2)
    assert {t.stream for t in order} == {0}


@pytest.mark.parametrize("overlapped, waits", [(None, ()), (2, (1,))])
def test_an_overlapped_step_waits_for_what_its_collective_waits_for(overlapped, waits):
    """But not for the collective itself."""
    exchange = replace(task((0, False), (1, False), (2, True)), collective=True)
    order = turns(
        [task((0, True)), task((1, True)), exchange, replace(task((3, True)), overlapped=overlapped)],
        2,
    )
    assert [t.stream for t in order] == [0, 1, 2, 0]
    assert [t.waits for t in order] == [(), (), (0, 1), waits]


@pytest.mark.parametrize(
    "dtype, precision, rate",
    [
        ("bfloat16", None, MATMUL),
        ("float32", None, H200.products),
        ("float32", "tf32", MATMUL_TF32),
        ("float64", "tf32", H200.products),
    ],
)
def test_how_long_products_take(dtype, precision, rate):
    x = ShapedArray((64, 32), np.dtype(dtype))
    dot = lambda x, y: lax.dot(x, y, precision=precision)
    jaxpr = simplify(stage(lambda *args: [dot(*args)], [x, ShapedArray((32, 16), x.dtype)], "f"))
    (eqn,) = (e for e in jaxpr.eqns if e.prim.name == "dot_general")
    assert cuda_streams.product_seconds(eqn) == pytest.approx(2 * 64 * 32 * 16 / rate)


def test_a_step_of_which_nothing_is_known_runs_by_itself():
    tasks = [task((0, True)), task((1, True)), Task(None, 1e-5), task((2, True)), task((3, True))]
    assert dependencies(tasks) == [(), (), (0, 1), (2,), (2,)]


def loss(w, x):
    h = bnp.tanh(x @ w["a"])
    return ((h @ w["b"] - x) ** 2).mean() + (w["a"] ** 2).sum()


def update(w, x):
    value, grads = bf.value_and_grad(loss)(w, x)
    return bf.tree.map(lambda w, g: w - 0.1 * g, w, grads), value


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_steps_of_training_on_streams_of_a_graph(monkeypatch, streams):
    rng = np.random.default_rng(0)
    w = {n: rng.standard_normal((64, 64), np.float32) / 8 for n in "ab"}
    x = rng.standard_normal((32, 64), np.float32)
    want, values = w, []
    for _ in range(6):
        want, value = bf.jit(update)(want, x)
        values.append(float(value))
    fake = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(config, "cuda_streams", streams)
    device = bf.devices("cuda")[0]
    state, there = bf.device_put((w, x), device)
    step, got = bf.jit(update, donate_argnums=0), []
    for _ in range(6):
        state, value = step(state, there)
        got.append(float(value))
    assert fake.replays >= 3
    np.testing.assert_allclose(got, values, rtol=1e-5)
    for n in want:
        np.testing.assert_allclose(np.asarray(state[n]), np.asarray(want[n]), rtol=1e-5, atol=1e-6)
    (entry,) = step._entries.values()
    (program,) = entry.programs.values()
    works = program._free[0][0].works
    order = turns(program._free[0][0]._tasks(), streams)
    assert len({t.stream for t in order}) == min(streams, 2), [w.name for w in works]
