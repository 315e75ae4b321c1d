"""Dtypes: spellings, implicit widths, and promotion (against JAX over all pairs)."""

import enum
import itertools
import pickle

import ml_dtypes
import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc.core.ir import dtypes as dt
from blufunc.errors import DtypeError, ValueRangeError

ARITHMETIC = [
    dt.bool_, dt.int8, dt.int16, dt.int32, dt.int64, dt.uint8, dt.uint16, dt.uint32, dt.uint64,
    dt.float8_e4m3fn, dt.float8_e5m2, dt.float16, dt.bfloat16, dt.float32, dt.float64,
    dt.complex64, dt.complex128,
]  # fmt: skip
ALL = [*ARITHMETIC, dt.key, dt.float0]
WEAK = [(dt.int32, True), (dt.float32, True), (dt.complex64, True)]
NODES = [(d, False) for d in ARITHMETIC] + WEAK


@pytest.mark.parametrize(
    "spec, want",
    [
        (bool, dt.bool_), (int, dt.int32), (float, dt.float32), (complex, dt.complex64),
        ("int", dt.int32), ("float", dt.float32),
        ("bfloat16", dt.bfloat16), ("float8_e4m3fn", dt.float8_e4m3fn),
        (ml_dtypes.float8_e5m2, dt.float8_e5m2),
        (np.float64, dt.float64), ("float64", dt.float64), ("f8", dt.float64), (">f4", dt.float32),
        (np.longlong, dt.int64), (np.dtype("uint8"), dt.uint8), (dt.key, dt.key), ("key<fry>", dt.key),
        (dt.float0, dt.float0), (np.bool_, dt.bool_),
    ],
)  # fmt: skip
def test_as_dtype(spec, want):
    assert dt.as_dtype(spec) is want
    assert dt.as_dtype(spec) is want  # the memoised answer


@pytest.mark.parametrize(
    "spec",
    [None, "flaot32", object, str, "U3", np.longdouble, "M8[s]", 3, [], np.ones(2), "V2", np.dtype("2f4")],
)
def test_as_dtype_rejects(spec):
    with pytest.raises(DtypeError, match="bfloat16"):
        dt.as_dtype(spec)


def test_dtypes_survive_pickle_and_are_distinct():
    assert len(set(ALL)) == len(ALL)
    for d in ALL:
        assert dt.as_dtype(pickle.loads(pickle.dumps(d))) is d
    assert dt.key.itemsize == 8 and dt.float0.itemsize == 0


def test_predicates_partition():
    for d in ALL:
        kinds = [dt.is_bool, dt.is_integer, dt.is_floating, dt.is_complex, dt.is_key]
        assert sum(is_kind(d) for is_kind in kinds) == (d != dt.float0), d
        assert dt.is_inexact(d) == (dt.is_floating(d) or dt.is_complex(d))
        assert dt.is_numeric(d) == (dt.is_integer(d) or dt.is_inexact(d))
        assert dt.is_unsigned(d) == d.name.startswith("uint")


def test_names_and_implicit():
    assert [dt.short_name(d) for d in (dt.float32, dt.bfloat16, dt.uint8, dt.bool_, dt.complex64)] == [
        "f32", "bf16", "u8", "bool", "c64",
    ]  # fmt: skip
    assert dt.short_name(dt.float8_e4m3fn) == "f8_e4m3fn"
    assert (dt.short_name(dt.key), dt.short_name(dt.float0)) == ("key<fry>", "float0")
    wide = {dt.int64: dt.int32, dt.uint64: dt.uint32, dt.float64: dt.float32, dt.complex128: dt.complex64}
    for d in ALL:
        assert dt.implicit(d) == wide.get(d, d)


def test_info():
    assert float(dt.finfo("bfloat16").eps) == 2**-7
    assert float(dt.finfo(dt.float8_e4m3fn).max) == 448
    assert dt.finfo(dt.complex64).bits == 32
    assert dt.iinfo("uint8").max == 255
    with pytest.raises(DtypeError, match="iinfo"):
        dt.finfo("int32")
    with pytest.raises(DtypeError, match="finfo"):
        dt.iinfo("float32")


