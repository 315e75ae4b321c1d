"""Lowered collectives as steps on a device, against simulated ranks.

They run on their own stream.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.programs.simplify import simplify
from blufunc.core.programs.stage import stage
from blufunc.kernels.backends.cuda import overlap, replay
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.backends.cuda import streams as cuda_streams
from blufunc.kernels.backends.cuda.library import cublaslt
from blufunc.kernels.backends.cuda.streams import Access, Task, turns
from blufunc.kernels.rewrites.split_float32 import with_split_products
from blufunc.kernels.schedule import OpaqueStep
from blufunc.parallel.collectives import primitives as mc
from blufunc.parallel.collectives.lowering import lower_collectives
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.runtime import engine as engines
from blufunc.parallel.runtime.simulated import run_ranks
from tests.emulation import fake_cuda
from tests.parallel import divided_mlp

ALONE = ("slice", "pad", "keep first", "cast", "index", "a slice in a loop")
"""The cases in which no rank needs another."""

MESH = AbstractMesh((2, 2), ("x", "y"))
BOTH = {"axes": ("x", "y"), "sizes": (2, 2)}
ONE = {"axes": ("y",), "sizes": (2,)}

KINDS = ("all_reduce", "all_reduce", "reduce_scatter")
sums = lambda *xs: mc.mesh_sums_p.bind(*xs, kinds=KINDS, lines=mc.Lines((None,) * 3), **BOTH)

CASES = {
    "all_reduce": lambda x: mc.psum_invariant_p.bind(x, src="V", dst="I", **BOTH),
    "maximum": lambda x: mc.pmax_invariant_p.bind(x, src="V", dst="I", **ONE),
    "all_gather 0": lambda x: mc.mesh_all_gather_p.bind(x, src="V", dst="I", dim=0, **BOTH),
    "all_gather 1": lambda x: mc.mesh_all_gather_p.bind(x, src="V", dst="R", dim=1, **ONE),
    "reduce_scatter 0": lambda x: mc.mesh_psum_scatter_p.bind(x, src="V", dst="V", dim=0, **BOTH),
    "reduce_scatter 1": lambda x: mc.mesh_psum_scatter_p.bind(x, src="U", dst="V", dim=1, **ONE),
    "all_to_all 0 0": lambda x: mc.mesh_all_to_all_p.bind(x, src="V", dst="V", split_dim=0, concat_dim=0, **BOTH),
    "all_to_all 1 0": lambda x: mc.mesh_all_to_all_p.bind(x, src="V", dst="V", split_dim=1, concat_dim=0, **ONE),
    "all_to_all 0 1": lambda x: mc.mesh_all_to_all_p.bind(x, src="V", dst="V", split_dim=0, concat_dim=1, **BOTH),
    "a bucket": lambda x: sum(y.sum() * n for n, y in enumerate(sums(x, x.astype("int32"), x * 2), 1)),
    "permute": lambda x: mc.mesh_ppermute_p.bind(x, src="V", dst="V", perm=((0, 1), (1, 2), (3, 0)), **BOTH),
    "slice": lambda x: mc.shard_slice_p.bind(x, src="I", dst="V", dim=1, **BOTH),
    "pad": lambda x: mc.shard_pad_p.bind(x, src="V", dst="U", dim=1, **BOTH),
    "keep first": lambda x: mc.keep_first_p.bind(x, src="I", dst="U", **BOTH),
    "cast": lambda x: mc.pcast_p.bind(x, src="V", dst="U", **BOTH) * 2,
    "index": lambda x: x * (mc.mesh_axis_index_p.bind(**BOTH) + 1).astype("float32"),
    "a loop": lambda x: bf.lax.scan(
        lambda c, _: (mc.psum_invariant_p.bind(c, src="V", dst="I", **ONE) * 0.25, None), x, None, length=3
    )[0],
    "a slice in a loop": lambda x: bf.lax.scan(
        lambda c, _: (c + mc.shard_slice_p.bind(x, src="I", dst="V", dim=1, **ONE).sum(), None), x, None, length=3
    )[0],
}  # fmt: skip


def local(f, x):
    return stage(lambda *args: [f(*args)], [from_numpy(x).aval], "f")


@pytest.mark.parametrize("name", CASES)
def test_what_is_spelled_out_is_the_same(name):
    parts = [np.random.default_rng(r).standard_normal((8, 12), np.float32) for r in range(4)]
    jaxpr = local(CASES[name], parts[0])
    plain = simplify(lower_collectives(jaxpr))
    assert not any(s in str(plain) for s in ("shard_slice", "shard_pad", "keep_first", "dim=1"))
    want, got = (
        run_ranks(MESH, lambda r, j=j: np.asarray(eval_jaxpr(j, [from_numpy(parts[r])])[0]))
        for j in (jaxpr, plain)
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("precision", ["F16_F16_F32_SCALED", "F16_F16_F32_X3"])
def test_scales_of_a_divided_sum_are_each_rank_s_own(precision):
    """Rows of a gradient's sum differ in size by rank: all-reduces have no scale."""
    parts = [np.random.default_rng(r).standard_normal((8, 12), np.float32) * 8.0**r for r in range(4)]
    product = lambda x: bnp.einsum("km,kn->mn", x, bnp.sin(x), precision=precision)
    jaxpr = local(lambda x: mc.psum_invariant_p.bind(product(x), src="V", dst="I", **BOTH), parts[0])
    made = with_split_products(simplify(jaxpr), {}, lambda *_: True)
    assert any(v.aval.dtype == np.float16 for e in made.eqns for v in e.outvars)
    found = run_ranks(MESH, lambda r: np.asarray(eval_jaxpr(made, [from_numpy(parts[r])])[0]))
    want = sum(x.T.astype(np.float64) @ np.sin(x) for x in parts)
    bound = sum(np.abs(x.T).astype(np.float64) @ np.abs(np.sin(x)) for x in parts)
    for got in found:
        assert (np.abs(got - want) <= 2.0**-10 * bound).all()


