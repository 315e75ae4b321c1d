"""Effects: what an equation does besides computing its results.

Core, beside every stage. An effect is a name; ``Primitive.effects_of`` says which ones a use has, and an equation
that holds jaxprs has those of all their equations. No pass or transform drops, repeats or reorders an equation with
effects. What computes a part of a program again, for a derivative, leaves out what only has effects (``silenced``).
"""

from __future__ import annotations

from typing import Any

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, map_jaxprs, subjaxprs
from blufunc.core.primitives.primitive import Primitive
from blufunc.errors import UnsupportedError

DEBUG, ORDERED_DEBUG = "debug", "ordered_debug"
IO, ORDERED_IO = "io", "ordered_io"

REPORTS = frozenset({DEBUG, ORDERED_DEBUG})
"""The effects of operations that report values and have no results: a program means the same without them."""


def acts(eqn: Eqn) -> bool:
    """Whether an equation does more than compute and report."""
    return not eqn.effects <= REPORTS


def check_divergence(prim: Primitive, params: dict[str, Any]) -> None:
    """Refuse to map what acts where the elements of a batch go ways of their own: for a batch, every way is gone.

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
    """The jaxpr without the equations, also in calls and loops, that have effects and no results; its type stays."""
    if not jaxpr.effects:
        return jaxpr

    def make() -> Jaxpr:
        wanted = [
            e for e in jaxpr.eqns if not e.effects or any(v.__class__ is not DropVar for v in e.outvars)
        ]
        return jaxpr.replace(
            eqns=[Eqn(e.prim, e.invars, e.outvars, silenced_params(e.params), e.source) for e in wanted]
        )

    return jaxpr.memoised("silenced", make)


def silenced_params(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation with every jaxpr among them silenced."""
    return map_jaxprs(silenced, params)


def calls_back(jaxpr: Jaxpr) -> bool:
    """Whether a program calls functions of the user's."""
    return jaxpr.memoised("calls back", lambda: any(eqn_calls_back(e.prim, e.params) for e in jaxpr.eqns))


def eqn_calls_back(prim: Any, params: dict[str, Any]) -> bool:
    """Whether one operation does."""
    return prim.kind == "callback" or any(calls_back(body) for body in subjaxprs(params))
