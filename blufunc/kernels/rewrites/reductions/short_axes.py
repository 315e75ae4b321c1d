"""Reductions over a few elements, unrolled into pointwise work.

Kernels, before stage 5. In: a jaxpr, its calls inlined. Out: one in which the arrays that a reduction over a short axis
reads, such as the differences f32[n, n, 3] of points in space, are an array for each element of that axis.

A kernel with a row of three lanes would leave most threads of a warp idle, and a row that is reduced once more along
another axis needs memory in between. Unrolled, the reduction is a few additions of each point, the axis is in no
iteration space, and regions with the remaining axes fuse. ``parts.py`` evaluates the equations on parts.

The pass starts from a reduction and follows its operands back to values that are in memory, and all readers of what it
finds. It gives up where something needs one of these values as one array. Results that are smaller by a factor of
``_SMALL``, such as the sums of a gradient, are joined.
"""

from __future__ import annotations

import math
from typing import Any

from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import add_any_p, broadcast_in_dim_p, reshape_p, transpose_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, dce
from blufunc.kernels.fusion.iteration_space import sort_of
from blufunc.kernels.loopir.access_map import moves
from blufunc.kernels.rewrites.parts import COMBINED, MOST_PARTS, Parts, Splitter, axis_after_reshape
from blufunc.kernels.rewrites.readers import Readers

_LEAST = 1 << 16
"""Minimum elements that are reduced: fewer take the time of a launch."""

_SMALL = 16
"""A value this many times smaller stays in cache: it may be stored and read again."""

_MOST_EQUATIONS = 160
"""Maximum equations of the parts of one reduction: more would not fit a kernel."""

_SECTOR = 8
"""Minimum elements after a short axis in memory: fewer are strided reads."""


def with_unrolled_short_axes(jaxpr: Jaxpr, origins: Origins) -> Jaxpr:
    """Unroll reductions over an axis of at most 8 elements."""
    seeds = [(e, axis) for e in jaxpr.eqns for axis in _short_axes(e)]
    if not seeds:
        return jaxpr
    found: dict[Any, int] = {}  # by variable, the axis of its parts
    sums: dict[Any, int] = {}  # by result of a reduction of one array in memory, the axis that is unrolled
    readers = Readers(jaxpr)
    for eqn, axis in seeds:
        component = _Component(readers, found)
        if eqn.invars[0] not in found and component.unrolls(eqn, axis):
            found.update(component.axes)
            if eqn.invars[0] not in found:
                sums[eqn.outvars[0]] = axis
    return _unrolled(jaxpr, origins, found, sums) if found or sums else jaxpr


def _short_axes(eqn: Eqn) -> list[int]:
    """The short axes of a reduction, at most one."""
    if eqn.prim not in COMBINED or is_replaced(eqn.prim, "impl") or sort_of(eqn) != "node":
        return []
    x = eqn.invars[0].aval
    axes = [d for d in eqn.params["axes"] if 1 < x.shape[d] <= MOST_PARTS]
    return axes[:1] if x.size >= _LEAST else []


class _Component:
    """The variables that have to be parts if the operand of a reduction is.

    Attributes:
      axes: by variable, its short axis.
      stored: values in memory of the size of the operand that are read. No other axis may be reduced then, as the rows
        of a kernel would read such a value once for all of its parts.
    """

    def __init__(self, readers: Readers, known: dict[Any, int]):
        self.readers, self.known = readers, known
        self.axes: dict[Any, int] = {}
        self.pending: list[Var] = []
        self.stored: list[Any] = []
        self.reduces_others = False
        self.equations = 0

    def unrolls(self, eqn: Eqn, axis: int) -> bool:
        """True if a reduction over ``axis`` can be unrolled, with all that then has to be."""
        (x,) = eqn.invars
        if not self.needs(x, axis, x.aval.size):
            return False
        others = [n for d, n in enumerate(x.aval.shape) if d in eqn.params["axes"] and d != axis]
        self.reduces_others = math.prod(others) > 1
        if self.stored and self.reduces_others:
            return False
        while self.pending:
            v = self.pending.pop()
            if not (self.computes(v) and all(self.takes(e, v) for e in self.readers.of(v))):
                return False
            if self.equations > _MOST_EQUATIONS or (self.stored and self.reduces_others):
                return False
        mine = lambda e: e is eqn or moves(e) or (e.outvars and e.outvars[0] in self.axes)
        return all(mine(e) for v in self.stored for e in self.readers.of(v))

    def add(self, v: Any, axis: int) -> bool:
        """Let a variable be parts along ``axis``; False if it cannot be."""
        before = self.axes.get(v, self.known.get(v))
        if before is not None:
            return before == axis
        if v in self.readers.returned:
            return False
        self.axes[v] = axis
        self.pending.append(v)
        self.equations += v.aval.shape[axis] * (not moves(self.readers.makers[v]))
        return True

    def needs(self, x: Atom, axis: int, size: int) -> bool:
        """Find out whether an operand of values of ``size`` elements is computed in parts."""
        shape = x.aval.shape
        before = None if x.__class__ is Literal else self.axes.get(x, self.known.get(x))
        if before is not None:
            return before == axis
        if x.__class__ is Literal or x.aval.size * _SMALL <= size:
            return True
        maker = self.readers.makers.get(x)
        if maker is not None and (source := _before(maker, axis)) is not None:
            inner, d = source
            equal = d is None or inner.aval.shape[d] == 1 < shape[axis]
            if equal or inner.aval.size * _SMALL <= size:
                return True  # parts read the operand
            if self.is_computed(inner):
                return self.add(x, axis)
            assert d is not None
            return self.needs(inner, d, size)
        if self.is_computed(x):
            return self.add(x, axis)
        if maker is not None and sort_of(maker) != "opaque":
            return False  # of a kernel that this one would fuse with, as it is
        self.stored.append(x)
        inner = math.prod(shape[axis + 1 :])
        return inner >= _SECTOR or (inner == 1 and not _fill_vectors(shape[axis]))

    def is_computed(self, x: Atom) -> bool:
        """True for a result of elementwise equations, after any movement."""
        maker = self.readers.makers.get(x)
        while maker is not None and moves(maker):
            maker = self.readers.makers.get(maker.invars[0])
        return maker is not None and sort_of(maker) == "node" and _is_elementwise(maker)

    def computes(self, v: Var) -> bool:
        """True if parts of all operands of a variable are available."""
        eqn, axis = self.readers.makers[v], self.axes[v]
        if _is_elementwise(eqn):
            return all(self.needs(a, axis, v.aval.size) for a in eqn.invars if a.aval.ndim)
        source = _before(eqn, axis)
        if source is None:
            return False
        inner, d = source
        return d is not None and self.add(inner, d)

    def takes(self, eqn: Eqn, v: Var) -> bool:
        """True if an equation can read a variable in parts."""
        axis = self.axes[v]
        if len(eqn.outvars) != 1 or is_replaced(eqn.prim, "impl"):
            return False
        (out,) = eqn.outvars
        if eqn.prim in COMBINED and not moves(eqn):
            axes = eqn.params["axes"]
            if axis in axes:
                return True
            self.reduces_others = True
            small = out.aval.size * _SMALL <= v.aval.size
            return small or self.add(out, axis - sum(d < axis for d in axes))
        if _is_elementwise(eqn):
            return sort_of(eqn) == "node" and self.add(out, axis)
        to = _after(eqn, axis)
        return to is not None and self.add(out, to)


