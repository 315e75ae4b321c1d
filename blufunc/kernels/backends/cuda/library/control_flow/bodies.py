"""Programs that loops and branches run, and what these may overwrite.

Kernels, stage 6. In: the equation of a ``scan``, ``while`` or ``cond``. Out: jaxprs. A round of a ``while`` is one
program: its body, and the condition of the next round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var, communicates
from blufunc.core.programs.simplify import put_in_place

LARGE = 1 << 12
"""Minimum bytes of a carry that a round updates in place if it can.

A loop copies such a carry once, before the first round; smaller ones cost less to copy in each.
"""


class Nested(NamedTuple):
    """A jaxpr, and for each parameter whether its memory may be overwritten."""

    jaxpr: Jaxpr
    donated: tuple[bool, ...]


def nested(eqn: Eqn) -> list[Nested]:
    """The programs of an equation, in the order of its parameters."""
    p = eqn.params
    if eqn.prim.name == "scan":
        return [Nested(p["jaxpr"], written_over(**p))]
    if eqn.prim.name == "while":
        return [_kept(p["cond"]), round_of(eqn)]
    return [_kept(j) for value in p.values() for j in (value if isinstance(value, tuple) else (value,))
            if isinstance(j, Jaxpr)]  # fmt: skip


def _kept(jaxpr: Jaxpr) -> Nested:
    return Nested(jaxpr, (False,) * len(jaxpr.invars))


def written_over(jaxpr: Jaxpr, *, n_consts: int = 0, n_carry: int = 0, **_: Any) -> tuple[bool, ...]:
    """Donation flags for the arguments of a scan's body."""
    avals = enumerate(v.aval for v in jaxpr.invars)
    return tuple(0 <= i - n_consts < n_carry and a.ndim > 0 and a.nbytes >= LARGE for i, a in avals)


def round_of(eqn: Eqn) -> Nested:
    """A round of a ``while``: its body, then its condition on the new carry.

    The constants are those of the condition, then those of the body. The predicate says whether there is another round.
    """
    cond, body, n_cond, n_body = (eqn.params[k] for k in ("cond", "body", "n_cond", "n_body"))

    def join() -> Jaxpr:
        consts = [Var(a) for a in cond.in_avals[:n_cond]]
        known: dict[Any, Any] = {}
        results = [Var(a) for a in body.out_avals]
        call = Eqn(eqn.prim, body.invars, results, {}, eqn.source)
        eqns = [*put_in_place(call, body, body.invars, known.__setitem__)]
        carry = [known[v] for v in results]
        predicate = Var(cond.out_avals[0])
        test = Eqn(eqn.prim, [*consts, *carry], [predicate], {}, eqn.source)
        eqns += put_in_place(test, cond, test.invars, known.__setitem__)
        return Jaxpr([*consts, *body.invars], eqns, [*carry, known[predicate]], name=body.name)

    jaxpr = body.memoised(("round", cond, n_cond, n_body), join)
    n_consts = n_cond + n_body
    return Nested(jaxpr, written_over(jaxpr, n_consts=n_consts, n_carry=len(body.outvars)))


def has_collectives(jaxpr: Jaxpr) -> bool:
    """True if a jaxpr waits for other devices, which conditional nodes cannot do."""
    return any(map(communicates, jaxpr.eqns))
