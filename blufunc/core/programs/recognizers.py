"""Whoever knows a better form for something that users write by hand: asked before a function is differentiated.

Core, between stages 1 and 2, and again before stage 4 on devices that have kernels. A **recogniser** goes through a
jaxpr and puts an equation with two bodies (``core/programs/alternatives.py``) in the place of each part that it knows:
the part as it was written, and the better form. Recognisers stand above the transforms that ask for them, so they
are registered here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from blufunc.config import config
from blufunc.core.ir.jaxpr import Eqn, Jaxpr


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

recognisers: list[Callable[[Jaxpr], Found]] = []
"""Asked in this order; ``blufunc/__init__.py`` fills this list, and the next table."""

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
        for recognise in recognisers:
            found, more = recognise(found)
            misses += more
        return (None if found is jaxpr else found), tuple(misses)  # a memo of itself would keep it alive

    found, misses = jaxpr.memoised("recognised", find)
    return Found(found or jaxpr, misses)


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
