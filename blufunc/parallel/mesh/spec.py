"""Partition specs: along which mesh axes each dimension of an array is divided.

Parallel, before stage 3. A spec knows axes by name only; ``sharding.py`` joins it with a mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.axes import sequence

Entry = None | str | tuple[str, ...]
"""What a spec says of one dimension: the mesh axes that divide it, the first of several the slowest."""


class PartitionSpec(tuple):
    """For each dimension of an array None, the name of a mesh axis, or a tuple of names; ``P`` for short.

    ``P('x', None)`` divides the rows along ``x``; ``P(('x', 'y'))`` divides them along both, ``x`` first. Dimensions
    that are not mentioned are whole. Specs are equal if they mean the same: ``P('x') == P('x', None)``.

    Args:
      entries: one for each dimension.
      unreduced: axes over which the value is a sum still owed.
      reduced: axes over which the value is the same everywhere, and its cotangent is unreduced.
    Raises:
      ArgumentError: an entry is something else.
      ShardingError: an axis is used twice.

    Attributes:
      unreduced, reduced: as frozen sets.
    """

    unreduced: frozenset[str]
    reduced: frozenset[str]

    def __new__(cls, *entries: Any, unreduced: Iterable[str] = (), reduced: Iterable[str] = ()):
        self = super().__new__(cls, map(_entry, entries))
        self.unreduced = _axis_set(unreduced, "unreduced")
        self.reduced = _axis_set(reduced, "reduced")
        used = [*self.axes, *self.unreduced, *self.reduced]
        twice = [name for i, name in enumerate(used) if name in used[:i]]
        if twice:
            raise errors.ShardingError(
                f"{self} uses the axis {twice[0]!r} twice.",
                where=source.here(),
                why="an axis of the mesh divides one dimension, or is unreduced, or is reduced.",
                fix="use each axis once",
            )
        return self

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that divide dimensions, in the order of these."""
        return tuple(name for entry in self for name in names_of(entry))

    def for_rank(self, ndim: int) -> PartitionSpec:
        """The spec with an entry for each of ``ndim`` dimensions.

        Raises:
          ShardingError: it has more.
        """
        meant = _stripped(self)
        if len(meant) > ndim:
            raise errors.ShardingError(
                f"{self} is of rank {len(meant)}, and the array of rank {ndim}.",
                where=source.here(),
                fix="a spec has at most one entry for each dimension",
            )
        return self.with_entries([*meant, *[None] * (ndim - len(meant))])

    def with_entries(self, entries: Sequence[Entry]) -> PartitionSpec:
        """Other entries, the same unreduced and reduced axes."""
        return PartitionSpec(*entries, unreduced=self.unreduced, reduced=self.reduced)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionSpec) and self._meaning() == other._meaning()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._meaning())

    def _meaning(self) -> tuple:
        return _stripped(self), self.unreduced, self.reduced

    def __repr__(self) -> str:
        parts = [repr(entry) for entry in self]
        for what in ("unreduced", "reduced"):
            if axes := getattr(self, what):
                parts.append(f"{what}={{{', '.join(map(repr, sorted(axes)))}}}")
        return f"P({', '.join(parts)})"

    def __reduce__(self):
        return _rebuild, (tuple(self), self.unreduced, self.reduced)


P = PartitionSpec


def names_of(entry: Entry) -> tuple[str, ...]:
    """The axes of one entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _rebuild(entries: tuple, unreduced: frozenset, reduced: frozenset) -> PartitionSpec:
    return PartitionSpec(*entries, unreduced=unreduced, reduced=reduced)


def _stripped(entries: tuple) -> tuple:
    """Entries without the None at the end, which say nothing."""
    n = len(entries)
    while n and entries[n - 1] is None:
        n -= 1
    return tuple(entries[:n])


def _entry(entry: Any) -> Entry:
    """An entry in its plain form: no tuple of fewer than two names."""
    if entry is None or (isinstance(entry, str) and entry):
        return entry
    if not isinstance(entry, (tuple, list)) or not all(isinstance(name, str) and name for name in entry):
        raise errors.ArgumentError(
            f"a partition spec holds None, names of axes and tuples of names, not {entry!r:.60}.",
            where=source.here(),
            fix="P('x', None), P(('x', 'y'))",
        )
    return None if not entry else entry[0] if len(entry) == 1 else tuple(entry)


def _axis_set(names: Any, what: str) -> frozenset[str]:
    found = sequence(names, "PartitionSpec", what, "names of axes")
    if not all(isinstance(name, str) and name for name in found):
        raise errors.ArgumentError(
            f"{what}= holds names of axes, not {names!r:.60}.", where=source.here(), fix=f"{what}={{'x'}}"
        )
    return frozenset(found)
