"""Which steps of a program wait for which, kept transitively while steps are added, joined and merged.

Kernels, below ``fuse.py``. Sets of steps are integers with a bit for each step, so that the questions that fusion asks
thousands of times are a few operations on words. Who waits for a step is only kept of those that do so directly:
it is seldom asked, and would have to be told to every step before.
"""

from __future__ import annotations

from collections.abc import Iterable


class Waits:
    """An order of steps 0, 1, 2, ..., without cycles.

    Attributes:
      needs: for each step, the steps that it waits for, by way of others too.
    """

    def __init__(self) -> None:
        self.needs: list[int] = []
        # between steps that still stand for themselves, with at least one way along every wait
        self._direct: list[set[int]] = []
        self._readers: list[set[int]] = []

    def add(self) -> int:
        """A new step, which waits for none; returns its number."""
        self.needs.append(0)
        self._direct.append(set())
        self._readers.append(set())
        return len(self.needs) - 1

    def waits(self, step: int, for_: int) -> bool:
        """Whether one step waits for another."""
        return bool(self.needs[step] >> for_ & 1)

    def wait(self, step: int, for_: int) -> None:
        """Let one step, and all that wait for it, wait for another and for what that waits for."""
        if self.waits(step, for_):
            return
        self._direct[step].add(for_)
        self._readers[for_].add(step)
        self._spread([step], self.needs[for_] | 1 << for_)

    def between(self, first: int, last: int) -> bool:
        """Whether some step waits for ``first`` while ``last`` waits for it."""
        needed = self.needs[last]
        return bool(needed >> first & 1) and any(needed >> s & 1 for s in self._readers[first])

    def merge(self, old: int, new: int) -> None:
        """Let ``new`` stand for ``old`` as well; no step may be between them."""
        both = 1 << old | 1 << new
        self.needs[new] = needed = (self.needs[old] | self.needs[new]) & ~both
        for mine, theirs in ((self._direct, self._readers), (self._readers, self._direct)):
            for s in mine[old]:
                theirs[s].discard(old)
                if s != new:
                    theirs[s].add(new)
            mine[new] = (mine[new] | mine[old]) - {old, new}
            mine[old] = set()
        # what is said of `old` elsewhere may stay: it is true of `new`, and `old` is never asked about again
        self._spread(self._readers[new], needed | 1 << new)

    def _spread(self, steps: Iterable[int], needed: int) -> None:
        """Let steps, and all that wait for them, wait for what is ``needed``."""
        pending = list(steps)
        while pending:
            s = pending.pop()
            more = self.needs[s] | needed
            if more != self.needs[s]:
                self.needs[s] = more
                pending.extend(self._readers[s])
