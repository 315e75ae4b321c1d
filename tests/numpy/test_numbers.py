"""Divisors, bits, exponents; positions and grids; files and other libraries."""

# ruff: noqa: B023 - the functions that close over loop variables run at once

import os

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit
from tests.numpy.common import boolean, check, f32, i32, same


def edges(dtype):
    """Numbers of all kinds, down to the smallest and up to the largest."""
    info = np.finfo(dtype)
    low, high = info.smallest_subnormal, info.max
    special = [
        0,
        -0.0,
        1,
        2,
        0.5,
        0.75,
        np.inf,
        -np.inf,
        np.nan,
        high,
        -high,
        info.tiny,
        info.tiny * 0.6,
        low,
        -3 * low,
    ]
    return np.concatenate([f32(20), special]).astype(dtype)


def equal(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
    if want.dtype.kind == "f":
        numbers = ~np.isnan(want)  # a NaN has a sign, which means nothing
        np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(want)[numbers])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_parts_of_floats(dtype):
    x = edges(dtype)
    with np.errstate(all="ignore"):
        for f in (lambda v: v, jit(lambda v: v)):
            v = f(bnp.asarray(x, dtype=dtype))
            mantissa, exponent = bnp.frexp(v)
            equal(mantissa, np.frexp(x)[0])
            equal(exponent, np.frexp(x)[1])
            for got, want in zip(bnp.modf(v), np.modf(x)):
                equal(got, want)
            away = np.where(x < 0, -np.inf, np.inf).astype(dtype)  # np.spacing of float16 has no sign
            equal(bnp.spacing(v), np.spacing(x) if dtype != "float16" else np.nextafter(x, away) - x)
            for k in (
                0,
                1,
                -1,
                5,
                -20,
                -100,
                -130,
                -149,
                -160,
                120,
                130,
                200,
                -300,
                300,
                -1060,
                -1075,
                1030,
                2000,
                -2100,
            ):
                equal(bnp.ldexp(v, k), np.ldexp(x, k))


def test_derivatives_of_parts():
    same(grad(lambda x: bnp.ldexp(x, 3))(1.5), np.float32(8))
    same(grad(lambda x: bnp.frexp(x)[0])(6.0), np.float32(0.125))
    same(grad(lambda x: bnp.modf(x)[0])(2.5), np.float32(1))
    same(grad(bnp.i0)(1.0), np.float32(0.5651591))
    check(bnp.i0, np.i0, f32(9, low=-5, high=5))


def test_integers():
    x, y = i32(30, low=-50, high=50), i32(30, low=-50, high=50, seed=1)
    check(bnp.gcd, np.gcd, x, y)
    check(bnp.lcm, np.lcm, x, y)
    check(lambda a: bnp.gcd(a[:, None], a[:5]), lambda a: np.gcd(a[:, None], a[:5]), x)
    with pytest.raises(errors.DtypeError, match="integers"):
        bnp.gcd(1.5, 2)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("order", ["big", "little"])
def test_bits(order, axis):
    flags = boolean(3, 13)
    check(lambda v: bnp.packbits(v, axis, order), lambda v: np.packbits(v, axis, order), flags)
    packed = np.packbits(flags, axis, order)
    for count in (None, 5, -3, 50):
        check(lambda v: bnp.unpackbits(v, axis, count, order),
              lambda v: np.unpackbits(v, axis=axis, count=count, bitorder=order), packed)  # fmt: skip


def test_positions():
    same(bnp.diag_indices(3, 3), np.diag_indices(3, 3))
    square, wide = np.ones((3, 3)), np.ones((3, 4))
    same(bnp.diag_indices_from(square), np.diag_indices(3))
    same(bnp.tril_indices_from(wide, 1), np.tril_indices_from(wide, 1))
    same(bnp.triu_indices_from(wide, 1), np.triu_indices_from(wide, 1))
    same(bnp.mask_indices(3, bnp.triu, 1), np.mask_indices(3, np.triu, 1))
    inside, outside = (np.array([1, 2, 0]), np.array([3, 0, 1])), (np.array([1, 5, -3]), np.array([3, 9, 1]))
    for order in "CF":
        same(
            bnp.ravel_multi_index(inside, (3, 4), order=order),
            np.ravel_multi_index(inside, (3, 4), order=order),
        )
    for mode in ("clip", "wrap"):
        check(lambda i, j: bnp.ravel_multi_index((i, j), (3, 4), mode),
              lambda i, j: np.ravel_multi_index((i, j), (3, 4), mode), *outside)  # fmt: skip
    with pytest.raises(errors.IndexRangeError):
        bnp.ravel_multi_index(outside, (3, 4))


A, B, M = np.arange(1.0, 4), np.arange(4.0, 7), np.ones((2, 3))
JOINS = [(A, 0, 0, B), (slice(0, 4), 5), (slice(-1, 1, 6j), A), ("r", A, B), ("c", A, B), ("0,2", A, B),
         ("0,2,0", A, B),
         ("1,2", A[:, None], M.T), ("1,2,0", A, B), ("-1", M, M), (M, M), ("0,3,1", A, B)]  # fmt: skip


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("key", JOINS, ids=str)
def test_r(key):
    same(bnp.r_[key], np.asarray(np.r_[key]))


