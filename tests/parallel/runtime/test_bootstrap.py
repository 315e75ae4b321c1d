"""Placement by the variables of every launcher; the token of a job."""

import os
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from blufunc import errors
from blufunc.parallel.runtime import bootstrap, job_token
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
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, (6, 8, 2, 8, "127.0.0.1", 29400)),  # all on one host
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


@pytest.mark.parametrize(
    ("environ", "count", "job"),
    [
        ({}, 0, None),
        ({"BLUFUNC_RESTARTS": "3", "BLUFUNC_JOB": "ab", "SLURM_JOB_ID": "7"}, 3, "ab"),
        ({"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "none"}, 1, None),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "a1"}, 0, "a1"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "2"}, 2, "7.0"),
    ],
)
def test_restarts_of_every_launcher(environ, count, job):
    assert bootstrap.restart_count(environ) == count and bootstrap.job_id(environ) == job


# -- the token of a job ----------------------------------------------------------------------------


@pytest.fixture
def home(monkeypatch, tmp_path):
    """The cache folder, which has the user's secret."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("BLUFUNC_CACHE_DIR", str(folder))
    return folder


def test_the_token_is_the_launchers_or_derived_from_a_secret_of_the_user(home):
    assert job_token.of_job({job_token.VARIABLE: "given"}, 2, 5, hosted=False) == "given"
    alone = {job_token.of_job({}, 1, 0, hosted=False) for _ in range(2)}
    assert len(alone) == 2 and not home.exists()  # no other process needs it
    first, second, other = (job_token.of_job({}, 2, port, hosted=False) for port in (5, 5, 6))
    assert first == second != other
    (secret,) = home.iterdir()
    assert secret.stat().st_mode & 0o777 == 0o600 and home.stat().st_mode & 0o077 == 0
    assert secret.read_text() not in (first, other)


@pytest.mark.parametrize("case", ["hosted", "readable", "folder", "no file"])
def test_no_token_where_others_could_know_it(case, home):
    job_token.of_job({}, 2, 5, hosted=False)
    (secret,) = home.iterdir()
    if case == "readable":
        secret.chmod(0o644)
    elif case == "folder":
        home.chmod(0o777)
    elif case == "no file":
        secret.unlink()
        secret.mkdir()
    message = {
        "hosted": "BLUFUNC_TOKEN is missing",
        "readable": "others can read .*job-secret",
        "folder": "others may write to .*cache",
        "no file": "cannot be used: Is a directory",
    }[case]
    with pytest.raises(errors.ArgumentError, match=message):
        job_token.of_job({}, 2, 5, hosted=case == "hosted")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "own", "elsewhere"])
def test_the_store_of_rank_0_listens_where_the_others_look_for_it(host, capsys, monkeypatch):
    names = {"own": "127.0.0.7", "elsewhere": "203.0.113.1"}  # of which the first stands for an interface
    found = socket.getaddrinfo
    is_loopback = str.startswith
    monkeypatch.setattr(
        bootstrap.socket, "getaddrinfo", lambda name, *a, **k: found(names.get(name, name), *a, **k)
    )
    server = bootstrap._serve("token", host, 0)
    try:
        listens = server._listener.getsockname()[0]
        assert is_loopback(server.host, "127.")
        if host in names:
            assert listens == "0.0.0.0"
            assert f"{host} is no interface of this host" in capsys.readouterr().err
        else:
            assert listens == "127.0.0.1"
    finally:
        server.close()
