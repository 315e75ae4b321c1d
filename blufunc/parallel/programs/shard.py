"""``shard``: a function with the shardings of its arguments and results.

Parallel, stage 1. What comes out is a program under ``jit`` in which the annotations are equations, so that it may be
transformed, and be called inside of others, as any function; ``partition/partition.py`` divides it when it is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from blufunc import errors
from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.pytree import tree
from blufunc.parallel.mesh.constrain import constrain
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh
from blufunc.parallel.mesh.spec_trees import Shardings, check_ranks, shardings_of
from blufunc.parallel.programs.reshard import reshard
from blufunc.transforms.arguments import check_callable, name_of
from blufunc.transforms.staging.jit import jit


def shard(fun: Callable, mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any) -> Callable:
    """``fun``, written for whole arrays, as a program divided among the devices of ``mesh``.

    ``fun`` sees global shapes, and computes what it would on one device. How its arguments and results lie is given;
    what is between follows, and can be annotated with ``constrain`` and ``reshard``, whose specs are of this mesh.
    ``grad``, ``vmap`` and ``checkpoint`` may come before or after: gradients lie like their arguments.

    Args:
      fun: a pure function of positional arguments, pytrees of arrays.
      mesh: the devices. One without devices serves for programs that are looked at and not run.
      in_specs: a pytree prefix of the tuple of arguments: a ``PartitionSpec`` for each, or for all; None where the
        sharding that one has is to stay.
      out_specs: the same of the results: a pytree prefix, None where the program may decide.
    Returns:
      a function like ``fun``. Its arguments may lie anywhere: they are moved.
    Raises:
      ArgumentError: ``fun`` is no function, ``mesh`` no mesh, or specs hold something else.
      ShardingError: a spec does not fit its array or the mesh.
      TreeError: the specs are no prefix of arguments or results.
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
        return _each(how, args, shardings_of(specs, args, mesh, f"in_specs of {name}"), f"{name}: argument ")

    @functools.wraps(fun)
    def annotated(*args: Any) -> Any:
        args = laid_out(args, constrain)
        if isinstance(mesh, Mesh):
            with mesh:
                out = fun(*args)
        else:
            out = fun(*args)
        shardings = shardings_of(out_specs, out, mesh, f"out_specs of {name}")
        out = _each(reshard, out, shardings, f"{name}: result ")
        return _each(constrain, out, shardings, f"{name}: result ")

    program = jit(annotated)

    @functools.wraps(fun)
    def sharded(*args: Any) -> Any:
        return program(*laid_out(args, reshard))

    return sharded


def _each(how: Callable, x: Any, shardings: Shardings, what: str) -> Any:
    """The leaves of ``x``, those with a sharding put through ``how``."""
    leaves, treedef = tree.flatten(x)
    values = [lift(leaf) for leaf in leaves]
    check_ranks(shardings, [v.aval for v in values], treedef, what)
    laid = [v if s is None else how(v, s) for v, s in zip(values, shardings, strict=True)]
    return tree.unflatten(treedef, laid)
