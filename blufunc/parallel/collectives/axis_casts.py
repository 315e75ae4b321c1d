"""The types of values over the axes of a mesh, and equations with the casts between these types.

Parallel, below ``axis_types``, which says what the types mean and which operation needs which.
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
    """The type of what is the same everywhere."""
    return ("I",) * len(mesh.axis_names)


class CastWriter:
    """Writes equations whose values have types, and casts where a value is wanted under another type.

    Attributes:
      types: of each variable.
      zeros: variables that are known to be zeros everywhere.
      eqns: what was written.
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
        """The types of a variable; what is not known comes from outside and is the same everywhere."""
        return self.types.get(atom) or invariant(self.mesh)

    def write(self, prim: Any, invars: Sequence[Atom], params: dict, outvars: Sequence[Var], types) -> None:
        """Write an equation whose results have ``types``."""
        self.eqns.append(
            Eqn(prim, list(invars), list(outvars), params, source.replay.line or source.current())
        )
        for v, t in zip(outvars, types, strict=True):
            self.types[v] = t

    def new(self, prim: Any, x: Atom, params: dict, types: Types) -> Var:
        """Write an equation of one operand; its result."""
        out = Var(prim.typed((x.aval,), params))
        self.write(prim, [x], params, [out], [types])
        return out

    def over(self, axes: Sequence[str]) -> dict[str, Any]:
        """Axes and their sizes, as collectives take them."""
        sizes = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))
        return {"axes": tuple(axes), "sizes": tuple(sizes[a] for a in axes)}

    def cast(self, atom: Atom, wanted: Types) -> Atom:
        """An atom under other types; it is cast once, however often it is used.

        What is broadcast is cast before it is: the transpose then sums over ranks what is summed on each already.
        """
        have = self.type_of(atom)
        if atom.__class__ is Literal and "U" in wanted and not self.is_zero(atom):
            atom = self.new(elementwise.copy_p, atom, {}, have)
        if have == wanted or atom.__class__ is Literal:
            return atom
        known = self._casts.get((atom, wanted))
        if known is not None:
            return known
        x: Any = atom
        if made := self.broadcasts.get(atom):
            x = self.new(made.prim, self.cast(made.invars[0], wanted), made.params, wanted)
        for src, dst, prim in _STEPS:
            axes = [
                a
                for a, h, w in zip(self.mesh.axis_names, self.type_of(x), wanted, strict=True)
                if h == src and w != h and dst == _towards(h, w)
            ]
            if axes:
                x = self.new(prim, x, {**self.over(axes), "src": src, "dst": dst}, self.changed(x, axes, dst))
        if self.type_of(x) != wanted:
            raise _no_cast(self.mesh, have, wanted)
        self._casts[atom, wanted] = x
        if atom in self.zeros:
            self.zeros.add(x)
        return x

    def changed(self, atom: Atom, axes: Sequence[str], letter: str) -> Types:
        """The types of ``atom`` with ``letter`` over some axes."""
        return tuple(
            letter if a in axes else t for a, t in zip(self.mesh.axis_names, self.type_of(atom), strict=True)
        )

    def cast_operand(self, atom: Atom, types: Types) -> Atom:
        """An atom under types that count: a literal that must be more than invariant becomes a variable."""
        if atom.__class__ is Literal and types != invariant(self.mesh):
            literal, atom = atom, self.new(elementwise.copy_p, atom, {}, invariant(self.mesh))
            if self.is_zero(literal):
                self.zeros.add(atom)
        return self.cast(atom, types)

    def is_zero(self, atom: Atom) -> bool:
        """Whether a value is known to be zero."""
        return not atom.value if atom.__class__ is Literal else atom in self.zeros  # type: ignore[union-attr]


_STEPS: tuple[tuple[str, str, Any], ...] = (
    ("R", "I", mesh_ops.pcast_p),
    ("R", "V", mesh_ops.pcast_p),
    ("I", "R", mesh_ops.pcast_p),
    ("I", "V", mesh_ops.pcast_p),
    ("I", "U", mesh_ops.keep_first_p),
)
"""The casts that come without asking, in the order in which they are put in: none of them changes what a value is."""


def _towards(have: str, wanted: str) -> str:
    """The next type on the way."""
    return "I" if (have, wanted) == ("R", "U") else wanted


def join(letters: Sequence[str]) -> str:
    """The type of the result of an operation on operands that are not unreduced."""
    return "V" if "V" in letters else "R" if "R" in letters else "I"


_WORDS = {"V": "varying", "I": "invariant", "U": "unreduced", "R": "reduced"}


def unreduced_error(
    eqn: Eqn, axis: str, operands: set[int], other: int | None = None
) -> errors.ShardingError:
    """What is said of an operation that is not linear in what is unreduced, or not in it beside a varying operand."""
    which = ", ".join(map(str, sorted(operands)))
    with_other = f" and a varying operand {other}" if other is not None else ""
    return errors.ShardingError(
        f"{eqn.prim.name} of what is unreduced over {axis!r} (operand {which}){with_other}.",
        where=source.here(),
        why="the value is a sum that is still owed: only what is linear in it can be done to its terms.",
        fix=f"sum it first: lax.psum(x, {axis!r})",
    )


def unequal_error(eqn: Eqn, axis: str, operand: int, letter: str) -> errors.ShardingError:
    """What is said of a sum of what is unreduced and an operand that is not."""
    return errors.ShardingError(
        f"{eqn.prim.name} of what is unreduced over {axis!r} and what is {_WORDS[letter]} (operand {operand}).",
        where=source.here(),
        why="the one is a sum that is still owed, the other is not: every rank would add it.",
        fix=f"lax.psum(x, {axis!r}) the one, or lax.pcast(x, {axis!r}, to='unreduced') the other",
    )


def _no_cast(mesh: AbstractMesh, have: Types, wanted: Types) -> errors.ShardingError:
    axis, h, w = next((a, h, w) for a, h, w in zip(mesh.axis_names, have, wanted, strict=True) if h != w)
    fix = f"lax.psum(x, {axis!r})" if w in "IR" or h == "U" else f"lax.pcast(x, {axis!r}, to={_WORDS[w]!r})"
    if h == "V" and w in "IR":
        fix = (
            f"an argument by a spec without {axis!r}; {fix}; or lax.all_gather(x, {axis!r}, to={_WORDS[w]!r})"
        )
    return errors.ShardingError(
        f"a value that is {_WORDS[h]} over {axis!r} is not {_WORDS[w]}.", where=source.here(), fix=fix
    )
