"""Random programs of ``shard_map`` against one device, with derivatives.

All of seeds 0 to 4,999 were run once; these are evenly spaced ones.
"""

import pytest

from blufunc.config import config
from tests.parallel.collectives.shard_map_programs import (
    COLLECTIVE,
    CUSTOM,
    NESTING,
    difference,
    program,
)

SEEDS = range(3, 5000, 125)
PARTLY = [seed for seed in range(0, 5000, 50) if program(seed).manual == ("a",)]


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch):
    """Small arrays: calls of NumPy are faster than a compiler."""
    monkeypatch.setattr(config, "host_compiler", "never")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", SEEDS)
def test_on_simulated_ranks(seed):
    one = program(seed)
    assert difference(one, 2 if seed % 3 == 0 else 1) < 1e-6, one


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", PARTLY)
def test_partitioned_along_automatic_axes(seed, eight):
    one = program(seed)
    assert difference(one, 1, on_devices=True) < 1e-6, one


def test_programs_have_all_statements():
    kinds = set()

    def visit(body):
        for s in body:
            kinds.add(s.kind)
            for inner in s.bodies:
                visit(inner)

    for seed in range(300):
        visit(program(seed).body)
    assert kinds >= {*COLLECTIVE, *CUSTOM, *NESTING, "shard_map", "tanh", "matmul"}


def test_programs_depend_on_their_seed_alone():
    assert str(program(7)) == str(program(7)) != str(program(8))
