"""Checkpoints of several processes, which need no communication library."""

import os
from pathlib import Path

import pytest

from blufunc import io
from blufunc.io import reading, storage
from tests.parallel.launching import run


@pytest.mark.slow
def test_processes_save_and_restore_together(tmp_path):
    program = Path(__file__).with_name("sharing.py")
    code, out, err, _ = run("-n", 3, "--engine", "nccl", program, tmp_path / "run")
    assert code == io.STOPPED and not err, err
    assert sorted(out.split()) == ["[0]", "[0]", "[1]", "[1]", "[2]", "[2]", *3 * ["none"], *3 * ["refused"]]
    (step,) = io.Checkpointer(tmp_path / "run").steps()
    assert step == 4 and sorted(os.listdir(tmp_path / "run")) == [
        ".lock",
        "000004-step-4",
        "000004-step-4.json",
    ]
    io.verify(tmp_path / "run")
    inside = storage.Local(str(tmp_path / "run" / "000004-step-4"))
    files = [reading.opened(inside, f"{i:05}.safetensors") for i in range(3)]
    written = [[a.leaf for a in file.header.arrays] for file in files]
    expected = [*3 * ["columns"], *3 * ["rows"], "same.0", "same.1", "same.2", "same.3"]
    assert sorted(leaf for leaves in written for leaf in leaves) == expected
    assert all("same" in " ".join(leaves) for leaves in written)  # they share the work
