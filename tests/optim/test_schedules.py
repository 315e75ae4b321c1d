"""Schedules: known values, Python and traced counts, errors, and optax."""

from __future__ import annotations

import math

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, optim
from blufunc.transforms.staging.jit import jit

TABLE = {
    "constant": (optim.constant_schedule(0.3), {0: 0.3, 7: 0.3}),
    "linear": (optim.linear_schedule(1.0, 0.0, 10), {0: 1, 5: 0.5, 10: 0, 99: 0}),
    "linear later": (optim.linear_schedule(0.0, 2.0, 4, 3), {0: 0, 3: 0, 4: 0.5, 7: 2, 8: 2}),
    "linear of no steps": (optim.linear_schedule(1.0, 0.0, 0), {0: 1, 5: 1}),
    "polynomial": (optim.polynomial_schedule(1.0, 0.0, 2, 10), {0: 1, 5: 0.25, 10: 0}),
    "cosine": (optim.cosine_decay_schedule(2.0, 10), {0: 2, 5: 1, 10: 0, 20: 0}),
    "cosine to a tenth": (optim.cosine_decay_schedule(2.0, 10, alpha=0.1), {0: 2, 5: 1.1, 10: 0.2}),
    "cosine squared": (optim.cosine_decay_schedule(1.0, 10, exponent=2.0), {0: 1, 5: 0.25, 10: 0}),
    "exponential": (optim.exponential_decay(1.0, 10, 0.5), {0: 1, 10: 0.5, 20: 0.25, 5: math.sqrt(0.5)}),
    "staircase": (optim.exponential_decay(1.0, 10, 0.5, staircase=True), {0: 1, 9: 1, 10: 0.5, 19: 0.5}),
    "exponential to an end": (
        optim.exponential_decay(1.0, 1, 0.5, transition_begin=2, end_value=0.3), {0: 1, 2: 1, 3: 0.5, 4: 0.3},
    ),
    "exponential growth": (optim.exponential_decay(1.0, 1, 2.0, end_value=4.0), {1: 2, 2: 4, 3: 4}),
    "exponential of no steps": (optim.exponential_decay(1.0, 0, 0.5), {3: 1}),
    "piecewise": (optim.piecewise_constant_schedule(1.0, {10: 0.1, 5: 0.5}), {4: 1, 5: 0.5, 9: 0.5, 10: 0.05}),
    "piecewise of one piece": (optim.piecewise_constant_schedule(1.0), {4: 1}),
    "warm-up": (optim.warmup_constant_schedule(0.0, 1.0, 4), {0: 0, 1: 0.25, 4: 1, 9: 1}),
    "warm-up and cosine": (
        optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 110, 0.1), {0: 0, 5: 0.5, 10: 1, 60: 0.55, 110: 0.1, 500: 0.1},
    ),
    "no warm-up": (optim.warmup_cosine_decay_schedule(0.0, 1.0, 0, 10), {0: 1, 5: 0.5}),
    "joined": (
        optim.join_schedules([optim.constant_schedule(3.0), optim.linear_schedule(1.0, 0.0, 2)], [4]),
        {0: 3, 3: 3, 4: 1, 5: 0.5, 6: 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_known_values(name):
    schedule, points = TABLE[name]
    compiled = jit(lambda count: schedule(count) * 1.0)
    for count, expected in points.items():
        for found in (schedule(count), compiled(bnp.asarray(count, dtype="int32"))):
            np.testing.assert_allclose(float(found), expected, rtol=1e-6, atol=1e-7)


def test_float32():
    for name in ("linear", "cosine", "exponential", "warm-up and cosine"):
        assert TABLE[name][0](bnp.asarray(3, dtype="int32")).dtype == np.float32


def test_errors():
    with pytest.raises(errors.ValueRangeError, match="decay_steps=10 must exceed warmup_steps=10"):
        optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 10)
    with pytest.raises(errors.ValueRangeError, match="positive decay_steps, not 0"):
        optim.cosine_decay_schedule(1.0, 0)
    with pytest.raises(errors.ValueRangeError, match="transition_steps is -1"):
        optim.linear_schedule(1.0, 0.0, -1)
    with pytest.raises(errors.ValueRangeError, match="2 schedules need 1 boundaries, not 2"):
        optim.join_schedules([optim.constant_schedule(1)] * 2, [1, 2])
    with pytest.raises(errors.ValueRangeError, match="step 5 on is -1"):
        optim.piecewise_constant_schedule(1.0, {5: -1.0})


PEERS = {
    "linear": lambda o: o.linear_schedule(0.3, 0.1, 7, 2),
    "polynomial": lambda o: o.polynomial_schedule(0.3, 0.1, 3, 7),
    "cosine": lambda o: o.cosine_decay_schedule(0.3, 15, 0.1, 1.5),
    "exponential": lambda o: o.exponential_decay(0.3, 3, 0.7, 2, True, 0.05),
    "piecewise": lambda o: o.piecewise_constant_schedule(0.3, {4: 0.5, 9: 0.1}),
    "warm-up": lambda o: o.warmup_constant_schedule(0.1, 0.3, 5),
    "warm-up and cosine": lambda o: o.warmup_cosine_decay_schedule(0.1, 0.3, 5, 17, 0.05),
    "joined": lambda o: o.join_schedules(
        [o.linear_schedule(0.0, 1.0, 3), o.cosine_decay_schedule(1.0, 9)], [4]
    ),
}


@pytest.mark.peer
@pytest.mark.parametrize("name", PEERS)
def test_against_optax(name):
    optax = pytest.importorskip("optax")
    jax = pytest.importorskip("jax")
    ours, theirs = PEERS[name](optim), jax.jit(PEERS[name](optax))
    for count in range(20):
        np.testing.assert_allclose(float(ours(count)), float(theirs(count)), rtol=2e-6, atol=1e-7)
