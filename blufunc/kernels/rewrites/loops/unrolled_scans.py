"""Scans as their rounds, so that plans move or recompute their residuals.

Kernels, before stage 5. In: a jaxpr with its calls inlined. Out: one in which a ``scan`` that stacks residuals, and the
scan that reads them, are the equations of their rounds. Stacks that only such scans read are never made: a row is a
value of the program, so that it can be copied to the host in its round and back ahead of the round that reads it
(``kernels/memory/overlap.py``), and so that a budget can choose among rows (``recompute/budget.py``).

A scan stays a loop if its rounds have effects or more than ``MOST_EQNS`` equations, if it carries a value on the host,
or if something else reads a residual on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.ir.jaxpr import Atom, DropVar, Eqn, Jaxpr, Literal, Var, subjaxprs
from blufunc.core.ops.shape import slice_p
from blufunc.core.primitives.linear_ops import broadcast_in_dim_p, reshape_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, put_in_place, rewrite
from blufunc.kernels.cost import of_eqn
from blufunc.kernels.machine import Machine
from blufunc.kernels.ops.updates import update_in_place_p
from blufunc.kernels.rewrites.readers import Readers

MOST_EQNS = 50_000
"""Limit of the equations of all rounds of a scan."""
# measured: 28 s of a core to plan GPT-2's block scanned 126 times, 42,000 equations both ways (Xeon, 2026-11-28)


LEAST_SECONDS = 1e-4
"""Minimum estimated time of a round of a scan that stacks residuals on the device.

The kernels of shorter ones would wait for their launches: a loop may be one kernel (``library/loops``).
"""
# measured: 17 us for the launches of a step of an LSTM's gradient, 2.7 us in one kernel (H100, design 010)


def with_unrolled_scans(jaxpr: Jaxpr, origins: Origins, machine: Machine | None = None) -> Jaxpr:
    """Replace scans that stack values on the host by their rounds.

    Scans that read such stacks are replaced with them.

    Args:
      machine: a device, to replace long scans on it too whose stacked results only scans read; default None.
    """
    chosen = _chosen(jaxpr, machine)
    if not chosen:
        return jaxpr
    readers = Readers(jaxpr)
    rows: dict[Var, list[Atom]] = {}

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        if eqn not in chosen:
            return [eqn.with_invars(invars)]
        whole = {v for v in eqn.outvars[eqn.params["n_carry"] :] if not _is_rows(v, readers, chosen)}
        return _rounds(eqn, invars, rows, whole, alias)

    return rewrite(jaxpr, step, origins)


def _chosen(jaxpr: Jaxpr, machine: Machine | None) -> set[Eqn]:
    """The scans that are replaced, with what they need of each other."""
    possible = {e for e in jaxpr.eqns if _can_be(e)}
    readers = Readers(jaxpr)
    while True:  # those that share rows on the host stay or go together
        dropped = {e for e in possible if not _is_closed(e, readers, possible)}
        if not dropped:
            break
        possible -= dropped
    found: set[Eqn] = set()
    for e in possible:
        takes_long = machine is not None and _seconds(e.params["jaxpr"], machine) >= LEAST_SECONDS
        for v in e.outvars[e.params["n_carry"] :]:
            if v.aval.memory != DEVICE or (takes_long and readers.of(v) and _is_rows(v, readers, possible)):
                found |= {e, *readers.of(v)}
    return found


def _is_scan(eqn: Eqn) -> bool:
    return eqn.prim.name == "scan" and eqn.prim.kind == "control" and not is_replaced(eqn.prim, "impl")


def _can_be(eqn: Eqn) -> bool:
    if not _is_scan(eqn) or eqn.effects or not eqn.params["length"]:
        return False
    p = eqn.params
    start = p["n_consts"]
    carry = [*eqn.invars[start : start + p["n_carry"]], *eqn.outvars[: p["n_carry"]]]
    fits = p["length"] * _count(p["jaxpr"]) <= MOST_EQNS
    stacked = all(v.aval.size and not dtypes.is_key(v.aval.dtype) for v in eqn.outvars[p["n_carry"] :])
    return fits and stacked and all(v.aval.memory == DEVICE for v in carry)


def _count(jaxpr: Jaxpr) -> int:
    return sum(1 + sum(map(_count, subjaxprs(e.params))) for e in jaxpr.eqns)


def _seconds(jaxpr: Jaxpr, machine: Machine) -> float:
    """Estimated time of a body's equations, one by one."""
    total = 0.0
    for e in jaxpr.eqns:
        bodies = list(subjaxprs(e.params))
        own = 0.0 if bodies else of_eqn(e, "library").seconds(machine)
        total += own + e.params.get("length", 1) * sum(_seconds(body, machine) for body in bodies)
    return total


