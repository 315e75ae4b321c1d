"""``reshard``: move a value to another sharding, eagerly or inside a program.

Parallel, stages 1 to 3. In: a value and a sharding. Out: the value there. Unlike ``constrain``, which annotates a
partitioned program, ``reshard`` makes a program run on its mesh, wherever the arguments are; eagerly it moves arrays.
"""

from __future__ import annotations

from typing import Any, TypeVar

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import source
from blufunc.core.primitives.primitive import concrete
from blufunc.parallel.mesh.constrain import ShardingConstraint, sharding_constraint_p
from blufunc.parallel.mesh.mesh import Mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.mesh.spec_trees import map_sharded, shardings_of
from blufunc.parallel.programs.mesh_device import device_on
from blufunc.parallel.programs.placement import device_put
from blufunc.parallel.runtime.sharded_buffer import mesh_of

T = TypeVar("T")


class _Reshard(ShardingConstraint):
    """Move the operand to ``mesh``; propagation chooses ``free`` dimensions."""

    name = "reshard"

    def home(self, *, spec, mesh, free) -> backend.Device | None:
        return device_on(mesh) if isinstance(mesh, Mesh) else None

    def evaluate(self, args, params):
        (x,) = map(concrete, args)
        mesh = params["mesh"]
        if isinstance(mesh, Mesh) and x.device != device_on(mesh):
            return device_put(x, NamedSharding(mesh, params["spec"]))
        return super().evaluate([x], params)

    def transpose(self, ct, x, *, spec, mesh, free):
        # the primal's layout is unknown here, so the cotangent adopts the layout of its consumers
        everywhere = tuple(range(ct.aval.ndim))
        x.add(sharding_constraint_p.bind(ct, spec=PartitionSpec(), mesh=mesh, free=everywhere))


reshard_p = _Reshard()


def reshard(x: T, sharding: Any) -> T:
    """Move ``x`` to ``sharding``: now, or by an equation of the traced program.

    The cotangent of the result adopts the layout of the operations it flows into: the gradient of a parameter that was
    gathered here is scattered where it is added to the parameter's optimizer state.

    Args:
      x: a pytree of arrays.
      sharding: a ``NamedSharding``, or a ``PartitionSpec`` on the current mesh (``with mesh:``); or a pytree prefix of
        ``x`` of these, and None for leaves to leave in place.
    Raises:
      ArgumentError: ``sharding`` is something else, or a spec without a mesh.
      ShardingError: a spec has more entries than its array has dimensions, unreduced or reduced axes, or an axis that
        the mesh does not have; or an eager array is moved to an abstract mesh.
      TreeError: ``sharding`` is not a pytree prefix of ``x``.
    """
    return map_sharded(_moved, x, shardings_of(sharding, x, None, "the sharding of reshard"), "x")


def _moved(x: Any, sharding: NamedSharding) -> Any:
    if isinstance(x, ConcreteArray):
        mesh_of(sharding)  # raises for an abstract mesh
    spec = sharding.spec.for_rank(x.aval.ndim)
    if spec.unreduced or spec.reduced:
        raise errors.ShardingError(
            f"reshard takes no unreduced or reduced axes: {spec}.",
            where=source.here(),
            fix="leave them out: sums stay unreduced while their consumers are linear",
        )
    return reshard_p.bind(x, spec=spec, mesh=sharding.mesh, free=())
