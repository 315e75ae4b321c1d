"""``constrain``: sharding annotations of values inside a program.

Parallel, stages 1 to 3. In: a value and a spec. Out: an identity equation, whose derivative constrains tangents and
cotangents in the same way. ``partition/propagate.py`` starts from these equations, and ``partition/partition.py``
removes them. A single-device program ignores them.
"""

from __future__ import annotations

from typing import Any, TypeVar

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.primitives.linear_ops import Linear
from blufunc.core.primitives.sharding import elementwise
from blufunc.core.pytree import tree
from blufunc.parallel.mesh.mesh import AxisSizes, current_mesh, manual_mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import UNCONSTRAINED, PartitionSpec

T = TypeVar("T")


class ShardingConstraint(Linear):
    """The operand with sharding ``spec``; propagation chooses ``free`` dimensions."""

    name, kind, identity = "sharding_constraint", "elementwise", True
    linear, shard, any_memory = (), staticmethod(elementwise), True

    def impl(self, x, *, spec, mesh, free):
        return x

    def abstract(self, x, *, spec, mesh, free):
        return x

    def sharding_of(self, n, *, spec, mesh, free):
        return None if free or mesh is None else NamedSharding(mesh, spec)

    def transpose(self, ct, x, *, spec, mesh, free):
        # the cotangent of an unreduced value is replicated
        x.add(self.bind(ct, spec=PartitionSpec(*spec), mesh=mesh, free=free))

    def batch(self, axis, args, dims, *, spec, mesh, free):
        (x,), (d,) = args, dims
        entries = list(spec.for_rank(x.aval.ndim - 1))
        entries.insert(d, None)
        free = (*[f + (f >= d) for f in free], d)
        return self.bind(x, spec=spec.with_entries(entries), mesh=mesh, free=tuple(sorted(free))), d


sharding_constraint_p = ShardingConstraint()


def constrain(x: T, spec: Any) -> T:
    """Annotate ``x`` with a sharding, for programs that are partitioned among devices.

    Args:
      x: an array, or a pytree of arrays.
      spec: a ``PartitionSpec`` for the current mesh (``with mesh:``) or the mesh of the partitioned program; a
        ``NamedSharding``; or a pytree of these like ``x``. Sums over ``unreduced`` axes may stay pending here: the
        consumer reduces them, by a reduce-scatter where it is sharded along these axes. So each device can add up
        gradients of many microbatches before one reduction. ``P.UNCONSTRAINED`` leaves a dimension to the compiler.
    Raises:
      ArgumentError: ``spec`` is something else.
      ShardingError: the spec has more entries than ``x`` has dimensions, names an axis that the mesh lacks, or has
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


def _constrain(x: Any, to: PartitionSpec | NamedSharding) -> Any:
    x = lift(x, "x")
    mesh: AxisSizes | None
    manual = manual_mesh()
    if isinstance(to, NamedSharding):
        spec, mesh = to.spec, to.mesh
    else:
        spec, mesh = to, manual.mesh if manual is not None else current_mesh()
    spec = spec.for_rank(x.aval.ndim)
    if spec.reduced:
        raise errors.ShardingError(
            f"constrain takes no reduced axes: {spec}.",
            where=source.here(),
            why="only in shard_map may the type of a cotangent differ from its primal's.",
            fix="leave them out",
        )
    free = tuple([i for i, entry in enumerate(spec) if entry is UNCONSTRAINED])
    if free:
        spec = spec.with_entries([None if entry is UNCONSTRAINED else entry for entry in spec])
    if manual is not None and (wrong := [a for a in (*spec.axes, *spec.unreduced) if a in manual.axes]):
        raise errors.ShardingError(
            f"the annotation {spec} names the axis {wrong[0]!r}, which is manual in the shard_map around it.",
            where=source.here(),
            why="in its function a value is the shard along that axis.",
            fix="name axes that its axis_names leave out",
        )
    if mesh is not None:
        mesh = NamedSharding(
            (mesh if manual is None else manual.mesh).abstract, spec
        ).mesh  # checks the names of axes
    return sharding_constraint_p.bind(x, spec=spec, mesh=mesh, free=free)
