"""The NCCL engine on a fake library that moves host memory: calls and order."""

import ctypes
import threading
import types
from dataclasses import replace

import numpy as np
import pytest

from blufunc import errors
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.library.collectives import Exchange
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.runtime import engine as engines
from blufunc.parallel.runtime.nccl import NcclEngine
from blufunc.parallel.runtime.watchdog import Recorder

SIZES = {0: np.int8, 1: np.uint8, 2: np.int32, 7: np.float32, 8: np.float64}
OPS = {0: "sum", 2: "max", 3: "min"}


class Library:
    """NCCL for threads: a collective runs once all ranks of a communicator call it."""

    def __init__(self):
        self.rooms, self.lock, self.ids = {}, threading.Lock(), 0
        self.local = threading.local()
        self.NcclCommunicator = lambda n, unique, rank: Communicator(self, self.room(unique, n), n, rank)

    def get_unique_id(self):
        with self.lock:
            self.ids += 1
            return self.ids.to_bytes(128, "little")

    def room(self, unique, n):
        with self.lock:
            return self.rooms.setdefault(unique, (threading.Barrier(n, timeout=10), {}))

    def groupStart(self):
        assert getattr(self.local, "group", None) is None, "groups are not nested here"
        self.local.group = []

    def groupEnd(self):
        group, self.local.group = self.local.group, None
        messages = [(kind, args) for _, kind, args in group if kind in ("send", "recv")]
        if messages:
            group[0][0].run_group(messages)
        for _, kind, run in group:
            if kind == "run":
                run()

    def put(self, comm, run):
        """At once, or at the end of a group."""
        group = getattr(self.local, "group", None)
        run() if group is None else group.append((comm, "run", run))


