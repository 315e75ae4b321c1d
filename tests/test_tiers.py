"""Test tiers divide the tests; the quick one has every function and table row."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiers import FEW, RARE, SMALL, STRIDE, evenly_spaced, more, quick

ROOT = Path(__file__).parents[1]

TESTS = """
import pytest

ROWS = [object() for _ in range(50)]

@pytest.mark.parametrize("row", ROWS)
def test_rows(row): pass

@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("row", ROWS)
def test_rows_again(row, dtype): pass

@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", range(30))
def test_costly(n): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_slow_case(n): pass

@pytest.mark.parametrize("n", range(5))
def test_few(n): pass

def test_one(): pass
"""


def item(function, markers=(), file="tests/test_a.py", **params):
    """An item as pytest collects it: the parts that the selection reads."""
    name = f"{file}::{function}" + (f"[{'-'.join(map(str, params.values()))}]" if params else "")
    found = {m: SimpleNamespace(args=(a,)) for m, a in dict(markers).items()}
    callspec = {"callspec": SimpleNamespace(params=params)} if params else {}
    return SimpleNamespace(nodeid=name, path=Path(file), get_closest_marker=found.get, **callspec)


def cases(function, n, of=lambda i: i, **options):
    return [item(function, x=of(i), **options) for i in range(n)]


def chosen(items):
    return [i for i, x in enumerate(items) if x.nodeid in quick(items)]


def test_small_families_are_quick_in_full():
    assert chosen([item("test_one"), *cases("test_few", SMALL)]) == list(range(SMALL + 1))


@pytest.mark.parametrize("marker", ["slow", "peer"])
def test_slow_tests_and_comparisons_are_left_out(marker):
    items = [item("test_a", {marker: None}), item("test_fast"), *cases("test_n", 3, markers={marker: None})]
    assert chosen(items) == [1]


def test_values_that_were_shown_are_sampled():
    rows = [object() for _ in range(100)]
    values, gradients = (cases(f, 100, rows.__getitem__) for f in ("test_values", "test_gradients"))
    found = chosen([*values, *gradients])
    assert found[:100] == list(range(100))
    sampled = [i - 100 for i in found[100:]]
    assert sampled[0] == 0 and sampled[-1] == 99
    assert max(b - a for a, b in itertools.pairwise(sampled)) <= STRIDE
    assert len(sampled) <= 100 / STRIDE + 3


def test_plain_values_count_in_each_file():
    items = [*cases("test_n", 20), *cases("test_n", 20, file="tests/test_b.py")]
    assert chosen(items) == list(range(40))
    items = [*cases("test_n", 20), *cases("test_m", 20)]
    assert len(chosen(items)) < 30


@pytest.mark.parametrize(
    "n, wanted, found",
    [(10, 1, {0}), (10, 2, {0, 9}), (10, 4, {0, 3, 6, 9}), (3, 5, {0, 1, 2}), (1, 1, {0})],
)
def test_evenly_spaced(n, wanted, found):
    assert evenly_spaced(n, wanted) == found


def test_more_takes_a_part_of_each_family():
    slow = {"slow": None}
    items = [
        *cases("test_large", 10 * RARE, markers=slow),
        *cases("test_medium", FEW + 1, markers=slow),
        *cases("test_few", FEW, markers=slow),
        item("test_one", slow),
        item("test_fast"),
    ]
    found = [name.partition("[")[0].partition("::")[2] for name in more(items, quick(items))]
    assert {name: found.count(name) for name in found} == {
        "test_large": 10,
        "test_medium": 1,
        "test_few": FEW,
        "test_one": 1,
    }


def test_second_moves_the_sample_of_a_family():
    plain, second = (cases("test_large", 10 * STRIDE, markers=m) for m in ((), {"second": None}))
    assert quick(second) == set()
    assert set() < quick(plain) <= more(second, set())


@pytest.mark.slow
def test_tiers_divide_the_tests(tmp_path):
    """With xdist, whose workers count what is left out."""
    (tmp_path / "test_rows.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  sampled(n)\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "tests.tiers",
        "-p",
        "no:cacheprovider",
        "--rootdir",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*options):
        done = subprocess.run(
            [*command, tmp_path, *options], cwd=tmp_path, capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        passed = [line.split("::")[1].split(" ")[0] for line in lines if "PASSED" in line]
        return passed, [line for line in lines if "left to" in line]

    all_, none = run("--tier=all", "-n", "0")
    first, left = run("--tier=quick", "-n", "0")
    second, nothing = run("--tier=more", "-n", "0")
    third, _ = run("--tier=sweep", "-n", "0")
    assert sorted([*first, *second, *third]) == sorted(all_) and len(all_) == 50 + 100 + 30 + 1 + 2 + 5 + 1
    assert {"test_slow", "test_slow_case[2]"} <= set(second)
    assert [t for t in first if "costly" in t] == ["test_costly[0]", "test_costly[14]", "test_costly[29]"]
    assert 0 < sum("costly" in t for t in second) < sum("costly" in t for t in third)
    assert sum("test_rows[" in t for t in first) == 50
    assert left == [f"{len(second) + len(third)} tests left to make test-all"] and not none and not nothing
    assert run("--tier=quick", "-n", "1", "-k", "few or slow")[1] == ["2 tests left to make test-all"]
