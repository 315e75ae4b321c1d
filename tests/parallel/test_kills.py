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


@pytest.mark.slow
@needs_mpi
def test_a_run_that_is_started_again_ends_as_an_undisturbed_one(tmp_path):
    lines = kills.restarted(tmp_path, restarts=1, seed=1, steps=5)
    assert lines[-1].endswith("2, with 2 ranks: all ranks have ended with exit code 0")
