"""Window updates of arrays that die with them, as steps of their own.

Kernels, before stage 5. In: a jaxpr and the parameters whose memory is free after their last use, such as the carries
of a loop. Out: one in which a ``dynamic_update_slice`` of such a parameter writes the window alone. Fused, it would
compute every element of its result: an array of n elements that a loop updates one at a time would cost O(n) a round.
Where launches are expensive, small updates with nothing between them that reads one are joined: those of the keys and
the values of a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Var
from blufunc.core.ops.dynamic import dynamic_update_slice_p
from blufunc.core.ops.gather_scatter import scatter_add_p, scatter_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, rewrite
from blufunc.kernels.loopir.access_map import moves
from blufunc.kernels.ops.updates import joined_updates_p, update_in_place_p
from blufunc.kernels.rewrites.readers import Readers

LEAST_RATIO = 4
"""Minimum elements of the array per element of the window.

With fewer, a fused update writes little more.
"""

MOST_JOINED, MOST_BYTES = 16, 1 << 20
"""Maximum arrays of joined updates, and bytes of a window.

Of more, a launch is a small part of the time.
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
    return 0 < window.size * LEAST_RATIO <= array.size and array.nbytes >= least


def with_joined_updates(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """Join updates of different arrays, each at the place of the last one."""
    groups: list[list[Eqn]] = []
    readers = Readers(jaxpr)
    last = len(jaxpr.eqns)
    first_reader = lambda e: min(
        (readers.position[r.outvars[0]] if r.outvars else -1 for r in readers.of(e.outvars[0])), default=last
    )
    until = -1  # the first equation that reads an update of the last group
    for place, eqn in enumerate(jaxpr.eqns):
        if eqn.prim is not update_in_place_p or eqn.invars[1].aval.nbytes > MOST_BYTES:
            continue
        same = groups and origins.get(groups[-1][0]) == origins.get(eqn) and len(groups[-1]) < MOST_JOINED
        if same and place < until and _are_apart(groups[-1], eqn, readers):
            groups[-1].append(eqn)
            until = min(until, first_reader(eqn))
        else:
            groups.append([eqn])
            until = first_reader(eqn)
    joined = {group[-1]: group for group in groups if len(group) > 1}
    if not joined:
        return jaxpr
    gone = {e for group in joined.values() for e in group}
    eqns = [
        _joined(joined[e], origins) if e in joined else e for e in jaxpr.eqns if e in joined or e not in gone
    ]
    return jaxpr.replace(eqns=eqns)


def _are_apart(group: Sequence[Eqn], eqn: Eqn, readers: Readers) -> bool:
    """True if an update shares no array with others: one would have to be copied."""

    def root(a: Atom) -> Atom:
        while a.__class__ is Var and (maker := readers.makers.get(a)) is not None:
            if not moves(maker) or len(maker.invars) != 1:
                break
            (a,) = maker.invars
        return a

    used = [{root(a) for a in e.invars if a.__class__ is Var} for e in (*group, eqn)]
    written = [root(e.invars[0]) for e in (*group, eqn)]
    return all(written[-1] not in own for own in used[:-1]) and not used[-1] & {*written[:-1]}


def _joined(group: Sequence[Eqn], origins: Origins) -> Eqn:
    operands: list[Atom] = [a for e in group for a in e.invars]
    results = [v for e in group for v in e.outvars]
    made = Eqn(joined_updates_p, operands, results, group[0].params, group[-1].source)
    if group[-1] in origins:
        origins[made] = origins[group[-1]]
    return made
