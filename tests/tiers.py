"""Three test tiers: quick (``make test``), more (CI adds it) and sweep.

In: the collected tests. Out: those of one tier. The tiers divide the tests: none runs twice or never.

- *quick*: all tests but those marked ``slow``, ``second`` or ``peer`` (``make test-peers`` runs the latter). Of
  a large parametrized test a sample: the first and the last case, one of each ``STRIDE`` between them, and each
  case with a parameter value that is new, so that each row of a table of operations is here at least once.
  ``sampled(n)`` replaces this rule for a family with costly cases: n cases, evenly spaced;
  ``sampled(n, "word")`` takes them from those with the word in their id, such as one of several devices.
- *more*: of each test marked ``second`` the sample that quick would have; of what is left of each test, every
  ``RARE``-th case, or all where they are few.
- *sweep*: the others. All cases of all tests take an hour of two cores, and CI has a quarter of one.
"""

import zlib
from collections.abc import Hashable, Iterable, Sequence, Set
from typing import Any

import pytest

TIERS = ("quick", "more", "sweep", "all")
SMALL = 8
"""Families of at most this number of cases are quick in full."""
STRIDE = 16
RARE = 16
FEW = 2
"""At most this number of cases that quick leaves are all in the second tier."""


def quick(items: Sequence[pytest.Item]) -> set[str]:
    """Node ids of the quick tier; depends only on order, markers and parameters."""
    fast = [i for i in items if not any(map(i.get_closest_marker, ("slow", "second", "peer")))]
    return _sampled(_families(fast))


def _sampled(families: dict[str, list[pytest.Item]]) -> set[str]:
    """Node ids of a sample of each family."""
    chosen: set[str] = set()
    seen: set[Hashable] = set()
    for name, cases in families.items():
        for i in sorted(_sample(name, cases, seen)):
            chosen.add(cases[i].nodeid)
            seen.update(_values(cases[i]))
    return chosen


def more(items: Sequence[pytest.Item], first: Set[str]) -> set[str]:
    """Node ids of the second tier: of each family a part of what ``first`` leaves."""
    chosen = _sampled(_families(item for item in items if item.get_closest_marker("second")))
    taken = chosen | first
    for name, cases in _families(item for item in items if item.nodeid not in taken).items():
        n = len(cases)
        kept = range(n) if n <= FEW else range(_phase(name, min(RARE, n)), n, RARE)
        chosen.update(cases[i].nodeid for i in kept)
    return chosen


def _families(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return families


def _phase(name: str, n: int) -> int:
    """Where a family starts below n: those over one table take different rows of it."""
    return zlib.crc32(name.encode()) % n


def _sample(name: str, cases: Sequence[pytest.Item], seen: set[Hashable]) -> Iterable[int]:
    """Positions in a family; ``seen`` holds the parameter values of earlier families."""
    n = len(cases)
    if marker := cases[0].get_closest_marker("sampled"):
        wanted, word = (*marker.args, "")[:2]
        among = [i for i, case in enumerate(cases) if word in case.nodeid]
        return {among[i] for i in evenly_spaced(len(among), wanted)}
    if n <= SMALL:
        return range(n)
    spaced = {0, *range(_phase(name, STRIDE), n, STRIDE), n - 1}
    found = seen | {v for i in spaced for v in _values(cases[i])}
    for i, case in enumerate(cases):
        values = _values(case)
        if not values <= found:
            spaced.add(i)
            found |= values
    return spaced


def evenly_spaced(n: int, wanted: int) -> set[int]:
    """Evenly spaced positions of n cases: the first and the last, or of one the first."""
    if wanted >= n:
        return set(range(n))
    return {i * (n - 1) // max(wanted - 1, 1) for i in range(wanted)}


def _values(item: pytest.Item) -> set[Hashable]:
    """Parameter values of a case: plain ones count once per file, others once in all."""
    callspec = getattr(item, "callspec", None)
    return {_key(item, name, x) for name, x in callspec.params.items()} if callspec else set()


def _key(item: pytest.Item, name: str, value: Any) -> Hashable:
    plain = isinstance(value, str | int | float | bool | complex | tuple | type(None))
    return (item.path, name, repr(value)) if plain else id(value)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Pytest's hook: the option ``--tier``."""
    parser.addoption(
        "--tier", choices=TIERS, default="all", help="the part of the tests to run: tests/tiers.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Pytest's hook: selects what the option asks for."""
    config.pluginmanager.register(Selection(config.getoption("tier")))


class Selection:
    """Pytest plugin that keeps the tests of one tier and counts the others.

    Args:
      tier: one of ``TIERS``.
    """

    def __init__(self, tier: str):
        self.tier = tier
        self.left = 0

    @pytest.hookimpl(trylast=True)  # after -k and -m, which narrow all tiers
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        first = quick(items)
        second = more(items, first)
        tiers: dict[str, list[pytest.Item]] = {"quick": [], "more": [], "sweep": []}
        for item in items:
            name = item.nodeid
            tiers["quick" if name in first else "more" if name in second else "sweep"].append(item)
        kept = items.copy() if self.tier == "all" else tiers[self.tier]
        if self.tier == "quick":
            self.left = len(items) - len(kept)
        chosen = set(map(id, kept))
        if others := [item for item in items if id(item) not in chosen]:
            config.hook.pytest_deselected(items=others)
        slow_files = {item.path for item in kept if item.get_closest_marker("slow")}
        # long tests first, so that no worker ends with one
        items[:] = sorted(kept, key=lambda i: i.path not in slow_files)
        if hasattr(config, "workeroutput"):
            config.workeroutput["left"] = self.left

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """With xdist: all workers collect the same tests and report the same count."""
        self.left = getattr(node, "workeroutput", {}).get("left", self.left)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left:
            terminalreporter.write_line(f"{self.left} tests left to make test-all")
