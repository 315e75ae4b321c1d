"""``scipy.linalg`` against SciPy, and derivatives against differences and JAX."""

import functools

import numpy as np
import pytest
import scipy.linalg

import blufunc.numpy as bnp
from blufunc import errors, tree
from blufunc.core.arrays.array import from_numpy
from blufunc.scipy import linalg as sla
from blufunc.transforms.autodiff.grad import grad, jvp, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from tests.numpy.common import check, f32, i32
from tests.numpy.matrices import H, draw, positive
from tests.transforms.common import arr, close


def exact(x):
    return from_numpy(np.asarray(x))


def compare(name, *xs, atol=1e-10, **options):
    """SciPy's function of this name, in double precision, eagerly and under ``jit``."""
    f, g = (functools.partial(getattr(m, name), **options) for m in (sla, scipy.linalg))
    want = g(*xs)
    for got in (f(*map(exact, xs)), jit(f)(*map(exact, xs))):
        a, b = tree.leaves(got), want if isinstance(want, tuple) else [want]
        for x, y in zip(a, b, strict=True):
            assert x.shape == np.shape(y)
            np.testing.assert_allclose(np.asarray(x), y, atol=atol, rtol=1e-9)


COMPLEX = pytest.mark.parametrize("complex", [False, True], ids=["real", "complex"])

# -- factorizations and systems --------------------------------------------------------------------


@COMPLEX
@pytest.mark.parametrize("lower", [False, True])
def test_cholesky(complex, lower):
    x = positive(4, 4, complex=complex)
    compare("cholesky", x, lower=lower)
    half = np.tril(x) if lower else np.triu(x)
    compare("cholesky", half, lower=lower)
    c, flag = sla.cho_factor(exact(half), lower)
    assert flag is lower
    for b in (draw(4), draw(4, 2, complex=complex)):
        want = np.linalg.solve(x, b)
        np.testing.assert_allclose(np.asarray(sla.cho_solve((c, flag), exact(b))), want, rtol=1e-9)
        np.testing.assert_allclose(
            np.asarray(sla.solve(exact(half), exact(b), lower, assume_a="pos")), want, rtol=1e-9
        )


@COMPLEX
@pytest.mark.parametrize("m, n", [(3, 3), (4, 2), (2, 4)])
def test_lu_qr_svd(complex, m, n):
    x = draw(m, n, complex=complex)
    compare("lu", x)
    compare("lu", x, permute_l=True)
    for mode in ("full", "economic", "r"):
        for pivoting in (False, True):
            compare("qr", x, mode=mode, pivoting=pivoting)
    compare("svd", x, compute_uv=False)
    u, s, vh = sla.svd(exact(x), full_matrices=False)
    np.testing.assert_allclose(np.asarray((u * s) @ vh), x, atol=1e-12)


def test_lu_of_batches():
    x = draw(2, 3, 4, 3)
    p, low, up = (np.asarray(t) for t in sla.lu(exact(x)))
    np.testing.assert_allclose(p @ low @ up, x, atol=1e-12)
    np.testing.assert_array_equal(p.sum(-1), 1)


@COMPLEX
@pytest.mark.parametrize("trans", [0, 1, 2])
def test_solves_with_factors(complex, trans):
    a = draw(4, 4, complex=complex)
    turned = [a, a.T, a.conj().T][trans]
    for b in (draw(4), draw(4, 3, complex=complex)):
        got = sla.lu_solve(sla.lu_factor(exact(a)), exact(b), trans)
        np.testing.assert_allclose(np.asarray(got), np.linalg.solve(turned, b), rtol=1e-8, atol=1e-10)
        for lower in (False, True):
            for unit in (False, True):
                compare(
                    "solve_triangular", a + 3 * np.eye(4), b, trans=trans, lower=lower, unit_diagonal=unit
                )
    compare("lu_factor", a)
    batch = np.stack([a, 2 * a])
    got = sla.lu_solve(sla.lu_factor(exact(batch)), exact(draw(4, 1)), trans)
    want = np.stack([np.linalg.solve(t * turned, draw(4, 1)) for t in (1, 2)])
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-8)


@pytest.mark.parametrize("assume_a", ["gen", "sym", "her", "pos"])
def test_solve(assume_a):
    compare("solve", positive(3, 3), draw(3, 2), assume_a=assume_a)
    compare("solve", positive(3, 3), draw(3), assume_a=assume_a)
    compare("inv", positive(3, 3))
    compare("det", positive(3, 3))


