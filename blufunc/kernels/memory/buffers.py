"""Buffers of a plan: which values lie in one storage, one after another, and when outputs and arguments are idle.

Kernels, stage 7, below ``plan.py``. In: the graph, an order, and when each storage is needed in it. Out: buffers, and
the windows of time in which other buffers may lie in one that has a home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blufunc.kernels.memory.dependencies import Graph
from blufunc.kernels.memory.pack import Shelf
from blufunc.kernels.memory.types import Placement


@dataclass(eq=False)
class Buffer:
    """Bytes that one value after another lies in.

    Attributes:
      spans: when they are needed: first and last position of each value in it.
      roots: those values.
      home: None for what may lie anywhere; else the block that it is, ("output" or "argument", id).
      scratch: the step whose scratch it is.
    """

    nbytes: int
    spans: list[tuple[int, int]]
    roots: list[int]
    home: tuple[str, int] | None = None
    scratch: int | None = None
    place: Placement | None = None

    @property
    def start(self) -> int:
        return min(s for s, _ in self.spans)

    @property
    def end(self) -> int:
        return max(e for _, e in self.spans)


def share(graph: Graph, order: Sequence[int], spans: dict[int, tuple[int, int]]) -> list[Buffer]:
    """One buffer for each storage, those that can be one merged.

    Outputs choose first, so that an updated parameter takes the place of the old one: in place where the
    step allows it, else by taking over an argument of the same size that is dead. Then every other
    result is written over an operand that dies with the step.
    """
    holder: dict[int, Buffer] = {}
    for r, span in spans.items():
        kind = graph.kind[r]
        home = ("argument", r) if graph.is_argument(r) else None
        if kind == "output":
            home = ("output", graph.returned[r])
        holder[r] = Buffer(graph.values[r].nbytes, [span], [r], home)

    def overwrite(wanted: Callable[[int, int], bool]) -> None:
        for i in order:
            for written, read in graph.overwrites[i]:
                if wanted(written, read):
                    _merge(holder, written, read)

    overwrite(lambda written, read: graph.kind[written] == "output" and graph.kind[read] == "donated")
    idle: dict[int, list[int]] = {}  # donated arguments by size, the first to die first
    for r in sorted((r for r in spans if graph.kind[r] == "donated"), key=lambda r: spans[r][1]):
        idle.setdefault(graph.values[r].nbytes, []).append(r)
    for r in sorted((r for r in spans if graph.kind[r] == "output"), key=lambda r: spans[r][0]):
        if holder[r].home == ("output", graph.returned[r]):
            free = idle.get(graph.values[r].nbytes, [])
            for donated in free:
                if holder[donated].end < spans[r][0]:
                    free.remove(donated)
                    _merge(holder, r, donated)
                    break
    overwrite(lambda written, read: True)
    scratch = [
        Buffer(graph.steps[i].scratch, [(at, at)], [], scratch=i)
        for at, i in enumerate(order)
        if graph.steps[i].scratch
    ]
    return [*{id(b): b for b in holder.values()}.values(), *scratch]


def _merge(holder: dict[int, Buffer], written: int, read: int) -> None:
    """Makes two buffers one if they fit: equal sizes, at most one owner, never both needed.

    Where the value written begins as the one read dies, the two share that position.
    """
    a, b = holder[read], holder[written]
    takes_over = (
        a.home is not None and a.home[0] == "argument" and b.home is not None and b.home[0] == "output"
    )
    if a is b or a.nbytes != b.nbytes or not (a.home is None or b.home is None or takes_over):
        return
    at = b.spans[b.roots.index(written)][0]
    for i, (s, e) in enumerate(a.spans):
        for j, (t, f) in enumerate(b.spans):
            touching = a.roots[i] == read and b.roots[j] == written and e == at == t
            if s <= f and t <= e and not touching:
                return
    a.spans += b.spans
    a.roots += b.roots
    a.home = a.home or b.home
    for r in b.roots:
        holder[r] = a


@dataclass(eq=False)
class Window:
    """A block of memory while its owner does not need it: positions ``start`` to ``end``, both included."""

    home: tuple[str, int]
    start: int
    end: int
    limit: int
    shelf: Shelf


def windows(buffers: list[Buffer], n: int) -> list[Window]:
    """The idle times of every block that is not the arena."""
    windows = []
    for b in buffers:
        if b.home is None or not b.nbytes:
            continue
        free = 0
        for start, end in [*sorted(b.spans), (n, n)]:
            if start > free:
                windows.append(Window(b.home, free, start - 1, b.nbytes, Shelf()))
            free = max(free, end + 1)
    return windows
