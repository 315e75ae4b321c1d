"""Placement by the variables of every launcher; the store of a job."""

import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

from blufunc import errors
from blufunc.parallel.runtime import bootstrap, store
from blufunc.parallel.runtime.bootstrap import Placement, find_placement, first_host

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[007-009]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
TORCHRUN = {
    "RANK": "6",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    ("environ", "want"),
    [
        ({}, (0, 1, 0, 1, "127.0.0.1", 0)),
        (TORCHRUN, (6, 8, 2, 4, "head", 29400)),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, (6, 8, 2, 4, "head", 29401)),
        ({**TORCHRUN, "BLUFUNC_PORT": "999"}, (6, 8, 2, 4, "head", 999)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 0, 1, "127.0.0.1", 29500)),
        (OPEN_MPI, (5, 8, 1, 4, "host0", 1234)),
        (SLURM, (3, 6, 1, 2, "gpu007", 15000 + zlib.crc32(b"77.0") % 15000)),
        ({**SLURM, "MASTER_PORT": "1"}, (3, 6, 1, 2, "gpu007", 1)),
        ({**SLURM, **OPEN_MPI}, (5, 8, 1, 4, "host0", 1234)),  # mpirun inside of a Slurm job
        ({**SLURM, **OPEN_MPI, **TORCHRUN}, (6, 8, 2, 4, "head", 29400)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1, 0, 1, "127.0.0.1", 0)),  # sbatch without srun
    ],
)
def test_placements(environ, want):
    p = find_placement(environ)
    assert (p.rank, p.size, p.local_rank, p.local_size, p.host, p.port) == want
    assert not p.hosted


def test_ports_of_open_mpi_are_those_of_the_job():
    one_host = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PMIX_NAMESPACE": "prterun-1"}
    del one_host["MASTER_ADDR"], one_host["MASTER_PORT"]
    p, q = find_placement(one_host), find_placement({**one_host, "PMIX_NAMESPACE": "prterun-2"})
    assert p.host == "127.0.0.1" and p.port != q.port and 15000 <= p.port < 30000


def test_explicit_arguments_come_before_variables():
    assert find_placement(TORCHRUN, "h:5", 3, 1) == Placement(1, 3, 1, 3, "h", 5)
    assert find_placement(TORCHRUN, "[::1]:5", 3, 1, 0) == Placement(1, 3, 0, 3, "::1", 5)


def test_a_store_that_the_launcher_keeps():
    p = find_placement({**TORCHRUN, "BLUFUNC_STORE": "127.0.0.1:44"})
    assert p.hosted and (p.host, p.port, p.rank) == ("127.0.0.1", 44, 6)


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        ({"RANK": "1"}, (), "WORLD_SIZE is missing"),
        ({"RANK": "1", "WORLD_SIZE": "two"}, (), "WORLD_SIZE is 'two', and must be an integer"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, (), "rank 2 is out of range for 2"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, (), "OMPI_COMM_WORLD_SIZE is ''"),
        ({k: v for k, v in OPEN_MPI.items() if k != "MASTER_ADDR"}, (), "no MASTER_ADDR"),
        ({}, ("host0:29500",), "address, world_size and rank together"),
        ({}, ("host0", 2, 0), "'host0' is not the address"),
        ({}, ("host0:99999", 2, 0), "is not the address"),
        ({}, ("host0:1", 2, 2), "rank 2 is out of range for 2"),
    ],
)
def test_what_makes_no_sense_is_an_error(environ, arguments, message):
    with pytest.raises(errors.BlufuncError, match=message):
        find_placement(environ, *arguments)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("node[007-009,12],login", "node007"),
        ("n[3,5]", "n3"),
        ("rack2-n[01-04]-ib", "rack2-n01-ib"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_bad_deadline(monkeypatch):
    monkeypatch.setenv("BLUFUNC_DEADLINE", "soon")
    with pytest.raises(errors.ValueRangeError, match="BLUFUNC_DEADLINE is 'soon'"):
        bootstrap.initialize()


def test_processes_find_each_other_by_explicit_arguments():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    program = (
        "import sys\nfrom blufunc.parallel.runtime import bootstrap\nrank = int(sys.argv[1])\n"
        f"world = bootstrap.initialize('127.0.0.1:{port}', 2, rank, deadline=30)\n"
        "assert bootstrap.initialize() is world is bootstrap.world()\n"
        "print(world.gather('numbers', bytes([rank + 1])))\n"
    )
    root = str(Path(__file__).parents[3])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
        )
        for rank in (1, 0)
    ]
    for process in processes:
        assert process.communicate(timeout=30)[0].decode().strip() == r"[b'\x01', b'\x02']"
        assert process.returncode == 0


