"""Which of several ways is the fastest: of ways whose times are made up."""

import pytest

from blufunc.kernels import fastest as f
from blufunc.kernels.fastest import CARE, COMPARED, GLANCE, LONG_MS, MARGIN, fastest

LONG = 4 * LONG_MS


class Device:
    """Ways, by name, with their times, and behind them the times of their energy at the limit of power, if it has a
    counter; None: a way fails."""

    def __init__(self, ways, noise=0.0):
        self.ways = {way: times if isinstance(times, tuple) else (times,) for way, times in ways.items()}
        self.noise, self.looks, self.compared = noise, [], []

    def look(self, way, ms):
        one = self.ways[way][0]
        if one is None:
            return None
        self.looks.append((way, ms))
        # what is seen for a moment only is not exact
        return one * (1 + self.noise * (ms <= GLANCE.ms) * (len(self.looks) % 3 == 0)), ms

    def at_limit(self, times):
        self.compared.append(dict(times))
        return {way: self.ways[way][1] for way in times if len(self.ways[way]) > 1}

    def fastest(self, ways=None):
        return fastest(list(ways or self.ways), self.look, self.at_limit)


CASES = {  # the ways, and their order
    "by time": ({"a": 0.03, "b": 0.02, "c": 0.04}, "bac"),
    "of long ones by energy": ({"a": (LONG, 1.2 * LONG), "b": (1.05 * LONG, 1.1 * LONG)}, "ba"),
    "by time if the limit is not reached": ({"a": (LONG, 0.7 * LONG), "b": (1.05 * LONG, 0.6 * LONG)}, "ab"),
    "of short ones by time": ({"a": (0.01, 0.03), "b": (0.02, 0.02)}, "ab"),
    "what takes far longer is not asked": ({"a": (LONG, 2 * LONG), "b": (1.01 * MARGIN * LONG, LONG)}, "ab"),
    "nobody knows": ({"a": LONG, "b": 1.05 * LONG}, "ab"),
    "what fails is none": ({"a": None, "b": LONG, "c": None, "d": LONG / 2}, "db"),
    "all fail": ({"a": None, "b": None}, ""),
    "one": ({"a": LONG}, "a"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_order(name):
    ways, order = CASES[name]
    assert "".join(Device(ways).fastest()) == order


def test_how_often_each_is_looked_at():
    ways = {chr(97 + n): (LONG * (1 + n / 100), LONG * (2 - n / 100)) for n in range(20)}
    device = Device(ways)
    found = device.fastest()
    count = lambda how: [sum(look == (way, how.ms) for look in device.looks) for way in ways]
    assert count(GLANCE) == [1] * GLANCE.kept + [0] * 4
    assert count(CARE) == [CARE.passes] * CARE.kept + [0] * 14
    assert [list(times) for times in device.compared] == [list(ways)[:COMPARED]]
    assert list(found)[: COMPARED + 1] == ["c", "b", "a", "d"]
    assert found["c"] == pytest.approx(1.98 * LONG)


def test_one_way_needs_no_comparison():
    device = Device({"a": (LONG, LONG), "b": None})
    assert list(device.fastest()) == ["a"]
    assert not device.compared


def test_a_wrong_glance_is_mended():
    device = Device({"a": LONG, "b": LONG * 1.02, "c": LONG * 0.99}, noise=0.5)
    assert next(iter(device.fastest())) == "c"


def test_no_more_time_than_there_is(monkeypatch):
    monkeypatch.setattr(f, "MOST_MS", 1.0)
    device = Device(dict.fromkeys("abcdefgh", 0.01))
    device.fastest()
    assert [way for way, _ in device.looks] == list("abcde")
