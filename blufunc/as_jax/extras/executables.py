"""``jax.experimental.serialize_executable``: compiled functions as bytes.

Under the face ``as_jax``. The bytes hold the jaxpr, as those of ``export`` do; a process compiles it when it loads it,
or takes the program from the cache on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blufunc import export
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import ShapeDtypeStruct
from blufunc.transforms.staging.stages import Compiled

__all__ = ["deserialize_and_load", "serialize"]


def serialize(compiled: Compiled) -> tuple[bytes, Any, Any]:
    """A compiled function as bytes, and the structures of its arguments and results."""
    traced = compiled.traced
    types = [ShapeDtypeStruct(a.shape, a.dtype) for a in tree.leaves(traced.in_avals)]
    args, kwargs = tree.unflatten(traced.in_tree, types)
    exported = export.export(traced.owner)(*args, **kwargs)
    return bytes(exported.serialize()), traced.in_tree, compiled.out_tree


def deserialize_and_load(
    serialized: bytes, in_tree: Any, out_tree: Any, backend: Any = None, execution_devices: Any = None
) -> Callable:
    """The function of these bytes, which runs where its arguments are."""
    return export.deserialize(serialized).call
