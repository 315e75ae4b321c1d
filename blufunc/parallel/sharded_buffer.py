"""The storage of an array on a mesh: a shard on each device.

Parallel, at both ends of stage 8. Arrays come from the host in ``scatter``, go back in ``gather``, and get another
sharding in ``reshard``, which moves no more than what each device lacks. What programs do is in ``mesh_program.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from blufunc import errors
from blufunc.core import backend, source
from blufunc.parallel import engine
from blufunc.parallel.mesh import Mesh
from blufunc.parallel.sharding import Index, NamedSharding


class ShardedBuffer:
    """Buffers of all devices of a mesh, one each.

    Attributes:
      shards: the buffer of each rank, all of one shape: that of ``sharding.shard_shape``, padding included.
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
        self.shards = list(shards)
        self.sharding, self.shape, self.dtype = sharding, shape, dtype

    @property
    def devices(self) -> tuple[backend.Device, ...]:
        """The device of each shard."""
        return devices_of(self.sharding)

    def host_shard(self, rank: int) -> np.ndarray:
        """What a rank holds, padding included, on the host; read-only."""
        return self.devices[rank].backend.to_host(self.shards[rank])


def devices_of(sharding: NamedSharding) -> tuple[backend.Device, ...]:
    """The devices of a sharding in the order of ranks.

    Raises:
      ShardingError: its mesh is abstract.
    """
    mesh = sharding.mesh
    if isinstance(mesh, Mesh):
        return mesh.device_list
    raise errors.ShardingError(
        f"{sharding} has no devices.", where=source.here(), fix="use a mesh of make_mesh, not an AbstractMesh"
    )


def scatter(x: np.ndarray, sharding: NamedSharding) -> ShardedBuffer:
    """An array of the host on the devices of a mesh.

    Raises:
      ShardingError: the spec is of a higher rank than ``x``, has unreduced axes, or the mesh no devices.
    """
    return from_parts(lambda index: x[index], x.shape, x.dtype, sharding)


def from_parts(
    part: Callable[[Index], np.ndarray], shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding
) -> ShardedBuffer:
    """The array of which ``part(index)`` gives each part; asked once for each, whatever the number of replicas.

    Raises:
      ShardingError: as ``scatter``.
    """
    if sharding.spec.unreduced:
        raise errors.ShardingError(
            f"no array can be put onto {sharding.spec}.",
            where=source.here(),
            why="unreduced values are sums that a program still owes.",
            fix="leave unreduced out",
        )
    size = sharding.shard_shape(shape)
    known: dict[tuple, np.ndarray] = {}
    shards = []
    for device, index in zip(devices_of(sharding), sharding.indices(shape), strict=True):
        key = tuple((s.start, s.stop) for s in index)
        if key not in known:
            known[key] = _padded(part(index), size, dtype)
        shards.append(device.backend.from_host(known[key], device))
    return ShardedBuffer(shards, sharding, tuple(shape), dtype)


def _padded(x: np.ndarray, size: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """``x`` with zeros after it up to the shape ``size``."""
    if x.shape == size:
        return x
    out = np.zeros(size, dtype)
    out[tuple(slice(0, n) for n in x.shape)] = x
    return out


def gather(buffer: ShardedBuffer) -> np.ndarray:
    """The whole array on the host, read-only; unreduced axes are summed."""
    spec = buffer.sharding.spec
    if buffer.sharding.is_fully_replicated:
        return buffer.host_shard(0)
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
    """The same array with another sharding, on the same mesh or another.

    Raises:
      ShardingError: as ``scatter``.
    """
    before = buffer.sharding
    if before.spec.unreduced:
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
