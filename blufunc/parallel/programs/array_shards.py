"""Sharding attributes of arrays: ``sharding``, ``addressable_shards``, ...

Parallel, after stage 8. In: an array. Out: its layout and shards. ``Array`` calls this module, since the core does not
know shardings.
"""

from __future__ import annotations

from dataclasses import dataclass

from blufunc.core.arrays import backend
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.ops.offload import in_memory
from blufunc.core.ops.shape import slice_
from blufunc.parallel.mesh.axis_regions import along_explicit
from blufunc.parallel.mesh.sharding import Index, Sharding, SingleDeviceSharding
from blufunc.parallel.runtime.sharded_buffer import ShardedBuffer


@dataclass(frozen=True)
class Shard:
    """One device's shard of an array.

    Attributes:
      device: the device.
      index: the position of the shard in the array: a slice per dimension.
      replica_id: the number of preceding devices with the same shard.
      data: the shard without padding, an array on the device.
    """

    device: backend.Device
    index: Index
    replica_id: int
    data: ConcreteArray

    def __repr__(self) -> str:
        return (
            f"Shard(device={self.device}, index={self.index}, replica_id={self.replica_id}, data={self.data})"
        )


def sharding_of(self: ConcreteArray) -> Sharding:
    """The layout of the array: a ``NamedSharding``, or a ``SingleDeviceSharding``."""
    buffer, memory = self.buffer, self.aval.memory
    if isinstance(buffer, ShardedBuffer):
        return buffer.sharding.with_memory_kind(memory)
    return SingleDeviceSharding(self.device, memory_kind=memory)


def type_of(self: ConcreteArray) -> ShapedArray:
    """The type of an array on a mesh, with its sharding along explicit axes."""
    return along_explicit(self.aval, self.buffer.sharding)


def addressable_shards(self: ConcreteArray) -> list[Shard]:
    """The shards on devices of this process, in mesh order."""
    buffer = self.buffer
    if not isinstance(buffer, ShardedBuffer):
        return [Shard(self.device, tuple(slice(0, n) for n in self.aval.shape), 0, self)]
    indices, replicas = buffer.sharding.indices(buffer.shape), buffer.sharding.replica_ids()
    padded = self.aval.with_shape(buffer.sharding.shard_shape(buffer.shape))
    shards = []
    for device, rank, shard in zip(buffer.devices, buffer.ranks, buffer.shards, strict=True):
        index = indices[rank]
        data = ConcreteArray(shard, padded, device)
        size = tuple(s.stop - s.start for s in index)
        if size != padded.shape:
            data = in_memory(slice_(in_memory(data, DEVICE), [0] * len(index), size), padded.memory)
        shards.append(Shard(device, index, replicas[rank], data))  # type: ignore[arg-type]
    return shards
