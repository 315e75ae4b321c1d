"""Meshes and shardings under the names of JAX's ``sharding``.

Face.
"""

from blufunc.parallel.mesh.mesh import AbstractMesh, AxisType, Mesh, make_mesh
from blufunc.parallel.mesh.sharding import NamedSharding, Sharding, SingleDeviceSharding
from blufunc.parallel.mesh.spec import P, PartitionSpec
from blufunc.parallel.programs.array_shards import Shard
from blufunc.parallel.programs.axis_regions import auto_axes, explicit_axes
from blufunc.parallel.programs.reshard import reshard

__all__ = [
    "AbstractMesh",
    "AxisType",
    "Mesh",
    "NamedSharding",
    "P",
    "PartitionSpec",
    "Shard",
    "Sharding",
    "SingleDeviceSharding",
    "auto_axes",
    "explicit_axes",
    "make_mesh",
    "reshard",
]
