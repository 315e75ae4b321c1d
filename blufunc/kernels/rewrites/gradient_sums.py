"""Before stage 5, for devices with kernels for it: kernels of attention's derivative make sums over tokens, too.

Kernels, behind ``packed_outputs``. In: a program with gradients of queries, keys and values in one array. Out: the
same, in which the gradient of a bias that was added to that array, its sum over all tokens, is made of sums over
sixteen tokens each, which the kernels have in registers when they store the gradients. Nothing reads all of the array
for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Var, eval_jaxpr
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.shape import pad
from blufunc.core.primitives.linear_ops import reduce_sum, reduce_sum_p, reshape, reshape_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, put_in_place, rewrite
from blufunc.core.programs.stage import stage
from blufunc.kernels.backends.cuda.library.attention.kernels import ROWS_OF_SUM
from blufunc.kernels.rewrites.packed_outputs import packed_p, widens


def with_gradient_sums(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """The program with sums over tokens that the kernels begin.

    Args:
      jaxpr: behind ``with_packed_gradients``.
      origins: for equations, the call that computes them again; kept up for those that take their place.
    """
    packed = [e for e in jaxpr.eqns if e.prim is packed_p and e.outvars[0].aval.dtype.itemsize == 2]
    return with_sums_begun(
        jaxpr, origins, {e: math.prod(e.invars[0].aval.shape[:2]) for e in packed}, _summed
    )


def with_sums_begun(
    jaxpr: Jaxpr, origins: Origins, rows_of: dict[Eqn, int], summed: Callable[[Eqn], Eqn]
) -> Jaxpr:
    """The program in which sums over all rows of some results are made of sums over a few.

    Args:
      rows_of: by equations, how many rows their first results have.
      summed: from such an equation to one with a result more, float32 (sums, row): together those of all rows.
    """
    if not rows_of or is_replaced(reduce_sum_p, "impl"):
        return jaxpr
    readers: dict[Atom, list[Eqn]] = {}
    for eqn in jaxpr.eqns:
        for a in eqn.invars:
            readers.setdefault(a, []).append(eqn)
    sums = {e: found for e, rows in rows_of.items() if (found := _sums_over_rows(e, rows, readers))}
    begun = {total: e for e, totals in sums.items() for total in totals}
    rows: dict[Eqn, Var] = {}

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        if eqn in sums:
            made = summed(eqn.with_invars(invars))
            rows[eqn] = made.outvars[-1]
            return [made]
        if eqn not in begun:
            return [eqn.with_invars(invars)]
        shape = eqn.outvars[0].aval.shape
        body = stage(
            lambda x: [reshape(reduce_sum(x, (0,)), shape)], [rows[begun[eqn]].aval], "sum", line=eqn.source
        )
        return put_in_place(eqn, body, [rows[begun[eqn]]], alias)

    return rewrite(jaxpr, step, origins) if sums else jaxpr


def _sums_over_rows(maker: Eqn, rows: int, readers: dict[Atom, list[Eqn]]) -> set[Eqn]:
    """The equations that sum up a result over all rows, and nothing else."""
    found, seen = set(), [maker.outvars[0]]
    for v in seen:
        for eqn in readers.get(v, ()):
            if eqn.prim is reshape_p or widens(eqn):
                seen.append(eqn.outvars[0])
            elif eqn.prim is reduce_sum_p and v.aval.dtype == dtypes.float32:
                axes = eqn.params["axes"]
                if axes == tuple(range(len(axes))) and math.prod(v.aval.shape[: len(axes)]) == rows:
                    found.add(eqn)
    return found


def _summed(eqn: Eqn) -> Eqn:
    """The equation with a second result, sums of ``ROWS_OF_SUM`` tokens each: (groups of all batch entries, row)."""
    definition: Jaxpr = eqn.params["jaxpr"]
    batch, tokens = eqn.invars[0].aval.shape[:2]
    row, groups = eqn.outvars[0].aval.size // (batch * tokens), -(-tokens // ROWS_OF_SUM)

    def both(*args: Any) -> list[Any]:
        (total,) = eval_jaxpr(definition, args)
        x = ew.convert(reshape(total, (batch, tokens, row)), dtypes.float32)
        x = pad(x, 0.0, ((0, 0, 0), (0, groups * ROWS_OF_SUM - tokens, 0), (0, 0, 0)))
        return [total, reduce_sum(reshape(x, (batch * groups, ROWS_OF_SUM, row)), (1,))]

    body = stage(both, [a.aval for a in eqn.invars], eqn.prim.name, line=eqn.source)
    sums = Var(ShapedArray((batch * groups, row), dtypes.float32))
    return Eqn(packed_p, eqn.invars, [eqn.outvars[0], sums], {**eqn.params, "jaxpr": body}, eqn.source)
