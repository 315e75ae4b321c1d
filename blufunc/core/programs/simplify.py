"""Stage 4: passes that make a jaxpr smaller without changing its results.

Core. Each pass takes a jaxpr and returns a new one:

- ``merge_constants``: merges small constants with the same elements, before ``jit`` makes them arguments;
- ``inline_calls``: inlines the bodies of ``jit`` equations;
- ``inline_definitions``: replaces primitives by their definitions (``lower=``); backends call it first;
- ``inline_bodies``: inlines calls that only compute their body, such as composites without a kernel;
- ``fold``: evaluates equations on literals, removes multiplications by one, selects between equal values and
  round-trip conversions, and passes scalars unbroadcast to operations that accept them;
- ``cse``: common subexpression elimination;
- ``dce``: removes equations whose results are never read, unless they have effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc.config import config
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import check, dtypes, source
from blufunc.core.ir.jaxpr import Atom, DropVar, Eqn, Jaxpr, Literal, Var, exact, map_jaxprs, subjaxprs
from blufunc.core.ops.elementwise import add_p, convert_p, div_p, mul_p, select_p, stop_gradient_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p, broadcast_in_dim_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.programs import stage

_SMALL_CONSTANT = 1 << 14
"""Largest constant that is compared with others, in bytes.

A comparison may have to copy it from a device, while compiling. Tables of one axis, such as frequencies, are
smaller; matrices are rarely made twice.
"""


def dce(
    jaxpr: Jaxpr, used_outputs: Sequence[bool] | None = None, origins: dict[Eqn, int] | None = None
) -> Jaxpr:
    """Dead code elimination; ``used_outputs`` selects the outputs to keep.

    Parameters stay, so that callers need not change. ``origins``, the recomputing call of equations, is
    updated for those that lose a result.
    """
    outvars = (
        [v for v, u in zip(jaxpr.outvars, used_outputs, strict=True) if u] if used_outputs else jaxpr.outvars
    )
    live = {v for v in outvars if v.__class__ is not Literal}
    kept: list[Eqn] = []
    for eqn in reversed(jaxpr.eqns):
        reads = [v in live for v in eqn.outvars]
        if not any(reads) and not eqn.effects:
            continue
        if not all(reads):
            whole, eqn = eqn, _drop_outputs(eqn, reads)
            if origins and whole in origins:
                origins[eqn] = origins[whole]
        live.update(a for a in eqn.invars if a.__class__ is not Literal)
        kept.append(eqn)
    constants = [(v, c) for v, c in zip(jaxpr.constvars, jaxpr.consts, strict=True) if v in live]
    return jaxpr.replace(
        eqns=kept[::-1],
        outvars=outvars,
        constvars=[v for v, _ in constants],
        consts=[c for _, c in constants],
    )


def home_of(jaxpr: Jaxpr) -> backend.Device | None:
    """The device that operations of ``jaxpr``, bodies included, require; or None."""

    def find() -> backend.Device | None:
        for eqn in jaxpr.eqns:
            own = None if eqn.prim.home is None else eqn.prim.home(**eqn.params)
            found = own or next(filter(None, map(home_of, subjaxprs(eqn.params))), None)
            if found is not None:
                return found
        return None

    return jaxpr.memoised("home", find)


def used(jaxpr: Jaxpr) -> set[Any]:
    """The variables and literals that the equations and results of a jaxpr read."""
    return {a for e in jaxpr.eqns for a in e.invars}.union(jaxpr.outvars)


def _drop_outputs(eqn: Eqn, reads: list[bool]) -> Eqn:
    """The equation without its unread outputs, which are unnamed if they must stay."""
    narrowed = eqn.prim.drop_outputs(eqn, reads) if eqn.prim.drop_outputs is not None else None
    if narrowed is not None:
        return narrowed
    outvars = [v if r else DropVar(v.aval) for v, r in zip(eqn.outvars, reads, strict=True)]
    return eqn.with_vars(eqn.invars, outvars)


Origins = dict[Eqn, int]
"""For recomputing equations, the index of the recomputing call that they are from."""


def rewrite(
    jaxpr: Jaxpr, step: Callable[[Eqn, list[Atom], Callable], list[Eqn]], origins: Origins | None = None
) -> Jaxpr:
    """Go through the equations with a substitution of variables that ``step`` extends.

    ``step(eqn, invars, alias)`` receives the equation and its substituted operands, returns its replacement
    equations, and calls ``alias(var, atom)`` to substitute ``atom`` for ``var`` from then on. ``origins`` is updated.
    """
    known: dict[Atom, Atom] = {}
    resolve, alias = known.get, known.__setitem__
    eqns: list[Eqn] = []
    for eqn in jaxpr.eqns:
        replacement = step(eqn, [resolve(a, a) for a in eqn.invars], alias)
        if origins and eqn in origins:
            origins.update(dict.fromkeys(replacement, origins[eqn]))
        eqns.extend(replacement)
    return jaxpr.replace(eqns=eqns, outvars=[resolve(a, a) for a in jaxpr.outvars])


def merge_constants(jaxpr: Jaxpr) -> Jaxpr:
    """Merge small constants of the same elements on the same devices.

    Then ``cse`` finds what is computed of them. A model that makes a table by NumPy, as of the frequencies of rotary
    positions, often makes it once for each layer.
    """
    groups: dict[Any, list[tuple[Var, ConcreteArray]]] = {}
    for var, const in zip(jaxpr.constvars, jaxpr.consts, strict=True):
        if const.__class__ is ConcreteArray and const.aval.nbytes <= _SMALL_CONSTANT:
            groups.setdefault((const.aval, const.sharding), []).append((var, const))
    same: dict[Atom, Atom] = {}
    for group in groups.values():
        if len(group) > 1 and all(getattr(const.buffer, "is_fully_addressable", True) for _, const in group):
            first: dict[bytes, Var] = {}
            for var, const in group:
                one = first.setdefault(np.asarray(const).tobytes(), var)
                if one is not var:
                    same[var] = one
    if not same:
        return jaxpr
    merged = rewrite(jaxpr, lambda eqn, invars, alias: [eqn.with_invars([same.get(a, a) for a in invars])])
    kept = [(v, c) for v, c in zip(jaxpr.constvars, jaxpr.consts, strict=True) if v not in same]
    return merged.replace(
        outvars=[same.get(v, v) for v in merged.outvars],
        constvars=[v for v, _ in kept],
        consts=[c for _, c in kept],
    )


def inline_calls(jaxpr: Jaxpr, only: Primitive | None = None) -> Jaxpr:
    """Inline calls that only name or cache (``prim.inline``), to any depth.

    ``only`` restricts this to one primitive, while later passes still need the rules of the others.
    """

    def inlines(prim: Primitive) -> bool:
        return prim.inline and (only is None or prim is only)

    def step(eqn, invars, alias):
        if not inlines(eqn.prim):
            return [eqn.with_invars(invars)]
        return put_in_place(eqn, inline_calls(eqn.params["jaxpr"], only), invars, alias)

    if not any(inlines(e.prim) for e in jaxpr.eqns):
        return jaxpr
    return rewrite(jaxpr, step)


def put_in_place(eqn: Eqn, body: Jaxpr, invars: Sequence[Atom], alias: Callable) -> list[Eqn]:
    """Inline ``body`` on new variables in place of a call: for ``rewrite``'s ``step``.

    Its equations keep their lines. Those of a definition have none, or meaningless ones if it is elementwise:
    they get the line of the call.
    """
    env: dict[Any, Atom] = dict(zip(body.invars, invars, strict=True))
    inlined = []
    for e in body.eqns:
        fresh = [DropVar(v.aval) if v.__class__ is DropVar else Var(v.aval) for v in e.outvars]
        ins = [a if a.__class__ is Literal else env[a] for a in e.invars]
        own = None if eqn.prim.pointwise else e.source
        line = source.within(eqn.scopes, own) if own else eqn.source
        inlined.append(Eqn(e.prim, ins, fresh, e.params, line))
        env.update(zip(e.outvars, fresh, strict=True))
    for var, atom in zip(eqn.outvars, body.outvars, strict=True):
        alias(var, atom if atom.__class__ is Literal else env[atom])
    return inlined


def inline_definitions(jaxpr: Jaxpr, keep: Callable[[Primitive], bool] = lambda prim: False) -> Jaxpr:
    """Inline the definition (``prim.lower``) of each primitive, bodies included.

    For compilers and the partitioner, after all transforms; ``keep`` selects primitives with a better lowering.
    """

    def inlines(prim: Primitive) -> bool:
        return prim.has_definition and not keep(prim) and not is_replaced(prim, "impl")

    def step(eqn, invars, alias):
        if inlines(eqn.prim):
            body = stage.definition(eqn.prim, [a.aval for a in invars], eqn.params)
            return put_in_place(eqn, inline_definitions(body, keep), invars, alias)
        params = map_jaxprs(lambda body: inline_definitions(body, keep), eqn.params)
        return [Eqn(eqn.prim, invars, eqn.outvars, params, eqn.source)]

    def has_any(body: Jaxpr) -> bool:
        return any(inlines(e.prim) or any(map(has_any, subjaxprs(e.params))) for e in body.eqns)

    return rewrite(jaxpr, step) if has_any(jaxpr) else jaxpr


def without_lines(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without source lines: ``put_in_place`` gives it those of the call."""
    return jaxpr.replace(eqns=[Eqn(e.prim, e.invars, e.outvars, e.params, None) for e in jaxpr.eqns])


