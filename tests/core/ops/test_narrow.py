"""Integers of 2 and 4 bits, and floats of a byte, compared with NumPy."""

import ml_dtypes
import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import dtypes

NARROW = sorted(dtypes.WIDE_OF_NARROW, key=str)
OTHER_FLOATS = sorted(set(dtypes.SMALL_FLOATS) - {dtypes.float8_e4m3fn, dtypes.float8_e5m2}, key=str)

# functions of two arrays of integers that NumPy computes in int32, of which the low bits are the result
FUNCTIONS = {
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y,
    "chain": lambda x, y: x * y - (x & ~y) + 1,
    "quotient": lambda x, y: x // bnp.where(y == 0, bnp.ones_like(y), y),
    "largest": bnp.maximum,
    "power": lambda x, y: x**3,
    "parts": lambda x, y: bnp.concatenate([x[:2], bnp.flip(y)[1:]]),
    "padded": lambda x, y: bnp.pad(x, 1, constant_values=1),
    "clipped": lambda x, y: bnp.clip(x, 0, 1),
    "scan": lambda x, y: lax.scan(lambda c, a: (c + a, c * a), x[0], y)[1],
    "scattered": lambda x, y: x.at[bnp.array([0, 0, 1])].add(y[:3]),
    "batched": lambda x, y: bf.vmap(lambda a, b: a - b)(x, y),
    "running sum": lambda x, y: lax.cumsum(x),
    "sorted": lambda x, y: bnp.sort(x),
    "shifted": lambda x, y: x << 1,
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_arithmetic_is_that_of_the_low_bits(name, dtype):
    limits = dtypes.iinfo(dtype)
    rng = np.random.default_rng(1)
    x, y = (rng.integers(limits.min, limits.max + 1, 7) for _ in range(2))
    function = FUNCTIONS[name]
    out = function(bnp.asarray(x, dtype), bnp.asarray(y, dtype))
    want = np.asarray(function(bnp.asarray(x, "int32"), bnp.asarray(y, "int32")))
    assert out.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out), want.astype(np.int8).astype(dtype))
    compiled = bf.jit(function)(bnp.asarray(x, dtype), bnp.asarray(y, dtype))
    np.testing.assert_array_equal(np.asarray(compiled), np.asarray(out))


def test_results_of_other_dtypes():
    x, y = bnp.array([1, 2], "int4"), bnp.array([2, 7], "int4")
    assert (x / y).dtype == bnp.sin(x).dtype == bnp.mean(x).dtype == "float32"
    assert bnp.sum(y).dtype == "int32" and bnp.sum(y) == 9
    assert (x < y).tolist() == [True, True] and bnp.argmax(y) == 1
    assert (x @ y).dtype == "int4" and x @ y == 0
    assert lax.dot(x, y, preferred_element_type="int32") == 16
    minus = bnp.array([-1, 3], "int4")
    assert lax.shift_right_logical(minus, bnp.ones_like(minus)).tolist() == [7, 1]
    assert lax.population_count(minus).tolist() == [4, 2] and lax.clz(minus).tolist() == [0, 2]
    assert lax.bitcast_convert_type(minus, "uint4").tolist() == [15, 3]
    floats = bnp.array([2.7, -9, 100, np.nan, -np.inf])
    for convert in (lambda x, d: x.astype(d), bf.jit(lambda x, d: x.astype(d), static_argnums=1)):
        assert convert(floats, "int4").tolist() == [2, -8, 7, 0, -8]  # saturating, as from floats to int8
        assert convert(floats, "uint2").tolist() == [2, 0, 3, 0, 0]
    assert lax.clz(bnp.array([0, 1, -1], "int2")).tolist() == [-2, 1, 0]
    assert bnp.take(bnp.arange(5), minus, mode="clip").tolist() == [0, 3]
    for wrong in (lambda: lax.bitcast_convert_type(bnp.ones(2, "int8"), "int4"), lambda: minus.view("int8")):
        with pytest.raises(errors.DtypeError, match="bits"):
            wrong()
    assert bnp.arange(2, 8, dtype="int4").tolist() == [2, 3, 4, 5, 6, 7]
    assert bf.random.randint(bf.random.key(0), (9,), 0, 5, "uint4").dtype == "uint4"


def test_promotion_and_limits():
    x = bnp.array([1, 2], "int4")
    assert (x + 1).dtype == (x * True).dtype == "int4"
    assert bnp.iinfo("uint2").max == 3 and bnp.iinfo(bnp.int4).min == -8 and bnp.iinfo("int4").bits == 4
    for other in ("int8", "uint4", "float32"):
        with pytest.raises(errors.DtypeError, match="no implicit promotion"):
            x + bnp.ones(2, other)
    for wrong in (lambda: x + 8, lambda: bnp.full(2, 9, "int4"), lambda: bnp.asarray([-9], "int4")):
        with pytest.raises(errors.ValueRangeError, match=r"fit|bounds"):
            wrong()
    with pytest.raises(errors.GradError, match="floating or complex"):
        bf.grad(lambda a: a.sum())(x)


@pytest.mark.parametrize("dtype", OTHER_FLOATS, ids=str)
def test_floats_of_a_byte(dtype):
    values = np.array([1, 2, 0.5, 4], dtype)
    x = bnp.asarray(values)
    assert x.dtype == (x + x).dtype == (x * 2.5).dtype == (x + bnp.ones(4, "int32")).dtype == dtype
    with pytest.raises(errors.DtypeError, match="no implicit promotion"):
        x + bnp.ones(4)
    gradient = bf.grad(lambda a: (a.astype("float32") ** 2).sum())(x)
    np.testing.assert_array_equal(gradient.astype("float32"), (2 * values.astype(np.float32)).astype(dtype))
    assert bnp.finfo(dtype).dtype == dtype and bnp.issubdtype(dtype, bnp.floating)
    assert getattr(bnp, dtype.name).dtype == dtype


@pytest.mark.parametrize("dtype", OTHER_FLOATS, ids=str)
def test_every_conversion_in_kernels(dtype):
    """All bit patterns, and floats on both sides of each tie."""
    bits = np.arange(16 if dtype == dtypes.float4_e2m1fn else 256, dtype=np.uint8)
    stored = np.tile(bits, 4096).view(dtype)
    with np.errstate(all="ignore"):
        wide = np.asarray(bf.jit(lambda x: x.astype("float32") * 2)(bnp.asarray(stored)))
        np.testing.assert_array_equal(wide, stored.astype(np.float32) * 2)
        upper = np.arange(2**16, dtype=np.uint32) << 16
        floats = np.concatenate([upper, upper + 0x7FFF, upper + 0x8000, upper + 0x8001]).astype(np.uint32)
        floats = np.sort(floats)[::3].view(np.float32)
        floats = floats[~np.isnan(floats)]
        got = np.asarray(bf.jit(lambda x: (x * 1).astype(dtype))(bnp.asarray(floats)))
        np.testing.assert_array_equal(got.astype(np.float32), floats.astype(dtype).astype(np.float32))


def test_stored_bits_above_are_ignored():
    raw = np.array([0x13, 0xFD], np.uint8).view(ml_dtypes.int4)
    x = bnp.asarray(raw)
    assert bf.jit(lambda a: a.astype("int32"))(bnp.tile(x, 4000))[:2].tolist() == [3, -3] == x.tolist()
