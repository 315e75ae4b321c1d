"""Elementwise recomputation of results of GEMM epilogues, for memory budgets.

Kernels, between stages 5 and 7, after ``repeat.py``. In: the program of a choice for a budget, in which a call
(``recomputing``) computes an unsaved result of a ``dot_pointwise`` from values in memory:

    g = gelu(x)                       right before the first reader, the matmul for a weight's gradient
    d = (a @ b) * gelu'(x)            before or after that

Out: the same, in which the epilogue of a matmul that reads these values anyway also writes the result, and its readers
follow:

    d, g = (a @ b) * gelu'(x), gelu(x)

If that matmul depends on the result, the call's equations become a kernel of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.ir.jaxpr import Atom, DropVar, Eqn, Jaxpr, Var
from blufunc.core.primitives.linear_ops import reshape_p
from blufunc.core.programs.simplify import Origins, put_in_place, rewrite
from blufunc.kernels.ops.defined_call import DefinedCall
from blufunc.kernels.ops.pointwise_gemm import Epilogue, dot_pointwise_p, equations_at


class _Recompute(DefinedCall):
    """Equations as ``jaxpr`` on arrays and ``scalars``; absent from final programs."""

    fresh = True


_recompute_p = _Recompute("recomputed epilogue")


def recomputing(matmul: Eqn) -> list[Eqn]:
    """Calls that recompute each result of an epilogue without the matmul, if possible."""
    if matmul.prim is not dot_pointwise_p:
        return []
    epilogue: Epilogue = matmul.params["epilogue"]
    tile = None if epilogue.stored is None else matmul.outvars[epilogue.stored]
    held = dict(zip(epilogue.jaxpr.invars, [tile, *_operands(matmul)], strict=True))
    calls = []
    for n, out in enumerate(epilogue.jaxpr.outvars):
        v = matmul.outvars[n]
        if n == epilogue.stored or v.__class__ is DropVar:
            continue
        scalars = epilogue.jaxpr.memoised(f"result {n}", functools.partial(_reaching, epilogue.jaxpr, out))
        operands = [held[x] for x in scalars.invars]
        if all(x is not None and x.aval.size in (1, v.aval.size) for x in operands):
            params = {"jaxpr": _on_arrays(scalars, operands, v), "scalars": scalars}
            calls.append(Eqn(_recompute_p, operands, [v], params, matmul.source))
    return calls


def equations(call: Eqn) -> tuple[Eqn, ...]:
    """The equations of a call of ``recomputing``, on its variables."""
    body: Jaxpr = call.params["jaxpr"]
    place: dict[Any, Any] = dict(
        zip((*body.invars, *body.outvars), (*call.invars, *call.outvars), strict=True)
    )
    for v in (v for e in body.eqns for v in e.outvars):
        place.setdefault(v, Var(v.aval))
    return tuple(
        e.with_vars([place.get(a, a) for a in e.invars], [place[v] for v in e.outvars]) for e in body.eqns
    )


def hosts(eqns: Sequence[Eqn], call: Eqn) -> list[Eqn]:
    """The matmuls whose epilogues could write the result of a call, and do not yet."""
    return [
        e for e in eqns
        if e.prim is dot_pointwise_p and not recomputed(e) and set(call.invars) <= set(_operands(e))
        and not set(call.outvars) & set(e.outvars)
    ]  # fmt: skip


def recomputed(matmul: Eqn) -> list[Var]:
    """The results of an epilogue that do not depend on its matmul."""
    if matmul.prim is not dot_pointwise_p:
        return []
    jaxpr: Jaxpr = matmul.params["epilogue"].jaxpr
    return [
        matmul.outvars[n] for n, out in enumerate(jaxpr.outvars)
        if jaxpr.invars[0] not in _reaching(jaxpr, out).invars
    ]  # fmt: skip


def with_result(matmul: Eqn, call: Eqn) -> Eqn:
    """A matmul of ``hosts`` with the result of a call after its other results."""
    epilogue: Epilogue = matmul.params["epilogue"]
    held: dict[Any, Any] = dict(zip(_operands(matmul), epilogue.jaxpr.invars[1:], strict=True))
    scalars: Jaxpr = call.params["scalars"]
    env: dict[Any, Any] = {v: held[x] for v, x in zip(scalars.invars, call.invars, strict=True)}
    more = equations_at((), scalars.eqns, env)
    outvars = [*epilogue.jaxpr.outvars, env[scalars.outvars[0]]]
    jaxpr = epilogue.jaxpr.replace(eqns=[*epilogue.jaxpr.eqns, *more], outvars=outvars)
    params = {**matmul.params, "epilogue": dataclasses.replace(epilogue, jaxpr=jaxpr)}
    n = len(outvars) - 1  # column sums come last
    results = [*matmul.outvars[:n], *call.outvars, *matmul.outvars[n:]]
    return Eqn(dot_pointwise_p, matmul.invars, results, params, matmul.source)


def with_recomputed_results(jaxpr: Jaxpr, origins: Origins, able: Callable[[Eqn], bool]) -> Jaxpr:
    """Replace calls of ``recomputing`` by results of matmuls, or by their equations.

    ``able``: whether there is a kernel for a matmul with an epilogue.
    """
    for call in [e for e in jaxpr.eqns if e.prim is _recompute_p]:
        jaxpr = _joined(jaxpr, call, origins, able) or jaxpr

    def step(eqn: Eqn, invars: list[Atom], alias: Any) -> list[Eqn]:
        if eqn.prim is _recompute_p:
            return put_in_place(eqn, eqn.params["jaxpr"], invars, alias)
        return [eqn.with_invars(invars)]

    return rewrite(jaxpr, step, origins) if any(e.prim is _recompute_p for e in jaxpr.eqns) else jaxpr


def _joined(jaxpr: Jaxpr, call: Eqn, origins: Origins, able: Callable[[Eqn], bool]) -> Jaxpr | None:
    """Let a matmul write the result of a call; None if that matmul depends on it."""
    matmul = next((e for e in hosts(jaxpr.eqns, call) if able(with_result(e, call))), None)
    if matmul is None:
        return None
    eqns: list[Eqn] = []
    late: list[Eqn] = []  # equations between the call and the matmul that depend on the call
    waiting: set[Atom] = set(call.outvars)
    done = False
    for eqn in jaxpr.eqns:
        waits = not done and not waiting.isdisjoint(eqn.invars)
        if eqn is call:
            continue
        if waits and (eqn is matmul or eqn.effects):
            return None
        if waits:
            late.append(eqn)
            waiting.update(eqn.outvars)
        elif eqn is matmul:
            made = with_result(matmul, call)
            if matmul in origins:
                origins[made] = origins[matmul]
            eqns += [made, *late]
            done = True
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _operands(matmul: Eqn) -> Sequence[Any]:
    """The arrays of the scalars of an epilogue, except for the matmul's result."""
    return matmul.invars[2 + matmul.params["epilogue"].bias :]


