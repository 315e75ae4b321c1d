"""Tracing and typing of functions before the loop that runs them.

Shared by recipes. In: a function, and the types of its arguments. Out: equations with casts and typed collectives.
Derivatives inside ``shard_map`` need the types of values over mesh axes (``collectives/axis_types.py``), which are
unknown in a loop's body, as it is traced separately. A function traced outside the loop may differentiate; inside the
loop it is a list of equations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blufunc.core.arrays.array import lift
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.ir.trace import UntypedError, new_trace, state
from blufunc.core.pytree import tree
from blufunc.parallel.collectives.axis_casts import Types, invariant
from blufunc.parallel.collectives.typed_trace import TypedTrace, types_of


class Like:
    """A value's shape, dtype, and types over mesh axes. A leaf of pytrees."""

    __slots__ = ("aval", "types")

    def __init__(self, aval: ShapedArray, types: Types):
        self.aval, self.types = aval, types


def current_trace(what: str) -> TypedTrace:
    """The trace of the current ``shard_map``; UntypedError inside another trace."""
    trace = state.trace
    if not isinstance(trace, TypedTrace):
        raise UntypedError(
            f"{what} outside of shard_map, or inside of a gradient in it.",
            where=source.here(),
            why="it needs the types of its arguments over the axes of the mesh.",
            fix="call it from the function that shard_map is given, or from a loop or a branch in it",
        )
    return trace


def like(x: Any, trace: TypedTrace) -> Like:
    """The type of a value; one from outside is invariant."""
    x = lift(x)
    return Like(x.aval.strong(), types_of(x, trace.mesh) or invariant(trace.mesh))


def likes(x: Any, trace: TypedTrace) -> Any:
    """The types of the leaves of a pytree."""
    return tree.map(lambda v: like(v, trace), x)


def element(x: Any, trace: TypedTrace) -> Any:
    """The types of the elements along the first dimension of the leaves."""
    return tree.map(lambda v: Like(v.aval.with_shape(v.aval.shape[1:]), v.types), likes(x, trace))


def typed_jaxpr(fun: Callable, examples: tuple, what: str) -> tuple[Jaxpr, tree.TreeDef, list[Like]]:
    """Stage ``fun`` as equations with casts and typed collectives.

    Args:
      fun: a function of pytrees; it may be, or contain, a derivative.
      examples: for each argument a pytree of ``Like``.
      what: the name of the caller, for messages.
    Returns:
      the jaxpr, from leaves to leaves; the structure of the results, and their types.
    """
    leaves, in_tree = tree.flatten(examples)
    inner = TypedTrace(current_trace(what).mesh, what)
    with new_trace(inner):
        ins = [inner.typed_parameter(x.aval, x.types) for x in leaves]
        outs, out_tree = tree.flatten(fun(*tree.unflatten(in_tree, ins)))
        jaxpr = inner.finish(outs, what)
    found = [Like(v.aval, inner.typer.type_of(v)) for v in jaxpr.outvars]
    return jaxpr, out_tree, found
