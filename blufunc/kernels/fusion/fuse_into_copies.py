"""Fuse producers into the copies that consume them: values that nothing but a copy reads.

Kernels, stage 5, below ``fuse.py``. In: a jaxpr. Out: the variables that are not stored, because each copy (a
``concatenate``, a ``pad``, a change of layout) computes them from what lies in memory. A rotary embedding, whose halves
are computed and joined, is one kernel so, and the gradient of a ``split`` too.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.elementwise import copy_p
from blufunc.core.ops.shape import concatenate_p, pad_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.kernels.loopir.access_map import is_widening, moves

_MOST_OPERATIONS = 24
"""Additions, or what takes as long, for each element that a copy computes: with more it would not wait for memory."""

_SMALL = 16
"""An operand this many times smaller than the value stays in a cache: reading it is free."""


class _Recipe(NamedTuple):
    """How a copy would compute a value: the variables in memory that it reads, and its operations for each element."""

    leaves: frozenset[Var]
    operations: int


def computed_in_copies(jaxpr: Jaxpr, stored: Set[Var] = frozenset()) -> set[Var]:
    """The variables that only copies read, directly or through movement and each other, and that are cheap there.

    Not to store a value saves its bytes twice; each reader then reads what the value is made of. So that must not be
    more than twice the value's bytes.

    Args:
      jaxpr: the program.
      stored: variables that are in memory in any case.
    """
    recipes = _recipes(jaxpr, stored)
    inside: set[Any] = set()  # read by a copy
    outside: set[Any] = {*jaxpr.outvars, *stored}  # read by something else, or in memory
    found: set[Var] = set()
    for e in reversed(jaxpr.eqns):
        v = e.outvars[0] if len(e.outvars) == 1 else None
        if v in inside and (v not in outside or is_widening(e)) and _is_cheap(v, recipes[v]):
            found.add(v)  # type: ignore[arg-type]  # every reader of a widened value may widen it
        passes = v in found and v not in outside and (moves(e) or _is_elementwise(e))
        if passes or e.prim is copy_p:
            inside.update(e.invars)
        elif e.prim is pad_p or e.prim is concatenate_p:
            for a in e.invars:
                (inside if a.aval.ndim else outside).add(a)
        else:
            outside.update(e.invars)
    return found


def _recipes(jaxpr: Jaxpr, stored: Set[Var]) -> dict[Any, _Recipe]:
    """For each variable its recipe, as if readers computed all elementwise operations that are not stored."""
    recipes: dict[Any, _Recipe] = {v: _Recipe(frozenset([v]), 0) for v in jaxpr.invars}
    for e in jaxpr.eqns:
        own = e.prim.cost if _is_elementwise(e) and e.prim is not copy_p else 0
        if (_is_elementwise(e) or moves(e)) and e.outvars[0] not in stored:
            parts = [recipes[a] for a in e.invars if a.__class__ is not Literal]
            leaves = frozenset[Var]().union(*[p.leaves for p in parts])
            recipes[e.outvars[0]] = _Recipe(leaves, own + sum(p.operations for p in parts))
        else:
            recipes.update((v, _Recipe(frozenset([v]), 0)) for v in e.outvars)
    return recipes


def _is_elementwise(eqn: Eqn) -> bool:
    return isinstance(eqn.prim, Elementwise) or eqn.prim is add_any_p


def _is_cheap(v: Any, recipe: _Recipe) -> bool:
    """Whether reading what a value is made of, an element of each for each of its own, is no more than storing it."""
    large = [x.aval for x in recipe.leaves if x.aval.size * _SMALL > v.aval.size]
    read = sum(min(x.size, v.aval.size) * x.dtype.itemsize for x in large)
    return recipe.operations <= _MOST_OPERATIONS and read <= 2 * v.aval.nbytes
