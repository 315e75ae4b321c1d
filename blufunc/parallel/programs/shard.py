"""``shard``: a function with the shardings of its arguments and results.

Parallel, stage 1. In: a function of global arrays, and specs. Out: a ``jit`` program whose annotations are equations,
so that it can be transformed and called like any function; ``partition/partition.py`` partitions it at compile time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from blufunc import errors
from blufunc.core.ir import source
from blufunc.parallel.mesh.constrain import constrain
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh
from blufunc.parallel.mesh.spec_trees import map_sharded, shardings_of
from blufunc.parallel.programs.reshard import reshard
from blufunc.transforms.arguments import check_callable, name_of
from blufunc.transforms.staging.jit import jit

P = ParamSpec("P")
R = TypeVar("R")


def shard(fun: Callable[P, R], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any) -> Callable[P, R]:
    """Partition ``fun``, written for global arrays, among the devices of ``mesh``.

    ``fun`` sees global shapes, and computes the same as on one device. You specify the layouts of its arguments and
    results; those in between are propagated, and can be annotated with ``constrain`` and ``reshard`` on this mesh.
    ``grad``, ``vmap`` and ``checkpoint`` compose in any order: gradients have the layouts of their arguments.

    Args:
      fun: a pure function of positional arguments, pytrees of arrays.
      mesh: the devices; abstract for programs that are inspected and not run.
      in_specs: a pytree prefix of the tuple of arguments, of ``PartitionSpec``s; None to keep an argument's sharding.
      out_specs: a pytree prefix of the results; None to let propagation decide.
    Returns:
      a function like ``fun``. Its arguments may be anywhere: they are moved.
    Raises:
      ArgumentError: ``fun`` is not a function, ``mesh`` not a mesh, or specs hold something else.
      ShardingError: a spec does not fit its array or the mesh.
      TreeError: the specs are not a prefix of arguments or results.
    """
    check_callable(fun, "shard")
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise errors.ArgumentError(
            f"shard takes a mesh, not {mesh!r:.60}.",
            where=source.here(),
            fix="bf.shard(f, bf.make_mesh((8,), ('data',)), in_specs=P('data'), out_specs=P('data'))",
        )
    name = name_of(fun)

    def laid_out(args: tuple, how: Callable) -> tuple:
        specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs
        return map_sharded(
            how, args, shardings_of(specs, args, mesh, f"in_specs of {name}"), f"{name}: argument "
        )

    @functools.wraps(fun)
    def annotated(*args: Any) -> Any:
        args = laid_out(args, constrain)
        with mesh if isinstance(mesh, Mesh) else contextlib.nullcontext():
            out = fun(*args)  # type: ignore[call-arg]
        shardings = shardings_of(out_specs, out, mesh, f"out_specs of {name}")
        out = map_sharded(reshard, out, shardings, f"{name}: result ")
        return map_sharded(constrain, out, shardings, f"{name}: result ")

    program = jit(annotated)

    @functools.wraps(fun)
    def sharded(*args: Any) -> Any:
        return program(*laid_out(args, reshard))

    return sharded  # type: ignore[return-value]
