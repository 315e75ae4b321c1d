"""The watchdog of a rank: it ends the process instead of letting it hang.

Parallel, during stage 8. In: collectives that an engine logs in the ``Recorder``, messages of the store. Out: an exit
with ``ABORTED``, if a collective misses its deadline, another rank has failed, or the communication library reports an
error. It prints what this rank was doing. A hung communication library cannot be interrupted more gently.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from blufunc.core.ir import source
from blufunc.parallel.runtime.store import Store

ABORTED = 113
"""Exit code of a rank that ended because of another."""

STOPPED = 75
"""Exit code of a process that saved its state when asked to end: EX_TEMPFAIL."""

PATIENCE = 2.0
"""Seconds that a collective may still take after one of its ranks has ended."""

_SLOT = 512  # bytes of a recorder's file
_TICK = 0.2  # seconds between checks
_BEAT = 10.0  # seconds between signs of life, at most: a fifth of the deadline


class Record:
    """One collective of this rank.

    Attributes:
        sequence: its number, from 1, in the order of begin.
        operation, axes, nbytes: the collective, its mesh axes, and the bytes that this rank sends.
        group: the ranks that take part.
        line: the user's line.
        began: time of begin (``time.monotonic``).
    """

    __slots__ = ("axes", "began", "group", "line", "nbytes", "operation", "over", "sequence")

    def __init__(self, sequence: int, operation: str, axes: Sequence[str], nbytes: int, group: Sequence[int]):
        self.sequence, self.operation, self.axes, self.nbytes = sequence, operation, tuple(axes), nbytes
        self.group = group
        self.line = source.replay.line or source.current()
        self.began = time.monotonic()
        self.over: Callable[[], bool] | None = None  # None: not yet

    def is_over(self) -> bool:
        """True if the rank has completed it."""
        return self.over is not None and self.over()

    def __str__(self) -> str:
        return (
            f"#{self.sequence} {self.operation} over {', '.join(self.axes)}, {self.nbytes:,} bytes, "
            f"at {source.summary(self.line)}"
        )


def _yes() -> bool:
    return True


class Recorder:
    """The last collectives of this rank.

    Args:
        path: a file that always holds the last record, to diagnose a killed process.
        keep: the number of records to keep.
    """

    def __init__(self, path: str | None = None, keep: int = 8):
        self._numbers = itertools.count(1)
        self.records: deque[Record] = deque(maxlen=keep)
        self._open: deque[Record] = deque()  # possibly pending, oldest first
        self._slot = _mapped(path) if path else None

    @contextlib.contextmanager
    def during(
        self, operation: str, axes: Sequence[str], nbytes: int, group: Sequence[int] = ()
    ) -> Iterator[Record]:
        """Context manager: record a collective that lasts for the block."""
        record = self.begin(operation, axes, nbytes, group)
        try:
            yield record
        except BaseException:
            self.give_up(record)
            raise
        self.end(record)

    def begin(self, operation: str, axes: Sequence[str], nbytes: int, group: Sequence[int] = ()) -> Record:
        """Record that a collective begins, with the user's current line."""
        record = Record(next(self._numbers), operation, axes, nbytes, group)
        self.records.append(record)
        self._open.append(record)
        self._write(record, "in")
        return record

    def end(self, record: Record, over: Callable[[], bool] = _yes) -> None:
        """Record the end of a collective, or a function ``over()`` that polls for it."""
        record.over = over
        self.pending()
        if over is _yes:
            self._write(record, "after")

    def give_up(self, record: Record) -> None:
        """Record that a collective raised. The file keeps it as the last one."""
        record.over = _yes
        self.pending()

    def pending(self) -> Record | None:
        """The oldest pending collective."""
        while self._open:
            record = self._open[0]
            if not record.is_over():
                return record
            with contextlib.suppress(IndexError):  # watchdog and program may race to drop it
                if self._open[0] is record:
                    self._open.popleft()
        return None

    def summary(self) -> str:
        """The pending collective, or the last one."""
        record = self.pending()
        if record is not None:
            return f"in {record}, for {time.monotonic() - record.began:.1f} s"
        return f"after {self.records[-1]}" if self.records else "before its first collective"

    def table(self) -> str:
        """The last collectives, one per line."""
        return "\n".join(f"  {r}{'' if r.is_over() else '  <- not over'}" for r in tuple(self.records))

    def _write(self, record: Record, state: str) -> None:
        if self._slot is not None:
            text = f"{record.sequence}\t{state} {record}".encode()[:_SLOT]
            self._slot[:_SLOT] = text.ljust(_SLOT, b"\0")


