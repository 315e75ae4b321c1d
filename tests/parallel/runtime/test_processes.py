"""Meshes of several processes: launched, with MPI between them."""

import signal
from pathlib import Path

import pytest

from tests.parallel.launching import needs_mpi, run

PROGRAM = Path(__file__).parent / "process_program.py"

pytestmark = needs_mpi


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "n", "compiler"),
    [
        ("arrays", 4, "auto"),
        ("programs", 4, "always"),
        ("helpers", 3, "auto"),
        ("disagree", 2, "auto"),
    ],
)
def test_scenarios(scenario, n, compiler):
    code, out, err, _ = run("-n", n, PROGRAM, scenario, BLUFUNC_HOST_COMPILER=compiler)
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] done" for rank in range(n)]


@pytest.mark.slow
def test_a_rank_killed_in_a_training_step_ends_the_job_and_is_named():
    code, out, err, seconds = run("-n", 2, PROGRAM, "kill")
    assert code == 128 + signal.SIGKILL
    assert "[0] step 2: " in out and "step 3" not in out
    assert seconds < 10
    assert "launch: rank 1 was killed by SIGKILL; all 2 ranks have ended." in err
    assert "  rank 0: in #" in err and "at train.py:" in err
    assert "<- behind the others" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_rank_that_computes_alone_does_not_wait_for_ever():
    code, _, err, _ = run("-n", 2, PROGRAM, "alone")
    assert code != 0
    assert "comparison of reduce_sum over data, 0 bytes, at process_program.py:" in err
    assert "for rank 1, whose program has ended" in err
