"""Tables of benchmark records: ratios, and marks where results differ."""

import math

import pytest

from benchmarks import report
from benchmarks.harness import gpt2_tables, gpu_tables
from benchmarks.suites import turns

PART = {"gpu": {"name": "a device"}, "date": "2026-01-01", "versions": {"blufunc": "0"}, "left_out": []}


def lines(benchmark, *rows, **more):
    text = gpu_tables.table(PART | {"benchmark": benchmark, "rows": list(rows)} | more)
    return text.splitlines()


def grid(found):
    """Rows of the first table, as cells by column; columns of one name get an index."""
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in found if line.startswith("|")]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def kernel(library, ms, check=(1.0, -2.0)):
    return {"library": library, "what": "gelu", "ms": ms, "GB_s": 100 / ms, "check": list(check)}


def test_kernels_are_compared_with_the_best_peer():
    found = lines(
        "gpu_kernels", kernel("jax", 3.0), kernel("torch-eager", 2.5), kernel("blufunc", 2.0), copy_GB_s=100.0
    )
    assert found[4].startswith("| milliseconds | blufunc | jax | torch-eager |")
    assert found[6] == "| gelu | 2 | 3 | 2.5 |  | 50 | 50 | 1.25 |"
    assert found[8] == "Geometric mean of the ratios: 1.250."


def test_a_kernel_without_a_peer_has_no_ratio():
    assert lines("gpu_kernels", kernel("blufunc", 2.0))[6].endswith("|  |")


@pytest.mark.parametrize(
    "ours, marked",
    [
        ((1.0, -2.0), False),
        ((1.001, -2.0), False),
        ((1.1, -2.0), True),
        ((math.nan, -2.0), True),
        ((1.0,), True),
    ],
    ids=str,
)
def test_kernels_that_disagree_are_marked(ours, marked):
    found = lines("gpu_kernels", kernel("jax", 3.0), kernel("blufunc", 2.0, ours))
    assert ("differs" in found[6]) == marked


def step(library, rate, losses, **more):
    row = {"library": library, "precision": "bf16", "tokens_s": rate, "step_ms": 1.0, "first_step_s": 9.0}
    return row | {"losses": losses} | more


@pytest.mark.parametrize(
    "ours, cell",
    [([5.0, 4.005], "5.0e-03"), ([5.0, 4.5], "**5.0e-01**"), ([math.nan, 4.0], "**nan**")],
    ids=str,
)
def test_losses_beyond_the_tolerance_are_marked(ours, cell):
    found = lines("gpu_gpt2", step("torch-eager", 10.0, [5.0, 4.0]), step("blufunc", 20.0, ours))
    row = grid(found)[0]
    assert (row["precision"], row["library"]) == ("bf16", "blufunc")
    assert (row["losses apart"], row["rate / best peer"]) == (cell, "2.000")


def test_the_start_from_a_warm_cache_stands_beside_the_cold_one():
    warm = {"library": "blufunc", "precision": "bf16", "cache": "warm", "first_step_s": 0.5}
    found = lines("gpu_gpt2", step("blufunc", 20.0, [5.0]), warm)
    (row,) = grid(found)
    assert (row["first step s"], row["from warm cache s"]) == ("9", "0.5")


H200 = {"gpu": {"name": "NVIDIA H200"}}


def test_rates_and_memory_stand_beside_what_is_asked():
    rows = [
        step("torch-eager", 10.0, [5.0], most_GB=30.0),
        step("torch-compile", 16.0, [5.0], most_GB=20.0),
        step("blufunc chunk=auto", 20.0, [5.0], most_GB=15.0),
    ]
    first, *others = grid(lines("gpu_gpt2", *rows, **H200))
    assert (first["library"], first["rate / best peer"], first["target rate"]) == (
        "blufunc chunk=auto",
        "1.250",
        "1.15",
    )
    assert (first["memory / best peer"], first["target memory"]) == ("0.750", "0.60")
    assert all(row["target rate"] == row["rate / best peer"] == "" for row in others)
    assert "target rate" not in grid(lines("gpu_small", *rows, **H200))[0]


