"""The store of a job: gathers, the ends of ranks, and attacks of strangers."""

import contextlib
import errno
import json
import math
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from blufunc import errors
from blufunc.parallel.runtime import messages, store, store_server
from blufunc.parallel.runtime.store import Store
from blufunc.parallel.runtime.store_server import StoreServer

ROOT = str(Path(__file__).parents[3])
TOKEN = "secret"


@pytest.fixture
def server():
    server = StoreServer(TOKEN)
    yield server
    server.close()


@pytest.fixture
def clients(server):
    """``clients(n)``: n connections to the store."""
    with contextlib.ExitStack() as stack:

        def connect(n, deadline=5.0):
            return [
                stack.enter_context(
                    contextlib.closing(Store("127.0.0.1", server.port, TOKEN, deadline=deadline))
                )
                for _ in range(n)
            ]

        yield connect


@pytest.fixture
def ranks(clients):
    """``ranks(n)``: n ranks that have joined."""

    def join(n, deadline=5.0):
        found = clients(n, deadline)
        for rank, each in enumerate(found):
            each.join(rank, f"process {rank}")
        return found

    return join


def on_threads(*functions):
    results = [None] * len(functions)

    def run(i):
        try:
            results[i] = functions[i]()
        except errors.CollectiveError as e:
            results[i] = e

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    return results


def drop(client):
    """End the connection without a goodbye."""
    client._connection.shutdown(socket.SHUT_RDWR)