def keeps_none(eqn: Eqn) -> bool:
    """The choice of a device without kernels: every call is inlined."""
    return False


def inline_bodies(
    jaxpr: Jaxpr, keep: Callable[[Eqn], bool] = keeps_none, origins: Origins | None = None
) -> tuple[Jaxpr, Origins]:
    """Inline every call that only computes its body (``prim.body``).

    For compilers, after all transforms; ``keep`` selects calls with a kernel. Recomputing calls (``prim.recomputed``)
    must not be merged with the original computation: the second result maps each of their equations to the index of
    its call. ``origins`` holds the equations that were in such calls before; it is updated and returned.
    """
    origins = {} if origins is None else origins
    count = max(origins.values(), default=0)

    def step(eqn, invars, alias):
        nonlocal count
        if eqn.prim.body is None or keep(eqn):
            return [eqn.with_invars(invars)]
        body, inner = inline_bodies(simplify(eqn.params[eqn.prim.body]), keep)
        placed = put_in_place(eqn, body, invars, alias)
        base = count
        count = max([base, *[base + n for n in inner.values()]])
        for e, old in zip(placed, body.eqns, strict=True):
            if old in inner:
                origins[e] = base + inner[old]
        if eqn.prim.recomputed:
            count += 1
            for e in placed:
                origins.setdefault(e, count)
        return placed

    if not any(e.prim.body for e in jaxpr.eqns):
        return jaxpr, origins
    placed = rewrite(jaxpr, step, origins)
    if any(e.prim.pointwise and not keep(e) for e in jaxpr.eqns):
        # a function and its derivative share subexpressions
        placed = dce(cse(fold(placed, origins), origins), origins=origins)
    return placed, origins