class SameValues(engines.Engine):
    """The engine of a rank if all have the same values, as NCCL on a stream."""

    def __init__(self, fake, rank):
        super().__init__(rank, MESH)
        self.fake, self.streams = fake, []

    def enqueue(self, exchanges, axes, stream):
        for exchange in exchanges:
            self.put(*vars(exchange).values(), axes, stream)

    def put(self, kind, send, receive, count, dtype, op, perm, axes, stream):
        group = engines.group_of(self.rank, MESH, axes)
        n, mine = len(group), group.index(self.rank)
        parts = n if kind in ("reduce_scatter", "all_to_all") else 1
        self.streams.append(stream.ptr)

        def run():
            given = self.fake.array(send, (parts, count), dtype)
            kinds = {"all_reduce": "all_reduce", "permute": "permute"}
            options = (
                {"op": op} if kind == "all_reduce" else {"perm": perm} if kind == "permute" else {"dim": 0}
            )
            if kind == "all_to_all":
                options = {"split_dim": 0, "concat_dim": 0}
            out = engines.reference(kinds.get(kind, kind), [given] * n, **options)[mine]
            if kind != "permute" or any(dst == mine for _, dst in perm):
                self.fake.array(receive, (out.size,), dtype)[:] = out.reshape(-1)

        self.fake.do(run, stream.ptr)


@pytest.mark.parametrize("rank, graphs", [(0, True), (3, True), (3, False)])
@pytest.mark.parametrize("name", CASES)
def test_steps_on_a_device_do_what_ranks_do(monkeypatch, name, rank, graphs):
    x = np.random.default_rng(0).standard_normal((8, 12), np.float32)
    f = lambda x: bnp.tanh(CASES[name](bnp.exp(x)))
    jaxpr = local(f, x)
    want = run_ranks(MESH, lambda r: np.asarray(eval_jaxpr(jaxpr, [from_numpy(x)])[0]))[rank]
    fake = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(config, "nccl_graphs", graphs)
    device = bf.devices("cuda")[0]
    there = bf.device_put(x, device)
    engine = SameValues(fake, rank)
    with engines.use(engine):
        program = cuda_program.CudaProgram(lower_collectives(jaxpr), (False,))
        for _ in range(4):
            (out,) = program([there.buffer])
            np.testing.assert_allclose(device.backend.to_host(out), want, rtol=1e-5, atol=1e-6)
    works = program._free[0][0].works
    assert program.captured == (graphs or name in ALONE), [w.name for w in works]
    assert program.captured or name == "a loop" or "nccl_graphs" in program.why_no_graph
    assert bool(fake.replays) == (program.captured and len(works) >= replay.FEWEST)


def of_ranks(jaxpr, args):
    """The results of the first of the simulated ranks."""
    run = lambda rank: [np.asarray(o) for o in eval_jaxpr(jaxpr, [from_numpy(a) for a in args])]
    return run_ranks(MESH, run)[0]


