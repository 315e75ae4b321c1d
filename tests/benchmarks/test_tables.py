"""The tables of the benchmarks' records: ratios, and marks where results or losses differ."""

import math

import pytest

from benchmarks import gpu_tables, tables

PART = {"gpu": {"name": "a device"}, "date": "2026-01-01", "versions": {"blufunc": "0"}, "left_out": []}


def lines(benchmark, *rows, **more):
    text = gpu_tables.table(PART | {"benchmark": benchmark, "rows": list(rows)} | more)
    return text.splitlines()


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
    assert found[6].startswith("| bf16 | blufunc |")
    assert found[6].endswith(f"| {cell} | 2.000 |")


def test_the_start_from_a_warm_cache_stands_beside_the_cold_one():
    warm = {"library": "blufunc", "precision": "bf16", "cache": "warm", "first_step_s": 0.5}
    found = lines("gpu_gpt2", step("blufunc", 20.0, [5.0]), warm)
    assert len(found) == 7
    assert "| 9 | 0.5 |" in found[6]


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
    assert found[-2:] == ["Failed: jax fp32.", "Not run, for want of time: torch-eager tf32."]


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
    text = tables.page([copied, host])
    assert "| gelu | 2.00 ms | 4.00 ms | 0.50 | 4.0 | 25 |" in text
    assert "Geometric mean of the ratios: 1.00." in text
    assert text.index("cpu_kernels") < text.index("On a GPU") < text.index("4,000")
