"""Loops whose carries are short stacks of arrays, as loops of the arrays.

Kernels, before stage 5, called by ``pointwise_control_flow``. In: a ``scan`` or ``while`` whose body takes a carry such
as the state f32[3, 1024] of 1024 systems apart and stacks its results. Out: the same loop with a carry per row, if its
body never needs the stack. Then each point may be on its own: the loop runs inside one kernel.

``parts.py`` evaluates the body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from blufunc.core.ir.jaxpr import Atom, DropVar, Eqn, Jaxpr, Var
from blufunc.core.ops.shape import concatenate_p, slice_p
from blufunc.core.programs.simplify import simplified_body
from blufunc.kernels.rewrites.parts import COMBINED, MOST_PARTS, Parts, Splitter, Value, WholeError, without


def with_split_carries(eqn: Eqn) -> Iterator[list[Eqn]]:
    """Ways to replace a loop by one of parts; none if its body needs the stacks."""
    loop = _Bodies.of(eqn)
    if loop is None:
        return
    for seed in _short_axes(loop):
        with contextlib.suppress(WholeError):
            yield _split(eqn, loop, seed)


def _split(eqn: Eqn, loop: _Bodies, flags: list[int | None]) -> list[Eqn]:
    """The loop, some of its carries in parts, and those that then have to be."""
    while True:
        split = [_split_body(b, n, flags, b is loop.bodies[-1][0]) for b, n in loop.bodies]
        found = [_axis_of(x, f) for x, f in zip(split[-1][1], flags, strict=True)]
        if found == flags:
            return _replacement(eqn, loop, flags, split)
        flags = found


@dataclass
class _Bodies:
    """The condition, if any, and the body, each with its number of constants."""

    bodies: list[tuple[Jaxpr, int]]
    n_carry: int

    @classmethod
    def of(cls, eqn: Eqn) -> _Bodies | None:
        p = eqn.params
        if eqn.prim.name == "while":
            return cls(
                [(simplified_body(p["cond"]), p["n_cond"]), (simplified_body(p["body"]), p["n_body"])],
                len(eqn.outvars),
            )
        if eqn.prim.name != "scan" or len(eqn.invars) != p["n_consts"] + p["n_carry"]:
            return None
        if len(eqn.outvars) != p["n_carry"]:
            return None
        return cls([(simplified_body(p["jaxpr"]), p["n_consts"])], p["n_carry"])


def _short_axes(loop: _Bodies) -> Iterator[list[int | None]]:
    """Choices to begin with: a short axis of one carry.

    None for a body that neither takes apart nor joins.
    """
    if not any(e.prim in (slice_p, concatenate_p, *COMBINED) for body, _ in loop.bodies for e in body.eqns):
        return
    carries = [v.aval for v in loop.bodies[-1][0].invars[loop.bodies[-1][1] :]]
    for k, aval in enumerate(carries):
        for axis, n in enumerate(aval.shape):
            if 1 < n <= MOST_PARTS and aval.size:
                yield [axis if i == k else None for i in range(len(carries))]


def _axis_of(x: Atom | Parts, before: int | None) -> int | None:
    if isinstance(x, Parts):
        if before is not None and before != x.axis:
            raise WholeError
        return x.axis
    return before


def _split_body(body: Jaxpr, n: int, flags: Sequence[int | None], is_step: bool) -> tuple[Jaxpr, list[Value]]:
    """A body on parts of the carries, and its results; ``is_step``: these are carries."""
    s = Splitter()
    invars: list[Var] = list(body.invars[:n])
    for v in invars:
        s.env[v] = v
    for v, axis in zip(body.invars[n:], flags, strict=True):
        if axis is None:
            s.env[v] = v
            invars.append(v)
        else:
            aval = without(v.aval, axis)
            parts = tuple(Var(aval) for _ in range(v.aval.shape[axis]))
            s.env[v] = Parts(axis, parts)
            invars.extend(parts)
    for e in body.eqns:
        s.equation(e)
    outs = [s.value(a) for a in body.outvars]
    flat: list[Atom] = []
    for n, x in enumerate(outs):
        axis = flags[n] if is_step else None
        if isinstance(x, Parts):
            if not is_step:
                raise WholeError
            flat.extend(x.parts)
        elif axis is None:
            flat.append(x)
        else:
            flat.extend(s.part(x, axis, i, None) for i in range(x.aval.shape[axis]))
    return body.replace(invars=invars, eqns=s.eqns, outvars=flat, arg_names=()), outs


def _replacement(
    eqn: Eqn, loop: _Bodies, flags: Sequence[int | None], split: Sequence[tuple[Jaxpr, Any]]
) -> list[Eqn]:
    """The loop of parts, after slices of operands and before concatenations."""
    before, after = Splitter(), Splitter()
    first = len(eqn.invars) - loop.n_carry
    invars: list[Atom] = list(eqn.invars[:first])
    outvars: list[Var] = []
    for x, v, axis in zip(eqn.invars[first:], eqn.outvars, flags, strict=True):
        if axis is None:
            invars.append(x)
            outvars.append(v)
            continue
        count = x.aval.shape[axis]
        invars.extend(before.part(x, axis, i, eqn.source) for i in range(count))
        parts = [Var(without(v.aval, axis)) for _ in range(count)]
        outvars.extend(parts)
        if isinstance(v, DropVar):
            continue
        after.joined(Parts(axis, tuple(parts)), v, eqn.source)
    p = dict(eqn.params)
    if eqn.prim.name == "while":
        p.update(cond=split[0][0], body=split[1][0])
    else:
        p.update(jaxpr=split[0][0], n_carry=len(outvars))
    return [*before.eqns, Eqn(eqn.prim, invars, outvars, p, eqn.source), *after.eqns]
