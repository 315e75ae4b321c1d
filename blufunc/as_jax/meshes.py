"""Names of ``jax.sharding`` and ``mesh_utils``: the mesh in force, device arrays.

Under the face ``as_jax``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh, current_mesh
from blufunc.transforms.staging.transfer import devices as all_devices

__all__ = ["create_device_mesh", "get_abstract_mesh", "get_mesh"]


def get_mesh() -> Mesh | AbstractMesh:
    """The mesh that ``set_mesh`` or a ``with`` block made current, or an empty one."""
    return current_mesh() or AbstractMesh((), ())


def get_abstract_mesh() -> AbstractMesh:
    """The axes of the current mesh, or none."""
    mesh = current_mesh()
    if mesh is None:
        return AbstractMesh((), ())
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)


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
