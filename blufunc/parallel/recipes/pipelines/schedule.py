"""Schedules of pipelines: tables of the pass that each rank runs in each phase.

Shared by recipes and pictures. In: the numbers of ranks, microbatches and chunks. Out: a table. Time is made of
*ticks*, and a tick of *phases*. In a phase each rank runs one operation or none: a forward pass, a backward pass, or a
half of that: the cotangent of the input, or those of the weights. Ranks send their results between phases, so a phase
is as long as its longest operation. Most phases have one kind of operation for all ranks, and need no branch.

Let n ranks hold v chunks of the layers each. Rank r runs at tick t the forward pass number t - r of its own, and the
backward pass number t - (vn - 1) - (n - 1 - r). Passes go through n microbatches for chunk 0, the same n for chunk 1,
and so on, then through the next n microbatches; backward from the last chunk. So every result is used one tick after it
was made. With v = 1 that is ``1f1b``, otherwise ``interleaved`` (Narayanan et al., arXiv:2104.04473, section 2.2).

``zb-h1`` (Qi et al., arXiv:2401.10241) has 1f1b's ticks, with the weights' half deferred: to a phase of its own while
all ranks have one to run, and at the end to where a rank has no other pass left.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from blufunc import errors
from blufunc.core.ir import source

NOTHING, FORWARD, BACKWARD, INPUT, WEIGHT = range(-1, 4)
"""Operations of a phase. ``BACKWARD`` is ``INPUT`` and ``WEIGHT`` at once."""


class PipelineCosts(NamedTuple):
    """Times of the passes of a rank's layers, for one microbatch, in any unit.

    Attributes:
      forward: the forward pass.
      input: the cotangents that the previous rank waits for.
      weight: the cotangents of the parameters.
      ends: loss and embedding, with their gradients.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    ends: float = 0.0

    @property
    def total(self) -> float:
        """The time of one microbatch on one rank."""
        return self.forward + self.input + self.weight


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The table of a schedule.

    Attributes:
      name: one of ``SCHEDULES``.
      ranks, microbatches, chunks: the sizes.
      ticks: int [phases], the tick of each phase.
      ops: int [phases, ranks], the operations, or -1 for none.
      chunk, microbatch: int [phases, ranks], of what; 0 where there is no operation.
      written, read: int [phases, ranks], the slot of residuals that a forward pass fills, and that an other operation
        reads. A rank without an operation in a phase of forward passes fills a free slot.
      kept, taken: the same of values that one half of the backward pass keeps for the other.
      slots, kept_slots: the numbers of slots; a slot holds one microbatch of one chunk.
    """

    name: str
    ranks: int
    microbatches: int
    chunks: int
    ticks: np.ndarray
    ops: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    written: np.ndarray
    read: np.ndarray
    kept: np.ndarray
    taken: np.ndarray
    slots: int
    kept_slots: int

    def kinds(self, phase: int) -> frozenset[int]:
        """The operations that ranks run in a phase."""
        return frozenset(self.ops[phase].tolist()) - {NOTHING}

    def at_end(self, phase: int) -> bool:
        """True if the last rank runs its last chunk forward, so that there is a loss."""
        return bool(self.ops[phase, -1] == FORWARD and self.chunk[phase, -1] == self.chunks - 1)

    def lengths(self, costs: PipelineCosts = PipelineCosts()) -> np.ndarray:
        """The time of each phase, [phases]."""
        own = np.array([costs.forward, costs.input + costs.weight, costs.input, costs.weight, 0.0])
        ends = [costs.ends if self.at_end(p) else 0.0 for p in range(len(self.ops))]
        return own[self.ops].max(1) / self.chunks + ends

    def seconds(self, costs: PipelineCosts = PipelineCosts()) -> float:
        """The time of a step, in the unit of the costs."""
        return float(self.lengths(costs).sum())

    def bubble(self, costs: PipelineCosts = PipelineCosts()) -> float:
        """The fraction of a step in which a rank does not run its own layers."""
        return 1 - self.microbatches * costs.total / self.seconds(costs)

    def formula(self, costs: PipelineCosts = PipelineCosts()) -> float:
        """The papers' bubble, for enough microbatches and no time for the ends.

        It is (n - 1) times the time of a microbatch, divided by v in ``interleaved``; in ``zb-h1`` the weights' half is
        subtracted instead of added.
        """
        idle = costs.total / self.chunks if self.name != "zb-h1" else costs.total - 2 * costs.weight
        idle *= self.ranks - 1
        return idle / (self.microbatches * costs.total + idle)


def pipeline_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The table of a schedule of ``pipeline_value_and_grad``.

    Args:
      name: ``"1f1b"``, ``"interleaved"``, ``"zb-h1"`` or ``"gpipe"``.
      ranks: the number of ranks along the axis of stages.
      microbatches: their number; for ``"interleaved"`` at least ``ranks``, best a multiple of them.
      chunks: the parts of the model on each rank; at least 2 for ``"interleaved"``, otherwise 1.
    Returns:
      a ``Schedule``: the table, its times by a cost model, and the slots that it needs.
    Raises:
      ArgumentError: an unknown name; a size that is not a positive int.
      ValueRangeError: chunks or microbatches that do not fit the schedule.
    """
    check_name(name, "pipeline_schedule")
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        check_size(what, value, "pipeline_schedule")
    if (name == "interleaved") != (chunks > 1):
        raise errors.ValueRangeError(
            f"pipeline_schedule: {name} with {chunks} chunk{'s' * (chunks > 1)} on each rank.",
            where=source.here(),
            why="interleaving takes turns between chunks, and the other schedules have one.",
            fix="chunks=2" if name == "interleaved" else 'leave chunks out, or schedule="interleaved"',
        )
    if name == "interleaved" and microbatches < ranks:
        raise errors.ValueRangeError(
            f"pipeline_schedule: {microbatches} microbatches are too few to interleave on {ranks} ranks.",
            where=source.here(),
            why="a rank runs as many microbatches as there are ranks before its next chunk.",
            fix=f'at least {ranks} microbatches, best a multiple of {ranks}; or schedule="1f1b"',
        )
    ops = _by_tick(name, ranks, microbatches, chunks)
    return _with_slots(name, ranks, microbatches, chunks, ops)


