"""Shardings: a mesh with a partition spec; for a shape, the shard of each device.

Parallel, before stage 3 and after stage 8. In: a mesh, a spec, a global shape. Out: shard shapes and indices. All
shards of an array have the shape of the largest: if a dimension does not divide evenly, the last shards are padded, and
``indices`` tells which part of each is inside the array.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.arrays.memories import kind_of
from blufunc.core.ir import source
from blufunc.core.ir.avals import DEVICE
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh, index_along
from blufunc.parallel.mesh.spec import UNCONSTRAINED, PartitionSpec, names_of

Index = tuple[slice, ...]


class Sharding(ABC):
    """The layout of an array on devices, and the kind of their memory.

    Attributes:
      memory_kind: ``"device"``, or ``"pinned_host"``: page-locked memory of the host.
    """

    __slots__ = ()
    memory_kind: str

    @property
    @abstractmethod
    def device_set(self) -> set[backend.Device]:
        """The devices that hold a shard of the array."""

    @property
    def addressable_devices(self) -> set[backend.Device]:
        """The devices of this process among them."""
        return {d for d in self.device_set if d.process is None}

    @property
    def is_fully_addressable(self) -> bool:
        """True if all devices belong to this process."""
        return all(d.process is None for d in self.device_set)

    @property
    @abstractmethod
    def is_fully_replicated(self) -> bool:
        """True if each device holds the whole array."""

    @abstractmethod
    def with_memory_kind(self, kind: str) -> Sharding:
        """The same layout in another kind of memory."""

    @abstractmethod
    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of each shard of an array of shape ``global_shape``."""

    @abstractmethod
    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[backend.Device, Index]:
        """The index of each device's shard in the array."""

    def is_equivalent_to(self, other: Sharding, ndim: int) -> bool:
        """True if each device has the same part of an array, in the same memory.

        Args:
          other: a sharding.
          ndim: the number of dimensions of the array.
        """
        if self.device_set != other.device_set or self.memory_kind != other.memory_kind:
            return False
        pending = [getattr(s, "spec", PartitionSpec()).unreduced for s in (self, other)]
        shape = (len(self.device_set),) * ndim  # each part of a dimension divides the number of devices
        return pending[0] == pending[1] and self.devices_indices_map(shape) == other.devices_indices_map(
            shape
        )


@dataclass(frozen=True)
class SingleDeviceSharding(Sharding):
    """The whole array on one device.

    Raises:
      ValueRangeError: there is no memory of that kind.
    """

    device: backend.Device
    _: KW_ONLY
    memory_kind: str = DEVICE

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_kind", kind_of(self.memory_kind, "SingleDeviceSharding"))

    def with_memory_kind(self, kind: str) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.device, memory_kind=kind)

    @property
    def device_set(self) -> set[backend.Device]:
        return {self.device}

    @property
    def is_fully_replicated(self) -> bool:
        return True

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(global_shape)

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[backend.Device, Index]:
        return {self.device: tuple(slice(0, n) for n in global_shape)}

    def __repr__(self) -> str:
        return f"SingleDeviceSharding({self.device}{_in_memory(self.memory_kind)})"


