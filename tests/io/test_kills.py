"""Runs killed at random moments of saves: nothing lost, torn or left over."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("processes", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_kills_at_random_moments(processes):
    words = ["--kills", "10", "--processes", str(processes)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.io.kills", *words],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"10 kills of {processes} process(es)")
