"""Differences, integrals, convolutions, windows, polynomials; against NumPy."""

# ruff: noqa: B023 - the functions that close over loop variables run at once

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit
from tests.numpy.common import check, f32, i32, same

X, Z = f32(6, 7), f32(2, 3, 4)
ROWS, COLUMNS = (np.cumsum(f32(n, low=0.5, high=1.5)) for n in (6, 7))

# -- neighbours ------------------------------------------------------------------------------------

LINES = [
    lambda n, x: n.gradient(x),
    lambda n, x: n.gradient(x, axis=0),
    lambda n, x: n.gradient(x, edge_order=2),
    lambda n, x: n.gradient(x, 0.5, axis=1, edge_order=2),
    lambda n, x: n.gradient(x, ROWS, COLUMNS),
    lambda n, x: n.gradient(x, 2.0, COLUMNS, edge_order=2),
    lambda n, x: n.gradient(x[:2, 0]),
    lambda n, x: n.trapezoid(x),
    lambda n, x: n.trapezoid(x, COLUMNS),
    lambda n, x: n.trapezoid(x, dx=0.3, axis=0),
    lambda n, x: n.trapezoid(x, ROWS[:, None] * np.ones(7, np.float32), axis=0),
    lambda n, x: n.ediff1d(x, to_begin=np.float32(1), to_end=np.array([3, 4], np.float32)),
    lambda n, x: n.diff(x, n=2, prepend=np.float32(0), append=x[:, :2]),
    lambda n, x: n.diff(x > 0, axis=0),
    lambda n, x: n.unwrap(x * 9),
    lambda n, x: n.unwrap(x * 9, discont=4.0, axis=0),
    lambda n, x: n.unwrap(x * 3, period=2.0),
]


@pytest.mark.parametrize("i", range(len(LINES)))
def test_neighbours(i):
    check(lambda x: LINES[i](bnp, x), lambda x: LINES[i](np, x), X, rtol=1e-4, atol=1e-5)


def test_unwrap_of_integers():
    x = i32(20, low=0, high=6)
    for period in (5, 6):
        check(lambda v: bnp.unwrap(v, period=period), lambda v: np.unwrap(v, period=period), x)


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
def test_convolutions(mode):
    for n, m in ((5, 3), (5, 4), (3, 5), (4, 5), (1, 1), (4, 4), (2, 6)):
        a, v = f32(n), f32(m, seed=1)
        for x, y in ((a, v), ((a + 1j).astype(np.complex64), (v * 1j + 1).astype(np.complex64))):
            check(lambda x, y: bnp.convolve(x, y, mode), lambda x, y: np.convolve(x, y, mode), x, y)
            check(lambda x, y: bnp.correlate(x, y, mode), lambda x, y: np.correlate(x, y, mode), x, y)


def test_a_convolution_has_gradients():
    a, v, w = f32(6), f32(3, seed=1), f32(8, seed=2)
    got = grad(lambda x, y: (bnp.convolve(x, y) * w).sum(), argnums=(0, 1))(a, v)
    same(got, (np.correlate(w, v, "valid"), np.correlate(w, a, "valid")))
    with pytest.raises(errors.ShapeError, match="vectors"):
        bnp.convolve(X, v)


@pytest.mark.parametrize("name", ["bartlett", "blackman", "hamming", "hanning"])
def test_windows(name):
    for m in (0, 1, 2, 5, 12):
        same(getattr(bnp, name)(m), getattr(np, name)(m))
    same(bnp.kaiser(9, 8.6), np.kaiser(9, 8.6))
    same(bnp.kaiser(1, 2.0), np.kaiser(1, 2.0))


# -- polynomials -----------------------------------------------------------------------------------

P, Q = np.array([1, -2, 3, 0.5], np.float32), np.array([2, 0, -1], np.float32)
POLYNOMIALS = [
    lambda n, p, q: n.polyadd(p, q),
    lambda n, p, q: n.polysub(q, p),
    lambda n, p, q: n.polymul(p, q),
    lambda n, p, q: n.polydiv(p, q)[0],
    lambda n, p, q: n.polyval(p, X),
    lambda n, p, q: n.polyder(p),
    lambda n, p, q: n.polyder(p, 3),
    lambda n, p, q: n.polyder(p, 5),
    lambda n, p, q: n.polyint(p, 2),
    lambda n, p, q: n.polyint(p, 3, np.array([1, 2, 3], np.float32)),
    lambda n, p, q: n.poly(q),
]


@pytest.mark.parametrize("i", range(len(POLYNOMIALS)))
def test_polynomials(i):
    check(lambda p, q: POLYNOMIALS[i](bnp, p, q), lambda p, q: POLYNOMIALS[i](np, p, q), P, Q)


def test_division_leaves_what_it_says():
    quotient, rest = bnp.polydiv(P, Q)
    same(bnp.polyadd(bnp.polymul(quotient, Q), rest), P)
    same(bnp.polydiv(P, Q, trim_leading_zeros=True)[1], np.polydiv(P, Q)[1])


