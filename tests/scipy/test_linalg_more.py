"""Functions, special matrices and reductions of ``linalg``, against SciPy."""

import numpy as np
import pytest
import scipy.linalg

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import from_numpy
from blufunc.scipy import linalg as sla
from blufunc.transforms.autodiff.grad import grad, jvp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from tests.numpy.matrices import H, draw, positive

COMPLEX = pytest.mark.parametrize("complex", [False, True], ids=["real", "complex"])
exact = lambda x: from_numpy(np.asarray(x))


def same(got, want, atol=1e-10):
    np.testing.assert_allclose(np.asarray(got), want, atol=atol, rtol=1e-9)


def differences(f, x, t, h=1e-6):
    return (np.asarray(f(exact(x + h * t))) - np.asarray(f(exact(x - h * t)))) / (2 * h)


# -- functions of matrices -------------------------------------------------------------------------


@COMPLEX
def test_square_roots(complex):
    x = draw(2, 4, 4, complex=complex)
    root = np.asarray(jit(sla.sqrtm)(exact(x)))
    same(root @ root, x)
    same(root[0], scipy.linalg.sqrtm(x[0]))
    t = draw(4, 4, seed=3, complex=complex)
    same(jvp(sla.sqrtm, (exact(x[0]),), (exact(t),))[1], differences(sla.sqrtm, x[0], t), 1e-6)
    assert (
        np.isnan(np.asarray(sla.sqrtm(exact([[0.0, 1], [0, 0]])))).any()
        or not np.isfinite(np.asarray(sla.sqrtm(exact([[0.0, 1], [0, 0]])))).all()
    )


@COMPLEX
@pytest.mark.parametrize("method", ["schur", "eigen"])
def test_sylvester(complex, method):
    a, b, c = draw(4, 4, complex=complex), draw(3, 3, seed=1), draw(4, 3, seed=2)
    want = scipy.linalg.solve_sylvester(a, b, c)
    same(sla.solve_sylvester(exact(a), exact(b), exact(c), method=method), want)
    several = sla.solve_sylvester(exact(np.stack([a, 2 * a])), exact(b), exact(c))
    same(several[0], want)
    loss = lambda a, b, c: (
        bnp.real(bnp.sum(sla.solve_sylvester(a, b, c) * (1 - 2j)))
        if complex
        else bnp.sum(sla.solve_sylvester(a, b, c))
    )
    for i, x in enumerate((a, b, c)):
        args = [exact(v) for v in (a, b, c)]
        t = draw(*x.shape, seed=5)
        f = lambda v, i=i, args=args: loss(*[v if j == i else w for j, w in enumerate(args)])
        got = np.sum(np.real(np.asarray(grad(f)(exact(x))) * t))
        same(got, differences(f, x, t), 1e-6)


@COMPLEX
def test_functions_of_matrices(complex):
    x = draw(5, 5, complex=complex)
    got, error = sla.funm(exact(x), bnp.cos, disp=False)
    want, their_error = scipy.linalg.funm(x, np.cos, disp=False)
    same(got, want, 1e-8)
    assert 0 < float(error) < 1e-10 and their_error < 1e-10
    same(jit(lambda x: sla.funm(x, bnp.exp))(exact(x)), scipy.linalg.expm(x), 1e-8)


# -- reductions ------------------------------------------------------------------------------------


@COMPLEX
@pytest.mark.parametrize("n", [1, 2, 5])
def test_schur_and_hessenberg(complex, n):
    x = draw(n, n, complex=complex)
    for output in ("real", "complex"):
        t, z = (np.asarray(v) for v in sla.schur(exact(x), output))
        same(z @ t @ H(z), x)
        same(np.tril(t, -2), 0)
    if not complex:
        t, z = (np.asarray(v) for v in sla.rsf2csf(*sla.schur(exact(x))))
        same(z @ t @ H(z), x)
        same(np.tril(t, -1), 0)
        same(z @ H(z), np.eye(n))
    h, q = (np.asarray(v) for v in sla.hessenberg(exact(np.stack([x, 2 * x])), calc_q=True))
    same(q @ h @ H(q), np.stack([x, 2 * x]))
    same(np.tril(h, -2), 0)
    same(sla.hessenberg(exact(x)), h[0])


def test_tridiagonal_eigenvalues():
    d, e = draw(6), draw(5, seed=1)
    want = scipy.linalg.eigh_tridiagonal(d, e)
    w, v = sla.eigh_tridiagonal(exact(d), exact(e))
    same(w, want[0])
    same(np.abs(v), np.abs(want[1]))
    same(
        sla.eigh_tridiagonal(exact(d), exact(e), eigvals_only=True, select="i", select_range=(1, 3)),
        want[0][1:4],
    )
    same(grad(lambda d: bnp.sum(sla.eigh_tridiagonal(d, exact(e), eigvals_only=True)))(exact(d)), np.ones(6))