@COMPLEX
@pytest.mark.parametrize("lower", [False, True])
def test_eigh(complex, lower):
    a, b = draw(4, 4, complex=complex), positive(4, 4, seed=1, complex=complex)
    compare("eigh", a, lower=lower, eigvals_only=True)
    compare("eigh", a, b, lower=lower, eigvals_only=True)
    half = np.tril(a) if lower else np.triu(a)
    whole = half + H(half)
    whole[np.diag_indices(4)] = half.diagonal().real
    w, v = (np.asarray(t) for t in sla.eigh(exact(a), lower=lower))
    np.testing.assert_allclose(whole @ v, v * w, atol=1e-12)
    w, v = (np.asarray(t) for t in sla.eigh(exact(a), exact(b), lower=lower))
    np.testing.assert_allclose(whole @ v, b @ v * w, atol=1e-10)
    np.testing.assert_allclose(H(v) @ b @ v, np.eye(4), atol=1e-10)


@COMPLEX
@pytest.mark.parametrize("shape", [(3, 3), (4, 2), (2, 4)])
@pytest.mark.parametrize("side", ["right", "left"])
def test_polar(complex, shape, side):
    compare("polar", draw(*shape, complex=complex), side=side)


def test_polar_where_singular_values_are_equal():
    t = draw(3, 3)
    u_t, p_t = jvp(sla.polar, (arr(np.eye(3)),), (arr(t),))[1]
    np.testing.assert_allclose(np.asarray(u_t), (t - t.T) / 2, atol=1e-12)
    np.testing.assert_allclose(np.asarray(p_t), (t + t.T) / 2, atol=1e-12)


# -- the exponential -------------------------------------------------------------------------------


@COMPLEX
@pytest.mark.parametrize("size", [1e-3, 0.1, 1, 5, 40])
def test_expm(complex, size):
    x = size * draw(3, 4, 4, complex=complex) / 4
    compare("expm", x, atol=1e-13)
    got = sla.expm(exact(np.triu(x)), upper_triangular=True)
    np.testing.assert_allclose(np.asarray(got), scipy.linalg.expm(np.triu(x)), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        np.asarray(vmap(sla.expm)(exact(x))), np.asarray(sla.expm(exact(x))), rtol=1e-12
    )
    narrow = x.astype(np.complex64 if complex else np.float32)
    want = scipy.linalg.expm(x)
    scale = np.abs(want).max()
    np.testing.assert_allclose(np.asarray(sla.expm(exact(narrow))) / scale, want / scale, atol=3e-5)


def test_expm_at_the_ends():
    close(sla.expm(arr(np.zeros((2, 2)))), arr(np.eye(2)))
    compare("expm", np.array([[0.0, 1], [0, 0]]))
    check(sla.expm, scipy.linalg.expm, i32(2, 2), rtol=1e-4, dtype=False)
    assert np.isnan(np.asarray(sla.expm(arr(np.eye(2) * 100), max_squarings=2))).all()
    assert np.isfinite(np.asarray(sla.expm(arr(np.eye(2) * 20), max_squarings=2))).all()
    assert np.isnan(np.asarray(sla.expm(arr(np.full((2, 2), np.inf))))).all()
    assert sla.expm(bnp.zeros((0, 0))).shape == (0, 0)


@COMPLEX
@pytest.mark.parametrize("size", [0.1, 1, 20])
def test_derivatives_of_expm(complex, size):
    a, e = size * draw(3, 3, complex=complex) / 3, draw(3, 3, seed=1, complex=complex)
    want, want_t = scipy.linalg.expm_frechet(a, e)
    scale = np.abs(want_t).max()
    got, got_t = sla.expm_frechet(exact(a), exact(e))
    np.testing.assert_allclose(np.asarray(got) / scale, want / scale, atol=1e-12)
    np.testing.assert_allclose(np.asarray(got_t) / scale, want_t / scale, atol=1e-12)
    close(sla.expm_frechet(exact(a), exact(e), compute_expm=False), got_t)
    pullback = lambda a: vjp(sla.expm, a)[1](exact(e))[0]
    want_back = scipy.linalg.expm_frechet(a.T, e)[1]
    np.testing.assert_allclose(np.asarray(pullback(exact(a))) / scale, want_back / scale, atol=1e-12)
    second = np.asarray(jvp(pullback, (exact(a),), (exact(e),))[1])
    h = 1e-5
    plus, minus = (scipy.linalg.expm_frechet((a + s * h * e).T, e)[1] for s in (1, -1))
    difference = (plus - minus) / (2 * h)
    np.testing.assert_allclose(
        second / np.abs(difference).max(), difference / np.abs(difference).max(), atol=1e-7
    )


