"""Minimum cuts between a source and a sink.

Kernels, below ``remat.py`` and ``budget_cuts.py``. In: edges with capacities between any hashable nodes. Out: the
nodes on one side of a minimum cut, by the algorithm of Dinic (1970): shortest augmenting paths, in phases of equal
length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

UNLIMITED = 1 << 62


class Network:
    """Network of nodes, and edges with integer capacities."""

    def __init__(self) -> None:
        self._number: dict[Hashable, int] = {}
        self._edges: list[
            list[int]
        ] = []  # per node: the indices of its edges; an edge and its reverse are neighbours
        self._heads: list[int] = []
        self._room: list[int] = []

    def edge(self, a: Hashable, b: Hashable, capacity: int) -> None:
        """Add an edge, or capacity to an edge."""
        i, j = self._node(a), self._node(b)
        self._edges[i].append(len(self._heads))
        self._edges[j].append(len(self._heads) + 1)
        self._heads += (j, i)
        self._room += (capacity, 0)

    def near_source(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """The nodes on the source's side of the minimum cut nearest to the source."""
        self._saturate(self._node(source), self._node(sink))
        return self._reached(self._node(source), lambda e: self._room[e])

    def near_sink(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """The nodes on the sink's side of the minimum cut nearest to the sink."""
        self._saturate(self._node(source), self._node(sink))
        return self._reached(self._node(sink), lambda e: self._room[e ^ 1])

    def _node(self, name: Hashable) -> int:
        number = self._number.setdefault(name, len(self._number))
        if number == len(self._edges):
            self._edges.append([])
        return number

    def _reached(self, start: int, room: object) -> set[Hashable]:
        seen = {start}
        pending = [start]
        while pending:
            for e in self._edges[pending.pop()]:
                head = self._heads[e]
                if head not in seen and room(e) > 0:  # type: ignore[operator]
                    seen.add(head)
                    pending.append(head)
        return {name for name, number in self._number.items() if number in seen}

    def _saturate(self, source: int, sink: int) -> None:
        """Push the maximum flow."""
        while (level := self._levels(source, sink)) is not None:
            tried = [0] * len(self._edges)  # per node: edges that lead nowhere any more
            path: list[int] = []
            at = source
            while True:
                if at == sink:
                    least = min(self._room[e] for e in path)
                    for e in path:
                        self._room[e] -= least
                        self._room[e ^ 1] += least
                    path, at = [], source
                edges = self._edges[at]
                while tried[at] < len(edges):
                    e = edges[tried[at]]
                    if self._room[e] > 0 and level[self._heads[e]] == level[at] + 1:
                        break
                    tried[at] += 1
                if tried[at] < len(edges):
                    path.append(edges[tried[at]])
                    at = self._heads[path[-1]]
                elif path:
                    at = self._heads[path.pop() ^ 1]
                    tried[at] += 1
                else:
                    break

    def _levels(self, source: int, sink: int) -> list[int] | None:
        """Distance of each node from the source; None if the sink is unreachable."""
        level = [-1] * len(self._edges)
        level[source] = 0
        pending = deque([source])
        while pending:
            at = pending.popleft()
            for e in self._edges[at]:
                head = self._heads[e]
                if level[head] < 0 and self._room[e] > 0:
                    level[head] = level[at] + 1
                    pending.append(head)
        return level if level[sink] >= 0 else None
