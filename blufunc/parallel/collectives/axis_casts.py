"""Types of values over mesh axes, and a writer of equations that inserts casts.

Parallel, below ``axis_types``, which defines the types and the operand types of each operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Atom, Eqn, Literal, Var
from blufunc.core.ops import elementwise
from blufunc.parallel.collectives import primitives as mesh_ops
from blufunc.parallel.mesh.mesh import AbstractMesh

Types = tuple[str, ...]
"""One letter for each axis of the mesh."""


def invariant(mesh: AbstractMesh) -> Types:
    """The type of a value that is the same on all ranks."""
    return ("I",) * len(mesh.axis_names)


class CastWriter:
    """Writes typed equations, and casts operands to the types that are required.

    Attributes:
      types: the types of each variable.
      zeros: variables known to be zero on all ranks.
      eqns: the equations written so far.
      broadcasts: the equations that made variables by broadcasting.
    """

    def __init__(self, mesh: AbstractMesh):
        self.mesh = mesh
        self.types: dict[Any, Types] = {}
        self.zeros: set[Any] = set()
        self.eqns: list[Eqn] = []
        self._casts: dict[tuple[Any, Types], Var] = {}
        self.broadcasts: dict[Any, Eqn] = {}

    def type_of(self, atom: Atom) -> Types:
        """The types of a variable; one from outside the body is invariant."""
        return self.types.get(atom) or invariant(self.mesh)

    def write(self, prim: Any, invars: Sequence[Atom], params: dict, outvars: Sequence[Var], types) -> None:
        """Write an equation whose results have ``types``."""
        self.eqns.append(
            Eqn(prim, list(invars), list(outvars), params, source.replay.line or source.current())
        )
        for v, t in zip(outvars, types, strict=True):
            self.types[v] = t

    def new(self, prim: Any, x: Atom, params: dict, types: Types) -> Var:
        """Write an equation of one operand and return its result."""
        out = Var(prim.typed((x.aval,), params))
        self.write(prim, [x], params, [out], [types])
        return out

    def over(self, axes: Sequence[str]) -> dict[str, Any]:
        """Axes and their sizes, as parameters of a collective."""
        sizes = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))
        return {"axes": tuple(axes), "sizes": tuple(sizes[a] for a in axes)}

    def cast(self, atom: Atom, required: Types) -> Atom:
        """Cast an atom to other types, at most once per atom and types.

        The operand of a broadcast is cast in its place, so that the transpose sums on each rank before it communicates.
        """
        have = self.type_of(atom)
        if atom.__class__ is Literal and "U" in required and not self.is_zero(atom):
            atom = self.new(elementwise.copy_p, atom, {}, have)
        if have == required or atom.__class__ is Literal:
            return atom
        known = self._casts.get((atom, required))
        if known is not None:
            return known
        x: Any = atom
        if broadcast := self.broadcasts.get(atom):
            x = self.new(broadcast.prim, self.cast(broadcast.invars[0], required), broadcast.params, required)
        for src, dst, prim in _STEPS:
            axes = [
                a
                for a, h, w in zip(self.mesh.axis_names, self.type_of(x), required, strict=True)
                if h == src and w != h and dst == _towards(h, w)
            ]
            if axes:
                x = self.convert(x, axes, src, dst, prim)
        if self.type_of(x) != required:
            raise _no_cast(self.mesh, have, required)
        self._casts[atom, required] = x
        if atom in self.zeros:
            self.zeros.add(x)
        return x

    def convert(self, x: Atom, axes: Sequence[str], src: str, dst: str, prim: Any = mesh_ops.pcast_p) -> Var:
        """Write the cast of ``x`` from ``src`` to ``dst`` over some axes."""
        return self.new(prim, x, {**self.over(axes), "src": src, "dst": dst}, self.changed(x, axes, dst))

    def changed(self, atom: Atom, axes: Sequence[str], letter: str) -> Types:
        """The types of ``atom`` with ``letter`` over some axes."""
        return tuple(
            letter if a in axes else t for a, t in zip(self.mesh.axis_names, self.type_of(atom), strict=True)
        )

    def cast_operand(self, atom: Atom, types: Types) -> Atom:
        """Cast an operand; a literal that must be more than invariant becomes a variable."""
        if atom.__class__ is Literal and types != invariant(self.mesh):
            literal, atom = atom, self.new(elementwise.copy_p, atom, {}, invariant(self.mesh))
            if self.is_zero(literal):
                self.zeros.add(atom)
        return self.cast(atom, types)

    def is_zero(self, atom: Atom) -> bool:
        """True if a value is known to be zero."""
        return not atom.value if atom.__class__ is Literal else atom in self.zeros  # type: ignore[union-attr]


_STEPS: tuple[tuple[str, str, Any], ...] = (
    ("R", "I", mesh_ops.pcast_p),
    ("R", "V", mesh_ops.pcast_p),
    ("I", "R", mesh_ops.pcast_p),
    ("I", "V", mesh_ops.pcast_p),
    ("I", "U", mesh_ops.keep_first_p),
)
"""Implicit casts, in the order in which they are inserted: none changes the value."""


def _towards(have: str, required: str) -> str:
    """The next type on the way from ``have`` to ``wanted``."""
    return "I" if (have, required) == ("R", "U") else required


def join(letters: Sequence[str]) -> str:
    """The type of the result of an operation whose operands are not unreduced."""
    return "V" if "V" in letters else "R" if "R" in letters else "I"


def unreduced_error(
    eqn: Eqn, axis: str, operands: set[int], other: int | None = None
) -> errors.ShardingError:
    """The error of an operation that is not linear in an unreduced operand alone."""
    which = ", ".join(map(str, sorted(operands)))
    with_other = f" and a varying operand {other}" if other is not None else ""
    return errors.ShardingError(
        f"{eqn.prim.name} of a value unreduced over {axis!r} (operand {which}){with_other}.",
        where=source.here(),
        why="the value is a sum pending an all-reduce: only linear operations apply to its terms.",
        fix=f"sum it first: lax.psum(x, {axis!r})",
    )


def unequal_error(eqn: Eqn, axis: str, operand: int, letter: str) -> errors.ShardingError:
    """The error of adding an unreduced operand and one that is not."""
    word = mesh_ops.WORDS[letter]
    return errors.ShardingError(
        f"{eqn.prim.name} of a value unreduced over {axis!r} and one that is {word} (operand {operand}).",
        where=source.here(),
        why="the first is a sum pending an all-reduce, the second is not: every rank would add it.",
        fix=f"lax.psum(x, {axis!r}) the first, or lax.pcast(x, {axis!r}, to='unreduced') the second",
    )


def _no_cast(mesh: AbstractMesh, have: Types, required: Types) -> errors.ShardingError:
    axis, h, w = next((a, h, w) for a, h, w in zip(mesh.axis_names, have, required, strict=True) if h != w)
    fix = (
        f"lax.psum(x, {axis!r})"
        if w in "IR" or h == "U"
        else f"lax.pcast(x, {axis!r}, to={mesh_ops.WORDS[w]!r})"
    )
    if h == "V" and w in "IR":
        fix = f"an argument by a spec without {axis!r}; {fix}; or lax.all_gather(x, {axis!r}, to={mesh_ops.WORDS[w]!r})"
    return errors.ShardingError(
        f"a value that is {mesh_ops.WORDS[h]} over {axis!r} is not {mesh_ops.WORDS[w]}.",
        where=source.here(),
        fix=fix,
    )
