"""What several steps compute for themselves, of what lies in memory anyway: values that need not be stored.

Kernels, stage 5, below ``fuse.py``. In: a jaxpr. Out: the variables that are not stored, as whoever reads them computes
them of the result of a library or an exchange, or of a parameter, that takes no more memory. Otherwise a step would
write them for later ones, before which there are more exchanges or products: a softmax over a vocabulary that is
divided among devices converts its logits to float32 for their maximum, and again for the sum, and for the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.elementwise import (
    abs_p,
    add_p,
    convert_p,
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
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p
from blufunc.kernels.loopir.access_map import moves

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
