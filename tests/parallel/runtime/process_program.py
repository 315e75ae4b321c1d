"""The program of the ranks of test_processes.py.

Usage: ``python -m blufunc.parallel.launch -n 4 process_program.py SCENARIO``.
"""

import contextlib
import os
import pickle
import signal
import sys
import time

import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import NamedSharding, P, lax, multihost, random
from blufunc.parallel.runtime import mpi
from examples.gpt import model, train

NANO = model.Config(layers=2, heads=2, width=16, context=16, vocab=64)
SPECS = [P(), P("x"), P(None, "y"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]


def values(*shape, dtype="float32"):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(bnp.dtype(dtype))


@contextlib.contextmanager
def raises(error, *texts):
    try:
        yield
    except error as e:
        said = str(e)
    else:
        raise AssertionError(f"no {error.__name__}")
    missing = [t for t in texts if t not in said]
    assert not missing, f"{missing} not in: {said}"


def arrays():
    """Devices, and arrays that lie on those of all processes."""
    rank, n = bf.process_index(), bf.process_count()
    assert bf.distributed.is_initialized() and n == 4
    assert [d.process_index for d in bf.devices()] == [d.id for d in bf.devices()] == [0, 1, 2, 3]
    assert bf.device_count() == 4 and bf.local_device_count() == 1
    assert bf.local_devices() == [bf.devices()[rank]] == [bnp.ones(2).device]
    assert bf.local_devices(process_index=2) == [bf.devices()[2]]
    other = bf.devices()[(rank + 1) % n]
    with raises(bf.errors.UnsupportedError, f"process {other.process_index} was used in process {rank}"):
        bf.device_put(np.ones(3), other)

    mesh = bf.make_mesh((2, 2), ("x", "y"))
    assert mesh.local_ranks == (rank,) and str(mesh) == "x=2, y=2"
    line = bf.make_mesh((4,), "z", devices=bf.devices()[::-1])  # rank r of it is process 3 - r
    for shape in [(8, 6), (5, 7), (1, 3)]:
        x = values(*shape)
        for spec in SPECS:
            sharding = NamedSharding(mesh, spec)
            a = bf.device_put(x, sharding)
            assert a.sharding == sharding and a.shape == shape
            assert not a.is_fully_addressable and a.is_fully_replicated == (spec == P())
            (shard,) = a.addressable_shards
            assert shard.device == bf.local_devices()[0]
            assert shard.index == sharding.devices_indices_map(shape)[shard.device]
            assert sharding.addressable_devices_indices_map(shape) == {shard.device: shard.index}
            assert shard.replica_id == sharding.replica_ids()[rank]
            np.testing.assert_array_equal(np.asarray(shard.data), x[shard.index])
            np.testing.assert_array_equal(np.asarray(a.addressable_data(0)), x[shard.index])
            np.testing.assert_array_equal(multihost.process_allgather(a), x)
            others = [*(NamedSharding(mesh, s) for s in SPECS), NamedSharding(line, P("z"))]
            for to in others if shape == (5, 7) else others[-2:]:
                (moved,) = bf.device_put(a, to).addressable_shards
                np.testing.assert_array_equal(np.asarray(moved.data), x[moved.index])
                assert moved.index == to.devices_indices_map(shape)[moved.device]

    x = values(8, 6)
    a = bf.device_put(x, NamedSharding(mesh, P("x")))
    assert str(a) == "Array(shape=(8, 6), dtype=float32, on mesh(x=2, y=2) of 4 processes)" == repr(a)
    for read in (np.asarray, pickle.dumps, lambda a: bf.device_put(a, bf.local_devices()[0]), bool):
        with raises(bf.errors.BlufuncError, "process_program.py"):
            read(a)
    with raises(bf.errors.ShardingError, "bf.multihost.process_allgather(x)", "x.addressable_shards"):
        np.asarray(a)
    whole = bf.device_put(a, NamedSharding(mesh, P()))
    np.testing.assert_array_equal(np.asarray(whole), x)
    assert whole.tolist() == x.tolist() and str(whole) == str(bnp.asarray(x))
    assert bf.device_put(whole, bf.local_devices()[0]).is_fully_addressable
    assert float(bf.device_put(2.5, NamedSharding(mesh, P()))) == 2.5

    asked = []
    b = bf.make_array_from_callback((8, 6), a.sharding, lambda i: (asked.append(i), x[i])[1])
    assert asked == [a.addressable_shards[0].index]
    joined = bf.make_array_from_single_device_arrays((8, 6), a.sharding, [b.addressable_shards[0].data])
    np.testing.assert_array_equal(multihost.process_allgather(joined), x)
    for spec, shape in [(P("x"), (8, 6)), (P("x", "y"), (8, 12)), (P(), (4, 6)), (P(("x", "y")), (16, 6))]:
        sharding = NamedSharding(mesh, spec)
        own = np.full((4, 6), sharding.position(rank, 2)[0])
        made = bf.make_array_from_process_local_data(sharding, own)
        assert made.shape == shape and made.dtype == "int32"
        np.testing.assert_array_equal(np.asarray(made.addressable_shards[0].data), own)
    uneven = NamedSharding(mesh, P("x"))
    part = x[uneven.indices((5, 6))[rank][0]]
    made = bf.make_array_from_process_local_data(uneven, part, (5, 6))
    np.testing.assert_array_equal(multihost.process_allgather(made), x[:5])
    with raises(bf.errors.ShapeError, "local_data is of shape (3, 6)", "this process holds (4, 6)"):
        bf.make_array_from_process_local_data(uneven, x[:3], (8, 6))

    if rank < 2:  # some of the processes
        pair = bf.make_mesh((2,), "p")
        c = bf.device_put(x, NamedSharding(pair, P("p")))
        assert float(c.sum()) == float(bnp.asarray(x)[:4].sum() + bnp.asarray(x)[4:].sum())
    else:
        with raises(bf.errors.ShardingError, f"mesh(p=2) has no device of process {rank}"):
            bf.device_put(x, NamedSharding(bf.make_mesh((2,), "p"), P("p")))
    print("done")


def programs():
    """Operations, transforms, control flow on a mesh of processes, against one device."""
    rank = bf.process_index()
    mesh = bf.make_mesh((2, 2), ("x", "y"))
    x, w = values(8, 6), values(6, 4, 1)[..., 0]
    a, b = bf.device_put(x, NamedSharding(mesh, P("x"))), bf.device_put(w, NamedSharding(mesh, P(None, "y")))

    def close(got, want):
        got = multihost.process_allgather(got)
        for g, v in zip(bf.tree.leaves(got), bf.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, np.asarray(v), rtol=1e-5, atol=1e-6)

    def loss(w, x):
        return (bnp.tanh(x @ w) ** 2).mean()

    def rows(x):
        return bf.vmap(lambda row: lax.scan(lambda c, v: (c + v, c * v), 0.0, row))(x)

    def branch(x):
        return lax.cond(x.sum() > 0, lambda x: x.sum(0), lambda x: x.max(0), x)

    close(a * 2 + np.ones((8, 6), "float32"), x * 2 + 1)
    close(bnp.sort(a, axis=0), np.sort(x, 0))
    assert float(a[3, 2]) == x[3, 2]
    close(bf.jit(bf.value_and_grad(loss))(b, a), bf.value_and_grad(loss)(w, x))
    close(bf.value_and_grad(loss)(b, a), bf.value_and_grad(loss)(w, x))
    close(bf.jit(rows)(a), rows(x))
    for sign in (1, -1):
        close(bf.jit(branch)(a * sign), branch(x * sign))
    close(bf.jit(lambda: a + 1)(), x + 1)
    key = random.key(1)
    close(bf.jit(lambda a: a + random.normal(key, a.shape))(a), x + random.normal(key, x.shape))

    def ranks(x):
        return lax.ppermute(lax.psum(x, "x"), "y", [(0, 1), (1, 0)]) + lax.axis_index("y")

    mapped = bf.shard_map(ranks, mesh=mesh, in_specs=P("x", "y"), out_specs=P(None, "y"))
    total = x[:4] + x[4:]
    for f in (mapped, bf.jit(mapped)):
        close(f(a), np.concatenate([total[:, 3:], total[:, :3] + 1], 1))
    with raises(bf.errors.ShardingError, "got no array on mesh(x=2, y=2)"):
        mapped(x)

    step = bf.jit(lambda w, x: w - 0.1 * bf.grad(loss)(w, x), donate_argnums=0)
    want = bnp.asarray(w)
    for _ in range(3):
        before, b = b, step(b, a)
        want = step(want, bnp.asarray(x))
        assert before.is_deleted()
    close(b, want)

    lowered = bf.jit(lambda a: (a * 2).sum(0)).lower(a)
    assert "mesh_sums" in str(lowered.fusion)
    compiled = lowered.compile()
    close(compiled(a), (x * 2).sum(0))
    assert any("mesh_sums" in s.name for s in compiled.timings(a, repeats=2))

    bf.config.debug_nans = True
    close(bnp.log(a * a + 1), np.log(x * x + 1))
    with raises(bf.errors.NanError, "log"):
        bf.jit(lambda a: bnp.log(a - a.max()) + 1)(a)  # the NaNs may be those of other processes
    bf.config.debug_nans = False

    calls = []
    drawn = lambda: (
        calls.append(rank) or np.float32(rank + 5)
    )  # the number of the first process is that of all
    close(bf.jit(lambda a: a + bf.io_callback(drawn, bf.ShapeDtypeStruct((), "float32")))(a), x + 5)
    assert calls == [0] * (rank == 0)
    total = a.sum()
    if rank == 0:  # a report of local shards is no collective
        bf.debug.callback(calls.append, total)
        assert float(calls[-1]) == float(total)
    print("done")


def helpers():
    """The functions of ``bf.multihost``."""
    rank, n = bf.process_index(), bf.process_count()
    tree = {"a": np.full((2, 3), rank), "b": [float(rank)], "c": bnp.asarray([rank], "bfloat16")}
    got = multihost.process_allgather(tree)
    assert got["a"].shape == (n, 2, 3) and got["a"][:, 0, 0].tolist() == [*range(n)]
    assert got["b"][0].tolist() == [*range(n)] and got["c"].dtype == "bfloat16"
    tiled = multihost.process_allgather(tree, tiled=True)
    assert tiled["a"].shape == (2 * n, 3) and tiled["a"][::2, 0].tolist() == [*range(n)]
    assert tiled["b"][0].shape == (n,) and tiled["c"].tolist() == [*range(n)]
    for source in (0, 2):
        one = multihost.broadcast_one_to_all(tree, None if source == 0 else rank == source)
        assert (one["a"] == source).all() and one["b"][0] == source and one["c"].tolist() == [source]
    with raises(bf.errors.CollectiveError, "2 sources: the processes [0, 1]"):
        multihost.broadcast_one_to_all(tree, rank < 2)
    multihost.sync_global_devices("here")
    multihost.assert_equal({"a": 1, "b": np.ones(3)})
    with raises(
        bf.errors.CollectiveError,
        "the settings",
        "process 0: in_tree['a']: i32[] 0; process 1: in_tree['a']: i32[] 1",
    ):
        multihost.assert_equal({"a": rank}, "the settings")
    with raises(bf.errors.UnsupportedError, "inside a traced function"):
        bf.jit(multihost.process_allgather)(np.ones(2))
    with raises(bf.errors.CollectiveError, "call different collectives"):
        multihost.process_allgather(np.ones(rank + 1))
    print("done")


def disagree():
    """Processes that put other values, shapes or programs where all must be the same."""
    rank, n = bf.process_index(), bf.process_count()
    mesh = bf.make_mesh((n,), "data")
    sharding = NamedSharding(mesh, P("data"))
    differ = "process 0: x['w']: i32[4] [0, 0, 0, 0]; process 1: x['w']: i32[4] [1, 1, 1, 1]"
    with raises(bf.errors.CollectiveError, "device_put got different values in process 1", differ):
        bf.device_put({"b": np.ones(2), "w": np.full(4, rank)}, sharding)
    a = bf.device_put(np.ones((8, 2)), sharding)

    def step(tokens):
        twice = tokens * 2
        return twice.sum() if rank == 0 else twice.max()

    with raises(
        bf.errors.CollectiveError,
        "run different programs (step): their collective 1 is not the same",
        "rank 0: psum_invariant over data of f32[]",
        "rank 1: pmax_invariant over data of f32[]",
        "process_program.py",
    ):
        bf.jit(step)(a)

    def between(tokens):
        first = tokens.sum(0)
        return first, bnp.sin(first) if rank else bnp.ones(2), (tokens * 2).sum(0)

    with raises(
        bf.errors.CollectiveError,
        "run different programs (between): their collective 1 is not the same",
        "rank 0: mesh_sums over data of f32[2], f32[2]",
        "rank 1: psum_invariant over data of f32[2]",
    ):
        bf.jit(between)(a)

    uneven = bf.make_array_from_process_local_data(sharding, np.ones((3 + rank, 2)))
    with raises(
        bf.errors.CollectiveError,
        "run different programs (mean): their parameter 1 is not the same",
        "rank 0: the parameter tokens: f32[3,2]",
        "rank 1: the parameter tokens: f32[4,2]",
    ):
        bf.jit(mean)(uneven)
    differ = "process 0: weights: f32[2] [0.0, 0.0]; process 1: weights: f32[2] [1.0, 1.0]"
    with raises(
        bf.errors.CollectiveError, "weighted got different values in process 1", differ, "local_data"
    ):
        bf.jit(weighted)(a, np.full(2, rank, "float32"))
    assert float(bf.jit(mean)(a)) == 1  # all are there still
    print("done")


def mean(tokens):
    return tokens.mean()


def weighted(tokens, weights):
    return (tokens * weights).sum()


def training_step():
    """The step of the GPT example, and what it acts on, on a mesh of all processes."""
    mesh = bf.make_mesh((bf.process_count(),), "data")
    optimizer = train.make_optimizer(20, 1e-2)
    params = model.init(random.key(0), NANO)
    whole = bf.device_put((params, optimizer.init(params)), NamedSharding(mesh, P()))
    tokens = np.random.default_rng(0).integers(64, size=(8, 17)).astype(np.int32)
    return train.make_step(NANO, optimizer), whole, bf.device_put(tokens, NamedSharding(mesh, P("data")))


def kill():
    """Three steps; in the fourth, rank 1 is killed between two of its collectives."""
    step, (params, state), tokens = training_step()
    exchange, counts = mpi.MpiEngine.collective, []

    def counted(self, *args, **options):
        counts.append(1)
        if bf.process_index() == 1 and steps == 3 and len(counts) == 3:
            print("at", time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(self, *args, **options)

    mpi.MpiEngine.collective = counted
    for steps in range(6):
        counts.clear()
        params, state, loss = step(params, state, tokens)
        print(f"step {steps}: {float(loss):.3f}, {len(counts)} collectives", flush=True)


def alone():
    """One rank computes what the others do not."""
    mesh = bf.make_mesh((bf.process_count(),), "data")
    a = bf.device_put(np.ones(4), NamedSharding(mesh, P("data")))
    if bf.process_index() == 0:
        float((a * 2).sum())


if __name__ == "__main__":
    bf.distributed.initialize()
    globals()[sys.argv[1]]()
