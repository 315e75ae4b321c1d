"""A store over TCP, through which processes that have no engine yet gather values.

Parallel, before stage 3. In: short byte strings of each rank. Out: those of the others. The launcher or rank 0 runs the
``StoreServer``; every rank has a ``Store``, and a ``watch`` connection that reports the death of other ranks. A message
is a length and a JSON list, and never executed. For identifiers, digests and error messages, not for arrays.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors

DEADLINE = 300.0
"""Seconds that a rank waits for another one's value."""

_LONGEST = 1 << 26  # maximum bytes of a message; a longer one is from another program
_LENGTH = struct.Struct(">I")


def send(connection: socket.socket, *message: Any) -> None:
    """Send one message."""
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> list[Any] | None:
    """Receive a message; None if the other end has closed or died."""
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
    """Disable Nagle's algorithm, and detect within half a minute that a host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # not on all systems
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


class StoreServer:
    """The server of the store, with a thread per connection.

    A rank that drops its ``watch`` connection without a goodbye has failed: all waiting ranks are told at once.

    Args:
      host: the address to listen on; "" for all interfaces.
      port: the port; 0 for any free one.
    Raises:
      CollectiveError: the port is taken, or the address is not local.

    Attributes:
      port: the port it listens on.
      failure: the reason for the end of the job, or None.
      died: the rank that died without a message, or None.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        try:
            self._listener = socket.create_server((host, port), backlog=1024)
        except OSError as e:
            raise errors.CollectiveError(
                f"the store of the job cannot listen on {host or '*'}:{port}: {e.strerror or e}.",
                fix="another port: BLUFUNC_PORT=... for all ranks",
            ) from e
        self.port: int = self._listener.getsockname()[1]
        self.failure: str | None = None
        self.died: int | None = None
        self._gathers: dict[str, dict[int, str]] = {}
        self._taken: dict[str, int] = {}  # ranks that have received the result of each gather
        self._watchers: dict[int, socket.socket] = {}
        self._names: dict[int, str] = {}  # the name of each rank's process
        self._gone: list[int] = []  # the ranks that have said goodbye
        self._changed = threading.Condition()
        self._telling = threading.Lock()  # several threads send to one watcher
        self._closed = False
        threading.Thread(target=self._accept, name="blufunc store", daemon=True).start()

    def fail(self, text: str, died: int | None = None) -> None:
        """End the job: notify all who wait or watch. The first failure counts."""
        with self._changed:
            if self.failure is not None or self._closed:
                return
            self.failure, self.died = text, died
            self._changed.notify_all()
            watchers = list(self._watchers.values())
        self._tell(watchers, "abort", text)

    def hear_out(self, rank: int, seconds: float) -> None:
        """Wait up to ``seconds`` for the remaining messages of a process that has ended."""
        with self._changed:
            self._wait_for(lambda: rank not in self._watchers or self.failure is not None, seconds)

    def close(self, seconds: float = 0.0) -> None:
        """Stop, after waiting up to ``seconds`` for watchers to say goodbye."""
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
                    case ["gather", str(key), int(place), str(value), int(count), float(seconds)]:
                        send(connection, *self._gather(key, place, value, count, seconds))
                    case ["watch", int(rank), str(name)]:
                        return self._watch(connection, rank, name)
                    case _:
                        return None

    def _wait_for(self, predicate: Callable[[], bool], seconds: float) -> None:
        """Wait up to ``seconds``, capped at the maximum that locks accept."""
        self._changed.wait_for(predicate, min(seconds, threading.TIMEOUT_MAX))

    def _gather(self, key: str, place: int, value: str, count: int, seconds: float) -> tuple[Any, ...]:
        with self._changed:
            values = self._gathers.setdefault(key, {})
            values[place] = value
            self._changed.notify_all()
            self._wait_for(lambda: len(values) == count or self.failure is not None, seconds)
            if len(values) < count:
                absent = [i for i in range(count) if i not in values]
                return ("failed", self.failure) if self.failure is not None else ("late", absent)
            self._taken[key] = self._taken.get(key, 0) + 1
            if self._taken[key] == count:
                del self._gathers[key], self._taken[key]
            return "value", [values[i] for i in range(count)]

    def _watch(self, connection: socket.socket, rank: int, name: str) -> None:
        with self._changed:
            with contextlib.suppress(OSError):  # register a watcher that is already gone: it has died
                send(connection, "watching")  # first: the lock keeps other senders out
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
            self.fail(f"rank {rank} ({name}) has died without a message.", rank)

    def _tell(self, watchers: Sequence[socket.socket], *message: Any) -> None:
        for connection in watchers:
            with self._telling, contextlib.suppress(OSError):
                send(connection, *message)


