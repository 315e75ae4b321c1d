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
from blufunc.parallel.runtime import ranks
from tests.parallel.launching import ROOT, needs_mpi, run, start

PROGRAM = Path(__file__).parent / "rank_program.py"


@pytest.mark.slow
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


@pytest.mark.slow
@needs_mpi
def test_ranks_with_different_shapes_get_an_error():
    code, out, err, _ = run("-n", 2, PROGRAM, "shapes")
    assert code == 1
    assert "CollectiveError: ranks 0 and 1 call different collectives." in err
    assert "rank 0: all_reduce(f64[3]" in err
    assert "rank 1: all_reduce(f64[4]" in err


@pytest.mark.slow
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
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **ranks.ONE_HOST}
    command = [ranks.mpirun(), *options, "-n", "2", sys.executable, str(PROGRAM), "programs"]
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


@pytest.mark.slow
def test_a_signal_is_forwarded_and_those_who_ignore_it_are_killed(script):
    process = start("-n", 2, "--engine", "nccl", "--grace", 0.2, script, "deaf")
    seen = [process.stdout.readline() for _ in range(4)]
    assert "[1] ready\n" in seen
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "launch: SIGTERM has ended the job" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", "0"], "a job has at least one rank"),
        (["-n", "2", "--restarts", "-1"], "--restarts -1: 0 or more"),
        (["-n", "2", "--min-ranks", "3"], "--min-ranks 3: from 1 to the 2 of -n"),
    ],
)
def test_bad_command_lines(options, message, script, capsys):
    with pytest.raises(SystemExit):
        launch.main([*options, str(script)])
    assert message in capsys.readouterr().err


def test_no_mpirun_is_an_error_that_says_what_to_install(monkeypatch, capsys, script):
    monkeypatch.setattr(ranks.shutil, "which", lambda *args, **kwargs: None)
    assert launch.main(["-n", "2", "--engine", "mpi", str(script)]) == 2
    err = capsys.readouterr().err
    assert "mpirun was not found" in err and "pip install 'blufunc[mpi]'" in err


@pytest.mark.slow
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


# -- grandchildren ---------------------------------------------------------------------------------

GRANDCHILDREN = """
import os, signal, subprocess, sys, time
if os.environ["RANK"] == "1":  # a child, and one whose parent has ended, in a session of its own
    child = subprocess.Popen(["sleep", "600"])
    lost = subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
    print("started", child.pid, int(lost.stdout), flush=True)
    if sys.argv[1] != "wait":
        {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "exit": lambda: sys.exit(3)}[sys.argv[1]]()
time.sleep(600)
"""


def await_end(pids):
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "processes outlive their job"
        time.sleep(0.02)


