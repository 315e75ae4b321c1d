"""Specs for whole pytrees: what users write for arguments and results, as one sharding for each leaf.

Parallel, at the front door of ``shard``, ``reshard`` and ``jit(in_shardings=)``. In comes a prefix of a pytree that
holds specs, shardings and None, out comes a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.pytree import paths, tree
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh, current_mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec

Shardings = list[NamedSharding | None]


def is_spec(x: Any) -> bool:
    """Whether it is a leaf of a tree of specs."""
    return x is None or isinstance(x, (PartitionSpec, NamedSharding))


def shardings_of(prefix: Any, whole: Any, mesh: Mesh | AbstractMesh | None, what: str) -> Shardings:
    """The sharding of each leaf of ``whole``, None where nothing is said.

    Args:
      prefix: a pytree prefix of ``whole`` of ``PartitionSpec``s, ``NamedSharding``s and None.
      whole: any pytree.
      mesh: that of specs; the current one (``with mesh:``) if None.
      what: what the user calls ``prefix``.
    Raises:
      ArgumentError: something else is in ``prefix``, or a spec has no mesh.
      ShardingError: a spec names an axis that the mesh has not.
      TreeError: it is no prefix.
    """
    try:
        found = tree.broadcast_prefix(prefix, whole, is_leaf=is_spec)
    except errors.TreeError as e:
        raise errors.TreeError(
            f"{what} is no pytree prefix of what it is for.",
            where=source.here(),
            why=e.why or e.what,
            fix="one spec for each leaf, or one for all below it; None where nothing is to be said",
        ) from None
    return [_sharding(given, mesh, what) for given in found]


def _sharding(given: Any, mesh: Mesh | AbstractMesh | None, what: str) -> NamedSharding | None:
    if given is None or isinstance(given, NamedSharding):
        return given
    if not isinstance(given, PartitionSpec):
        raise errors.ArgumentError(
            f"{what} holds {given!r:.60}.",
            where=source.here(),
            fix="P('x', None), NamedSharding(mesh, P('x', None)) or None; bf.device_put moves to a single device",
        )
    on = mesh or current_mesh()
    if on is None:
        raise errors.ArgumentError(
            f"{what} holds {given}, which has no mesh.",
            where=source.here(),
            fix="NamedSharding(mesh, spec), or do it `with mesh:`",
        )
    return NamedSharding(on, given)


def check_ranks(shardings: Shardings, avals: Sequence[ShapedArray], treedef: tree.TreeDef, what: str) -> None:
    """Raise ShardingError, with the path of the leaf, where a spec has more entries than its value has dimensions."""
    for i, (sharding, aval) in enumerate(zip(shardings, avals, strict=True)):
        if sharding is None:
            continue
        try:
            sharding.parts(aval.ndim)
        except errors.ShardingError as e:
            path = paths.leaf_paths(treedef)[i]
            raise errors.ShardingError(
                f"{what}{path}".rstrip() + f": {e.what}", where=source.here(), fix=e.fix
            ) from None
