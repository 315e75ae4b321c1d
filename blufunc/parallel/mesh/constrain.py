"""``constrain``: the user says how a value inside of a program lies on the mesh.

Parallel, stages 1 to 3. One equation, the identity on values; its derivative constrains tangents and cotangents alike.
``partition/propagate.py`` starts from these equations, and ``partition/partition.py`` removes them. A program for one
device has no use for them, and runs as if they were not there.
"""

from __future__ import annotations

from typing import Any

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.primitives.linear_ops import Linear
from blufunc.core.primitives.sharding import elementwise
from blufunc.core.pytree import tree
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh, current_mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec


class ShardingConstraint(Linear):
    """The operand, laid out by ``spec``; dimensions in ``free`` as propagation finds best."""

    name, kind, identity = "sharding_constraint", "elementwise", True
    linear, shard = (), staticmethod(elementwise)

    def impl(self, x, *, spec, mesh, free):
        return x

    def abstract(self, x, *, spec, mesh, free):
        return x

    def transpose(self, ct, x, *, spec, mesh, free):
        # the cotangent of a sum that is owed is the same everywhere
        x.add(self.bind(ct, spec=PartitionSpec(*spec), mesh=mesh, free=free))

    def batch(self, axis, args, dims, *, spec, mesh, free):
        (x,), (d,) = args, dims
        entries = list(spec.for_rank(x.aval.ndim - 1))
        entries.insert(d, None)
        free = (*[f + (f >= d) for f in free], d)
        return self.bind(x, spec=spec.with_entries(entries), mesh=mesh, free=tuple(sorted(free))), d


sharding_constraint_p = ShardingConstraint()


def constrain(x: Any, spec: Any) -> Any:
    """``x`` as it is; where the program is divided among devices, laid out by ``spec`` here.

    Args:
      x: an array, or a pytree of them.
      spec: a ``PartitionSpec`` for the current mesh (``with mesh:``) or the one that the program is partitioned for;
        a ``NamedSharding``; or a pytree of these like ``x``. Sums over ``unreduced`` axes may stay owed here: what
        reads the result settles them, by a reduce-scatter where it is divided along these. So each device adds up
        whole gradients of many microbatches, and they are exchanged once.
    Raises:
      ArgumentError: ``spec`` is something else.
      ShardingError: the spec has more entries than ``x`` dimensions, names an axis that the mesh has not, or has
        ``reduced`` axes.
    """
    if isinstance(spec, (PartitionSpec, NamedSharding)):
        return tree.map(lambda leaf: _constrain(leaf, spec), x)
    is_spec = lambda s: isinstance(s, (PartitionSpec, NamedSharding))
    specs, treedef = tree.flatten(spec, is_leaf=is_spec)
    leaves, of_x = tree.flatten(x)
    if len(specs) != len(leaves) or not all(map(is_spec, specs)):
        raise errors.ArgumentError(
            f"constrain takes a partition spec, or a tree of them like {of_x}, not {treedef}.",
            where=source.here(),
            fix="constrain(x, P('x', None))",
        )
    return tree.unflatten(of_x, [_constrain(leaf, s) for leaf, s in zip(leaves, specs, strict=True)])


with_sharding_constraint = constrain


def _constrain(x: Any, given: PartitionSpec | NamedSharding) -> Any:
    x = lift(x, "x")
    mesh: Mesh | AbstractMesh | None
    spec, mesh = (given.spec, given.mesh) if isinstance(given, NamedSharding) else (given, current_mesh())
    spec = spec.for_rank(x.aval.ndim)
    if spec.reduced:
        raise errors.ShardingError(
            f"constrain takes no reduced axes: {spec}.",
            where=source.here(),
            why="only in shard_map a value has a cotangent of another type than its own.",
            fix="leave them out",
        )
    if mesh is not None:
        mesh = NamedSharding(mesh.abstract, spec).mesh  # checks the names of axes
    return sharding_constraint_p.bind(x, spec=spec, mesh=mesh, free=())
