"""Column sums begun by the kernels that write their operand.

Kernels, after ``packed_outputs`` and ``pointwise_epilogue``. In: a program with matmuls that have epilogues, and with
packed gradients of attention. Out: an equivalent one, in which the gradient of a bias, the sum of such a result over
all rows, is a sum of partial sums over a few rows each. Kernels have these in registers when they store the result, so
it is not read again.
"""

from __future__ import annotations

import dataclasses
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
from blufunc.kernels.ops.pointwise_gemm import columns_of
from blufunc.kernels.rewrites.packed_outputs import packed_p, widens
from blufunc.kernels.rewrites.readers import Readers


def with_partial_sums(jaxpr: Jaxpr, origins: Origins, rows_of_sums: Callable[[Eqn], int]) -> Jaxpr:
    """Let kernels begin column sums; ``rows_of_sums`` as in ``Target``."""
    able = {e: n for e in jaxpr.eqns if (n := rows_of_sums(e))}
    if not able or is_replaced(reduce_sum_p, "impl"):
        return jaxpr
    readers = Readers(jaxpr)
    begun: dict[Eqn, Eqn] = {}  # by sum, the equation that begins it
    summed: dict[Eqn, int] = {}  # by equation, the index of the result that is summed
    for eqn in able:
        for n, v in enumerate(eqn.outvars):
            if eqn not in summed and (found := _sums_over_rows(v, _rows(eqn), readers)):
                summed[eqn] = n
                begun.update(dict.fromkeys(found, eqn))
    partial: dict[Eqn, Var] = {}

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        if eqn in summed:
            made = eqn.with_invars(invars)
            if eqn.prim is packed_p:
                made = _with_sums_of_tokens(made, able[eqn])
            else:
                made = _with_sums_of_rows(made, summed[eqn], able[eqn])
            partial[eqn] = made.outvars[-1]
            return [made]
        if eqn not in begun:
            return [eqn.with_invars(invars)]
        shape, sums = eqn.outvars[0].aval.shape, partial[begun[eqn]]
        body = stage(lambda x: [reshape(reduce_sum(x, (0,)), shape)], [sums.aval], "sum", line=eqn.source)
        return put_in_place(eqn, body, [sums], alias)

    return rewrite(jaxpr, step, origins) if summed else jaxpr


def _rows(eqn: Eqn) -> int:
    """Rows of the results of an equation."""
    if eqn.prim is packed_p:
        return math.prod(eqn.invars[0].aval.shape[:2])
    columns = columns_of(eqn.invars[1].aval.shape, eqn.params["dimension_numbers"])
    return eqn.outvars[0].aval.size // columns


def _sums_over_rows(result: Var, rows: int, readers: Readers) -> set[Eqn]:
    """The equations that sum a result over all rows, and no other axis."""
    found: set[Eqn] = set()
    seen: list[Atom] = [result]
    for v in seen:
        for eqn in readers.of(v):
            if eqn.prim is reshape_p or widens(eqn):
                seen.append(eqn.outvars[0])
            elif eqn.prim is reduce_sum_p and v.aval.dtype == dtypes.float32:
                axes = eqn.params["axes"]
                if axes == tuple(range(len(axes))) and math.prod(v.aval.shape[: len(axes)]) == rows:
                    found.add(eqn)
    return found


def _with_sums_of_tokens(eqn: Eqn, rows: int) -> Eqn:
    """Packed gradients with sums of ``rows`` tokens each, as (batch x groups, row)."""
    definition: Jaxpr = eqn.params["jaxpr"]
    batch, tokens = eqn.invars[0].aval.shape[:2]
    row, groups = eqn.outvars[0].aval.size // (batch * tokens), -(-tokens // rows)

    def both(*args: Any) -> list[Any]:
        (total,) = eval_jaxpr(definition, args)
        x = ew.convert(reshape(total, (batch, tokens, row)), dtypes.float32)
        x = pad(x, 0.0, ((0, 0, 0), (0, groups * rows - tokens, 0), (0, 0, 0)))
        return [total, reduce_sum(reshape(x, (batch * groups, rows, row)), (1,))]

    body = stage(both, [a.aval for a in eqn.invars], eqn.prim.name, line=eqn.source)
    sums = Var(ShapedArray((batch * groups, row), dtypes.float32))
    return Eqn(packed_p, eqn.invars, [eqn.outvars[0], sums], {**eqn.params, "jaxpr": body}, eqn.source)


def _with_sums_of_rows(eqn: Eqn, result: int, rows: int) -> Eqn:
    """A matmul with an epilogue and with sums of a result over ``rows`` rows each."""
    epilogue = dataclasses.replace(eqn.params["epilogue"], summed=result, rows=rows)
    params = {**eqn.params, "epilogue": epilogue}
    made = eqn.prim.abstract(*[a.aval for a in eqn.invars], **params)
    return Eqn(eqn.prim, eqn.invars, [*eqn.outvars, Var(made[-1])], params, eqn.source)
