"""The cases of the breadth suite at tiny sizes, their comparison, and their table."""

import numpy as np
import pytest

import blufunc as bf
from benchmarks.cases import case as cases
from benchmarks.cases.table import models, operations
from benchmarks.harness import breadth_table
from benchmarks.suites import breadth
from blufunc.config import config

MODELS, OPERATIONS = models(tiny=True), operations(tiny=True)


def types(tree):
    return [(x.shape, x.dtype) for x in bf.tree.leaves(tree)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", MODELS)
def test_models_trace_and_carry_their_state(name):
    case = MODELS[name]
    args = case.make()
    out = bf.eval_shape(lambda *args: case.program(bf, *args), *args)
    assert types(out[: case.carried] if case.carried else ()) == types(args[: case.carried])
    assert types(out)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_run(name, monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "never")
    case = OPERATIONS[name]
    out = bf.tree.leaves(bf.jit(lambda *args: case.program(bf, *args))(*case.make()))
    found = cases.samples([np.asarray(x) for x in out])
    assert cases.difference(found, found) == 0.0


def test_names_are_distinct():
    assert not MODELS.keys() & OPERATIONS.keys()
    assert len(MODELS) + len(OPERATIONS) >= 80


@pytest.mark.parametrize(
    "one, other, expected",
    [
        ([1.0, 2.0], [1.0, 2.5], 0.2),
        ([1.0, np.inf], [1.0, np.inf], 0.0),
        ([1.0, np.nan], [1.0, 2.0], np.inf),
        ([np.nan, np.nan], [np.nan, np.nan], np.inf),
    ],
)
def test_difference_of_results(one, other, expected):
    of = lambda values: cases.samples([np.array(values)])
    assert cases.difference(of(one), of(other)) == pytest.approx(expected)
    assert cases.difference(of(one), cases.samples([np.zeros(3)])) == np.inf


def test_rows_are_compared_with_jax_or_pytorch():
    case = cases.Case(None, None)
    blind = cases.Case(None, None, comparable=False)
    row = lambda library, what, value: {
        "library": library, "what": what, "tolerance": 1e-3, "check": cases.samples([np.full(4, value)])
    }  # fmt: skip
    rows = [
        row("blufunc", "a", 1.0), row("jax", "a", 1.0), row("torch-eager", "a", 2.0),
        row("blufunc", "b", 1.0), row("jax", "b", 1.1), row("torch-eager", "b", 2.0),
        row("blufunc", "c", 1.0), row("torch-eager", "c", 1.0),
    ]  # fmt: skip
    found = breadth.compared(rows, {"a": case, "b": blind, "c": case})
    agree = {(r["what"], r["library"]): r["agrees"] for r in found if "agrees" in r}
    assert agree == {
        ("a", "blufunc"): True, ("a", "torch-eager"): False, ("b", "blufunc"): False, ("c", "blufunc"): True,
    }  # fmt: skip
    assert all("check" not in r for r in found)


def test_table_has_ratios_to_the_best_peer_and_marks():
    rows = [
        {"library": "blufunc", "what": "a", "ms": 3.0, "peak_GB": 1.0, "agrees": False, "apart": 0.5},
        {"library": "jax", "what": "a", "ms": 2.0, "peak_GB": 2.0},
        {"library": "torch-eager", "what": "a", "ms": 1.5},
        {"library": "blufunc", "what": "b", "ms": 1.0},
        {"library": "jax", "what": "b", "ms": 2.0},
    ]
    lines = breadth_table.breadth({"models": ["a"]}, rows)
    assert "| a **blufunc differs: 5e-01** | 3 | 2 | 1.5 | 2.00 |" in lines
    assert "| a | 1.00 | 2.00 |  | 0.50 |" in lines
    assert "| b | 1 | 2 |  | 0.50 |" in lines
    assert lines[-1] == "Geometric mean of all time ratios: 1.000."


def test_runs_are_combined_by_medians():
    of = lambda ms, agrees=True: {
        "library": "jax", "what": "k-means", "ms": ms, "peak_GB": ms, "apart": ms, "agrees": agrees
    }  # fmt: skip
    record = lambda row: {"gpu": {"uuid": "x"}, "rows": [row], "left_out": [["jax", {"what": "k-means"}]]}
    found = breadth.medians([record(of(3.0)), record(of(1.0, agrees=False)), record(of(2.0))])
    assert found["rows"] == [
        of(2.0, agrees=False) | {"all_ms": [3.0, 1.0, 2.0], "peak_GB": 3.0, "apart": 3.0}
    ]
    assert found["left_out"] == []
    assert found["runs"] == 3
    with pytest.raises(SystemExit, match="different devices"):
        breadth.medians([record(of(1.0)), record(of(1.0)) | {"gpu": {"uuid": "y"}}])


def test_earlier_rows_of_other_cases_are_kept():
    of = lambda name, ms: {"library": "blufunc", "what": name, "ms": ms}
    record = lambda rows, left: {
        "gpu": {"name": "a device"}, "rows": rows, "left_out": [["jax", {"what": w}] for w in left], "versions": {}
    }  # fmt: skip
    now = record([of("b", 2.0)], [])
    breadth.merge(
        now, record([of("a", 1.0), of("b", 1.0), of("gone", 1.0)], ["b", "c"]), {"b"}, ["a", "b", "c"]
    )
    assert [(r["what"], r["ms"]) for r in now["rows"]] == [("a", 1.0), ("b", 2.0)]
    assert now["left_out"] == [["jax", {"what": "c"}]]
