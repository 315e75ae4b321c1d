"""Reductions of groups of features, over rows first.

Kernels, before stage 5. In: a jaxpr, its calls inlined. Out: one in which the reduction f32[b, rows, groups, few] over
``rows`` and ``few``, as of a group norm, is a column reduction over ``rows`` and one of the few elements left.

A group's elements are ``few`` at a time in memory. A kernel that reduces one group reads a sector of memory for them,
and those of other groups in it are read again. The cost model compares these reads with the second launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Var
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.programs.simplify import Origins, rewrite
from blufunc.kernels.fusion.iteration_space import reduces, reduction_pattern, sort_of
from blufunc.kernels.loopir.access_map import moves
from blufunc.kernels.machine import Machine

_SECTOR = 32
"""Bytes that a GPU reads at a time."""


def with_columns_first(jaxpr: Jaxpr, origins: Origins, machine: Machine) -> Jaxpr:
    """Split the reductions that read sectors again."""
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    found = {e for e in jaxpr.eqns if _is_of_groups(e) and _seconds_lost(e, makers, machine) > machine.launch}

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        if eqn not in found:
            return [eqn.with_invars(invars)]
        (x,), axes = invars, eqn.params["axes"]
        last = _trailing(x.aval.shape, axes)
        rows = tuple(a for a in axes if a not in last)
        kept = [n for d, n in enumerate(x.aval.shape) if d not in rows]
        columns = Var(eqn.outvars[0].aval.with_shape(tuple(kept)))
        few = tuple(a - sum(r < a for r in rows) for a in last)
        return [
            Eqn(eqn.prim, [x], [columns], {**eqn.params, "axes": rows}, eqn.source),
            Eqn(eqn.prim, [columns], eqn.outvars, {**eqn.params, "axes": few}, eqn.source),
        ]

    return rewrite(jaxpr, step, origins) if found else jaxpr


def _is_of_groups(eqn: Eqn) -> bool:
    """True for a reduction of rows and of the last elements, with groups in between."""
    op = reduces(eqn.prim)
    if not op or "index_dtype" in eqn.params or sort_of(eqn) != "node":
        return False
    dtype = eqn.outvars[0].aval.dtype
    if dtypes.is_complex(dtype) or (dtype.itemsize < 4 and op not in ("max", "min")):  # rounded in between
        return False
    pattern = reduction_pattern(eqn.invars[0].aval.shape, eqn.params["axes"])
    return [reduced for _, reduced in pattern] in ([True, False, True], [False, True, False, True])


def _trailing(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """The reduced axes after the last kept one of more than one element."""
    kept = max(d for d, n in enumerate(shape) if d not in axes and n > 1)
    return tuple(a for a in axes if a > kept)


def _seconds_lost(eqn: Eqn, makers: dict[Any, Eqn], machine: Machine) -> float:
    """The time to read sectors for other groups' elements in them."""
    x, axes = eqn.invars[0].aval, eqn.params["axes"]
    few = math.prod([x.shape[a] for a in _trailing(x.shape, axes)])
    itemsize = _itemsize(eqn.invars[0], makers)
    repeats = _SECTOR / (few * itemsize) - 1
    return max(repeats, 0) * x.size * itemsize / machine.bandwidth


def _itemsize(atom: Any, makers: dict[Any, Eqn]) -> int:
    """Bytes of an element where it is stored, at least."""
    size, seen, left = atom.aval.dtype.itemsize, {atom}, [atom]
    while left:
        eqn = makers.get(left.pop())
        if eqn is None or not (isinstance(eqn.prim, Elementwise) or moves(eqn)):
            continue
        for a in eqn.invars:
            if isinstance(a, Var) and a not in seen and a.aval.size == atom.aval.size:
                size = min(size, a.aval.dtype.itemsize)
                seen.add(a)
                left.append(a)
    return size
