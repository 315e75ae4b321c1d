"""Launched processes: all collectives over MPI, and every end of a job."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blufunc.parallel import launch
from tests.parallel.launching import ROOT, needs_mpi, run, start

PROGRAM = Path(__file__).parent / "rank_program.py"


@needs_mpi
def test_all_collectives_match_simulated_devices():
    code, out, err, _ = run("-n", 4, PROGRAM, "collectives")
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{r}] 154 collectives agree" for r in range(4)]


@pytest.mark.slow
@needs_mpi
def test_ranks_with_different_programs_are_told_where_they_differ():
    code, out, err, _ = run("-n", 4, PROGRAM, "programs")
    assert code == 0, err
    for rank in range(4):
        lines = [line.removeprefix(f"[{rank}] ") for line in out.splitlines() if line.startswith(f"[{rank}]")]
        assert lines[:2] == ["agree", "agree"]
        here, other = (rank, 2) if rank < 2 else (rank, 0)
        assert lines[2].startswith(
            f"differ: ranks {here} and {other} run different programs (step): their parameter 1"
        )
        assert f"rank {here}: the parameter x: f32[{3 + rank // 2}]" in lines[2]
        assert "psum_invariant over x of f32[3] (12 bytes)" in lines[3]
        assert lines[3].count("at rank_program.py:") == 1
    assert "[1] differ: ranks 1 and 0 run different programs (step): their collective 2" in out
    assert "rank 1: no further collective" in out


@needs_mpi
def test_ranks_with_different_shapes_get_an_error():
    code, out, err, _ = run("-n", 2, PROGRAM, "shapes")
    assert code == 1
    assert "CollectiveError: ranks 0 and 1 call different collectives." in err
    assert "rank 0: all_reduce(f64[3]" in err
    assert "rank 1: all_reduce(f64[4]" in err


@needs_mpi
def test_a_killed_rank_ends_the_job_and_is_named():
    code, out, err, seconds = run("-n", 4, PROGRAM, "kill")
    assert code == 128 + signal.SIGKILL
    assert seconds < 10
    assert "launch: rank 1 was killed by SIGKILL; all 4 ranks have ended." in err
    assert "  rank 1: after #4 all_reduce over data, 1,024 bytes, at rank_program.py:" in err
    for rank in (0, 2, 3):
        assert f"  rank {rank}: in #5 all_gather over data, 1,024 bytes, at rank_program.py:" in err


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("fail", "launch: rank 1 has failed: KeyError: 'missing'; all 2 ranks have ended."),
        ("leave", "launch: rank 0 waits in #5 all_gather over data, 1,024 bytes, at rank_program.py:"),
        (
            "stall",
            r"launch: rank 0 has waited \d s in #5 all_gather over data, 1,024 bytes, at rank_program.py:",
        ),
    ],
)
def test_a_rank_that_does_not_come_ends_the_job(scenario, message):
    code, out, err, seconds = run("-n", 2, PROGRAM, scenario)
    assert code == 1
    assert seconds < 15
    assert re.search(message, err), err
    assert "rank 1: after #4 all_reduce over data" in err and "<- behind the others" in err


@needs_mpi
def test_mpirun_alone_starts_ranks_too():
    options = ["--oversubscribe", *(["--allow-run-as-root"] if os.getuid() == 0 else [])]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **launch._ONE_HOST}
    command = [launch.mpirun(), *options, "-n", "2", sys.executable, str(PROGRAM), "programs"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agree\n") >= 4


SCRIPT = """
import os, signal, sys, time
rank = os.environ["RANK"]
print("rank", rank, "of", os.environ["WORLD_SIZE"], sys.argv[1:], flush=True)
if sys.argv[1] == "code" and rank == "1":
    sys.exit(7)
if sys.argv[1] != "end":
    if sys.argv[1] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_output_carries_the_rank(script):
    code, out, err, _ = run("-n", 2, "--engine", "nccl", script, "end", "--flag")
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{r}] rank {r} of 2 ['end', '--flag']" for r in range(2)]


@pytest.mark.slow
def test_an_exit_code_ends_the_job(script):
    code, out, err, seconds = run("-n", 2, "--engine", "nccl", script, "code")
    assert code == 7
    assert seconds < 10
    assert "launch: rank 1 has ended with exit code 7; all 2 ranks have ended." in err
    assert "rank 0: before its first collective" in err


def test_a_signal_is_forwarded_and_those_who_ignore_it_are_killed(script):
    process = start("-n", 2, "--engine", "nccl", "--grace", 0.2, script, "deaf")
    seen = [process.stdout.readline() for _ in range(4)]
    assert "[1] ready\n" in seen
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "launch: SIGTERM has ended the job" in err


def test_bad_command_lines(script, capsys):
    with pytest.raises(SystemExit):
        launch.main(["-n", "0", str(script)])
    assert "a job has at least one rank" in capsys.readouterr().err


def test_no_mpirun_is_an_error_that_says_what_to_install(monkeypatch, capsys, script):
    monkeypatch.setattr(launch.shutil, "which", lambda *args, **kwargs: None)
    assert launch.main(["-n", "2", "--engine", "mpi", str(script)]) == 2
    err = capsys.readouterr().err
    assert "mpirun was not found" in err and "pip install 'blufunc[mpi]'" in err


@needs_mpi
def test_ranks_end_when_the_launcher_is_killed(tmp_path):
    process = start("-n", 2, PROGRAM, "stall", TMPDIR=str(tmp_path))
    said = (process.stdout.readline() for _ in range(3))
    pids = [int(line.split()[-1]) for line in said if " process " in line]
    process.kill()
    process.communicate(timeout=10)
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "ranks outlive their launcher"
        time.sleep(0.05)
