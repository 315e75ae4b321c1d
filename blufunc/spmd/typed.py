"""Functions of the body of a ``shard_map`` that are traced and typed before the loop that runs them.

A face's foundation. Derivatives inside of ``shard_map`` need to know the types of values over the axes of the mesh
(``parallel.axis_types``), and in the body of a loop, which is traced by itself, these are not known yet. A function that
is traced outside of the loop, at values of the types that it will get, has its casts and typed collectives, and may
differentiate; inside of the loop it is a list of equations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blufunc import errors
from blufunc.core import source, tree
from blufunc.core.array import lift
from blufunc.core.jaxpr import eval_jaxpr
from blufunc.core.trace import new_trace, state
from blufunc.parallel.axis_types import TypedTrace, Types, invariant, types_of


def current_trace(what: str) -> TypedTrace:
    """The trace of the ``shard_map`` that is being traced; UnsupportedError if that is not what is being traced."""
    trace = state.trace
    if not isinstance(trace, TypedTrace):
        raise errors.UnsupportedError(
            f"{what} outside of shard_map, or inside of a loop, a branch or a gradient in it.",
            where=source.here(),
            why="it needs the types of its arguments over the axes of the mesh.",
            fix="call it from the function that shard_map is given",
        )
    return trace


def types_at(x: Any, trace: TypedTrace) -> Types:
    """The types of a value; what comes from outside is the same everywhere."""
    return types_of(x, trace.mesh) or invariant(trace.mesh)


def typed_function(fun: Callable, *examples: Any, what: str) -> Callable:
    """``fun`` as equations, for arguments of the shapes, dtypes and types of ``examples``.

    Args:
      fun: a function of pytrees; it may be, or hold, a derivative.
      examples: pytrees of values of the body.
      what: the name of the caller, for messages.
    Returns:
      a function of pytrees like the examples, for the body and the loops in it.
    """
    trace = current_trace(what)
    leaves, in_tree = tree.flatten(examples)
    leaves = [lift(x) for x in leaves]
    inner = TypedTrace(trace.mesh, what)
    with new_trace(inner):
        ins = [inner.typed_parameter(x.aval, types_at(x, trace)) for x in leaves]
        outs, out_tree = tree.flatten(fun(*tree.unflatten(in_tree, ins)))
        jaxpr = inner.finish(outs, what)

    def call(*args: Any) -> Any:
        return tree.unflatten(out_tree, eval_jaxpr(jaxpr, [lift(x) for x in tree.leaves(args)]))

    return call
