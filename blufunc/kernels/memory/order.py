"""Dependencies of a plan's steps, and an order with a low peak of temporaries.

Kernels, stage 7, called by ``plan.py``. In: steps and values. Out: the graph: dependencies, views resolved to their
storage, and results that may overwrite operands; inconsistent lists are rejected. From the graph, a list schedule that
needs less memory than the given order, if there is one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NoReturn

from blufunc import errors
from blufunc.kernels.memory.types import Step, Value

# -- dependencies -----------------------------------------------------------------------------------


class Graph:
    """The dependencies of steps, and the storage of each value.

    Attributes:
      root: for each value, the one that owns its storage: itself, unless it is a view.
      kind: for each root, the kind of its storage; a temporary with a view that is returned is an output.
      read_as: for each step, the views through which it reads each root.
      before: for each step, the steps that must come before it.
      temps: for each step, the temporary roots that it touches, without those in the memory of the host.
      touched_by: for each temporary root, the steps that touch it.
      overwrites: for each step, pairs of roots (written, read) of one size that may share storage.
    """

    def __init__(self, steps: Sequence[Step], values: Sequence[Value]):
        self.steps, self.values = steps, values
        self.root = roots_of(values)
        self.kind = [value.kind for value in values]
        self.returned: dict[int, int] = {}  # root -> the output that it is
        for i, value in enumerate(values):
            if value.kind == "output":
                self.returned.setdefault(self.root[i], i)
        for r in self.returned:
            if self.kind[r] == "temp":
                self.kind[r] = "output"
        self.read_as: list[dict[int, set[int]]] = []
        for step in steps:
            views: dict[int, set[int]] = {}
            for v in step.reads:
                views.setdefault(self.root[v], set()).add(v)
            self.read_as.append(views)
        self.before = self._dependencies()
        self.temps = [
            tuple({r for v in (*s.reads, *s.writes) if self.is_temp(r := self.root[v])}) for s in steps
        ]
        self.touched_by: dict[int, list[int]] = {}
        for i, roots in enumerate(self.temps):
            for r in roots:
                self.touched_by.setdefault(r, []).append(i)
        self.overwrites = [
            [(self.root[w], self.root[v]) for w, v in step.inplace if self.may_overwrite(i, w, v)]
            for i, step in enumerate(steps)
        ]

    def _dependencies(self) -> list[set[int]]:
        writers: dict[int, list[int]] = {}
        readers: dict[int, list[int]] = {}
        before: list[set[int]] = []
        for i, step in enumerate(self.steps):
            needs = set(step.after)
            if not all(0 <= j < i for j in needs):
                reject(f"step {i} must come after steps {step.after}, which are not all before it")
            if not {w for w, _ in step.inplace} <= {*step.writes} or not {v for _, v in step.inplace} <= {
                *step.reads
            }:
                reject(f"step {i} has in-place pairs of what it does not write and read: {step.inplace}")
            for v in step.reads:
                r = self.root[v]
                if r in writers:
                    needs.update(writers[r])
                elif not self.is_argument(r):
                    reject(f"step {i} reads {self.name(v)}, which no step before it writes")
                readers.setdefault(r, []).append(i)
            for v in step.writes:
                r = self.root[v]
                if self.kind[r] == "argument":
                    reject(f"step {i} writes {self.name(v)}, which is the caller's")
                # views write a buffer piece by piece: keep their order
                needs.update(writers.get(r, ()))
                needs.update(readers.get(r, ()))
                writers.setdefault(r, []).append(i)
            needs.discard(i)
            before.append(needs)
        for r, v in self.returned.items():
            if r not in writers and not self.is_argument(r):
                reject(f"{self.name(v)} is an output, and no step writes it")
        return before

    def updates_last(self) -> list[set[int]]:
        """``before``, with each update of a donated argument after the steps that read it.

        Run too early, an update could not be in place. The added edges follow the given order, so there is no cycle.
        """
        readers: dict[int, set[int]] = {}
        before = []
        for i, step in enumerate(self.steps):
            needs = set(self.before[i])
            for _, v in step.inplace:
                if self.kind[self.root[v]] == "donated":
                    needs |= readers.get(self.root[v], set())
            for v in step.reads:
                if self.kind[self.root[v]] == "donated":
                    readers.setdefault(self.root[v], set()).add(i)
            before.append(needs)
        return before

    def is_temp(self, root: int) -> bool:
        """True for a temporary in the memory of the device."""
        return self.kind[root] == "temp" and not self.values[root].on_host

    def is_argument(self, root: int) -> bool:
        return self.kind[root] in ("argument", "donated")

    def name(self, value: int) -> str:
        label = self.values[value].label
        return f"value {value} ({label})" if label else f"value {value}"

    def spans(self, order: Iterable[int]) -> dict[int, tuple[int, int]]:
        """The first and the last position at which the storage of each root is needed.

        Arguments start at position -1; the caller's arguments and outputs end at the number of steps.
        """
        start: dict[int, int] = {
            r: -1 for r in range(len(self.values)) if self.is_argument(r) and self.owns(r)
        }
        end = dict(start)
        for at, i in enumerate(order):
            step = self.steps[i]
            for v in (*step.reads, *step.writes):
                r = self.root[v]
                start.setdefault(r, at)
                end[r] = at
        for r in start:
            if self.kind[r] == "argument" or r in self.returned:
                end[r] = len(self.steps)
        return {r: (start[r], end[r]) for r in start}

    def owns(self, value: int) -> bool:
        return self.root[value] == value

    def may_overwrite(self, i: int, written: int, read: int) -> bool:
        """True if an in-place pair has one size and one view of the operand is read."""
        if self.values[self.root[written]].nbytes != self.values[self.root[read]].nbytes:
            return False
        views = self.read_as[i][self.root[read]]
        return len(views) == 1 or all((written, v) in self.steps[i].inplace for v in views)


def roots_of(values: Sequence[Value]) -> list[int]:
    roots = []
    for i, value in enumerate(values):
        root, hops = i, 0
        while (up := values[root].alias_of) is not None:
            root, hops = up, hops + 1
            if hops > len(values):
                reject(f"value {i} is a view of itself")
        if value.nbytes > values[root].nbytes:
            reject(f"value {i} has {value.nbytes} bytes, and is a view of {values[root].nbytes}")
        roots.append(root)
    return roots


def reject(what: str) -> NoReturn:
    raise errors.ValueRangeError(f"plan: {what}", why="the list of steps and values is not a program")


# -- order ------------------------------------------------------------------------------------------


def better_order(graph: Graph) -> Sequence[int] | None:
    """The list schedule with the lowest peak; None if the given order is as good.

    Two changes to an order alternate. Hoisting runs a step that frees memory as soon as it is ready, such as an update
    when its gradient is. Sinking is the same from the end: a cast waits until it is needed. They start from the given
    order, hoisting first or sinking first, and from a greedy one that always takes the step that frees most; each of
    the three is at times the best by far.
    """
    n = len(graph.steps)
    before = graph.updates_last()
    after: list[set[int]] = [set() for _ in range(n)]
    for i, needs in enumerate(before):
        for j in needs:
            after[j].add(i)

    def hoist(base: Sequence[int]) -> list[int]:
        return _list_schedule(graph, base, before, after, eager=True)

    def sink(base: Sequence[int]) -> list[int]:
        return _list_schedule(graph, base[::-1], after, before, eager=True)[::-1]

    original = range(n)
    greedy = _list_schedule(graph, original, before, after, eager=False)
    orders = (sink(hoist(original)), hoist(sink(original)), hoist(sink(greedy)))
    peaks = [_peak_of_temps(graph, order) for order in orders]
    best = min(range(len(orders)), key=peaks.__getitem__)
    return orders[best] if peaks[best] < _peak_of_temps(graph, original) else None


def _list_schedule(
    graph: Graph, base: Sequence[int], before: list[set[int]], after: list[set[int]], eager: bool
) -> list[int]:
    """Schedule the ready step with the largest gain: bytes freed less bytes begun.

    A buffer is alive from the first step that touches it to the last, in either direction of time, so the same code
    schedules from the end if ``before`` and ``after`` are swapped. Ties, and with ``eager`` all steps that free
    nothing, go by ``base``.
    """
    rank = [0] * len(base)
    for at, i in enumerate(base):
        rank[i] = at
    left = {r: len(steps) for r, steps in graph.touched_by.items()}
    nbytes = [value.nbytes for value in graph.values]
    gain = [sum([-nbytes[r] for r in roots if left[r] > 1]) for roots in graph.temps]
    waits = list(map(len, before))
    done = [False] * len(base)
    heap: list[tuple[int, int, int]] = []  # entries with a stale gain stay, and are skipped

    def key(i: int) -> tuple[int, int, int]:
        worth = gain[i]
        return (0 if eager and worth < 0 else -worth, rank[i], i)

    for i, count in enumerate(waits):
        if not count:
            heap.append(key(i))
    heapq.heapify(heap)
    order = []
    while heap:
        entry = heapq.heappop(heap)
        i = entry[2]
        if done[i] or entry != key(i):
            continue
        done[i] = True
        order.append(i)
        for r in graph.temps[i]:
            users = graph.touched_by[r]
            remaining = left[r] = left[r] - 1
            begins, ends = remaining + 1 == len(users), remaining == 1
            if begins or ends:
                raised = nbytes[r] * (begins + ends)
                for j in users:
                    if not done[j]:
                        gain[j] += raised
                        if not waits[j]:
                            heapq.heappush(heap, key(j))
        for j in after[i]:
            waits[j] -= 1
            if not waits[j]:
                heapq.heappush(heap, key(j))
    return order


def _peak_of_temps(graph: Graph, order: Sequence[int]) -> int:
    """Peak bytes of temporaries and scratch, dying operands overwritten."""
    left: dict[int, int] = {}
    for roots in graph.temps:
        for r in roots:
            left[r] = left.get(r, 0) + 1
    live = peak = 0
    begun: set[int] = set()
    for i in order:
        step = graph.steps[i]
        for r in graph.temps[i]:
            left[r] -= 1
            if r not in begun:
                begun.add(r)
                live += graph.values[r].nbytes
        saved = 0
        reused = set()
        for w, v in step.inplace:
            r = graph.root[v]
            size = graph.values[r].nbytes
            if left.get(r) == 0 and r not in reused and size == graph.values[graph.root[w]].nbytes:
                reused.add(r)
                saved += size
        peak = max(peak, live + step.scratch - saved)
        live -= sum(graph.values[r].nbytes for r in graph.temps[i] if not left[r])
    return peak