@COMPLEX
@pytest.mark.parametrize("m, n", [(5, 3), (4, 4)])
def test_reflectors(complex, m, n):
    x = draw(m, n, complex=complex)
    packed, taus = jit(lambda x: bnp.linalg.qr(x, mode="raw"))(exact(x))
    want = np.linalg.qr(x, "raw")
    same(packed, want[0])
    same(taus, want[1])
    a = packed.T
    q = lax.linalg.householder_product(a, taus)
    same(q @ bnp.triu(a)[:n], x)
    full = np.asarray(lax.linalg.ormqr(a, taus, exact(np.eye(m, dtype=x.dtype))))
    same(full[:, :n], q)
    c = draw(m, 2, seed=2, complex=complex)
    same(lax.linalg.ormqr(a, taus, exact(c), transpose=True), H(full) @ c)
    same(lax.linalg.ormqr(a, taus, exact(c.T), left=False), c.T @ full)
    t = draw(m, n, seed=4)
    f = lambda a: bnp.sum(bnp.real(lax.linalg.householder_product(a, taus)) ** 3)
    got = np.sum(np.real(np.asarray(grad(f)(a)) * t))
    same(got, differences(f, np.asarray(a), t), 1e-6)


@COMPLEX
@pytest.mark.parametrize("lower", [True, False])
def test_tridiagonal_form(complex, lower):
    x = positive(5, 5, complex=complex)
    packed, d, e, taus = lax.linalg.tridiagonal(exact(x), lower=lower)
    assert e.dtype == "float64" and taus.shape == (4,)
    same(sla.eigh_tridiagonal(d, e, eigvals_only=True), np.linalg.eigvalsh(x))
    other = lambda x: np.triu(x, 2) if lower else np.tril(x, -2)
    same(other(np.asarray(packed)), other(x))


@COMPLEX
@pytest.mark.parametrize("m, n", [(6, 4), (4, 4)])
def test_qdwh(complex, m, n):
    x = draw(m, n, complex=complex)
    u, h, count, converged = jit(lax.linalg.qdwh)(exact(x))
    want = scipy.linalg.polar(x)
    same(u, want[0])
    same(h, want[1])
    assert converged and 1 < int(count) <= 7
    assert not lax.linalg.qdwh(exact(x), max_iterations=2)[3]
    if not complex:
        t = draw(m, n, seed=3)
        f = lambda x: bnp.sum(lax.linalg.qdwh(x)[0] ** 3)
        same(np.sum(np.asarray(grad(f)(exact(x))) * t), differences(f, x, t), 1e-6)


def test_symmetric_products_and_updates():
    a, c = draw(2, 4, 3), draw(2, 4, 4, seed=1)
    got = lax.linalg.symmetric_product(exact(a), exact(c), alpha=2.0, beta=-1.0)
    same(got, 2 * a @ a.swapaxes(1, 2) - c)
    x, w = positive(4, 4), draw(4)
    r = sla.cholesky(exact(x))
    for f in (lax.linalg.cholesky_update, jit(lax.linalg.cholesky_update)):
        updated = np.asarray(f(r, exact(w)))
        same(updated.T @ updated, x + np.outer(w, w))
        same(np.tril(updated, -1), 0)
    assert np.isfinite(np.asarray(grad(lambda w: bnp.sum(lax.linalg.cholesky_update(r, w)))(exact(w)))).all()


def test_perturbed_tridiagonal_systems():
    for seed in range(4):
        dl, d, du, b = (
            draw(*s, seed=10 * seed + i) for i, s in enumerate([(2, 6), (2, 6), (2, 6), (2, 6, 3)])
        )
        args = [exact(v) for v in (dl, d, du, b)]
        want = lax.linalg.tridiagonal_solve(*args)
        same(jit(lambda *xs: lax.linalg.tridiagonal_solve(*xs, perturb_singular=True))(*args), want, 1e-8)
    zeros, ones = exact(np.zeros(3)), exact(np.ones((3, 1)))
    assert bnp.isnan(lax.linalg.tridiagonal_solve(zeros, zeros, zeros, ones)).all()
    assert bnp.isfinite(lax.linalg.tridiagonal_solve(zeros, zeros, zeros, ones, perturb_singular=True)).all()
    one = exact(np.ones(1))
    same(lax.linalg.tridiagonal_solve(one, 2 * one, one, ones[:1], perturb_singular=True), [[0.5]])


def test_algorithms_are_preferences():
    x = exact(positive(4, 4))
    for algorithm in lax.linalg.SvdAlgorithm:
        same(lax.linalg.svd(x, compute_uv=False, algorithm=algorithm), np.linalg.svd(np.asarray(x))[1])
    same(
        lax.linalg.eigh(x, implementation=lax.linalg.EighImplementation.QDWH)[1],
        np.linalg.eigvalsh(np.asarray(x)),
    )
    lax.linalg.eig(x, implementation=lax.linalg.EigImplementation.LAPACK)
    with pytest.raises(errors.ArgumentError, match="SvdAlgorithm"):
        lax.linalg.svd(x, algorithm="qr")


