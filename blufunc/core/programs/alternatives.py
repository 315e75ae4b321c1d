"""Pattern recognizers and the choice between platform variants.

Core, between stages 1 and 2, and before stage 4 on devices that have kernels. A **recognizer** scans a jaxpr
for known patterns. It replaces each by an equation of a primitive with ``alternative``
(``transforms/control_flow/platform_variants.py``). That equation has two bodies: the pattern as written, and
a preferred one of operations that some devices have kernels for. Recognizers live above the transforms that
use them; ``blufunc/__init__.py`` registers them. Once the device is known, one body is chosen, and everything
that only the other needs is dropped, residuals of its backward pass included.
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
    """Result of a recognizer on a jaxpr.

    Attributes:
      jaxpr: with the recognized patterns replaced; the same object if there are none.
      misses: a line for each near miss of a pattern, with the reason.
    """

    jaxpr: Jaxpr
    misses: tuple[str, ...] = ()


_WRITTEN_BY_USERS = ("checkpoint", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call")
"""Calls of user functions; other calls' bodies define known operations."""

recognisers: list[tuple[frozenset[str], Callable[[Jaxpr], Found]]] = []
"""Recognizers in order, each with the primitives that its patterns require.
``blufunc/__init__.py`` fills this list, and the next table."""

refusals: dict[str, Callable[[tuple[int, ...], np.dtype], str | None]] = {}
"""Per operation, sizes and dtype -> why no device has a kernel, or None."""


class _State(threading.local):
    as_written = False


_state = _State()


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Disable recognizers within the block, to inspect programs as written."""
    before, _state.as_written = _state.as_written, True
    try:
        yield
    finally:
        _state.as_written = before


def is_as_written() -> bool:
    """True within ``as_written``, in this thread."""
    return _state.as_written


def recognised(jaxpr: Jaxpr) -> Found:
    """A jaxpr with all recognized patterns replaced."""
    if not config.recognise or _state.as_written:
        return Found(jaxpr)

    def find() -> tuple[Jaxpr | None, tuple[str, ...]]:
        found, misses = jaxpr, []
        for needed, recognise in recognisers:
            if needed <= _primitives(jaxpr):
                found, more = recognise(found)
                misses += more
        return (None if found is jaxpr else found), tuple(
            misses
        )  # a memo that held its own jaxpr would keep it alive

    found, misses = jaxpr.memoised("recognised", find)
    return Found(found or jaxpr, misses)


def _primitives(jaxpr: Jaxpr) -> frozenset[str]:
    """The names of all primitives of a jaxpr and of its nested jaxprs."""

    def find() -> frozenset[str]:
        inner = [_primitives(j) for e in jaxpr.eqns for j in subjaxprs(e.params)]
        return frozenset(e.prim.name for e in jaxpr.eqns).union(*inner)

    return jaxpr.memoised("primitives", find)


def recognised_everywhere(jaxpr: Jaxpr) -> Found:
    """``recognised``, also in nested bodies: for programs past all transforms."""
    found, misses = recognised(jaxpr)
    within: list[str] = []

    def param(value: Any) -> Any:
        if isinstance(value, Jaxpr):
            inner = recognised_everywhere(value)
            within.extend(inner.misses)
            return inner.jaxpr
        if isinstance(value, tuple) and any(isinstance(v, Jaxpr) for v in value):
            mapped = tuple(map(param, value))
            return mapped if any(a is not b for a, b in zip(mapped, value, strict=True)) else value
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
    """Preference of a device without kernels: never the preferred body."""
    return False


def has_alternatives(jaxpr: Jaxpr) -> bool:
    """True if a jaxpr or a body in it has platform variants."""

    def look() -> tuple[bool]:
        eqns = jaxpr.eqns
        return (any(e.prim.alternative or any(map(has_alternatives, subjaxprs(e.params))) for e in eqns),)

    return jaxpr.memoised("has alternatives", look)[0]


def chosen(jaxpr: Jaxpr, prefers: Prefers = none) -> Jaxpr:
    """A jaxpr with one body of each two-body equation inlined, and the other dropped.

    Args:
      prefers: whether to take an equation's preferred body. The plain one is taken if a result that only it has is
        read.
    """
    if not has_alternatives(jaxpr):
        return jaxpr
    jits = {e.prim for e in jaxpr.eqns if e.prim.name == "jit"}
    for (
        prim
    ) in jits:  # forward and backward pass are two calls: the backward one determines the forward residuals
        jaxpr = simplify.inline_calls(jaxpr, only=prim)
    live = {v for v in jaxpr.outvars if v.__class__ is not Literal}
    kept: list[Eqn] = []
    bodies: dict[int, Jaxpr] = {}
    for eqn in reversed(jaxpr.eqns):  # readers first: they determine which results must be computed
        reads = [v in live for v in eqn.outvars]
        if not any(reads) and not eqn.effects:
            continue
        if eqn.prim.alternative:
            eqn, body = _one_of(eqn, reads, prefers)
            bodies[id(eqn)] = body
            used = simplify.used(body)
            operands = [a for a, v in zip(eqn.invars, body.invars, strict=True) if v in used]
        else:
            eqn = _narrowed(eqn, reads, prefers)
            operands = list(eqn.invars)
        live.update(a for a in operands if a.__class__ is not Literal)
        kept.append(eqn)

    def step(eqn: Eqn, invars: list, alias: Callable) -> list[Eqn]:
        body = bodies.get(id(eqn))
        if body is None:
            return [eqn.with_invars(invars)]
        return simplify.put_in_place(eqn, body, invars, alias)

    return simplify.rewrite(jaxpr.replace(eqns=kept[::-1]), step)


def _one_of(eqn: Eqn, reads: Sequence[bool], prefers: Prefers) -> tuple[Eqn, Jaxpr]:
    """The equation with the read results, and the body that computes them."""
    common, plain, _ = eqn.params["parts"]
    preferred = prefers(eqn) and not any(reads[common : common + plain])
    which = eqn.prim.alternative if preferred else eqn.prim.body
    body = simplify.dce(chosen(eqn.params[which], prefers), reads)
    outvars = [v for v, r in zip(eqn.outvars, reads, strict=True) if r]
    return eqn.with_vars(eqn.invars, outvars), body


def _narrowed(eqn: Eqn, reads: list[bool], prefers: Prefers) -> Eqn:
    """An equation with resolved bodies, without the operands that they do not read."""
    if not any(map(has_alternatives, subjaxprs(eqn.params))):
        return eqn
    eqn = _read(eqn, reads)  # first, since the results read from a body determine the choices in it
    params = map_jaxprs(lambda body: chosen(body, prefers), eqn.params)
    eqn = Eqn(eqn.prim, eqn.invars, eqn.outvars, params, eqn.source)
    return _read(eqn, [v.__class__ is not DropVar for v in eqn.outvars])


def _read(eqn: Eqn, reads: list[bool]) -> Eqn:
    """An equation with the read results, and the operands that these need."""
    if eqn.prim.drop_outputs is not None:
        return eqn.prim.drop_outputs(eqn, reads)
    outvars = [v if r else DropVar(v.aval) for v, r in zip(eqn.outvars, reads, strict=True)]
    return eqn.with_vars(eqn.invars, outvars)
