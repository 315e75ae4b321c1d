"""The engine of processes on CPUs: MPI moves the bytes.

Parallel, used at stage 8; needs mpi4py, and a process that ``mpirun`` has started (``python -m
blufunc.parallel.launch`` does). MPI moves parts between ranks, and sums are made here in the order of ranks: the results
are those of ``ThreadEngine`` bit for bit, for every dtype, those included that MPI does not know.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core import dtypes, source
from blufunc.parallel import engine as engines

if TYPE_CHECKING:
    from blufunc.parallel.bootstrap import World
    from blufunc.parallel.mesh import AbstractMesh

_SMALL = 4096
"""Bytes up to which a sum is one exchange of everything: above, each rank sums a part of it."""


class _Group:
    """The ranks that differ in some axes only, and their communicator."""

    def __init__(self, comm: Any, ranks: Sequence[int]):
        self.comm, self.ranks, self.size = comm, ranks, len(ranks)


class MpiEngine:
    """``Engine`` of one process.

    Args:
      world: the job; every collective is noted in its recorder.
      mesh: the mesh of all ranks.
      members: the process of each rank of the mesh, in its order; all processes in their order by default.
    Raises:
      UnsupportedError: mpi4py is not installed, or MPI did not start this process.
      ValueRangeError: the mesh has another number of ranks than ``members``, or this process is not among them.
    """

    def __init__(self, world: World, mesh: AbstractMesh, members: Sequence[int] | None = None):
        self.world, self.mesh = world, mesh
        self.members = tuple(world.members if members is None else members)
        self._mpi = _mpi(world)
        self.rank = rank_in(world, mesh, self.members)
        self.coordinates = engines.coordinates_of(self.rank, mesh)
        self._groups: dict[tuple[str, ...], _Group] = {}

    def prepare(self, axes: Iterable[tuple[str, ...]]) -> None:
        """Make the communicators of these sets of axes; all ranks call it with the same, in the same order."""
        for one in axes:
            self._group(one)

    def exchange(self, kind: str, x: np.ndarray, axes: tuple[str, ...], **options: Any) -> np.ndarray:
        """See ``engine.Engine``."""
        x = np.ascontiguousarray(x).reshape(np.shape(x))  # the former makes rank 0 rank 1
        group = self._group(axes)
        with self.world.recorder.during(kind, axes, x.nbytes, [self.members[r] for r in group.ranks]):
            self._agree(group, kind, x, axes, options)
            return _EXCHANGES[kind](group, x, **options)

    def _group(self, axes: tuple[str, ...]) -> _Group:
        group = self._groups.get(axes)
        if group is None:
            ranks = engines.group_of(self.rank, self.mesh, axes)
            everybody = self._mpi.COMM_WORLD
            chosen = everybody.Get_group().Incl([self.members[r] for r in ranks])
            with self.world.recorder.during("communicator", axes, 0, [self.members[r] for r in ranks]):
                group = self._groups[axes] = _Group(everybody.Create_group(chosen), ranks)
        return group

    def _agree(
        self, group: _Group, kind: str, x: np.ndarray, axes: tuple[str, ...], options: dict[str, Any]
    ) -> None:
        """Raise on all ranks of the group where they do not exchange the same thing."""
        shape = ",".join(map(str, x.shape))
        told = ", ".join([f"axes={axes}", *(f"{k}={v}" for k, v in sorted(options.items()))])
        mine = f"{kind}({dtypes.short_name(x.dtype)}[{shape}], {told})"
        hashes = np.empty((group.size, 16), np.uint8)
        group.comm.Allgather(np.frombuffer(hashlib.md5(mine.encode()).digest(), np.uint8), hashes)
        if (hashes == hashes[0]).all():
            return
        lines = [json.loads(t) for t in group.comm.allgather(json.dumps([mine, source.here()]))]
        other = next(i for i, line in enumerate(lines) if line[0] != lines[0][0])
        raise errors.CollectiveError(
            f"ranks {group.ranks[0]} and {group.ranks[other]} do not exchange the same thing.",
            where=source.here(),
            why="\n".join(f"rank {group.ranks[i]}: {lines[i][0]}, at {lines[i][1]}" for i in (0, other)),
            fix="all ranks run one program, on shards of one shape; branch only on what all ranks agree on",
        )


def rank_in(world: World, mesh: AbstractMesh, members: Sequence[int]) -> int:
    """The rank in ``mesh`` of this process.

    Raises:
      ValueRangeError: the mesh has another number of ranks than ``members``, or this process is not among them.
    """
    size = int(np.prod(mesh.axis_sizes, dtype=int))
    if size != len(members) or world.rank not in members:
        raise errors.ValueRangeError(
            f"a mesh of {size} ranks, and rank {world.rank} of the processes {list(members)}.",
            where=source.here(),
            why="each rank of a mesh is a process, and all processes of the mesh run the program.",
            fix=f"a mesh of the {world.size} processes of this job",
        )
    return list(members).index(world.rank)


def _mpi(world: World) -> Any:
    fix = "pip install 'blufunc[mpi]', then: python -m blufunc.parallel.launch -n 4 script.py"
    if importlib.util.find_spec("mpi4py") is None:
        raise errors.UnsupportedError("processes on CPUs exchange through MPI, and mpi4py is missing.", fix=fix)
    from mpi4py import MPI

    if MPI.COMM_WORLD.size != world.size or MPI.COMM_WORLD.rank != world.rank:
        raise errors.UnsupportedError(
            f"this process is rank {world.rank} of {world.size}, and for MPI {MPI.COMM_WORLD.rank} of"
            f" {MPI.COMM_WORLD.size}.",
            why="processes on CPUs exchange through MPI, whose own launcher must start them.",
            fix="python -m blufunc.parallel.launch -n 4 script.py, or mpirun -n 4 python script.py",
        )
    return MPI


# -- exchanges: how parts get to where they are needed; the definitions are those of engine.exchanged -------


def _gathered(group: _Group, x: np.ndarray) -> np.ndarray:
    """The arrays of all ranks, stacked."""
    out = np.empty((group.size, *x.shape), x.dtype)
    group.comm.Allgather(_words(x, x.nbytes), _words(out, x.nbytes))
    return out


def _swapped(group: _Group, parts: np.ndarray) -> np.ndarray:
    """The part for this rank of every rank's ``parts``, stacked."""
    parts = np.ascontiguousarray(parts)
    out = np.empty_like(parts)
    part = parts.nbytes // group.size
    group.comm.Alltoall(_words(parts, part), _words(out, part))
    return out


