"""Types in the body of a ``shard_map``: over which mesh axes values differ.

Core, made on demand: programs are traced, compiled and compared by ``ShapedArray``, and ``typeof`` and printed jaxprs
show these.
"""

from __future__ import annotations

from typing import Any

from blufunc.core.ir import source
from blufunc.core.ir.avals import ManualAxisType, ShapedArray
from blufunc.core.ir.trace import UntypedError

_MARKS = "VUR"
"""The letters of ``ManualAxisType``, in its order."""


class LocalArray(ShapedArray):
    """A ``ShapedArray`` with its type over mesh axes; equal ones are one object.

    Attributes:
      axes: the names of the axes.
      letters: for each axis V, I, U or R; None while a loop is traced whose types are inferred afterwards.
    """

    __slots__ = ("axes", "letters")
    axes: tuple[str, ...]
    letters: tuple[str, ...] | None

    _known: dict[tuple, LocalArray] = {}  # noqa: RUF012  (one table for the process, as of all types)

    def __new__(cls, aval: ShapedArray, axes: tuple[str, ...], letters: tuple[str, ...] | None) -> LocalArray:
        key = (aval.shape, aval.dtype, aval.weak_type, aval.memory, axes, letters)
        known = cls._known.get(key)
        if known is not None:
            return known
        self = object.__new__(cls)
        for name in ShapedArray.__slots__:
            setattr(self, name, getattr(aval, name))
        self.axes, self.letters = axes, letters
        return cls._known.setdefault(key, self)

    def __reduce__(self) -> Any:
        return (LocalArray, (self.with_shape(self.shape), self.axes, self.letters))

    def __str__(self) -> str:
        plain = ShapedArray.__str__(self)
        if self.letters is None:
            return plain
        marks = []
        for mark in _MARKS:
            over = [a for a, letter in zip(self.axes, self.letters, strict=True) if letter == mark]
            if over:
                marks.append(f"{mark}:{over[0]}" if len(over) == 1 else f"{mark}:({','.join(over)})")
        return f"{plain}{{{', '.join(marks)}}}" if marks else plain

    @property
    def manual_axis_type(self) -> ManualAxisType:
        """The axes over which the value is varying, unreduced and reduced."""
        letters = self.letters
        if letters is None:
            raise UntypedError(
                f"the varying axes of a value {self} in a function that is traced by itself, inside of a shard_map.",
                where=source.here(),
                why="the types of its arguments over the axes of the mesh are not known.",
                fix="ask for the types of its operands, outside of it",
            )
        pairs = list(zip(self.axes, letters, strict=True))
        return ManualAxisType(*(frozenset(a for a, t in pairs if t == mark) for mark in _MARKS))

    def retyped(self, aval: ShapedArray, dim: int) -> ShapedArray:
        return LocalArray(aval, self.axes, self.letters)
