"""What arrays say of how they lie on devices: ``sharding``, ``addressable_shards`` and the like.

Parallel, after stage 8. ``Array`` asks this module, as the core knows nothing of shardings.
"""

from __future__ import annotations

from dataclasses import dataclass

from blufunc.core.arrays import backend
from blufunc.core.arrays.array import Array
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops.shape import slice_
from blufunc.parallel.mesh.sharding import Index, Sharding, SingleDeviceSharding
from blufunc.parallel.runtime.sharded_buffer import ShardedBuffer


@dataclass(frozen=True)
class Shard:
    """What one device holds of an array.

    Attributes:
      device: the device.
      index: which part of the array that is: a slice for each dimension.
      replica_id: how many devices before it hold the same part.
      data: the part, an array on the device, without padding.
    """

    device: backend.Device
    index: Index
    replica_id: int
    data: Array

    def __repr__(self) -> str:
        return (
            f"Shard(device={self.device}, index={self.index}, replica_id={self.replica_id}, data={self.data})"
        )


def sharding_of(self: Array) -> Sharding:
    """How the array lies on devices: a ``NamedSharding``, or a ``SingleDeviceSharding``."""
    buffer = self.buffer
    return buffer.sharding if isinstance(buffer, ShardedBuffer) else SingleDeviceSharding(self.device)


def addressable_shards(self: Array) -> list[Shard]:
    """The parts of the array, one for each device of this process, in the order of the mesh."""
    buffer = self.buffer
    if not isinstance(buffer, ShardedBuffer):
        return [Shard(self.device, tuple(slice(0, n) for n in self.aval.shape), 0, self)]
    indices, replicas = buffer.sharding.indices(buffer.shape), buffer.sharding.replica_ids()
    padded = ShapedArray(buffer.sharding.shard_shape(buffer.shape), buffer.dtype, self.aval.weak_type)
    shards = []
    for device, rank, shard in zip(buffer.devices, buffer.ranks, buffer.shards, strict=True):
        index = indices[rank]
        data = slice_(Array(shard, padded, device), [0] * len(index), tuple(s.stop - s.start for s in index))
        shards.append(Shard(device, index, replicas[rank], data))
    return shards
