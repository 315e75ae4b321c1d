"""The carry of a loop, whose structure and types must not change between steps.

Transforms, stage 2, shared by ``scan`` and ``while_loop``. In: the initial carry, and the results of a traced body.
Out: the carry with its final types, or an error that names the part that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.arrays.memories import move_to
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.ops.elementwise import convert
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree


def settle(
    carry: Sequence[Any], body: Jaxpr, restage: Callable[[list[ShapedArray]], Jaxpr]
) -> tuple[list[Any], Jaxpr]:
    """The carry in the dtypes that the body returns, and the body traced for them.

    A weakly typed carry whose dtype one step changes is promoted with it, and strong. Others stay weak: the dtype of a
    Python number does not decide that of what the body computes with it.
    """
    settled = [promoted(c, a) for c, a in zip(carry, body.out_avals, strict=False)]
    if all(c is s for c, s in zip(carry, settled, strict=True)):
        return settled, body
    return settled, restage([c.aval for c in settled])


def promoted(c: Any, after: ShapedArray) -> Any:
    """Promote a weakly typed value that becomes a value of another dtype."""
    dtype = c.aval.dtype
    if not c.aval.weak_type or dtype == after.dtype:
        return c
    if not (dtypes.is_numeric(after.dtype) or dtypes.is_bool(after.dtype)):
        return c
    return convert(c, dtypes.promote((dtype, True), (after.dtype, after.weak_type))[0])


def check_structure(loop: str, name: str, before: tree.TreeDef, after: tree.TreeDef) -> None:
    """Raise CarryError unless a body returns the structure it takes."""
    if before != after:
        raise errors.CarryError(
            f"the body of {loop}, {name}, returns a carry of a different structure than it takes.",
            where=source.here(),
            why="; ".join(treepath.diff(before, after, "init", "the returned carry")[:4]),
        )


def check_types(
    loop: str, name: str, paths: Sequence[str], before: Sequence[Any], after: Sequence[ShapedArray]
) -> None:
    """Raise CarryError unless a body returns the types it takes."""
    for path, c, a in zip(paths, before, after, strict=False):
        if c.aval.same_type(a):
            continue
        if c.aval.in_memory(a.memory).same_type(a):
            raise errors.CarryError(
                f"the body of {loop}, {name}, takes the carry{path} as {c.aval} and returns it as {a}.",
                where=source.here(),
                why="every step must return a value in the memory where it takes it; only device_put moves one.",
                fix=f"return it by {move_to(c.aval.memory)}, or move init to where the body returns it",
            )
        raise errors.CarryError(
            f"the body of {loop}, {name}, takes the carry{path} as {c.aval} and returns it as {a}.",
            where=source.here(),
            why="every step must take and return the same type.",
            fix="use the body's result type for init, or convert in the body with .astype",
        )


def boxed(
    loop: str, bodies: Any, body: Jaxpr, carry: Sequence[Any], kinds_of: Callable[[list], Sequence[Any]]
) -> tuple[list[Any], Jaxpr, tuple]:
    """The carry and body of a loop under a user's transform.

    A carry is boxed if its initial value is, or if a step boxes it; found by iteration to a fixpoint.

    Args:
      bodies: transforms jaxprs, a ``transform.Bodies``.
      kinds_of: maps the kinds of the carry to the kinds of the body's operands.
    Returns:
      the carry, boxed if necessary; the transformed body, which returns such carries; the kinds of its results.
    """
    carry, n = [x if bodies.kind(x) is None else bodies.lifted(x) for x in carry], len(carry)
    while True:
        kinds = [bodies.kind(x) for x in carry]
        required = [*(k is not None for k in kinds), *(False,) * (len(body.outvars) - n)]
        transformed, out_kinds = bodies.body(body, kinds_of(kinds), required)
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
