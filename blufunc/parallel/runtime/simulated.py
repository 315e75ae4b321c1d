"""Simulated devices: the ranks of a mesh as threads of one process.

Parallel, used at stage 8. In: a mesh and a function of the rank. Out: the results of all ranks. Threads synchronize in
a ``_Rendezvous``: the last rank of a group to arrive computes the results of all (``engine.reference``, in rank order,
so that results are deterministic). No program hangs: when all running ranks wait for one another, one failed, or one is
late, all of them end with an error that tells where each waits.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.ir import source
from blufunc.parallel.mesh import simulated_network
from blufunc.parallel.runtime import engine as engines

if TYPE_CHECKING:
    from blufunc.parallel.mesh.mesh import AbstractMesh

DEADLINE = 300.0
"""Seconds that a rank waits for another one that still computes."""


def run_ranks(mesh: AbstractMesh, function: Callable[[int], Any], *, deadline: float = DEADLINE) -> list[Any]:
    """Run ``function(rank)`` for all ranks of ``mesh``, in threads with engines.

    Args:
      mesh: a mesh, abstract or not.
      function: the program of a rank; its collectives synchronize with the other ranks.
      deadline: seconds that a rank waits for another.
    Returns:
      the results, in rank order.
    Raises:
      CollectiveError: ranks do not arrive, or call different collectives.
      any error of a rank; the others then end at their next collective.
    """
    rendezvous = _Rendezvous(mesh, deadline)
    results: list[Any] = [None] * mesh.size
    line = source.replay.line or source.current()

    def run(rank: int) -> None:
        source.replay.line = line  # errors of a rank are reported at the line that runs the program
        try:
            with engines.use(ThreadEngine(rank, mesh, rendezvous)):
                results[rank] = function(rank)
        except _Stopped:
            pass
        except BaseException as e:
            rendezvous.fail(e)
        else:
            rendezvous.leave(rank)

    pool = _pool_of(mesh.size)
    try:
        flags = config.own_values()
        pool.run(run if not flags else lambda rank: _with_flags(flags, run, rank))
    except BaseException as e:  # an interrupt: release the ranks that wait
        rendezvous.fail(e)
        pool.dismiss()
        raise
    _idle.setdefault(mesh.size, []).append(pool)
    if rendezvous.failure is not None:
        raise rendezvous.failure
    return results


def _with_flags(flags: dict[str, Any], run: Callable[[int], None], rank: int) -> None:
    """Run a rank with the flags of the blocks around the program."""
    with config.overridden(**flags):
        run(rank)


class _ThreadPool:
    """One waiting thread per rank: starting threads is slower than small programs."""

    def __init__(self, size: int):
        self._work: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(size)]
        self._running = 0
        self._lock = threading.Lock()
        self._done = threading.Semaphore(0)
        for rank, work in enumerate(self._work):
            threading.Thread(target=self._serve, args=(rank, work), name=f"rank {rank}", daemon=True).start()

    def run(self, function: Callable[[int], None]) -> None:
        """Run ``function(rank)``, which raises nothing, in all threads, and wait for them."""
        self._running = len(self._work)
        for work in self._work:
            work.put(function)
        self._done.acquire()

    def dismiss(self) -> None:
        """End the threads after their current work."""
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


_idle: dict[int, list[_ThreadPool]] = {}  # by size; a running pool is not in here, so that runs may nest
os.register_at_fork(after_in_child=_idle.clear)  # threads do not survive a fork


def _pool_of(size: int) -> _ThreadPool:
    try:
        return _idle[size].pop()
    except (KeyError, IndexError):
        return _ThreadPool(size)


class ThreadEngine(engines.Engine):
    """``Engine`` of one simulated device."""

    def __init__(self, rank: int, mesh: AbstractMesh, rendezvous: _Rendezvous):
        super().__init__(rank, mesh)
        self._rendezvous = rendezvous

    def collective(self, kind: str, x: np.ndarray, axes: tuple[str, ...], **options: Any) -> np.ndarray:
        group, call = self.group(axes), _Call(kind, axes, options, np.asarray(x))
        found = self._rendezvous.synchronize(self.rank, group, call)
        simulated_network.wait(kind, call.x.nbytes, group, self.mesh.size, **options)
        return found

    def gather(self, name: str, x: np.ndarray, members: Sequence[int]) -> np.ndarray:
        """Gather the arrays of ``members`` under ``name``, stacked."""
        call = _Call("all_gather", (name,), {"dim": 0}, x[None])
        return self._rendezvous.synchronize(self.rank, list(members), call)


class _Call(NamedTuple):
    """The collective that one rank calls."""

    kind: str
    axes: tuple[str, ...]
    options: dict[str, Any]
    x: np.ndarray

    @property
    def type(self) -> tuple:
        """The properties that must be equal on all ranks."""
        return self.kind, self.axes, self.options, self.x.shape, self.x.dtype

    def __str__(self) -> str:
        return engines.described(self.kind, self.x, self.axes, self.options)


class _Pending:
    """A pending collective of one group."""

    __slots__ = ("calls", "group", "results")

    def __init__(self, group: list[int]):
        self.group = group
        self.calls: dict[int, _Call] = {}
        self.results: dict[int, np.ndarray] | None = None

    def run(self) -> dict[int, np.ndarray]:
        """The result of each rank; CollectiveError if the calls differ."""
        first = self.calls[self.group[0]]
        for rank in self.group[1:]:
            if self.calls[rank].type != first.type:
                raise engines.disagreement(
                    f"ranks {self.group[0]} and {rank} call different collectives.",
                    [(r, str(self.calls[r])) for r in (self.group[0], rank)],
                )
        parts = [self.calls[rank].x for rank in self.group]
        return dict(zip(self.group, engines.reference(first.kind, parts, **first.options), strict=True))


class _Stopped(BaseException):
    """Ends a rank because another failed."""


class _Rendezvous:
    """The rendezvous of the ranks of one program."""

    def __init__(self, mesh: AbstractMesh, deadline: float):
        self.size = mesh.size
        self.deadline = deadline
        self.changed = threading.Condition()
        self.open: dict[frozenset[int], _Pending] = {}  # by group; one at a time, as its ranks wait
        self.waiting: dict[int, _Pending] = {}
        self.ended: set[int] = set()
        self.failure: BaseException | None = None

    def synchronize(self, rank: int, group: list[int], call: _Call) -> np.ndarray:
        """Run a collective with the other ranks of ``group``."""
        key = frozenset(group)
        with self.changed:
            if self.failure is not None:
                raise _Stopped
            pending = self.open.setdefault(key, _Pending(group))
            pending.calls[rank] = call
            if len(pending.calls) < len(group):
                self.waiting[rank] = pending
                self._check_progress()
                if not self.changed.wait_for(lambda: self._over(pending), self.deadline):
                    self._fail(self._late(rank, pending))
                if pending.results is None:
                    raise _Stopped
                return pending.results[rank]
            del self.open[key]
        results = pending.run()
        with self.changed:
            pending.results = results
            for other in group:
                self.waiting.pop(other, None)
            self.changed.notify_all()
        return results[rank]

    def leave(self, rank: int) -> None:
        """Record that a rank is done."""
        with self.changed:
            self.ended.add(rank)
            self._check_progress()

    def fail(self, error: BaseException) -> None:
        """End all ranks; the first error is raised."""
        with self.changed:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self.changed.notify_all()

    def _over(self, pending: _Pending) -> bool:
        return pending.results is not None or self.failure is not None

    def _check_progress(self) -> None:
        """Fail if no rank can proceed: each of them waits or has ended."""
        if self.waiting and len(self.waiting) + len(self.ended) == self.size:
            states = [self._state_of(r) for r in range(self.size)]
            self._fail(
                errors.CollectiveError(
                    "deadlock: ranks wait for one another.",
                    where=source.here(),
                    why="; ".join(states[:8]) + ".",
                    fix="all ranks make the same collectives in the same order; branch only on what all agree on",
                )
            )

    def _late(self, rank: int, pending: _Pending) -> errors.CollectiveError:
        absent = [r for r in pending.group if r not in pending.calls]
        return errors.CollectiveError(
            f"rank {rank} waited {self.deadline:g} s in {pending.calls[rank]} for ranks {absent}.",
            where=source.here(),
            why="; ".join(self._state_of(r) for r in absent[:8]) + ".",
        )

    def _state_of(self, rank: int) -> str:
        if rank in self.ended:
            return f"rank {rank} has ended"
        pending = self.waiting.get(rank)
        if pending is None:
            return f"rank {rank} computes"
        return f"rank {rank} is in {pending.calls[rank]}"