# -- the store -------------------------------------------------------------------------------------


@pytest.fixture
def server():
    server = store.StoreServer()
    yield server
    server.close()


@pytest.fixture
def clients(server):
    """``clients(n)``: n connections to the store."""
    with contextlib.ExitStack() as stack:

        def connect(n, deadline=5.0):
            stores = [store.Store("127.0.0.1", server.port, deadline=deadline) for _ in range(n)]
            for s in stores:
                stack.callback(s.close)
            return stores

        yield connect


@pytest.fixture
def watching(server):
    """``watching(rank)``: a watch connection with a timeout of five seconds."""
    with contextlib.ExitStack() as stack:

        def connect(rank):
            connection = store.watch("127.0.0.1", server.port, rank, f"process {rank}", deadline=5)
            connection.settimeout(5)
            return stack.enter_context(connection)

        yield connect


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
    assert on_threads(lambda: a.barrier("end", 0, (0, 1)), lambda: b.barrier("end", 1, (0, 1))) == [
        None,
        None,
    ]
    assert not server._gathers  # nothing is kept once all have it


def test_who_does_not_come_is_named(clients):
    a, b = clients(2, 0.2)
    errs = on_threads(
        lambda: a.gather("digests", b"", 0, range(4)), lambda: b.gather("digests", b"", 3, range(4))
    )
    for e in errs:
        assert "waited 0.2 s for 'digests', for which ranks 1, 2 did not arrive." in str(e)


def test_a_rank_that_dies_fails_those_who_wait(server, clients, watching):
    (a,) = clients(1)
    watched, other = watching(1), watching(0)
    late = threading.Timer(0.05, watched.close)
    late.start()
    with pytest.raises(errors.CollectiveError, match=r"rank 1 \(process 1\) has died"):
        a.gather("never", b"", 0, (0, 1))
    late.join()
    assert a.failed and server.died == 1
    assert store.receive(other)[0] == "abort"


def test_two_processes_of_one_rank_are_a_failure(server, watching):
    first = watching(1)
    other = store.watch("127.0.0.1", server.port, 1, "process 7", deadline=5)
    with other:
        for connection in (first, other):
            what, why = store.receive(connection)
            assert (
                what == "abort" and "two processes say that they are rank 1: process 1, and process 7." in why
            )


def test_a_goodbye_is_no_failure(server, watching):
    first, second = watching(0), watching(1)
    store.send(first, "bye")
    first.close()
    assert store.receive(second) == ["ended", 0]
    assert server.failure is None
    store.send(second, "fail", "rank 1 has failed: ValueError")
    assert store.receive(second) == ["abort", "rank 1 has failed: ValueError"]
    assert server.died is None


def test_no_server_and_a_server_that_goes(server, clients):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    with pytest.raises(errors.CollectiveError, match=f"no store of the job answers at 127.0.0.1:{free}"):
        store.Store("127.0.0.1", free, deadline=0.1)
    with pytest.raises(errors.CollectiveError, match="cannot listen"):
        store.StoreServer("127.0.0.1", server.port)
    a, _ = clients(2)
    a._connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(errors.CollectiveError, match="is gone"):
        a.gather("x", b"", 0, (0, 1))


def test_what_is_not_ours_is_not_answered(server, clients):
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02{]", b'\x00\x00\x00\x09["nonsense'):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            with contextlib.suppress(OSError):  # it may close before it has read all
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
    (a,) = clients(1)
    assert a.gather("still", b"here", 0, (0,)) == [b"here"]


def test_last_words_are_heard_out(monkeypatch, server):
    """A rank that fails and ends at once is reported with its message."""
    receive = store.receive

    def late(connection):
        time.sleep(0.2)
        return receive(connection)

    monkeypatch.setattr(store, "receive", late)
    connection = store.watch("127.0.0.1", server.port, 1, "a process", deadline=5.0)
    store.send(connection, "fail", "rank 1 has failed: a reason")
    connection.close()
    server.hear_out(1, 10.0)
    assert server.failure == "rank 1 has failed: a reason"
    server.hear_out(7, 10.0)  # which never came
