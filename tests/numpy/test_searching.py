"""Searches, set operations and further sorts against NumPy, in each method."""

# ruff: noqa: B023 - the functions that close over loop variables run at once

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit
from tests.numpy.common import check, f32, i32, same


def line(kind, n, seed=0):
    x = i32(n, seed=seed)
    if kind == "float":
        return (x / 2).astype(np.float32)
    if kind == "complex":
        return (x + 1j * i32(n, low=-2, high=3, seed=seed + 1)).astype(np.complex64)
    if kind == "nan":
        return np.where(x > 2, np.nan, x).astype(np.float32)
    return x > 0 if kind == "bool" else x


KINDS = ["int", "float", "complex", "nan", "bool"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("n", [0, 1, 2, 5, 16, 17, 50])
@pytest.mark.parametrize("kind", KINDS)
def test_searchsorted(kind, n, side):
    x, v = np.sort(line(kind, n)), line(kind, 30, seed=9)
    for method in ("scan", "scan_unrolled", "sort", "compare_all"):
        check(
            lambda a, b: bnp.searchsorted(a, b, side, method=method),
            lambda a, b: np.searchsorted(a, b, side),
            x,
            v,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_isin(kind):
    for n in (0, 3, 40):
        x, v = line(kind, n), line(kind, 30, seed=9).reshape(5, 6)
        for method in ("auto", "compare_all", "sort", "binary_search"):
            check(lambda a, b: bnp.isin(a, b, method=method), np.isin, v, x)
            check(lambda a, b: bnp.isin(a, b, invert=True, method=method), lambda a, b: ~np.isin(a, b), v, x)


def test_digitize_and_interp():
    for bins in ([1, 2, 4], [4, 2, 1], [3]):
        for right in (False, True):
            check(
                lambda x: bnp.digitize(x, np.array(bins), right),
                lambda x: np.digitize(x, bins, right),
                i32(9),
            )
    x, xp, fp = (
        f32(13, low=-3, high=3),
        np.array([-2, -1, 0, 2], np.float32),
        np.array([1, 3, 2, -1], np.float32),
    )
    check(bnp.interp, np.interp, x, xp, fp)
    check(lambda *a: bnp.interp(*a, left=7, right=-7), lambda *a: np.interp(*a, left=7, right=-7), x, xp, fp)
    check(
        lambda *a: bnp.interp(*a, period=5),
        lambda *a: np.interp(*a, period=5),
        x,
        xp[::-1].copy(),
        fp,
        rtol=1e-4,
    )
    check(bnp.interp, np.interp, x, xp, (fp + 1j).astype(np.complex64))
    same(
        bnp.interp(np.array([-4.0, 4.0]), xp, fp, left="extrapolate", right="extrapolate"),
        np.array([-3.0, -4.0]),
    )
    same(grad(lambda v: bnp.interp(v, xp, fp))(-0.5), np.float32(-1))


@pytest.mark.parametrize("equal_nan", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_unique(kind, equal_nan):
    for n in (1, 2, 7, 30):
        x = line(kind, n)
        want = np.unique(x, True, True, True, equal_nan=equal_nan)
        same(bnp.unique(x, True, True, True, equal_nan=equal_nan), want)
        k = len(want[0])
        got = jit(lambda v: bnp.unique(v, True, True, True, equal_nan=equal_nan, size=k + 2, fill_value=1))(x)
        same(tuple(g[:k] for g in got[:2]), want[:2])
        same(got[2], want[2])
        same(got[3], np.append(want[3], [0, 0]))
        np.testing.assert_array_equal(got[0][k:], np.ones(2, x.dtype))
        same(jit(lambda v: bnp.unique(v, size=1, equal_nan=equal_nan))(x), want[0][:1])


def test_unique_along_an_axis():
    x = i32(6, 2, 3, low=0, high=2)
    for axis in (0, 1, 2):
        want = np.unique(x, True, True, True, axis=axis)
        same(bnp.unique(x, True, True, True, axis=axis), want)
    rows = len(np.unique(x, axis=0))
    got = jit(lambda v: bnp.unique(v, axis=0, size=rows + 1, fill_value=9))(x)
    same(got, np.concatenate([np.unique(x, axis=0), np.full((1, 2, 3), 9)]).astype(np.int32))
    assert bnp.unique(bnp.zeros((0,))).shape == (0,)
    w = np.array([1.0, 10.0], np.float32)
    same(
        grad(lambda v: (bnp.unique(v, size=2) * w).sum())(np.array([3.0, 1.0, 3.0], np.float32)),
        np.array([10, 1, 0.0]),
    )


SETS = {
    "union1d": np.union1d,
    "setdiff1d": np.setdiff1d,
    "setxor1d": np.setxor1d,
    "intersect1d": np.intersect1d,
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "nan"])
def test_sets(kind, name):
    for n, m in ((1, 3), (7, 9), (20, 5)):
        x, y = line(kind, n), line(kind, m, seed=5)
        want, k = SETS[name](x, y), len(SETS[name](x, y))
        f = getattr(bnp, name)
        same(f(x, y), want)
        filled = np.concatenate([want, np.full(2, 1)]).astype(want.dtype)
        same(jit(lambda a, b: f(a, b, size=k + 2, fill_value=1))(x, y), filled)
        same(f(x, y, size=max(k - 1, 0)), want[: max(k - 1, 0)])


def test_where_sets_meet():
    x, y = i32(9), i32(7, seed=3)
    same(bnp.intersect1d(x, y, return_indices=True), np.intersect1d(x, y, return_indices=True))
    values, a, b = jit(lambda u, v: bnp.intersect1d(u, v, return_indices=True, size=9))(x, y)
    k = len(np.intersect1d(x, y))
    assert a[k:].tolist() == [9] * (9 - k) and b[k:].tolist() == [7] * (9 - k)
    same(bnp.setdiff1d(np.array([3, 1, 3, 2]), np.array([2]), assume_unique=True), np.array([3, 1, 3]))


@pytest.mark.parametrize("f", [bnp.unique, lambda x: bnp.union1d(x, x), lambda x: bnp.setdiff1d(x, x)])
def test_sets_of_traced_arrays_need_a_size(f):
    with pytest.raises(errors.ConcretizationError, match="size="):
        jit(f)(i32(3))


def test_partitions():
    x = f32(4, 9)
    for k in (0, 3, -1):
        got = np.asarray(bnp.partition(x, k))
        np.testing.assert_array_equal(got[:, k], np.sort(x)[:, k])
        order = np.asarray(bnp.argpartition(x, k, axis=0))
        np.testing.assert_array_equal(np.take_along_axis(x, order, 0)[k], np.sort(x, 0)[k])
    check(bnp.sort_complex, lambda v: np.sort_complex(v).astype(np.complex64), line("complex", 9))
    with pytest.raises(errors.ValueRangeError, match="kth=9"):
        bnp.partition(x, 9)


def test_order_of_complex_numbers():
    x, y = line("complex", 20), line("complex", 20, seed=4)
    for name in ("less", "less_equal", "greater", "greater_equal", "maximum", "minimum"):
        check(getattr(bnp, name), getattr(np, name), x, y)
    check(lambda a, b: a < b, lambda a, b: a < b, x, y)
    z = x.reshape(4, 5)
    for axis in (None, 0, 1):
        for name in ("max", "min", "argmax", "argmin"):
            check(lambda v: getattr(bnp, name)(v, axis), lambda v: getattr(np, name)(v, axis), z)
