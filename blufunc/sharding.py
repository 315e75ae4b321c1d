"""Meshes and shardings under the names of JAX's ``sharding``.

Face.
"""

from blufunc.parallel.array_shards import Shard
from blufunc.parallel.mesh import AbstractMesh, AxisType, Mesh, make_mesh
from blufunc.parallel.reshard import reshard
from blufunc.parallel.sharding import NamedSharding, Sharding, SingleDeviceSharding
from blufunc.parallel.spec import P, PartitionSpec

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
    "make_mesh",
    "reshard",
]
