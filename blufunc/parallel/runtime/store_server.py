"""The server of a job's store: one thread for all connections.

Parallel, before stage 3. The launcher runs it, or rank 0 if another launcher started the job. In: connections that
prove the token of the job (``messages.py``). Out: the gathered values of all ranks, and the news that one has failed. A
rank whose connection closes without a goodbye has died; one that is silent for too long is stopped. No bytes that
arrive here, and no number of connections, end the thread.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from blufunc import errors
from blufunc.parallel.runtime import messages
from blufunc.parallel.runtime.messages import Inbox, Malformed, encoded

GREETING = 10.0
"""Seconds that a connection has to prove the token."""

_TICK = 0.2  # seconds between checks of deadlines
_FROZEN = 5.0  # a tick that takes longer: this process itself was stopped
_PAUSE = 0.1  # seconds without accepting, where no connection can be closed for a new one
_RECEIVE = 1 << 16
_LONGEST_KEY = 4096
_MOST = 1 << 20  # ranks of a job
_LINES = 20  # in the log of a server
_NO_MORE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class _Peer:
    """A connection.

    Attributes:
      nonce: the server's, for the proof of the token.
      is_member: True once it has proved the token.
      rank, name: of the process, once it has joined.
      patience: seconds that it may be silent.
      heard: time of its last bytes.
    """

    def __init__(self, connection: socket.socket, address: Any):
        self.connection = connection
        self.address = f"{address[0]}:{address[1]}"
        self.inbox = Inbox()
        self.outbox: deque[memoryview] = deque()
        self.nonce = messages.nonce()
        self.is_member = False
        self.rank: int | None = None
        self.name = ""
        self.patience = float("inf")
        self.heard = time.monotonic()


class _Gather:
    """Values under one key, and the members that wait for them."""

    def __init__(self, count: int):
        self.count = count
        self.values: dict[int, str] = {}
        self.waiting: set[_Peer] = set()


class StoreServer:
    """The server of the store.

    Args:
      token: of the job; a connection that cannot prove it is closed without an answer.
      host: the address to listen on; "" for all interfaces.
      port: the port; 0 for any free one.
    Raises:
      CollectiveError: the port is taken, or the address is not local.

    Attributes:
      host, port: the address for processes of this host.
      failure: the reason for the end of the job, or None.
      died: the rank that died without a message, or None.
      lost: the rank that died or is silent, or None.
    """

    def __init__(self, token: str, host: str = "127.0.0.1", port: int = 0):
        self._token = token
        try:
            family, *_, address = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=1024)
        except OSError as e:
            raise errors.CollectiveError(
                f"the store of the job cannot listen on {host or '*'}:{port}: {e.strerror or e}.",
                fix="another port: BLUFUNC_PORT=... for all ranks",
            ) from e
        self._listener.setblocking(False)
        self.host: str = self._listener.getsockname()[0] if host else "127.0.0.1"
        self.port: int = self._listener.getsockname()[1]
        self.failure: str | None = None
        self.died: int | None = None
        self.lost: int | None = None
        self._gathers: dict[str, _Gather] = {}
        self._deadlines: list[tuple[float, int, str, _Peer]] = []  # a heap
        self._order = itertools.count()
        self._peers: dict[_Peer, None] = {}  # in the order of their arrival
        self._to_flush: set[_Peer] = set()
        self._joined: dict[int, _Peer] = {}
        self._gone: list[int] = []  # the ranks that have said goodbye
        self._changed = threading.Condition()  # guards all of the above
        self._closed = False
        self._lines = 0
        self._accepts_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._bell, self._ear = socket.socketpair()  # wakes the thread
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._ear, selectors.EVENT_READ)
        _servers.add(self)
        self._thread = threading.Thread(target=self._run, name="blufunc store", daemon=True)
        self._thread.start()

    # -- for the process that hosts it ----------------------------------------------------------------

    def fail(self, text: str, died: int | None = None) -> None:
        """End the job: notify all ranks. The first failure counts."""
        with self._changed:
            self._fail(text, died, died)
        self._wake()

    def hear_out(self, rank: int, seconds: float) -> None:
        """Wait up to ``seconds`` for the remaining messages of a process that has ended."""
        with self._changed:
            self._wait_for(lambda: rank not in self._joined or self.failure is not None, seconds)

    def close(self, seconds: float = 0.0) -> None:
        """Stop, after waiting up to ``seconds`` for ranks to say goodbye."""
        with self._changed:
            self._wait_for(lambda: not self._joined or self.failure is not None, seconds)
            self._closed = True
        self._wake()
        self._thread.join()

    def _wait_for(self, predicate: Callable[[], bool], seconds: float) -> None:
        """Wait up to ``seconds``, capped at the maximum that locks accept."""
        self._changed.wait_for(predicate, min(seconds, threading.TIMEOUT_MAX))

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake
            self._bell.send(b"!")

    def _log(self, text: str) -> None:
        self._lines += 1
        if self._lines <= _LINES:
            more = " Further lines are left out." if self._lines == _LINES else ""
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"blufunc store: {text}.{more}\n")
                sys.stderr.flush()

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        ticked = time.monotonic()
        while True:
            ready = self._selector.select(_TICK)
            with self._changed:
                for key, mask in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._ear:
                        with contextlib.suppress(OSError):
                            self._ear.recv(_RECEIVE)
                    elif key.data in self._peers:  # not closed by an earlier event
                        if mask & selectors.EVENT_READ:
                            self._receive(key.data)
                        if mask & selectors.EVENT_WRITE and key.data in self._peers:
                            self._flush(key.data)
                now = time.monotonic()
                if now - ticked > _FROZEN:
                    for peer in self._peers:
                        peer.heard = now
                if now - ticked > _TICK:
                    ticked = now
                    self._check_deadlines(now)
                while self._to_flush:  # which may close a connection, and fail the job
                    peer = self._to_flush.pop()
                    if peer in self._peers:
                        self._flush(peer)
                self._changed.notify_all()
                if self._closed:
                    self._end()
                    return

    def _end(self) -> None:
        for peer in list(self._peers):
            self._peers.pop(peer)
            peer.connection.close()
        self._selector.close()
        for end in (self._listener, self._bell, self._ear):
            end.close()

    def _accept(self) -> None:
        for _ in range(64):  # then serve those that are there
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno not in _NO_MORE:
                    continue  # it was aborted ahead of this
                stranger = next((p for p in self._peers if not p.is_member), None)
                if stranger is None:
                    self._log(f"a connection waits: {e.strerror}; a higher ulimit -n lets more ranks in")
                    self._selector.unregister(self._listener)
                    self._accepts_at = time.monotonic() + _PAUSE
                    return
                self._drop(stranger, f"closed in favor of newer connections: {e.strerror}")
                continue
            try:
                connection.setblocking(False)
                peer = _Peer(messages.tuned(connection), address)
                self._selector.register(connection, selectors.EVENT_READ, peer)
            except OSError:  # it is gone
                connection.close()
                continue
            self._peers[peer] = None
            self._send(peer, encoded("blufunc", peer.nonce))

    def _check_deadlines(self, now: float) -> None:
        if self._accepts_at and now > self._accepts_at:
            self._accepts_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, key, peer = heapq.heappop(self._deadlines)
            gather = self._gathers.get(key)
            if gather is not None and peer in gather.waiting:
                gather.waiting.discard(peer)
                absent = [i for i in range(gather.count) if i not in gather.values]
                self._send(peer, encoded("late", key, absent))
        for peer in [p for p in self._peers if not p.is_member and now - p.heard > GREETING]:
            self._drop(peer, f"no proof of the job's token within {GREETING:g} s")
        for rank, peer in list(self._joined.items()):
            if now - peer.heard > peer.patience and self.failure is None:
                silent = f"has been silent for {now - peer.heard:.0f} s: it is stopped, or its host is gone"
                self._fail(f"rank {rank} ({peer.name}) {silent}.", None, rank)

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(_RECEIVE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._drop(peer)
        if peer.is_member:  # a stranger has its deadline from the start
            peer.heard = time.monotonic()
        peer.inbox.put(data)
        try:
            for message in peer.inbox.messages():
                self._hear(peer, message)
                if peer not in self._peers:
                    return None
        except Malformed as e:
            self._drop(peer, str(e))

    def _hear(self, peer: _Peer, message: list[Any]) -> None:
        if not peer.is_member:
            match message:
                case ["hello", str(theirs), given] if messages.is_proof(
                    given, self._token, "rank", peer.nonce, theirs
                ):
                    peer.is_member, peer.inbox.longest = True, messages.LONGEST
                    peer.heard = time.monotonic()
                    self._send(
                        peer,
                        encoded("welcome", messages.proof(self._token, "store", peer.nonce, theirs)),
                    )
                case _:
                    self._drop(peer, "not the token of this job")
            return
        match message:
            case ["gather", str(key), int(place), str(value), int(count), float(seconds)] if (
                len(key) <= _LONGEST_KEY and 0 <= place < count <= _MOST and seconds > 0
            ):
                self._gather(peer, key, place, value, count, seconds)
            case ["join", int(rank), str(name), float(patience)] if peer.rank is None and patience > 0:
                self._join(peer, rank, name, patience)
            case ["alive"]:
                pass
            case ["fail", str(why)]:
                self._fail(why, None, None)
            case ["bye"]:
                self._leave(peer)
            case _:
                raise Malformed(f"the message {message[0]!r:.20}, which is none of the store's")

    def _gather(self, peer: _Peer, key: str, place: int, value: str, count: int, seconds: float) -> None:
        gather = self._gathers.get(key)
        if gather is None:
            gather = self._gathers[key] = _Gather(count)
        if gather.count != count:
            raise Malformed(f"{count} values under a key of {gather.count}")
        gather.values[place] = value
        gather.waiting.add(peer)
        if len(gather.values) < count:
            if seconds != float("inf"):
                heapq.heappush(self._deadlines, (time.monotonic() + seconds, next(self._order), key, peer))
            return
        del self._gathers[key]
        values = [gather.values[i] for i in range(count)]
        if (
            values.count(values[0]) == count
        ):  # a barrier, or digests that agree: thousands of ranks get one value
            values = values[:1]
        answer = encoded("values", key, values)  # the same for all
        for member in gather.waiting:
            self._send(member, answer)

    def _join(self, peer: _Peer, rank: int, name: str, patience: float) -> None:
        other = self._joined.get(rank)
        if other is not None:
            what = f"two processes say that they are rank {rank}: {other.name}, and {name}."
            self._fail(what, None, None)
            return
        self._joined[rank] = peer
        peer.rank, peer.name, peer.patience = rank, name, patience
        self._send(peer, encoded("joined"))
        for gone in self._gone:
            self._send(peer, encoded("ended", gone))
        if self.failure is not None:
            self._send(peer, encoded("abort", self.failure))

    def _leave(self, peer: _Peer) -> None:
        rank, peer.rank = peer.rank, None
        if rank is not None:
            del self._joined[rank]
            self._gone.append(rank)
            for other in self._joined.values():
                self._send(other, encoded("ended", rank))
        self._drop(peer)  # which tells the rank that this was received

    def _fail(self, text: str, died: int | None, lost: int | None) -> None:
        if self.failure is not None or self._closed:
            return
        self.failure, self.died, self.lost = text, died, lost
        self._changed.notify_all()
        for peer in self._peers:
            if peer.is_member:
                self._send(peer, encoded("abort", text))

    def _send(self, peer: _Peer, data: bytes) -> None:
        """Queue a message: the thread sends it, so that none waits for a slow reader."""
        peer.outbox.append(memoryview(data))
        self._to_flush.add(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.outbox:
                sent = peer.connection.send(peer.outbox[0])
                if sent < len(peer.outbox[0]):
                    peer.outbox[0] = peer.outbox[0][sent:]
                else:
                    peer.outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:
            return self._drop(peer)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
        if self._selector.get_key(peer.connection).events != wanted:
            self._selector.modify(peer.connection, wanted, peer)

    def _drop(self, peer: _Peer, why: str = "") -> None:
        """Close a connection; a rank that has not said goodbye has died."""
        del self._peers[peer]
        if why and self.failure is None:
            who = f"the connection of rank {peer.rank}" if peer.rank is not None else "a connection"
            self._log(f"{who} from {peer.address} was closed: {why}")
        self._selector.unregister(peer.connection)
        peer.connection.close()
        for gather in self._gathers.values():
            gather.waiting.discard(peer)
        if peer.rank is not None:
            del self._joined[peer.rank]
            said = f"has sent {why}" if why else "has died without a message"
            self._fail(f"rank {peer.rank} ({peer.name}) {said}.", peer.rank, peer.rank)


_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close what a forked child inherits: it would keep connections of the dead open."""
    for server in _servers:
        for peer in server._peers:
            peer.connection.close()
        server._listener.close()


os.register_at_fork(after_in_child=_release_in_child)
