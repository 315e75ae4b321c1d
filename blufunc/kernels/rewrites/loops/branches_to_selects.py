"""Branches that are cheaper to compute, all of them, than to choose from.

Kernels, before stage 5. In: a jaxpr. Out: one in which a ``cond`` of small fused operations is those of every branch,
and a select per result. On a GPU a branch costs some launches and the decision, in a loop each round; operations on few
elements cost next to nothing in the kernels that they join.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.elementwise import le_p, select_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, put_in_place, rewrite, simplified_body

_FUSED = ("elementwise", "reduce", "movement", "cumulative")
"""Kinds of the operations of such branches."""

MOST_BRANCHES = 8


def with_selects(jaxpr: Jaxpr, origins: Origins, most: int) -> Jaxpr:
    """Replace branches whose operations compute at most ``most`` elements."""
    if not most or not any(e.prim.name == "cond" for e in jaxpr.eqns):
        return jaxpr

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        eqn = eqn.with_invars(invars)
        if eqn.prim.name != "cond" or eqn.prim.kind != "control" or is_replaced(eqn.prim, "impl"):
            return [eqn]
        branches = [simplified_body(b) for b in eqn.params["branches"]]
        return _selected(eqn, branches, alias) if _is_cheap(eqn, branches, most) else [eqn]

    return rewrite(jaxpr, step, origins)


def _is_cheap(eqn: Eqn, branches: list[Jaxpr], most: int) -> bool:
    if eqn.effects or len(branches) > MOST_BRANCHES or any(dtypes.is_key(v.aval.dtype) for v in eqn.outvars):
        return False
    eqns = [e for b in branches for e in b.eqns]
    if any(e.prim.kind not in _FUSED or e.prim.body or is_replaced(e.prim, "impl") for e in eqns):
        return False
    # a reduction's work is what it reads
    work = sum(e.prim.cost * max(a.aval.size for a in (*e.invars, *e.outvars)) for e in eqns)
    return work + sum(len(branches) * v.aval.size for v in eqn.outvars) <= most


def _selected(eqn: Eqn, branches: list[Jaxpr], alias: Callable) -> list[Eqn]:
    """All branches, and selects of their results by the clamped index."""
    index, *operands = eqn.invars
    eqns: list[Eqn] = []
    results: list[list[Atom]] = []
    for branch in branches:
        known: dict[Any, Atom] = {}
        outs = [Var(a) for a in branch.out_avals]
        call = Eqn(eqn.prim, operands, outs, {}, eqn.source)
        eqns += put_in_place(call, branch, operands, known.__setitem__)
        results.append([known[v] for v in outs])
    taken = []
    for n in range(len(branches) - 1):
        taken.append(Var(ShapedArray((), dtypes.bool_)))
        limit = Literal(scalar(n, index.aval.dtype))
        eqns.append(Eqn(le_p, [index, limit], [taken[n]], {}, eqn.source))
    for i, v in enumerate(eqn.outvars):
        found = results[-1][i]
        for n in range(len(branches) - 2, -1, -1):
            if results[n][i] is found:
                continue
            out = Var(v.aval.strong())
            eqns.append(Eqn(select_p, [taken[n], results[n][i], found], [out], {}, eqn.source))
            found = out
        alias(v, found)
    return eqns
