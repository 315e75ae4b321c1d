"""``NcclEngine``: collectives between GPUs over NCCL, on streams.

Parallel, used at stage 8. In: addresses from compiled programs (``enqueue``), or CuPy arrays (``collective``). Out:
collectives on a stream. Needs CuPy and the NCCL library. A rank is one GPU: a process, or a thread. A collective is
asynchronous: it is ordered with other work of its stream, and an event marks its end.

Communicators are made on first use, in program order: a program runs once before it is captured as a graph.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.library.collectives import Exchange
from blufunc.parallel.runtime import engine as engines
from blufunc.parallel.runtime.watchdog import Recorder

if TYPE_CHECKING:
    from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh

_UINT8 = 1
_TYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_OPS = {"sum": 0, "max": 2, "min": 3}


@functools.cache
def library() -> Any:
    """CuPy's binding of NCCL.

    Raises:
      UnsupportedError: CuPy or NCCL is missing.
    """
    driver.require()
    from cupy.cuda import nccl

    if not nccl.available:
        raise errors.UnsupportedError(
            "GPUs communicate through NCCL, and its library is missing.",
            fix="pip install 'blufunc[cuda13]', or [cuda12]: both bring NCCL",
        )
    return nccl


class NcclEngine(engines.ProcessEngine):
    """``Engine`` of one GPU.

    Args:
      world, mesh, members: see ``ProcessEngine``.
      device: the index of the GPU in this process.
      nccl: the binding; default CuPy's.
    Raises:
      UnsupportedError: CuPy or NCCL is missing.
    """

    def __init__(
        self,
        world: engines.Peers,
        mesh: AbstractMesh,
        device: int,
        members: Sequence[int] | None = None,
        *,
        nccl: Any = None,
    ):
        super().__init__(world, mesh, members)
        self.device = device
        self._nccl = library() if nccl is None else nccl
        world.watchdog.checks.append(self._asynchronous_error)
        world.watchdog.aborts.append(self.abort)

    def collective(self, kind: str, x: Any, axes: tuple[str, ...], **options: Any) -> Any:
        """As ``Engine.collective``, of CuPy arrays, on the device's work stream."""
        import cupy

        stream = driver.work_stream(self.device)
        with cupy.cuda.Device(self.device), stream:
            operand = cupy.ascontiguousarray(cupy.asarray(x)).reshape(x.shape)
            out = engines.run(_Arrays(self, axes, stream), kind, operand, **options)
        return out if isinstance(x, cupy.ndarray) else out.get(stream=stream)

    def enqueue(self, exchanges: Sequence[Exchange], axes: tuple[str, ...], stream: Any) -> None:
        """Enqueue a group of collectives on a stream of the current device.

        Raises:
          UnsupportedError: NCCL cannot sum a dtype.
        """
        if not exchanges:
            return
        group = self.group(axes)
        calls = [group.call(self._nccl, e, stream.ptr) for e in exchanges]
        members = self.members_in(group.ranks)
        kinds = dict.fromkeys(e.kind for e in exchanges)
        recorder = self.world.recorder
        record = recorder.begin(" and ".join(kinds), axes, sum(map(group.nbytes, exchanges)), members)
        try:
            with together(self._nccl) if len(calls) > 1 else contextlib.nullcontext():
                for call in calls:
                    call()
        except BaseException:
            recorder.give_up(record)
            raise
        if driver.is_capturing(stream.ptr):
            recorder.end(record)  # captured: it runs whenever the graph does
        else:
            event = driver.recorded(stream)
            recorder.end(record, lambda: event.done)

    def abort(self) -> None:
        """Abort pending collectives; the engine is unusable afterwards."""
        for group in self._groups.values():
            group.comm.abort()

    def connect(self, axes: tuple[str, ...], ranks: list[int]) -> _Group:
        """Make a communicator of ``ranks``, whose identifier the first one makes."""
        members = self.members_in(ranks)
        mine = self._nccl.get_unique_id() if self.rank == ranks[0] else b""
        with self.world.recorder.during("communicator", axes, 0, members):
            unique = self.world.gather(f"NCCL over {','.join(axes)}", bytes(mine), members)[0]
            comm = self._nccl.NcclCommunicator(len(ranks), unique, ranks.index(self.rank))
        return _Group(comm, ranks, self.rank)

    def _asynchronous_error(self) -> str | None:
        for axes, group in tuple(self._groups.items()):
            try:
                group.comm.check_async_error()
            except Exception as e:  # its error classes belong to the library
                return f"NCCL over {', '.join(axes)} reports {e}"
        return None


@contextlib.contextmanager
def together(nccl: Any = None) -> Iterator[None]:
    """Context manager: group the collectives that one thread enqueues."""
    nccl = library() if nccl is None else nccl
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


