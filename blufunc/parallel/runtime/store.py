"""A store over TCP, through which processes that have no engine yet gather values.

Parallel, before stage 3. In: short byte strings of each rank. Out: those of the others, and the news that another rank
has failed. The launcher or rank 0 runs the ``StoreServer``; every rank has one connection to it, a ``Store``. For
identifiers, digests and error messages, not for arrays.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from blufunc import errors
from blufunc.parallel.runtime import messages
from blufunc.parallel.runtime.messages import Inbox, Malformed, encoded

DEADLINE = 300.0
"""Seconds that a rank waits for another one's value."""

MARGIN = 10.0
"""Seconds after a call's deadline for the server to say who is late."""

REFUSED = 10.0
"""Seconds to try again if another store answers: an earlier job's may still end."""

_GREETING = 5.0  # seconds for one attempt to connect
_LEAVING = 2.0  # seconds for the server to confirm a goodbye
_LONGEST_NAME = 256  # of what ranks gather; longer ones are hashed
_RECEIVE = 1 << 16


class _Stranger(Exception):
    """The other end is not the store of this job."""


class Store:
    """A rank's connection to the store of its job. Threads may share it.

    Args:
      host, port: the address of the server; retried until ``deadline``, as it may not have started yet.
      token: of the job, as the server has it.
      deadline: seconds to wait for the server, and for values of other ranks.
    Raises:
      CollectiveError: no server answers, or it is that of another job. All methods raise it if the server is gone or
        stopped, the job has failed, or a value does not arrive within ``deadline``.
    """

    def __init__(self, host: str, port: int, token: str, *, deadline: float = DEADLINE):
        self.address, self.deadline = f"{host}:{port}", deadline
        self._rounds: dict[str, int] = {}
        self._answers: dict[str, list[Any] | None] = {}  # by key, of calls that wait
        self._changed = threading.Condition()  # guards the above
        self._sending = threading.Lock()
        self._failure: str | None = None
        self._gone = ""
        self._events: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._inbox = Inbox()
        self._connection = self._connect(host, port, token)
        self._connection.settimeout(min(deadline + MARGIN, DEADLINE))
        self._inbox.longest = messages.LONGEST_ANSWER
        self._thread = threading.Thread(target=self._run, name="blufunc store connection", daemon=True)
        self._thread.start()
        _stores.add(self)

    @property
    def failed(self) -> bool:
        """True once the server has reported that another rank failed, or is gone."""
        return self._failure is not None or bool(self._gone)

    # -- connecting ------------------------------------------------------------------------------------

    def _connect(self, host: str, port: int, token: str) -> socket.socket:
        end, pause = time.monotonic() + self.deadline, 0.01
        refused = float("inf")
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=_GREETING)
                try:
                    self._greet(connection, token)
                except BaseException:
                    connection.close()
                    raise
                return messages.tuned(connection)
            except _Stranger as e:
                refused = min(refused, time.monotonic())
                if time.monotonic() + pause > min(end, refused + REFUSED):
                    raise errors.CollectiveError(
                        f"what answers at {self.address} is not the store of this job: {e}.",
                        why="another job or program has this port, or rank 0 has another token.",
                        fix="export one BLUFUNC_TOKEN=... for all ranks of the job; or another BLUFUNC_PORT",
                    ) from e
            except OSError as e:
                if time.monotonic() + pause > end:
                    raise errors.CollectiveError(
                        f"no store of the job answers at {self.address} within {self.deadline:g} s: {e}.",
                        why="rank 0, or the launcher, runs it: it has not started, has ended, or listens elsewhere.",
                        fix="check MASTER_ADDR, MASTER_PORT and BLUFUNC_PORT: all ranks need the same",
                    ) from e
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _greet(self, connection: socket.socket, token: str) -> None:
        """Prove the token, and let the server prove it."""
        self._inbox = Inbox()
        match self._next(connection, "it does not greet as one"):
            case ["blufunc", str(theirs)]:
                own = messages.nonce()
                proof = messages.proof(token, "rank", theirs, own)
                connection.sendall(encoded("hello", own, proof))
            case _:
                raise _Stranger("it does not greet as one")
        match self._next(connection, "it does not accept the token of this process"):
            case ["welcome", given] if messages.is_proof(given, token, "store", theirs, own):
                return
        raise _Stranger("it cannot prove the token of this process")

    def _next(self, connection: socket.socket, otherwise: str) -> list[Any]:
        """The next message of the greeting."""
        end = time.monotonic() + _GREETING
        try:
            while True:
                for message in self._inbox.messages():
                    return message
                data = connection.recv(_RECEIVE) if time.monotonic() < end else b""
                if not data:
                    raise _Stranger(otherwise)
                self._inbox.put(data)
        except (Malformed, TimeoutError, ConnectionError):
            raise _Stranger(otherwise) from None

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Receive messages until the connection ends."""
        why = "it has closed the connection"
        try:
            self._take()
            while True:
                try:
                    data = self._connection.recv(_RECEIVE)
                except TimeoutError:
                    continue  # the limit is for sending: the server may be silent
                if not data:
                    break
                self._inbox.put(data)
                self._take()
        except (OSError, Malformed) as e:
            why = str(e)
        with self._changed:
            self._gone = why
            self._changed.notify_all()
        self._events.put(["gone"])

    def _take(self) -> None:
        for message in self._inbox.messages():
            match message:
                case ["values" | "late", str(key), list(_)]:
                    with self._changed:
                        if key in self._answers:
                            self._answers[key] = message
                            self._changed.notify_all()
                case ["joined"]:
                    with self._changed:
                        self._answers["join"] = message
                        self._changed.notify_all()
                case ["abort", str(why)]:
                    with self._changed:
                        self._failure = why
                        self._changed.notify_all()
                    self._events.put(message)
                case ["ended", int(_)]:
                    self._events.put(message)
                case _:
                    raise Malformed(f"it sends {message[0]!r:.20}")

    # -- calls -----------------------------------------------------------------------------------------

    def join(self, rank: int, name: str) -> None:
        """Say which rank this is.

        From here on, the end of this connection is its death, and so is its silence.

        Args:
          name: of the process, for messages about its end.
        """
        self._ask("join", f"rank {rank} joins", encoded("join", rank, name, float(self.deadline)))

    def gather(self, name: str, value: bytes, rank: int, members: Sequence[int]) -> list[bytes]:
        """Gather the values of all ranks of ``members`` under ``name``, in that order.

        A name may be reused: the n-th call of one rank matches the n-th calls of the others.
        """
        with self._changed:
            key = _key_of(name, members)
            turn = self._rounds[key] = self._rounds.get(key, 0) + 1
        key = f"{key} #{turn}"
        data = base64.b64encode(value).decode()
        message = encoded("gather", key, members.index(rank), data, len(members), float(self.deadline))
        kind, _, found = self._ask(key, name, message)
        if kind == "late":
            late = [members[i] for i in found]
            raise errors.CollectiveError(
                f"waited {self.deadline:g} s for {name!r}, for which rank{'s' * (len(late) > 1)} {_listed(late)} did "
                "not arrive.",
                why="a rank is stuck, slow, or runs another program.",
                fix="a longer deadline, if it is only slow: BLUFUNC_DEADLINE=seconds",
            )
        return [base64.b64decode(v) for v in found] * (len(members) // len(found))  # one, if all are equal

    def barrier(self, name: str, rank: int, members: Sequence[int]) -> None:
        """Wait until all ranks of ``members`` have called it."""
        self.gather(f"barrier {name}", b"", rank, members)

    def fail(self, why: str) -> None:
        """End the job: all other ranks are told."""
        with contextlib.suppress(errors.CollectiveError):
            self._send(encoded("fail", why))

    def beat(self) -> None:
        """Say that this process runs."""
        with contextlib.suppress(errors.CollectiveError):
            self._send(encoded("alive"))

    def event(self, seconds: float) -> list[Any] | None:
        """The next event; None after ``seconds``.

        Events are ``["abort", why]``, ``["ended", rank]`` and ``["gone"]``.
        """
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Say goodbye, and close the connection."""
        with contextlib.suppress(errors.CollectiveError):
            self._send(encoded("bye"))
            self._thread.join(_LEAVING)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(_LEAVING)
        self._connection.close()

    def _send(self, message: bytes) -> None:
        try:
            with self._sending:
                self._connection.sendall(message)
        except OSError as e:  # a part may be sent: no further message can follow
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            raise self._lost(str(e)) from e

    def _ask(self, key: str, what: str, message: bytes) -> list[Any]:
        """Send a message and wait for its answer."""
        with self._changed:
            self._answers[key] = None
        self._send(message)
        seconds = min(self.deadline + MARGIN, threading.TIMEOUT_MAX)
        with self._changed:
            self._changed.wait_for(
                lambda: self._answers[key] is not None or self._failure is not None or self._gone, seconds
            )
            answer = self._answers.pop(key)
            if answer is not None:
                return answer
            if self._failure is not None:
                raise errors.CollectiveError(f"the job has failed: {self._failure}")
            if self._gone:
                raise self._lost(self._gone)
        raise errors.CollectiveError(
            f"the store of the job at {self.address} has not answered {what!r:.100} within {seconds:g} s.",
            why="its host, rank 0 or the launcher, is stopped, or the network between them is.",
            fix="look at that process (ps, SIGCONT) and at the network; BLUFUNC_DEADLINE is the limit",
        )

    def _lost(self, why: str) -> errors.CollectiveError:
        self._gone = self._gone or why
        return errors.CollectiveError(
            f"the store of the job at {self.address} is gone: {why}.",
            why="its host, rank 0 or the launcher, has ended.",
            fix="its own last lines say the reason",
        )


def _key_of(name: str, members: Sequence[int]) -> str:
    """A short key of what these ranks gather."""
    ranks = hashlib.blake2b(repr(tuple(members)).encode(), digest_size=16).hexdigest()
    if len(name) > _LONGEST_NAME:
        name = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return f"{name} of {ranks}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close inherited connections in a child: it would keep that of a dead rank open."""
    for store in _stores:
        store._connection.close()


os.register_at_fork(after_in_child=_release_in_child)
