"""``MpiEngine``: collectives between CPU processes over MPI.

Parallel, used at stage 8. In: arrays of this rank. Out: arrays from the group. Needs mpi4py, and a process started by
``mpirun`` (as ``python -m blufunc.parallel.launch`` does). MPI moves parts between ranks; sums are computed here in
rank order, so results match ``ThreadEngine`` bit for bit, for every dtype, including those that MPI lacks.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import source
from blufunc.parallel.mesh import simulated_network
from blufunc.parallel.runtime import engine as engines

if TYPE_CHECKING:
    from blufunc.parallel.mesh.mesh import AbstractMesh
    from blufunc.parallel.runtime.bootstrap import World

_SMALL = 4096
"""Bytes up to which a sum gathers everything; above, each rank sums one part."""

_PATIENT = 65536
"""Bytes up to which a waiting rank yields its core.
MPI's own wait spins, so ranks that share cores would starve each other; large messages need its full attention."""

_SPIN = 100e-6  # seconds of spinning before it yields


class _Group:
    """Ranks along some axes, and their communicator: an ``engine.Transport``."""

    def __init__(self, comm: Any, ranks: Sequence[int]):
        self.comm, self.ranks, self.size = comm, ranks, len(ranks)

    def all_reduce(self, x: np.ndarray, op: str) -> np.ndarray:
        if x.nbytes <= _SMALL:
            return engines.reduced(list(self.gather(x)), op)
        padded = np.zeros((self.size, -(-x.size // self.size)), x.dtype)
        padded.reshape(-1)[: x.size] = x.reshape(-1)
        part = engines.reduced(list(self.swap(padded)), op)
        return self.gather(part).reshape(-1)[: x.size].reshape(x.shape)

    def gather(self, x: np.ndarray) -> np.ndarray:
        out = np.empty((self.size, *x.shape), x.dtype)
        sent, received = _words(x, x.nbytes), _words(out, x.nbytes)
        if out.nbytes <= _PATIENT:
            _wait(self.comm.Iallgather(sent, received))
        else:
            self.comm.Allgather(sent, received)
        return out

    def reduce_scatter(self, parts: np.ndarray) -> np.ndarray:
        return engines.reduced(list(self.swap(parts)))

    def swap(self, parts: np.ndarray) -> np.ndarray:
        out = np.empty_like(parts)
        part = parts.nbytes // self.size
        sent, received = _words(parts, part), _words(out, part)
        if out.nbytes <= _PATIENT:
            _wait(self.comm.Ialltoall(sent, received))
        else:
            self.comm.Alltoall(sent, received)
        return out

    def permute(self, x: np.ndarray, perm: Sequence[tuple[int, int]]) -> np.ndarray:
        me = self.comm.rank
        to, by = dict(perm).get(me), {dst: src for src, dst in perm}.get(me)
        out = np.zeros_like(x)
        waiting = [] if by is None else [self.comm.Irecv(_words(out, x.nbytes), by)]
        waiting += [] if to is None else [self.comm.Isend(_words(x, x.nbytes), to)]
        for request in waiting:
            _wait(request) if x.nbytes <= _PATIENT else request.Wait()
        return out


def _wait(request: Any) -> None:
    """Wait for a request to complete."""
    began, pause = time.perf_counter(), 20e-6
    while not request.Test():
        if time.perf_counter() - began > _SPIN:
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)


def _words(x: np.ndarray, part: int) -> np.ndarray:
    """The memory of a contiguous array as large words, since MPI counts in int32."""
    return x.reshape(-1).view(np.uint64 if part % 8 == 0 else np.uint8)


class MpiEngine(engines.ProcessEngine):
    """``Engine`` of one process.

    Raises:
      UnsupportedError: mpi4py is not installed, or MPI did not start this process.
    """

    def __init__(self, world: World, mesh: AbstractMesh, members: Sequence[int] | None = None):
        self._mpi = _mpi(world)
        super().__init__(world, mesh, members)

    def collective(self, kind: str, x: np.ndarray, axes: tuple[str, ...], **options: Any) -> np.ndarray:
        x = np.ascontiguousarray(x).reshape(np.shape(x))  # ascontiguousarray makes scalars 1-d
        group = self.group(axes)
        members = self.members_in(group.ranks)
        with self.world.recorder.during(kind, axes, x.nbytes, members):
            self._check_calls(group, engines.described(kind, x, axes, options))
            found = engines.run(group, kind, x, **options)
            simulated_network.wait(kind, x.nbytes, members, len(self.world.members), **options)
            return found

    def connect(self, axes: tuple[str, ...], ranks: list[int]) -> _Group:
        """Make a communicator of ``ranks``."""
        everybody, members = self._mpi.COMM_WORLD, self.members_in(ranks)
        with self.world.recorder.during("communicator", axes, 0, members):
            return _Group(everybody.Create_group(everybody.Get_group().Incl(members)), ranks)

    def _check_calls(self, group: _Group, mine: str) -> None:
        """Raise on all ranks of the group if their collectives differ."""
        hashes = group.gather(np.frombuffer(hashlib.md5(mine.encode()).digest(), np.uint8))
        if (hashes == hashes[0]).all():
            return
        calls = [json.loads(t) for t in group.comm.allgather(json.dumps([mine, source.here()]))]
        other = next(i for i, call in enumerate(calls) if call[0] != calls[0][0])
        raise engines.disagreement(
            f"ranks {group.ranks[0]} and {group.ranks[other]} call different collectives.",
            [(group.ranks[i], f"{calls[i][0]}, at {calls[i][1]}") for i in (0, other)],
        )


def _mpi(world: World) -> Any:
    fix = "pip install 'blufunc[mpi]', then: python -m blufunc.parallel.launch -n 4 script.py"
    if importlib.util.find_spec("mpi4py") is None:
        raise errors.UnsupportedError(
            "processes on CPUs communicate through MPI, and mpi4py is missing.", fix=fix
        )
    from mpi4py import MPI

    if MPI.COMM_WORLD.size != world.size or MPI.COMM_WORLD.rank != world.rank:
        raise errors.UnsupportedError(
            f"this process is rank {world.rank} of {world.size}, and for MPI {MPI.COMM_WORLD.rank} of"
            f" {MPI.COMM_WORLD.size}.",
            why="processes on CPUs communicate through MPI, whose own launcher must start them.",
            fix="python -m blufunc.parallel.launch -n 4 script.py, or mpirun -n 4 python script.py",
        )
    return MPI
