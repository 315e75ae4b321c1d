"""Partition specs: the mesh axes that shard each dimension of an array.

Parallel, before stage 3. In: names. Out: a ``PartitionSpec``; ``sharding.py`` binds it to a mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.axes import sequence


class Unconstrained:
    """The entry ``PartitionSpec.UNCONSTRAINED``: the compiler shards the dimension."""

    def __repr__(self) -> str:
        return "UNCONSTRAINED"

    def __reduce__(self):
        return "UNCONSTRAINED"  # there is one


UNCONSTRAINED = Unconstrained()

Entry = None | str | tuple[str, ...] | Unconstrained
"""One entry of a spec: the mesh axes that shard a dimension, major first."""


class PartitionSpec(tuple):
    """Per dimension None, a mesh axis, or a tuple of mesh axes; ``P`` for short.

    ``P('x', None)`` shards the rows along ``x``; ``P(('x', 'y'))`` shards them along both, ``x`` major. Dimensions
    without an entry are whole. Specs are equal if they mean the same: ``P('x') == P('x', None)``.

    Args:
      entries: one per dimension.
      unreduced: axes over which the value is a sum pending a reduction.
      reduced: axes over which the value is replicated, and its cotangent is unreduced.
    Raises:
      ArgumentError: an entry is something else.
      ShardingError: an axis is used twice.

    Attributes:
        unreduced, reduced: the same, as frozen sets.
        UNCONSTRAINED: an entry of constraints alone, which leaves the dimension to the compiler.
    """

    UNCONSTRAINED = UNCONSTRAINED
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
                why="a mesh axis shards one dimension, or is unreduced, or is reduced.",
                fix="use each axis once",
            )
        return self

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that shard dimensions, in the order of the dimensions."""
        return tuple(name for entry in self for name in names_of(entry))

    def for_rank(self, ndim: int) -> PartitionSpec:
        """The spec padded with None to ``ndim`` entries.

        Raises:
          ShardingError: the spec has more entries.
        """
        entries = _stripped(self)
        if len(entries) > ndim:
            raise errors.ShardingError(
                f"{self} has rank {len(entries)}, and the array has rank {ndim}.",
                where=source.here(),
                fix="use at most one entry per dimension",
            )
        return self.with_entries([*entries, *[None] * (ndim - len(entries))])

    def with_entries(self, entries: Sequence[Entry]) -> PartitionSpec:
        """Replace the entries, and keep the unreduced and reduced axes."""
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
        return functools.partial(PartitionSpec, unreduced=self.unreduced, reduced=self.reduced), tuple(self)


P = PartitionSpec


def names_of(entry: Entry) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    if entry is None or isinstance(entry, Unconstrained):
        return ()
    return (entry,) if isinstance(entry, str) else entry


def _stripped(entries: tuple) -> tuple:
    """Entries without trailing None, which have no meaning."""
    n = len(entries)
    while n and entries[n - 1] is None:
        n -= 1
    return tuple(entries[:n])


def _entry(entry: Any) -> Entry:
    """An entry in canonical form: no tuple of fewer than two names."""
    if entry is None or isinstance(entry, Unconstrained) or (isinstance(entry, str) and entry):
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