def inline_pointwise(jaxpr: Jaxpr) -> Jaxpr:
    """Simplified, with elementwise calls inlined (``prim.pointwise``), others kept.

    For programs that run one equation after the other.
    """
    return inline_bodies(simplify(jaxpr), lambda eqn: not eqn.prim.pointwise)[0]


def fold(jaxpr: Jaxpr, origins: Origins | None = None) -> Jaxpr:
    """Constant folding, algebraic identities, and scalars without broadcasts."""
    numbers: dict[Any, Atom] = {}  # broadcast scalars: variable -> scalar
    narrow: dict[Any, Atom] = {}  # widened values: variable -> value before the conversion

    def step(eqn, invars, alias):
        if not eqn.outvars:
            return [eqn.with_vars(invars, ())]
        prim, out = eqn.prim, eqn.outvars[0]
        if prim is broadcast_in_dim_p and not invars[0].aval.ndim:
            numbers[out] = invars[0]
        elif isinstance(prim, Elementwise) or prim is add_any_p:
            scalars = [a if a.__class__ is Literal else numbers.get(a, a) for a in invars]
            prim = add_p if prim is add_any_p and scalars != invars else prim
            if any(a.aval.ndim for a in scalars):
                invars = scalars
            elif out.aval.ndim and all(a.__class__ is Literal for a in scalars):
                (numbers[out],) = _evaluate(prim, scalars, eqn.params)
                repeated = {"shape": out.aval.shape, "dims": ()}
                return [Eqn(broadcast_in_dim_p, [numbers[out]], [out], repeated, eqn.source)]
            if prim is stop_gradient_p or (prim is select_p and invars[1] is invars[2]):
                if invars[-1].aval.same_type(out.aval):
                    alias(out, invars[-1])
                    return []
            if prim is convert_p:
                (x,) = invars
                if x in narrow and narrow[x].aval.same_type(out.aval):
                    alias(out, narrow[x])
                    return []
                if _is_exact(x.aval.dtype, out.aval.dtype):
                    narrow[out] = x
            if prim is mul_p or prim is div_p:
                x, y = invars if prim is div_p or _is_one(invars[1]) else invars[::-1]
                if _is_one(y) and x.aval.same_type(out.aval):
                    alias(out, x)
                    return []
        if invars and all(a.__class__ is Literal for a in invars) and not (eqn.effects or prim.opaque):
            if all(v.aval.ndim == 0 for v in eqn.outvars) and prim.reference is None and prim.has_impl:
                for var, literal in zip(eqn.outvars, _evaluate(prim, invars, eqn.params), strict=True):
                    alias(var, literal)
                return []
        if prim is eqn.prim:
            return [eqn.with_invars(invars)]
        return [Eqn(prim, invars, eqn.outvars, eqn.params, eqn.source)]

    return rewrite(jaxpr, step, origins)


