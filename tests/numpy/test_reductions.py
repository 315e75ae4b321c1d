"""Reductions against NumPy."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit
from tests.numpy.common import boolean, check, f32, i32, same

X, N = f32(2, 3, 4), i32(2, 3, 4)
AXES = [None, 0, -1, (0, 2), (), (0, 1, 2)]
ALL = ["sum", "prod", "max", "min", "mean", "var", "std", "any", "all", "ptp", "count_nonzero", "median",
       "nansum", "nanprod", "nanmax", "nanmin", "nanmean", "nanvar", "nanstd", "amax", "amin"]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("axis", AXES)
def test_axes(name, axis):
    if axis == () and name in ("median",):
        return
    f, ref = getattr(bnp, name), getattr(np, name)
    for x in (X, N, X > 0):
        if x.dtype == bool and name in (
            "var",
            "std",
            "nanvar",
            "nanstd",
            "ptp",
            "median",
            "nanmax",
            "nanmin",
        ):
            continue
        kind = x.dtype
        want = lambda v: ref(v, axis=axis)
        check(lambda v: f(v, axis), want, x, rtol=1e-4, dtype=kind != np.int32 or name not in ("median",))
        kept = lambda v: ref(v, axis=axis, keepdims=True)
        check(lambda v: f(v, axis=axis, keepdims=True), kept, x, rtol=1e-4, traced=False)
        if hasattr(np.ndarray, name) and name != "ptp":
            same(getattr(bnp.asarray(x), name)(axis), want(x), rtol=1e-4)


@pytest.mark.parametrize("name", ["argmax", "argmin", "nanargmax", "nanargmin", "cumsum", "cumprod", "nancumsum",
                                  "nancumprod"])  # fmt: skip
def test_along_one_axis(name):
    f, ref = getattr(bnp, name), getattr(np, name)
    for x in (X, N, np.array([1, 3, 3, 0], np.float32)):
        for axis in (None, 0, -1):
            check(lambda v, a=axis: f(v, a), lambda v, a=axis: ref(v, a), x, rtol=1e-4)
    check(lambda v: f(v, 0), lambda v, ref=ref: ref(v, 0), X > 0)
    if "arg" in name:
        check(lambda v: f(v, keepdims=True), lambda v, ref=ref: ref(v, keepdims=True), X)
        check(lambda v: f(v, axis=1, keepdims=True), lambda v, ref=ref: ref(v, axis=1, keepdims=True), X)


def test_options():
    mask = boolean(2, 3, 4)
    for name in ("sum", "prod", "mean", "var", "any", "all"):
        ref = getattr(np, name)
        check(
            lambda v, n=name: getattr(bnp, n)(v, 1, where=mask),
            lambda v, ref=ref: ref(v, axis=1, where=mask),
            X,
            rtol=1e-4,
        )
    check(lambda v: bnp.sum(v, where=mask[0, 0]), lambda v: np.sum(v, where=mask[0, 0]), X)
    for name in ("max", "min"):
        ref = getattr(np, name)
        check(lambda v, n=name: getattr(bnp, n)(v, 1, where=mask, initial=0.5),
              lambda v, ref=ref: ref(v, axis=1, where=mask, initial=0.5), X)  # fmt: skip
        check(lambda v, n=name: getattr(bnp, n)(v, initial=3), lambda v, ref=ref: ref(v, initial=3), N)
    check(lambda v: bnp.sum(v, initial=10), lambda v: np.sum(v, initial=10), X)
    check(lambda v: bnp.prod(v, axis=0, initial=2), lambda v: np.prod(v, axis=0, initial=2), X)
    check(lambda v: bnp.var(v, 0, ddof=1), lambda v: np.var(v, 0, ddof=1), X)
    check(lambda v: bnp.std(v, 0, correction=1), lambda v: np.std(v, 0, ddof=1), X)
    check(lambda v: bnp.sum(v, dtype="float32"), lambda v: np.sum(v, dtype=np.float32), N)
    check(lambda v: bnp.mean(v, 1, where=mask), lambda v: np.mean(v, 1, where=mask), N)
    check(lambda v: bnp.average(v, 1), lambda v: np.average(v, 1), X)
    check(lambda v: bnp.average(v, 1, weights=np.array([1.0, 2, 3], np.float32)),
          lambda v: np.average(v, 1, weights=np.array([1.0, 2, 3])), X)  # fmt: skip
    for include in (False, True):
        check(lambda v, i=include: bnp.cumulative_sum(v, axis=1, include_initial=i),
              lambda v, i=include: np.cumulative_sum(v, axis=1, include_initial=i), X)  # fmt: skip
        check(lambda v, i=include: bnp.cumulative_prod(v, axis=1, include_initial=i),
              lambda v, i=include: np.cumulative_prod(v, axis=1, include_initial=i), X, rtol=1e-4)  # fmt: skip


def test_quantiles():
    for method in ("linear", "lower", "higher", "nearest", "midpoint"):
        for axis in (None, 1, (0, 2)):
            for q in (0.3, np.array([0.0, 0.5, 1.0], np.float32), np.array([[0.1], [0.9]], np.float32)):
                check(lambda v, q=q, a=axis, m=method: bnp.quantile(v, q, a, method=m),
                      lambda v, q=q, a=axis, m=method: np.quantile(v, np.asarray(q, np.float64), a, method=m), X,
                      rtol=1e-4, traced=False)  # fmt: skip
    check(lambda v: bnp.percentile(v, 25, 0), lambda v: np.percentile(v, 25, 0), X)
    check(
        lambda v: bnp.quantile(v, 0.5, 1, keepdims=True), lambda v: np.quantile(v, 0.5, 1, keepdims=True), X
    )
    assert np.isnan(float(bnp.median(bnp.asarray([1.0, np.nan, 2.0]))))


def test_nan():
    x = X.copy()
    x[0, 1, 2] = x[1, 0] = np.nan
    for name in ("sum", "max", "argmax", "min", "nansum", "nanmean", "nanmax", "nanmin", "nanstd", "nanprod"):
        check(lambda v, n=name: getattr(bnp, n)(v, 1), lambda v, n=name: getattr(np, n)(v, 1), x, rtol=1e-4)
    same(bnp.nanmax(bnp.asarray([np.nan, np.nan])), np.float32(np.nan))


def test_empty_and_complex():
    empty = np.zeros((0, 3), np.float32)
    for name in ("sum", "prod", "any", "all"):
        check(lambda v, n=name: getattr(bnp, n)(v, 0), lambda v, n=name: getattr(np, n)(v, 0), empty)
    with pytest.raises(errors.ValueRangeError, match="initial"):
        bnp.max(bnp.asarray(empty), 0)
    with pytest.raises(errors.ValueRangeError, match="no elements"):
        bnp.argmax(bnp.asarray(empty), 0)
    z = (f32(3, 4) + 1j * f32(3, 4, seed=1)).astype(np.complex64)
    for name in ("sum", "mean", "var", "std", "prod"):
        check(lambda v, n=name: getattr(bnp, n)(v, 0), lambda v, n=name: getattr(np, n)(v, 0), z, rtol=1e-4)


def test_half_precision():
    x = np.full(10000, 1.1, np.float32)
    for dtype in ("bfloat16", "float16"):
        v = bnp.asarray(x, dtype=dtype)
        assert float(v.mean()) == float(v[0]) and float(v.std()) == 0
    assert float((bnp.ones(1000, "float16") * 1000).mean()) == 1000  # the sum would overflow


def test_gradients():
    w = X / np.float32(7)
    same(grad(lambda v: (v * v).mean())(bnp.asarray(X)), X * 2 / 24)
    want = 2 * (X - X.mean()) / 24
    same(grad(lambda v: v.var())(bnp.asarray(X)), want, rtol=1e-4)
    same(grad(lambda v: v.max())(bnp.asarray([1.0, 3.0, 2.0])), np.array([0, 1, 0], np.float32))
    assert w.shape == X.shape


def test_errors():
    with pytest.raises(errors.ArgumentError, match="initial"):
        bnp.max(X, where=X > 0)
    with pytest.raises(errors.ShapeError):
        bnp.sum(X, where=np.ones((5, 2, 3, 4), bool))
    with pytest.raises(errors.ArgumentError, match="axis"):
        bnp.sum(X, axis=1.5)


@pytest.mark.parametrize("q", [-0.1, 1.5, [0.5, 2.0]])
def test_quantiles_out_of_range(q):
    q = bnp.asarray(q)
    with pytest.raises(errors.ValueRangeError, match="not between 0 and 1"):
        bnp.quantile(X, q)
    with pytest.raises(errors.ValueRangeError, match="not between 0 and 1"):
        bnp.percentile(X, q * 100)
    same(jit(lambda q: bnp.quantile(X, q))(q), np.quantile(X, np.clip(np.asarray(q), 0, 1)))


@pytest.mark.parametrize("name", ["sum", "prod"])
def test_initial_of_another_kind(name):
    f = getattr(bnp, name)
    for wrong in (1.5, np.float32(2)):
        with pytest.raises(errors.DtypeError, match="does not fit"):
            f(bnp.arange(1, 4), initial=wrong)
    same(f(bnp.arange(1, 4), initial=2.0), getattr(np, name)(np.arange(1, 4), initial=2))
    same(f(bnp.arange(1, 4), dtype="float32", initial=1.5), np.float32(getattr(np, name)([1.5, 1, 2, 3])))