def started(lines):
    return next([int(pid) for pid in line.split()[2:]] for line in lines if " started " in line)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize(
    ("engine", "how", "code"),
    [
        ("nccl", "kill", 137),
        pytest.param("nccl", "exit", 3, marks=pytest.mark.slow),
        pytest.param("mpi", "kill", 137, marks=[needs_mpi, pytest.mark.slow]),
    ],
)
def test_grandchildren_of_a_failed_rank_end_with_the_job(engine, how, code, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(GRANDCHILDREN)
    got, out, err, seconds = run("-n", 2, "--engine", engine, script, how)
    assert got == code, err
    pids = started(out.splitlines())
    assert len(pids) == 2
    await_end(pids)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize(
    "who",
    [
        "the launcher",
        pytest.param("a guard", marks=pytest.mark.slow),
        pytest.param("the launcher with SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_grandchildren_end_if_another_process_of_the_job_is_killed(who, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(GRANDCHILDREN)
    process = start("-n", 2, "--engine", "nccl", "--grace", 0.2, script, "wait", TMPDIR=str(tmp_path))
    pids = started(iter(process.stdout.readline, ""))
    parents = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if who == "the launcher":
        process.kill()
    elif who == "the launcher with SIGTERM":
        process.terminate()
    else:
        child = Path(f"/proc/{pids[0]}/stat").read_text().split()[3]
        guard = Path(f"/proc/{child}/stat").read_text().split()[3]
        assert guard in parents
        os.kill(int(guard), signal.SIGKILL)
        pids.pop()  # what is in no process group of the job, and has no parent in it
    process.communicate(timeout=20)
    await_end(pids)
    end = time.monotonic() + 5
    while list(tmp_path.glob("blufunc-*")):  # the folder of the job
        assert time.monotonic() < end
        time.sleep(0.02)


# -- restarts --------------------------------------------------------------------------------------

RESTARTED = """
import os, signal, sys, time
rank, size, count = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "BLUFUNC_RESTARTS"))
print("rank", rank, "of", size, "on", os.environ["LOCAL_RANK"], "in", count, os.environ["BLUFUNC_JOB"], flush=True)
what = sys.argv[1:][count] if count < len(sys.argv) - 1 else "end"
if what == "stopped":
    sys.exit(75)
if what == "end":
    sys.exit(0)
if rank == 1:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        sys.exit(7)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "faults", "sizes", "code", "said"),
    [
        (
            ["--restarts", 3],
            ["kill", "exit"],
            [4, 4, 4],
            0,
            [
                "3 attempts:",
                "  1, with 4 ranks: rank 1 was killed by SIGKILL",
                "  2, with 4 ranks: rank 1 has ended with exit code 7",
                "  3, with 4 ranks: all ranks have ended with exit code 0",
            ],
        ),
        pytest.param(
            *(["--restarts", 1], ["kill", "exit"], [4, 4], 7),
            ["2 attempts:", "  2, with 4 ranks: rank 1 has ended with exit code 7"],
            marks=pytest.mark.slow,
        ),
        (["--restarts", 3], ["stopped"], [4], 75, []),
        (
            ["--restarts", 3, "--min-ranks", 2],
            ["kill"],
            [4, 2],
            0,
            ["starting again with 2 ranks, restart 1 of 3"],
        ),
        pytest.param(
            *(["--restarts", 3, "--min-ranks", 3], ["exit"], [4], 7),
            ["fewer than 3 ranks are left, so the job is not started again"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["replaced", "no more", "asked to stop", "smaller", "too small"],
)
def test_restarts(options, faults, sizes, code, said, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    got, out, err, _ = run("-n", 4, "--engine", "nccl", *options, script, *faults)
    assert got == code, err
    lines = [line.split() for line in out.splitlines()]
    assert len({words[-1] for words in lines}) == 1  # one id
    for count, size in enumerate(sizes):
        ranks_of_it = [words for words in lines if words[-2] == str(count)]
        assert sorted(words[2] for words in ranks_of_it) == [str(r) for r in range(size)]
        assert {words[4] for words in ranks_of_it} == {str(size)}
    assert len(lines) == sum(sizes)
    if sizes[-1] == 2:  # the device of rank 1 is not used again
        assert sorted(words[6] for words in lines if words[-2] == "1") == ["0", "2"]
    last = [line.removeprefix("launch: ") for line in err.splitlines() if line.startswith("launch: ")]
    assert all(line in last for line in said), err
    assert ("attempts:" in err) == (len(sizes) > 1)


@pytest.mark.slow
def test_a_signal_is_no_failure_to_start_again_after(script):
    process = start("-n", 2, "--engine", "nccl", "--restarts", 5, script, "wait")
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM and "starting again" not in err


@pytest.mark.slow
def test_a_stopped_rank_is_noticed_and_the_job_started_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time, blufunc as bf\nbf.distributed.initialize()\n"
        "if bf.process_index() == 1 and not bf.distributed.restart_count():\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    code, _, err, _ = run("-n", 2, "--engine", "nccl", "--restarts", 1, script, BLUFUNC_DEADLINE="2")
    assert code == 0, err
    assert "1, with 2 ranks: rank 1 (process" in err and "has been silent for" in err
