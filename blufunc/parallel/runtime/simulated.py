"""Simulated devices: the ranks of a mesh as threads of one process.

Parallel, used at stage 8. In come a mesh and what each rank does; out come the results of all ranks. The threads meet
in a ``_Room``: the last rank of a group to come computes what everybody gets (``engine.exchanged``, in the order of
ranks, so that results do not depend on who was late). No program hangs: when all ranks that still run wait for
one another, when one failed, or when one is late, all of them end with an error that says who waits where.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.parallel.runtime import engine as engines

if TYPE_CHECKING:
    from blufunc.parallel.mesh.mesh import AbstractMesh

DEADLINE = 300.0
"""The seconds that a rank waits for another that still computes."""


def run_ranks(mesh: AbstractMesh, function: Callable[[int], Any], *, deadline: float = DEADLINE) -> list[Any]:
    """Run ``function(rank)`` for all ranks of ``mesh``, each in a thread with its engine.

    Args:
      mesh: a mesh, abstract or not.
      function: what a rank does; collectives that it runs meet those of the others.
      deadline: the seconds that a rank waits for another.
    Returns:
      the results, in order of ranks.
    Raises:
      CollectiveError: the ranks do not meet, or do not agree on what to exchange.
      what a rank raises; the others then end at their next exchange.
    """
    room = _Room(mesh, deadline)
    results: list[Any] = [None] * mesh.size
    line = source.replay.line or source.current()

    def run(rank: int) -> None:
        source.replay.line = line  # what goes wrong in a rank belongs to the line that runs the program
        try:
            with engines.use(ThreadEngine(rank, mesh, room)):
                results[rank] = function(rank)
        except _Stopped:
            pass
        except BaseException as e:
            room.fail(e)
        else:
            room.leave(rank)

    crew = _crew_of(mesh.size)
    try:
        crew.run(run)
    except BaseException as e:  # an interrupt: let nobody wait for what will not come
        room.fail(e)
        crew.dismiss()
        raise
    _idle.setdefault(mesh.size, []).append(crew)
    if room.failure is not None:
        raise room.failure
    return results


class _Crew:
    """Threads, one for each rank, that wait for work: to start them anew takes longer than what small programs do."""

    def __init__(self, size: int):
        self._work: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(size)]
        self._running = 0
        self._lock = threading.Lock()
        self._done = threading.Semaphore(0)
        for rank, work in enumerate(self._work):
            threading.Thread(target=self._serve, args=(rank, work), name=f"rank {rank}", daemon=True).start()

    def run(self, function: Callable[[int], None]) -> None:
        """Return when ``function(rank)``, which raises nothing, has returned in all threads."""
        self._running = len(self._work)
        for work in self._work:
            work.put(function)
        self._done.acquire()

    def dismiss(self) -> None:
        """Have the threads end after what they do now."""
        for work in self._work:
            work.put(None)

    def _serve(self, rank: int, work: queue.SimpleQueue) -> None:
        while (function := work.get()) is not None:
            function(rank)
            del function  # it holds arguments and results
            with self._lock:
                self._running -= 1
                last = not self._running
            if last:
                self._done.release()


_idle: dict[int, list[_Crew]] = {}  # by size; a crew is nobody else's while it runs, so that runs may nest
os.register_at_fork(after_in_child=_idle.clear)  # threads do not come along


def _crew_of(size: int) -> _Crew:
    try:
        return _idle[size].pop()
    except (KeyError, IndexError):
        return _Crew(size)


class ThreadEngine:
    """``Engine`` of one simulated device."""

    def __init__(self, rank: int, mesh: AbstractMesh, room: _Room):
        self.rank = rank
        self.mesh = mesh
        self.coordinates = engines.coordinates_of(rank, mesh)
        self._room = room
        self._groups: dict[tuple[str, ...], list[int]] = {}

    def exchange(self, kind: str, x: np.ndarray, axes: tuple[str, ...], **options: Any) -> np.ndarray:
        """See ``engine.Engine``."""
        group = self._groups.get(axes)
        if group is None:
            group = self._groups[axes] = engines.group_of(self.rank, self.mesh, axes)
        return self._room.meet(self.rank, group, _Call(kind, axes, options, np.asarray(x)))

    def gather(self, name: str, x: np.ndarray, members: Sequence[int]) -> np.ndarray:
        """The arrays that all of ``members`` give under ``name``, stacked."""
        call = _Call("all_gather", (name,), {"dim": 0, "tiled": False}, x)
        return self._room.meet(self.rank, list(members), call)


class _Call:
    """What one rank asks for."""

    __slots__ = ("axes", "kind", "options", "x")

    def __init__(self, kind: str, axes: tuple[str, ...], options: dict[str, Any], x: np.ndarray):
        self.kind, self.axes, self.options, self.x = kind, axes, options, x

    def agrees(self, other: _Call) -> bool:
        """Whether two ranks can exchange these."""
        return (
            (self.kind, self.axes, self.options) == (other.kind, other.axes, other.options)
            and self.x.shape == other.x.shape
            and self.x.dtype == other.x.dtype
        )

    def __str__(self) -> str:
        options = "".join(f", {k}={v}" for k, v in self.options.items())
        shape = ",".join(map(str, self.x.shape))
        return f"{self.kind}({dtypes.short_name(self.x.dtype)}[{shape}], axes={self.axes}{options})"


class _Meeting:
    """One exchange of one group, while it is under way."""

    __slots__ = ("calls", "group", "results")

    def __init__(self, group: list[int]):
        self.group = group
        self.calls: dict[int, _Call] = {}
        self.results: dict[int, np.ndarray] | None = None

    def run(self) -> dict[int, np.ndarray]:
        """What each rank gets; CollectiveError if they disagree."""
        first = self.calls[self.group[0]]
        for rank in self.group[1:]:
            if not first.agrees(self.calls[rank]):
                raise errors.CollectiveError(
                    f"ranks {self.group[0]} and {rank} do not exchange the same thing.",
                    where=source.here(),
                    why=f"rank {self.group[0]} is in {first}, rank {rank} in {self.calls[rank]}.",
                    fix="all ranks run one program, on shards of one shape; branch only on what all ranks agree on",
                )
        parts = [self.calls[rank].x for rank in self.group]
        return dict(zip(self.group, engines.exchanged(first.kind, parts, **first.options), strict=True))


class _Stopped(BaseException):
    """Ends a rank because another failed."""


class _Room:
    """Where the ranks of one program meet."""

    def __init__(self, mesh: AbstractMesh, deadline: float):
        self.size = mesh.size
        self.deadline = deadline
        self.changed = threading.Condition()
        self.open: dict[frozenset[int], _Meeting] = {}  # of a group: it has one at a time, as its ranks wait
        self.waiting: dict[int, _Meeting] = {}
        self.ended: set[int] = set()
        self.failure: BaseException | None = None

    def meet(self, rank: int, group: list[int], call: _Call) -> np.ndarray:
        """Exchange with the other ranks of ``group``."""
        key = frozenset(group)
        with self.changed:
            if self.failure is not None:
                raise _Stopped
            meeting = self.open.setdefault(key, _Meeting(group))
            meeting.calls[rank] = call
            if len(meeting.calls) < len(group):
                self.waiting[rank] = meeting
                self._check_progress()
                if not self.changed.wait_for(lambda: self._over(meeting), self.deadline):
                    self._fail(self._late(rank, meeting))
                if meeting.results is None:
                    raise _Stopped
                return meeting.results[rank]
            del self.open[key]
        results = meeting.run()
        with self.changed:
            meeting.results = results
            for other in group:
                self.waiting.pop(other, None)
            self.changed.notify_all()
        return results[rank]

    def leave(self, rank: int) -> None:
        """Note that a rank is done."""
        with self.changed:
            self.ended.add(rank)
            self._check_progress()

    def fail(self, error: BaseException) -> None:
        """End all ranks; the first error is the one that counts."""
        with self.changed:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self.changed.notify_all()

    def _over(self, meeting: _Meeting) -> bool:
        return meeting.results is not None or self.failure is not None

    def _check_progress(self) -> None:
        """Fail if no rank can go on: each of them waits or has ended."""
        if self.waiting and len(self.waiting) + len(self.ended) == self.size:
            states = [self._state_of(r) for r in range(self.size)]
            self._fail(
                errors.CollectiveError(
                    "ranks wait for one another, and none can go on.",
                    where=source.here(),
                    why="; ".join(states[:8]) + ".",
                    fix="all ranks make the same collectives in the same order; branch only on what all agree on",
                )
            )

    def _late(self, rank: int, meeting: _Meeting) -> errors.CollectiveError:
        absent = [r for r in meeting.group if r not in meeting.calls]
        return errors.CollectiveError(
            f"rank {rank} waited {self.deadline:g} s in {meeting.calls[rank]} for ranks {absent}.",
            where=source.here(),
            why="; ".join(self._state_of(r) for r in absent[:8]) + ".",
        )

    def _state_of(self, rank: int) -> str:
        if rank in self.ended:
            return f"rank {rank} has ended"
        meeting = self.waiting.get(rank)
        if meeting is None:
            return f"rank {rank} computes"
        return f"rank {rank} is in {meeting.calls[rank]}"
