"""Quantiles, NaN-ignoring reductions, covariances, histograms, against NumPy."""

# ruff: noqa: B023 - the functions that close over loop variables run at once

import warnings

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit
from tests.numpy.common import boolean, check, f32, i32, same

X = f32(4, 5, 3)
HOLES = np.where(boolean(4, 5, 3) & boolean(4, 5, 3, seed=3), np.nan, X).astype(np.float32)
HOLES[0, :, 0] = np.nan
METHODS = ["linear", "lower", "higher", "nearest", "midpoint", "inverted_cdf"]
AXES = [None, 0, 1, (0, 2), (0, 1, 2)]


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of lines that are NaN throughout
        yield


@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_quantiles(method, axis):
    for keepdims in (False, True):
        for q in (0.3, np.array([0, 0.5, 1.0])):
            options = {"axis": axis, "method": method, "keepdims": keepdims}
            check(lambda v: bnp.quantile(v, q, **options), lambda v: np.quantile(v, q, **options), X)
            check(
                lambda v: bnp.nanquantile(v, q, **options), lambda v: np.nanquantile(v, q, **options), HOLES
            )


@pytest.mark.parametrize("axis", AXES, ids=str)
def test_medians_and_percentiles(axis):
    for n, v in (("median", X), ("nanmedian", HOLES)):
        check(
            lambda x: getattr(bnp, n)(x, axis, keepdims=True),
            lambda x: getattr(np, n)(x, axis, keepdims=True),
            v,
        )
    for n, v in (("percentile", X), ("nanpercentile", HOLES)):
        check(lambda x: getattr(bnp, n)(x, 30, axis), lambda x: getattr(np, n)(x, 30, axis), v)
    assert np.isnan(bnp.median(bnp.asarray([1.0, np.nan])))


def test_weighted_quantiles():
    w = f32(5, low=0.1, high=1)
    for q in (0.0, 0.4, 1.0):
        want = np.quantile(X[:, :, 0], q, 1, method="inverted_cdf", weights=np.broadcast_to(w, (4, 5)))
        same(bnp.quantile(X[:, :, 0], q, 1, method="inverted_cdf", weights=w), want.astype(np.float32))
    with pytest.raises(errors.UnsupportedError, match="inverted_cdf"):
        bnp.quantile(X, 0.5, weights=X)


def test_quantiles_have_gradients():
    x = np.array([3.0, 1.0, 2.0, 9.0], np.float32)
    same(grad(bnp.median)(x), np.array([0.5, 0, 0.5, 0]))
    same(
        grad(lambda v: bnp.nanquantile(v, 0.25))(np.append(x, np.nan).astype(np.float32)),
        np.array([0, 0.25, 0.75, 0, 0]),
    )
    same(bnp.quantile(bnp.asarray([1.0, np.inf]), 0.0), np.float32(1))


@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("name", ["nansum", "nanprod", "nanmean", "nanvar", "nanstd", "nanmax", "nanmin"])
def test_reductions_that_pass_over_nan(name, axis):
    where = boolean(4, 5, 3, seed=7)
    with_initial = {"initial": 0.5} if name in ("nanmax", "nanmin") else {}
    for options in ({}, {"keepdims": True}, {"where": where, **with_initial}):
        check(
            lambda v: getattr(bnp, name)(v, axis, **options),
            lambda v: getattr(np, name)(v, axis, **options),
            HOLES,
        )


def test_positions_and_running_totals_that_pass_over_nan():
    x = np.array([[np.nan, np.nan], [1, np.nan], [np.nan, 2]], np.float32)
    assert bnp.nanargmax(x, axis=1).tolist() == [-1, 0, 1] and int(bnp.nanargmin(x)) == 2
    check(lambda v: bnp.nancumsum(v, 0), lambda v: np.nancumsum(v, 0), x)
    check(lambda v: bnp.nancumprod(v, 1), lambda v: np.nancumprod(v, 1), x)


def test_covariances():
    m, y, w, n = X[:, :, 0], X[:3, :, 1], f32(5, low=0.1, high=1), np.array([1, 2, 3, 1, 1])
    for options in ({}, {"bias": True}, {"ddof": 0}, {"rowvar": False}, {"aweights": w}, {"fweights": n},
                    {"fweights": n, "aweights": w}, {"aweights": w, "ddof": 0}):  # fmt: skip
        check(lambda a: bnp.cov(a, **options), lambda a: np.cov(a, **options), m, rtol=1e-4)
    check(bnp.cov, np.cov, m, y, rtol=1e-4)
    check(bnp.cov, np.cov, m[0], rtol=1e-4)
    check(bnp.cov, np.cov, (m + 1j * m[::-1]).astype(np.complex64), rtol=1e-4)
    check(bnp.corrcoef, np.corrcoef, m, rtol=1e-4)
    check(bnp.corrcoef, np.corrcoef, m, y, rtol=1e-4)
    check(lambda a: bnp.var(a, 1, mean=a.mean(1, keepdims=True)), lambda a: a.var(1), m, rtol=1e-4)


def test_bincount():
    i, w = i32(30, low=0, high=7), f32(30)
    same(bnp.bincount(i), np.bincount(i))
    same(bnp.bincount(i, w, minlength=9), np.bincount(i, w, minlength=9))
    same(jit(lambda v: bnp.bincount(v, length=4))(i), np.bincount(i)[:4])
    with pytest.raises(errors.ConcretizationError, match="length="):
        jit(bnp.bincount)(i)


A, B, W = f32(50), f32(50, seed=2), f32(50, low=0, high=1, seed=3)


@pytest.mark.parametrize(
    "options",
    [{}, {"bins": 5}, {"bins": 5, "range": (-1, 1)}, {"bins": np.array([-1, 0, 0.5, 2], np.float32)},
     {"density": True}, {"weights": W}, {"weights": W, "density": True, "bins": 4}],
)  # fmt: skip
def test_histogram(options):
    check(lambda v: bnp.histogram(v, **options), lambda v: np.histogram(v, **options), A, dtype=False)


@pytest.mark.parametrize(
    "options",
    [{}, {"bins": (3, 4)}, {"bins": 3, "range": ((-1, 1), (0, 2))}, {"weights": W},
     {"density": True, "bins": [np.array([-1, 0, 1.0]), 4]},
     {"bins": np.array([-2, 0, 1, 3.0])}],
)  # fmt: skip
def test_histogram2d(options):
    check(
        lambda u, v: bnp.histogram2d(u, v, **options),
        lambda u, v: np.histogram2d(u, v, **options),
        A,
        B,
        dtype=False,
    )


def test_histogramdd():
    s = f32(40, 3)
    same(bnp.histogramdd(s, bins=(2, 3, 4))[0], np.histogramdd(s, bins=(2, 3, 4))[0])
    counts, edges = bnp.histogramdd(s, 4, density=True)
    want, want_edges = np.histogramdd(s, 4, density=True)
    same(counts, want)
    same(list(edges), list(want_edges))
    with pytest.raises(errors.UnsupportedError, match="auto"):
        bnp.histogram(A, bins="auto")