class _Group:
    """The ranks that differ in some axes only, and their communicator."""

    def __init__(self, comm: Any, ranks: Sequence[int], rank: int):
        self.comm, self.ranks, self.size, self.place = comm, ranks, len(ranks), ranks.index(rank)

    def nbytes(self, e: Exchange) -> int:
        """Bytes that one rank sends."""
        factor = self.size if e.kind in ("reduce_scatter", "all_to_all") else 1
        return factor * e.count * e.dtype.itemsize

    def call(self, nccl: Any, e: Exchange, stream: int) -> Callable[[], object]:
        """The NCCL call of a collective, resolved before a group is opened."""
        nbytes = e.count * e.dtype.itemsize
        if e.kind in ("all_reduce", "reduce_scatter"):
            code, n = _type_of(e.dtype, e.count, e.op)
            sums = self.comm.allReduce if e.kind == "all_reduce" else self.comm.reduceScatter
            return lambda: sums(e.send, e.receive, n, code, _OPS[e.op], stream)
        if e.kind == "all_gather":
            return lambda: self.comm.allGather(e.send, e.receive, nbytes, _UINT8, stream)
        if e.kind == "all_to_all":
            return lambda: self._swap(nccl, e, nbytes, stream)
        if e.kind == "permute":
            return lambda: self._permute(nccl, e, nbytes, stream)
        raise engines.unknown(e.kind)

    def _swap(self, nccl: Any, e: Exchange, nbytes: int, stream: int) -> None:
        with together(nccl):
            for peer in range(self.size):
                self.comm.send(e.send + peer * nbytes, nbytes, _UINT8, peer, stream)
                self.comm.recv(e.receive + peer * nbytes, nbytes, _UINT8, peer, stream)

    def _permute(self, nccl: Any, e: Exchange, nbytes: int, stream: int) -> None:
        with together(nccl):
            for src, dst in e.perm:
                if src == self.place:
                    self.comm.send(e.send, nbytes, _UINT8, dst, stream)
                if dst == self.place:
                    self.comm.recv(e.receive, nbytes, _UINT8, src, stream)


def _type_of(dtype: np.dtype, count: int, op: str) -> tuple[int, int]:
    """NCCL's dtype code for a reduction, and the element count in that dtype."""
    if dtypes.is_complex(dtype) and op == "sum":
        return _TYPES[f"float{4 * dtype.itemsize}"], 2 * count
    name = "uint8" if dtypes.is_bool(dtype) and op != "sum" else dtype.name
    if name not in _TYPES:
        raise errors.UnsupportedError(
            f"NCCL cannot combine {dtype.name} by {op!r}.",
            where=source.here(),
            fix="x.astype('float32') before, and back after",
        )
    return _TYPES[name], count


class _Arrays:
    """An ``engine.Transport`` of CuPy arrays."""

    def __init__(self, engine: NcclEngine, axes: tuple[str, ...], stream: Any):
        self.engine, self.axes, self.stream = engine, axes, stream
        self.size = len(engines.group_of(engine.rank, engine.mesh, axes))

    def _run(self, kind: str, x: Any, shape: tuple[int, ...], count: int, **options: Any) -> Any:
        import cupy

        make = cupy.zeros if kind == "permute" else cupy.empty
        out = make(shape, x.dtype)
        request = Exchange(kind, x.data.ptr, out.data.ptr, count, x.dtype, **options)
        self.engine.enqueue([request], self.axes, self.stream)
        return out

    def all_reduce(self, x: Any, op: str) -> Any:
        return self._run("all_reduce", x, x.shape, x.size, op=op)

    def gather(self, x: Any) -> Any:
        return self._run("all_gather", x, (self.size, *x.shape), x.size)

    def reduce_scatter(self, parts: Any) -> Any:
        return self._run("reduce_scatter", parts, parts.shape[1:], parts.size // self.size)

    def swap(self, parts: Any) -> Any:
        return self._run("all_to_all", parts, parts.shape, parts.size // self.size)

    def permute(self, x: Any, perm: Sequence[tuple[int, int]]) -> Any:
        return self._run("permute", x, x.shape, x.size, perm=perm)


# -- several GPUs of one process, a thread for each ------------------------------------------------

_engines: dict[tuple[Mesh, int], NcclEngine] = {}


@contextlib.contextmanager
def engine_in_use(mesh: Mesh, rank: int) -> Iterator[engines.Engine]:
    """Context manager: enqueue collectives of this thread on its GPU's stream.

    Threads are those of ``simulated.run_ranks``, whose engine carries NCCL's identifiers while connections are made. A
    rank that fails aborts the connections, so that no other rank hangs; the next program makes new ones.
    """
    host = engines.current()
    engine = _engines.get((mesh, rank))
    if engine is None:
        device = mesh.device_list[rank].index
        engine = _engines[mesh, rank] = NcclEngine(_Threads(rank, mesh.size), mesh.abstract, device)
    engine.world.host = host  # type: ignore[attr-defined]
    try:
        with engines.use(engine):
            yield engine
    except BaseException:
        for other in range(mesh.size):
            lost = _engines.pop((mesh, other), None)
            if lost is not None:
                lost.abort()
        raise


class _Threads:
    """The ranks from the view of one of them: an ``engine.Peers``.

    Attributes:
      host: the engine through which threads communicate in this run.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.members = rank, range(size)
        self.recorder = Recorder()
        # threads need no watchdog: they end with their process
        self.watchdog = types.SimpleNamespace(checks=[], aborts=[])
        self.host: Any = None

    def gather(self, name: str, value: bytes, members: Sequence[int]) -> list[bytes]:
        """Gather the values of ``members`` under ``name``: up to 254 bytes each."""
        message = np.zeros(255, np.uint8)
        message[0] = len(value)
        message[1 : 1 + len(value)] = np.frombuffer(value, np.uint8)
        rows = self.host.gather(name, message, members)
        return [row[1 : 1 + row[0]].tobytes() for row in rows]
