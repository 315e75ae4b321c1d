"""Branches of a batched ``cond`` that are skipped if no element takes them.

Transforms, stage 2, called by ``cond.py``. In: the jaxpr of a branch for a batch. Out: whether a test that costs a
reduction over the batch, and keeps the branch apart from its neighbors, pays. On a GPU it does not: the host would wait
for its result.
"""

from __future__ import annotations

import math
from typing import Any

from blufunc.config import config
from blufunc.core.arrays import backend
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, communicates, subjaxprs

LEAST_COST = 1 << 20
"""Minimum cost of a branch, in additions: some tenths of a millisecond."""

_LEAST_INTENSITY = 16
"""Minimum cost per element of operands and results, which then lie in memory."""

_POINTWISE = frozenset(("elementwise", "movement", "control", "call", "points"))
"""Kinds that fuse if their bodies do: kernels test each point of these alone."""

_ROUNDS = 16
"""Assumed rounds of a loop without a known number."""


def pays(jaxpr: Jaxpr) -> bool:
    """True if a branch for a batch should be skipped where no element takes it."""
    if config.cpu_devices > 1 or backend.default_device().platform != "cpu":
        return False
    if jaxpr.effects or any(map(communicates, jaxpr.eqns)) or all(map(_is_pointwise, jaxpr.eqns)):
        return False
    elements = sum(v.aval.size for v in (*jaxpr.invars, *jaxpr.outvars))
    return _cost(jaxpr) >= max(LEAST_COST, _LEAST_INTENSITY * elements)


def _is_pointwise(eqn: Eqn) -> bool:
    return eqn.prim.kind in _POINTWISE and all(
        _is_pointwise(e) for j in subjaxprs(eqn.params) for e in j.eqns
    )


def _cost(jaxpr: Jaxpr) -> float:
    return sum(map(_cost_of, jaxpr.eqns))


def _cost_of(eqn: Eqn) -> float:
    """Estimated cost of an equation, in additions."""
    prim, avals = eqn.prim, [a.aval for a in eqn.invars]
    bodies = [_cost(j) for j in subjaxprs(eqn.params)]
    if bodies:
        if prim.name == "cond":
            return max(bodies)
        return sum(bodies) * _rounds_of(eqn.params)
    if prim.flops is not None:
        return prim.flops(*avals, **eqn.params)
    size = max((a.size for a in (*avals, *(v.aval for v in eqn.outvars))), default=0)
    if prim.kind == "linalg":
        return size * max((a.shape[-1] for a in avals if a.shape), default=1)
    if prim.kind in ("sort", "fft", "cumulative"):
        return size * max(1.0, math.log2(max(size, 2)))
    return size * prim.cost if prim.kind == "elementwise" else size


def _rounds_of(params: dict[str, Any]) -> int:
    if "length" in params:
        return params["length"]
    return (params["max_steps"] or _ROUNDS) if "max_steps" in params else 1
