"""Memories of a program's values: what a device makes of moves to its host.

Kernels, stage 5. In: a jaxpr with ``offload`` equations. Out: for a device with one memory, the program without them,
whose values are all of the device. For a device with two, a program whose loops and branches hold no value in the
memory of the host: their bodies are programs of their own, without streams to copy on, so what they would offload stays
on the device. All other moves stay; ``kernels/memory/overlap.py`` overlaps them with the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from blufunc.core.ir.avals import DEVICE, PINNED_HOST
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var, line_of, map_jaxprs, subjaxprs, uses_host
from blufunc.core.ops.offload import offload_p
from blufunc.core.programs.simplify import Origins


def without_moves(jaxpr: Jaxpr) -> Jaxpr:
    """The program with all values where they are computed, its bodies included."""
    if not uses_host(jaxpr):
        return jaxpr
    return jaxpr.memoised("without moves", lambda: _without_moves(jaxpr))


def _without_moves(jaxpr: Jaxpr) -> Jaxpr:
    known: dict[Atom, Atom] = {}

    def on_device(v: Var) -> Var:
        if v.aval.memory == DEVICE:
            return v
        fresh = known[v] = v.__class__(v.aval.in_memory(DEVICE))
        return fresh

    invars = [on_device(v) for v in jaxpr.invars]
    eqns = []
    for e in jaxpr.eqns:
        operands = [known.get(a, a) for a in e.invars]
        if e.prim is offload_p:
            known[e.outvars[0]] = operands[0]
            continue
        outvars = [on_device(v) for v in e.outvars]
        eqns.append(Eqn(e.prim, operands, outvars, map_jaxprs(without_moves, e.params), e.source))
    return jaxpr.replace(invars=invars, eqns=eqns, outvars=[known.get(a, a) for a in jaxpr.outvars])


def one_memory_note(jaxpr: Jaxpr) -> tuple[str, ...]:
    """The note of a device with one memory, if a program offloads values."""
    count = _moves_out(jaxpr)
    if not count:
        return ()
    values = "1 value stays" if count == 1 else f"{count} values stay"
    return (f"offload: there is one memory here: {values} where computed, and nothing is copied",)


def _moves_out(jaxpr: Jaxpr) -> int:
    """Number of values that a program moves to the host, its bodies included."""
    own = sum(e.prim is offload_p and e.params["dst"] != DEVICE for e in jaxpr.eqns)
    return own + sum(_moves_out(body) for e in jaxpr.eqns for body in subjaxprs(e.params))


def with_moves_outside(jaxpr: Jaxpr, origins: Origins) -> tuple[Jaxpr, tuple[str, ...]]:
    """The program with loops and branches on values of the device, and notes on them.

    An operand of one is copied to the device ahead of it. A result in the memory of the host is moved there only if it
    is a result of the program: the fetch of a residual that never left is no copy.
    """
    if not uses_host(jaxpr):
        return jaxpr, ()
    known: dict[Atom, Atom] = {}
    fetched: dict[Atom, Var] = {}
    eqns: list[Eqn] = []
    notes: dict[str, None] = {}

    def moved(x: Atom, memory: str, like: Eqn | None) -> Var:
        out = Var(x.aval.in_memory(memory))
        params = {"src": x.aval.memory, "dst": memory}
        eqns.append(Eqn(offload_p, [x], [out], params, None if like is None else like.source))
        return out

    def on_device(x: Atom, like: Eqn) -> Atom:
        if x.aval.memory == DEVICE:
            return x
        if x not in fetched:
            fetched[x] = moved(x, DEVICE, like)
        return fetched[x]

    for e in jaxpr.eqns:
        operands: Sequence[Atom] = [known.get(a, a) for a in e.invars]
        new = e
        if e.prim is offload_p:
            (x,) = operands
            if x.aval.memory == e.params["dst"]:
                known[e.outvars[0]] = x
                continue
            new = Eqn(e.prim, operands, e.outvars, {**e.params, "src": x.aval.memory}, e.source)
        elif e.prim.identity and operands[0].aval.memory != DEVICE:  # no kernel copies it
            known[e.outvars[0]] = operands[0]
            continue
        elif any(map(uses_host, subjaxprs(e.params))):
            operands = [on_device(a, e) for a in operands]
            outvars = []
            for v in e.outvars:
                fresh = v if v.aval.memory == DEVICE else v.__class__(v.aval.in_memory(DEVICE))
                if fresh is not v:
                    known[v] = fresh
                outvars.append(fresh)
            new = Eqn(e.prim, operands, outvars, map_jaxprs(without_moves, e.params), e.source)
            notes[
                f"offload: what {e.prim.name} at {line_of(e)} offloads stays on the device: its body is a program "
                "of its own"
            ] = None
        elif any(a.__class__ is not Literal and a in known for a in e.invars):
            new = e.with_invars(operands)
        if e in origins:
            origins[new] = origins[e]
        eqns.append(new)
    outvars = [known.get(a, a) for a in jaxpr.outvars]
    outvars = [
        moved(a, PINNED_HOST, None) if a.aval.memory != declared.aval.memory else a
        for a, declared in zip(outvars, jaxpr.outvars, strict=True)
    ]
    return jaxpr.replace(eqns=eqns, outvars=outvars), tuple(notes)
