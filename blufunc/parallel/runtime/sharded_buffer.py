"""Storage of an array on a mesh: a shard on each device of this process.

Parallel, at both ends of stage 8. In: host arrays (``scatter``). Out: host arrays (``gather``), or another sharding
(``reshard``), which moves only what each device lacks. All of it is within one process: data of other processes arrives
through programs only (``programs/mesh_program.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend, process_info
from blufunc.core.ir import source
from blufunc.core.ir.avals import DEVICE
from blufunc.parallel.mesh.mesh import Mesh
from blufunc.parallel.mesh.sharding import Index, NamedSharding
from blufunc.parallel.runtime import engine


class ShardedBuffer:
    """Buffers on the devices of a mesh, one per device of this process.

    Attributes:
      shards: the buffer of each rank of this process (``mesh.local_ranks``), all of shape ``sharding.shard_shape``,
        padding included.
      sharding: the layout.
      shape, dtype: the global shape and dtype.
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
        """True if this process has the shards of all ranks."""
        return not mesh_of(self.sharding).spans_processes

    def host_shard(self, rank: int) -> np.ndarray:
        """The shard of a rank of this process on the host, padding included; read-only."""
        i = self.ranks.index(rank)
        return self.devices[i].backend.to_host(self.shards[i])


def sharded_buffers(
    rows: Sequence[Sequence[backend.Buffer]],
    types: Sequence[tuple[NamedSharding, tuple[int, ...], np.dtype]],
) -> list[ShardedBuffer]:
    """Wrap the results of a program; fast, since a training step has hundreds.

    Args:
      rows: for each rank of this process, its shard of each result.
      types: the sharding, shape and dtype of each result.
    """
    new, out = ShardedBuffer.__new__, []
    for shards, (sharding, shape, dtype) in zip(zip(*rows, strict=True), types, strict=True):
        buffer = new(ShardedBuffer)  # like __init__, in half the time
        buffer.shards, buffer.sharding, buffer.shape, buffer.dtype = shards, sharding, shape, dtype
        out.append(buffer)
    return out


def mesh_of(sharding: NamedSharding) -> Mesh:
    """The concrete mesh of a sharding.

    Raises:
      ShardingError: it is abstract, or has no device of this process.
    """
    mesh = sharding.concrete_mesh
    if not mesh.local_ranks:
        raise errors.ShardingError(
            f"mesh({mesh}) has no device of process {process_info.current().index}.",
            where=source.here(),
            why="a process needs a device of the mesh to run a program on it.",
            fix="only the processes of the mesh call this; or a mesh of all devices: bf.make_mesh(...)",
        )
    return mesh


def scatter(x: np.ndarray, sharding: NamedSharding, memory: str = DEVICE) -> ShardedBuffer:
    """Put a host array onto the devices of a mesh, in their ``memory``.

    Raises:
      ShardingError: the spec has more entries than ``x`` dimensions, or unreduced axes; or the mesh has no devices.
    """
    return from_parts(lambda index: x[index], x.shape, x.dtype, sharding, memory)


def from_parts(
    part: Callable[[Index], np.ndarray],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: NamedSharding,
    memory: str = DEVICE,
) -> ShardedBuffer:
    """Build an array by ``part(index)``, once per distinct shard of this process.

    ``memory`` is the kind of memory of the devices that it is in.

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
        shards.append(device.backend.from_host(known[key], device, memory))
    return ShardedBuffer(shards, sharding, tuple(shape), dtype)


def check_reduced(sharding: NamedSharding) -> None:
    """Raise ShardingError if the sharding has unreduced axes."""
    if sharding.spec.unreduced:
        raise errors.ShardingError(
            f"an array cannot have the sharding {sharding.spec}.",
            where=source.here(),
            why="unreduced values exist inside of programs only: they are sums pending a reduction.",
            fix="leave unreduced out",
        )


def _padded(x: np.ndarray, size: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Pad ``x`` with zeros to the shape ``size``."""
    if x.shape == size:
        return x
    out = np.zeros(size, dtype)
    out[tuple(slice(0, n) for n in x.shape)] = x
    return out


def gather(buffer: ShardedBuffer) -> np.ndarray:
    """The whole array on the host, read-only; unreduced axes are summed.

    Raises:
      ShardingError: other processes hold parts of it.
    """
    if buffer.sharding.is_fully_replicated:
        return buffer.host_shard(buffer.ranks[0])
    if not buffer.is_fully_addressable:
        raise errors.ShardingError(
            f"the values of an array of shape {buffer.shape} with {buffer.sharding} are not all in this process.",
            where=source.here(),
            why="other processes hold parts of it, and must all take part in a gather.",
            fix="bf.multihost.process_allgather(x) in all processes; or x.addressable_shards, the parts that are here",
        )
    out = assemble(buffer.sharding, buffer.shape, buffer.dtype, buffer.host_shard)
    out.flags.writeable = False
    return out


def assemble(
    sharding: NamedSharding, shape: tuple[int, ...], dtype: np.dtype, shard: Callable[[int], np.ndarray]
) -> np.ndarray:
    """The whole array from padded shards; unreduced axes are summed."""
    out = np.empty(shape, dtype)
    summands: dict[tuple, list[int]] = {}  # ranks whose shards sum to a part
    of_parts = {*sharding.spec.axes, *sharding.spec.unreduced}
    mesh = sharding.mesh
    for rank in range(mesh.size):
        if not any(i for name, i in mesh.coordinates(rank).items() if name not in of_parts):
            summands.setdefault(sharding.position(rank, len(shape)), []).append(rank)
    indices = sharding.indices(shape)
    for ranks in summands.values():
        part = engine.reduced([shard(r) for r in ranks]) if sharding.spec.unreduced else shard(ranks[0])
        index = indices[ranks[0]]
        out[index] = part[tuple(slice(0, s.stop - s.start) for s in index)]
    return out


def reshard(buffer: ShardedBuffer, sharding: NamedSharding) -> ShardedBuffer:
    """Change sharding or mesh; each source shard must be in this process.

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
    """A slice relative to ``start``."""
    return slice(s.start - start, s.stop - start)
