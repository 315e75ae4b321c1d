"""Overlap of copies between memories with the other steps of a plan.

Kernels, stage 7, before ``plan.py``. In: steps, their estimated times, and which of them are copies. Out: the order in
which they are issued, with steps that hold the bytes of copies under way, and what the copies cost. Each direction has
a stream of its own, first in, first out.

The other steps are ordered as if what copies bring were there, and what they take were gone: a step that reads a moment
of the optimizer runs when its gradient is ready, not when the program fetches the moment.

A copy out is issued after its producer, and its operand keeps its bytes until the link has moved them. A copy in is
issued early enough to be done when it is first read. Neither raises the peak by more than the largest copy, or than a
budget leaves: where memory is short, steps wait for the link. Executors wait by events for bytes that a copy touches
(``backends/cuda/streams.py``), so the plan decides how long they wait, not whether.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from blufunc.kernels.memory.order import Graph, better_order
from blufunc.kernels.memory.types import Step, Value


@dataclass(frozen=True)
class Copy:
    """A step that copies a value between memories.

    Attributes:
      out: True if it copies to the host.
      value: the id of the value in the memory of the device.
      nbytes, seconds: size, and estimated time on the link.
    """

    out: bool
    value: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Overlap:
    """The copies of a plan, and their estimated price.

    Attributes:
      copies_out, copies_in: their numbers, to the host and from it.
      bytes_out, bytes_in: their bytes.
      seconds_out, seconds_in: estimated time of each direction of the link.
      step_seconds: estimated time of all other steps.
      exposed_seconds: estimated time in which these wait for copies.
    """

    copies_out: int
    copies_in: int
    bytes_out: int
    bytes_in: int
    seconds_out: float
    seconds_in: float
    step_seconds: float
    exposed_seconds: float


def order_with_copies(
    steps: Sequence[Step], values: Sequence[Value], copies: Mapping[int, Copy]
) -> list[int]:
    """An order of all steps in which those that are no copies need little memory."""
    graph = Graph(steps, values)
    awaited: dict[int, set[int]] = {}  # by copy, the other steps that it waits for
    for i in copies:
        direct = graph.before[i]
        awaited[i] = {j for j in direct if j not in copies}.union(
            *(awaited[j] for j in direct if j in copies)
        )
    computing = [i for i in range(len(steps)) if i not in copies]
    where = {i: n for n, i in enumerate(computing)}
    alone = []
    for i in computing:
        needed = {j for j in steps[i].after if j not in copies}
        needed = needed.union(*(awaited[j] for j in graph.before[i] if j in copies))
        alone.append(replace(steps[i], after=tuple(sorted(where[j] for j in needed))))
    written = {v for step in alone for v in step.writes}
    moved = {graph.root[v] for i in copies for v in steps[i].writes} | {
        graph.root[c.value]
        for c in copies.values()
        if c.out and len(graph.touched_by.get(graph.root[c.value], ())) == 2
    }
    types = [_for_order(v, i in written, graph.root[i] in moved) for i, v in enumerate(values)]
    best = better_order(Graph(alone, types))
    order: dict[int, None] = {}

    def add(i: int) -> None:
        for j in sorted(graph.before[i]):
            if j in copies and j not in order:
                add(j)
        order[i] = None

    for n in best if best is not None else range(len(alone)):
        add(computing[n])
    for i in copies:
        if i not in order:
            add(i)
    return list(order)


def _for_order(value: Value, written: bool, moved: bool) -> Value:
    """A value as the order of the other steps sees it: copied ones take no memory."""
    if not written:
        kind = value.kind if value.kind in ("argument", "donated") else "argument"
        return replace(value, kind=kind, on_host=True)
    return replace(value, on_host=True) if moved else value


def overlapped(
    order: Sequence[int],
    steps: Sequence[Step],
    values: Sequence[Value],
    copies: Mapping[int, Copy],
    seconds: Sequence[float],
    room: int = 0,
) -> tuple[list[int], list[Step], Overlap]:
    """Issue copies where they overlap with other steps.

    Args:
      order: an order of the steps that works.
      copies: by index of a step, the copy that it is.
      seconds: estimated time of each step; unused for copies.
      room: bytes by which copies may raise the peak, if more than the largest; default 0.
    Returns:
      the order, as indices; the steps in it, whose ``after`` are positions; the price.
    """
    return _Overlapper(order, steps, values, copies, seconds, room).run()


class _Overlapper:
    """Positions here are those of steps that are no copies."""

    def __init__(
        self,
        order: Sequence[int],
        steps: Sequence[Step],
        values: Sequence[Value],
        copies: Mapping[int, Copy],
        seconds: Sequence[float],
        room: int,
    ):
        self.order, self.steps, self.values, self.copies = order, steps, values, copies
        self.graph = Graph(steps, values)
        self.computing = [i for i in order if i not in copies]
        self.at = {i: p for p, i in enumerate(self.computing)}
        self.seconds = [seconds[i] for i in self.computing]
        # when each position starts, without waits; the last entry is the end
        self.starts = np.concatenate([[0.0], np.cumsum(self.seconds)]).tolist()
        self.readers: dict[int, list[int]] = {}  # by root, the steps that read it
        for j, step in enumerate(steps):
            for v in step.reads:
                self.readers.setdefault(self.graph.root[v], []).append(j)
        self.slots: dict[int, int] = {}  # by copy, the position before which it is issued
        self.held: dict[int, int] = {}  # by copy out, the last position at which its operand keeps its bytes
        self.spans, self.profile = self._live()
        largest = max((c.nbytes for c in copies.values() if not c.out), default=0)
        self.limit = int(self.profile.max(initial=0)) + max(largest, room)

    def _live(self) -> tuple[dict[int, tuple[int, int]], np.ndarray]:
        """First and last position of device temporaries, and live bytes by position."""
        spans: dict[int, tuple[int, int]] = {}
        for i in self.order:
            for v in (*self.steps[i].reads, *self.steps[i].writes):
                r = self.graph.root[v]
                if self.graph.is_temp(r) and i in self.at:
                    first, _ = spans.get(r, (self.at[i], 0))
                    spans[r] = (first, self.at[i])
        profile = np.zeros(len(self.computing) + 1, np.int64)
        for r, (first, last) in spans.items():
            profile[first : last + 1] += self.values[r].nbytes
        return spans, profile

    def run(self) -> tuple[list[int], list[Step], Overlap]:
        ready = self._ready()
        self._place_out(ready)
        self._place_in(ready)
        self._chain()
        order = self._issued()
        where = {i: n for n, i in enumerate(order)}
        held: dict[int, list[int]] = {}
        for i, position in self.held.items():
            held.setdefault(self.computing[position], []).append(self.copies[i].value)
        made = []
        for i in order:
            step = replace(self.steps[i], after=tuple(where[j] for j in self.steps[i].after))
            if i in held:
                more = tuple(v for v in held[i] if v not in step.reads)
                pairs = tuple(p for p in step.inplace if p[1] not in held[i])
                step = replace(step, reads=(*step.reads, *more), inplace=pairs)
            made.append(step)
        return order, made, self._price(order)

    def _ready(self) -> dict[int, int]:
        """For each copy, the position before which all that it needs has been issued."""
        ready: dict[int, int] = {}
        for i in self.order:
            if i in self.copies:
                before = self.graph.before[i]
                ready[i] = max((ready[j] if j in self.copies else self.at[j] + 1 for j in before), default=0)
        return ready

    def _place_out(self, ready: Mapping[int, int]) -> None:
        """Issue copies out at once, and hold their operands until they are done."""
        free = 0.0
        for i in sorted((i for i in ready if self.copies[i].out), key=ready.__getitem__):
            copy, slot = self.copies[i], ready[i]
            self.slots[i] = slot
            free = max(self.starts[slot], free) + copy.seconds
            until = min(
                bisect_left(self.starts, free), len(self.computing)
            )  # the first that starts without it
            _, last = self.spans.get(self.graph.root[copy.value], (0, slot - 1))
            position = max(last, slot - 1)
            while position + 1 < until and self.profile[position + 1] + copy.nbytes <= self.limit:
                position += 1
                self.profile[position] += copy.nbytes
            if position >= slot and position > last:
                self.held[i] = position

    def _place_in(self, ready: Mapping[int, int]) -> None:
        """Issue copies in such that they end when they are read, if memory allows."""
        needed = self._needed()
        read = {i: needed[i] for i in ready if not self.copies[i].out}
        wanted: dict[int, int] = {}
        free = float("inf")
        for i in sorted(read, key=read.__getitem__, reverse=True):
            free = min(self.starts[read[i]], free) - self.copies[i].seconds
            wanted[i] = max(bisect_right(self.starts, free) - 1, ready[i], 0)
        earliest = 0  # copies are done in the order in which they are issued
        for i in sorted(read, key=read.__getitem__):
            slot, nbytes = read[i], self.copies[i].nbytes
            while slot > max(wanted[i], earliest) and self.profile[slot - 1] + nbytes <= self.limit:
                slot -= 1
                self.profile[slot] += nbytes
            self.slots[i] = slot
            earliest = slot

    def _needed(self) -> dict[int, int]:
        """For each copy, the position before which it is issued: that of the first reader.

        The reader of a copy may be another copy.
        """
        needed: dict[int, int] = {}
        for i in reversed(self.order):
            if i in self.copies:
                written = {self.graph.root[v] for v in self.steps[i].writes}
                readers = [j for r in written for j in self.readers.get(r, ()) if i in self.graph.before[j]]
                found = [self.at[j] if j in self.at else needed[j] for j in readers]
                needed[i] = min(found, default=len(self.computing))
        return needed

    def _chain(self) -> None:
        """Issue copies of copies after these."""
        for i in self.order:
            before = (
                [self.slots[j] for j in self.graph.before[i] if j in self.copies] if i in self.copies else []
            )
            if before and max(before) > self.slots[i]:
                self.slots[i] = max(before)
                if self.held.get(i, self.slots[i]) < self.slots[i]:
                    del self.held[i]

    def _issued(self) -> list[int]:
        """The order in which all steps are issued."""
        given = {i: n for n, i in enumerate(self.order)}
        by_slot: dict[int, list[int]] = {}
        for i, slot in self.slots.items():
            by_slot.setdefault(slot, []).append(i)
        order: list[int] = []
        for position in range(len(self.computing) + 1):
            order += sorted(by_slot.get(position, ()), key=given.__getitem__)
            order += self.computing[position : position + 1]
        return order

    def _price(self, order: Sequence[int]) -> Overlap:
        """Estimate waits: for what a copy brings, and for bytes that one still reads."""
        now, free = 0.0, {True: 0.0, False: 0.0}
        done: dict[int, float] = {}
        releases: dict[int, list[int]] = {}
        for i, slot in self.slots.items():
            if self.copies[i].out:
                last = self.spans.get(self.graph.root[self.copies[i].value], (0, slot - 1))[1]
                releases.setdefault(max(self.held.get(i, 0), last, slot - 1) + 1, []).append(i)
        for i in order:
            copy = self.copies.get(i)
            before = max((done[j] for j in self.graph.before[i] if j in done), default=0.0)
            if copy is None:
                for j in releases.get(self.at[i], ()):
                    before = max(before, done[j])
                now = done[i] = max(now, before) + self.seconds[self.at[i]]
            else:
                free[copy.out] = done[i] = max(free[copy.out], before, now) + copy.seconds
        end = max(now, *free.values())
        total = self.starts[-1]
        out, into = ([c for c in self.copies.values() if c.out is way] for way in (True, False))
        return Overlap(
            len(out),
            len(into),
            sum(c.nbytes for c in out),
            sum(c.nbytes for c in into),
            sum(c.seconds for c in out),
            sum(c.seconds for c in into),
            total,
            max(0.0, end - total),
        )
