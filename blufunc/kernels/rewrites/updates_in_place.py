"""Window updates of arrays that die with them, as steps of their own.

Kernels, before stage 5. In: a jaxpr and the parameters whose memory is free after their last use, such as the carries
of a loop. Out: one in which a ``dynamic_update_slice`` of such a parameter writes the window alone. Fused, it would
compute every element of its result: an array of n elements that a loop updates one at a time would cost O(n) a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr
from blufunc.core.ops.dynamic import dynamic_update_slice_p
from blufunc.core.ops.gather_scatter import scatter_add_p, scatter_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, rewrite
from blufunc.kernels.ops.updates import update_in_place_p

LEAST_RATIO = 4
"""Minimum elements of the array per element of the window.

With fewer, a fused update writes little more.
"""


def with_updates_in_place(jaxpr: Jaxpr, donated: Sequence[bool], origins: Origins, least: int = 0) -> Jaxpr:
    """Replace window updates that may be in place.

    Args:
      least: minimum bytes of the array.
    """
    if not any(e.prim is dynamic_update_slice_p for e in jaxpr.eqns):
        return jaxpr
    free = {v for v, d in zip(jaxpr.invars, donated, strict=True) if d and v.aval.ndim}

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        if not invars or invars[0] not in free or is_replaced(eqn.prim, "impl"):
            return [eqn]
        if eqn.prim in (scatter_p, scatter_add_p):
            free.add(eqn.outvars[0])
        elif eqn.prim is dynamic_update_slice_p and _is_small(invars[1].aval, invars[0].aval, least):
            free.add(eqn.outvars[0])
            return [Eqn(update_in_place_p, invars, eqn.outvars, eqn.params, eqn.source)]
        return [eqn]

    return rewrite(jaxpr, step, origins)


def _is_small(window: ShapedArray, array: ShapedArray, least: int) -> bool:
    return window.size * LEAST_RATIO <= array.size and array.nbytes >= least