def test_objects_that_are_indexed():
    for key in ((A, B), (M, M), (A, B, 0 * A), (np.ones((1, 3)), 0, 0, np.ones((1, 3)))):
        same(bnp.c_[key], np.c_[key])
    for key in (np.s_[0:3, 0:2], np.s_[0:3], np.s_[0:1:5j, 0:2]):
        same(bnp.mgrid[key], np.mgrid[key])
    same(bnp.ogrid[0:3, 0:2], tuple(np.ogrid[0:3, 0:2]))
    assert bnp.s_[1:3, ...] == np.s_[1:3, ...] and bnp.index_exp[1:2] == np.index_exp[1:2]
    with pytest.raises(errors.ArgumentError, match="slices"):
        bnp.mgrid[3]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8", "complex64", "bool"])
def test_files(dtype, tmp_path):
    x = bnp.ones((2, 3), dtype=dtype)
    bnp.save(tmp_path / "x.npy", x)
    back = bnp.load(tmp_path / "x.npy")
    assert back.dtype == x.dtype and np.array_equal(np.asarray(back), np.asarray(x))
    bnp.savez(tmp_path / "xs.npz", x, named=bnp.arange(3))
    assert sorted(bnp.load(tmp_path / "xs.npz")) == ["arr_0", "named"]
    bnp.save(tmp_path / "wide.npy", np.float64(1e-300))  # no array of blufunc: written as it is
    assert np.load(tmp_path / "wide.npy") == 1e-300
    with pytest.raises(errors.DataError):
        bnp.load(tmp_path / "none.npy")
    os.mkfifo(tmp_path / "pipe.npy")  # which has no writer: to open it would wait for one
    with pytest.raises(errors.DataError, match="is no regular file"):
        bnp.load(tmp_path / "pipe.npy")
    (tmp_path / "text.npy").write_text("hello")
    with pytest.raises(errors.DataError):
        bnp.load(tmp_path / "text.npy")
    with pytest.raises(errors.DataError):
        bnp.save(tmp_path / "no" / "folder.npy", x)


def test_vectors_from_elsewhere(tmp_path):
    numbers = np.arange(4, dtype=np.float32)
    same(bnp.frombuffer(numbers.tobytes()), numbers)
    same(bnp.frombuffer(numbers.tobytes(), count=2, offset=4), numbers[1:3])
    same(bnp.fromstring("1 2 3", sep=" "), numbers[1:])
    same(bnp.fromstring("1,2,3", int, sep=","), np.array([1, 2, 3]))
    same(bnp.fromiter(range(4), int), np.arange(4))
    numbers.tofile(tmp_path / "raw")
    same(bnp.fromfile(tmp_path / "raw"), numbers)
    assert bnp.from_dlpack(np.arange(3.0)).dtype == bnp.float64
    with pytest.raises(errors.ArgumentError):
        bnp.fromstring("1 x", sep=" ")


def test_printing():
    x = bnp.asarray([1.23456])
    assert (
        bnp.array_repr(x, precision=2) == "Array([1.23], dtype=float32)"
        and bnp.array_str(x, precision=2) == "[1.23]"
    )
    with bnp.printoptions(precision=1):
        assert str(x) == "[1.2]" and bnp.get_printoptions()["precision"] == 1


def test_joins_and_products():
    x, y = f32(2, 3), f32(2, 3, seed=1)
    same(bnp.block([[x, y], [y, x]]), np.block([[x, y], [y, x]]))
    same(bnp.block([x[0], 1.0]), np.block([x[0], np.float32(1)]))
    same(bnp.rollaxis(np.ones((2, 3, 4)), 2), np.ones((4, 2, 3)))
    check(bnp.matvec, np.matvec, f32(5, 2, 3), f32(3))
    check(bnp.vecmat, np.vecmat, f32(5, 2), f32(5, 2, 3))
    for a, b in (
        (f32(4, 3), f32(3)),
        (f32(4, 2), f32(4, 3)),
        (f32(4, 3), f32(4, 2)),
        (f32(4, 2), f32(4, 2, seed=2)),
    ):
        want = np.cross(*[np.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, 3 - v.shape[-1])]) for v in (a, b)])
        check(bnp.cross, lambda p, q: want if 3 in (a.shape[-1], b.shape[-1]) else want[..., 2], a, b)
    check(
        lambda a, b: bnp.cross(a, b, axisa=0, axisc=0),
        lambda a, b: np.cross(a, b, axisa=0, axisc=0),
        f32(3, 4),
        f32(4, 3),
    )
    assert bool(bnp.array_equiv(x, x[None])) and not bool(bnp.array_equiv(x, y[:, :2]))
    path, report = bnp.einsum_path("ij,jk,kl->il", x, y.T, x)
    assert path[0] == "einsum_path" and len(path) == 3 and "FLOP" in str(report)
    with pytest.raises(errors.ArgumentError, match="depth"):
        bnp.block([[x], x])
