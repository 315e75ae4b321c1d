"""Values and dtypes that must not pass through 32 bits, or wrap around."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.transforms.arguments import ShapeDtypeStruct
from blufunc.transforms.staging.eval_shape import eval_shape
from blufunc.transforms.staging.jit import jit

F64 = np.float64(0.1)
ONE = np.ones(1)


def one():
    return bnp.ones(1, "float64")


EXACT = {
    "linspace": (lambda: bnp.linspace(0, 0.1, 3, dtype="float64"), [0, 0.05, 0.1]),
    "linspace of NumPy scalars": (lambda: bnp.linspace(0, F64, 3, dtype="float64"), [0, 0.05, 0.1]),
    "linspace of arrays": (lambda: bnp.linspace(ONE * 0.1, ONE * 0.3, 2, dtype="float64"), [[0.1], [0.3]]),
    "linspace of complex": (lambda: bnp.linspace(0, 0.1j, 2, dtype="complex128"), [0, 0.1j]),
    "linspace of int64": (lambda: bnp.linspace(0, 2**40 + 2, 3, dtype="int64"), [0, 2**39 + 1, 2**40 + 2]),
    "linspace of int32": (lambda: bnp.linspace(0, 2**30 + 2, 3, dtype="int32"), [0, 2**29 + 1, 2**30 + 2]),
    "logspace": (lambda: bnp.logspace(0, 0.1, 3, dtype="float64"), np.logspace(0, 0.1, 3)),
    "logspace with a base": (lambda: bnp.logspace(0, 1, 2, base=0.1, dtype="float64"), [1, 0.1]),
    "logspace of integers": (lambda: bnp.logspace(0, 9, 10, dtype="int64"), [10**n for n in range(10)]),
    "geomspace": (lambda: bnp.geomspace(0.1, 0.3, 3, dtype="float64"), np.geomspace(0.1, 0.3, 3)),
    "full": (lambda: bnp.full((2,), F64, dtype="float64"), [0.1, 0.1]),
    "full of a vector": (lambda: bnp.full((1, 1), ONE * 0.1, dtype="float64"), [[0.1]]),
    "full_like": (lambda: bnp.full_like(one(), F64), [0.1]),
    "lax.full": (lambda: lax.full((1,), F64, "float64"), [0.1]),
    "dot": (lambda: bnp.dot(one(), 0.1), [0.1]),
    "inner": (lambda: bnp.inner(0.1, one()), [0.1]),
    "outer": (lambda: bnp.outer(one(), 0.1), [[0.1]]),
    "vdot": (lambda: bnp.vdot(one(), 0.1), 0.1),
    "kron": (lambda: bnp.kron(0.1, one()), [0.1]),
    "tensordot": (lambda: bnp.tensordot(one(), 0.1, 0), [0.1]),
    "einsum": (lambda: bnp.einsum(",i", 0.1, one()), [0.1]),
    "sum": (lambda: bnp.sum(one(), initial=0.1), 1.1),
    "prod": (lambda: bnp.prod(one(), initial=0.1), 0.1),
    "sum of int64": (lambda: bnp.sum(bnp.ones(1, "int64"), initial=2**40), 2**40 + 1),
    "max": (lambda: bnp.max(one() * 0, initial=0.1), 0.1),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    f, want = EXACT[name]
    for g in (f, jit(f)):
        np.testing.assert_allclose(g(), want, rtol=1e-15)
        assert g().dtype.itemsize >= 8 or g().dtype == "int32"


WIDE = [
    ("uint64", 2**31),
    ("int64", 2**31),
    ("uint32", 3000000000),
    ("uint64", 2**64 - 1),
    ("int64", -(2**63)),
]


@pytest.mark.parametrize("dtype, value", WIDE)
def test_wide_integers(dtype, value):
    for f in (
        lambda: bnp.full((2,), value, dtype=dtype),
        lambda: bnp.full_like(bnp.ones(2, dtype), value),
        lambda: bnp.full_like(bnp.ones(2), value, dtype=dtype),
        lambda: lax.full((2,), value, dtype),
        lambda: lax.full_like(bnp.ones(2, dtype), value),
    ):
        for g in (f, jit(f)):
            assert g().dtype == dtype and g().tolist() == [value, value]


@pytest.mark.parametrize(
    "value, dtype", [(256, "uint8"), (-1, "uint32"), (2**31, "int32"), (2**64, "uint64")]
)
def test_integers_that_do_not_fit(value, dtype):
    for f in (lambda: bnp.full((1,), value, dtype), lambda: lax.full((1,), value, dtype)):
        with pytest.raises(errors.ValueRangeError, match="does not fit"):
            f()
        with pytest.raises(errors.ValueRangeError, match="does not fit"):
            jit(f)()


HUGE = ShapeDtypeStruct((2**31 + 10, 2), "int8")


@pytest.mark.parametrize(
    "f",
    [
        lambda x: lax.iota("int32", 10**12), lambda x: lax.iota("uint8", 257), lambda x: bnp.arange(10**12),
        lambda x: bnp.arange(1, 200, dtype="int8"), lambda x: bnp.arange(0, -2, -1, dtype="uint8"),
        lambda x: bnp.arange(3, 2**31 + 3), lambda x: bnp.argsort(x, axis=0), lambda x: bnp.nonzero(x, size=3),
        lambda x: lax.argmax(x, 0), lambda x: lax.top_k(x.T, 3), lambda x: lax.argmin(x.T[:, :200], 1, "int8"),
    ],
)  # fmt: skip
def test_positions_that_do_not_fit(f):
    with pytest.raises(errors.ValueRangeError, match="does not fit"):
        eval_shape(f, HUGE)


def test_positions_that_fit():
    for f in (bnp.argmax, bnp.argmin, bnp.nanargmax):
        assert eval_shape(f, HUGE).dtype == "int64"
        assert eval_shape(lambda x, f=f: f(x, axis=0), HUGE).dtype == "int64"
        assert eval_shape(lambda x, f=f: f(x, axis=1), HUGE).dtype == "int32"
    assert eval_shape(lambda x: lax.argmax(x, 0, "int64"), HUGE).dtype == "int64"
    assert eval_shape(lambda: lax.iota("int32", 2**31)).shape == (2**31,)
    for f in (lambda: bnp.arange(256, dtype="uint8"), lambda: bnp.arange(-128, 128, dtype="int8")):
        assert len(set(f().tolist())) == len(set(jit(f)().tolist())) == 256


RANGES = [
    ((1 + 1j, -2 + 3j, 3), {}), ((1j, 16j, 5), {}), ((-1 + 0j, 1 + 0j, 4), {}), ((1 + 1j, 2, 3, False), {}),
    ((1, 1000, 4), {}), ((-1000, -1, 4), {}), ((2, 2, 1), {}), ((2, 3, 0), {}),
]  # fmt: skip


@pytest.mark.parametrize("args, kwargs", RANGES)
def test_geomspace(args, kwargs):
    want = np.geomspace(*args, **kwargs)
    for f in (bnp.geomspace, jit(bnp.geomspace, static_argnums=(2, 3))):
        got = np.asarray(f(*args, **kwargs))
        np.testing.assert_allclose(got, want, rtol=2e-6)
        if got.size > 1 and args[3:] != (False,):
            np.testing.assert_array_equal(got[[0, -1]], np.asarray(args[:2], got.dtype))


@pytest.mark.parametrize("num, endpoint, want", [(0, True, np.nan), (1, True, np.nan), (0, False, np.nan),
                                                 (1, False, 2.0), (5, True, 0.5)])  # fmt: skip
def test_spacing(num, endpoint, want):
    values, step = bnp.linspace(1, 3, num, endpoint, retstep=True)
    assert values.shape == (num,)
    np.testing.assert_array_equal(step, np.float32(want))
    assert np.array_equal(np.linspace(1, 3, num, endpoint, retstep=True)[1], want, equal_nan=True)
