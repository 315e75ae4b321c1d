"""Incremental transitive closure of the dependencies of steps, as bitsets.

Kernels, stage 5, called by ``fuse.py``. In: steps, dependencies and merges, one at a time. Out: answers to "does this
step depend on that one". A set of steps is an integer with one bit per step, so that each of fusion's thousands of
queries takes a few word operations. Readers are only recorded if direct: they are seldom queried, and transitive ones
would have to be propagated to every earlier step.
"""

from __future__ import annotations

from collections.abc import Iterable


class Reachability:
    """A partial order of steps 0, 1, 2, ...

    Attributes:
      needs: for each step, the set of steps that it depends on, transitively.
    """

    def __init__(self) -> None:
        self.needs: list[int] = []
        # among steps not merged away: every dependency is a path of direct edges
        self._direct: list[set[int]] = []
        self._readers: list[set[int]] = []

    def add(self) -> int:
        """Add a step without dependencies, and return its index."""
        self.needs.append(0)
        self._direct.append(set())
        self._readers.append(set())
        return len(self.needs) - 1

    def waits(self, step: int, for_: int) -> bool:
        """True if one step depends on another."""
        return bool(self.needs[step] >> for_ & 1)

    def wait(self, step: int, for_: int) -> None:
        """Add a dependency, with its transitive consequences."""
        if self.waits(step, for_):
            return
        self._direct[step].add(for_)
        self._readers[for_].add(step)
        self._spread([step], self.needs[for_] | 1 << for_)

    def between(self, first: int, last: int) -> bool:
        """True if some step depends on ``first`` while ``last`` depends on it."""
        needed = self.needs[last]
        return bool(needed >> first & 1) and any(needed >> s & 1 for s in self._readers[first])

    def merge(self, old: int, new: int) -> None:
        """Merge ``old`` into ``new``; no step may be between them."""
        both = 1 << old | 1 << new
        self.needs[new] = needed = (self.needs[old] | self.needs[new]) & ~both
        for mine, theirs in ((self._direct, self._readers), (self._readers, self._direct)):
            for s in mine[old]:
                theirs[s].discard(old)
                if s != new:
                    theirs[s].add(new)
            mine[new] = (mine[new] | mine[old]) - {old, new}
            mine[old] = set()
        # bits of `old` elsewhere may stay: they hold for `new`, and `old` is not queried any more
        self._spread(self._readers[new], needed | 1 << new)

    def _spread(self, steps: Iterable[int], needed: int) -> None:
        """Add ``needed`` to the dependencies of steps and of all their readers."""
        pending = list(steps)
        while pending:
            s = pending.pop()
            more = self.needs[s] | needed
            if more != self.needs[s]:
                self.needs[s] = more
                pending.extend(self._readers[s])