def memory(address, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class Communicator:
    def __init__(self, library, room, n, rank):
        self.library, (self.barrier, self.given), self.n, self.rank = library, room, n, rank
        self.aborted, self.error = False, None

    def meet(self, mine):
        self.given[self.rank] = mine
        self.barrier.wait()
        everybody = [self.given[r] for r in range(self.n)]
        self.barrier.wait()
        return everybody

    def reduced(self, send, count, code, op):
        parts = self.meet(memory(send, count * np.dtype(SIZES[code]).itemsize).view(SIZES[code]).copy())
        return engines.reduced(parts, OPS[op])

    def allReduce(self, send, receive, count, code, op, stream):
        def run():
            out = self.reduced(send, count, code, op)
            memory(receive, out.nbytes)[:] = out.view(np.uint8)

        self.library.put(self, run)

    def reduceScatter(self, send, receive, count, code, op, stream):
        def run():
            out = self.reduced(send, self.n * count, code, op)[self.rank * count : (self.rank + 1) * count]
            memory(receive, out.nbytes)[:] = np.ascontiguousarray(out).view(np.uint8)

        self.library.put(self, run)

    def allGather(self, send, receive, count, code, stream):
        assert code == 1
        memory(receive, self.n * count)[:] = np.concatenate(self.meet(memory(send, count).copy()))

    def send(self, *args):
        self.library.local.group.append((self, "send", args))

    def recv(self, *args):
        self.library.local.group.append((self, "recv", args))

    def run_group(self, calls):
        sent = {peer: memory(at, n).copy() for kind, (at, n, _, peer, _) in calls if kind == "send"}
        everybody = self.meet(sent)
        for kind, (at, n, _, peer, _) in calls:
            if kind == "recv":
                memory(at, n)[:] = everybody[peer][self.rank]

    def check_async_error(self):
        if self.error:
            raise RuntimeError(self.error)

    def abort(self):
        self.aborted = True


class Peers:
    """The job of one thread."""

    def __init__(self, rank, size, shared):
        self.rank, self.members, self.shared = rank, range(size), shared
        self.recorder = Recorder()
        self.watchdog = types.SimpleNamespace(checks=[], aborts=[])

    def gather(self, name, value, members):
        with self.shared["lock"]:
            barrier, values = self.shared.setdefault(
                (name, tuple(members)), (threading.Barrier(len(members), timeout=10), {})
            )
        values[self.rank] = value
        barrier.wait()
        return [values[m] for m in members]


def on_ranks(mesh, function):
    """``function(engine)`` on a thread for each rank."""
    library, shared = Library(), {"lock": threading.Lock()}
    results = [None] * mesh.size

    def run(rank):
        try:
            results[rank] = function(NcclEngine(Peers(rank, mesh.size, shared), mesh, 0, nccl=library))
        except Exception as e:
            results[rank] = e

    threads = [threading.Thread(target=run, args=(r,)) for r in range(mesh.size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    for r in results:
        if isinstance(r, Exception):
            raise r
    return results


@pytest.fixture(autouse=True)
def host_streams(monkeypatch):
    monkeypatch.setattr(driver, "recorded", lambda stream: types.SimpleNamespace(done=True))


STREAM = types.SimpleNamespace(ptr=0)
MESH = AbstractMesh((2, 2), ("x", "y"))


def enqueue(engine, kind, x, out, count, axes, **options):
    exchange = Exchange(kind, x.ctypes.data, out.ctypes.data, count, x.dtype, **options)
    engine.enqueue([exchange], axes, STREAM)
    return out


def stacked(rank, size, dtype):
    return (np.arange(size * 6) * (rank + 1) - 7).reshape(size, 6).astype(dtype)


@pytest.mark.parametrize("axes", [("x",), ("y",), ("x", "y"), ("y", "x")])
@pytest.mark.parametrize("dtype", ["float32", "int32", "complex64"])
def test_every_exchange(axes, dtype):
    size = len(engines.group_of(0, MESH, axes))
    ring = tuple((i, (i + 1) % size) for i in range(size))[: size - 1]

    def run(engine):
        x = stacked(engine.rank, size, dtype)
        return [
            enqueue(engine, "all_reduce", x, np.empty_like(x), x.size, axes),
            enqueue(engine, "all_gather", x, np.empty((size, *x.shape), x.dtype), x.size, axes),
            enqueue(engine, "reduce_scatter", x, np.empty_like(x[0]), 6, axes),
            enqueue(engine, "all_to_all", x, np.empty_like(x), 6, axes),
            enqueue(engine, "permute", x, np.zeros_like(x), x.size, axes, perm=ring),
        ]

    calls = [
        ("all_reduce", {}),
        ("all_gather", {"dim": 0}),
        ("reduce_scatter", {"dim": 0}),
        ("all_to_all", {"split_dim": 0, "concat_dim": 0}),
        ("permute", {"perm": ring}),
    ]
    for rank, got in enumerate(on_ranks(MESH, run)):
        group = engines.group_of(rank, MESH, axes)
        parts = [stacked(r, size, dtype) for r in group]
        for (kind, options), mine in zip(calls, got, strict=True):
            want = engines.reference(kind, parts, **options)[group.index(rank)]
            np.testing.assert_array_equal(mine, want.reshape(mine.shape))


def test_maximum_and_records():
    def run(engine):
        x = np.full(3, engine.rank, np.float32)
        out = enqueue(engine, "all_reduce", x, np.empty_like(x), 3, ("x", "y"), op="max")
        assert [r.operation for r in engine.world.recorder.records] == ["communicator", "all_reduce"]
        assert engine.world.recorder.records[-1].nbytes == 12
        assert engine.world.recorder.pending() is None
        return out

    for out in on_ranks(MESH, run):
        np.testing.assert_array_equal(out, np.full(3, 3, np.float32))


def test_several_as_one():
    """A bucket is one group of the library and one record; errors close the group."""
    address = lambda x: x.ctypes.data

    def run(engine):
        a, b = np.full(3, engine.rank + 1, np.float32), np.arange(8, dtype=np.int32)
        outs = [np.zeros_like(a), np.zeros(4, np.int32)]
        two = [
            Exchange("all_reduce", address(a), address(outs[0]), 3, a.dtype),
            Exchange("reduce_scatter", address(b), address(outs[1]), 4, b.dtype),
        ]
        enqueue(engine, "all_reduce", a, np.empty_like(a), 3, ("x",))  # connects the ranks
        groups, library = [], engine._nccl
        engine._nccl = types.SimpleNamespace(
            groupStart=lambda: (groups.append("start"), library.groupStart()),
            groupEnd=lambda: (library.groupEnd(), groups.append("end")),
        )
        engine.enqueue(two, ("x",), STREAM)
        engine.enqueue([], ("x",), STREAM)
        with pytest.raises(errors.UnsupportedError, match="int16"):
            engine.enqueue([two[0], replace(two[0], dtype=np.dtype(np.int16))], ("x",), STREAM)
        assert groups == ["start", "end"]
        found = [(r.operation, r.nbytes) for r in engine.world.recorder.records]
        assert found[:2] == [("communicator", 0), ("all_reduce", 12)]
        assert found[2:] == [("all_reduce and reduce_scatter", 12 + 32)]
        return outs

    for rank, (whole, part) in enumerate(on_ranks(AbstractMesh((2,), ("x",)), run)):
        np.testing.assert_array_equal(whole, np.full(3, 3, np.float32))
        np.testing.assert_array_equal(part, 2 * np.arange(4 * rank, 4 * rank + 4))


def test_communicators_are_made_once():
    def run(engine):
        x = np.ones(2, np.float32)
        for axis in "xyx":
            enqueue(engine, "all_reduce", x, x, 2, (axis,))
        return [r.axes for r in engine.world.recorder.records if r.operation == "communicator"]

    assert on_ranks(MESH, run) == [[("x",), ("y",)]] * 4


def test_errors_of_the_library_reach_the_watchdog_which_can_abort():
    def run(engine):
        x = np.ones(2, np.float32)
        enqueue(engine, "all_reduce", x, x, 2, ("x",))
        (check,), (abort,) = engine.world.watchdog.checks, engine.world.watchdog.aborts
        assert check() is None
        comm = engine._groups[("x",)].comm
        comm.error = "remote process exited"
        assert check() == "NCCL over x reports remote process exited"
        abort()
        return comm.aborted

    assert on_ranks(AbstractMesh((2,), ("x",)), run) == [True, True]


@pytest.mark.parametrize(
    ("kind", "dtype", "error", "message"),
    [
        ("all_reduce", "int16", errors.UnsupportedError, "NCCL cannot combine int16 by 'sum'"),
        ("broadcast", "float32", errors.ValueRangeError, "no collective is called 'broadcast'"),
    ],
)
def test_what_nccl_cannot_do(kind, dtype, error, message):
    x = np.zeros(2, dtype)
    with pytest.raises(error, match=message):
        on_ranks(AbstractMesh((1,), ("x",)), lambda e: enqueue(e, kind, x, x, 2, ("x",)))


def test_what_raised_is_not_waited_for():
    def run(engine):
        x = np.zeros(2, np.int16)
        with pytest.raises(errors.UnsupportedError):
            enqueue(engine, "all_reduce", x, x, 2, ("x",))
        return engine.world.recorder.pending()

    assert on_ranks(AbstractMesh((1,), ("x",)), run) == [None]


@pytest.mark.parametrize(("op", "expected"), [("max", [False, True, True]), ("min", [False, False, True])])
def test_truth_values_are_combined(op, expected):
    rows = np.array([[False, False, True], [False, True, True]])

    def run(engine):
        x, out = rows[engine.rank].copy(), np.zeros(3, bool)
        enqueue(engine, "all_reduce", x, out, 3, ("x",), op=op)
        return out.tolist()

    assert on_ranks(AbstractMesh((2,), ("x",)), run) == [expected] * 2


def test_a_mesh_of_another_size_than_the_job():
    with pytest.raises(errors.ValueRangeError, match="a mesh of 4 ranks, and process 0 of the 2 processes"):
        NcclEngine(Peers(0, 2, {}), MESH, 0, nccl=Library())
