"""Placement: which devices of a mesh hold which part of a model.

Follows ``weights.py``. In: a configuration and a mesh. Out: arguments of ``weights.load``. The axis "model" shards
heads, hidden units and the vocabulary (Shoeybi et al., arXiv:1909.08053); "fsdp" the other dimension of each matrix,
which is gathered when it is used. The compiler inserts the communication.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import blufunc as bf
from blufunc import P, tree
from blufunc.errors import DataError
from examples.llm import weights
from examples.llm.config import Config

AXES = ("fsdp", "model")

# By the last two keys of the path: the mesh axes of each dimension.
_SPECS = {
    "embed": ("model", "fsdp"),
    "positions": (None, "fsdp"),
    **dict.fromkeys(("head", "qkv", "gate", "up"), ("model", "fsdp")),
    **dict.fromkeys(("out", "down"), ("fsdp", "model")),
}


def specs(config: Config, axes: tuple[str, ...] = AXES) -> dict:
    """A tree like the parameters, of ``PartitionSpec``.

    Norms, and biases of what is summed over devices, are replicated.
    """

    def spec(path: tuple[Any, ...], leaf: Any) -> bf.PartitionSpec:
        keys = [str(getattr(key, "key", "")) for key in path]
        along = _SPECS.get(keys[0]) or _SPECS.get(keys[-2], (None, None))
        if keys[0] not in _SPECS and keys[-1] == "bias":
            along = along[:1] if along[0] == "model" else (None,)
        return P(*[axis if axis in axes else None for axis in along[: leaf.ndim]])

    return tree.map_with_path(spec, weights.types(config))


def placed(config: Config, mesh: bf.Mesh) -> tuple[dict, Config]:
    """A tree of ``NamedSharding``, and the configuration with groups by device.

    Raises:
      DataError: the mesh has other axes, or one does not divide the model.
    """
    sizes = dict(mesh.shape)
    where = ", ".join(f"{axis}={n}" for axis, n in sizes.items())
    if others := sorted(sizes.keys() - set(AXES)):
        raise DataError(
            f"{others[0]!r} is no axis that a model is divided along",
            where=where,
            fix=f"use {' and '.join(AXES)}",
        )
    for axis, what, size in (
        ("model", "key heads", config.key_heads),
        ("model", "hidden units", config.hidden),
        ("model", "tokens of a vocabulary", config.vocab),
        ("fsdp", "features", config.width),
    ):
        if size % sizes.get(axis, 1):
            raise DataError(
                f"{size} {what} cannot be divided among {sizes[axis]} devices",
                where=where,
                why=f"the axis {axis!r} divides them",
                fix="use fewer devices along it, or the other axis",
            )
    config = dataclasses.replace(config, groups=sizes.get("model", 1))
    is_spec = lambda x: isinstance(x, bf.PartitionSpec)
    return tree.map(lambda s: bf.NamedSharding(mesh, s), specs(config, tuple(sizes)), is_leaf=is_spec), config
