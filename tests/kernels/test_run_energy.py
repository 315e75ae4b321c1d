"""The energy of runs: on a device that is made up, with a clock of its own."""

import time

import pytest

from blufunc.kernels.run_energy import PATIENCE_S, joules_of_runs


class Device:
    """Runs what it was given, one after the other, ``count`` at a time; its counter moves every ``period`` seconds.

    Args:
      ways: by name, the seconds and the joules of a run.
    """

    IDLE_W = 100.0
    POLL_S = 2e-4  # what it takes to ask for the counter

    def __init__(self, ways, period=0.1, count=5):
        self.ways, self.period, self.count = ways, period, count
        self.now, self.free_at, self.began = 0.0, 0.0, []  # when what was given is done; start, end, watts

    def start(self, way):
        seconds, joules = self.ways[way]
        begin = max(self.now, self.free_at)
        self.free_at = end = begin + self.count * seconds
        self.began.append((way, begin, end, joules / seconds))
        return self.count, lambda: self.now >= end

    def counter(self):
        self.now += self.POLL_S
        if not self.period:
            return 0.0
        upto = self.now // self.period * self.period
        busy = [(min(end, upto) - begin, watts) for _, begin, end, watts in self.began if begin < upto]
        return sum(s * w for s, w in busy) + self.IDLE_W * (upto - sum(s for s, _ in busy))


@pytest.fixture
def measured(monkeypatch):
    def measure(device):
        monkeypatch.setattr(time, "monotonic", lambda: device.now)
        return joules_of_runs(list(device.ways), device.start, device.counter)

    return measure


WAYS = {"a": (4e-4, 0.28), "b": (5e-4, 0.25), "c": (2e-3, 1.6)}


@pytest.mark.parametrize("period", [0.1, 0.02])
def test_the_energy_of_each_way(measured, period):
    device = Device(WAYS, period)
    found = measured(device)
    assert list(found) == list(WAYS)
    for way, (_, joules) in WAYS.items():
        # a start may end behind a move of the counter: 2 ms of 80 to 100, 10 ms of those of "c"
        assert found[way] == pytest.approx(joules, rel=0.13 if way == "c" else 0.06), way


def test_the_device_is_never_idle_and_what_it_runs_is_bounded(measured):
    device = Device(WAYS)
    measured(device)
    spans = [(begin, end) for _, begin, end, _ in device.began]
    assert all(end == begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
    assert device.now < 0.1 * (2 + len(WAYS)) + 0.01


def test_a_counter_that_stands_still_says_nothing(measured):
    device = Device(WAYS, period=0)
    assert measured(device) is None
    assert device.now == pytest.approx(PATIENCE_S, rel=0.1)


def test_runs_that_last_longer_than_the_counter_waits_say_nothing(measured):
    assert measured(Device({"a": (1.0, 700.0), "b": (1.0, 600.0)})) is None