class Store:
    """A rank's connection to the store of its job. Threads may share it.

    Args:
      host, port: the address of the server; retried until ``deadline``, as it may not have started yet.
      deadline: seconds to wait for the server, and for values of other ranks.
    Raises:
      CollectiveError: no server answers. All methods raise it if the server is gone, the job has failed, or a value
        does not arrive within ``deadline``.

    Attributes:
      failed: True once the server has reported that another rank failed.
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
                        why="rank 0, or the launcher, runs it: it has not started, has ended, or listens elsewhere.",
                        fix="check MASTER_ADDR, MASTER_PORT and BLUFUNC_PORT: all ranks need the same",
                    ) from e
                time.sleep(pause)
                pause = min(2 * pause, 0.5)
            else:
                connection.settimeout(None)
                return _tuned(connection)

    def gather(self, name: str, value: bytes, rank: int, members: Sequence[int]) -> list[bytes]:
        """Gather the values of all ranks of ``members`` under ``name``, in that order.

        A name may be reused: the n-th call of one rank matches the n-th calls of the others.
        """
        key = f"{name} of {','.join(map(str, members))}"
        turn = self._rounds[key] = self._rounds.get(key, 0) + 1
        place, data = members.index(rank), base64.b64encode(value).decode()
        message = f"{key} #{turn}", place, data, len(members), float(self.deadline)
        kind, answer = self._ask("gather", *message)
        if kind == "late":
            late = [members[i] for i in answer]
            raise errors.CollectiveError(
                f"waited {self.deadline:g} s for {name!r}, for which rank{'s' * (len(late) > 1)} {_listed(late)} did "
                "not arrive.",
                why="a rank is stuck, slow, or runs another program.",
                fix="a longer deadline, if it is only slow: BLUFUNC_DEADLINE=seconds",
            )
        return [base64.b64decode(v) for v in answer]

    def barrier(self, name: str, rank: int, members: Sequence[int]) -> None:
        """Wait until all ranks of ``members`` have called it."""
        self.gather(f"barrier {name}", b"", rank, members)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ask(self, *message: Any) -> list[Any]:
        answer = None
        with self._lock, contextlib.suppress(OSError):
            send(self._connection, *message)
            answer = receive(self._connection)
        if answer is None:
            self.failed = True
            raise errors.CollectiveError(
                f"the store of the job at {self.host}:{self.port} is gone.",
                why="its host, rank 0 or the launcher, has ended.",
            )
        if answer[0] == "failed":
            self.failed = True
            raise errors.CollectiveError(f"the job has failed: {answer[1]}")
        return answer


def watch(host: str, port: int, rank: int, name: str, *, deadline: float) -> socket.socket:
    """Open a connection that receives ``["abort", why]`` or ``["ended", rank]``.

    Send ``"fail", why`` to end the job, and ``"bye"`` before closing. Once this function returns, the server treats a
    silent end of the connection as the death of the rank.

    Args:
      rank, name: the watching process, for messages about its end.
    Raises:
      CollectiveError: no server answers.
    """
    store = Store(host, port, deadline=deadline)
    store._ask("watch", rank, name)
    return store._connection


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
