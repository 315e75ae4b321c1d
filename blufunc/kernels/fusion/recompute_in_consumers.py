"""Which values are recomputed by their consumers instead of stored, and which are stored although they are cheap.

Kernels, stage 5, below ``fuse.py``. In: a jaxpr. Out: three sets of variables:

- ``computed_in_copies``: producers that only copies read (a ``concatenate``, a ``pad``, a change of layout) are not
  stored. A rotary embedding, whose halves are computed and joined, is one kernel; so is the gradient of a ``split``.
- ``computed_by_readers``: values of a parameter, or of the result of a library call or collective, that takes no more
  memory, are not stored where several steps read them. A softmax over a sharded vocabulary converts its logits to
  float32 for their maximum, again for the sum, and again for the gradient.
- ``position_tables``: values of positions alone (``iota``) are usually computed by every reader; an element of a causal
  mask costs one comparison. Those that cost more, and that a reader with many times their elements would repeat, such
  as the angles of a rotary embedding, are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.elementwise import (
    abs_p,
    add_p,
    convert_p,
    copy_p,
    eq_p,
    exp_p,
    ge_p,
    gt_p,
    le_p,
    lt_p,
    max_p,
    min_p,
    ne_p,
    neg_p,
    sub_p,
)
from blufunc.core.ops.shape import concatenate_p, iota_p, pad_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.kernels.loopir.access_map import is_widening, moves

# -- producers of copies ----------------------------------------------------------------------------


_MOST_OPERATIONS = 24
"""Additions, or what takes as long, for each element that a copy computes: with more it would not wait for memory."""

_SMALL_RECIPE = 16
"""An operand this many times smaller than the value stays in a cache: reading it is free."""


COPIES = frozenset((concatenate_p, copy_p, pad_p))
"""Operations that compute what only they read."""


class _CopyRecipe(NamedTuple):
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


def _recipes(jaxpr: Jaxpr, stored: Set[Var]) -> dict[Any, _CopyRecipe]:
    """For each variable its recipe, as if readers computed all elementwise operations that are not stored."""
    recipes: dict[Any, _CopyRecipe] = {v: _CopyRecipe(frozenset([v]), 0) for v in jaxpr.invars}
    for e in jaxpr.eqns:
        own = e.prim.cost if _is_elementwise(e) and e.prim is not copy_p else 0
        if (_is_elementwise(e) or moves(e)) and e.outvars[0] not in stored:
            parts = [recipes[a] for a in e.invars if a.__class__ is not Literal]
            leaves = frozenset[Var]().union(*[p.leaves for p in parts])
            recipes[e.outvars[0]] = _CopyRecipe(leaves, own + sum(p.operations for p in parts))
        else:
            recipes.update((v, _CopyRecipe(frozenset([v]), 0)) for v in e.outvars)
    return recipes


def _is_elementwise(eqn: Eqn) -> bool:
    return isinstance(eqn.prim, Elementwise) or eqn.prim is add_any_p


def _is_cheap(v: Any, recipe: _CopyRecipe) -> bool:
    """Whether reading what a value is made of, an element of each for each of its own, is no more than storing it."""
    large = [x.aval for x in recipe.leaves if x.aval.size * _SMALL_RECIPE > v.aval.size]
    read = sum(min(x.size, v.aval.size) * x.dtype.itemsize for x in large)
    return recipe.operations <= _MOST_OPERATIONS and read <= 2 * v.aval.nbytes


# -- values of buffers that are read anyway ---------------------------------------------------------


LARGE = 1 << 24
"""Bytes from which on a value is worth it: what is smaller stays in the second-level cache."""

_SMALL = 16
"""How many times smaller than a value an operand is that is read as if it cost nothing: one number of each row."""

_MOST = 64
"""The operations that readers may repeat, while they wait for memory."""

_ALIKE = frozenset((convert_p, neg_p, abs_p, add_p, sub_p, add_any_p, max_p, min_p, exp_p))
"""What gives the same bits wherever it is computed, but for exponentials of which 16 bits are kept. A product does not:
it is rounded or not, as a sum takes it up or does not."""

_COMPARES = frozenset((eq_p, ne_p, lt_p, le_p, gt_p, ge_p))
"""What must find the very value again that something else was found of."""


class _Recipe(NamedTuple):
    """Of what in memory a value is computed, and by how many operations."""

    leaves: frozenset[Var]
    cost: int


def computed_by_readers(jaxpr: Jaxpr, sorts: Mapping[Eqn, str]) -> set[Var]:
    """The values that steps on both sides of some that are not ours read, and that are cheap to compute again.

    Args:
      sorts: ``sort_of`` of all equations.
    """
    if not any(v.aval.nbytes >= LARGE for e in jaxpr.eqns for v in e.outvars):
        return set()
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    in_rows = _found_in_rows(jaxpr, sorts)
    recipes: dict[Var, _Recipe] = {}
    for e in jaxpr.eqns:
        recipe = _recipe(e, makers, recipes, sorts, in_rows)
        if recipe is not None:
            recipes[e.outvars[0]] = recipe
    if not recipes:
        return set()
    depths = _depths(jaxpr, makers, sorts)
    readers: dict[Any, set[int | None]] = {v: {None} for v in jaxpr.outvars if v.__class__ is Var}
    found: set[Var] = set()
    for e in reversed(jaxpr.eqns):
        v = e.outvars[0] if len(e.outvars) == 1 else None
        at = readers.get(v, set())
        if v in recipes and None not in at and len(at) > 1:
            found.add(v)  # type: ignore[arg-type]
        if sorts[e] == "opaque" or e.prim in _COMPARES or "index_dtype" in e.params:
            at = {None}
        elif sorts[e] == "node" and v not in found:
            at = {depths[e]}
        for a in e.invars:
            if a.__class__ is Var:
                readers.setdefault(a, set()).update(at)
    return found


def _recipe(
    eqn: Eqn,
    makers: Mapping[Any, Eqn],
    recipes: Mapping[Any, _Recipe],
    sorts: Mapping[Eqn, str],
    in_rows: Set[Var],
) -> _Recipe | None:
    """How readers would compute the result of an equation; None where that is not worth it, or not the same for all."""
    if sorts[eqn] != "node" or eqn.prim not in _ALIKE:
        return None
    out = eqn.outvars[0].aval
    if out.nbytes < LARGE:
        return None
    leaves: set[Var] = set()
    cost = eqn.prim.cost
    for a in eqn.invars:
        x = _moved_from(a, makers)
        if x.__class__ is Literal:
            continue
        if x not in makers or sorts[makers[x]] == "opaque":
            leaves.add(x)
        elif x in recipes:
            leaves |= recipes[x].leaves
            cost += recipes[x].cost
        elif x in in_rows or x.aval.size * _SMALL > out.size:
            return None  # the reader that finds a number of its row, and the number, would have to be apart
    large = [x for x in leaves if x.aval.size * _SMALL > out.size]
    cheap = cost <= _MOST and 0 < sum(x.aval.nbytes for x in large) <= out.nbytes
    return _Recipe(frozenset(leaves), cost) if cheap else None


def _moved_from(atom: Any, makers: Mapping[Any, Eqn]) -> Any:
    while atom in makers and moves(makers[atom]):
        atom = makers[atom].invars[0]
    return atom


def _found_in_rows(jaxpr: Jaxpr, sorts: Mapping[Eqn, str]) -> set[Var]:
    """What steps of ours compute otherwise than element by element, and what they make of that."""
    found: set[Var] = set()
    for e in jaxpr.eqns:
        if sorts[e] != "opaque":
            elementwise = isinstance(e.prim, Elementwise) or moves(e)
            if not elementwise or any(a in found for a in e.invars):
                found.update(e.outvars)
    return found


def _depths(jaxpr: Jaxpr, makers: Mapping[Any, Eqn], sorts: Mapping[Eqn, str]) -> dict[Eqn, int]:
    """For each equation, how many steps that are not ours are one behind the other before it."""
    depths: dict[Eqn, int] = {}
    for e in jaxpr.eqns:
        before = [makers[a] for a in e.invars if a in makers]
        depths[e] = max((depths[m] + (sorts[m] == "opaque") for m in before), default=0)
    return depths


# -- tables of positions ----------------------------------------------------------------------------


_WORTH = 16
"""Additions, or what takes as long: what costs less is computed by the reader, while it waits for memory."""

_REPEATS = 16
"""How many elements of a reader share one of the table, at least: it then stays in a cache."""


def position_tables(jaxpr: Jaxpr) -> set[Var]:
    """The values to be stored: expensive, from positions and constants alone, and read by much larger operations."""
    operations: dict[Any, int] = {}  # of values that depend on positions alone
    for e in jaxpr.eqns:
        if e.prim is iota_p:
            operations[e.outvars[0]] = 0
        elif isinstance(e.prim, Elementwise) or moves(e):
            variables = [a for a in e.invars if a.__class__ is not Literal]
            if variables and all(a in operations for a in variables):
                own = 0 if moves(e) else e.prim.cost
                operations[e.outvars[0]] = own + sum(operations[a] for a in variables)
    expensive = {v for v, cost in operations.items() if cost > _WORTH}
    if not expensive:
        return set()
    largest: dict[Any, int] = {}  # by variable: the elements of its largest reader that is not a table itself
    for e in reversed(jaxpr.eqns):
        out = e.outvars[0] if e.outvars else None
        size = (
            largest.get(out, 0)
            if moves(e)
            else 0
            if out in operations
            else max(v.aval.size for v in e.outvars)
        )
        for a in e.invars:
            largest[a] = max(largest.get(a, 0), size)
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    return {v for v in expensive if not moves(makers[v]) and largest.get(v, 0) >= _REPEATS * v.aval.size}
