"""Evaluation of equations on the parts of arrays that have a short axis.

Kernels, below the rewrites that take arrays apart: ``loops/split_carries.py`` and ``short_axes.py``. In: equations, and
the arrays that are ``Parts``. Out: equations of the parts. An elementwise operation of a stack is one of each part, a
slice selects parts, a concatenation joins them, and a reduction over the short axis combines them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Atom, Eqn, Literal, Var
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
from blufunc.kernels.codegen.scalar_ops import is_small_float

MOST_PARTS = 8
"""Maximum parts of a carry."""

MOST_JOINED = 64
"""Maximum parts of a concatenation: more operations would not fit a kernel."""

COMBINED = {reduce_sum_p: add_p, reduce_max_p: max_p, reduce_min_p: min_p, reduce_prod_p: mul_p}
"""Reductions, and the operation that combines two parts."""


class Parts(NamedTuple):
    """A stack along ``axis``; each part lacks that axis."""

    axis: int
    parts: tuple[Atom, ...]


class WholeError(Exception):
    """A stack is needed as one array."""


Value = Atom | Parts


def without(aval: ShapedArray, axis: int) -> ShapedArray:
    return aval.with_shape((*aval.shape[:axis], *aval.shape[axis + 1 :]))


def axis_after_reshape(before: Sequence[int], after: Sequence[int], axis: int) -> int | None:
    """The axis of a reshaped array that has the parts of ``axis``; None if none does."""
    outer = math.prod(before[:axis])
    fits = (d for d, n in enumerate(after) if n == before[axis] and math.prod(after[:d]) == outer)
    return next(fits, None)


@dataclass
class Splitter:
    """Evaluates equations on parts.

    Attributes:
      eqns: the equations so far.
      env: by variable, its value: an atom, or parts.
      makers: by variable without parts, the equation that computes it.
    """

    eqns: list[Eqn] = field(default_factory=list)
    env: dict[Any, Value] = field(default_factory=dict)
    makers: dict[Any, Eqn] = field(default_factory=dict)

    def value(self, a: Atom) -> Value:
        """The value of an operand."""
        return a if a.__class__ is Literal else self.env[a]

    def put(self, prim: Any, ins: Sequence[Atom], aval: ShapedArray, params: dict, line: Any) -> Var:
        """Add an equation and return its result."""
        out = Var(aval)
        self.eqns.append(Eqn(prim, list(ins), [out], params, line))
        return out

    def part(self, x: Atom, axis: int, i: int, line: Any) -> Atom:
        """One part of an array along an axis."""
        shape, rest = x.aval.shape, without(x.aval, axis)
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

    def parts(self, x: Atom, axis: int, line: Any) -> Parts:
        """All parts of an array along an axis."""
        return Parts(axis, tuple(self.part(x, axis, i, line) for i in range(x.aval.shape[axis])))

    def joined(self, x: Parts, v: Var, line: Any) -> None:
        """Add the equations that join parts to the array ``v``."""
        shape = (*v.aval.shape[: x.axis], 1, *v.aval.shape[x.axis + 1 :])
        one = v.aval.with_shape(shape)
        rows = [self.put(reshape_p, [p], one, {"shape": shape}, line) for p in x.parts]
        self.eqns.append(Eqn(concatenate_p, rows, [v], {"dimension": x.axis}, line))

    def equation(self, e: Eqn) -> None:
        """Evaluate an equation.

        Raises:
          WholeError: it needs one of its operands as one array.
        """
        ins = [self.value(a) for a in e.invars]
        stacks = [x for x in ins if isinstance(x, Parts)]
        joins = e.prim is concatenate_p and 0 < e.outvars[0].aval.shape[e.params["dimension"]] <= MOST_PARTS
        if not stacks and not joins:
            e = e.with_invars(ins)  # type: ignore[arg-type]
            self.eqns.append(e)
            self.env.update((v, v) for v in e.outvars)
            self.makers.update((v, e) for v in e.outvars)
            return
        self.env[e.outvars[0]] = self.on_parts(e, ins)

    def on_parts(self, e: Eqn, ins: Sequence[Value]) -> Value:
        """The result of an equation some of whose operands are parts."""
        rule = _RULES.get(e.prim)
        if rule is None and (isinstance(e.prim, Elementwise) or e.prim is add_any_p):
            rule = _elementwise
        if rule is None or len(e.outvars) != 1 or is_replaced(e.prim, "impl"):
            raise WholeError
        return rule(self, e, ins)


def _elementwise(s: Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    (out,) = e.outvars
    axis, parts = next(x for x in ins if isinstance(x, Parts))
    columns = []
    for x in ins:
        if isinstance(x, Parts):
            if x.axis != axis or len(x.parts) != len(parts):
                raise WholeError
            columns.append(x.parts)
        elif x.aval.ndim:
            columns.append(tuple(s.part(x, axis, i, e.source) for i in range(len(parts))))
        else:
            columns.append((x,) * len(parts))
    aval = without(out.aval, axis)
    return Parts(
        axis, tuple(s.put(e.prim, row, aval, e.params, e.source) for row in zip(*columns, strict=True))
    )


def _slice(s: Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    ((axis, parts),) = ins  # type: ignore[misc]
    p, (out,) = e.params, e.outvars
    strides = p["strides"] or (1,) * out.aval.ndim
    kept = parts[p["start_indices"][axis] : p["limit_indices"][axis] : strides[axis]]
    if not kept:
        raise WholeError
    rest = lambda xs: (*xs[:axis], *xs[axis + 1 :])
    aval = without(out.aval, axis)
    if kept[0].aval.shape != aval.shape:
        params = {
            "start_indices": rest(p["start_indices"]),
            "limit_indices": rest(p["limit_indices"]),
            "strides": rest(strides),
        }
        kept = tuple(s.put(slice_p, [x], aval, params, e.source) for x in kept)
    return Parts(axis, tuple(kept))


def _reshape(s: Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    ((axis, parts),) = ins  # type: ignore[misc]
    before, after = e.invars[0].aval.shape, e.outvars[0].aval.shape
    if len(parts) == 1 and after == (*before[:axis], *before[axis + 1 :]):
        return parts[0]
    to = axis_after_reshape(before, after, axis)
    if to is None:
        raise WholeError
    aval = without(e.outvars[0].aval, to)
    done = (
        x if x.aval.shape == aval.shape else s.put(reshape_p, [x], aval, {"shape": aval.shape}, e.source)
        for x in parts
    )
    return Parts(to, tuple(done))


def _broadcast(s: Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    ((axis, parts),) = ins  # type: ignore[misc]
    dims, (out,) = e.params["dims"], e.outvars
    to, aval = dims[axis], without(out.aval, dims[axis])
    params = {"shape": aval.shape, "dims": tuple(d - (d > to) for i, d in enumerate(dims) if i != axis)}
    done = tuple(
        x if x.aval.shape == aval.shape else s.put(broadcast_in_dim_p, [x], aval, params, e.source)
        for x in parts
    )
    count = out.aval.shape[to]
    if len(done) != count and (len(done) != 1 or count > MOST_PARTS):
        raise WholeError
    return Parts(to, done if len(done) == count else done * count)


def _concatenate(s: Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    d, (out,) = e.params["dimension"], e.outvars
    stacks = [x for x in ins if isinstance(x, Parts)]
    if all(x.axis == d for x in stacks):
        if out.aval.shape[d] > MOST_JOINED:
            raise WholeError
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
        raise WholeError
    columns = [
        x.parts if isinstance(x, Parts) else tuple(s.part(x, axis, i, e.source) for i in range(len(first)))
        for x in ins
    ]
    aval, params = without(out.aval, axis), {"dimension": d - (d > axis)}
    rows = zip(*columns, strict=True)
    return Parts(axis, tuple(s.put(concatenate_p, row, aval, params, e.source) for row in rows))


def _transpose(s: Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    ((axis, parts),) = ins  # type: ignore[misc]
    order = e.params["permutation"]
    to = order.index(axis)
    aval = without(e.outvars[0].aval, to)
    rest = tuple(d - (d > axis) for d in order if d != axis)
    if rest == tuple(range(len(rest))):
        return Parts(to, parts)
    params = {"permutation": rest}
    return Parts(to, tuple(s.put(transpose_p, [x], aval, params, e.source) for x in parts))


def _reduce(s: Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    ((axis, parts),) = ins  # type: ignore[misc]
    axes, (out,) = e.params["axes"], e.outvars
    rest = tuple(d - (d > axis) for d in axes if d != axis)
    if axis not in axes:
        to = axis - sum(d < axis for d in axes)
        aval = without(out.aval, to)
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
        total = s.put(COMBINED[e.prim], [total, x], aval, {}, e.source)
    return convert(total, out.aval.dtype) if wide else total


def _reverse(s: Splitter, e: Eqn, ins: Sequence[Value]) -> Value:
    ((axis, parts),) = ins  # type: ignore[misc]
    dims = e.params["dimensions"]
    rest = tuple(d - (d > axis) for d in dims if d != axis)
    if rest:
        parts = tuple(s.put(rev_p, [x], x.aval, {"dimensions": rest}, e.source) for x in parts)
    return Parts(axis, parts[::-1] if axis in dims else parts)


_RULES: dict[Any, Callable[[Splitter, Eqn, Sequence[Value]], Value]] = {
    slice_p: _slice, reshape_p: _reshape, broadcast_in_dim_p: _broadcast, concatenate_p: _concatenate,
    transpose_p: _transpose, rev_p: _reverse, **dict.fromkeys(COMBINED, _reduce),
}  # fmt: skip