def soon(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# -- ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("deadline", [5.0, math.inf])
def test_gather_waits_for_a_late_rank(clients, deadline):
    a, b = clients(2, deadline)
    late = threading.Timer(0.05, b.gather, ("id", bytes(range(256)), 1, (0, 1)))
    late.start()
    assert a.gather("id", b"", 0, (0, 1)) == [b"", bytes(range(256))]
    late.join()


def test_gather_comes_in_order_of_members_again_and_again(server, clients):
    a, b, c = clients(3)
    for turn in range(2):
        rows = on_threads(
            *[
                lambda s=s, r=r, turn=turn: s.gather("g", bytes([r, turn]), r, (2, 0, 1))
                for r, s in enumerate((a, b, c))
            ]
        )
        assert rows == [[bytes([2, turn]), bytes([0, turn]), bytes([1, turn])]] * 3
    calls = [lambda: a.barrier("end", 0, (0, 1)), lambda: b.barrier("end", 1, (0, 1))]
    assert on_threads(*calls) == [None, None]
    same = [lambda s=s, r=r: s.gather("same", b"x", r, (0, 1)) for r, s in enumerate((a, b))]
    assert on_threads(*same) == [[b"x", b"x"]] * 2
    assert not server._gathers  # nothing is kept once all have it


def test_threads_of_a_rank_do_not_wait_for_each_other(clients):
    a, b = clients(2)
    long = "n" * 10_000
    thread = threading.Thread(target=a.gather, args=("first", b"", 0, (0, 1)), daemon=True)
    thread.start()
    soon(lambda: a._answers)
    got = on_threads(lambda: a.gather(long, b"x", 0, (0, 1)), lambda: b.gather(long, b"y", 1, (0, 1)))
    assert got == [[b"x", b"y"]] * 2 and thread.is_alive()
    b.gather("first", b"", 1, (0, 1))
    thread.join(5)
    assert not thread.is_alive()


def test_who_does_not_come_is_named(clients):
    a, b = clients(2, 0.2)
    errs = on_threads(
        lambda: a.gather("digests", b"", 0, range(4)), lambda: b.gather("digests", b"", 3, range(4))
    )
    for e in errs:
        assert "waited 0.2 s for 'digests', for which ranks 1, 2 did not arrive." in str(e)


def test_a_rank_that_dies_fails_those_who_wait(server, clients, ranks):
    (a,) = clients(1)
    other, watched = ranks(2)
    late = threading.Timer(0.05, drop, (watched,))
    late.start()
    with pytest.raises(errors.CollectiveError, match=r"rank 1 \(process 1\) has died"):
        a.gather("never", b"", 0, (0, 1))
    late.join()
    assert a.failed and server.died == server.lost == 1
    assert other.event(5)[0] == "abort"
    with pytest.raises(errors.CollectiveError, match="the job has failed: rank 1"):
        a.gather("after", b"", 0, (0, 1))


def test_two_processes_of_one_rank_are_a_failure(ranks, clients):
    (first,) = ranks(1)
    (other,) = clients(1)
    with pytest.raises(errors.CollectiveError, match="two processes say that they are rank 0"):
        other.join(0, "process 7")
    what, why = first.event(5)
    assert what == "abort" and why.endswith("rank 0: process 0, and process 7.")


def test_a_goodbye_is_no_failure(server, ranks, clients):
    first, second = ranks(2)
    first.close()
    assert second.event(5) == ["ended", 0]
    assert server.failure is None
    (third,) = clients(1)
    third.join(2, "process 2")
    assert third.event(5) == ["ended", 0]
    second.fail("rank 1 has failed: ValueError")
    assert third.event(5) == ["abort", "rank 1 has failed: ValueError"]
    assert server.died is None


def test_a_rank_that_is_silent_is_lost(server, ranks):
    stopped, other = ranks(2, 0.5)
    end = time.monotonic() + 5
    while (event := other.event(0.1)) is None and time.monotonic() < end:
        other.beat()
    assert event[0] == "abort" and "rank 0 (process 0) has been silent for" in event[1]
    assert server.lost == 0 and server.died is None


def test_no_server_and_a_server_that_goes(server, clients):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    with pytest.raises(errors.CollectiveError, match=f"no store of the job answers at 127.0.0.1:{free}"):
        Store("127.0.0.1", free, TOKEN, deadline=0.1)
    with pytest.raises(errors.CollectiveError, match="cannot listen"):
        StoreServer(TOKEN, "127.0.0.1", server.port)
    a, _ = clients(2)
    drop(a)
    with pytest.raises(errors.CollectiveError, match="is gone"):
        a.gather("x", b"", 0, (0, 1))
    assert a.event(5) == ["gone"]


def test_a_server_that_is_stopped_is_an_error_within_the_deadline(server, clients, monkeypatch):
    monkeypatch.setattr(store, "MARGIN", 0.1)
    (a,) = clients(1, 0.2)
    with server._changed:  # its thread waits
        with pytest.raises(errors.CollectiveError) as caught:
            a.gather("key", b"", 0, (0, 1))
    message = str(caught.value)
    assert f"127.0.0.1:{server.port} has not answered 'key' within 0.3 s" in message
    assert "is stopped" in message and "look at that process" in message


def test_last_words_are_heard_out(server, clients):
    """A rank that fails and ends at once is reported with its message."""
    (a,) = clients(1)
    with server._changed:  # its thread is late
        a._connection.sendall(messages.encoded("join", 1, "a process", 5.0))
    soon(lambda: server._joined)
    with server._changed:
        a._connection.sendall(messages.encoded("fail", "rank 1 has failed: a reason"))
        drop(a)
        threading.Timer(0.1, server._wake).start()
        server.hear_out(1, 10.0)
        assert server.failure == "rank 1 has failed: a reason"
        server.hear_out(7, 10.0)  # which never came


def test_a_forked_child_does_not_keep_the_connection_of_a_dead_rank(server):
    program = (
        "import os, sys, time, warnings\nwarnings.simplefilter('ignore')\n"
        "from blufunc.parallel.runtime.store import Store\n"
        f"a = Store('127.0.0.1', {server.port}, '{TOKEN}', deadline=30.0)\na.join(0, 'parent')\n"
        "if os.fork() == 0:\n    print(os.getpid(), flush=True)\n    time.sleep(30)\n"
        "time.sleep(0.1)\nos.kill(os.getpid(), 9)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ROOT}
    ) as rank:
        child = int(rank.stdout.readline())
        try:
            soon(lambda: server.failure)
        finally:
            os.kill(child, 9)
    assert server.failure == "rank 0 (parent) has died without a message."


# -- strangers -------------------------------------------------------------------------------------


def connected(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=5)


def is_closed(connection):
    """True once the server has closed a connection, after what it has sent."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def test_without_the_token_no_message_is_answered(server, clients, capfd, monkeypatch):
    monkeypatch.setattr(store, "REFUSED", 0.1)
    with pytest.raises(errors.CollectiveError) as caught:
        Store("127.0.0.1", server.port, "another", deadline=5)
    assert "is not the store of this job: it does not accept the token of this process" in str(caught.value)
    assert "export one BLUFUNC_TOKEN" in str(caught.value)
    for message in (["gather", "k", 0, "", 1, 1.0], ["join", 0, "x", 1.0], ["fail", "x"], ["hello", "a", 7]):
        with connected(server) as stranger:
            stranger.sendall(messages.encoded(*message))
            greeting = stranger.recv(1 << 16)
            assert json.loads(greeting[4:])[0] == "blufunc"
            assert stranger.recv(1) == b""
    assert server.failure is None
    (a,) = clients(1)
    assert a.gather("still", b"here", 0, (0,)) == [b"here"]
    assert "was closed: not the token of this job" in capfd.readouterr().err


def test_a_recorded_proof_is_worth_nothing_on_another_connection(server):
    def hello(stranger, own, proof=None):
        nonce = json.loads(stranger.recv(1 << 16)[4:])[1]
        proof = proof or messages.proof(TOKEN, "rank", nonce, own)
        stranger.sendall(messages.encoded("hello", own, proof))
        return proof

    with connected(server) as first:
        recorded = hello(first, "ff")
        assert json.loads(first.recv(1 << 16)[4:])[0] == "welcome"
    with connected(server) as second:
        hello(second, "ff", recorded)
        assert second.recv(1) == b""


@pytest.mark.parametrize("what", ["nothing", "another program", "no proof"])
def test_a_server_that_does_not_know_the_token_is_not_told_it(what, monkeypatch):
    monkeypatch.setattr(store, "REFUSED", 0.1)
    monkeypatch.setattr(store, "_GREETING", 0.2)
    heard = []

    def pretend(listener):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    if what == "another program":
                        connection.sendall(b"220 mail.example ESMTP\r\n")
                    if what == "no proof":
                        connection.sendall(messages.encoded("blufunc", "ab"))
                        heard.append(connection.recv(1 << 16))
                        connection.sendall(messages.encoded("welcome", "ab" * 32))
                    time.sleep(0.3)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=pretend, args=(listener,), daemon=True).start()
        with pytest.raises(errors.CollectiveError, match="is not the store of this job"):
            Store("127.0.0.1", listener.getsockname()[1], TOKEN, deadline=5)
        listener.shutdown(socket.SHUT_RDWR)
    assert not any(TOKEN.encode() in data for data in heard)


def framed(data):
    return struct.pack(">I", len(data)) + data


MALFORMED = {
    "a number": framed(b"7"),
    "an empty list": framed(b"[]"),
    "a list of numbers": framed(b"[1, 2]"),
    "an object": framed(b"{}"),
    "nothing": framed(b""),
    "no JSON": framed(b'["gather"'),
    "no text": framed(b'["\xff\xfe"]'),
    "another name": framed(b'["nonsense"]'),
    "other fields": framed(b'["gather", 1, 2]'),
    "a deep nest": framed(b"[" * 200_000 + b"]" * 200_000),
    "a long integer": framed(b'["gather", ' + b"9" * 100_000 + b"]"),
    "a huge key": framed(json.dumps(["gather", "k" * 1_000_000, 0, "", 1, 1.0]).encode()),
    "a place out of range": framed(b'["gather", "k", 5, "", 2, 1.0]'),
    "too many ranks": framed(b'["gather", "k", 0, "", 1000000000, 1.0]'),
    "no time": framed(b'["gather", "k", 0, "", 1, NaN]'),
    "a huge length": struct.pack(">Q", 1 << 60),
    "a length of 4 GB": b"\xff" * 8,
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("what", MALFORMED)
@pytest.mark.parametrize("by", ["a stranger", "a member", "a rank"])
def test_a_malformed_message_ends_one_connection(by, what, server, clients, capfd):
    (a,) = clients(1)
    if by == "a stranger":
        with connected(server) as stranger:
            with contextlib.suppress(OSError):  # it may be closed before all is sent
                stranger.sendall(MALFORMED[what])
            assert is_closed(stranger)
    else:
        (member,) = clients(1)
        if by == "a rank":
            member.join(1, "process 1")
        with contextlib.suppress(OSError):
            member._connection.sendall(MALFORMED[what])
        assert member.event(5)[0] in ("gone", "abort")
    if by == "a rank":  # whose connection is its life
        soon(lambda: server.failure)
        assert "rank 1 (process 1) has sent a" in server.failure or "the message" in server.failure
        return
    assert a.gather("still", b"here", 0, (0,)) == [b"here"]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("blufunc store: a connection from 127.0.0.1:")


def test_silent_connections_are_closed_and_the_log_has_an_end(server, clients, monkeypatch, capfd):
    monkeypatch.setattr(store_server, "GREETING", 0.1)
    (a,) = clients(1)
    with contextlib.ExitStack() as stack:
        for idle in [stack.enter_context(connected(server)) for _ in range(30)]:
            assert is_closed(idle)
    assert a.gather("still", b"here", 0, (0,)) == [b"here"]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 20 and "no proof of the job's token within 0.1 s" in lines[0]
    assert lines[-1].endswith("Further lines are left out.")


def test_aborted_connections_do_not_end_the_thread(server, clients, monkeypatch):
    listener = server._listener

    class Failing:
        def __init__(self):
            self.codes = [errno.ECONNABORTED, errno.EPROTO, errno.EMFILE]

        def accept(self):
            if self.codes:
                raise OSError(self.codes.pop(0), "injected")
            return listener.accept()

        def __getattr__(self, name):
            return getattr(listener, name)

    failing = Failing()
    with server._changed:
        server._listener = failing
        server._selector.unregister(listener)
        server._selector.register(failing, 1)
    (a,) = clients(1)
    assert a.gather("still", b"here", 0, (0,)) == [b"here"] and not failing.codes


def test_400_idle_connections_under_a_limit_of_200_files_keep_no_rank_out():
    """They made every client wait for ever."""
    program = (
        "import resource, sys\nfrom blufunc.parallel.runtime.store_server import StoreServer\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        f"print(StoreServer('{TOKEN}').port, flush=True)\nsys.stdin.read()\n"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 500
    with (
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": ROOT},
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        port = int(process.stdout.readline())
        address = ("127.0.0.1", port)
        for _ in range(400):
            stack.enter_context(socket.create_connection(address, timeout=5))
        began = time.monotonic()
        a, b = (Store("127.0.0.1", port, TOKEN, deadline=8.0) for _ in range(2))
        calls = [lambda: a.barrier("x", 0, (0, 1)), lambda: b.barrier("x", 1, (0, 1))]
        assert on_threads(*calls) == [None, None]
        assert time.monotonic() - began < 5
        a.close()
        b.close()
        process.stdin.close()


@pytest.mark.slow
def test_hundreds_of_ranks_have_one_connection_and_no_thread_each_in_the_server(server, ranks):
    before = threading.active_count()
    found = ranks(100)
    assert len(server._peers) == 100 and threading.active_count() <= before + 100  # of the clients
    threads = [threading.Thread(target=s.barrier, args=("x", r, range(100))) for r, s in enumerate(found)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert not any(t.is_alive() for t in threads)