def _reaching(jaxpr: Jaxpr, out: Atom) -> Jaxpr:
    """The part of a jaxpr of scalars, and of its parameters, that a result needs."""
    needed: set[Any] = {out}
    eqns = []
    for e in reversed(jaxpr.eqns):
        if not needed.isdisjoint(e.outvars):
            eqns.append(e)
            needed.update(e.invars)
    return Jaxpr([v for v in jaxpr.invars if v in needed], eqns[::-1], [out], name="epilogue")


def _on_arrays(scalars: Jaxpr, given: Sequence[Var], result: Var) -> Jaxpr:
    """A jaxpr of scalars as one of arrays in the shape of a result."""
    shape = result.aval.shape

    def make() -> Jaxpr:
        ins = [Var(x.aval) for x in given]
        env: dict[Any, Any] = dict(zip(scalars.invars, ins, strict=True))
        eqns = []
        for v, x in zip(scalars.invars, ins, strict=True):
            if x.aval.size > 1 and x.aval.shape != shape:
                env[v] = Var(x.aval.with_shape(shape))
                eqns.append(Eqn(reshape_p, [x], [env[v]], {"shape": shape}, None))
        eqns += equations_at(shape, scalars.eqns, env)
        return Jaxpr(ins, eqns, [env[scalars.outvars[0]]], name="epilogue")

    return scalars.memoised(("on arrays", shape, tuple([x.aval for x in given])), make)