def product(library, what, ms, rate, count=12, precision="bf16"):
    return {
        "library": library,
        "product": what,
        "ms": ms,
        "TFLOP_s": rate,
        "count": count,
        "precision": precision,
    }


def test_the_use_of_the_device_is_reckoned_by_the_quickest_products():
    rows = [
        product("torch", "square x @ w", 1.0, 800.0, count=0),
        product("jax", "square x @ w", 2.0, 400.0, count=0),
        product("torch", "up x @ w", 1.0, 500.0, count=2),
        product("blufunc", "up x @ w", 0.5, 1000.0, count=2),
        product("torch", "logits x @ w", 3.0, 200.0, count=1),
        product("torch", "up x @ w", 1.0, 50.0, precision="fp32"),
    ]
    assert gpt2_tables.rates(rows) == {
        "bf16": (800.0, pytest.approx(400.0)),
        "fp32": (None, pytest.approx(50.0)),
    }
    found = lines("gpu_gpt2", step("blufunc", 20.0, [5.0], TFLOP_s=200.0), *rows)
    (row,) = grid(found)
    assert (row["% of 8192^3"], row["% of its matmuls"]) == ("25", "50")
    line = (
        "Matmuls in bf16, the best of blufunc, torch, jax: 800 TFLOP/s for 8192^3, 400 for those of a step."
    )
    assert line in found


def test_the_data_are_named():
    rows = [step("blufunc", 20.0, [5.0])]
    assert "Losses are of 1 steps." in lines("gpu_gpt2", *rows)
    assert "Losses are of 1 steps on real text." in lines("gpu_gpt2", *rows, facts={"data": "text"})


def test_nothing_but_products_has_no_table_of_steps():
    found = lines("gpu_gpt2", product("torch", "square x @ w", 1.0, 800.0, count=0))
    assert not any(line.startswith("|") for line in found)


def order(library, seed, losses):
    return {"library": library, "precision": "bf16", "order": seed, "losses": losses}


@pytest.mark.parametrize("shift, word", [(0.0, "yes"), (0.5, "**no**")])
def test_curves_within_seed_noise(shift, word):
    slope = [5.0, 4.0, 3.0]
    rows = [order("torch-eager", seed, [x + 0.25 * seed for x in slope]) for seed in (0, 1)]
    rows += [order("blufunc", seed, [x + 0.25 * seed + shift for x in slope]) for seed in (0, 1)]
    (row,) = grid(lines("gpu_gpt2_curves", *rows))
    assert (row["peer"], row["steps"], row["within seed noise"]) == ("torch-eager", "3", word)


def test_errors_of_gradients_stand_beside_those_of_the_peers_in_fp32():
    def errors(library, precision, size):
        row = {"library": library, "precision": precision, "loss_error": 1e-7, "gradients": size}
        return row | {"worst": 2 * size, "worst_of": "norm.bias"}

    reference = {"library": "torch in float64", "precision": "fp32", "loss": 5.0}
    rows = [
        errors("torch-eager", "fp32", 4e-7),
        errors("blufunc", "fp32", 2e-7),
        errors("blufunc", "bf16", 4e-3),
    ]
    found = grid(lines("gpu_gpt2_curves", reference, *rows))
    assert [(r["library"], r["relative to the peers' fp32"]) for r in found] == [
        ("blufunc", "10,000.00"), ("blufunc", "0.50"), ("torch-eager", "1.00"),
    ]  # fmt: skip


def attention(library, precision, ms):
    errors = {"out_error": 1e-3, "gradient_error": 2e-3}
    return {
        "library": library,
        "precision": precision,
        "what": "forward 1x1",
        "ms": ms,
        "TFLOP_s": 9.0,
    } | errors


def test_attention_in_float32_tc_has_the_peers_of_fp32():
    rows = [
        attention("blufunc", "bf16", 1.0),
        attention("torch-flash", "bf16", 2.0),
        attention("torch", "fp32", 6.0),
    ]
    found = grid(lines("gpu_attention", *rows, attention("blufunc", "float32_tc", 2.0)))
    assert [r["best peer / blufunc"] for r in found] == ["2.00", "", "3.00"]
    assert found[0]["blufunc"] == "1 (1e-03)" and found[2]["torch"] == ""


