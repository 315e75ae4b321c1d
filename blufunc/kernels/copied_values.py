"""What copies compute on the way: values that nothing but a copy reads.

Kernels, stage 5, below ``fuse.py``. In: a jaxpr. Out: the variables that are not stored, as whoever copies them into
order computes them of what lies in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blufunc.core.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.kinds import Elementwise
from blufunc.core.ops.elementwise import convert_p, copy_p
from blufunc.core.ops.shape import concatenate_p, pad_p
from blufunc.kernels import scalars
from blufunc.kernels.access import moves

_LITTLE = 2  # operations that a copy does beside moving


def computed_in_copies(jaxpr: Jaxpr) -> set[Var]:
    """What only copies read, by way of movement and of each other, and is computed by little of no more memory."""
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    inside: set[Any] = set()  # what some reader only copies
    outside: set[Any] = set(jaxpr.outvars)  # what some reader does not
    found: set[Var] = set()
    for e in reversed(jaxpr.eqns):
        v = e.outvars[0] if len(e.outvars) == 1 else None
        if v in inside and v not in outside and _is_little(e, makers):
            found.add(v)  # type: ignore[arg-type]
        passes = v in found and (moves(e) or isinstance(e.prim, Elementwise))
        if passes or e.prim is copy_p:
            inside.update(e.invars)
        elif e.prim is pad_p or e.prim is concatenate_p:
            for a in e.invars:
                (inside if a.aval.ndim else outside).add(a)
        else:
            outside.update(e.invars)
    return found


def _is_little(eqn: Eqn, makers: Mapping[Any, Eqn]) -> bool:
    """Whether an equation is no more than movement, or a little work on one array of no less memory."""
    if not isinstance(eqn.prim, Elementwise) or eqn.prim is copy_p:
        return True
    size = eqn.outvars[0].aval.size
    large = [a for a in eqn.invars if _stored_size(a, makers) >= size > 1]
    return len(large) <= 1 and scalars.cost(eqn.prim) <= _LITTLE


def _stored_size(operand: Atom, makers: Mapping[Any, Eqn]) -> int:
    """The elements of what an operand is moved from."""
    a = operand
    while a in makers and (moves(makers[a]) or makers[a].prim is convert_p):
        a = makers[a].invars[0]
    return 1 if a.__class__ is Literal else a.aval.size