@pytest.mark.parametrize("per_bucket", [1, 2, 4])
def test_the_gradients_of_layers_are_summed_beside_the_layers_before(monkeypatch, per_bucket):
    monkeypatch.setattr(config, "bucket_bytes", per_bucket * 64 * 64 * 4)

    def f(w, x):
        for a in w:
            x = bnp.tanh(x @ a)
        return (x * x).mean()

    def g(*args):
        *w, x = args
        grads = bf.grad(f)(w, x)
        return [mc.psum_invariant_p.bind(d, src="V", dst="I", **BOTH) for d in grads]

    rng = np.random.default_rng(0)
    args = [rng.standard_normal((64, 64), np.float32) / 8 for _ in range(5)]
    jaxpr = stage(g, [from_numpy(a).aval for a in args], "g")
    want = of_ranks(jaxpr, args)
    fake = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(config, "nccl_graphs", True)
    device = bf.devices("cuda")[0]
    there = [bf.device_put(a, device) for a in args]
    engine = SameValues(fake, 0)
    with engines.use(engine):
        program = cuda_program.CudaProgram(lower_collectives(jaxpr), (False,) * 5)
        for _ in range(4):
            outs = program([a.buffer for a in there])
            for out, w in zip(outs, want, strict=True):
                np.testing.assert_allclose(device.backend.to_host(out), w, rtol=1e-4, atol=1e-7)
    assert len(set(engine.streams)) == 2, "when it is captured, exchanges have a stream of their own"
    executor = program._free[0][0]
    order = turns(executor._tasks(), config.cuda_streams)
    on = [t.stream == config.cuda_streams for t in order]
    assert on == [w.exchanges for w in executor.works] and sum(on) == 4 // per_bucket
    if per_bucket == 4:  # no work follows the one sum
        return
    first, last = on.index(True), len(on) - 1 - on[::-1].index(False)
    assert first < last and not any(first in t.waits for t in order[first + 1 :]), "nothing waits for it"


@pytest.mark.parametrize("graphs, stream", [(True, 0), (True, 1), (False, 0)])
def test_gradients_of_divided_layers_beside_what_layers_exchange(monkeypatch, rng, graphs, stream):
    monkeypatch.setattr(overlap, "LEAST", 0)
    monkeypatch.setattr(cuda_streams, "_earliest", lambda *_: stream)
    jaxpr, args = divided_mlp.gradients(rng)
    want = of_ranks(jaxpr, args)
    fake = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(config, "nccl_graphs", graphs)
    device = bf.devices("cuda")[0]
    there = [bf.device_put(a, device) for a in args]
    put = []  # what is put on which stream: the numbers of steps, and pauses
    with engines.use(SameValues(fake, 0)):
        program = cuda_program.CudaProgram(lower_collectives(jaxpr), (False,) * len(args))
        for n in range(4):
            outs = program([a.buffer for a in there])
            for out, w in zip(outs, want, strict=True):
                np.testing.assert_allclose(device.backend.to_host(out), w, rtol=1e-4, atol=1e-6)
            if not n:
                executor = program._free[0][0]
                works = watched(executor, put)
    steps = [w.step for w in works]
    overlapped = [n for n, s in enumerate(steps) if isinstance(s, OpaqueStep) and s.overlapped is not None]
    assert len(overlapped) == 2 and fake.pauses == 1 + fake.replays * len(overlapped)  # once to be loaded
    assert bool(fake.replays) == graphs
    products = [
        n for n, s in enumerate(steps) if isinstance(s, OpaqueStep) and s.eqn.prim.name == "dot_general"
    ]
    for n in products:
        product = works[n].run.__self__
        assert {c.gemm.sms for c in product.calls} == {0}
        fewer = 132 - 24 if graphs and n in overlapped else 0
        assert {c.gemm.sms for c in product.overlapped_calls} == {fewer}
        assert {gemm.sms for gemm in product._plans} == {0, fewer}
    tasks = executor._tasks()
    assert [n for n, t in enumerate(tasks) if t.overlapped is not None] == overlapped
    assert all(tasks[tasks[n].overlapped].collective for n in overlapped)
    if graphs:
        captured = [(what, at) for what, at, _ in put[-len(steps) - len(overlapped) :]]
        preceding = {n: (before, at) for (before, at), (n, _) in itertools.pairwise(captured)}
        on = dict(captured)
        assert {n: preceding[n] for n in overlapped} == {n: ("pause", on[n]) for n in overlapped}
        assert [what for what, _ in captured].count("pause") == len(overlapped)
        assert {n for n, _, with_exchange in put if with_exchange} == set(overlapped)
        assert fake.fewer == [(on[n], 132 - 24) for n in overlapped]  # as the graph was made, and never else
        assert not executor.beside_exchange
    else:
        assert not fake.fewer
        assert not any(what == "pause" or with_exchange for what, _, with_exchange in put)