def _words(x: np.ndarray, part: int) -> np.ndarray:
    """The memory of a contiguous array, of parts of so many bytes, in words that MPI knows: few, as it counts to 2**31."""
    return x.reshape(-1).view(np.uint64 if part % 8 == 0 else np.uint8)


def _all_reduce(group: _Group, x: np.ndarray, *, op: str = "sum") -> np.ndarray:
    if x.nbytes <= _SMALL:
        return engines.reduced(list(_gathered(group, x)), op)
    length = -(-x.size // group.size)
    padded = np.zeros((group.size, length), x.dtype)
    padded.reshape(-1)[: x.size] = x.reshape(-1)
    part = engines.reduced(list(_swapped(group, padded)), op)
    return _gathered(group, np.ascontiguousarray(part)).reshape(-1)[: x.size].reshape(x.shape)


def _all_gather(group: _Group, x: np.ndarray, *, dim: int, tiled: bool = True) -> np.ndarray:
    join = np.concatenate if tiled else np.stack
    return join(list(_gathered(group, x)), axis=dim)


def _reduce_scatter(group: _Group, x: np.ndarray, *, dim: int, tiled: bool = True) -> np.ndarray:
    parts = engines.divided(x, group.size, dim, tiled)
    return engines.reduced(list(_swapped(group, np.stack(parts))))


def _all_to_all(
    group: _Group, x: np.ndarray, *, split_dim: int, concat_dim: int, tiled: bool = True
) -> np.ndarray:
    parts = engines.divided(x, group.size, split_dim, tiled)
    join = np.concatenate if tiled else np.stack
    return join(list(_swapped(group, np.stack(parts))), axis=concat_dim)


def _permute(group: _Group, x: np.ndarray, *, perm: Sequence[tuple[int, int]]) -> np.ndarray:
    me = group.comm.rank
    to = {src: dst for src, dst in perm}.get(me)
    by = {dst: src for src, dst in perm}.get(me)
    out = np.zeros_like(x)
    waiting = [] if by is None else [group.comm.Irecv(_words(out, x.nbytes), by)]
    waiting += [] if to is None else [group.comm.Isend(_words(x, x.nbytes), to)]
    for request in waiting:
        request.Wait()
    return out


_EXCHANGES = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
}
