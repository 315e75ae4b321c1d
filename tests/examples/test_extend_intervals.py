"""The example of interval arithmetic: bounds are sound, tight, and compose."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, testing
from examples.extend import intervals
from examples.extend.intervals import Interval, bounds
from tests.transforms.common import arr

FUNCTIONS = {
    "sum": (lambda x: x + x * 2 - 1, -3, 3),
    "product": (lambda x: x * (1 - x), -3, 3),
    "quotient": (lambda x: (x + 1) / (x * x + 2), -3, 3),
    "quotient of constant": (lambda x: 3 / x, 0.1, 4),
    "exp log": (lambda x: bnp.log(1 + bnp.exp(x)), -3, 3),
    "sin": (bnp.sin, -9, 9),
    "cos": (bnp.cos, -9, 9),
    "tanh": (bnp.tanh, -3, 3),
    "sqrt": (bnp.sqrt, 0, 3),
    "abs": (bnp.abs, -3, 3),
    "square": (bnp.square, -3, 3),
    "cube": (lambda x: x**3, -3, 3),
    "fourth": (lambda x: x**4, -3, 3),
    "inverse cube": (lambda x: x**-3, 0.2, 3),
    "inverse square": (lambda x: x**-2, 0.2, 3),
    "max min": (lambda x: bnp.maximum(x, bnp.minimum(x * x, 1)), -3, 3),
    "clip": (lambda x: bnp.clip(x, -1, 1), -3, 3),
    "moved": (lambda x: bnp.concatenate([x[::-1], x[1:]]) + x.sum(), -3, 3),
    "products of matrices": (lambda x: (x[:, None] * x) @ x, -3, 3),
    "reductions": (lambda x: x.max() - x.min() + bnp.cumsum(x), -3, 3),
    "choice": (lambda x: bnp.where(bnp.arange(4) > 1, x, -x), -3, 3),
}


@pytest.mark.parametrize("f, low, high", FUNCTIONS.values(), ids=FUNCTIONS)
def test_bounds_hold_what_the_function_does(f, low, high, rng):
    """Random intervals, some of them points, and random points inside."""
    for width in (0.0, 0.01, 1.0, 10.0):
        ends = np.sort(rng.uniform(low, high, (2, 4)), 0)
        lo, hi = ends[0], np.minimum(ends[0] + width * (ends[1] - ends[0]), high)
        found = bounds(f)(Interval(arr(lo), arr(hi)))
        xs = np.concatenate([rng.uniform(lo, hi, (200, 4)), [lo, hi]])
        ys = np.asarray(bf.vmap(f)(arr(xs)))
        slack = 1e-12 * (1 + np.abs(ys).max())
        assert np.all(np.asarray(found.lo) <= ys.min(0) + slack)
        assert np.all(np.asarray(found.hi) >= ys.max(0) - slack)
        if not width:  # a point loses only rounding
            np.testing.assert_allclose(found.lo, found.hi, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["sin", "cos", "tanh", "abs", "square", "cube", "fourth", "clip"])
def test_bounds_of_one_operation_are_exact(name, rng):
    f, low, high = FUNCTIONS[name]
    lo, hi = np.sort(rng.uniform(low, high, (2, 50)), 0)
    found = bounds(f)(Interval(arr(lo), arr(hi)))
    ys = np.asarray(f(arr(np.linspace(lo, hi, 2001))))
    np.testing.assert_allclose(found.lo, ys.min(0), atol=2e-2)
    np.testing.assert_allclose(found.hi, ys.max(0), atol=2e-2)


def test_division_through_zero_is_unbounded():
    found = bounds(lambda x: 1 / x)(Interval(arr([-1.0, 0.0, 1.0]), arr([1.0, 1.0, 2.0])))
    np.testing.assert_array_equal(found.lo, [-np.inf, -np.inf, 0.5])
    np.testing.assert_array_equal(found.hi, [np.inf, np.inf, 1.0])
    nothing = bounds(lambda x: (x - x) / x)(Interval(arr(0.0), arr(0.0)))
    assert (float(nothing.lo), float(nothing.hi)) == (-np.inf, np.inf)


def test_composition():
    x = arr([0.3, -0.7, 1.2])
    f = lambda x: bnp.tanh(bnp.sin(x) * bnp.exp(x)) / (2 + bnp.square(x))
    report = testing.check_transform(bounds, f, (Interval(x - 0.1, x + 0.1),))
    assert not report.unsupported


def test_bounds_of_derivatives():
    """``grad`` inside: bounds on a slope, which is what a Lipschitz constant is."""
    f = lambda x: bnp.sin(x) * bnp.exp(-x * x) + bnp.tanh(x)
    slope = bf.vmap(bf.grad(f))
    lo, hi = arr(np.linspace(-2, 1.8, 20)), arr(np.linspace(-1.8, 2, 20))
    found = bounds(slope)(Interval(lo, hi))
    for share in np.linspace(0, 1, 21):
        values = np.asarray(slope(lo + share * (hi - lo)))
        assert np.all(np.asarray(found.lo) <= values) and np.all(values <= np.asarray(found.hi))
    assert float((found.hi - found.lo).max()) < 3


def test_loops_and_branches_on_what_is_known():
    f = lambda x: lax.scan(lambda c, i: (bnp.sin(c) * i, c), x, bnp.asarray([0.5, 2.0], "float64"))
    g = lambda x: (bnp.sin(bnp.sin(x) * 0.5) * 2, bnp.stack([x, bnp.sin(x) * 0.5]))
    box = Interval(arr(0.2), arr(0.4))
    for a, b in zip(bf.tree.leaves(bounds(f)(box)), bf.tree.leaves(bounds(g)(box)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_a_comparison_of_intervals_has_no_answer():
    with pytest.raises(errors.UnsupportedError, match="no rule for gt") as info:
        bounds(lambda x: bnp.where(x > 0, x, 0))(Interval(arr(-1.0), arr(1.0)))
    assert "test_extend_intervals.py" in info.value.where


def test_conversions():
    found = bounds(lambda x: (x * 3).astype("int32"))(Interval(arr(-1.0), arr(1.9)))
    assert (int(found.lo), int(found.hi)) == (-3, 5)
    assert bounds(lambda x: x.astype("float32"))(Interval(arr(-1.0), arr(1.9))).hi.dtype == np.float32
    with pytest.raises(errors.UnsupportedError, match="bounds of a condition"):
        bounds(lambda x: x.astype(bool))(Interval(arr(-1.0), arr(1.0)))


def test_certified_training():
    """Training on the bound certifies what training on the points does not."""
    right, certified = intervals.certified(intervals.train(0.0, steps=150), 0.1)
    sure, more = intervals.certified(intervals.train(0.1, steps=150), 0.1)
    assert right > 0.95 and sure > 0.95
    assert more > 0.9 > certified + 0.2


def test_the_certificate_holds():
    params, (xs, labels) = intervals.train(0.1, steps=60), intervals.data(bf.random.key(5), 50)
    margins = bf.vmap(intervals.worst_margin, (None, 0, 0, None))(params, xs, labels, 0.1)
    corners = [xs + 0.1 * bnp.asarray([a, b]) for a in (-1.0, 0.0, 1.0) for b in (-1.0, 0.3, 1.0)]
    for x in corners:
        scores = bf.vmap(intervals.network, (None, 0))(params, x) * labels
        assert np.all(np.asarray(scores) >= np.asarray(margins) - 1e-4)


def test_main(capsys):
    intervals.main()
    assert "certified" in capsys.readouterr().out
