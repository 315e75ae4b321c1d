"""Dtypes and shapes of results, promotion, and inspection of the namespace."""

import itertools

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from tests.array_api.signatures import BINARY, DEPARTS, DTYPES, KINDS, OPERATORS, PROMOTION, UNARY

PART = {"complex64": "float32", "complex128": "float64"}


def sample(dtype, shape=(2, 3)):
    """Small numbers above 0, which every function takes."""
    return bnp.asarray(np.ones(shape), dtype=dtype)


def result(dtype, rule):
    return {"same": dtype, "bool": "bool", "part": PART.get(dtype, dtype)}[rule]


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    kind, rule = UNARY[name]
    for dtype in KINDS[kind]:
        out = getattr(bnp, name)(sample(dtype))
        assert out.dtype == result(dtype, rule) and out.shape == (2, 3), (name, dtype)


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    kind, rule = BINARY[name]
    function = getattr(bnp, name)
    for a, b in itertools.product(KINDS[kind], repeat=2):
        want = PROMOTION.get((a, b)) or PROMOTION.get((b, a))
        if want is None:
            continue
        want = DEPARTS.get((a, b)) or DEPARTS.get((b, a)) or want
        x, y = sample(a, (2, 1)), sample(b, (3,))
        out = function(x, y)
        assert out.dtype == result(want, rule) and out.shape == (2, 3), (name, a, b)
        if name in OPERATORS:
            by_sign = eval(f"x {OPERATORS[name]} y", {"x": x, "y": y})
            assert by_sign.dtype == out.dtype and np.array_equal(by_sign, out)


@pytest.mark.parametrize("name", [n for n in BINARY if BINARY[n][0] != "all"])
def test_python_scalars_take_the_dtype_of_the_array(name):
    kind, rule = BINARY[name]
    for dtype in KINDS[kind]:
        scalar = True if dtype == "bool" else 1
        assert getattr(bnp, name)(sample(dtype), scalar).dtype == result(dtype, rule)
        assert getattr(bnp, name)(scalar, sample(dtype)).dtype == result(dtype, rule)
        if dtype in KINDS["floating"]:
            assert getattr(bnp, name)(sample(dtype), 1.5).dtype == result(dtype, rule)


def test_promotion():
    for (a, b), want in PROMOTION.items():
        want = DEPARTS.get((a, b), want)
        assert bnp.result_type(getattr(bnp, a), getattr(bnp, b)) == want
        assert bnp.result_type(sample(b), sample(a)) == want
    for a, b in itertools.product(DTYPES, repeat=2):
        assert bnp.can_cast(getattr(bnp, a), getattr(bnp, b)) == np.can_cast(a, b)


@pytest.mark.parametrize("name", ["sum", "prod", "cumulative_sum", "cumulative_prod"])
def test_totals_are_as_wide_as_the_default_at_least(name):
    for dtype in KINDS["numeric"]:
        want = dtype
        if dtype in KINDS["integers"] and np.dtype(dtype).itemsize < 4:
            want = "uint32" if dtype.startswith("u") else "int32"
        x = sample(dtype, (3,))
        assert getattr(bnp, name)(x).dtype == want
        assert getattr(bnp, name)(x, dtype="float64").dtype == "float64"


@pytest.mark.parametrize(
    "name", ["max", "min", "mean", "std", "var", "all", "any", "argmax", "count_nonzero"]
)
def test_reductions_over_axes(name):
    x = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    for axis in (None, 0, -1) if name == "argmax" else (None, 0, -1, (0, 2), ()):
        for keepdims in (False, True):
            got = getattr(bnp, name)(bnp.asarray(x), axis=axis, keepdims=keepdims)
            want = np.asarray(getattr(np, name)(x, axis=axis, keepdims=keepdims))
            assert got.shape == want.shape, (name, axis, keepdims)
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_creation():
    assert bnp.arange(3).dtype == bnp.int32 and bnp.arange(3.0).dtype == bnp.float32
    assert bnp.linspace(0, 1, 5).dtype == bnp.float32 and bnp.linspace(0, 1, 5).shape == (5,)
    assert bnp.full((2,), 1).dtype == bnp.int32 and bnp.full((2,), 1j).dtype == bnp.complex64
    assert bnp.full((2,), True).dtype == bnp.bool
    for dtype in DTYPES:
        d = getattr(bnp, dtype)
        for made in (bnp.zeros(2, dtype=d), bnp.ones_like(sample("int8"), dtype=d), bnp.eye(2, dtype=d),
                     bnp.full(2, 1, dtype=d), bnp.asarray([1, 0], dtype=d), bnp.empty((2, 0), dtype=d)):  # fmt: skip
            assert made.dtype == d
    x = bnp.asarray([1.0, 2.0])
    assert bnp.asarray(x, copy=False) is x and bnp.asarray(x, copy=True) is not x
    with pytest.raises(errors.ArgumentError):
        bnp.asarray([1.0], copy=False)


def test_kinds_of_dtypes():
    for dtype in DTYPES:
        for kind, members in {
            "bool": ("bool",), "signed integer": KINDS["integers"][:4], "unsigned integer": KINDS["integers"][4:],
            "integral": KINDS["integers"], "real floating": KINDS["real floating"],
            "complex floating": KINDS["complex"], "numeric": KINDS["numeric"],
        }.items():  # fmt: skip
            assert bnp.isdtype(getattr(bnp, dtype), kind) == (dtype in members)
    assert bnp.isdtype(bnp.int8, (bnp.int16, "signed integer"))


def test_limits():
    for dtype in KINDS["floating"]:
        info, want = bnp.finfo(getattr(bnp, dtype)), np.finfo(dtype)
        assert info.bits == want.bits and info.dtype == want.dtype
        for name in ("eps", "max", "min", "smallest_normal"):
            assert type(getattr(info, name)) is float and getattr(info, name) == float(getattr(want, name))
    for dtype in KINDS["integers"]:
        info = bnp.iinfo(getattr(bnp, dtype))
        assert (info.bits, info.min, info.max) == (
            np.iinfo(dtype).bits,
            np.iinfo(dtype).min,
            np.iinfo(dtype).max,
        )
        assert info.dtype == dtype


def test_the_namespace_about_itself():
    info = bnp.__array_namespace_info__()
    assert info.capabilities()["boolean indexing"] is True
    assert info.capabilities()["data-dependent shapes"] is True
    assert info.default_device() in info.devices()
    defaults = info.default_dtypes(device=info.default_device())
    assert defaults["real floating"] == bnp.zeros(1).dtype and defaults["integral"] == bnp.arange(1).dtype
    assert defaults["complex floating"] == bnp.asarray(1j).dtype
    assert defaults["indexing"] == bnp.argmax(bnp.zeros(1)).dtype == bnp.nonzero(bnp.ones(1))[0].dtype
    assert tuple(info.dtypes()) == DTYPES
    assert tuple(info.dtypes(kind="real floating")) == KINDS["real floating"]
    assert tuple(info.dtypes(kind=("bool", "complex floating"))) == ("bool", "complex64", "complex128")
    assert bnp.__array_api_version__ == "2024.12"
    with pytest.raises(errors.ValueRangeError):
        info.dtypes(kind="imaginary")