def _is_closed(eqn: Eqn, readers: Readers, possible: set[Eqn]) -> bool:
    """True if only possible scans read or make the rows on the host."""
    n_args = eqn.params["n_consts"] + eqn.params["n_carry"]
    made = [v for v in eqn.outvars[eqn.params["n_carry"] :] if v.aval.memory != DEVICE]
    read = [v for v in eqn.invars[n_args:] if v.aval.memory != DEVICE]
    return all(_is_rows(v, readers, possible) for v in made) and all(
        readers.makers.get(v) in possible for v in read
    )


def _is_rows(v: Var, readers: Readers, scans: set[Eqn]) -> bool:
    """True if only scans of a set read a stack, row by row."""
    if v.__class__ is DropVar:
        return True
    by_row = lambda e: e in scans and v not in e.invars[: e.params["n_consts"] + e.params["n_carry"]]
    return v not in readers.returned and all(map(by_row, readers.of(v)))


def _rounds(
    eqn: Eqn, invars: Sequence[Atom], rows: dict[Var, list[Atom]], whole: set[Var], alias: Callable
) -> list[Eqn]:
    """The equations of all rounds.

    Args:
      rows: by stack, its rows; extended by those of the scan's results.
      whole: results that are needed as stacks.
    """
    p = eqn.params
    n_consts, n_carry, length = p["n_consts"], p["n_carry"], p["length"]
    consts, carry, xs = invars[:n_consts], list(invars[n_consts:][:n_carry]), invars[n_consts + n_carry :]
    ys = eqn.outvars[n_carry:]
    eqns: list[Eqn] = []

    def put(prim: object, operands: Sequence[Atom], aval: ShapedArray, **params: object) -> Var:
        out = Var(aval)
        eqns.append(Eqn(prim, operands, [out], params, eqn.source))  # type: ignore[arg-type]
        return out

    def row(x: Atom, i: int) -> Atom:
        if x in rows:
            return rows[x][i]
        shape, nd = x.aval.shape[1:], x.aval.ndim
        limits = {"start_indices": (i, *[0] * (nd - 1)), "limit_indices": (i + 1, *shape), "strides": None}
        part = put(slice_p, [x], x.aval.with_shape((1, *shape)), **limits)
        return put(reshape_p, [part], x.aval.with_shape(shape), shape=shape)

    def updated(stack: Atom, value: Atom, i: int) -> Var:
        part = put(reshape_p, [value], value.aval.strong().with_shape((1, *value.aval.shape)),
                   shape=(1, *value.aval.shape))  # fmt: skip
        starts = [Literal(scalar(n, dtypes.int32)) for n in (i, *[0] * value.aval.ndim)]
        return put(update_in_place_p, [stack, part, *starts], stack.aval)

    stacks: dict[Var, Atom] = {}
    for v in whole:
        zero = Literal(scalar(np.zeros((), v.aval.dtype)[()], v.aval.dtype))
        stacks[v] = put(broadcast_in_dim_p, [zero], v.aval, shape=v.aval.shape, dims=())
    found: dict[Var, list[Atom]] = {v: [None] * length for v in ys}  # type: ignore[list-item]
    for k in range(length):
        i = length - 1 - k if p["reverse"] else k
        outs: dict[Var, Atom] = {}
        eqns += put_in_place(eqn, p["jaxpr"], [*consts, *carry, *[row(x, i) for x in xs]], outs.__setitem__)
        carry = [outs[v] for v in eqn.outvars[:n_carry]]
        for v in ys:
            if v in whole:
                stacks[v] = updated(stacks[v], outs[v], i)
            else:
                found[v][i] = outs[v]
    for v, atom in (*zip(eqn.outvars[:n_carry], carry, strict=True), *stacks.items()):
        alias(v, atom)
    rows.update(found)
    return eqns