def _evaluate(prim: Primitive, literals: list[Any], params: dict) -> list[Literal]:
    """The results of an operation on literals, computed on the host."""
    host = backend.host_device()
    outs = prim.typed(tuple([a.aval for a in literals]), params)
    outs = outs if prim.multiple_results else (outs,)
    results = host.backend.run(prim, [a.array.buffer for a in literals], params, outs)
    return [Literal(ConcreteArray(r, aval, host)) for r, aval in zip(results, outs, strict=True)]


def _is_exact(narrow: np.dtype, wide: np.dtype) -> bool:
    """True if the conversion preserves every value of a floating dtype."""
    both = dtypes.is_floating(narrow) and dtypes.is_floating(wide)
    return both and narrow.itemsize < wide.itemsize and wide.itemsize >= 4


def _is_one(atom: Any) -> bool:
    return atom.__class__ is Literal and bool(atom.value == 1)


def cse(jaxpr: Jaxpr, origins: Origins | None = None) -> Jaxpr:
    """Common subexpression elimination. Equations with effects are all kept.

    Equations merge only within the same origin, or without any.
    """
    origin = (origins or {}).get
    seen: dict[Any, Eqn] = {}
    keys: dict[int, tuple] = {}  # of parameters by identity: equal equations often share the very object

    def step(eqn, invars, alias):
        if eqn.effects or eqn.prim.opaque:
            return [eqn.with_invars(invars)]
        params = keys.get(id(eqn.params))
        if params is None:
            params = keys[id(eqn.params)] = tuple([(k, exact(v)) for k, v in eqn.params.items()])
        key = (eqn.prim, tuple(map(_atom_key, invars)), params, origin(eqn))
        first = seen.get(key)
        if first is not None and not any(v.__class__ is DropVar for v in first.outvars):
            for mine, theirs in zip(eqn.outvars, first.outvars, strict=True):
                alias(mine, theirs)
            return []
        seen[key] = eqn = eqn.with_invars(invars)
        return [eqn]

    return rewrite(jaxpr, step, origins)


def _atom_key(atom: Atom) -> Any:
    if atom.__class__ is Literal:
        value: np.generic = atom.value  # type: ignore[union-attr]
        return (atom.aval.dtype, value.tobytes())
    return atom


def simplified_body(jaxpr: Jaxpr, keep: Callable[[Eqn], bool] = keeps_none) -> Jaxpr:
    """The body of a loop or branch, simplified with its calls inlined; memoized.

    ``keep`` selects calls with a kernel, as of ``inline_bodies``.
    """
    return jaxpr.memoised(
        ("simplified body", keep), lambda: simplify(inline_bodies(simplify(jaxpr), keep)[0])
    )


def simplify(jaxpr: Jaxpr) -> Jaxpr:
    """Run all passes, in an order in which each exposes work for the next; memoized."""
    if "is simplified" in jaxpr.memo:
        return jaxpr
    simplified = jaxpr.memoised("simplified", lambda: dce(cse(fold(inline_calls(jaxpr)))))
    simplified.memo["is simplified"] = True
    if config.check:
        check.check_effects(jaxpr, simplified)
    return simplified
