"""Better forms: recognizers find them, equations with two bodies hold them, devices choose.

Core, between stages 1 and 2, and again before stage 4 on devices that have kernels. A **recognizer** goes through a
jaxpr and puts an equation of a primitive with ``alternative`` (``transforms/control_flow/platform_variants.py``) in the
place of each part that it knows: with a plain body, the part as it was written, and a preferred one, for devices with
kernels for the operations in it. Recognizers stand above the transforms that ask for them; ``blufunc/__init__.py``
registers them. When it is known which device runs the program, one body is taken, and what only the other needs, the
values kept for its backward pass among it, goes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc.config import config
from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Literal, map_jaxprs, subjaxprs
from blufunc.core.programs import simplify

# -- recognizers ------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What a recogniser made of a jaxpr.

    Attributes:
      jaxpr: with the parts that it knows replaced; the very jaxpr if there are none.
      misses: a line for each part that is nearly one that it knows, and why it is not.
    """

    jaxpr: Jaxpr
    misses: tuple[str, ...] = ()


_WRITTEN_BY_USERS = ("checkpoint", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call")
"""Calls of users' functions; the bodies of others are definitions of operations that are known."""

recognisers: list[tuple[frozenset[str], Callable[[Jaxpr], Found]]] = []
"""Asked in this order, each with the primitives that a jaxpr must have for it; ``blufunc/__init__.py`` fills this list,
and the next table."""

refusals: dict[str, Callable[[tuple[int, ...], np.dtype], str | None]] = {}
"""For an operation, from its sizes and dtype to the reason why no device has a kernel for it; None where one has."""


class _State(threading.local):
    as_written = False


_state = _State()


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Within the block nothing is recognised: for those who look at what users wrote."""
    before, _state.as_written = _state.as_written, True
    try:
        yield
    finally:
        _state.as_written = before


def is_as_written() -> bool:
    """Whether this thread is within ``as_written``."""
    return _state.as_written


def recognised(jaxpr: Jaxpr) -> Found:
    """A jaxpr with all that is known in it replaced."""
    if not config.recognise or _state.as_written:
        return Found(jaxpr)

    def find() -> tuple[Jaxpr | None, tuple[str, ...]]:
        found, misses = jaxpr, []
        for needed, recognise in recognisers:
            if needed <= _primitives(jaxpr):
                found, more = recognise(found)
                misses += more
        return (None if found is jaxpr else found), tuple(misses)  # a memo of itself would keep it alive

    found, misses = jaxpr.memoised("recognised", find)
    return Found(found or jaxpr, misses)


def _primitives(jaxpr: Jaxpr) -> frozenset[str]:
    """The names of all primitives of a jaxpr and of the jaxprs in it."""

    def find() -> frozenset[str]:
        inner = [_primitives(j) for e in jaxpr.eqns for j in subjaxprs(e.params)]
        return frozenset(e.prim.name for e in jaxpr.eqns).union(*inner)

    return jaxpr.memoised("primitives", find)


def recognised_everywhere(jaxpr: Jaxpr) -> Found:
    """The same, and in the bodies of loops, branches and calls: for programs of which all transforms are done."""
    found, misses = recognised(jaxpr)
    within: list[str] = []

    def param(value: Any) -> Any:
        if isinstance(value, Jaxpr):
            inner = recognised_everywhere(value)
            within.extend(inner.misses)
            return inner.jaxpr
        if isinstance(value, tuple) and any(isinstance(v, Jaxpr) for v in value):
            made = tuple(map(param, value))
            return made if any(a is not b for a, b in zip(made, value, strict=True)) else value
        return value

    def bodies(eqn: Eqn) -> Eqn:
        if eqn.prim.kind != "control" and eqn.prim.name not in _WRITTEN_BY_USERS:
            return eqn
        params = {k: param(v) for k, v in eqn.params.items()}
        changed = any(params[k] is not v for k, v in eqn.params.items())
        return Eqn(eqn.prim, eqn.invars, eqn.outvars, params, eqn.source) if changed else eqn

    eqns = list(map(bodies, found.eqns))
    if any(a is not b for a, b in zip(eqns, found.eqns, strict=True)):
        found = found.replace(eqns=eqns)
    return Found(found, (*misses, *within))


# -- the choice -------------------------------------------------------------------------------------


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
