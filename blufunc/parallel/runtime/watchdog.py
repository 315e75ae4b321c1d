"""The watchdog of a rank: no rank waits for ever for one that will not come.

Parallel, beside stage 8. An engine writes every collective into the ``Recorder``; the thread of the ``Watchdog`` ends
the process when a collective is not over within its deadline, when another rank has failed, or when the communication
library reports an error. It prints what this rank was doing, and exits with ``ABORTED``: a rank that is inside a
library of communication cannot be ended in a gentler way.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from blufunc.core.ir import source
from blufunc.parallel.runtime import store

ABORTED = 113
"""The exit code of a rank that ended because of another."""

PATIENCE = 2.0
"""The seconds that a collective may still take after a rank that takes part in it has ended."""

_SLOT = 512  # bytes of the file of a recorder
_TICK = 0.2  # seconds between two looks at the time


class Record:
    """One collective of this rank.

    Attributes:
      sequence: its number, from 1, in the order in which the rank began them.
      operation, axes, nbytes: the exchange, the axes of the mesh, and the bytes that the rank gives.
      group: the ranks that take part.
      line: the user's line.
      began: when (``time.monotonic``).
    """

    __slots__ = ("axes", "began", "group", "line", "nbytes", "operation", "over", "sequence")

    def __init__(self, sequence: int, operation: str, axes: Sequence[str], nbytes: int, group: Sequence[int]):
        self.sequence, self.operation, self.axes, self.nbytes = sequence, operation, tuple(axes), nbytes
        self.group = group
        self.line = source.replay.line or source.current()
        self.began = time.monotonic()
        self.over: Callable[[], bool] | None = None  # None: not yet

    def is_over(self) -> bool:
        """Whether the rank is through with it."""
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
      path: a file that always holds the last one, for whoever must tell what a killed process was doing.
      keep: how many are remembered.
    """

    def __init__(self, path: str | None = None, keep: int = 8):
        self._numbers = itertools.count(1)
        self.records: deque[Record] = deque(maxlen=keep)
        self._open: deque[Record] = deque()  # not known to be over, oldest first
        self._slot = _mapped(path) if path else None

    @contextlib.contextmanager
    def during(
        self, operation: str, axes: Sequence[str], nbytes: int, group: Sequence[int] = ()
    ) -> Iterator[Record]:
        """Context manager: the collective takes as long as the block."""
        record = self.begin(operation, axes, nbytes, group)
        try:
            yield record
        except BaseException:
            self.give_up(record)
            raise
        self.end(record)

    def begin(self, operation: str, axes: Sequence[str], nbytes: int, group: Sequence[int] = ()) -> Record:
        """Note that the rank begins a collective, with the user's line that is being run."""
        record = Record(next(self._numbers), operation, axes, nbytes, group)
        self.records.append(record)
        self._open.append(record)
        self._write(record, "in")
        return record

    def end(self, record: Record, over: Callable[[], bool] = _yes) -> None:
        """Note that it is over, or that ``over()`` will tell: whether what was put on a stream has passed."""
        record.over = over
        self.pending()
        if over is _yes:
            self._write(record, "after")

    def give_up(self, record: Record) -> None:
        """Note that it raised: nobody waits in it any more. The file keeps it as what the rank was in."""
        record.over = _yes
        self.pending()

    def pending(self) -> Record | None:
        """The oldest collective that is not over."""
        while self._open:
            record = self._open[0]
            if not record.is_over():
                return record
            with contextlib.suppress(IndexError):  # the watchdog and the program may both drop it
                if self._open[0] is record:
                    self._open.popleft()
        return None

    def summary(self) -> str:
        """What the rank is in, or was in last."""
        record = self.pending()
        if record is not None:
            return f"in {record}, for {time.monotonic() - record.began:.1f} s"
        return f"after {self.records[-1]}" if self.records else "before its first collective"

    def table(self) -> str:
        """The last collectives, one a line."""
        return "\n".join(f"  {r}{'' if r.is_over() else '  <- not over'}" for r in tuple(self.records))

    def _write(self, record: Record, state: str) -> None:
        if self._slot is not None:
            text = f"{record.sequence}\t{state} {record}".encode()[:_SLOT]
            self._slot[:_SLOT] = text.ljust(_SLOT, b"\0")


def _mapped(path: str) -> mmap.mmap:
    """Memory that outlives the process: a signal that cannot be caught does not lose what was written."""
    with open(path, "w+b") as file:
        file.truncate(_SLOT)
        return mmap.mmap(file.fileno(), _SLOT)


def last_record(path: str) -> tuple[int, str]:
    """The number and the text of what the recorder that wrote the file was in; (0, ...) if in none yet."""
    try:
        with open(path, "rb") as file:
            number, _, text = file.read().rstrip(b"\0").decode(errors="replace").partition("\t")
    except OSError:
        number, text = "", ""
    return (int(number), text) if number.isdigit() else (0, "before its first collective")


class Watchdog:
    """The thread that ends this process when it would wait in vain.

    Args:
      rank: who is watched.
      connection: a connection of ``store.watch``; None for a rank that is alone.
      recorder: where the engine writes.
      deadline: the seconds that a collective may take.
      exit: what ends the process; tests give another.

    Attributes:
      checks: functions that return what is wrong with the communication, or None; looked at several times a second.
      aborts: functions that make libraries give up, called before the process ends.
    """

    def __init__(
        self,
        rank: int,
        connection: socket.socket | None,
        recorder: Recorder,
        *,
        deadline: float,
        exit: Callable[[int], Any] = os._exit,
    ):
        self.rank, self.recorder, self.deadline = rank, recorder, deadline
        self.checks: list[Callable[[], str | None]] = []
        self.aborts: list[Callable[[], Any]] = []
        self._connection = connection
        self._exit = exit
        self._ended: dict[int, float] = {}  # other ranks, and when they ended
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blufunc watchdog", daemon=True)
        self._thread.start()

    def fail(self, why: str) -> None:
        """Tell all other ranks that this one has failed."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                store.send(self._connection, "fail", why)

    def close(self) -> None:
        """Stop watching, and say goodbye."""
        self._stop.set()
        self._thread.join()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                store.send(self._connection, "bye")
                self._connection.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            why = self._heard() or self._late() or self._checked()
            if why is not None and not self._stop.is_set():
                self._end(why)
                return

    def _heard(self) -> str | None:
        """What the store says, after waiting for a tick."""
        if self._connection is None:
            self._stop.wait(_TICK)
            return None
        if not select.select([self._connection], [], [], _TICK)[0]:
            return None
        match store.receive(self._connection):
            case ["abort", str(why)]:
                self._stop.wait(_TICK)  # this rank may be about to report the same error by itself
                return why
            case ["ended", int(rank)]:
                self._ended[rank] = time.monotonic()
                return None
        return "the store of the job is gone: rank 0, or the launcher, which keeps it, has died"

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
