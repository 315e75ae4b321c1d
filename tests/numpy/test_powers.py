"""Integer powers: modulo the range of the dtype, for exponents of any size."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import config, lax
from blufunc.transforms.staging.jit import jit

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.fixture(params=["never", "always"])
def compiled(request, monkeypatch):
    monkeypatch.setattr(config, "host_compiler", request.param)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_exponents_in_arrays(dtype, compiled):
    limits, rng = np.iinfo(dtype), np.random.default_rng(0)
    x = np.array([0, 1, 2, 3, 5, limits.max, limits.min, 0, 2, 3, 3, 2], dtype)
    y = np.array([64, 65, 64, 64, 66, 64, 64, 0, 0, 127, 33, 31], dtype)
    x = np.concatenate([x, rng.integers(limits.min, limits.max, 50, dtype)])
    y = np.concatenate([y, rng.integers(0, limits.max, 50, dtype)])
    a, b = bnp.asarray(x, dtype), bnp.asarray(y, dtype)
    for f in (bnp.power, jit(bnp.power), jit(lax.pow), lambda a, b: a**b):
        np.testing.assert_array_equal(f(a, b), np.power(x, y), strict=True)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_shared_half_is_a_power_and_no_root(dtype, compiled):
    """At -inf and -0, where ``sqrt`` has NaN and -0."""
    x = bnp.asarray([-np.inf, -0.0, 0.0, 4.0, -4.0, np.inf, np.nan], dtype)
    half, want = bnp.asarray(0.5, dtype), np.array([np.inf, 0, 0, 2, np.nan, np.inf, np.nan], dtype)
    for f in (lambda x: x**0.5, lambda x: x**half, lambda x: x ** bnp.broadcast_to(half, x.shape)):
        for got in (f(x), jit(f)(x), bnp.stack([f(e) for e in x])):
            assert not np.signbit(np.asarray(got)[1:4]).any()
            np.testing.assert_array_equal(got, want, strict=True)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 63, 64, 65, 127, 128, 200, 300, 2**31 - 1, 2**31, 2**40 + 3])
def test_static_exponents(dtype, n, compiled):
    limits = np.iinfo(dtype)
    x = np.array([0, 1, 2, 3, 6, 7, 100, limits.max, limits.min], dtype)
    want = [pow(int(v), n, 2**limits.bits) for v in x]
    want = np.array([v - 2**limits.bits if v > limits.max else v for v in want], dtype)
    for f in (lambda x: x**n, jit(lambda x: x**n), lambda x: lax.integer_pow(x, n)):
        np.testing.assert_array_equal(f(bnp.asarray(x, dtype)), want, strict=True)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_negative_exponents(dtype, compiled):
    """The real number, rounded toward zero; 0 of 0."""
    x = bnp.asarray([0, 1, -1, -1, 2, np.iinfo(dtype).min, 5], dtype)
    y = bnp.asarray([-1, -2, -3, -2, -1, -1, 2], dtype)
    for f in (bnp.power, jit(bnp.power)):
        assert f(x, y).tolist() == [0, 1, -1, 1, 0, 0, 25]


def test_python_numbers():
    assert int(bnp.power(0, 64)) == int(bnp.power(2, 64)) == 0
    assert int(jit(bnp.power)(0, 64)) == int(jit(bnp.power)(2, 64)) == 0
    assert bnp.power(bnp.asarray([True, False]), bnp.asarray([True, False])).tolist() == [1, 1]
