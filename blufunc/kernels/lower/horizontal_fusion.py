"""Horizontal fusion: many small kernels of one structure become one launch.

Kernels, between stages 6 and 7. In: the steps of a program. Out: the steps in groups of independent kernels that are
structurally identical but for arrays and sizes. The usual case is an optimizer's update of every parameter: hundreds of
such kernels.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from blufunc.kernels.loopir.index import Range
from blufunc.kernels.loopir.ir import Kernel, Store, Value, dependencies, post_order, values_of
from blufunc.kernels.memory.types import Step as PlanStep

LEAST = 4
"""Smallest group that is worth its table of arrays."""


def structure(kernel: Kernel) -> Any:
    """The key of kernels that differ only in arrays and number of points; else None.

    Such kernels have one grid range, and read and write at their own position.
    """
    return kernel.memoised("structure", lambda: _structure(kernel))


def _structure(kernel: Kernel) -> Any:
    if len(kernel.grid) != 1 or kernel.finish or not all(isinstance(s, Store) for s in kernel.body):
        return None
    point = kernel.grid[0]
    place = {b: n for n, b in enumerate(kernel.buffers)}
    numbers: dict[Value, int] = {}
    parts: list[Any] = [tuple((b.dtype, b.written) for b in kernel.buffers)]
    for s in kernel.body:
        roots = values_of(s)
        for v in post_order(roots):
            if v in numbers:
                continue
            attr = _attribute(v, place, point)
            if attr is None or any(d not in v.args for d in dependencies(v)):
                return None
            numbers[v] = len(numbers)
            parts.append((v.op, v.dtype, attr, tuple(numbers[a] for a in v.args)))
        if str(s.index) != point.name:
            return None
        guard = None if s.guard is None else numbers[s.guard]
        parts.append((place[s.buffer], numbers[s.value], guard))
    return tuple(parts)


def _attribute(v: Value, place: dict, point: Range) -> Any:
    """The parts of an operation's ``attr`` that belong to its structure."""
    if v.op == "load":
        buffer, index = v.attr
        text = str(index)
        return (place[buffer], text) if text in (point.name, "0") else None
    if v.op == "const":
        return str(v.attr)
    if v.op == "apply":
        prim, params = v.attr
        return prim, tuple((k, str(x)) for k, x in params.items())
    return None


def groups(keys: Sequence[Any], steps: Sequence[PlanStep], concurrent: Sequence[int] = ()) -> list[list[int]]:
    """Groups of step indices in dependency order: most of one step, some with one key.

    Args:
      keys: the structure of each step, or None.
      steps: the reads and writes of each, in an order that works.
      concurrent: steps that overlap with others. The members of a group depend on the same of them, and the same depend
        on each member, so that grouping delays neither; default none.
    """
    waits = _waits(steps)
    needs = _needs(waits)
    before, after = _around(waits, needs, concurrent)
    together: dict[int, list[int]] = {}
    by_key: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        if key is not None:
            by_key.setdefault((key, before[i], after[i]), []).append(i)
    joined = list(needs)
    for members in by_key.values():
        group = max(_independent(members, joined), _independent(members[::-1], joined)[::-1], key=len)
        if len(group) >= LEAST:
            for i in group:
                together[i] = group
            _contract(group, joined)
    return _in_order(together, waits)


def _waits(steps: Sequence[PlanStep]) -> list[set[int]]:
    """The direct dependencies of each step."""
    makers: dict[int, int] = {}
    waits: list[set[int]] = []
    for i, s in enumerate(steps):
        waits.append({*(makers[r] for r in s.reads if r in makers), *s.after})
        makers.update((w, i) for w in s.writes)
    return waits


def _needs(waits: Sequence[set[int]]) -> list[int]:
    """The transitive dependencies of each step, as a bitset."""
    needs: list[int] = []
    for own in waits:
        bits = 0
        for d in own:
            bits |= needs[d] | 1 << d
        needs.append(bits)
    return needs


def _around(
    waits: Sequence[set[int]], needs: Sequence[int], concurrent: Sequence[int]
) -> tuple[list[int], list[int]]:
    """For each step, bitsets of the ``concurrent`` steps before it and after it."""
    mask = sum(1 << a for a in concurrent)
    after = [0] * len(waits)
    for i in reversed(range(len(waits))):
        own = after[i] | 1 << i & mask
        for d in waits[i]:
            after[d] |= own
    return [n & mask for n in needs], after


def _independent(members: Sequence[int], needs: Sequence[int]) -> list[int]:
    """Members that do not depend on each other, chosen greedily from the first."""
    chosen, bits, union = [], 0, 0
    for m in members:
        if needs[m] & bits or union >> m & 1:
            continue
        chosen.append(m)
        bits |= 1 << m
        union |= needs[m]
    return chosen


def _contract(group: Sequence[int], needs: list[int]) -> None:
    """Give all members the dependencies of any, and their readers a dependency on all."""
    bits = sum(1 << m for m in group)
    union = 0
    for m in group:
        union |= needs[m]
    for i, n in enumerate(needs):
        if n & bits:
            needs[i] = n | union | bits
    for m in group:
        needs[m] = union


def _in_order(together: dict[int, list[int]], direct: Sequence[set[int]]) -> list[list[int]]:
    """Groups in dependency order, as late as their last member was."""
    head = {i: min(group) for i, group in together.items()}
    nodes: dict[int, list[int]] = {}
    for i in range(len(direct)):
        nodes.setdefault(head.get(i, i), []).append(i)
    waits: dict[int, set[int]] = {n: set() for n in nodes}
    readers: dict[int, set[int]] = {n: set() for n in nodes}
    for n, members in nodes.items():
        for i in members:
            for d in direct[i]:
                other = head.get(d, d)
                if other != n:
                    waits[n].add(other)
                    readers[other].add(n)
    ready = [(max(nodes[n]), n) for n, w in waits.items() if not w]
    heapq.heapify(ready)
    order = []
    while ready:
        _, n = heapq.heappop(ready)
        order.append(nodes[n])
        for reader in readers[n]:
            waits[reader].discard(n)
            if not waits[reader]:
                heapq.heappush(ready, (max(nodes[reader]), reader))
    if len(order) != len(nodes):
        raise AssertionError("a group of kernels depends on itself")
    return order
