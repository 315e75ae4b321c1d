"""Names of ``jax.sharding`` and ``mesh_utils``: the mesh in force, device arrays.

Under the face ``as_jax``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.contexts import set_mesh
from blufunc.core.ir.avals import DEVICE, ManualAxisType
from blufunc.parallel.mesh.axis_regions import region
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh, current_mesh, manual_mesh
from blufunc.parallel.mesh.sharding import SingleDeviceSharding
from blufunc.transforms.staging.transfer import devices as all_devices

__all__ = [
    "AbstractDevice",
    "ManualAxisType",
    "create_device_mesh",
    "create_hybrid_device_mesh",
    "device_kind_handler_dict",
    "get_abstract_mesh",
    "get_mesh",
    "make_single_device_sharding",
    "set_mesh",
    "use_abstract_mesh",
]


@dataclass(frozen=True)
class AbstractDevice:
    """The kind of a device, without the device.

    Attributes:
      device_kind: its name, such as ``"NVIDIA H100"``.
      num_cores: the number of its cores that programs address; None on a GPU.
      platform: ``"cpu"`` or ``"gpu"``.
    """

    device_kind: str
    num_cores: int | None
    platform: str


def make_single_device_sharding(device: Any, *, memory_kind: str | None = None) -> SingleDeviceSharding:
    """The layout of an array that one device has."""
    return SingleDeviceSharding(device, memory_kind=memory_kind or DEVICE)


class use_abstract_mesh:
    """A block in which a mesh's axes are named, as ``set_mesh`` names them.

    The mesh in force must have these axes, as programs run on its devices.
    """

    def __init__(self, mesh: AbstractMesh):
        self.mesh = mesh

    def __enter__(self) -> AbstractMesh:
        found = current_mesh()
        if self.mesh.axis_names and (found is None or found.shape != self.mesh.shape):
            raise errors.ShardingError(
                f"use_abstract_mesh({self.mesh}) where the mesh in force is {found}.",
                why="programs run on the devices of the mesh in force.",
                fix="with jax.set_mesh(mesh): ...",
            )
        return self.mesh

    def __exit__(self, *exc: object) -> None:
        """The mesh in force is as before."""


device_kind_handler_dict: dict[str, Callable] = {}
"""Functions that arrange the devices of a kind: here ranks are in order."""


def create_hybrid_device_mesh(
    mesh_shape: Sequence[int],
    dcn_mesh_shape: Sequence[int],
    devices: Sequence[Any] | None = None,
    *,
    process_is_granule: bool = False,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = False,
) -> np.ndarray:
    """Devices as an array whose axes are those of hosts times those in a host.

    Args:
      mesh_shape: the devices of a host along each axis.
      dcn_mesh_shape: the hosts along each axis.
    Raises:
      ShardingError: the hosts are not as many, or a host has another number of devices.
    """
    found = list(all_devices() if devices is None else devices)
    ranks = list(dict.fromkeys(d.process_index for d in found))
    hosts = [[d for d in found if d.process_index == rank] for rank in sorted(ranks)]
    if len(hosts) != math.prod(dcn_mesh_shape) or len(mesh_shape) != len(dcn_mesh_shape):
        raise errors.ShardingError(
            f"create_hybrid_device_mesh: {len(hosts)} processes have no shape {tuple(dcn_mesh_shape)}.",
            fix="one factor for each axis of mesh_shape, whose product is the number of processes",
        )
    blocks = np.empty(len(hosts), object)
    blocks[:] = [create_device_mesh(mesh_shape, h) for h in hosts]
    return np.block(blocks.reshape(dcn_mesh_shape).tolist())


def get_mesh() -> Mesh | AbstractMesh:
    """The mesh that ``set_mesh`` or a ``with`` block made current, or an empty one."""
    return current_mesh() or AbstractMesh((), ())


def get_abstract_mesh() -> AbstractMesh:
    """The axes of the current mesh, or of that of the ``shard_map``; or none."""
    manual = manual_mesh()
    if manual is not None:
        return manual.abstract
    if (here := region()) is not None:
        return here.mesh
    mesh = current_mesh()
    return AbstractMesh((), ()) if mesh is None else mesh.abstract


def create_device_mesh(
    mesh_shape: Sequence[int], devices: Sequence[Any] | None = None, **options: Any
) -> np.ndarray:
    """The devices as an array of a shape, in their order."""
    found = list(all_devices() if devices is None else devices)
    if math.prod(mesh_shape) != len(found):
        raise errors.ShardingError(
            f"create_device_mesh: a mesh of {tuple(mesh_shape)} has {math.prod(mesh_shape)} devices, not {len(found)}.",
            fix="pass devices=, as many as the mesh has",
        )
    mesh = np.empty(len(found), object)
    mesh[:] = found
    return mesh.reshape(mesh_shape)
