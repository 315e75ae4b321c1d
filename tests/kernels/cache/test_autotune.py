"""Which of several ways is the fastest: of ways whose times are made up."""

import pytest

from blufunc.kernels.cache import autotune as f
from blufunc.kernels.cache.autotune import CARE, GLANCE, LONG_MS, WARM, fastest

LONG = 4 * LONG_MS


class Device:
    """Candidates with times on a cool and a warm device: after 20 ms, in runs of 10.

    None: it fails; after a time: it fails in its second run.
    """

    def __init__(self, ways, noise=0.0):
        self.ways, self.warm, self.noise, self.looks = ways, 0.0, noise, []

    def __call__(self, way, ms):
        cool, warm = times if isinstance(times := self.ways[way], tuple) else (times, times)
        glance = ms <= GLANCE.ms
        if (one := cool if glance or (self.warm < 20 and warm) else warm) is None:
            return None
        self.looks.append((way, ms))
        self.warm += ms * (ms >= WARM.ms)
        # what is seen for a moment only is not exact
        return one * (1 + self.noise * glance * (len(self.looks) % 3 == 0)), ms


CASES = {  # the ways, and their order
    "by time": ({"a": 0.03, "b": 0.02, "c": 0.04}, "bac"),
    "of long ones those on a warm device": ({"a": (LONG, 1.2 * LONG), "b": (1.05 * LONG, 1.1 * LONG)}, "ba"),
    "of short ones not": ({"a": (0.01, 0.03), "b": (0.02, 0.02)}, "ab"),
    "what fails is none": ({"a": None, "b": LONG, "c": None, "d": LONG / 2}, "db"),
    "what fails later is none": ({"a": LONG, "b": (LONG / 2, None)}, "a"),
    "all fail": ({"a": None, "b": None}, ""),
    "one": ({"a": LONG}, "a"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_order(name):
    ways, order = CASES[name]
    assert "".join(fastest(list(ways), Device(ways))) == order


def test_how_often_each_is_looked_at():
    ways = {chr(97 + n): LONG * (1 + n / 100) for n in range(20)}
    device = Device(ways)
    found = fastest(list(ways), device)
    count = lambda how: [sum(look == (way, how.ms) for look in device.looks) for way in ways]
    assert count(GLANCE) == [1] * GLANCE.kept + [0] * 4
    assert count(CARE) == [CARE.passes] * CARE.kept + [0] * 14
    assert count(WARM) == [WARM.passes] * WARM.kept + [0] * 16
    assert next(iter(found)) == "a"
    # by turns, so that all of them run on a device that is as warm
    last = [way for way, ms in device.looks if ms == WARM.ms]
    assert last == list("abcd") * WARM.passes


def test_one_way_needs_no_comparison():
    device = Device({"a": LONG, "b": None})
    assert list(fastest("ab", device)) == ["a"]
    assert all(ms < WARM.ms for _, ms in device.looks)


def test_a_wrong_glance_is_mended():
    device = Device({"a": LONG, "b": LONG * 1.02, "c": LONG * 0.99}, noise=0.5)
    assert next(iter(fastest("abc", device))) == "c"


def test_no_more_time_than_there_is(monkeypatch):
    monkeypatch.setattr(f, "MOST_MS", 1.0)
    device = Device(dict.fromkeys("abcdefgh", 0.01))
    fastest("abcdefgh", device)
    assert [way for way, _ in device.looks] == list("abcde")
