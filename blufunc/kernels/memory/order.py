"""The order of a plan's steps: list schedules with a low peak of temporaries.

Kernels, stage 7, below ``plan.py``. In: the graph of the steps. Out: an order that needs less than the given one,
if there is.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from blufunc.kernels.memory.dependencies import Graph


def better_order(graph: Graph) -> Sequence[int] | None:
    """The list schedule with the lowest peak of temporaries, or None if none is below the given order's.

    Two changes to an order are made in turn. Hoisting runs a step that frees something as soon as it is ready:
    an update as soon as its gradient is there. Sinking is the same from the end: a cast waits until it
    is needed. They start from the given order, hoisting first and sinking first, and from a
    greedy one that always takes the step that frees most; each of the three is at times the best by far.
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

    given = range(n)
    greedy = _list_schedule(graph, given, before, after, eager=False)
    orders = (sink(hoist(given)), hoist(sink(given)), hoist(sink(greedy)))
    peaks = [_peak_of_temps(graph, order) for order in orders]
    best = min(range(len(orders)), key=peaks.__getitem__)
    return orders[best] if peaks[best] < _peak_of_temps(graph, given) else None


def _list_schedule(
    graph: Graph, base: Sequence[int], before: list[set[int]], after: list[set[int]], eager: bool
) -> list[int]:
    """Takes the ready step with the largest gain: bytes that die with it less bytes that begin with it.

    A buffer is alive from the first step that touches it to the last, in either direction of time, so the
    same code schedules from the end when ``before`` and ``after`` change places.
    Ties, and with ``eager`` all steps that free nothing, go by ``base``.
    """
    rank = [0] * len(base)
    for at, i in enumerate(base):
        rank[i] = at
    left = {r: len(steps) for r, steps in graph.touched_by.items()}
    nbytes = [value.nbytes for value in graph.values]
    gain = [sum([-nbytes[r] for r in roots if left[r] > 1]) for roots in graph.temps]
    waits = list(map(len, before))
    done = [False] * len(base)
    heap: list[tuple[int, int, int]] = []  # entries with an old gain stay, and are skipped

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
    """The most bytes of temporaries and scratch alive at once, results written over dying operands."""
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
