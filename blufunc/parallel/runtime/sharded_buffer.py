"""The storage of an array on a mesh: a shard on each device of this process.

Parallel, at both ends of stage 8. Arrays come from the host in ``scatter``, go back in ``gather``, and get another
sharding in ``reshard``, which moves no more than what each device lacks. All of it is within one process: what other
processes have comes here by programs (``programs/mesh_program.py``) only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend, process_info
from blufunc.core.ir import source
from blufunc.parallel.mesh.mesh import Mesh
from blufunc.parallel.mesh.sharding import Index, NamedSharding
from blufunc.parallel.runtime import engine


class ShardedBuffer:
    """Buffers of the devices of a mesh, one each.

    Attributes:
      shards: the buffer of each rank of this process (``mesh.local_ranks``), all of one shape: that of
        ``sharding.shard_shape``, padding included.
      sharding: which part of the array each of them is.
      shape, dtype: those of the whole array.
    """

    __slots__ = ("dtype", "shape", "sharding", "shards")

    def __init__(
        self,
        shards: Sequence[backend.Buffer],
        sharding: NamedSharding,
        shape: tuple[int, ...],
        dtype: np.dtype,
    ):
        self.shards = tuple(shards)
        self.sharding, self.shape, self.dtype = sharding, shape, dtype

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each shard."""
        return mesh_of(self.sharding).local_ranks

    @property
    def devices(self) -> tuple[backend.Device, ...]:
        """The device of each shard."""
        return mesh_of(self.sharding).local_devices

    @property
    def is_fully_addressable(self) -> bool:
        """Whether the shards of all ranks are here."""
        return not mesh_of(self.sharding).spans_processes

    def host_shard(self, rank: int) -> np.ndarray:
        """What a rank of this process holds, padding included, on the host; read-only."""
        i = self.ranks.index(rank)
        return self.devices[i].backend.to_host(self.shards[i])


def sharded_buffers(
    rows: Sequence[Sequence[backend.Buffer]],
    types: Sequence[tuple[NamedSharding, tuple[int, ...], np.dtype]],
) -> list[ShardedBuffer]:
    """The results of a program, of which a step of training has hundreds.

    Args:
      rows: for each rank of this process, its shard of each result.
      types: the sharding, shape and dtype of each result.
    """
    new, out = ShardedBuffer.__new__, []
    for shards, (sharding, shape, dtype) in zip(zip(*rows, strict=True), types, strict=True):
        made = new(ShardedBuffer)  # what __init__ does, in half the time
        made.shards, made.sharding, made.shape, made.dtype = shards, sharding, shape, dtype
        out.append(made)
    return out


def mesh_of(sharding: NamedSharding) -> Mesh:
    """The mesh of a sharding for arrays.

    Raises:
      ShardingError: it is abstract, or no device of it is of this process.
    """
    mesh = sharding.mesh
    if not isinstance(mesh, Mesh):
        raise errors.ShardingError(
            f"{sharding} has no devices.",
            where=source.here(),
            fix="use a mesh of make_mesh, not an AbstractMesh",
        )
    if not mesh.local_ranks:
        raise errors.ShardingError(
            f"mesh({mesh}) has no device of process {process_info.current().index}.",
            where=source.here(),
            why="a process takes part in what runs on a mesh with the devices that it has.",
            fix="only the processes of the mesh call this; or a mesh of all devices: bf.make_mesh(...)",
        )
    return mesh


def scatter(x: np.ndarray, sharding: NamedSharding) -> ShardedBuffer:
    """An array of the host on the devices of a mesh.

    Raises:
      ShardingError: the spec is of a higher rank than ``x``, has unreduced axes, or the mesh no devices.
    """
    return from_parts(lambda index: x[index], x.shape, x.dtype, sharding)