def _mapped(path: str) -> mmap.mmap:
    """Map a file, whose contents survive a signal that cannot be caught."""
    with open(path, "w+b") as file:
        file.truncate(_SLOT)
        return mmap.mmap(file.fileno(), _SLOT)


def last_record(path: str) -> tuple[int, str]:
    """Index and text of a recorder's last record; (0, ...) if there is none."""
    try:
        with open(path, "rb") as file:
            number, _, text = file.read().rstrip(b"\0").decode(errors="replace").partition("\t")
    except OSError:
        number, text = "", ""
    return (int(number), text) if number.isdigit() else (0, "before its first collective")


class Watchdog:
    """A thread that ends this process instead of letting it hang.

    Args:
      rank: the rank of this process.
      store: the connection of this rank, which has joined; None for a single rank.
      recorder: the log of the engine.
      deadline: seconds that a collective may take.
      exit: ends the process; replaced in tests.

    Attributes:
      checks: functions that return a communication error, or None; polled several times a second.
      aborts: functions that abort communication libraries, called before the process ends.
    """

    def __init__(
        self,
        rank: int,
        store: Store | None,
        recorder: Recorder,
        *,
        deadline: float,
        exit: Callable[[int], Any] = os._exit,
    ):
        self.rank, self.recorder, self.deadline = rank, recorder, deadline
        self.checks: list[Callable[[], str | None]] = []
        self.aborts: list[Callable[[], Any]] = []
        self._store = store
        self._exit = exit
        self._beat = 0.0  # time of the last sign of life
        self._ended: dict[int, float] = {}  # end times of other ranks
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blufunc watchdog", daemon=True)
        self._thread.start()

    def fail(self, why: str) -> None:
        """Report to all other ranks that this one has failed."""
        if self._store is not None:
            self._store.fail(why)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            why = self._heard() or self._late() or self._checked()
            if why is not None and not self._stop.is_set():
                self._end(why)
                return

    def _heard(self) -> str | None:
        """A failure that the store reports, after waiting for a tick."""
        if self._store is None:
            self._stop.wait(_TICK)
            return None
        if time.monotonic() - self._beat > min(_BEAT, self.deadline / 5):
            self._beat = time.monotonic()
            self._store.beat()
        match self._store.event(_TICK):
            case None:
                return None
            case ["abort", str(why)]:
                self._stop.wait(_TICK)  # this rank may be about to raise the same error
                return why
            case ["ended", int(rank)]:
                self._ended[rank] = time.monotonic()
                return None
        return "the store of the job is gone: rank 0, or the launcher, which runs it, has died"

    def _late(self) -> str | None:
        record = self.recorder.pending()
        if record is None:
            return None
        now = time.monotonic()
        waited = now - record.began
        gone = [r for r in record.group if r in self._ended and now - self._ended[r] > PATIENCE]
        if gone and waited > PATIENCE:
            why = f"rank {self.rank} waits in {record} for rank {gone[0]}, whose program has ended"
        elif waited > self.deadline:
            why = (
                f"rank {self.rank} has waited {waited:.0f} s in {record}: a rank is stuck, slow, or elsewhere"
            )
        else:
            return None
        self.fail(why)
        return why

    def _checked(self) -> str | None:
        for check in self.checks:
            what = check()
            if what is not None:
                why = f"rank {self.rank}: {what}, {self.recorder.summary()}"
                self.fail(why)
                return why
        return None

    def _end(self, why: str) -> None:
        lines = [f"blufunc: rank {self.rank} ends, as {why.rstrip('.')}."]
        lines.append(f"blufunc: rank {self.rank} was {self.recorder.summary()}. Its last collectives:")
        lines.append(self.recorder.table() or "  none")
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()
        for abort in self.aborts:  # a library may hang in this too
            thread = threading.Thread(target=abort, daemon=True)
            thread.start()
            thread.join(2.0)
        self._exit(ABORTED)