SCHEDULES = ("1f1b", "interleaved", "zb-h1", "gpipe")


def check_name(name: str, what: str) -> None:
    """Raise ArgumentError unless a schedule has this name."""
    if name not in SCHEDULES:
        raise errors.ArgumentError(
            f"{what}: schedule is one of {', '.join(SCHEDULES)}, not {name!r:.60}.", where=source.here()
        )


def check_size(what: str, value: Any, caller: str) -> None:
    """Raise ArgumentError unless a number of ranks, microbatches or chunks is one."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise errors.ArgumentError(
            f"{caller}: {what} is a positive number, not {value!r:.60}.",
            where=source.here(),
            fix=f"{what}=4",
        )


_Pass = tuple[int, int, int]  # operation, chunk, microbatch
_NONE: _Pass = (NOTHING, 0, 0)
_Phase = tuple[int, list[_Pass]]  # the tick, and for each rank what it runs


def _by_tick(name: str, n: int, M: int, v: int) -> list[_Phase]:
    """The phases in order."""
    passes = (M - 1) // n * n * v + (v - 1) * n + (M - 1) % n + 1  # of a rank, with gaps in the last round

    def forward(t: int, r: int) -> _Pass:
        return _numbered(FORWARD, t - r, n, M, v)

    def backward(t: int, r: int) -> _Pass:
        start = passes + n - 1 if name == "gpipe" else v * n - 1
        kind = INPUT if name == "zb-h1" else BACKWARD
        op, chunk, m = _numbered(kind, t - start - (n - 1 - r), n, M, v)
        return op, (v - 1 - chunk if op != NOTHING else 0), m

    rows = lambda make, t: [make(t, r) for r in range(n)]
    ticks = range(passes + n - 1 + (passes + n - 1 if name == "gpipe" else v * n - 1))
    pairs = [(t, [row for row in (rows(forward, t), rows(backward, t)) if _busy(row)]) for t in ticks]
    if name == "zb-h1":
        return list(_with_weights(pairs, n, M))
    return [(t, row) for t, both in pairs for row in both]


def _numbered(kind: int, k: int, n: int, M: int, v: int) -> _Pass:
    """Pass number ``k`` of a rank, whose chunk is counted in the order of the passes."""
    turn, k = divmod(k, n * v)
    chunk, j = divmod(k, n)
    m = turn * n + j
    return (kind, chunk, m) if 0 <= m < M else _NONE


def _busy(row: list[_Pass]) -> bool:
    return any(op != NOTHING for op, _, _ in row)


def _with_weights(ticks: list[tuple[int, list[list[_Pass]]]], n: int, M: int) -> Iterator[_Phase]:
    """Place the weights' halves, in the order of microbatches on each rank.

    A phase with nothing else starts a tick while ranks still have forward passes to start. After that, a rank that has
    no other pass in a phase runs one of those it has deferred. What is then left runs in phases at the end.
    """
    ready, done = [0] * n, [0] * n

    def weight(r: int) -> _Pass:
        if done[r] >= ready[r]:
            return _NONE
        done[r] += 1
        return WEIGHT, 0, done[r] - 1

    for t, rows in ticks:
        if t < M and all(d < i for d, i in zip(done, ready, strict=True)):
            yield t, [weight(r) for r in range(n)]
        for row in rows:
            filled = [p if p[0] != NOTHING or t < M else weight(r) for r, p in enumerate(row)]
            for r, (op, _, _) in enumerate(filled):
                ready[r] += op == INPUT
            yield t, filled
    for t in itertools.count(len(ticks)):
        row = [weight(r) for r in range(n)]
        if not _busy(row):
            return
        yield t, row


def _with_slots(name: str, n: int, M: int, v: int, phases: list[_Phase]) -> Schedule:
    """Assign slots: the lowest free number, until the last operation that reads it."""
    table = np.array([row for _, row in phases]).reshape(len(phases), n, 3)
    ops = table[:, :, 0]
    last_reader = WEIGHT if name == "zb-h1" else BACKWARD
    written, read, slots = _allocate(table, FORWARD, last_reader)
    kept, taken, kept_slots = _allocate(table, INPUT, WEIGHT) if name == "zb-h1" else (ops * 0, ops * 0, 0)
    if name == "gpipe":
        slots = M + n - 1  # a loop stacks what every tick leaves
    ticks = np.array([t for t, _ in phases])
    return Schedule(
        name, n, M, v, ticks, ops, table[:, :, 1], table[:, :, 2], written, read, kept, taken, slots, kept_slots
    )  # fmt: skip


def _allocate(table: np.ndarray, writer: int, last: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Slots that a kind of operation writes, and that others read, by rank."""
    phases, n, _ = table.shape
    written, read = np.zeros((phases, n), int), np.zeros((phases, n), int)
    count = 0
    for r in range(n):
        held: dict[tuple[int, int], int] = {}
        for p in range(phases):
            op, chunk, m = table[p, r].tolist()
            mixed = len(set(table[p, :, 0].tolist()) - {NOTHING}) > 1
            free = next(i for i in itertools.count() if i not in held.values())
            if op == writer:
                held[chunk, m] = written[p, r] = free
                count = max(count, free + 1)
            elif (chunk, m) in held and op != NOTHING:
                read[p, r] = held[chunk, m]
                if op == last:
                    del held[chunk, m]
            if op != writer:  # in a mixed phase it writes back what it finds
                written[p, r] = read[p, r] if mixed else free
            if op == NOTHING and not mixed and writer in table[p, :, 0]:
                count = max(count, free + 1)
    return np.where(written < count, written, 0), read, count
