"""The simulated network: times of collectives between hosts, and values."""

import numpy as np
import pytest

from blufunc import errors
from blufunc.config import config
from blufunc.parallel.mesh import simulated_network
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.runtime import engine
from blufunc.parallel.runtime.simulated import run_ranks

TEXT = "2hosts, 3ms, 0.001GB/s"  # a millisecond for 1000 bytes
ALL, ONE = (0, 1, 2, 3), (0, 1)


@pytest.mark.parametrize(
    ("kind", "group", "options", "milliseconds"),
    [
        ("all_reduce", ALL, {}, 2 * 3 + 1),  # a ring of two hosts: two steps, of half of the bytes
        ("all_gather", ALL, {"dim": 0}, 3 + 2),  # half of the result, of four operands
        ("reduce_scatter", ALL, {"dim": 0}, 3 + 0.5),
        ("all_to_all", (1, 3), {}, 3 + 2 * 0.5),  # and as much of the group (0, 2), over the same link
        ("permute", (1, 3), {"perm": ((0, 1),)}, 3 + 2),
        ("permute", ALL, {"perm": ((0, 2), (1, 3))}, 3 + 2),
        ("permute", ALL, {"perm": ((0, 1), (1, 2))}, 3 + 1),
        ("permute", ALL, {"perm": ((0, 1), (2, 3))}, 0),
        ("all_reduce", ONE, {}, 0),
        ("all_gather", (2, 3), {"dim": 0}, 0),
    ],
)
def test_a_collective_between_hosts_takes_as_long_as_a_ring_of_them(kind, group, options, milliseconds):
    network = simulated_network.network(TEXT)
    found = simulated_network.delay(network, kind, 1000, group, 4, **options)
    assert found == pytest.approx(milliseconds / 1e3)


def test_ranks_wait_and_values_are_the_same(monkeypatch):
    waits = []
    monkeypatch.setattr(simulated_network.time, "sleep", waits.append)
    mesh = AbstractMesh((2, 2), ("host", "local"))
    parts = np.arange(4.0)[:, None]

    def program(rank):
        total = engine.current().collective("all_reduce", parts[rank], ("local",))
        return float(engine.current().collective("all_reduce", total, ("host",))[0])

    monkeypatch.setattr(config, "simulated_network", TEXT)
    assert run_ranks(mesh, program) == [6.0] * 4
    assert waits == [pytest.approx(6e-3 + 2 * 8e-6)] * 4  # of the second sum, of two groups


@pytest.mark.parametrize("text", ["2", "2hosts,3,1GB/s", "0hosts,1us,1GB/s", "2hosts,1us,0GB/s", "two hosts"])
def test_other_forms_are_refused_when_the_flag_is_set(text):
    with pytest.raises(
        errors.ValueRangeError, match=r"(?s)'simulated_network' cannot be.*2hosts,100us,10GB/s"
    ):
        config.update("simulated_network", text)


def test_hosts_that_do_not_divide_the_ranks(monkeypatch):
    monkeypatch.setattr(config, "simulated_network", "3hosts,1us,1GB/s")
    with pytest.raises(errors.ValueRangeError, match="4 ranks on 3 simulated hosts"):
        simulated_network.wait("all_reduce", 8, ALL, 4)