class NamedSharding(Sharding):
    """The dimensions of an array sharded along named axes of a mesh.

    Raises:
      ArgumentError: an argument is not a mesh, or not a partition spec.
      ShardingError: the spec names an axis that the mesh does not have.
      ValueRangeError: there is no memory of that kind.

    Attributes:
      mesh, spec, memory_kind: the arguments; the default memory is that of the devices.
    """

    __slots__ = ("_hash", "memory_kind", "mesh", "spec")

    mesh: Mesh | AbstractMesh
    spec: PartitionSpec

    def __init__(self, mesh: Mesh | AbstractMesh, spec: PartitionSpec, *, memory_kind: str | None = None):
        for value, kind, what in ((mesh, (Mesh, AbstractMesh), "mesh"), (spec, PartitionSpec, "spec")):
            if not isinstance(value, kind):
                raise errors.ArgumentError(
                    f"NamedSharding takes a {what}, not {value!r:.60}.",
                    where=source.here(),
                    fix="NamedSharding(mesh, P('x'))",
                )
        self.mesh, self.spec = mesh, spec
        self.memory_kind = kind_of(memory_kind, "NamedSharding")
        self._hash = hash((mesh, spec, self.memory_kind))
        for name in (*spec.axes, *sorted(spec.unreduced | spec.reduced)):
            if name not in mesh.shape:
                raise errors.ShardingError(
                    f"{spec} names the axis {name!r}, which the mesh ({mesh}) does not have.",
                    where=source.here(),
                    fix="use an axis of the mesh, or make a mesh that has this one",
                )

    @property
    def device_set(self) -> set[backend.Device]:
        return set(self.concrete_mesh.device_list)

    @property
    def is_fully_replicated(self) -> bool:
        """True if each device holds the whole array, and its reduced value."""
        spec = self.spec
        return all(self.mesh.shape[name] == 1 for name in (*spec.axes, *spec.unreduced))

    def parts(self, ndim: int) -> tuple[int, ...]:
        """The number of parts along each of ``ndim`` dimensions.

        Raises:
          ShardingError: the spec has more entries, or leaves some to the compiler.
        """
        entries = self.spec.for_rank(ndim)
        if UNCONSTRAINED in entries:
            raise errors.ShardingError(
                f"{self.spec} is not the sharding of an array.",
                where=source.here(),
                why="only a constraint can leave dimensions to the compiler.",
                fix="use None for a dimension that is whole",
            )
        return tuple(self.mesh.size_of(names_of(entry)) for entry in entries)

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of each shard, padding included: dimensions / parts, rounded up."""
        return tuple(-(-n // k) for n, k in zip(global_shape, self.parts(len(global_shape)), strict=True))

    def is_even(self, global_shape: Sequence[int]) -> bool:
        """True if no shard of an array of this shape is padded."""
        return all(n % k == 0 for n, k in zip(global_shape, self.parts(len(global_shape)), strict=True))

    def position(self, rank: int, ndim: int) -> tuple[int, ...]:
        """The index of a rank's part along each of ``ndim`` dimensions."""
        return tuple(self._along(names_of(entry), rank) for entry in self.spec.for_rank(ndim))

    def _along(self, axes: Sequence[str], rank: int) -> int:
        return index_along(axes, [self.mesh.shape[a] for a in axes], self.mesh.coordinates(rank))

    def indices(self, global_shape: Sequence[int]) -> list[Index]:
        """The index of each rank's shard in an array, without padding; may be empty."""
        sizes = self.shard_shape(global_shape)
        return [
            tuple(
                slice(min(i * size, n), min((i + 1) * size, n))
                for i, size, n in zip(self.position(rank, len(sizes)), sizes, global_shape, strict=True)
            )
            for rank in range(self.mesh.size)
        ]

    def replica_ids(self) -> list[int]:
        """For each rank, the number of preceding ranks with the same shard."""
        others = [name for name in self.mesh.axis_names if name not in self.spec.axes]
        return [self._along(others, rank) for rank in range(self.mesh.size)]

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[backend.Device, Index]:
        return dict(zip(self.concrete_mesh.device_list, self.indices(global_shape), strict=True))

    def addressable_devices_indices_map(self, global_shape: Sequence[int]) -> dict[backend.Device, Index]:
        """The same for the devices of this process."""
        return {d: i for d, i in self.devices_indices_map(global_shape).items() if d.process is None}

    def with_spec(self, spec: PartitionSpec) -> NamedSharding:
        """The same mesh and memory with another spec."""
        return NamedSharding(self.mesh, spec, memory_kind=self.memory_kind)

    def with_memory_kind(self, kind: str | None) -> NamedSharding:
        """The same layout in another kind of memory; None: the default one."""
        if kind_of(kind, "with_memory_kind") == self.memory_kind:
            return self
        return NamedSharding(self.mesh, self.spec, memory_kind=kind)

    @property
    def concrete_mesh(self) -> Mesh:
        """The mesh; ShardingError if it is abstract."""
        if isinstance(self.mesh, Mesh):
            return self.mesh
        raise errors.ShardingError(
            f"{self} has no devices.", where=source.here(), fix="use a mesh of make_mesh, not an AbstractMesh"
        )

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, NamedSharding)
            and self._hash == other._hash
            and self.spec == other.spec
            and self.mesh == other.mesh
            and self.memory_kind == other.memory_kind
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"NamedSharding(mesh({self.mesh}), {self.spec}{_in_memory(self.memory_kind)})"

    def __reduce__(self):
        return _named, (self.mesh, self.spec, self.memory_kind)  # the hash is valid in this process only


def _named(mesh: Mesh | AbstractMesh, spec: PartitionSpec, memory_kind: str) -> NamedSharding:
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def _in_memory(kind: str) -> str:
    return "" if kind == DEVICE else f", memory_kind={kind!r}"


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding of a value that is whole on each device of a mesh."""
    return NamedSharding(mesh, PartitionSpec())