def from_parts(
    part: Callable[[Index], np.ndarray], shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding
) -> ShardedBuffer:
    """The array of which ``part(index)`` gives each part; asked once for each of this process, whatever the number of
    replicas.

    Raises:
      ShardingError: as ``scatter``.
    """
    check_reduced(sharding)
    size = sharding.shard_shape(shape)
    known: dict[tuple, np.ndarray] = {}
    shards = []
    indices = sharding.indices(shape)
    mesh = mesh_of(sharding)
    for device, rank in zip(mesh.local_devices, mesh.local_ranks, strict=True):
        index = indices[rank]
        key = tuple((s.start, s.stop) for s in index)
        if key not in known:
            known[key] = _padded(part(index), size, dtype)
        shards.append(device.backend.from_host(known[key], device))
    return ShardedBuffer(shards, sharding, tuple(shape), dtype)


def check_reduced(sharding: NamedSharding) -> None:
    """Raise ShardingError if values of this sharding are sums of what the ranks have."""
    if sharding.spec.unreduced:
        raise errors.ShardingError(
            f"no array can be put onto {sharding.spec}.",
            where=source.here(),
            why="unreduced values are sums that a program still owes.",
            fix="leave unreduced out",
        )


def _padded(x: np.ndarray, size: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """``x`` with zeros after it up to the shape ``size``."""
    if x.shape == size:
        return x
    out = np.zeros(size, dtype)
    out[tuple(slice(0, n) for n in x.shape)] = x
    return out


def gather(buffer: ShardedBuffer) -> np.ndarray:
    """The whole array on the host, read-only; unreduced axes are summed.

    Raises:
      ShardingError: other processes have parts of it.
    """
    spec = buffer.sharding.spec
    if buffer.sharding.is_fully_replicated:
        return buffer.host_shard(buffer.ranks[0])
    if not buffer.is_fully_addressable:
        raise errors.ShardingError(
            f"the values of an array of shape {buffer.shape} with {buffer.sharding} are not all in this process.",
            where=source.here(),
            why="other processes have parts of it, and to fetch these all processes must take part.",
            fix="bf.multihost.process_allgather(x) in all processes; or x.addressable_shards, the parts that are here",
        )
    out = np.empty(buffer.shape, buffer.dtype)
    owed: dict[tuple, list[int]] = {}  # the ranks whose shards add up to a part
    of_parts = {*spec.axes, *spec.unreduced}
    mesh = buffer.sharding.mesh
    for rank in range(mesh.size):
        if not any(i for name, i in mesh.coordinates(rank).items() if name not in of_parts):
            owed.setdefault(buffer.sharding.position(rank, len(buffer.shape)), []).append(rank)
    indices = buffer.sharding.indices(buffer.shape)
    for ranks in owed.values():
        part = (
            engine.reduced([buffer.host_shard(r) for r in ranks])
            if spec.unreduced
            else buffer.host_shard(ranks[0])
        )
        index = indices[ranks[0]]
        out[index] = part[_inner(index)]
    out.flags.writeable = False
    return out


def _inner(index: Index) -> Index:
    """Where within its shard a part is: without the padding."""
    return tuple(slice(0, s.stop - s.start) for s in index)


def reshard(buffer: ShardedBuffer, sharding: NamedSharding) -> ShardedBuffer:
    """The same array with another sharding, on the same mesh or another; all of it is in this process, or each shard.

    Raises:
      ShardingError: as ``scatter`` and ``gather``.
    """
    before = buffer.sharding
    if before.spec.unreduced or not buffer.is_fully_addressable:
        return scatter(gather(buffer), sharding)
    firsts = [r for r, replica in enumerate(before.replica_ids()) if not replica]
    indices = before.indices(buffer.shape)

    def part(index: Index) -> np.ndarray:
        out = np.empty([s.stop - s.start for s in index], buffer.dtype)
        for rank in firsts:
            common = [_common(a, b) for a, b in zip(index, indices[rank], strict=True)]
            if all(s.start < s.stop for s in common):
                to = tuple(_from(s, a.start) for s, a in zip(common, index, strict=True))
                of = tuple(_from(s, b.start) for s, b in zip(common, indices[rank], strict=True))
                out[to] = buffer.host_shard(rank)[of]
        return out

    return from_parts(part, buffer.shape, buffer.dtype, sharding)


def _common(a: slice, b: slice) -> slice:
    return slice(max(a.start, b.start), min(a.stop, b.stop))


def _from(s: slice, start: int) -> slice:
    """A slice as counted from ``start`` on."""
    return slice(s.start - start, s.stop - start)