@COMPLEX
@pytest.mark.parametrize("pivoting", [False, True])
def test_qr_multiply(complex, pivoting):
    for m, n in ((5, 3), (3, 5)):
        a = draw(m, n, complex=complex)
        k = min(m, n)
        for mode, shapes in (("right", [(2, m), (m,)]), ("left", [(k, 2), (k,)])):
            for shape in shapes:
                c = draw(*shape, seed=1)
                for conjugate in (False, True):
                    want = scipy.linalg.qr_multiply(a, c, mode, pivoting, conjugate)
                    got = sla.qr_multiply(exact(a), exact(c), mode, pivoting, conjugate)
                    for g, w in zip(got, want, strict=True):
                        same(g, w)


# -- special matrices ------------------------------------------------------------------------------

V, W = draw(4), draw(5, seed=1)
SPECIAL = [
    ("circulant", (V,)),
    ("hankel", (V,)),
    ("hankel", (V, W)),
    ("companion", (V,)),
    ("fiedler", (V,)),
    *(("fiedler_companion", (draw(n),)) for n in (2, 3, 4, 5, 6, 7)),
    ("leslie", (W, V)),
    *(("convolution_matrix", (V, n, mode)) for n in (2, 4, 6) for mode in ("full", "same", "valid")),
    *(("convolution_matrix", (draw(5), n, "same")) for n in (2, 3, 8)),
]
SIZES = [
    ("hilbert", ()),
    ("invhilbert", ()),
    *((name, (kind,)) for name in ("pascal", "invpascal") for kind in ("symmetric", "lower", "upper")),
    ("helmert", (False,)),
    ("helmert", (True,)),
    ("hadamard", ()),
    *(("dft", (scale,)) for scale in (None, "sqrtn", "n")),
]


@pytest.mark.parametrize("name, args", SPECIAL, ids=lambda x: x if isinstance(x, str) else "")
def test_matrices_of_vectors(name, args):
    vectors = [a for a in args if isinstance(a, np.ndarray)]
    rest = args[len(vectors) :]
    want = getattr(scipy.linalg, name)(*args)
    f = lambda *xs: getattr(sla, name)(*xs, *rest)
    same(f(*map(exact, vectors)), want)
    batched = jit(vmap(f))(*[exact(np.stack([v, v])) for v in vectors])
    same(batched[1], want)


@pytest.mark.parametrize("name, args", SIZES, ids=str)
def test_matrices_of_a_size(name, args):
    got = getattr(sla, name)(4, *args)
    np.testing.assert_allclose(np.asarray(got), getattr(scipy.linalg, name)(4, *args), rtol=1e-6, atol=1e-6)
    assert got.dtype == {"hadamard": "int32", "dft": "complex64"}.get(name, "float32")


X = positive(3, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: sla.sqrtm(X, blocksize=4),
        lambda: sla.sqrtm(X[:2]),
        lambda: sla.solve_sylvester(X, X, X[:2]),
        lambda: sla.solve_sylvester(X, X, X, method="krylov"),
        lambda: sla.funm(X[None], bnp.exp),
        lambda: sla.schur(X, "triangular"),
        lambda: sla.rsf2csf(X, X[:2]),
        lambda: sla.eigh_tridiagonal(V, V),
        lambda: sla.eigh_tridiagonal(W, V, select="v", select_range=(0, 1)),
        lambda: sla.eigh_tridiagonal(W, V, select="i"),
        lambda: sla.eigh_tridiagonal(W, V, select="i", select_range=(0, 9)),
        lambda: sla.qr_multiply(X, X, mode="both"),
        lambda: sla.qr_multiply(X, V),
        lambda: sla.companion(V[:1]),
        lambda: sla.leslie(V, V),
        lambda: sla.convolution_matrix(V, 3, "half"),
        lambda: sla.convolution_matrix(V, 0),
        lambda: sla.hadamard(6),
        lambda: sla.dft(3, "m"),
        lambda: sla.helmert(0),
        lambda: sla.pascal(3, "diagonal"),
        lambda: lax.linalg.householder_product(exact(X), exact(V)),
        lambda: lax.linalg.ormqr(exact(X), exact(V[:2]), exact(V[:, None])),
        lambda: lax.linalg.qdwh(exact(X[:2])),
        lambda: lax.linalg.schur(exact(X), sort_eig_vals=True),
        lambda: lax.linalg.symmetric_product(exact(X), exact(X[:2])),
        lambda: lax.linalg.cholesky_update(exact(X), exact(V)),
        lambda: bnp.linalg.qr(X, mode="packed"),
    ],
)
def test_errors(call):
    with pytest.raises(errors.BlufuncError, match=":"):
        call()


@pytest.mark.parametrize(
    "f", [sla.schur, sla.hessenberg, lambda x: sla.funm(x, bnp.exp)], ids=["schur", "hess", "funm"]
)
def test_factors_that_are_not_functions_have_no_derivative(f):
    with pytest.raises(errors.GradError, match="not functions of the matrix"):
        jvp(f, (exact(X),), (exact(X),))
