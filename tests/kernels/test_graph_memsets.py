"""Nodes that fill workspaces of products with zeros: what they wait for, and what still waits for them."""

import contextlib
import gc
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blufunc.config import config
from blufunc.core import dtypes
from blufunc.kernels import cublaslt, cuda_graph, cuda_memory, cuda_runtime, graph_memsets
from blufunc.kernels.gemm_layout import Gemm, Layout


class Streams:
    """What a capture makes of work on streams: each node waits for the last of its stream, and for what was asked."""

    def __init__(self):
        self.edges, self.last, self.count, self.waits = [], {}, 0, {}
        self.memsets, self.users, self.turns = {}, {}, {}

    def node(self, stream):
        self.count += 1
        before = {self.last.get(stream), *self.waits.pop(stream, ())} - {None}
        self.edges += [(b, self.count) for b in sorted(before)]
        self.last[stream] = self.count
        return self.count

    def product(self, stream, memset, reduces):
        turn = self.turns[stream] = not self.turns.get(stream, False)
        earlier = list(self.users.get((stream, turn), ()))
        made = [self.node(stream) for _ in range(1 + memset + reduces)]
        if memset:
            self.memsets[made[0]] = earlier, made[1]
        self.users.setdefault((stream, turn), []).extend(made)

    def wait(self, stream, other):
        if other in self.last:
            self.waits.setdefault(stream, set()).add(self.last[other])


def reach(edges, count):
    """Which nodes come before which."""
    found = np.zeros((count + 1, count + 1), bool)
    for a, b in edges:
        found[a, b] = True
    for n in range(1, count + 1):
        found |= np.outer(found[:, n], found[n])
    return found


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("kernel"), st.integers(0, 2)),
        st.tuples(st.just("product"), st.integers(0, 2), st.booleans(), st.integers(0, 1)),
        st.tuples(st.just("wait"), st.integers(0, 2), st.integers(0, 2)),
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(STEPS)
def test_order_is_kept_where_it_matters(steps):
    streams = Streams()
    for what, stream, *more in steps:
        {"kernel": streams.node, "product": streams.product, "wait": streams.wait}[what](stream, *more)
    changes = graph_memsets.early(streams.edges, streams.memsets)
    after = [*(set(streams.edges) - set(changes.removed)), *changes.added]
    assert len(set(after)) == len(after) and set(changes.removed) <= set(streams.edges)
    old, new = reach(streams.edges, streams.count), reach(after, streams.count)
    assert not new.diagonal().any()
    assert not (new & ~old).any()
    others = [n for n in range(1, streams.count + 1) if n not in streams.memsets]
    np.testing.assert_array_equal(new[np.ix_(others, others)], old[np.ix_(others, others)])
    for memset, (earlier, user) in streams.memsets.items():
        assert new[memset, user] and all(new[n, memset] for n in earlier)


def test_a_memset_no_longer_stands_between_kernels():
    streams = Streams()
    for _ in range(3):
        streams.product(0, True, 0)
    # memset 1, kernel 2, memset 3, kernel 4, memset 5, kernel 6
    changes = graph_memsets.early(streams.edges, streams.memsets)
    assert changes.removed == [(2, 3), (4, 5)]
    assert changes.added == [(1, 3), (2, 4), (2, 5), (4, 6)]


def test_products_of_a_stream_have_two_workspaces_in_turns(monkeypatch):
    made = []

    def allocate(*_):
        made.append(types.SimpleNamespace(ptr=len(made) << 30))
        return made[-1]

    monkeypatch.setattr(cublaslt, "_workspaces", {})
    monkeypatch.setattr(cublaslt, "_turns", {})
    monkeypatch.setattr(cuda_runtime, "lane", lambda device, stream: stream)
    monkeypatch.setattr(cuda_memory, "allocate", allocate)
    found = [cublaslt.workspace(0, stream) for stream in (7, 7, 8, 7, 8, 7, 7)]
    assert found[0] == found[3] == found[6] != found[1] == found[5]
    assert len(made) == 4 and {found[2], found[4]}.isdisjoint(found[:2])
    assert len(cublaslt.workspaces(0)) == 4 and not cublaslt.workspaces(1)
    # captures of two threads, whose streams stand for one: neither takes a turn of the other
    monkeypatch.setattr(cuda_runtime, "lane", lambda device, stream: 7)
    taken = [(stream, cublaslt.workspace(0, stream)) for stream in (20, 30, 20, 30, 30, 20)]
    for stream in (20, 30):
        one, other, third = (place for s, place in taken if s == stream)
        assert one == third != other
    assert len(made) == 4


@pytest.mark.parametrize("fails", [False, True])
def test_a_graph_destroys_what_it_made_itself(fails, monkeypatch):
    """And nothing else: what was captured is CuPy's."""
    destroyed = []

    def instantiate(graph):
        if fails:
            raise RuntimeError("out of memory")
        return 5

    runtime = types.SimpleNamespace(
        graphInstantiate=instantiate, graphUpload=lambda *_: None, graphExecDestroy=destroyed.append
    )
    cuda = types.ModuleType("cupy.cuda")
    cuda.runtime = runtime
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(cuda_runtime, "compute_stream", lambda _: types.SimpleNamespace(ptr=0))
    monkeypatch.setattr(graph_memsets, "begin_early", lambda graph, workspaces: 1)
    captured = types.SimpleNamespace(graph=1, graphExec=2)
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        cuda_graph.Graph(captured, 0, (), [range(8)])
    gc.collect()
    assert destroyed == ([] if fails else [5])


# -- on a device -----------------------------------------------------------------------------------

gpu = pytest.mark.gpu
on_device = pytest.mark.skipif(cuda_runtime.available() is not None, reason=str(cuda_runtime.available()))


@gpu
@on_device
def test_graphs_of_products_compute_the_same(monkeypatch):
    """A chain of products: of few rows and many terms, which are split, and of many rows."""
    rng = np.random.default_rng(0)
    to_device = lambda *s: cuda_memory.to_device(rng.standard_normal(s, np.float32).astype(dtypes.bfloat16))
    shapes = [(256, 512, 8192), (4096, 1024, 768), (8192, 768, 3072)]
    work = []
    for m, n, k in shapes:
        gemm = Gemm(Layout(m, n, k, False, False, k, n, n), *[np.dtype(dtypes.bfloat16)] * 3)
        a, b, d = to_device(m, k), to_device(k, n), to_device(m, n)
        work.append((cublaslt.Plan(gemm, 0, (a.ptr, b.ptr, d.ptr)), a, b, d))

    def run(streams):
        for _ in range(4):
            for plan, a, b, d in work:
                plan.run(a.ptr, b.ptr, 0, d.ptr, 0, 0, beta=0, stream=streams[0].ptr)

    results = []
    for early in (False, True):
        monkeypatch.setattr(config, "early_memsets", early)
        run([cuda_runtime.compute_stream()])
        graph = cuda_graph.capture(run, keep=work)
        for _ in range(3):
            graph.launch()
        results.append([cuda_memory.to_host(d).view(np.uint16) for *_, d in work])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
