"""Partial evaluation by results: a jaxpr as two, one of which may run later.

Transforms, stage 2. In: a jaxpr, and which of its results are needed first. Out: the equations that these depend on,
and the rest, which reads values that the first part keeps for it. The transposed half of a layer is split so into the
cotangent of its input, for which another device waits, and those of its weights, for which nothing waits
(Qi et al., arXiv:2401.10241). A ``scan`` becomes two, each with the carries that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.programs import simplify
from blufunc.transforms.checkpointing.checkpoint import checkpoint_p
from blufunc.transforms.control_flow.scan import scan_p


class Halves(NamedTuple):
    """A jaxpr in two parts.

    Attributes:
      first: from the parameters to the results that are needed first, and then the values that are kept.
      second: from the parameters and the kept values to the other results.
    """

    first: Jaxpr
    second: Jaxpr


def split_outputs(jaxpr: Jaxpr, needed: Sequence[bool]) -> Halves:
    """Split a jaxpr into what some results depend on, and the rest.

    Calls are inlined, recomputing ones too: what both parts read is computed once, and kept. The second part recomputes
    what is elementwise, or moves elements, of values that it has anyway.

    Args:
      jaxpr: without constants of its own.
      needed: a flag per result, True if it belongs to the first part.
    """

    def make() -> Halves:
        return _split(simplify.dce(_without_calls(jaxpr)), needed)

    return jaxpr.memoised(("split outputs", tuple(needed)), make)


def _without_calls(jaxpr: Jaxpr) -> Jaxpr:
    """Inline calls that name, cache or rematerialize, to any depth of calls."""

    def step(eqn: Eqn, invars: Sequence[Atom], alias: Any) -> list[Eqn]:
        if not (eqn.prim.inline or eqn.prim is checkpoint_p):
            return [eqn.with_invars(invars)]
        return simplify.put_in_place(eqn, _without_calls(eqn.params["jaxpr"]), invars, alias)

    return simplify.rewrite(jaxpr, step)


def _split(jaxpr: Jaxpr, needed: Sequence[bool]) -> Halves:
    first, second = _by_need(
        jaxpr.eqns, _variables(v for v, n in zip(jaxpr.outvars, needed, strict=True) if n)
    )
    late_outs = [v for v, n in zip(jaxpr.outvars, needed, strict=True) if not n]
    made = {v for e in first for v in e.outvars}
    kept = {a for a in (*late_outs, *(a for e in second for a in e.invars)) if a in made}
    repeated = _cheap(first, kept)
    order = [v for e in first for v in e.outvars if v in kept]
    early_outs = [v for v, n in zip(jaxpr.outvars, needed, strict=True) if n]
    return Halves(
        simplify.dce(jaxpr.replace(eqns=first, outvars=[*early_outs, *order])),
        simplify.dce(
            jaxpr.replace(
                invars=[*jaxpr.invars, *order], eqns=[*repeated, *second], outvars=late_outs, arg_names=()
            )
        ),
    )


def _by_need(eqns: Sequence[Eqn], needed: set[Any]) -> tuple[list[Eqn], list[Eqn]]:
    """The equations that the ``needed`` variables depend on, and the others."""
    first: list[Eqn] = []
    second: list[Eqn] = []
    for eqn in reversed(eqns):
        reads = [v in needed for v in eqn.outvars]
        if not any(reads):
            second.append(eqn)
            continue
        if eqn.prim is scan_p and not all(reads):
            eqn, rest = _split_scan(eqn, reads)
            second += rest
        first.append(eqn)
        needed |= _variables(eqn.invars)
    return first[::-1], second[::-1]


def _split_scan(eqn: Eqn, reads: Sequence[bool]) -> tuple[Eqn, list[Eqn]]:
    """Two loops: one with the carries of results that are read, and the rest."""
    p = eqn.params
    body, n_consts, n_carry = _without_calls(p["jaxpr"]), p["n_consts"], p["n_carry"]
    carries = body.invars[n_consts : n_consts + n_carry]
    flags = list(reads)
    while True:
        outs = _variables(v for v, f in zip(body.outvars, flags, strict=True) if f)
        early = _by_need(body.eqns, set(outs))[0]
        read = outs | _variables(a for e in early for a in e.invars)
        found = [f or v in read for f, v in zip(flags, carries, strict=False)]
        if found == flags[:n_carry]:
            break
        flags[:n_carry] = found
    made = {v for e in early for v in e.outvars}
    flags[n_carry:] = [f or v in made for f, v in zip(flags[n_carry:], body.outvars[n_carry:], strict=True)]
    if all(flags):
        return eqn, []
    halves = split_outputs(body, flags)
    mine, others = _chosen(flags[:n_carry], True), _chosen(flags[:n_carry], False)
    n_first, n_mine = sum(flags), len(mine)
    kept = halves.second.invars[len(body.invars) :]
    # A carry of the first loop that the second reads is kept as well, as it is at the start of each step.
    used = simplify.used(halves.second)
    also = [i for i in mine if halves.second.invars[n_consts + i] in used]
    consts, start, xs = _operands(eqn.invars, n_consts, n_carry)
    invars = _operands(halves.first.invars, n_consts, n_carry)
    body_1 = halves.first.replace(
        invars=[*invars[0], *(invars[1][i] for i in mine), *invars[2]],
        outvars=[*halves.first.outvars, *(invars[1][i] for i in also)],
        arg_names=(),
    )
    stacked = [Var(v.aval.with_shape((p["length"], *v.aval.shape))) for v in body_1.outvars[n_first:]]
    out_1 = [v for v, f in zip(eqn.outvars, flags, strict=True) if f]
    params = {k: p[k] for k in ("length", "reverse", "unroll")}
    loop_1 = Eqn(
        scan_p,
        [*consts, *(start[i] for i in mine), *xs],
        [*out_1, *stacked],
        {"jaxpr": body_1, "n_consts": n_consts, "n_carry": n_mine, **params},
        eqn.source,
    )
    invars = _operands(halves.second.invars[: len(body.invars)], n_consts, n_carry)
    body_2 = halves.second.replace(
        invars=[
            *invars[0], *(invars[1][i] for i in others), *invars[2], *kept, *(invars[1][i] for i in also),
        ],
        arg_names=(),
    )  # fmt: skip
    loop_2 = Eqn(
        scan_p,
        [*consts, *(start[i] for i in others), *xs, *stacked],
        [v for v, f in zip(eqn.outvars, flags, strict=True) if not f],
        {"jaxpr": body_2, "n_consts": n_consts, "n_carry": len(others), **params},
        eqn.source,
    )
    # The second loop may have parameters that it does not read.
    return _read_only(loop_1), [_read_only(loop_2)]


def _read_only(loop: Eqn) -> Eqn:
    """A loop without the constants and inputs that its body does not read."""
    return scan_p.drop_outputs(loop, [True] * len(loop.outvars))


def _cheap(first: Sequence[Eqn], kept: set[Any]) -> list[Eqn]:
    """Equations that the second part repeats to keep less; changes ``kept``.

    One is repeated if it keeps no more bytes than it saves: of operands that are held, or that are smaller.
    """
    repeated = []
    made = {v for e in first for v in e.outvars}
    for eqn in reversed(first):
        saved = sum(v.aval.nbytes for v in eqn.outvars if v in kept)
        if not saved or eqn.prim.kind not in ("elementwise", "movement"):
            continue
        new = [a for a in _variables(eqn.invars) if a in made and a not in kept]
        if sum(a.aval.nbytes for a in new) < saved:
            repeated.append(eqn)
            kept.difference_update(eqn.outvars)
            kept.update(new)
    return repeated[::-1]


def _variables(atoms: Iterable[Atom]) -> set[Any]:
    return {a for a in atoms if a.__class__ is not Literal}


def _chosen(flags: Sequence[bool], value: bool) -> list[int]:
    return [i for i, f in enumerate(flags) if f is value]


def _operands(xs: Sequence, n_consts: int, n_carry: int) -> tuple[list, list, list]:
    """Constants, carries and inputs of a loop."""
    xs = list(xs)
    return xs[:n_consts], xs[n_consts : n_consts + n_carry], xs[n_consts + n_carry :]