def test_what_no_algorithm_with_fewer_multiprocessors_does_has_all(monkeypatch, rng):
    monkeypatch.setattr(overlap, "LEAST", 0)
    jaxpr, args = divided_mlp.gradients(rng)
    fake = fake_cuda.install(monkeypatch)
    made = cublaslt.Plan

    def plan(gemm, device, addresses):
        if gemm.sms:
            raise errors.UnsupportedError("there is none")
        return made(gemm, device, addresses)

    monkeypatch.setattr(cublaslt, "Plan", plan)
    monkeypatch.setattr(config, "nccl_graphs", True)
    device = bf.devices("cuda")[0]
    there = [bf.device_put(a, device) for a in args]
    with engines.use(SameValues(fake, 0)):
        program = cuda_program.CudaProgram(lower_collectives(jaxpr), (False,) * len(args))
        for _ in range(3):
            program([a.buffer for a in there])
    executor = program._free[0][0]
    assert sum(t.overlapped is not None for t in executor._tasks()) == 2, "they still run by the library"
    assert fake.replays and not fake.fewer


def watched(executor, put):
    """The steps of an executor, which from now on tells what it puts on which stream."""
    works, pause = list(executor.works), executor._pause

    def noted(number, run):
        return lambda executor: (
            put.append((number, executor.work_stream().ptr, executor.beside_exchange)),
            run(executor),
        )

    executor.works[:] = [replace(w, run=noted(n, w.run)) for n, w in enumerate(works)]
    executor._pause = lambda stream: (put.append(("pause", stream, False)), pause(stream))
    return works


F32, BF16 = np.dtype(np.float32), dtypes.bfloat16
to_all = CASES["all_reduce"]
scattered = CASES["reduce_scatter 0"]
EXCHANGED = {  # a function of a product of bfloat16: the dtype that the product writes, and whether there is a kernel
    "converted": (lambda y: to_all(y.astype(F32)), F32, False),
    "converted and moved": (lambda y: scattered(y.astype(F32).reshape(8, -1)), F32, False),
    "as it is": (to_all, BF16, False),
    "converted behind": (lambda y: to_all(y).astype(F32), BF16, True),
    "narrowed": (lambda y: to_all(y.astype(dtypes.float16)), BF16, True),
    "read besides": (lambda y: (to_all(y.astype(F32)), bnp.tanh(y)), BF16, True),
    "wanted besides": (lambda y: (z := y.astype(F32), to_all(z)), BF16, True),
    "computed with": (lambda y: to_all(y.astype(F32) * 2), BF16, True),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_a_product_for_other_ranks_is_written_as_it_is_sent(name):
    """Not in the dtype of its operands, for a kernel to convert it."""
    f, written, kernel = EXCHANGED[name]
    x, w = (from_numpy(np.ones(shape, BF16)) for shape in ((16, 32), (32, 16)))
    jaxpr = simplify(lower_collectives(stage(lambda x, w: bf.tree.leaves(f(x @ w)), [x.aval, w.aval], "f")))
    steps = cuda_program.planned(jaxpr, (False, False), "sm_90").steps
    opaque = [s.eqn for s in steps if hasattr(s, "eqn")]
    assert [e.outvars[0].aval.dtype for e in opaque if e.prim.name == "dot_general"] == [written]
    assert (len(opaque) < len(steps)) == kernel


def test_exchanges_keep_their_order():
    step = lambda at, exchanges: Task((Access(0, at, at + 1, True),), 1e-5, exchanges)
    order = turns([step(0, True), step(1, False), step(2, True), step(3, False), step(0, True)], 2)
    assert [t.stream for t in order] == [2, 0, 2, 0, 2] or [t.stream for t in order] == [2, 0, 2, 1, 2]
    assert not any(t.waits for t in order)


def test_an_engine_of_host_memory_is_refused(monkeypatch):
    x = np.ones((4, 4), np.float32)
    jaxpr = local(CASES["all_reduce"], x)
    fake_cuda.install(monkeypatch)
    device = bf.devices("cuda")[0]
    there = bf.device_put(x, device)
    program = cuda_program.CudaProgram(lower_collectives(jaxpr), (False,))
    with pytest.raises(bf.errors.CollectiveError, match="--engine nccl"):
        run_ranks(AbstractMesh((1, 1), ("x", "y")), lambda r: program([there.buffer]))
