"""Effects of equations: actions besides computing results.

Core, at every stage. An effect is a name. ``Primitive.effects_of`` lists those of one use; an equation with
jaxprs has those of all their equations. No pass or transform drops, repeats or reorders an equation with
effects. Recomputation for a derivative leaves out equations that have only effects (``silenced``).
"""

from __future__ import annotations

from typing import Any

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, map_jaxprs, subjaxprs
from blufunc.core.primitives.primitive import Primitive
from blufunc.errors import UnsupportedError


class DebugEffect(str):
    """The effect of a report: it happens in any order."""

    __slots__ = ()


class OrderedDebugEffect(str):
    """The effect of a report whose order with others is that of the program."""

    __slots__ = ()


DEBUG, ORDERED_DEBUG = DebugEffect("debug"), OrderedDebugEffect("ordered_debug")
IO, ORDERED_IO = "io", "ordered_io"

REPORTS = frozenset({DEBUG, ORDERED_DEBUG})
"""Effects of reports without results, which do not change a program's meaning."""


def acts(eqn: Eqn) -> bool:
    """True if an equation has effects other than reports."""
    return not eqn.effects <= REPORTS


def check_divergence(prim: Primitive, params: dict[str, Any]) -> None:
    """Reject effects in divergent control flow under a batch, where every branch runs.

    Raises:
      UnsupportedError: unless the use has no effects but reports.
    """
    if not prim.effects_of(params) <= REPORTS:
        raise UnsupportedError(
            f"vmap of a {prim.name} with the effects {', '.join(sorted(prim.effects_of(params)))}, where each "
            "element goes its own way.",
            where=source.here(),
            why="all elements go all ways, and results are chosen afterwards: effects would happen too often.",
            fix="move the io_callback out of it, or loop over the elements with lax.map",
        )


def silenced(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr, bodies included, without equations that have only effects; same type."""
    if not jaxpr.effects:
        return jaxpr

    def make() -> Jaxpr:
        remaining = [
            e for e in jaxpr.eqns if not e.effects or any(v.__class__ is not DropVar for v in e.outvars)
        ]
        return jaxpr.replace(
            eqns=[Eqn(e.prim, e.invars, e.outvars, silenced_params(e.params), e.source) for e in remaining]
        )

    return jaxpr.memoised("silenced", make)


def silenced_params(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation with each jaxpr silenced."""
    return map_jaxprs(silenced, params)


def calls_back(jaxpr: Jaxpr) -> bool:
    """True if a program calls user functions."""
    return jaxpr.memoised("calls back", lambda: any(eqn_calls_back(e.prim, e.params) for e in jaxpr.eqns))


def eqn_calls_back(prim: Any, params: dict[str, Any]) -> bool:
    """True if one operation calls user functions."""
    return prim.kind == "callback" or any(calls_back(body) for body in subjaxprs(params))
