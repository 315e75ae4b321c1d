"""Graphs in which the memory that a library wants to be zero is so in time.

Kernels, stage 8, beside ``cuda_graph``. In: a captured graph, not yet made executable. Out: the same, in which what
fills a workspace with zeros no longer stands between two kernels. Before many products cuBLASLt sets counters in its
workspace to zero: a node of a microsecond or two, and the time that passes until it begins and until the product does.
Nobody but products reads a workspace, and those of a stream have two in turns: a node may run as soon as the product
before the last is done, beside the step that it used to wait for.

Where the driver cannot tell what it is asked for, the graph stays as it was captured.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET

Edge = tuple[int, int]


class Changes(NamedTuple):
    """Edges of a graph to add, and those that may go when these are there."""

    added: list[Edge]
    removed: list[Edge]


def early(edges: Iterable[Edge], memsets: Iterable[int]) -> Changes:
    """What lets some nodes begin one step earlier.

    Args:
      edges: pairs of a node and one that waits for it.
      memsets: nodes that touch only memory of which the node that they wait for has no use: neither has what comes
        behind the nodes that this waits for.
    Returns:
      changes, after which each of these nodes waits for what the node in front of it waits for, but for others of their
      kind; and what waited for the node still waits for the one in front of it. Nodes that wait for several, or for
      another of their kind, stay where they are.
    """
    before: dict[int, list[int]] = {}
    behind: dict[int, list[int]] = {}
    for a, b in edges:
        before.setdefault(b, []).append(a)
        behind.setdefault(a, []).append(b)
    moved = {m for m in memsets if len(before.get(m, ())) == 1}
    moved -= {m for m in moved if before[m][0] in moved}
    changes = Changes([], [])
    for m in sorted(moved):
        (front,) = before[m]
        waits: dict[int, None] = {}
        for node in before.get(front, ()):
            waits.update(dict.fromkeys(before[node] if node in moved else [node]))
        changes.added.extend((node, m) for node in waits)
        known = behind[front]
        changes.added.extend((front, b) for b in behind.get(m, ()) if b not in known)
        changes.removed.append((front, m))
    return changes


def begin_early(graph: int, workspaces: Sequence[range]) -> int:
    """Change a graph (a ``cudaGraph_t``) so; returns how many of its nodes begin earlier.

    Args:
      workspaces: the addresses of the workspaces, of which products of a stream have two in turns.
    """
    driver = _driver()
    if driver is None:
        return 0
    try:
        edges = driver.edges(graph)
        changes = early(edges, [n for n in driver.nodes(graph) if driver.is_memset_of(n, workspaces)])
        driver.change("cuGraphAddDependencies_v2", graph, changes.added)
        driver.change("cuGraphRemoveDependencies_v2", graph, changes.removed)
    except _CannotTell:
        return 0
    return len(changes.removed)


class _CannotTell(Exception):
    """The driver has no answer, as for edges of a sort that these functions do not know."""


class _MemsetNode(ctypes.Structure):
    _fields_ = (
        ("dst", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Driver:
    """The functions of the CUDA driver for the nodes of graphs. Edges that have data are an error of theirs."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library

    def _call(self, name: str, *args: object) -> None:
        if getattr(self._library, name)(*args):
            raise _CannotTell(name)

    def nodes(self, graph: int) -> list[int]:
        """All nodes."""
        count = ctypes.c_size_t()
        self._call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
        found = (ctypes.c_void_p * count.value)()
        self._call("cuGraphGetNodes", ctypes.c_void_p(graph), found, ctypes.byref(count))
        return [int(n or 0) for n in found]

    def edges(self, graph: int) -> list[Edge]:
        """All edges."""
        count = ctypes.c_size_t()
        self._call("cuGraphGetEdges_v2", ctypes.c_void_p(graph), None, None, None, ctypes.byref(count))
        ends = [(ctypes.c_void_p * count.value)() for _ in range(2)]
        self._call("cuGraphGetEdges_v2", ctypes.c_void_p(graph), *ends, None, ctypes.byref(count))
        return [(int(a or 0), int(b or 0)) for a, b in zip(*ends, strict=True)]

    def is_memset_of(self, node: int, places: Sequence[range]) -> bool:
        """Whether a node fills memory in one of these places."""
        kind = ctypes.c_int()
        self._call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value != _MEMSET:
            return False
        found = _MemsetNode()
        self._call("cuGraphMemsetNodeGetParams", ctypes.c_void_p(node), ctypes.byref(found))
        last = found.dst + max(found.height - 1, 0) * found.pitch + found.width * found.element_size - 1
        return any(found.dst in place and last in place for place in places)

    def change(self, name: str, graph: int, edges: Sequence[Edge]) -> None:
        """Add or remove edges."""
        if not edges:
            return
        ends = [(ctypes.c_void_p * len(edges))(*(edge[i] for edge in edges)) for i in range(2)]
        self._call(name, ctypes.c_void_p(graph), *ends, None, ctypes.c_size_t(len(edges)))


_FUNCTIONS = (
    "cuGraphGetNodes",
    "cuGraphGetEdges_v2",
    "cuGraphNodeGetType",
    "cuGraphMemsetNodeGetParams",
    "cuGraphAddDependencies_v2",
    "cuGraphRemoveDependencies_v2",
)


@functools.cache
def _driver() -> _Driver | None:
    """None where there is no driver, or it has not these functions."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return _Driver(library) if all(hasattr(library, name) for name in _FUNCTIONS) else None
