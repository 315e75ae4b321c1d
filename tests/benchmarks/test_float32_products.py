"""Benchmarks of float32 matmuls: the tensor-core model, and the GPU's table."""

import numpy as np
import pytest

import blufunc as bf
from benchmarks import report
from benchmarks.peers import clock
from benchmarks.suites import float32_errors, gpu_products
from blufunc.kernels.precision import ALGORITHMS
from tests.emulation import fake_cuda


def test_a_tensor_core_rounds_towards_zero():
    ones = np.ones((1, 17), np.float32)
    small = np.full((17, 1), 2.0**-24, np.float32)
    small[0] = 1.0
    # after the first 16 terms the sum is 1 + 15 * 2^-24, of which 2 bits below the last are kept during the addition
    assert float32_errors.by_tensor_core(ones, small, 16)[0, 0] == np.float32(1 + 2.0**-23 * 7)
    assert float32_errors.by_fma(ones, small)[0, 0] == 1.0  # ties go to even
    assert float32_errors.by_tensor_core(-ones, small, 16)[0, 0] == np.float32(-1 - 2.0**-23 * 7)


@pytest.mark.parametrize("at_a_time", [8, 16])
def test_what_is_exact_stays_exact(at_a_time):
    rng = np.random.default_rng(0)
    x, y = rng.integers(-64, 64, (5, 300)), rng.integers(-64, 64, (300, 7))
    got = float32_errors.by_tensor_core(x.astype(np.float32), y.astype(np.float32), at_a_time)
    np.testing.assert_array_equal(got, x @ y)
    np.testing.assert_array_equal(float32_errors.by_fma(x, y), x @ y)


TF32 = {
    1.0: 1.0,
    1 + 2.0**-11: 1.0,
    1 + 3 * 2.0**-11: 1 + 2.0**-9,
    1 + 2.0**-11 + 2.0**-20: 1 + 2.0**-10,
    -0.1: -0.0999755859375,
}


@pytest.mark.parametrize("x", TF32)
def test_rounding_to_11_bits(x):
    assert float32_errors.tf32(np.array([x], np.float32))[0] == np.float32(TF32[x])


def test_the_record_as_a_section():
    found = float32_errors.errors_of("normal", 64, ("SGEMM", "TF32"))
    assert found["TF32"]["rms"] > found["SGEMM"]["rms"] > 0
    record = {
        "benchmark": "float32_errors",
        "date": "2026-01-01",
        "rows": [{"operands": "normal", "terms": 64, "errors": found}],
    }
    *_, head, line, row = report.section(record).splitlines()
    assert head == "| operands | terms | SGEMM | TF32 |" and line.count("---") == 4
    assert row.startswith("| normal | 64 | ") and f"{found['SGEMM']['worst']:.1e}" in row


@pytest.mark.sampled(1)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_table_of_a_device(platform, monkeypatch):
    fake = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(clock, "event_ms", lambda call, stream, repeats: (call(0), 1.0)[1])
    (case,) = gpu_products.TINY.items()
    usual = dict(ALGORITHMS)
    calls, lines = [], []
    for row in gpu_products.rows(case[0], *case[1], bf.devices(platform)[0]):
        calls.append(fake.products - sum(calls))
        lines.append(row)
    assert len(lines) == len(gpu_products.PRECISIONS) and usual == ALGORITHMS
    one_part = [name.startswith("F16") and chunk is None for name, chunk in gpu_products.PRECISIONS]
    for line, short in zip(lines, one_part, strict=True):
        assert float(line.split("|")[-2]) < (1e-3 if short and platform == "cuda" else 1e-5)
    if platform == "cuda":  # chunks of 256 terms are more calls than those of 512, those of 1024 fewer
        of = dict(zip(gpu_products.PRECISIONS, calls, strict=True))
        runs = [of["F16_F16_F32_X3", n] for n in (1024, 512, 256)]
        assert runs == sorted(set(runs)) and of["highest", None] < runs[0]
