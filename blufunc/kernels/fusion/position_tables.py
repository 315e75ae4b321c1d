"""Position tables: values of positions alone that many elements read, such as the angles of a rotary embedding.

Kernels, stage 5, below ``fuse.py``. In: a jaxpr. Out: the variables that are stored although they depend on nothing in
memory. What is computed from positions (``iota``) is usually computed by every reader: an element of a causal mask
costs one comparison. A table costs more than that, and a reader with many times its elements would repeat it as often.
"""

from __future__ import annotations

from typing import Any

from blufunc.core.ir.jaxpr import Jaxpr, Literal, Var
from blufunc.core.ops.shape import iota_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.kernels.loopir.access_map import moves

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
