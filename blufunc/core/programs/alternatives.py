"""Equations with two bodies become one of them, when it is known which device runs the program.

Core, before stage 4. An equation of a primitive with ``alternative`` (``transforms/control_flow/platform_variants.py``)
has a plain body and a preferred one, for devices with kernels for the operations in it. What only the body that was not
taken needs, the values kept for its backward pass among it, goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Literal, map_jaxprs, subjaxprs
from blufunc.core.programs import simplify

Prefers = Callable[[Eqn], bool]


def none(eqn: Eqn) -> bool:
    """What a device without kernels prefers."""
    return False


def has_alternatives(jaxpr: Jaxpr) -> bool:
    """Whether there is something to choose in a jaxpr, or in the bodies that it runs."""

    def look() -> tuple[bool]:
        eqns = jaxpr.eqns
        return (any(e.prim.alternative or any(map(has_alternatives, subjaxprs(e.params))) for e in eqns),)

    return jaxpr.memoised("has alternatives", look)[0]


def chosen(jaxpr: Jaxpr, prefers: Prefers = none) -> Jaxpr:
    """A jaxpr in which each equation with two bodies is one of them, and nothing is computed or kept for the other.

    Args:
      prefers: whether an equation's preferred body is taken. It is not, all the same, where somebody reads what only
        the plain one has.
    """
    if not has_alternatives(jaxpr):
        return jaxpr
    jits = {e.prim for e in jaxpr.eqns if e.prim.name == "jit"}
    for prim in jits:  # a forward and a backward pass are two calls, of which one says what the other keeps
        jaxpr = simplify.inline_calls(jaxpr, only=prim)
    live = {v for v in jaxpr.outvars if v.__class__ is not Literal}
    kept: list[Eqn] = []
    bodies: dict[int, Jaxpr] = {}
    for eqn in reversed(jaxpr.eqns):  # readers first: they say what must be computed for them
        reads = [v in live for v in eqn.outvars]
        if not any(reads) and not eqn.effects:
            continue
        if eqn.prim.alternative:
            eqn, body = _one_of(eqn, reads, prefers)
            bodies[id(eqn)] = body
            used = simplify.used(body)
            wanted = [a for a, v in zip(eqn.invars, body.invars, strict=True) if v in used]
        else:
            eqn = _narrowed(eqn, reads, prefers)
            wanted = list(eqn.invars)
        live.update(a for a in wanted if a.__class__ is not Literal)
        kept.append(eqn)

    def step(eqn: Eqn, invars: list, alias: Callable) -> list[Eqn]:
        body = bodies.get(id(eqn))
        if body is None:
            return [eqn.with_invars(invars)]
        return simplify.put_in_place(eqn, body, invars, alias)

    return simplify.rewrite(jaxpr.replace(eqns=kept[::-1]), step)


def _one_of(eqn: Eqn, reads: Sequence[bool], prefers: Prefers) -> tuple[Eqn, Jaxpr]:
    """The equation with the results that are read, and the body that is to compute them."""
    common, plain, _ = eqn.params["parts"]
    preferred = prefers(eqn) and not any(reads[common : common + plain])
    which = eqn.prim.alternative if preferred else eqn.prim.body
    body = simplify.dce(chosen(eqn.params[which], prefers), reads)
    outvars = [v for v, r in zip(eqn.outvars, reads, strict=True) if r]
    return eqn.with_vars(eqn.invars, outvars), body


def _narrowed(eqn: Eqn, reads: list[bool], prefers: Prefers) -> Eqn:
    """An equation whose bodies are without alternatives, and without the operands that nobody reads then."""
    if not any(map(has_alternatives, subjaxprs(eqn.params))):
        return eqn
    eqn = _read(eqn, reads)  # first, as what is read of a body says what is chosen in it
    params = map_jaxprs(lambda body: chosen(body, prefers), eqn.params)
    eqn = Eqn(eqn.prim, eqn.invars, eqn.outvars, params, eqn.source)
    return _read(eqn, [v.__class__ is not DropVar for v in eqn.outvars])


def _read(eqn: Eqn, reads: list[bool]) -> Eqn:
    """An equation with the results that are read, and the operands that it needs for these."""
    if eqn.prim.drop_outputs is not None:
        return eqn.prim.drop_outputs(eqn, reads)
    outvars = [v if r else DropVar(v.aval) for v, r in zip(eqn.outvars, reads, strict=True)]
    return eqn.with_vars(eqn.invars, outvars)
