"""Specs for whole pytrees, flattened to one sharding per leaf.

Parallel, called by ``shard``, ``reshard`` and ``jit(in_shardings=)``. In: a pytree prefix of specs, shardings and None.
Out: a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.pytree import paths, tree
from blufunc.parallel.mesh.mesh import AbstractMesh, AxisSizes, Mesh, current_mesh
from blufunc.parallel.mesh.sharding import NamedSharding, SingleDeviceSharding
from blufunc.parallel.mesh.spec import PartitionSpec

Shardings = list[Any]
"""For each leaf a ``NamedSharding``, None or, if allowed, another sharding."""


def is_spec(x: Any) -> bool:
    """True for a leaf of a tree of specs."""
    return x is None or isinstance(x, (PartitionSpec, NamedSharding, SingleDeviceSharding))


def shardings_of(
    prefix: Any, whole: Any, mesh: Mesh | AbstractMesh | None, what: str, alone: bool = False
) -> Shardings:
    """The sharding of each leaf of ``whole``, None where unspecified.

    Args:
      prefix: a pytree prefix of ``whole`` of ``PartitionSpec``s, ``NamedSharding``s and None.
      whole: any pytree.
      mesh: the mesh of specs; None for the current one (``with mesh:``).
      what: the user's name for ``prefix``.
      alone: whether ``SingleDeviceSharding``s are allowed too; default False.
    Raises:
      ArgumentError: ``prefix`` holds something else, or a spec has no mesh.
      ShardingError: a spec names an axis that the mesh does not have.
      TreeError: ``prefix`` is not a prefix.
    """
    return [
        entry if alone and isinstance(entry, SingleDeviceSharding) else _sharding(entry, mesh, what)
        for entry in broadcast(prefix, whole, what, "None where unspecified")
    ]


def broadcast(prefix: Any, whole: Any, what: str, default: str) -> list[Any]:
    """The entry of ``prefix`` for each leaf of ``whole``; TreeError if there is none."""
    try:
        return tree.broadcast_prefix(prefix, whole, is_leaf=is_spec)
    except errors.TreeError as e:
        raise errors.TreeError(
            f"{what} is not a pytree prefix of the values it is for.",
            where=source.here(),
            why=e.why or e.what,
            fix=f"one spec for each leaf, or one for all below it; {default}",
        ) from None


def _sharding(entry: Any, mesh: Mesh | AbstractMesh | None, what: str) -> NamedSharding | None:
    if entry is None or isinstance(entry, NamedSharding):
        return entry
    if not isinstance(entry, PartitionSpec):
        raise errors.ArgumentError(
            f"{what} holds {entry!r:.60}.",
            where=source.here(),
            fix="P('x', None), NamedSharding(mesh, P('x', None)) or None; bf.device_put moves to a single device",
        )
    return on_mesh(entry, mesh or current_mesh(), f"{what} holds {entry}, which")


def on_mesh(spec: PartitionSpec, mesh: Mesh | AbstractMesh | None, subject: str) -> NamedSharding:
    """``spec`` on ``mesh``; ArgumentError, about ``subject``, if there is none."""
    if mesh is None:
        raise errors.ArgumentError(
            f"{subject} has no mesh.",
            where=source.here(),
            fix="NamedSharding(mesh, spec), or a `with mesh:` block",
        )
    return NamedSharding(mesh, spec)


def map_sharded(how: Callable, x: Any, shardings: Shardings, what: str) -> Any:
    """Apply ``how(leaf, sharding)`` to the leaves of ``x`` that have a sharding."""
    leaves, treedef = tree.flatten(x)
    values = [lift(leaf, what) for leaf in leaves]
    check_ranks(shardings, [v.aval for v in values], treedef, what)
    laid = [v if s is None else how(v, s) for v, s in zip(values, shardings, strict=True)]
    return tree.unflatten(treedef, laid)


def check_ranks(shardings: Shardings, avals: Sequence[ShapedArray], treedef: tree.TreeDef, what: str) -> None:
    """Raise ShardingError, with the leaf's path, if a spec has too many entries."""
    for i, (sharding, aval) in enumerate(zip(shardings, avals, strict=True)):
        if isinstance(sharding, NamedSharding):
            name = lambda i=i: f"{what}{paths.leaf_paths(treedef)[i]}".rstrip()
            check_rank(sharding.mesh, sharding.spec, aval.ndim, name)


def check_rank(mesh: AxisSizes, spec: PartitionSpec, ndim: int, name: Callable[[], str]) -> None:
    """Raise ShardingError, with the name of the value, if a spec does not fit."""
    try:
        NamedSharding(mesh, spec).parts(ndim)  # type: ignore[arg-type]
    except errors.ShardingError as e:
        raise errors.ShardingError(f"{name()}: {e.what}", where=source.here(), why=e.why, fix=e.fix) from None
