"""A small sample of ``kills.py``: a fault of each kind, and a restarted run."""

import random

import pytest

from tests.parallel import kills
from tests.parallel.launching import needs_mpi


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize(
    ("kind", "engine"), [("kill", "mpi"), ("stop", "mpi"), ("raise", "nccl"), ("exit", "mpi")]
)
def test_a_fault_of_a_rank_ends_its_job(kind, engine):
    kills.trial(random.Random(kind), engine, kind)


def test_a_trial_that_fails_is_no_count(monkeypatch, capsys):
    """The run goes on after any exception, and its counts are of the others."""
    outcomes = [
        ("kill", 0.5, 1.0),
        AssertionError("it hangs"),
        ("kill", 0.1, 3.0),
        ProcessLookupError(3, "gone"),
    ]

    def trial(draw, engine):
        outcome = outcomes[len(seen)]
        seen.append((draw.random(), engine))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    seen, counts = [], kills.Counts(7)
    monkeypatch.setattr(kills, "trial", trial)
    for k in range(4):
        counts.add(k)
    assert str(counts).splitlines() == [
        "2 times kill: ended within 3.0 s, half of them within 2.0 s",
        "2 faults were counted, 2 trials failed",
    ]
    assert [engine for _, engine in seen] == ["nccl", "mpi"] * 2
    assert seen[2][0] == random.Random("7 2").random()  # each has its own seed
    said = capsys.readouterr().out
    assert "trial 1 of seed 7, mpi: Traceback" in said and "trial 2, nccl: kill after 0.10 s" in said


@pytest.mark.slow
@needs_mpi
def test_a_run_that_is_started_again_ends_as_an_undisturbed_one(tmp_path):
    lines = kills.restarted(tmp_path, restarts=1, seed=1, steps=5)
    assert lines[-1].endswith("2, with 2 ranks: all ranks have ended with exit code 0")
