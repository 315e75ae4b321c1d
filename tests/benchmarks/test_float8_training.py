"""The benchmark of training in fp8: a tiny run on the CPU, and its plan for a GPU."""

import dataclasses

import numpy as np
import pytest

import blufunc as bf
from benchmarks.suites import float8_training
from benchmarks.suites.float8_training import SIZES, VARIANTS

OF_LAYER = 5 + 4 + 2 * 5
"""Matmuls of a layer: forward, recomputed but for the last, and backward."""


@pytest.mark.slow
def test_a_dry_run(monkeypatch, capsys):
    """All that the command prints, of the baseline and the variant that has a state."""
    recorded = []
    monkeypatch.setattr(float8_training, "report", lambda *args: recorded.append(args))
    monkeypatch.setattr(
        "sys.argv", ["float8_training", "--only", "bfloat16,delayed", "--seeds", "2", "--steps", "3"]
    )
    monkeypatch.setattr(bf.config, "host_compiler", "never")  # it would take longer than the steps
    float8_training.main()
    (suite, (plain, delayed), platform, _), said = recorded[0], capsys.readouterr().out
    assert (suite, platform) == ("float8_training", "cpu") and said.count("tokens_s") == 2
    assert plain["fp8_gemms"] == 0 and "speedup" not in plain
    assert delayed["fp8_gemms"] == OF_LAYER and delayed["speedup"] > 0 and "within_noise" in delayed
    assert np.isfinite([plain["last_loss"], delayed["last_loss"]]).all()
    assert abs(delayed["first_loss"] - plain["first_loss"]) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_plans_of_the_model_that_is_timed(name):
    """Two of its layers, for an H100."""
    sizes = SIZES["cuda"]
    sizes = dataclasses.replace(sizes, config=dataclasses.replace(sizes.config, layers=2, vocab=512), batch=1)
    found = float8_training.planned(name, sizes, "cpu")
    assert found["fp8_gemms"] == (0 if name == "bfloat16" else 2 * OF_LAYER)
