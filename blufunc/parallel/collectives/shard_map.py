"""``shard_map``: a function of shards that every rank of a mesh runs.

Parallel, stages 1, 2 and 8. In: a function of local shapes, and the specs of its arguments and results. Out: one
``shard_map`` equation on global values (``shard_map_equation.py``), which holds the local jaxpr with typed collectives
(``shard_map_body.py``). This module has the function of users, and checks what they give: the mesh, the manual axes and
the specs of arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar, overload

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.pytree import tree
from blufunc.parallel.collectives.primitives import equations
from blufunc.parallel.collectives.shard_map_body import Function, broadcast_specs, check_manual, nested
from blufunc.parallel.collectives.shard_map_equation import shard_map_p
from blufunc.parallel.mesh.mesh import AbstractMesh, AxisSizes, ManualMesh, Mesh, current_mesh, manual_mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec, names_of
from blufunc.parallel.mesh.spec_trees import check_rank
from blufunc.transforms.arguments import FlatFunction, as_values, check_callable, labels_of, name_of

P = ParamSpec("P")
R = TypeVar("R")


@overload
def shard_map(
    fun: Callable[P, R],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Any = None,
    out_specs: Any,
    check_vma: bool = True,
    axis_names: Collection[str] | None = None,
) -> Callable[P, R]: ...
@overload
def shard_map(
    fun: None = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Any = None,
    out_specs: Any,
    check_vma: bool = True,
    axis_names: Collection[str] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def shard_map(
    fun: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Any = None,
    out_specs: Any,
    check_vma: bool = True,
    axis_names: Collection[str] | None = None,
) -> Any:
    """Run ``fun`` on every rank of a mesh, on its shards of the arguments.

    Inside, collectives of ``lax`` work over the mesh axes. Over each axis a value is varying or invariant. Where both
    are operands, the invariant one is cast, so that derivatives sum over the ranks as they must.

    Args:
      fun: a function of pytrees of arrays, of the shapes of shards. Without it, a decorator is returned.
      mesh: the mesh; the current one (``with mesh:``) by default. An ``AbstractMesh`` runs on simulated ranks.
      in_specs: for each argument a ``PartitionSpec``, or a pytree prefix of them; a dimension that a spec does not
        shard is whole on every rank. None: those of the shardings of the arguments.
      out_specs: a pytree prefix of the results: how their shards make up the whole. A result must be the same over
        the axes that its spec does not mention.
      check_vma: check the latter (default). If False, you are responsible for it.
      axis_names: the axes that are manual, over which the function sees shards; default all. Over the others it is a
        global program, which the compiler partitions. Inside of another ``shard_map``, the default is those that are
        not manual yet.
    Returns:
      a function of global arrays.
    Raises (when called):
      ArgumentError: ``axis_names`` are not names.
      ShardingError: the specs do not fit the arguments, results or mesh; a result varies over an axis that its spec
        does not mention; an operation cannot take the types of its operands over an axis.
      TreeError: the specs are not a prefix of arguments or results.
    """
    if fun is None:
        return functools.partial(
            shard_map,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=check_vma,
            axis_names=axis_names,
        )
    check_callable(fun, "shard_map")
    if mesh is not None and not isinstance(mesh, AxisSizes):
        raise errors.ArgumentError(
            f"shard_map takes a mesh, not {mesh!r:.60}.",
            where=source.here(),
            fix="mesh=bf.make_mesh((8,), ('x',))",
        )
    if not isinstance(check_vma, bool):
        raise errors.ArgumentError(
            f"shard_map: check_vma is True or False, not {check_vma!r:.60}.", where=source.here()
        )

    @functools.wraps(fun)
    def mapped(*args):
        around = manual_mesh()
        where = _mesh_of(mesh, around, fun)
        names = _manual_axes(axis_names, where, around, fun)
        leaves, in_tree = tree.flatten((args, {}))
        labels = functools.cache(lambda: labels_of(fun, in_tree))
        values = as_values(leaves, lambda i: f"the argument {labels()[i]}")
        if in_specs is None:
            specs = [_spec_of(v, where, names, labels()[i]) for i, v in enumerate(values)]
        else:
            entries = tuple(in_specs) if isinstance(in_specs, list) else in_specs
            specs = broadcast_specs(entries, args, fun, "in_specs")
        for s in specs:
            check_manual(s, names, where, fun, "in_specs")
        avals = [
            _local(v.aval, s, where, labels()[i]) for i, (v, s) in enumerate(zip(values, specs, strict=True))
        ]
        body = Function(FlatFunction(fun, in_tree), where, names, out_specs, labels(), check_vma)
        if around is not None:
            outs = nested(body, values, specs)
        else:
            jaxpr = body.trace(avals, specs)
            used = {a for e in equations(jaxpr) for a in e.params.get("axes", ()) if isinstance(a, str)}
            auto = tuple(a for a in where.axis_names if a not in names and a not in used)
            params = {"mesh": where, "name": name_of(fun), "auto": auto}
            outs = shard_map_p.call(jaxpr, values, specs, body.specs, params)
        return tree.unflatten(body.flat.out_tree, outs)

    return mapped


def _mesh_of(mesh: AxisSizes | None, around: ManualMesh | None, fun: Callable) -> AxisSizes:
    """The mesh of a call: the given, the surrounding or the current one."""
    if around is not None:
        if mesh is not None and mesh.shape != around.mesh.shape:
            raise errors.ShardingError(
                f"shard_map of {name_of(fun)} over the mesh ({mesh}), inside of another over ({around.mesh}).",
                where=source.here(),
                fix="leave mesh= out, and name in axis_names the axes that are manual inside",
            )
        return around.mesh
    where = mesh if mesh is not None else current_mesh()
    if where is None:
        raise errors.ArgumentError(
            f"shard_map of {name_of(fun)} has no mesh.",
            where=source.here(),
            fix="shard_map(f, mesh=mesh, ...), or call it inside of `with mesh:`",
        )
    return where


def _manual_axes(
    axis_names: Collection[str] | None, mesh: AxisSizes, around: ManualMesh | None, fun: Callable
) -> frozenset[str]:
    """The axes that become manual."""
    already = around.axes if around is not None else frozenset()
    free = frozenset(mesh.axis_names) - already
    names = _names(axis_names, fun) or free
    wrong = sorted(names - free, key=str)
    if wrong or not names:
        which = f"names {wrong[0]!r} as manual" if wrong else "has no axis left"
        raise errors.ShardingError(
            f"shard_map of {name_of(fun)} {which}, and the axes that can be are "
            f"{', '.join(map(repr, sorted(free))) or 'none'}.",
            where=source.here(),
            why="those of a shard_map around it are manual already." if already else None,
            fix="axis_names={'x'}, of axes of the mesh; an inner shard_map takes those that the outer leaves out",
        )
    return names


def _names(axis_names: Any, fun: Callable) -> frozenset[str]:
    """The names that a call gives."""
    given = [axis_names] if isinstance(axis_names, str) else () if axis_names is None else axis_names
    if not isinstance(given, Collection) or not all(isinstance(a, str) for a in given):
        raise errors.ArgumentError(
            f"shard_map of {name_of(fun)}: axis_names are names of mesh axes, not {axis_names!r:.60}.",
            where=source.here(),
            why="it says over which axes the function sees shards.",
            fix="axis_names={'x'}, or leave it out for all axes",
        )
    return frozenset(given)


def _spec_of(x: Any, mesh: AxisSizes, names: frozenset[str], label: str) -> PartitionSpec:
    """The spec of an argument with a sharding, over the manual axes."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape != mesh.shape:
        raise errors.ShardingError(
            f"shard_map: in_specs is None, and the argument {label} has no sharding on the mesh ({mesh}).",
            where=source.here(),
            fix="give in_specs, or put the argument on the mesh: bf.device_put(x, NamedSharding(mesh, spec))",
        )
    entries = [tuple(a for a in names_of(e) if a in names) or None for e in sharding.spec]
    return PartitionSpec(*entries)


def _local(aval: ShapedArray, spec: PartitionSpec, mesh: AxisSizes, label: str) -> ShapedArray:
    """The type of the shards of an argument."""
    check_rank(mesh, spec, aval.ndim, lambda: f"shard_map: the spec of the argument {label}")
    shape = []
    for d, (n, entry) in enumerate(zip(aval.shape, spec.for_rank(aval.ndim), strict=True)):
        parts = mesh.size_of(names_of(entry))
        if n % parts:
            raise errors.ShardingError(
                f"shard_map: dimension {d} of the argument {label} ({aval}) cannot be sharded over {entry!r}, "
                f"of {parts} ranks.",
                where=source.here(),
                fix=f"pad it to a multiple of {parts}, or leave that dimension whole",
            )
        shape.append(n // parts)
    return aval.with_shape(tuple(shape))
