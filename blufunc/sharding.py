"""Meshes and shardings under the names of JAX's ``sharding``.

Face.
"""

from blufunc.parallel.array_shards import Shard
from blufunc.parallel.mesh import AbstractMesh, Mesh, make_mesh
from blufunc.parallel.sharding import NamedSharding, Sharding, SingleDeviceSharding
from blufunc.parallel.spec import P, PartitionSpec

__all__ = [
    "AbstractMesh",
    "Mesh",
    "NamedSharding",
    "P",
    "PartitionSpec",
    "Shard",
    "Sharding",
    "SingleDeviceSharding",
    "make_mesh",
]
