"""A key-value store over TCP: how the processes of a job find each other and agree, before they have an engine.

Parallel, before stage 3. ``StoreServer`` is kept by the launcher, or by rank 0; every rank has a ``Store``, and a
``watch`` connection over which it learns that another rank has died. A message is a length and a JSON list: nothing
that is received is ever run. For identifiers, digests and last words, not for arrays.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors

DEADLINE = 300.0
"""The seconds that a rank waits for what another must say."""

_LONGEST = 1 << 26  # bytes of a message: more is not ours
_LENGTH = struct.Struct(">I")


def send(connection: socket.socket, *message: Any) -> None:
    """Send one message."""
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> list[Any] | None:
    """The next message, or None where the other end has closed, or is gone."""
    try:
        head = _read(connection, _LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        data = _read(connection, length) if length <= _LONGEST else None
        return None if data is None else json.loads(data)
    except (OSError, ValueError):
        return None


def _read(connection: socket.socket, n: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < n:
        part = connection.recv(n - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _tuned(connection: socket.socket) -> socket.socket:
    """A connection whose small messages go at once, and that notices within half a minute that a host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


class StoreServer:
    """The store itself: a thread for each connection.

    A rank that leaves its ``watch`` connection without a goodbye has failed: whoever waits is told at once.

    Args:
      host: the address to listen at; "" for all of this machine's.
      port: the port; 0 for any that is free.
    Raises:
      CollectiveError: the port is taken, or the address is not of this machine.

    Attributes:
      port: the port that it listens at.
      failure: what ended the job, once something has.
      died: the rank whose end without a word that was.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        try:
            self._listener = socket.create_server((host, port), backlog=1024)
        except OSError as e:
            raise errors.CollectiveError(
                f"the store of the job cannot listen at {host or '*'}:{port}: {e.strerror or e}.",
                fix="another port: BLUFUNC_PORT=... for all ranks",
            ) from e
        self.port: int = self._listener.getsockname()[1]
        self.failure: str | None = None
        self.died: int | None = None
        self._values: dict[str, str] = {}
        self._gathers: dict[str, dict[int, str]] = {}
        self._taken: dict[str, int] = {}  # how many have got the result of each gather
        self._watchers: dict[int, socket.socket] = {}
        self._names: dict[int, str] = {}  # the process that each of them is
        self._gone: list[int] = []  # the ranks that have said goodbye
        self._changed = threading.Condition()
        self._telling = threading.Lock()  # messages to one watcher come from several threads
        self._closed = False
        threading.Thread(target=self._accept, name="blufunc store", daemon=True).start()

    def fail(self, text: str, died: int | None = None) -> None:
        """End the job: all who wait are told, and all who watch. The first failure is the one that counts."""
        with self._changed:
            if self.failure is not None or self._closed:
                return
            self.failure, self.died = text, died
            self._changed.notify_all()
            watchers = list(self._watchers.values())
        self._tell(watchers, "abort", text)

    def hear_out(self, rank: int, seconds: float) -> None:
        """Wait, at most that long, until all that a process said which has ended has come here: its last words too."""
        with self._changed:
            self._wait_for(lambda: rank not in self._watchers or self.failure is not None, seconds)

    def close(self, seconds: float = 0.0) -> None:
        """Stop, after waiting that long for those who still watch to say goodbye."""
        with self._changed:
            self._wait_for(lambda: not self._watchers or self.failure is not None, seconds)
            self._closed = True
        # without the shutdown the thread in accept() keeps the port
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(_tuned(connection),), name="blufunc store", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while (message := receive(connection)) is not None:
                match message:
                    case ["set", str(key), str(value)]:
                        with self._changed:
                            self._values[key] = value
                            self._changed.notify_all()
                        send(connection, "ok")
                    case ["get", str(key), float(seconds)]:
                        send(connection, *self._get(key, seconds))
                    case ["gather", str(key), int(place), str(value), int(count), float(seconds)]:
                        send(connection, *self._gather(key, place, value, count, seconds))
                    case ["watch", int(rank), str(name)]:
                        return self._watch(connection, rank, name)
                    case _:
                        return None

    def _wait_for(self, predicate: Callable[[], bool], seconds: float) -> None:
        """Wait, at most that long; locks take no more seconds than some."""
        self._changed.wait_for(predicate, min(seconds, threading.TIMEOUT_MAX))

    def _get(self, key: str, seconds: float) -> tuple[Any, ...]:
        with self._changed:
            self._wait_for(lambda: key in self._values or self.failure is not None, seconds)
            if key in self._values:
                return "value", self._values[key]
            return ("failed", self.failure) if self.failure is not None else ("late", [])

    def _gather(self, key: str, place: int, value: str, count: int, seconds: float) -> tuple[Any, ...]:
        with self._changed:
            given = self._gathers.setdefault(key, {})
            given[place] = value
            self._changed.notify_all()
            self._wait_for(lambda: len(given) == count or self.failure is not None, seconds)
            if len(given) < count:
                absent = [i for i in range(count) if i not in given]
                return ("failed", self.failure) if self.failure is not None else ("late", absent)
            self._taken[key] = self._taken.get(key, 0) + 1
            if self._taken[key] == count:
                del self._gathers[key], self._taken[key]
            return "value", [given[i] for i in range(count)]

    def _watch(self, connection: socket.socket, rank: int, name: str) -> None:
        with self._changed:
            with contextlib.suppress(OSError):  # one that is gone already is registered: it has died
                send(connection, "watching")  # first, as the lock lets nobody else send here yet
            other = self._names.setdefault(rank, name)
            if other == name:
                self._watchers[rank] = connection
            gone, failure = tuple(self._gone), self.failure
        if other != name:
            self.fail(f"two processes say that they are rank {rank}: {other}, and {name}.")
            self._tell([connection], "abort", str(self.failure))
            return
        for other in gone:
            self._tell([connection], "ended", other)
        if failure is not None:
            self._tell([connection], "abort", failure)
        bye = False
        while not bye and (message := receive(connection)) is not None:
            if message[0] == "fail":
                self.fail(message[1])
            bye = message[0] == "bye"
        with self._changed:
            if self._watchers.get(rank) is connection:
                del self._watchers[rank], self._names[rank]
            self._gone += [rank] * bye
            self._changed.notify_all()
            others = list(self._watchers.values())
        if bye:
            self._tell(others, "ended", rank)
        else:
            self.fail(f"rank {rank} ({name}) has died: it ended without a word.", rank)

    def _tell(self, watchers: Sequence[socket.socket], *message: Any) -> None:
        for connection in watchers:
            with self._telling, contextlib.suppress(OSError):
                send(connection, *message)


class Store:
    """A rank's connection to the store of its job. Threads may share it: they take turns.

    Args:
      host, port: where the server listens; it is tried until ``deadline``, as it may not have started yet.
      deadline: the seconds to wait for the server, and for what others say.
    Raises:
      CollectiveError: no server answers; the same of all methods: the server is gone, the job has failed, or what
        is waited for does not come within ``deadline``.

    Attributes:
      failed: whether it has said that another rank failed.
    """

    def __init__(self, host: str, port: int, *, deadline: float = DEADLINE):
        self.host, self.port, self.deadline = host, port, deadline
        self._lock = threading.Lock()
        self.failed = False
        self._rounds: dict[str, int] = {}
        self._connection = self._connect()

    def _connect(self) -> socket.socket:
        end, pause = time.monotonic() + self.deadline, 0.01
        while True:
            try:
                connection = socket.create_connection((self.host, self.port), timeout=5)
            except OSError as e:
                if time.monotonic() + pause > end:
                    raise errors.CollectiveError(
                        f"no store of the job answers at {self.host}:{self.port} within {self.deadline:g} s: {e}.",
                        why="rank 0, or the launcher, keeps it: it has not started, has ended, or listens elsewhere.",
                        fix="check MASTER_ADDR, MASTER_PORT and BLUFUNC_PORT: all ranks need the same",
                    ) from e
                time.sleep(pause)
                pause = min(2 * pause, 0.5)
            else:
                connection.settimeout(None)
                return _tuned(connection)

    def set(self, key: str, value: bytes) -> None:
        """Keep ``value`` under ``key``."""
        self._ask(f"the key {key!r}", "set", key, _text(value))

    def get(self, key: str, *, deadline: float | None = None) -> bytes:
        """The value of ``key``; waits until somebody sets it."""
        seconds = self.deadline if deadline is None else deadline
        return base64.b64decode(self._ask(f"the key {key!r}", "get", key, float(seconds), seconds=seconds))

    def wait(self, keys: Sequence[str], *, deadline: float | None = None) -> None:
        """Return when all ``keys`` are set."""
        end = time.monotonic() + (self.deadline if deadline is None else deadline)
        for key in keys:
            self.get(key, deadline=max(0.0, end - time.monotonic()))

    def gather(
        self, name: str, value: bytes, rank: int, members: Sequence[int], *, deadline: float | None = None
    ) -> list[bytes]:
        """The values that all ranks of ``members`` give under ``name``, in that order; waits for them.

        A name may be used again: the n-th call of one rank meets the n-th calls of the others.
        """
        seconds = self.deadline if deadline is None else deadline
        key = f"{name} of {','.join(map(str, members))}"
        turn = self._rounds[key] = self._rounds.get(key, 0) + 1
        got = self._ask(
            f"{name!r}",
            "gather",
            f"{key} #{turn}",
            members.index(rank),
            _text(value),
            len(members),
            float(seconds),
            seconds=seconds,
            members=members,
        )
        return [base64.b64decode(v) for v in got]

    def barrier(self, name: str, rank: int, members: Sequence[int], *, deadline: float | None = None) -> None:
        """Return when all ranks of ``members`` have called it."""
        self.gather(f"barrier {name}", b"", rank, members, deadline=deadline)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ask(self, what: str, *message: Any, seconds: float = math.nan, members: Sequence[int] = ()) -> Any:
        answer = None
        with self._lock, contextlib.suppress(OSError):
            send(self._connection, *message)
            answer = receive(self._connection)
        if answer is None:
            self.failed = True
            raise errors.CollectiveError(
                f"the store of the job at {self.host}:{self.port} is gone.",
                why="whoever keeps it, rank 0 or the launcher, has ended.",
            )
        if answer[0] == "failed":
            self.failed = True
            raise errors.CollectiveError(f"the job has failed: {answer[1]}")
        if answer[0] == "late":
            late = [members[i] for i in answer[1]]
            raise errors.CollectiveError(
                f"waited {seconds:g} s for {what}"
                + (f", for which rank{'s' * (len(late) > 1)} {_listed(late)} did not come." if late else "."),
                why="a rank is stuck, slow, or runs another program.",
                fix="a longer deadline, if it is only slow: BLUFUNC_DEADLINE=seconds",
            )
        return answer[1] if len(answer) > 1 else None


def watch(host: str, port: int, rank: int, name: str, *, deadline: float) -> socket.socket:
    """A connection on which the server says ``["abort", why]`` when a rank fails, ``["ended", rank]`` when one ends.

    The rank sends ``"fail", why`` to end the job, and ``"bye"`` before it closes the connection. From the return of
    this function on the server knows of the rank, and takes a silent end of the connection for its death.

    Args:
      rank, name: who watches, for messages about its own end.
    Raises:
      CollectiveError: no server answers.
    """
    store = Store(host, port, deadline=deadline)
    store._ask("the watch over the job", "watch", rank, name)
    return store._connection


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
