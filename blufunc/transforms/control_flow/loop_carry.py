"""The carry of a loop, which keeps its structure and types from step to step.

Transforms, stage 2, shared by ``scan`` and ``while_loop``. In come the initial carry and what a traced body returns;
out comes the carry to begin with, or an error that names the part that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.ops.elementwise import convert
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree


def settle(
    carry: Sequence[Any], body: Jaxpr, restage: Callable[[list[ShapedArray]], Jaxpr]
) -> tuple[list[Any], Jaxpr]:
    """The carry with strong types, and the body traced with them.

    A weakly typed carry is strong after one step, of the dtype that the body gives it.
    """
    if not any(c.aval.weak_type for c in carry):
        return list(carry), body
    carry = [strengthened(c, a) for c, a in zip(carry, body.out_avals, strict=False)]
    return carry, restage([c.aval.strong() for c in carry])


def strengthened(c: Any, after: ShapedArray) -> Any:
    """A value, converted as promotion says if it is weak and becomes a value of another dtype."""
    dtype = c.aval.dtype
    if not c.aval.weak_type or not (dtypes.is_numeric(after.dtype) or dtypes.is_bool(after.dtype)):
        return c
    return convert(c, dtypes.promote((dtype, True), (after.dtype, after.weak_type))[0])


def check_structure(loop: str, name: str, before: tree.TreeDef, after: tree.TreeDef) -> None:
    """Raise CarryError unless a body returns the structure that it is given."""
    if before != after:
        raise errors.CarryError(
            f"the body of {loop}, {name}, returns a carry of another structure than it is given.",
            where=source.here(),
            why="; ".join(treepath.diff(before, after, "init", "the returned carry")[:4]),
        )


def check_types(
    loop: str, name: str, paths: Sequence[str], before: Sequence[Any], after: Sequence[ShapedArray]
) -> None:
    """Raise CarryError unless a body returns the types that it is given."""
    for path, c, a in zip(paths, before, after, strict=False):
        if not c.aval.same_type(a):
            raise errors.CarryError(
                f"the body of {loop}, {name}, is given the carry{path} as {c.aval} and returns it as {a}.",
                where=source.here(),
                why="every step must take and return the same type.",
                fix="give init the type that the body returns, or convert in the body with .astype",
            )


def boxed(
    loop: str, bodies: Any, body: Jaxpr, carry: Sequence[Any], kinds_of: Callable[[list], Sequence[Any]]
) -> tuple[list[Any], Jaxpr, tuple]:
    """The carry and body of a loop under a user's transform.

    A carry has a box if it is given one or if a step gives it one; which do is found by iterating to a fixpoint.

    Args:
      bodies: what transforms jaxprs, a ``transform.Bodies``.
      kinds_of: the kinds of the operands of the body, from those of the carry.
    Returns:
      the carry, boxed where need be; the transformed body, which returns such carries; the kinds of its results.
    """
    carry, n = [x if bodies.kind(x) is None else bodies.lifted(x) for x in carry], len(carry)
    while True:
        kinds = [bodies.kind(x) for x in carry]
        wanted = [*(k is not None for k in kinds), *(False,) * (len(body.outvars) - n)]
        transformed, out_kinds = bodies.body(body, kinds_of(kinds), wanted)
        if all(k is not None or after is None for k, after in zip(kinds, out_kinds, strict=False)):
            break
        carry = [bodies.lifted(x) if k is not None else x for x, k in zip(carry, out_kinds, strict=False)]
    for before, after in zip(kinds, out_kinds, strict=False):
        if before != after:
            raise errors.CarryError(
                f"{bodies.transform.name}: a step of {loop} changes the box of its carry from {before} to {after}.",
                where=source.here(),
                why="every step must take and return the same structure and types.",
            )
    return carry, transformed, out_kinds
