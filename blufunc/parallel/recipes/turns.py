"""Parts of a batch by turns: collectives of one next to matmuls of another.

A face, for use inside ``shard_map``. In: a function with collectives on the path of its result, such as a layer with
tensor or sequence parallelism, and parts of a batch. Out: its results, by equations in turns: each part computes up to
its next collective, then the next part does. Collectives have a stream of their own, so that of one part lasts while
the others compute. Reverse mode transposes the equations in reverse order, in turns as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, subjaxprs
from blufunc.core.ir.trace import state
from blufunc.core.pytree import tree
from blufunc.parallel.collectives.primitives import communicates, equations
from blufunc.parallel.recipes.typed import current_trace, likes, typed_jaxpr
from blufunc.transforms.arguments import check_callable

T = TypeVar("T")


def by_turns(fun: Callable[[Any, T], Any]) -> Callable[[Any, Sequence[T]], tuple[Any, ...]]:
    """Apply ``fun(shared, part)`` to several parts, each up to its next collective.

    For use inside ``shard_map``. It pays where collectives are exposed, and parts are large enough for matmuls to be as
    fast as of the whole: compare ``bf.plan(...).exposed_seconds`` of both. Weights are read once for each part, and
    their gradients are added. In a loop over layers the last collective of an iteration is not hidden: several layers
    in one iteration, or ``unroll=``, hide more.

    Args:
      fun: a function of what all parts share, such as the parameters of a layer, and of a part.
    Returns:
      a function of shared values and a sequence of parts, of the same structure and types, to the tuple of their
      results. They are those of ``fun`` on each part.
    Raises (when called):
      ArgumentError: there are no parts, or they differ in structure or types.
      UnsupportedError: it is called outside of ``shard_map``.
    """
    check_callable(fun, "by_turns")

    @functools.wraps(fun)
    def turned(shared: Any, parts: Sequence[T]) -> tuple[Any, ...]:
        trace, parts = current_trace("by_turns"), tuple(parts)  # may be a generator
        of_parts = [likes(part, trace) for part in parts]
        kinds = {_kind(p) for p in of_parts}
        if len(kinds) != 1:
            raise errors.ArgumentError(
                f"by_turns takes parts of one structure and type, and {len(parts)} parts have {len(kinds)}.",
                where=source.here(),
                why="all parts run the same equations.",
                fix="bnp.split(x, 2), of a batch of even size",
            )
        jaxpr, out_tree, _ = typed_jaxpr(fun, (likes(shared, trace), of_parts[0]), "by_turns")
        runs = [_run(jaxpr, tree.leaves((shared, part))) for part in parts]
        return tuple(tree.unflatten(out_tree, outs) for outs in _in_turns(runs))

    return turned


def _kind(part: Any) -> tuple:
    leaves, structure = tree.flatten(part)
    return structure, *[(x.aval, x.types) for x in leaves]


def _in_turns(runs: Sequence[Iterator[list[Any] | None]]) -> list[list[Any]]:
    """Advance each run to its next collective until all have returned; their results."""
    line = source.replay.line
    try:
        while True:
            found = [next(run) for run in runs]
            if found[0] is not None:
                return found  # type: ignore[return-value]
    finally:
        source.replay.line = line


def _run(jaxpr: Jaxpr, args: Sequence[Any]) -> Iterator[list[Any] | None]:
    """Evaluate a jaxpr; None after each equation that communicates, then its results."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    of = lambda atom: atom.array if atom.__class__ is Literal else env[atom]
    for eqn in jaxpr.eqns:
        source.replay.line = eqn.source
        out = state.trace.process(eqn.prim, [of(a) for a in eqn.invars], eqn.params)
        env.update(zip(eqn.outvars, out if eqn.prim.multiple_results else [out], strict=True))
        if _communicates(eqn):
            yield None
    yield [of(a) for a in jaxpr.outvars]


def _communicates(eqn: Eqn) -> bool:
    """True for a collective, and for a loop or call that holds one."""
    return communicates(eqn) or any(
        communicates(e) for body in subjaxprs(eqn.params) for e in equations(body)
    )
