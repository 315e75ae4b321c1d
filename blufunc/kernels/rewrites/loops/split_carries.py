"""Loops whose carries are short stacks of arrays, as loops of the arrays.

Kernels, before stage 5, called by ``pointwise_control_flow``. In: a ``scan`` or ``while`` whose body takes a carry such
as the state f32[3, 1024] of 1024 systems apart and stacks its results. Out: the same loop with a carry per row, if its
body never needs the stack. Then each point may be on its own: the loop runs inside one kernel.

The body is evaluated on ``Parts``. An elementwise operation of a stack is one of each part, a slice selects parts, a
concatenation joins them, and a reduction over the short axis combines them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Atom, DropVar, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.elementwise import add_p, convert_p, max_p, min_p, mul_p
from blufunc.core.ops.reduce import reduce_max_p, reduce_min_p, reduce_prod_p
from blufunc.core.ops.shape import concatenate_p, rev_p, slice_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import (
    add_any_p,
    broadcast_in_dim_p,
    reduce_sum_p,
    reshape_p,
    transpose_p,
)
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import simplified_body
from blufunc.kernels.codegen.scalar_ops import is_small_float

MOST_PARTS = 8
"""Maximum parts of a carry."""

MOST_JOINED = 64
"""Maximum parts of a concatenation: more operations would not fit a kernel."""

_COMBINED = {reduce_sum_p: add_p, reduce_max_p: max_p, reduce_min_p: min_p, reduce_prod_p: mul_p}
"""Reductions, and the operation that combines two parts."""


class Parts(NamedTuple):
    """A stack along ``axis``; each part lacks that axis."""

    axis: int
    parts: tuple[Atom, ...]


class _WholeError(Exception):
    """A stack is needed as one array."""


def with_split_carries(eqn: Eqn) -> Iterator[list[Eqn]]:
    """Ways to replace a loop by one of parts; none if its body needs the stacks."""
    loop = _Bodies.of(eqn)
    if loop is None:
        return
    for seed in _short_axes(loop):
        with contextlib.suppress(_WholeError):
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
    if not any(e.prim in (slice_p, concatenate_p, *_COMBINED) for body, _ in loop.bodies for e in body.eqns):
        return
    carries = [v.aval for v in loop.bodies[-1][0].invars[loop.bodies[-1][1] :]]
    for k, aval in enumerate(carries):
        for axis, n in enumerate(aval.shape):
            if 1 < n <= MOST_PARTS and aval.size:
                yield [axis if i == k else None for i in range(len(carries))]


def _axis_of(x: Atom | Parts, before: int | None) -> int | None:
    if isinstance(x, Parts):
        if before is not None and before != x.axis:
            raise _WholeError
        return x.axis
    return before


Value = Atom | Parts


def _split_body(body: Jaxpr, n: int, flags: Sequence[int | None], is_step: bool) -> tuple[Jaxpr, list[Value]]:
    """A body on parts of the carries, and its results; ``is_step``: these are carries."""
    s = _Splitter()
    invars: list[Var] = list(body.invars[:n])
    for v in invars:
        s.env[v] = v
    for v, axis in zip(body.invars[n:], flags, strict=True):
        if axis is None:
            s.env[v] = v
            invars.append(v)
        else:
            aval = _without(v.aval, axis)
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
                raise _WholeError
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
    before = _Splitter()
    first = len(eqn.invars) - loop.n_carry
    invars: list[Atom] = list(eqn.invars[:first])
    outvars: list[Var] = []
    after: list[Eqn] = []
    for x, v, axis in zip(eqn.invars[first:], eqn.outvars, flags, strict=True):
        if axis is None:
            invars.append(x)
            outvars.append(v)
            continue
        count = x.aval.shape[axis]
        invars.extend(before.part(x, axis, i, eqn.source) for i in range(count))
        parts = [Var(_without(v.aval, axis)) for _ in range(count)]
        outvars.extend(parts)
        if isinstance(v, DropVar):
            continue
        shape = (*v.aval.shape[:axis], 1, *v.aval.shape[axis + 1 :])
        rows = [Var(v.aval.with_shape(shape)) for _ in parts]
        after += [
            Eqn(reshape_p, [p], [r], {"shape": shape}, eqn.source) for p, r in zip(parts, rows, strict=True)
        ]
        after.append(Eqn(concatenate_p, rows, [v], {"dimension": axis}, eqn.source))
    p = dict(eqn.params)
    if eqn.prim.name == "while":
        p.update(cond=split[0][0], body=split[1][0])
    else:
        p.update(jaxpr=split[0][0], n_carry=len(outvars))
    return [*before.eqns, Eqn(eqn.prim, invars, outvars, p, eqn.source), *after]


def _without(aval: ShapedArray, axis: int) -> ShapedArray:
    return aval.with_shape((*aval.shape[:axis], *aval.shape[axis + 1 :]))


@dataclass
class _Splitter:
    """Evaluates equations on parts."""

    eqns: list[Eqn] = field(default_factory=list)
    env: dict[Any, Value] = field(default_factory=dict)
    makers: dict[Any, Eqn] = field(default_factory=dict)

    def value(self, a: Atom) -> Value:
        return a if a.__class__ is Literal else self.env[a]

    def put(self, prim: Any, ins: Sequence[Atom], aval: ShapedArray, params: dict, line: Any) -> Var:
        """Add an equation and return its result."""
        out = Var(aval)
        self.eqns.append(Eqn(prim, list(ins), [out], params, line))
        return out

    def part(self, x: Atom, axis: int, i: int, line: Any) -> Atom:
        """One part of an array along an axis."""
        shape, rest = x.aval.shape, _without(x.aval, axis)
        maker = self.makers.get(x)
        if maker is not None and maker.prim is reshape_p and shape[axis] == 1:
            (before,) = maker.invars
            if before.aval.same_type(rest):  # it only gave the array that axis
                return before
        if maker is not None and maker.prim is broadcast_in_dim_p and axis not in maker.params["dims"]:
            (before,) = maker.invars
            dims = tuple(d - (d > axis) for d in maker.params["dims"])
            if before.aval.same_type(rest):
                return before
            return self.put(broadcast_in_dim_p, [before], rest, {"shape": rest.shape, "dims": dims}, line)
        start = tuple(i if d == axis else 0 for d in range(len(shape)))
        limit = tuple(i + 1 if d == axis else m for d, m in enumerate(shape))
        one = x.aval.with_shape((*shape[:axis], 1, *shape[axis + 1 :]))
        params = {"start_indices": start, "limit_indices": limit, "strides": None}
        cut = self.put(slice_p, [x], one, params, line)
        return self.put(reshape_p, [cut], rest, {"shape": rest.shape}, line)

    def equation(self, e: Eqn) -> None:
        ins = [self.value(a) for a in e.invars]
        stacks = [x for x in ins if isinstance(x, Parts)]
        joins = e.prim is concatenate_p and 0 < e.outvars[0].aval.shape[e.params["dimension"]] <= MOST_PARTS
        if not stacks and not joins:
            e = e.with_invars(ins)  # type: ignore[arg-type]
            self.eqns.append(e)
            self.env.update((v, v) for v in e.outvars)
            self.makers.update((v, e) for v in e.outvars)
            return
        rule = _RULES.get(e.prim)
        if rule is None and (isinstance(e.prim, Elementwise) or e.prim is add_any_p):
            rule = _elementwise
        if rule is None or len(e.outvars) != 1 or is_replaced(e.prim, "impl"):
            raise _WholeError
        self.env[e.outvars[0]] = rule(self, e, ins)


def _elementwise(s: _Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    (out,) = e.outvars
    axis, parts = next(x for x in ins if isinstance(x, Parts))
    columns = []
    for x in ins:
        if isinstance(x, Parts):
            if x.axis != axis or len(x.parts) != len(parts):
                raise _WholeError
            columns.append(x.parts)
        elif x.aval.ndim:
            columns.append(tuple(s.part(x, axis, i, e.source) for i in range(len(parts))))
        else:
            columns.append((x,) * len(parts))
    aval = _without(out.aval, axis)
    return Parts(
        axis, tuple(s.put(e.prim, row, aval, e.params, e.source) for row in zip(*columns, strict=True))
    )


def _slice(s: _Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    ((axis, parts),) = ins  # type: ignore[misc]
    p, (out,) = e.params, e.outvars
    strides = p["strides"] or (1,) * out.aval.ndim
    kept = parts[p["start_indices"][axis] : p["limit_indices"][axis] : strides[axis]]
    if not kept:
        raise _WholeError
    rest = lambda xs: (*xs[:axis], *xs[axis + 1 :])
    aval = _without(out.aval, axis)
    if kept[0].aval.shape != aval.shape:
        params = {
            "start_indices": rest(p["start_indices"]),
            "limit_indices": rest(p["limit_indices"]),
            "strides": rest(strides),
        }
        kept = tuple(s.put(slice_p, [x], aval, params, e.source) for x in kept)
    return Parts(axis, tuple(kept))


def _reshape(s: _Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    ((axis, parts),) = ins  # type: ignore[misc]
    before, after = e.invars[0].aval.shape, e.outvars[0].aval.shape
    if len(parts) == 1 and after == (*before[:axis], *before[axis + 1 :]):
        return parts[0]
    if after[: axis + 1] != before[: axis + 1]:
        raise _WholeError
    aval = _without(e.outvars[0].aval, axis)
    return Parts(axis, tuple(s.put(reshape_p, [x], aval, {"shape": aval.shape}, e.source) for x in parts))


def _broadcast(s: _Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    ((axis, parts),) = ins  # type: ignore[misc]
    dims, (out,) = e.params["dims"], e.outvars
    to, aval = dims[axis], _without(out.aval, dims[axis])
    params = {"shape": aval.shape, "dims": tuple(d - (d > to) for i, d in enumerate(dims) if i != axis)}
    done = tuple(
        x if x.aval.shape == aval.shape else s.put(broadcast_in_dim_p, [x], aval, params, e.source)
        for x in parts
    )
    count = out.aval.shape[to]
    if len(done) != count and (len(done) != 1 or count > MOST_PARTS):
        raise _WholeError
    return Parts(to, done if len(done) == count else done * count)


def _concatenate(s: _Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    d, (out,) = e.params["dimension"], e.outvars
    stacks = [x for x in ins if isinstance(x, Parts)]
    if all(x.axis == d for x in stacks):
        if out.aval.shape[d] > MOST_JOINED:
            raise _WholeError
        parts: list[Atom] = []
        for x in ins:
            parts.extend(
                x.parts
                if isinstance(x, Parts)
                else [s.part(x, d, i, e.source) for i in range(x.aval.shape[d])]
            )
        return Parts(d, tuple(parts))
    axis, first = stacks[0]
    if any(x.axis != axis or len(x.parts) != len(first) for x in stacks):
        raise _WholeError
    columns = [
        x.parts if isinstance(x, Parts) else tuple(s.part(x, axis, i, e.source) for i in range(len(first)))
        for x in ins
    ]
    aval, params = _without(out.aval, axis), {"dimension": d - (d > axis)}
    rows = zip(*columns, strict=True)
    return Parts(axis, tuple(s.put(concatenate_p, row, aval, params, e.source) for row in rows))


def _transpose(s: _Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    ((axis, parts),) = ins  # type: ignore[misc]
    order = e.params["permutation"]
    to = order.index(axis)
    aval = _without(e.outvars[0].aval, to)
    rest = tuple(d - (d > axis) for d in order if d != axis)
    if rest == tuple(range(len(rest))):
        return Parts(to, parts)
    params = {"permutation": rest}
    return Parts(to, tuple(s.put(transpose_p, [x], aval, params, e.source) for x in parts))


def _reduce(s: _Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    ((axis, parts),) = ins  # type: ignore[misc]
    axes, (out,) = e.params["axes"], e.outvars
    rest = tuple(d - (d > axis) for d in axes if d != axis)
    if axis not in axes:
        to = axis - sum(d < axis for d in axes)
        aval = _without(out.aval, to)
        return Parts(to, tuple(s.put(e.prim, [x], aval, {**e.params, "axes": rest}, e.source) for x in parts))
    # sums and products of short floats are accumulated in float32, and rounded once
    wide = e.prim in (reduce_sum_p, reduce_prod_p) and is_small_float(out.aval.dtype)
    dtype = dtypes.float32 if wide else out.aval.dtype
    convert = lambda x, to: s.put(convert_p, [x], x.aval.with_dtype(to), {"dtype": to}, e.source)
    xs = [convert(x, dtype) for x in parts] if wide else parts
    aval = out.aval.with_dtype(dtype)
    done = [s.put(e.prim, [x], aval, {**e.params, "axes": rest}, e.source) if rest else x for x in xs]
    total = done[0]
    for x in done[1:]:
        total = s.put(_COMBINED[e.prim], [total, x], aval, {}, e.source)
    return convert(total, out.aval.dtype) if wide else total


def _reverse(s: _Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    ((axis, parts),) = ins  # type: ignore[misc]
    dims = e.params["dimensions"]
    rest = tuple(d - (d > axis) for d in dims if d != axis)
    if rest:
        parts = tuple(s.put(rev_p, [x], x.aval, {"dimensions": rest}, e.source) for x in parts)
    return Parts(axis, parts[::-1] if axis in dims else parts)


_RULES: dict[Any, Callable[[_Splitter, Eqn, Sequence[Value]], Value]] = {
    slice_p: _slice, reshape_p: _reshape, broadcast_in_dim_p: _broadcast, concatenate_p: _concatenate,
    transpose_p: _transpose, rev_p: _reverse, **dict.fromkeys(_COMBINED, _reduce),
}  # fmt: skip