@pytest.mark.parametrize("second, word", [("aa", "yes"), ("ab", "**no**"), (None, "**no**")])
def test_runs_are_equal_to_the_last_bit_or_not(second, word):
    rows = [
        {"library": "blufunc", "what": "m", "precision": "bf16", "parameters": p, "losses": [1.0]}
        for p in ("aa", second)
        if p
    ]
    assert lines("gpu_repro", *rows)[6].endswith(f"| {word} |")


def test_what_failed_and_what_was_left_out_is_said():
    failed = {"library": "jax", "precision": "fp32", "error": "exit status 1: ..."}
    found = lines(
        "gpu_gpt2", step("blufunc", 1.0, [1.0]), failed, left_out=[["torch-eager", {"precision": "tf32"}]]
    )
    assert found[-2:] == ["Failed: jax fp32.", "Not run for lack of time: torch-eager tf32."]


def test_the_page_has_the_host_first():
    host = {"benchmark": "cpu_kernels", "date": "d", "device": "x", "blas_threads": "1", "versions": {}}
    host["rows"] = [
        {
            "what": "gelu",
            "unit": "ms",
            "blufunc": t,
            "jax": 4.0,
            "ratio": t / 4,
            "bytes": 8e6,
            "copy_GB_s": 16.0,
        }
        for t in (2.0, 8.0)
    ]
    copied = PART | {"benchmark": "gpu_copy", "rows": [{"what": "copy", "ms": 1.0, "GB_s": 4000.0}]}
    text = report.page([copied, host])
    assert "| gelu | 2.00 ms | 4.00 ms | 0.50 | 4.0 | 25 |" in text
    assert "Geometric mean of the ratios: 1.00." in text
    assert text.index("cpu_kernels") < text.index("On a GPU") < text.index("4,000")


def test_the_part_written_by_hand_is_kept(tmp_path, monkeypatch):
    page = tmp_path / "benchmarks.md"
    page.write_text(f"stale\n{report.BY_HAND}\n\n## Design measurements\n\nOne table.\n")
    monkeypatch.setattr(report, "PAGE", page)
    for _ in range(2):  # the second run changes nothing
        report.main()
        generated, kept = page.read_text().split(report.BY_HAND)
        assert kept == "\n\n## Design measurements\n\nOne table.\n"
        assert generated.startswith(report.HEAD) and "stale" not in generated


def test_turns_compare_the_medians_of_two_versions():
    step = {
        "library": "blufunc",
        "what": "a step",
        "before": [10.0, 12.0],
        "after": [11.0, 11.22],
        "after_GB": 2.0,
    }
    (row,) = grid(lines("gpu_turns", step))
    assert (row["before"], row["after"], row["after / before"]) == ("10, 12", "11, 11.22", "1.010")
    assert (row["GB before"], row["GB after"]) == ("", "2.0")


def test_rows_of_one_program_by_turns_are_one_row():
    rows = {}
    for version, ms in zip(turns.ORDER, (2.0, 1.0, 1.5, 2.5), strict=True):
        turns.add(rows, "a step", version, {"step_ms": ms, "peak_GB": 1.0})
    turns.add(rows, "kernels", "before", {"what": "gelu", "ms": 0.5})
    assert rows["a step"]["before"] == [2.0, 2.5] and rows["a step"]["after"] == [1.0, 1.5]
    assert rows["a step"]["before_GB"] == rows["a step"]["after_GB"] == 1.0
    assert rows["gelu"]["before"] == [0.5] and not rows["gelu"]["after"]


def test_families_are_compared_with_jax():
    found = [
        {"library": name, "what": "llama", "ms": ms} for name, ms in (("blufunc", 2.0), ("jax-cudnn", 3.0))
    ]
    (row,) = grid(lines("gpu_family", *found))
    assert (row["blufunc"], row["jax-cudnn"], row["speedup"]) == ("2", "3", "1.50")