def test_gradients_of_batches_of_exponentials():
    """Under ``jit`` and ``vmap``, where matrices need different numbers of squarings."""
    x = np.stack([0.1 * draw(3, 3), 10 * draw(3, 3, seed=1)])
    f = grad(lambda x: bnp.sum(bnp.tanh(sla.expm(x))))
    want = np.stack([np.asarray(f(exact(t))) for t in x])
    for g in (f, vmap(f), jit(f), jit(vmap(f))):
        np.testing.assert_allclose(np.asarray(g(exact(x))), want, rtol=1e-8, atol=1e-10)


CASES = {
    "cholesky": (lambda x: sla.cholesky(x @ bnp.conj(x.mT) + bnp.eye(3)), [(3, 3)]),
    "cho_solve": (lambda x, b: sla.cho_solve(sla.cho_factor(x @ bnp.conj(x.mT) + bnp.eye(3)), b), [(3, 3), (3, 2)]),
    "lu": (lambda x: sla.lu(x), [(3, 3)]),
    "lu_solve": (lambda x, b: sla.lu_solve(sla.lu_factor(x), b, 1), [(3, 3), (3,)]),
    "solve_triangular": (lambda x, b: sla.solve_triangular(x, b, 2, lower=True), [(3, 3), (3,)]),
    "solve-pos": (lambda x, b: sla.solve(x, b, assume_a="pos"), "positive"),
    "cholesky-of-a-triangle": (lambda x, b: sla.cholesky(x, lower=True) @ b, "positive"),
    "cholesky-of-the-upper-triangle": (lambda x, b: sla.cholesky(x) @ b, "positive"),
    "eigh-of-a-triangle": (lambda x, b: sla.eigh(x, lower=False, eigvals_only=True) * b, "positive"),
    "eigh-general": (lambda x, y: sla.eigh(x, y @ bnp.conj(y.mT) + bnp.eye(3), eigvals_only=True), [(3, 3), (3, 3)]),
    "polar": (sla.polar, [(3, 3)]),
    "polar-tall": (sla.polar, [(4, 2)]),
    "polar-wide": (lambda x: sla.polar(x, "left"), [(2, 3, 4)]),
    "polar-order-2": (lambda x: jvp(sla.polar, (x,), (bnp.sin(x),))[1], [(4, 3)]),
    "block_diag": (lambda x, y: sla.block_diag(x, y), [(2, 3), (1, 2)]),
    "toeplitz": (lambda c, r: sla.toeplitz(c, r), [(3,), (4,)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@COMPLEX
def test_derivatives(name, complex):
    """Forward mode against differences, reverse against forward."""
    f, shapes = CASES[name]
    if shapes == "positive":
        points = [positive(3, 3, complex=complex), draw(3, complex=complex)]
    else:
        points = [draw(*s, seed=i, complex=complex) for i, s in enumerate(shapes)]
    ts = [draw(*p.shape, seed=9 + i, complex=complex) for i, p in enumerate(points)]
    out, out_t = jvp(f, tuple(map(exact, points)), tuple(map(exact, ts)))
    moved = lambda s: [
        np.asarray(x) for x in tree.leaves(f(*[exact(p + s * 1e-5 * t) for p, t in zip(points, ts)]))
    ]
    for got, plus, minus in zip(tree.leaves(out_t), moved(1), moved(-1), strict=True):
        np.testing.assert_allclose(np.asarray(got), (plus - minus) / 2e-5, rtol=1e-6, atol=1e-7)
    flat = lambda *xs: tree.leaves(f(*xs))
    cts = [
        exact(draw(*x.shape, seed=20, complex=x.dtype.kind == "c").astype(x.dtype)) for x in tree.leaves(out)
    ]
    grads = vjp(flat, *map(exact, points))[1](cts)
    pair = lambda xs, ys: sum(np.sum(np.asarray(x) * np.asarray(y)) for x, y in zip(xs, ys)).real
    np.testing.assert_allclose(pair(grads, ts), pair(cts, tree.leaves(out_t)), rtol=1e-9)


# -- special matrices ------------------------------------------------------------------------------


def test_special_matrices():
    check(sla.block_diag, scipy.linalg.block_diag, f32(2, 3), f32(1, 2), f32(3))
    check(sla.block_diag, scipy.linalg.block_diag, i32(2, 2), i32(1, 1))
    check(sla.toeplitz, scipy.linalg.toeplitz, f32(3), f32(5, seed=1))
    check(sla.toeplitz, scipy.linalg.toeplitz, i32(4))
    check(sla.toeplitz, scipy.linalg.toeplitz, (f32(3) + 1j * f32(3, seed=1)).astype(np.complex64))
    check(sla.toeplitz, lambda c, r: np.stack([scipy.linalg.toeplitz(x, r) for x in c]), f32(2, 3), f32(4))
    check(lambda: sla.hilbert(3), lambda: scipy.linalg.hilbert(3))


X = bnp.ones((2, 3))
WRONG = {
    "rows": (lambda: sla.cho_solve((bnp.eye(2), True), bnp.ones(3)), errors.ShapeError),
    "no pair": (lambda: sla.cho_solve(bnp.eye(2), bnp.ones(2)), errors.ArgumentError),
    "no pivots": (lambda: sla.lu_solve(bnp.eye(2), bnp.ones(2)), errors.ArgumentError),
    "float pivots": (lambda: sla.lu_solve((bnp.eye(2), bnp.ones(2)), bnp.ones(2)), errors.DtypeError),
    "trans": (lambda: sla.solve_triangular(bnp.eye(2), bnp.ones(2), trans=3), errors.ValueRangeError),
    "mode": (lambda: sla.qr(X, mode="raw"), errors.ValueRangeError),
    "side": (lambda: sla.polar(X, "up"), errors.ValueRangeError),
    "assume_a": (lambda: sla.solve(bnp.eye(2), bnp.ones(2), assume_a="banded"), errors.ValueRangeError),
    "eigh type": (lambda: sla.eigh(bnp.eye(2), type=2), errors.UnsupportedError),
    "eigh shapes": (lambda: sla.eigh(bnp.eye(2), bnp.eye(3)), errors.ShapeError),
    "expm": (lambda: sla.expm(X), errors.ShapeError),
    "expm of half": (lambda: sla.expm(bnp.eye(2, dtype="float16")), errors.DtypeError),
    "max_squarings": (lambda: sla.expm(bnp.eye(2), max_squarings=-1), errors.ValueRangeError),
    "expm_frechet": (lambda: sla.expm_frechet(bnp.eye(2), bnp.eye(3)), errors.ShapeError),
    "block_diag": (lambda: sla.block_diag(), errors.ArgumentError),
    "block_diag of batches": (lambda: sla.block_diag(bnp.ones((2, 2, 2))), errors.ShapeError),
    "hilbert": (lambda: sla.hilbert(-1), errors.ValueRangeError),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    call, error = WRONG[name]
    with pytest.raises(error) as caught:
        call()
    assert "test_linalg.py" in caught.value.where and caught.value.what


@pytest.mark.peer
@pytest.mark.parametrize("size", [0.1, 1, 8])
def test_peer_expm(size):
    """The value, gradient and Hessian-vector product of expm are JAX's."""
    jax = pytest.importorskip("jax")
    expm = pytest.importorskip("jax.scipy.linalg").expm

    a, e = ((size * draw(3, 3, seed=s) / 3).astype(np.float32) for s in (0, 1))

    def run(expm, grad, jvp, sum, a, e):
        g = grad(lambda a: sum(expm(a) * e))
        return expm(a), g(a), jvp(g, (a,), (e,))[1]

    got = run(sla.expm, grad, jvp, bnp.sum, bnp.asarray(a), bnp.asarray(e))
    want = jax.jit(lambda a, e: run(expm, jax.grad, jax.jvp, jax.numpy.sum, a, e))(a, e)
    for g, w in zip(got, want):
        scale = float(np.abs(w).max())
        np.testing.assert_allclose(np.asarray(g) / scale, np.asarray(w) / scale, atol=1e-5)
