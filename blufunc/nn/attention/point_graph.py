"""Provenance of single elements in a jaxpr, as positions along named axes.

A face, below ``patterns.py``. A **point** is a value of the program with a place per dimension:
``Place(label, stride, start)`` is element ``stride * i + start``, where i runs along the axis called
``label``. Transposes, broadcasts and slices change places only, so one element is one point in every layout
of its array. Elementwise operations have points of the same places as operands. All queries about a mask or a
bias at (query, key), symbolic or in kernel code, use points.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.shape import slice_p
from blufunc.core.primitives.kinds import Elementwise
from blufunc.core.primitives.linear_ops import broadcast_in_dim_p, reshape_p, transpose_p
from blufunc.core.programs import simplify
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp_call_p, owner_of


class Place(NamedTuple):
    """Element ``stride * i + start`` of a dimension, for position i of axis ``label``."""

    label: Hashable
    stride: int = 1
    start: int = 0


FIRST = Place(None, 0, 0)
"""The only element of a dimension of size 1."""


def places_of(shape: Sequence[int]) -> tuple[Place, ...]:
    """Places of all elements, labelled by dimension; dimensions of size 1 have none."""
    return tuple([FIRST if n == 1 else Place(d) for d, n in enumerate(shape)])


class Point(NamedTuple):
    """One element of a value, for each position along the axes of its places."""

    atom: Atom
    places: tuple[Place, ...]

    @property
    def labels(self) -> tuple[Hashable, ...]:
        """The axes along which it varies."""
        return tuple([p.label for p in self.places if p.label is not None])

    def at(self, atom: Atom) -> Point:
        """The same element of another value of this shape, or a scalar."""
        return Point(atom, self.places if atom.aval.ndim else ())


# -- movement --------------------------------------------------------------------------------------


def _broadcast(eqn: Eqn, places: tuple[Place, ...]) -> tuple[Place, ...]:
    shape = eqn.invars[0].aval.shape
    return tuple([FIRST if n == 1 else places[d] for n, d in zip(shape, eqn.params["dims"], strict=True)])


def _transpose(eqn: Eqn, places: tuple[Place, ...]) -> tuple[Place, ...]:
    permutation = eqn.params["permutation"]
    return tuple([places[permutation.index(d)] for d in range(len(permutation))])


def _reshape(eqn: Eqn, places: tuple[Place, ...]) -> tuple[Place, ...] | None:
    """Reshapes that only add or remove dimensions of size 1."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    rest = iter([p for n, p in zip(after, places, strict=True) if n != 1])
    return tuple([FIRST if n == 1 else next(rest) for n in before])


def _slice(eqn: Eqn, places: tuple[Place, ...]) -> tuple[Place, ...]:
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    return tuple(
        [
            Place(p.label, p.stride * n, p.start * n + lo)
            for p, lo, n in zip(places, starts, strides, strict=True)
        ]
    )


_MOVES: dict[Any, Callable[[Eqn, tuple[Place, ...]], tuple[Place, ...] | None]] = {
    broadcast_in_dim_p: _broadcast,
    transpose_p: _transpose,
    reshape_p: _reshape,
    slice_p: _slice,
}
"""Data movement operations: the places in their operand."""


def _same_value(eqn: Eqn) -> bool:
    """True if the result has its operand's value, up to precision."""
    if eqn.prim is not ew.convert_p:
        return eqn.prim is ew.copy_p
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if dtypes.is_floating(after):
        return not dtypes.is_complex(before)
    return dtypes.is_integer(after) and not dtypes.is_inexact(before) and after.itemsize >= before.itemsize


# -- graphs ----------------------------------------------------------------------------------------


class Graph:
    """The equations of a jaxpr, by their results.

    Args:
      jaxpr: the program.
      known: functions with custom derivative rules that may be inlined, since their rules match those of their
        equations. Other custom rules would be lost.
    """

    def __init__(self, jaxpr: Jaxpr, known: Sequence[Any] = ()):
        self.jaxpr, self._known = jaxpr, known
        self._made: dict[Any, Eqn] = {}
        self._names: dict[Any, Atom] = {}
        self._outer: dict[int, Eqn] = {}
        self._readers: dict[Any, list[Eqn]] = {}
        self._replaced: dict[int, Eqn] = {}
        for eqn in jaxpr.eqns:
            self._add(eqn, eqn)
            for v in {a for a in eqn.invars if a.__class__ is not Literal}:
                self._readers.setdefault(v, []).append(eqn)
        self._outward = {self.named(v): v for e in jaxpr.eqns for v in e.outvars}

    def _add(self, eqn: Eqn, outer: Eqn) -> None:
        if eqn.prim is custom_jvp_call_p and owner_of(eqn.params["rule"]) in self._known:
            for inner in simplify.put_in_place(eqn, eqn.params["jaxpr"], eqn.invars, self._names.__setitem__):
                self._add(inner, outer)
            return
        self._outer[id(eqn)] = outer
        self._made.update(dict.fromkeys(eqn.outvars, eqn))

    def replace(self, last: Eqn, replacement: Eqn) -> None:
        """Replace ``last``, and equations that only led to it, by ``replacement``."""
        self._outer[id(replacement)] = replacement
        self._made.update(dict.fromkeys(replacement.outvars, replacement))
        self._replaced[id(last)] = replacement

    @property
    def eqns(self) -> list[Eqn]:
        """The equations of the jaxpr after replacements."""
        return [self._replaced.get(id(e), e) for e in self.jaxpr.eqns]

    def named(self, atom: Atom) -> Atom:
        """The value that a variable aliases."""
        while atom in self._names:
            atom = self._names[atom]
        return atom

    def maker(self, atom: Atom) -> Eqn | None:
        """The equation that computes a value; None for parameters and literals."""
        return None if atom.__class__ is Literal else self._made.get(self.named(atom))

    def outer(self, eqn: Eqn) -> Eqn:
        """The outermost equation that contains an equation."""
        return self._outer[id(eqn)]

    def outward(self, atom: Atom) -> Any:
        """The outer variable for one that may be inside a custom-derivative call."""
        return self._outward.get(atom, atom)

    def readers(self, var: Any) -> list[Eqn]:
        """The equations of the jaxpr that read a variable of the jaxpr."""
        return self._readers.get(var, [])

    # -- points ------------------------------------------------------------------------------------

    def moved(self, point: Point, skip: Callable[[Eqn], bool] = lambda eqn: False) -> Point:
        """The point before data movement, and before unary operations in ``skip``."""
        while True:
            eqn = self.maker(point.atom)
            point = Point(self.named(point.atom), point.places)
            if eqn is None:
                return point
            if skip(eqn):
                point = point.at(eqn.invars[0])
                continue
            move = _MOVES.get(eqn.prim)
            places = None if move is None else move(eqn, point.places)
            if places is None:
                return point
            point = Point(eqn.invars[0], places)

    def thin(self, point: Point) -> Point:
        """The point before data movement and conversions."""
        return self.moved(point, _same_value)

    def operands(self, point: Point) -> tuple[Eqn, list[Point]] | None:
        """The elementwise equation that computes an unmoved point, and its operands."""
        eqn = self.maker(point.atom)
        if eqn is None or not isinstance(eqn.prim, Elementwise) or eqn.prim.multiple_results:
            return None
        return eqn, [point.at(a) for a in eqn.invars]

    def constant(self, point: Point) -> Any:
        """The scalar that a point equals everywhere; None if it varies."""
        found = self.thin(point).atom
        return found.value if isinstance(found, Literal) else None