def test_roots():
    p = np.array([0, 1, -6, 11, -6, 0], np.float32)
    got = np.sort_complex(np.asarray(bnp.roots(p)))
    np.testing.assert_allclose(got, [0, 1, 2, 3], atol=1e-4)
    assert jit(lambda v: bnp.roots(v, strip_zeros=False))(p[1:]).shape == (4,)
    with pytest.raises(errors.ConcretizationError, match="strip_zeros"):
        jit(bnp.roots)(p)


def test_polyfit():
    x = np.linspace(-1, 1, 9, dtype=np.float32)
    y = (x**3 - 2 * x + 0.1 * f32(9)).astype(np.float32)
    w, both = np.arange(1, 10).astype(np.float32), np.stack([y, -y], 1)
    check(lambda u, v: bnp.polyfit(u, v, 3), lambda u, v: np.polyfit(u, v, 3), x, y, rtol=1e-3, atol=1e-4)
    same(bnp.polyfit(x, both, 2, w=w), np.polyfit(x, both, 2, w=w), rtol=1e-3, atol=1e-4)
    for cov in (True, "unscaled"):
        same(bnp.polyfit(x, y, 3, cov=cov), np.polyfit(x, y, 3, cov=cov), rtol=1e-2, atol=1e-4)
    got, want = bnp.polyfit(x, y, 2, full=True), np.polyfit(x, y, 2, full=True)
    for g, h in zip(got[:4], want[:4]):
        np.testing.assert_allclose(g, h, rtol=1e-3, atol=1e-4)


# -- functions -------------------------------------------------------------------------------------


def test_along_axes():
    same(bnp.apply_along_axis(lambda v: v.sum(), 0, X), X.sum(0))
    same(bnp.apply_along_axis(lambda v: v[::-1], 0, X), X[::-1])
    want = np.apply_along_axis(lambda v: np.outer(v, v), 1, X)
    same(jit(lambda x: bnp.apply_along_axis(lambda v: bnp.outer(v, v), 1, x))(X), want)
    want = np.apply_along_axis(lambda v: np.stack([v.sum(), v.max()]), 1, Z)
    same(bnp.apply_along_axis(lambda v: bnp.stack([v.sum(), v.max()]), 1, Z), want)
    same(bnp.apply_over_axes(bnp.sum, Z, (0, 2)), np.apply_over_axes(np.sum, Z, (0, 2)))


def test_fromfunction():
    same(bnp.fromfunction(lambda i, j: i + 2 * j, (3, 4)), np.fromfunction(lambda i, j: i + 2 * j, (3, 4)))
    same(bnp.fromfunction(lambda i, j: i == j, (3, 3), dtype=int), np.eye(3, dtype=bool))


def test_piecewise():
    pieces = [-1, lambda v: v * 2, 5]
    check(lambda x: bnp.piecewise(x, [x < 0, x > 1, x > 0.5], pieces),
          lambda x: np.piecewise(x, [x < 0, x > 1, x > 0.5], pieces), X)  # fmt: skip
    check(
        lambda x: bnp.piecewise(x, [x < 0], [1, lambda v: v]),
        lambda x: np.piecewise(x, [x < 0], [1, lambda v: v]),
        X,
    )
    same(bnp.piecewise(X[0], X[0] < 0, [1, 2]), np.piecewise(X[0], X[0] < 0, [1, 2]))
    same(grad(lambda x: bnp.piecewise(x, [x < 0], [lambda v: -v, lambda v: v**2]))(3.0), np.float32(6))


def test_vectorize():
    scaled = bnp.vectorize(lambda a, b: a.sum() * b, signature="(n),()->()")
    same(scaled(Z, np.ones((2, 1), np.float32)), Z.sum(-1))
    product = bnp.vectorize(lambda m, v: m @ v, signature="(m,n),(n)->(m)")
    same(product(Z, np.ones((5, 1, 4), np.float32)), np.broadcast_to(Z.sum(-1), (5, 2, 3)))
    larger = bnp.vectorize(lambda a, b: bnp.where(a > b, a, b))
    check(lambda x: larger(x[:, :1], x[:1]), lambda x: np.maximum(x[:, :1], x[:1]), X)
    same(larger(np.ones((1, 1), np.float32), np.ones(1, np.float32)), np.ones((1, 1), np.float32))
    powered = bnp.vectorize(lambda a, n: a ** int(n), excluded={1})
    same(powered(X, 2), X**2)
    ends = bnp.vectorize(lambda a: (a.min(), a.max()), signature="(n)->(),()")
    same(ends(X), (X.min(1), X.max(1)))
    for call, words in (
        (lambda: bnp.vectorize(lambda a: a, signature="n->n"), "signature"),
        (lambda: product(Z, np.ones(3)), "'n'"),
        (lambda: ends(X, X), "2 arguments"),
        (lambda: bnp.vectorize(lambda a: a, signature="(n)->()")(X), "result 0"),
    ):
        with pytest.raises(errors.BlufuncError, match=words):
            call()
