"""Loop-invariant values of ``scan`` and ``while``, computed once before the loop.

Kernels, before stage 5. In: a jaxpr with its calls inlined. Out: one whose loops take as constants what their bodies
computed in each round from constants: matmuls, reductions, sorts, factorizations, inner scans, and elementwise
functions that cost more than a read. Cheap elementwise operations and movements stay, as kernels fuse them. An inner
``while`` stays, as it might not end, and the outer loop may have no round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var, subjaxprs
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, dce, keeps_none, rewrite, simplified_body

MOST_BYTES = 1 << 28
"""Limit of a value that is kept for this, in bytes."""

LEAST_COST = 8
"""Minimum cost of an elementwise operation, in additions: an exponential's."""

_LOOPS = ("scan", "while")

_COSTLY = frozenset(("contract", "reduce", "cumulative", "sort", "fft", "linalg", "random", "control"))
"""Kinds of equations that are worth a read of their results in each round."""

_CHEAP = frozenset(("elementwise", "movement"))
"""Kinds that leave the loop if a costly equation reads them."""


def with_hoisted_invariants(
    jaxpr: Jaxpr, origins: Origins, keep: Callable[[Eqn], bool] = keeps_none
) -> Jaxpr:
    """Take loop-invariant values out of the loops of a program, to any depth.

    ``keep`` selects calls with a kernel, which stay calls in the bodies; default: none.
    """
    if not any(map(_is_loop, jaxpr.eqns)):
        return jaxpr
    changed = False

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        nonlocal changed
        eqn = eqn.with_invars(invars)
        made = _hoisted(eqn, keep) if _is_loop(eqn) else [eqn]
        changed |= made != [eqn]
        return made

    made = rewrite(jaxpr, step, origins)
    return made if changed else jaxpr


def _is_loop(eqn: Eqn) -> bool:
    return eqn.prim.kind == "control" and eqn.prim.name in _LOOPS and not is_replaced(eqn.prim, "impl")


class _Split(NamedTuple):
    """A body without its invariant part.

    Attributes:
      before: the equations that leave the loop, on parameters of the body.
      kept: the results of these that it reads.
      body: the body, with ``kept`` as last parameters.
    """

    before: list[Eqn]
    kept: list[Var]
    body: Jaxpr


def _hoisted(eqn: Eqn, keep: Callable[[Eqn], bool]) -> list[Eqn]:
    """The loop after its invariant equations; itself if there are none."""
    p, before = dict(eqn.params), list[Eqn]()
    groups: list[list[Atom]] = []  # operands of the condition, constants of the body, the others
    parts = [("cond", p["n_cond"]), ("body", p["n_body"])] if eqn.prim.name == "while" else []
    at = 0
    for name, n in parts or [("jaxpr", p["n_consts"])]:
        consts = list(eqn.invars[at : at + n])
        at += n
        split = _split(p[name], n, keep)
        if split is not None:
            copied = _copies(split, consts)
            before += copied.before
            consts += copied.kept
            p[name] = split.body
        groups.append(consts)
    if all(p[k] is eqn.params[k] for k in ("cond", "body", "jaxpr") if k in p):
        return [eqn]
    for key, consts in zip(("n_cond", "n_body") if parts else ("n_consts",), groups, strict=True):
        p[key] = len(consts)
    operands = [a for consts in groups for a in consts] + list(eqn.invars[at:])
    return [*before, Eqn(eqn.prim, operands, eqn.outvars, p, eqn.source)]


def _split(jaxpr: Jaxpr, n_consts: int, keep: Callable[[Eqn], bool]) -> _Split | None:
    """A body whose first parameters are constants; None if nothing leaves it."""
    return jaxpr.memoised(("loop invariants", n_consts, keep), lambda: (_split_body(jaxpr, n_consts, keep),))[
        0
    ]


def _split_body(jaxpr: Jaxpr, n_consts: int, keep: Callable[[Eqn], bool]) -> _Split | None:
    body = with_hoisted_invariants(simplified_body(jaxpr, keep), {}, keep)
    invariant: dict[Any, Eqn | None] = dict.fromkeys(body.invars[:n_consts])
    roots: list[Eqn] = []
    for e in body.eqns:
        if e.effects or e.prim.opaque or is_replaced(e.prim, "impl") or e.prim.kind not in _COSTLY | _CHEAP:
            continue
        if not _ends(e):
            continue
        if all(a.__class__ is Literal or a in invariant for a in e.invars):
            invariant.update(dict.fromkeys(e.outvars, e))
            if _is_worthwhile(e):
                roots.append(e)
    if not roots:
        return None
    moved: set[Eqn] = set()
    pending = list(roots)
    while pending:
        e = pending.pop()
        if e not in moved:
            moved.add(e)
            made = (invariant[a] for a in e.invars if a.__class__ is not Literal)
            pending += [m for m in made if m is not None]
    before = [e for e in body.eqns if e in moved]
    # what movements and cheap operations computed for the roots stays in the body, too, for its other readers
    rooted = {v for e in roots for v in e.outvars}
    stay = [e for e in body.eqns if not rooted.intersection(e.outvars)]
    kept = [v for v in rooted if any(v in e.invars for e in stay) or v in body.outvars]
    order = {v: i for i, v in enumerate(v for e in before for v in e.outvars)}
    kept.sort(key=order.__getitem__)
    first = [*body.invars[:n_consts], *kept, *body.invars[n_consts:]]
    return _Split(before, kept, dce(body.replace(invars=first, eqns=stay, arg_names=())))


def _is_worthwhile(e: Eqn) -> bool:
    if any(v.aval.nbytes > MOST_BYTES for v in e.outvars):
        return False
    if e.prim.kind in _COSTLY:
        return any(a.__class__ is not Literal for a in e.invars)
    if e.prim.kind != "elementwise" or e.prim.cost < LEAST_COST:
        return False
    return any(a.__class__ is not Literal for a in e.invars)


def _ends(e: Eqn) -> bool:
    """False if an equation runs a ``while``."""
    return e.prim.name != "while" and all(_ends(inner) for j in subjaxprs(e.params) for inner in j.eqns)


def _copies(split: _Split, consts: Sequence[Atom]) -> _Split:
    """The equations of a split on the operands of one loop, with new variables."""
    env: dict[Any, Atom] = dict(zip(split.body.invars, consts, strict=False))
    before = []
    for e in split.before:
        outvars = [Var(v.aval) for v in e.outvars]
        before.append(e.with_vars([env.get(a, a) for a in e.invars], outvars))
        env.update(zip(e.outvars, outvars, strict=True))
    return _Split(before, [env[v] for v in split.kept], split.body)  # type: ignore[misc]