def _fill_vectors(n: int) -> bool:
    """True if rows of ``n`` elements are whole vectors, which threads read at once."""
    return n & (n - 1) == 0


def _is_elementwise(eqn: Eqn) -> bool:
    return isinstance(eqn.prim, Elementwise) or eqn.prim is add_any_p


def _before(eqn: Eqn, axis: int) -> tuple[Atom, int | None] | None:
    """The operand of a movement equation and its axis there; None if there is no rule.

    The axis is None for a broadcast along it.
    """
    if is_replaced(eqn.prim, "impl"):
        return None
    if eqn.prim not in (broadcast_in_dim_p, transpose_p, reshape_p):
        return None
    (x,), p = eqn.invars, eqn.params
    if eqn.prim is broadcast_in_dim_p:
        return x, p["dims"].index(axis) if axis in p["dims"] else None
    if eqn.prim is transpose_p:
        return x, p["permutation"][axis]
    to = axis_after_reshape(eqn.outvars[0].aval.shape, x.aval.shape, axis)
    return None if to is None else (x, to)


def _after(eqn: Eqn, axis: int) -> int | None:
    """The axis of a movement equation's result that has the operand's; None: none."""
    if eqn.prim is broadcast_in_dim_p:
        return eqn.params["dims"][axis]
    if eqn.prim is transpose_p:
        return eqn.params["permutation"].index(axis)
    if eqn.prim is reshape_p:
        return axis_after_reshape(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, axis)
    return None


def _unrolled(jaxpr: Jaxpr, origins: Origins, found: dict[Any, int], sums: dict[Any, int]) -> Jaxpr:
    """The program with the variables of ``found``, and operands of ``sums``, as parts."""
    s = Splitter()
    s.env.update((v, v) for v in jaxpr.invars)
    for e in jaxpr.eqns:
        first = len(s.eqns)
        out = e.outvars[0] if len(e.outvars) == 1 else None
        if out in found or out in sums or any(a in found for a in e.invars if a.__class__ is not Literal):
            _evaluate(s, e, found.get(out), sums.get(out))
        else:
            s.eqns.append(e)
            s.env.update((v, v) for v in e.outvars)
            s.makers.update((v, e) for v in e.outvars)
        if e in origins:
            origins.update(dict.fromkeys(s.eqns[first:], origins[e]))
    return dce(jaxpr.replace(eqns=s.eqns), origins=origins)


def _evaluate(s: Splitter, e: Eqn, axis: int | None, summed: int | None) -> None:
    """Add the equations of the parts of one equation's result.

    Args:
      axis: that of the result's parts; None if it is one array.
      summed: that of the operand's parts, for a reduction of an array in memory.
    """
    (out,) = e.outvars
    ins = [s.value(a) for a in e.invars]
    if not any(isinstance(x, Parts) for x in ins):
        along = axis if summed is None else summed
        assert along is not None
        at = next(i for i, x in enumerate(ins) if x.aval.ndim)  # type: ignore[union-attr]
        ins[at] = s.parts(ins[at], along, e.source)  # type: ignore[arg-type]
    value = s.on_parts(e, ins)
    if not isinstance(value, Parts):
        last = s.eqns[-1]
        assert last.outvars[0] is value, "a reduction ends with its result"
        s.eqns[-1] = last.with_vars(last.invars, [out])
    elif axis is not None:
        s.env[out] = value
        return
    else:
        s.joined(value, out, e.source)
    s.env[out] = out