@pytest.mark.parametrize(
    "pairs, want",
    [
        ([(dt.int32, False), (dt.float32, True)], (dt.float32, True)),
        ([(dt.int64, False), (dt.float32, True)], (dt.float32, True)),
        ([(dt.int64, False), (dt.uint64, False)], (dt.float32, True)),
        ([(dt.uint32, False), (dt.int32, False)], (dt.int32, False)),
        ([(dt.uint32, False), (dt.int64, False)], (dt.int64, False)),
        ([(dt.float64, False), (dt.complex64, True)], (dt.complex128, False)),
        ([(dt.float16, False), (dt.bfloat16, False)], (dt.float32, False)),
        ([(dt.int8, False), (dt.int32, True)], (dt.int8, False)),
        ([(dt.bool_, False), (dt.int32, True)], (dt.int32, True)),
        ([(dt.bool_, True), (dt.bool_, True)], (dt.bool_, False)),
        ([(dt.int32, True), (dt.float32, True)], (dt.float32, True)),
        ([(dt.float8_e5m2, False), (dt.float32, True)], (dt.float8_e5m2, False)),
        ([(dt.float16, True), (dt.float16, True)], (dt.float16, True)),
        ([(dt.int32, True), (dt.float32, True), (dt.float16, False)], (dt.float16, False)),
        ([(dt.float16, False)], (dt.float16, False)),
    ],
)
def test_promote(pairs, want):
    for order in itertools.permutations(pairs):
        assert dt.promote(*order) == want


@pytest.mark.parametrize(
    "pairs",
    [
        [(dt.key, False), (dt.float0, False)],
        [(dt.key, False), (dt.int32, True)],
        [(dt.float0, False), (dt.float32, False)],
        [(dt.float8_e5m2, False), (dt.float32, False)],
        [(dt.float8_e5m2, False), (dt.float8_e4m3fn, False)],
        [(np.dtype(">f4"), False), (dt.float32, False)],
        [],
    ],
)
def test_promote_rejects(pairs):
    with pytest.raises(DtypeError):
        dt.promote(*pairs)


def test_promote_of_keys_is_a_key():
    assert dt.promote((dt.key, False)) == dt.promote((dt.key, False), (dt.key, False)) == (dt.key, False)


def test_promote_is_a_join():
    """Commutative, idempotent, and associative wherever it is defined."""

    def join(*pairs):
        try:
            return dt.promote(*pairs)
        except DtypeError:
            return None

    for a, b in itertools.product(NODES, NODES):
        assert join(a, b) == join(b, a)
        assert join(a, a) == a
        for c in NODES:
            ab = join(a, b)
            if ab is not None and join(ab, c) is not None:
                assert join(a, b, c) == join(ab, c)


def test_scalar_dtype():
    class Colour(enum.IntEnum):
        RED = 1

    assert dt.scalar_dtype(True) == (dt.bool_, False)
    assert dt.scalar_dtype(3) == dt.scalar_dtype(Colour.RED) == (dt.int32, True)
    assert dt.scalar_dtype(2**31 - 1) == dt.scalar_dtype(-(2**31)) == (dt.int32, True)
    assert dt.scalar_dtype(1e300) == (dt.float32, True)
    assert dt.scalar_dtype(1j) == (dt.complex64, True)
    for x, wide in [(2**31, "int64"), (-(2**31) - 1, "int64"), (2**63, "uint64")]:
        with pytest.raises(ValueRangeError, match=wide):
            dt.scalar_dtype(x)
    for x in (np.float64(1), "a", None):
        with pytest.raises(DtypeError):
            dt.scalar_dtype(x)


