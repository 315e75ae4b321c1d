"""Verifier of memory plans: replay a plan on bytes labelled with value ids.

Kernels, stage 7, after ``plan.py``, under ``config.check``. In: a plan, and its steps and values. Out: an error if a
step would read bytes that do not hold its value. It shares only the roots of views with the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from blufunc import errors
from blufunc.kernels.memory.order import roots_of
from blufunc.kernels.memory.types import Placement, Plan, Step, Value

_Region = tuple[tuple[str, int], int, int]
"""A block of memory, and a half-open range of bytes in it."""


def check_plan(plan: Plan, steps: Sequence[Step], values: Sequence[Value], *, alignment: int = 256) -> None:
    """Check that a plan's order and memory are sound, by replaying it.

    Raises:
      ValueRangeError: with the step and the value at fault.
    """
    if sorted(plan.order) != list(range(len(steps))):
        _unsound("its order is not a permutation of the steps")
    done: set[int] = set()
    for i in plan.order:
        if not done.issuperset(steps[i].after):
            _unsound(f"step {i} runs before one of the steps {steps[i].after}")
        done.add(i)
    for place in (*plan.placement.values(), *plan.scratch.values()):
        if place.offset % alignment:
            _unsound(f"offset {place.offset} is not a multiple of {alignment}")
    simulate(plan, steps, values)


def simulate(plan: Plan, steps: Sequence[Step], values: Sequence[Value]) -> int:
    """Replay a plan on bytes labelled with value ids.

    Returns:
      The highest byte of the arena that is used.

    Raises:
      ValueRangeError: a step reads bytes that do not hold its value, two values that it needs at once overlap, a value
        leaves its block, a read-only argument is written, or an output is not in memory of its own at the end.
    """
    root = roots_of(values)
    holds: dict[tuple[str, int], dict[int, tuple[int, int]]] = {}  # block -> value -> its range of bytes
    for i, value in enumerate(values):
        if value.kind in ("argument", "donated") and root[i] == i:
            holds["argument", i] = {i: (0, value.nbytes)}
    used = 0
    for r, place in plan.placement.items():
        home = values[place.owner].on_host if place.owner >= 0 else place.space == "host"
        if values[r].nbytes and values[r].on_host != home:
            _unsound(f"value {r} is in the wrong memory: {place}")

    def region(place: Placement, nbytes: int) -> _Region:
        block = (place.space, place.owner)
        arenas = {"arena": plan.arena_bytes, "host": plan.host_arena_bytes}
        size = arenas.get(place.space, plan.allocations.get(place.owner, 0))
        if place.space == "argument":
            size = values[place.owner].nbytes
        if not 0 <= place.offset <= place.offset + nbytes <= size:
            _unsound(f"{place} with {nbytes} bytes leaves a block of {size}")
        return block, place.offset, place.offset + nbytes

    for i in plan.order:
        step = steps[i]
        reading = {r: region(plan.placement[r], values[r].nbytes) for r in {root[v] for v in step.reads}}
        for r, (block, low, high) in reading.items():
            if holds.get(block, {}).get(r) != (low, high):
                _unsound(f"step {i} reads value {r}, which is not in memory")
        writing = {r: region(plan.placement[r], values[r].nbytes) for r in {root[v] for v in step.writes}}
        if step.scratch:
            writing[-1] = region(plan.scratch[i], step.scratch)
        _check_overlaps(i, writing, reading | writing, {(root[w], root[v]) for w, v in step.inplace})
        for w, here in writing.items():
            block, low, high = here
            if block[0] == "argument" and values[block[1]].kind == "argument":
                _unsound(f"step {i} writes value {w} into argument {block[1]}, which is not donated")
            content = holds.setdefault(block, {})
            holds[block] = {v: x for v, x in content.items() if v == w or not _overlap((block, *x), here)}
            if w >= 0:
                holds[block][w] = (low, high)
            if block[0] == "arena":
                used = max(used, high)
    taken: set[tuple[str, int]] = set()
    for r in {root[i] for i, value in enumerate(values) if value.kind == "output"}:
        block, low, high = region(plan.placement[r], values[r].nbytes)
        if holds.get(block, {}).get(r) != (low, high):
            _unsound(f"output {r} is not in memory at the end")
        if block[0] in ("arena", "host") or block in taken or low:
            _unsound(f"output {r} has no memory of its own")
        taken.add(block)
    return used


def _check_overlaps(
    i: int, writing: dict[int, _Region], needed: dict[int, _Region], pairs: set[tuple[int, int]]
) -> None:
    """Check that step ``i`` overwrites no value it needs, except in ``pairs``."""
    for w, here in writing.items():
        for v, there in needed.items():
            shared = (w, v) in pairs and here == there
            if v != w and not shared and _overlap(here, there):
                _unsound(f"step {i} writes value {w} over value {v}, which it needs")


def _overlap(a: _Region, b: _Region) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


def _unsound(what: str) -> NoReturn:
    raise errors.ValueRangeError(f"check_plan: {what}", why="the plan would corrupt memory")
