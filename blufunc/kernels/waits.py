"""Which steps of a program wait for which, kept transitively while steps are added, joined and merged.

Kernels, below ``fuse.py``. Sets of steps are integers with a bit for each step, so that the questions that fusion asks
thousands of times are a few operations on words.
"""

from __future__ import annotations

from collections.abc import Iterator


class Waits:
    """An order of steps 0, 1, 2, ..., without cycles.

    Attributes:
      needs: for each step, the steps that it waits for, by way of others too.
      readers: for each step, those that wait for it.
    """

    def __init__(self) -> None:
        self.needs: list[int] = []
        self.readers: list[int] = []

    def add(self) -> int:
        """A new step, which waits for none; returns its number."""
        self.needs.append(0)
        self.readers.append(0)
        return len(self.needs) - 1

    def waits(self, step: int, for_: int) -> bool:
        """Whether one step waits for another."""
        return bool(self.needs[step] >> for_ & 1)

    def wait(self, step: int, for_: int) -> None:
        """Let one step, and all that wait for it, wait for another and for what that waits for."""
        needed = self.needs[for_] | 1 << for_
        if not needed & ~self.needs[step]:
            return
        waiting = self.readers[step] | 1 << step
        self._join(waiting, needed)

    def between(self, first: int, last: int) -> bool:
        """Whether some step waits for ``first`` while ``last`` waits for it."""
        return bool(self.needs[last] & self.readers[first])

    def merge(self, old: int, new: int) -> None:
        """Let ``new`` stand for ``old`` as well; no step may be between them."""
        both = 1 << old | 1 << new
        needed = (self.needs[old] | self.needs[new]) & ~both
        waiting = (self.readers[old] | self.readers[new]) & ~both
        # what is only said of `old` elsewhere may stay: it is true of `new`, and `old` is never asked about again
        more_needed, more_waiting = needed & ~self.needs[new], waiting & ~self.readers[new]
        self.needs[new], self.readers[new] = needed, waiting
        self._join(more_waiting, needed | 1 << new, among=needed)
        self._join(waiting | 1 << new, more_needed)

    def _join(self, waiting: int, needed: int, among: int | None = None) -> None:
        if not waiting or not needed:
            return
        for s in _steps(waiting):
            self.needs[s] |= needed
        for s in _steps(needed if among is None else among):
            self.readers[s] |= waiting


def _steps(bits: int) -> Iterator[int]:
    """The members of a set."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