@pytest.mark.parametrize("d", ALL)
def test_canonical_numpy_dtype(d):
    x = np.zeros((2, 3), d)
    y = dt.canonical_numpy(x)
    assert y.dtype == dt.implicit(d) and y.shape == x.shape
    assert (y is x) == (dt.implicit(d) == d)
    assert dt.canonical_numpy(np.zeros((), d)[()] if d not in (dt.key, dt.float0) else x[0]).dtype == y.dtype


def test_canonical_numpy_values():
    np.testing.assert_array_equal(dt.canonical_numpy(np.arange(3)), np.arange(3, dtype="int32"))
    big_endian = dt.canonical_numpy(np.array([1, 2], ">i8"))
    assert big_endian.dtype == dt.int32 and big_endian.dtype.isnative and big_endian.tolist() == [1, 2]
    assert dt.canonical_numpy(np.array([1e300])).tolist() == [np.inf]
    assert dt.canonical_numpy(np.zeros((0, 2), "int64")).shape == (0, 2)
    assert dt.canonical_numpy(np.float64(2)).dtype == dt.float32
    for x in (np.array([1, 2**31]), np.int64(-(2**40)), np.array([2**32], "uint64")):
        with pytest.raises(ValueRangeError, match="dtype="):
            dt.canonical_numpy(x)
    for x in (np.array(["a"]), np.array([None]), *(np.zeros(2, d) for d in (np.longdouble, "M8[s]", "V4"))):
        with pytest.raises(DtypeError):
            dt.canonical_numpy(x)


# Against JAX.


def _jax_promote(pairs, x64):
    jax = pytest.importorskip("jax")
    from jax._src import dtypes as jax_dtypes

    class Operand:
        """The interface that JAX's promotion reads: a dtype and an aval with a weak type."""

        def __init__(self, dtype, weak):
            self.dtype, self.weak_type, self.aval = dtype, weak, self

    with jax.enable_x64(x64):
        try:
            return jax_dtypes.lattice_result_type(*(Operand(*p) for p in pairs))
        except ValueError:
            return None


@pytest.mark.peer
@pytest.mark.parametrize("count", [2, 3])
def test_promotion_agrees_with_jax(count):
    pytest.importorskip("jax")
    for pairs in itertools.combinations_with_replacement(NODES, count):
        # With x64 off JAX has no 64-bit arrays to promote, so wide operands are compared with x64 on.
        wide = any(dt.implicit(d) != d for d, _ in pairs)
        want = _jax_promote(pairs, x64=wide)
        if want is None:
            with pytest.raises(DtypeError):
                dt.promote(*pairs)
            continue
        dtype, weak = want
        # JAX's width of a weak result follows its switch; blufunc's is always 32 bits.
        assert dt.promote(*pairs) == (dt.implicit(dtype) if weak else dtype, weak), pairs


@pytest.mark.peer
def test_addition_agrees_with_jax():
    """The same through ``jnp.add``: dtype and weak type with x64 off."""
    jnp = pytest.importorskip("jax.numpy")
    import jax

    scalars = [True, 1, 1.0, 1j]
    narrow = [d for d in ARITHMETIC if dt.implicit(d) == d]
    with jax.enable_x64(False):
        for a, b in itertools.product(narrow, [*narrow, *scalars]):
            is_scalar = not isinstance(b, np.dtype)
            ours = [(a, False), dt.scalar_dtype(b) if is_scalar else (b, False)]
            try:
                aval = jax.eval_shape(jnp.add, jnp.zeros((), a), b if is_scalar else jnp.zeros((), b))
            except ValueError:
                with pytest.raises(DtypeError):
                    dt.promote(*ours)
            else:
                assert dt.promote(*ours) == (aval.dtype, aval.weak_type), (a, b)


@pytest.mark.parametrize("spelled, dtype", [(np.longlong, np.int64), (np.ulonglong, np.uint64)])
def test_the_two_64_bit_integers_of_numpy_are_one(spelled, dtype):
    """They are equal, but their characters differ, by which division chooses."""
    x = bnp.asarray(np.array([7, 3], spelled), dtype)
    np.testing.assert_array_equal(x / bnp.asarray([2, 2], dtype), [3.5, 1.5])
