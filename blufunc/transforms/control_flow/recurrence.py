"""Pointwise recurrences: an ``associative_scan`` by a pointwise function.

Transforms, below ``associative_scan.py``. An equation holds its definition, a prefix scan of logarithmic depth, which
compilers inline where they have no kernel for it. The primitives:

    recurrence          k arrays x -> k arrays y: y[0] = x[0], y[i] = combine(y[i - 1], x[i])
    affine_recurrence   entries of matrices A, k arrays c -> k arrays y: y[0] = c[0], y[i] = A[i] y[i - 1] + c[i]

Elements of different positions off the axis do not meet. The tangent of each primitive is an affine recurrence: its
matrices are the derivatives of ``combine``, of which most entries are 0. The transpose of an affine recurrence is one
in the other direction, of the transposed matrices of the elements that come next: ``late`` is True if the matrices are
those of the element before. So all derivatives are recurrences, and kernels that read each array once compute them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var, eval_jaxpr
from blufunc.core.ops.elementwise import add_p, mul
from blufunc.core.ops.prefix import prefix_scan
from blufunc.core.ops.shape import concatenate, pad, slice_in_dim
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import (
    add_any,
    add_any_p,
    broadcast_in_dim_p,
    broadcast_to,
    full,
    instantiate,
    move_dim,
)
from blufunc.core.primitives.tangents import Zero, is_linear, zero
from blufunc.core.programs import simplify
from blufunc.core.programs.stage import stage
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.control_flow.composite import Composite

Pattern = tuple[tuple[int, int], ...]
"""The entries of matrices that may differ from 0, as (row, column), sorted."""


def of_points(jaxpr: Jaxpr, shape: Sequence[int]) -> Jaxpr | None:
    """A pointwise function of arrays as a function of scalars; None if it is not one."""
    jaxpr = simplify.inline_pointwise(simplify.simplify(jaxpr))
    if jaxpr.consts or any(v.aval.shape != tuple(shape) for v in jaxpr.invars):
        return None
    scalars: dict[Any, Atom] = {v: Var(v.aval.with_shape(())) for v in jaxpr.invars}
    scalar = lambda a: a if a.__class__ is Literal else scalars[a]
    eqns = []
    for e in jaxpr.eqns:
        if e.prim is broadcast_in_dim_p and not e.invars[0].aval.ndim:
            scalars[e.outvars[0]] = scalar(e.invars[0])
            continue
        if not isinstance(e.prim, Elementwise) or e.effects:
            return None
        (v,) = e.outvars
        scalars[v] = out = Var(v.aval.with_shape(()))
        eqns.append(Eqn(e.prim, [scalar(a) for a in e.invars], [out], e.params, e.source))
    outs = [scalar(a) for a in jaxpr.outvars]
    made = Jaxpr([scalars[v] for v in jaxpr.invars], eqns, outs, name="combine")  # type: ignore[misc]
    return made if all(a.aval.ndim == 0 for a in outs) else None


# -- definitions -------------------------------------------------------------------------------------


def _combined(*xs: Any, combine: Jaxpr, axis: int, reverse: bool) -> list[Any]:
    """The prefix scan of pairs."""
    return prefix_scan(lambda a, b: _at_points(combine, [*a, *b]), list(xs), axis, reverse)


def _at_points(combine: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """A function of scalars at each point of arrays."""

    def with_scalars() -> Jaxpr:  # ``add_any`` takes no array and scalar
        plain = lambda e: Eqn(add_p, e.invars, e.outvars, {}, e.source) if e.prim is add_any_p else e
        return combine.replace(eqns=[plain(e) for e in combine.eqns])

    shape = args[0].aval.shape
    outs = eval_jaxpr(combine.memoised("with scalars", with_scalars), args)
    return [o if o.aval.shape == shape else broadcast_to(o, shape) for o in outs]


def _affine(*operands: Any, pattern: Pattern, axis: int, reverse: bool, late: bool) -> list[Any]:
    """The prefix scan of affine maps, whose matrices are multiplied."""
    m = len(pattern)
    entries, cs = list(operands[:m]), list(operands[m:])
    if late:
        entries = [_after(a, axis, reverse) for a in entries]
    every = closure(pattern)
    known = dict(zip(pattern, entries, strict=True))
    zeros = full(cs[0].aval.shape, 0, cs[0].aval.dtype)
    elements = [*(known.get(p, zeros) for p in every), *cs]

    def combine(first: list, then: list) -> list:
        a, b = (dict(zip(every, x, strict=False)) for x in (first, then))
        c, d = first[len(every) :], then[len(every) :]
        matrix = [
            _sum([mul(b[r, s], a[s, t]) for s in range(len(cs)) if (r, s) in b and (s, t) in a])
            for r, t in every
        ]
        offset = [
            _sum([d[r], *(mul(b[r, s], c[s]) for s in range(len(cs)) if (r, s) in b)]) for r in range(len(cs))
        ]
        like = [x if x is not None else full(c[0].aval.shape, 0, c[0].aval.dtype) for x in matrix]
        return [*like, *offset]

    return prefix_scan(combine, elements, axis, reverse)[len(every) :]


def closure(pattern: Pattern) -> Pattern:
    """The entries of powers of a matrix with a pattern."""
    found = set(pattern)
    while more := {(r, t) for r, s in found for u, t in found if s == u} - found:
        found |= more
    return tuple(sorted(found))


def _sum(terms: list[Any]) -> Any:
    return functools.reduce(add_any, terms) if terms else None


def _after(x: Any, axis: int, reverse: bool) -> Any:
    """Each element one place later in the scan; zero at the first place."""
    n = x.aval.shape[axis]
    kept = slice_in_dim(x, 1, n, axis=axis) if reverse else slice_in_dim(x, 0, n - 1, axis=axis)
    return _padded(kept, axis, reverse)


# -- primitives --------------------------------------------------------------------------------------


class _AlongAxis(Composite):
    """A composite of arrays of one shape, along an axis.

    Its equations are staged for each use, as their parameters hold the user's function.
    """

    def at(self, *args: Any, **params: Any) -> list[Any]:
        avals = tuple([a.aval.strong() for a in args])
        jaxpr = stage(functools.partial(type(self).definition, **params), avals, self.name)
        return self.bind(*args, jaxpr=jaxpr, **params)

    def batch(self, axis_data, args, dims, *, jaxpr, axis, **params):
        n = axis_data.size
        moved = [
            broadcast_to(a, (n, *a.aval.shape)) if d is None else move_dim(a, d, 0)
            for a, d in zip(args, dims, strict=True)
        ]
        outs = self.at(*moved, axis=axis + 1, **params)
        return outs, [0] * len(outs)

    linearize = split = None  # type: ignore[assignment]  # those of ``jvp``, and of the linear operands
    shard = None  # type: ignore[assignment]  # its body is divided
    autocast = None  # type: ignore[assignment]


class _Recurrence(_AlongAxis):
    name, definition = "recurrence", _combined

    def jvp(self, primals, tangents, *, jaxpr, combine: Jaxpr, axis, reverse):
        ys = self.bind(*primals, jaxpr=jaxpr, combine=combine, axis=axis, reverse=reverse)
        k, n = len(ys), ys[0].aval.shape[axis]
        if n == 1:
            return ys, list(tangents)
        start = 0 if reverse else 1
        later = lambda x: slice_in_dim(x, start, start + n - 1, axis=axis)  # all but the first element
        before = [slice_in_dim(y, 1 - start, n - start, axis=axis) for y in ys]
        xs = [later(x) for x in primals]
        moving = [t.__class__ is not Zero for t in tangents]
        ts = [None if t.__class__ is Zero else later(t) for t in tangents]
        entries: dict[tuple[int, int], Any] = {}
        for r, s, partial in _partials(combine):
            if partial.outvars[0] in partial.invars[k:]:  # an operand: that of the first step is not used
                entries[r, s] = primals[partial.invars.index(partial.outvars[0]) - k]
            else:
                (entry,) = _at_points(partial, [*before, *xs])
                entries[r, s] = _padded(entry, axis, reverse)
        offsets = _derivative(combine, [*before, *xs], {k + s: t for s, t in enumerate(ts) if t is not None})
        cs: list[Any] = []
        for s, (y, t, c) in enumerate(zip(ys, tangents, offsets, strict=True)):
            if not _is_differentiable(y) or (not moving[s] and c is None):
                cs.append(None)
                continue
            first = n - 1 if reverse else 0
            own = slice_in_dim(instantiate(t), first, first + 1, axis=axis)
            rest = full(before[s].aval.shape, 0, y.aval.dtype) if c is None else c
            cs.append(concatenate([rest, own] if reverse else [own, rest], axis))
        found = _in_components(entries, cs, ys, axis=axis, reverse=reverse, late=False)
        return ys, [zero(y.aval) if t is None else t for y, t in zip(ys, found, strict=True)]


def _is_differentiable(x: Any) -> bool:
    return dtypes.is_floating(x.aval.dtype)


def _tangents(derived: Jaxpr, k: int, dtype: Any, *scalars: Any) -> list[Any]:
    """The tangents of ``k`` results of a derivative, for a tangent of 1."""
    return eval_jaxpr(derived, [*scalars, full((), 1, dtype)])[k:]


def _partials(combine: Jaxpr) -> list[tuple[int, int, Jaxpr]]:
    """The derivatives of results by the states before, but for zeros.

    As (result, state, function of all scalars).
    """
    k = len(combine.outvars)

    def make() -> list[tuple[int, int, Jaxpr]]:
        found = []
        for s, v in enumerate(combine.invars[:k]):
            if not dtypes.is_floating(v.aval.dtype):
                continue
            derived, flags = jvp_jaxpr(combine, tuple(i == s for i in range(2 * k)), (False,) * k)
            every = stage(
                functools.partial(_tangents, derived, k, v.aval.dtype), combine.in_avals, "partials"
            )
            places = [r for r, flag in enumerate(flags) if flag]
            for i, r in enumerate(places):
                used = tuple(j == i for j in range(len(places)))
                found.append((r, s, simplify.simplify(simplify.dce(every, used))))
        return found

    return combine.memoised("partials", make)


def _derivative(combine: Jaxpr, args: Sequence[Any], tangents: dict[int, Any]) -> list[Any]:
    """The tangents of results at each point, None for zeros."""
    nonzeros = tuple(i in tangents for i in range(len(args)))
    n = len(combine.outvars)
    if not tangents:
        return [None] * n
    derived, flags = jvp_jaxpr(combine, nonzeros, (False,) * n)
    outs = iter(_at_points(derived, [*args, *tangents.values()])[n:])
    return [next(outs) if f else None for f in flags]


def _padded(x: Any, axis: int, reverse: bool) -> Any:
    """With a zero at the first element of the scan, which nothing multiplies."""
    lo, hi = (0, 1) if reverse else (1, 0)
    padding = [(lo, hi, 0) if d == axis else (0, 0, 0) for d in range(x.aval.ndim)]
    return pad(x, full((), 0, x.aval.dtype), padding)


def _in_components(
    entries: dict[tuple[int, int], Any], cs: Sequence[Any], like: Sequence[Any], **params: Any
) -> list[Any]:
    """Affine recurrences of the states that depend on each other; None where all is 0."""
    k = len(cs)
    group = list(range(k))
    for r, s in entries:
        a, b = group[r], group[s]
        group = [a if g == b else g for g in group]
    results: list[Any] = [None] * k
    for g in dict.fromkeys(group):
        members = [s for s in range(k) if group[s] == g]
        if all(cs[s] is None for s in members):
            continue
        own = [full(like[s].aval.shape, 0, like[s].aval.dtype) if cs[s] is None else cs[s] for s in members]
        index = {s: i for i, s in enumerate(members)}
        mine = [(index[r], index[s], a) for (r, s), a in entries.items() if r in index]
        mine.sort(key=lambda found: found[:2])
        pattern = tuple((r, s) for r, s, _ in mine)
        if not pattern:
            found = own
        else:
            found = affine_recurrence_p.at(*(a for _, _, a in mine), *own, pattern=pattern, **params)
        for s, y in zip(members, found, strict=True):
            results[s] = y
    return results


class _AffineRecurrence(_AlongAxis):
    name, definition = "affine_recurrence", _affine

    def jvp(self, primals, tangents, *, jaxpr, pattern, axis, reverse, late):
        m = len(pattern)
        params = {"pattern": pattern, "axis": axis, "reverse": reverse, "late": late}
        ys = self.bind(*primals, jaxpr=jaxpr, **params)
        cs: list[Any] = [None if t.__class__ is Zero else t for t in tangents[m:]]
        for (r, s), t in zip(pattern, tangents, strict=False):
            if t.__class__ is Zero:
                continue
            moved = _after(mul(t, ys[s]), axis, reverse) if late else mul(t, _after(ys[s], axis, reverse))
            cs[r] = moved if cs[r] is None else add_any(cs[r], moved)
        if all(c is None for c in cs):
            return ys, [zero(y.aval) for y in ys]
        own = [full(y.aval.shape, 0, y.aval.dtype) if c is None else c for y, c in zip(ys, cs, strict=True)]
        return ys, self.at(*primals[:m], *own, **params)

    def transpose(self, cts, *args, jaxpr, pattern, axis, reverse, late):
        m = len(pattern)
        cs = args[m:]
        own = [instantiate(ct) for ct in cts]
        turned = sorted(
            (((s, r), a) for (r, s), a in zip(pattern, args, strict=False)), key=lambda found: found[0]
        )
        found = self.at(
            *(a for _, a in turned), *own, pattern=tuple(p for p, _ in turned), axis=axis,
            reverse=not reverse, late=not late,
        )  # fmt: skip
        for c, grad in zip(cs, found, strict=True):
            if is_linear(c):
                c.add(grad)


recurrence_p, affine_recurrence_p = _Recurrence(), _AffineRecurrence()


def recurrence(combine: Jaxpr, xs: Sequence[Any], axis: int, reverse: bool) -> list[Any]:
    """The scan of arrays of one shape by a function of scalars."""
    return recurrence_p.at(*xs, combine=combine, axis=axis, reverse=reverse)
