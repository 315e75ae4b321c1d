"""Minimum cuts of flow networks, by Dinic's algorithm (1970).

Kernels, below ``remat.py`` and ``budget_cuts.py``. In: edges with capacities between any hashable nodes. Out: the nodes
on one side of a minimum cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

UNLIMITED = 1 << 62


class Network:
    """Nodes, and edges with integer capacities."""

    def __init__(self) -> None:
        self._index: dict[Hashable, int] = {}
        self._edges: list[list[int]] = []  # by node; edges 2i and 2i + 1 are the reverse of each other
        self._heads: list[int] = []
        self._residual: list[int] = []

    def edge(self, a: Hashable, b: Hashable, capacity: int) -> None:
        """An edge, or more capacity from one node to another."""
        i, j = self._node(a), self._node(b)
        self._edges[i].append(len(self._heads))
        self._edges[j].append(len(self._heads) + 1)
        self._heads += (j, i)
        self._residual += (capacity, 0)

    def near_source(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """The source's side of the minimum cut that is nearest to the source."""
        self._saturate(self._node(source), self._node(sink))
        return self._reached(self._node(source), 0)

    def near_sink(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """The sink's side of the minimum cut that is nearest to the sink."""
        self._saturate(self._node(source), self._node(sink))
        return self._reached(self._node(sink), 1)

    def _node(self, name: Hashable) -> int:
        index = self._index.setdefault(name, len(self._index))
        if index == len(self._edges):
            self._edges.append([])
        return index

    def _reached(self, start: int, reverse: int) -> set[Hashable]:
        """The nodes on residual paths from a node, or to it if ``reverse`` is 1."""
        seen = {start}
        pending = [start]
        while pending:
            for e in self._edges[pending.pop()]:
                head = self._heads[e]
                if head not in seen and self._residual[e ^ reverse] > 0:
                    seen.add(head)
                    pending.append(head)
        return {name for name, index in self._index.items() if index in seen}

    def _saturate(self, source: int, sink: int) -> None:
        """Find a maximum flow."""
        while (level := self._levels(source, sink)) is not None:
            tried = [0] * len(self._edges)  # exhausted edges of each node
            path: list[int] = []
            at = source
            while True:
                if at == sink:
                    least = min(self._residual[e] for e in path)
                    for e in path:
                        self._residual[e] -= least
                        self._residual[e ^ 1] += least
                    path, at = [], source
                edges = self._edges[at]
                while tried[at] < len(edges):
                    e = edges[tried[at]]
                    if self._residual[e] > 0 and level[self._heads[e]] == level[at] + 1:
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
        """Distances from the source in residual edges; None if the sink is unreachable."""
        level = [-1] * len(self._edges)
        level[source] = 0
        pending = deque([source])
        while pending:
            at = pending.popleft()
            for e in self._edges[at]:
                head = self._heads[e]
                if level[head] < 0 and self._residual[e] > 0:
                    level[head] = level[at] + 1
                    pending.append(head)
        return level if level[sink] >= 0 else None
