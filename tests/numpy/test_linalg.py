"""``bnp.linalg`` and ``lax.linalg``: values against NumPy, and errors."""

import functools
import itertools

import numpy as np
import pytest
import scipy.linalg

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.numpy.common import check, f32, i32, same
from tests.numpy.matrices import H, draw, hermitian, positive, single
from tests.transforms.common import arr, close

la = bnp.linalg


BATCHES = pytest.mark.parametrize("lead", [(), (3,), (2, 1)], ids=str)
COMPLEX = pytest.mark.parametrize("complex", [False, True], ids=["real", "complex"])
SHAPES = pytest.mark.parametrize("m, n", [(3, 3), (4, 2), (2, 4), (1, 1), (1, 3)])

# -- decompositions --------------------------------------------------------------------------------


@BATCHES
@COMPLEX
def test_cholesky(lead, complex):
    x = positive(*lead, 3, 3, complex=complex)
    check(la.cholesky, np.linalg.cholesky, single(x), rtol=1e-4, atol=1e-5)
    check(
        lambda x: la.cholesky(x, upper=True),
        lambda x: H(np.linalg.cholesky(x)),
        single(x),
        rtol=1e-4,
        atol=1e-5,
    )
    low = np.asarray(la.cholesky(arr(np.tril(x), x.dtype), symmetrize_input=False))
    np.testing.assert_allclose(low @ H(low), x, rtol=1e-12)
    up = np.asarray(la.cholesky(arr(np.triu(x), x.dtype), upper=True, symmetrize_input=False))
    np.testing.assert_allclose(H(up) @ up, x, rtol=1e-12)


def test_one_bad_matrix_of_many():
    many = np.tile(np.eye(3, dtype=np.float32), (4, 5, 1, 1))
    many[2, 3, 0, 0] = -1
    low = np.asarray(la.cholesky(bnp.asarray(many)))
    bad = np.isnan(low).any((-1, -2))
    assert bad.sum() == 1 and bad[2, 3]


def test_what_has_no_decomposition_is_nan():
    bad = np.stack([np.eye(2), -np.eye(2), np.full((2, 2), np.nan)]).astype(np.float32)
    low = np.asarray(la.cholesky(bnp.asarray(bad)))
    np.testing.assert_array_equal(low[0], np.eye(2))
    assert np.isnan(low[1:, 0, 0]).all() and not low[1:, 0, 1].any()
    nan = bnp.asarray(bad[[0, 2]])
    for f in (la.eigvals, la.eigvalsh, la.svdvals):
        w = np.asarray(f(nan))
        np.testing.assert_array_equal(w[0], 1)
        assert np.isnan(w[1]).all()
    for f in (la.eig, la.eigh, la.svd, la.qr):
        assert all(np.isnan(np.asarray(x)[1]).any() and np.isfinite(np.asarray(x)[0]).all() for x in f(nan))
    left = lax.linalg.eig(nan)[1]
    assert np.isnan(np.asarray(left)[1]).all() and np.isfinite(np.asarray(left)[0]).all()


@BATCHES
@COMPLEX
def test_eigh(lead, complex):
    x = hermitian(*lead, 3, 3, complex=complex)
    for options, given in (({}, x), ({"UPLO": "L", "symmetrize_input": False}, np.tril(x)),
                           ({"UPLO": "U", "symmetrize_input": False}, np.triu(x))):  # fmt: skip
        got = la.eigh(arr(given, x.dtype), **options)
        w, v = np.asarray(got.eigenvalues), np.asarray(got.eigenvectors)
        np.testing.assert_allclose(w, np.linalg.eigvalsh(x), rtol=1e-10)
        np.testing.assert_allclose(v @ (w[..., None] * H(v)), x, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(H(v) @ v, np.broadcast_to(np.eye(3), v.shape), atol=1e-12)
        close(la.eigvalsh(arr(given, x.dtype), **options), arr(w), 1e-10)


@BATCHES
@COMPLEX
def test_eig(lead, complex):
    x = draw(*lead, 4, 4, complex=complex)
    w, v = la.eig(arr(x, x.dtype))
    assert w.dtype == v.dtype == np.complex128
    w, v = np.asarray(w), np.asarray(v)
    np.testing.assert_allclose(x @ v, v * w[..., None, :], atol=1e-12)
    np.testing.assert_allclose(np.asarray(la.eigvals(arr(x, x.dtype))), w, atol=1e-12)
    w, left, right = (np.asarray(t) for t in lax.linalg.eig(arr(x, x.dtype)))
    np.testing.assert_allclose(x @ right, right * w[..., None, :], atol=1e-12)
    np.testing.assert_allclose(H(left) @ x, w[..., :, None] * H(left), atol=1e-12)


@BATCHES
@SHAPES
@COMPLEX
def test_qr_and_svd(lead, m, n, complex):
    x = draw(*lead, m, n, complex=complex)
    for mode in ("reduced", "complete"):
        got, want = la.qr(arr(x, x.dtype), mode), np.linalg.qr(x, mode)
        assert got.Q.shape == want.Q.shape and got.R.shape == want.R.shape
        np.testing.assert_allclose(np.asarray(got.Q), want.Q, atol=1e-12)
        np.testing.assert_allclose(np.asarray(got.R), want.R, atol=1e-12)
    np.testing.assert_allclose(np.asarray(la.qr(arr(x, x.dtype), "r")), np.linalg.qr(x, "r"), atol=1e-12)
    for full in (False, True):
        got, want = la.svd(arr(x, x.dtype), full), np.linalg.svd(x, full)
        assert [t.shape for t in got] == [t.shape for t in want]
        k = min(m, n)
        back = np.asarray(got.U)[..., :k] * np.asarray(got.S)[..., None, :] @ np.asarray(got.Vh)[..., :k, :]
        np.testing.assert_allclose(back, x, atol=1e-12)
    for s in (la.svdvals(arr(x, x.dtype)), la.svd(arr(x, x.dtype), compute_uv=False), got.S):
        np.testing.assert_allclose(np.asarray(s), want.S, atol=1e-12)


@COMPLEX
def test_svd_of_hermitian_matrices(complex):
    x = hermitian(2, 4, 4, complex=complex)
    u, s, vh = (np.asarray(t) for t in la.svd(arr(x, x.dtype), hermitian=True))
    np.testing.assert_allclose(u * s[:, None, :] @ vh, x, atol=1e-12)
    np.testing.assert_allclose(s, np.linalg.svd(x, compute_uv=False), atol=1e-12)
    close(la.svd(arr(x, x.dtype), compute_uv=False, hermitian=True), arr(s))


@SHAPES
@COMPLEX
def test_lu_and_pivoted_qr(m, n, complex):
    x = draw(2, m, n, complex=complex)
    packed, pivots, order = lax.linalg.lu(arr(x, x.dtype))
    assert pivots.dtype == order.dtype == np.int32
    close(lax.linalg.lu_pivots_to_permutation(pivots, m), order)
    k = min(m, n)
    low = np.tril(np.asarray(packed)[:, :, :k], -1) + np.eye(m, k)
    up = np.triu(np.asarray(packed)[:, :k])
    np.testing.assert_allclose(low @ up, np.take_along_axis(x, np.asarray(order)[..., None], 1), atol=1e-12)
    for full in (False, True):
        q, r, p = (np.asarray(t) for t in lax.linalg.qr(arr(x, x.dtype), pivoting=True, full_matrices=full))
        want = scipy.linalg.qr(x[0], mode="full" if full else "economic", pivoting=True)
        np.testing.assert_array_equal(p[0], want[2])
        np.testing.assert_allclose(q[0], want[0], atol=1e-12)
        np.testing.assert_allclose(q @ r, np.take_along_axis(x, p[:, None, :], 2), atol=1e-12)


@COMPLEX
@pytest.mark.parametrize("n", [1, 3, 7])
def test_many_small_matrices(n, complex):
    """Batches that are eliminated together give what their matrices give one by one."""
    x, b = draw(100, n, n, complex=complex), draw(100, n, 2, seed=1, complex=complex)
    x[7, :, 0] = 0
    got = lax.linalg.lu(arr(x, x.dtype))
    want = [lax.linalg.lu(arr(t, x.dtype)) for t in x]
    for g, w in zip(got, zip(*want)):
        np.testing.assert_allclose(np.asarray(g), np.stack([np.asarray(t) for t in w]), atol=1e-12)
    x = x + 3 * np.eye(n)
    ours = np.asarray(la.solve(arr(x, x.dtype), arr(b, b.dtype)))
    np.testing.assert_allclose(ours, np.linalg.solve(x, b), rtol=1e-8, atol=1e-10)
    for left, lower, turn, unit in itertools.product((False, True), repeat=4):
        options = {
            "left_side": left,
            "lower": lower,
            "transpose_a": turn,
            "conjugate_a": turn,
            "unit_diagonal": unit,
        }
        solve = functools.partial(lax.linalg.triangular_solve, **options)
        rhs = b if left else np.swapaxes(b, 1, 2)
        one = [np.asarray(solve(arr(s, x.dtype), arr(t, b.dtype))) for s, t in zip(x[:9], rhs[:9])]
        np.testing.assert_allclose(
            np.asarray(solve(arr(x, x.dtype), arr(rhs, b.dtype)))[:9], np.stack(one), rtol=1e-9
        )


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (0, 3, 3)])
def test_empty(shape):
    x = np.zeros(shape, np.float32)
    for f in (lax.linalg.lu, lax.linalg.qr, la.qr, functools.partial(la.svd, full_matrices=False)):
        assert all(np.isfinite(np.asarray(t)).all() for t in f(bnp.asarray(x)))
    check(la.svdvals, lambda x: np.linalg.svd(x, compute_uv=False), x)
    check(la.pinv, np.linalg.pinv, x)
    if shape[-1] == shape[-2]:
        for ours, theirs in ((la.det, np.linalg.det), (la.inv, np.linalg.inv), (la.cholesky, np.linalg.cholesky),
                             (la.eigvalsh, np.linalg.eigvalsh)):  # fmt: skip
            check(ours, theirs, x)
        check(lambda x: tuple(la.slogdet(x)), lambda x: tuple(np.linalg.slogdet(x)), x)
        check(la.solve, np.linalg.solve, x, x)
        assert la.eigvals(bnp.asarray(x)).shape == shape[:-1]


# -- systems, inverses, pseudoinverses -------------------------------------------------------------


@pytest.mark.parametrize("a, b", [((3, 3), (3,)), ((3, 3), (3, 2)), ((2, 3, 3), (3,)), ((2, 1, 3, 3), (4, 3, 2)),
                                  ((3, 3), (2, 3, 1)), ((2, 3, 3), (2, 3, 2))])  # fmt: skip
def test_solve(a, b):
    x, y = f32(*a) + 3 * np.eye(3, dtype=np.float32), f32(*b, seed=1)
    check(la.solve, np.linalg.solve, x, y, rtol=1e-4)
    check(
        la.solve,
        np.linalg.solve,
        i32(3, 3) + 9 * np.eye(3, dtype=np.int32),
        i32(*b[-1:] if len(b) == 1 else b[-2:]),
    )
    z = draw(*a, complex=True)
    got = la.solve(arr(z, z.dtype), arr(y, np.complex128))
    np.testing.assert_allclose(np.asarray(got), np.linalg.solve(z, y.astype(np.float64)), rtol=1e-10)


def test_inverses():
    x = f32(2, 3, 3) + 3 * np.eye(3, dtype=np.float32)
    check(la.inv, np.linalg.inv, x, rtol=1e-4)
    check(la.inv, np.linalg.inv, i32(3, 3) + 9 * np.eye(3, dtype=np.int32))
    check(lambda x: la.tensorinv(x), np.linalg.tensorinv, f32(4, 6, 8, 3), rtol=1e-2, atol=1e-3)
    check(
        lambda x: la.tensorinv(x, ind=1),
        lambda x: np.linalg.tensorinv(x, ind=1),
        f32(6, 3, 2),
        rtol=1e-2,
        atol=1e-3,
    )
    check(la.tensorsolve, np.linalg.tensorsolve, f32(2, 3, 6), f32(2, 3, seed=1), rtol=1e-3, atol=1e-4)
    ours, theirs = (functools.partial(f, axes=(0,)) for f in (la.tensorsolve, np.linalg.tensorsolve))
    check(ours, theirs, f32(6, 2, 3), f32(2, 3, seed=1), rtol=1e-3, atol=1e-4)


def test_singular_systems_give_no_numbers():
    zero = bnp.zeros((2, 2))
    assert not np.isfinite(np.asarray(la.solve(zero, bnp.ones(2)))).any()
    assert not np.isfinite(np.asarray(la.inv(zero))).any()


@SHAPES
@COMPLEX
def test_pinv_and_lstsq(m, n, complex):
    x, y = draw(m, n, complex=complex), draw(m, 2, seed=1)
    np.testing.assert_allclose(np.asarray(la.pinv(arr(x, x.dtype))), np.linalg.pinv(x), atol=1e-12)
    many = np.stack([x, 2 * x])
    np.testing.assert_allclose(
        np.asarray(la.pinv(arr(many, x.dtype), rtol=arr([1e-6, 1e-6]))), np.linalg.pinv(many), atol=1e-12
    )
    for b in (y, y[:, 0]):
        got, want = la.lstsq(arr(x, x.dtype), arr(b), numpy_resid=True), np.linalg.lstsq(x, b)
        for g, w in zip(got, want):
            np.testing.assert_allclose(np.asarray(g), w, atol=1e-12)
        x_all, resid, *_ = la.lstsq(arr(x, x.dtype), arr(b))
        off = x @ np.asarray(x_all) - b
        np.testing.assert_allclose(
            np.asarray(resid), np.sum(np.abs(off) ** 2, 0).reshape(resid.shape), atol=1e-12
        )


def test_rank_deficient():
    x = np.outer(draw(4), draw(3, seed=1))
    np.testing.assert_allclose(np.asarray(la.pinv(arr(x))), np.linalg.pinv(x, rcond=1e-10), atol=1e-12)
    got, want = la.lstsq(arr(x), arr(draw(4, seed=2))), np.linalg.lstsq(x, draw(4, seed=2))
    np.testing.assert_allclose(np.asarray(got[0]), want[0], atol=1e-12)
    assert int(got[2]) == 1 and int(la.matrix_rank(arr(x))) == 1
    h = hermitian(3, 3)
    np.testing.assert_allclose(np.asarray(la.pinv(arr(h), hermitian=True)), np.linalg.inv(h), atol=1e-10)
    assert int(la.lstsq(arr(np.diag([1.0, 1e-3])), arr(np.ones(2)), rcond=0.1)[2]) == 1


# -- numbers and norms -----------------------------------------------------------------------------

ORDERS = ["fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf]


@pytest.mark.parametrize("ord", ORDERS, ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
def test_matrix_norms(ord, keepdims):
    x, z = f32(2, 3, 4), single(draw(2, 3, 4, complex=True))
    for t in (x, z):
        check(lambda t: la.matrix_norm(t, ord=ord, keepdims=keepdims),
              lambda t: np.linalg.matrix_norm(t, ord=ord, keepdims=keepdims), t, rtol=1e-5)  # fmt: skip
    for axis in ((0, 2), (2, 0), (-1, 1)):
        options = {"ord": ord, "axis": axis, "keepdims": keepdims}
        ours, theirs = (functools.partial(f, **options) for f in (la.norm, np.linalg.norm))
        check(ours, theirs, x, rtol=1e-5)
    check(lambda t: la.norm(t, ord), lambda t: np.linalg.norm(t, ord), x[0], rtol=1e-5)
    check(lambda t: la.norm(t, ord), lambda t: np.linalg.norm(t, ord), i32(3, 4), rtol=1e-5)


@pytest.mark.parametrize("ord", [0, 1, 2, 3, 0.5, -1, -2.5, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
def test_vector_norms(ord, keepdims):
    for t in (f32(2, 3, 4), single(draw(2, 3, 4, complex=True)), i32(2, 3, 4, low=1)):
        for axis in (None, 0, -1, (0, 2), (1, 0, 2)):
            options = {"axis": axis, "keepdims": keepdims, "ord": ord}
            ours, theirs = (functools.partial(f, **options) for f in (la.vector_norm, np.linalg.vector_norm))
            check(ours, theirs, t, rtol=1e-4)
        check(
            lambda t: la.norm(t, ord, 1, keepdims),
            lambda t: np.linalg.norm(t, ord, 1, keepdims),
            t,
            rtol=1e-4,
        )


def test_norm_by_default():
    for t in (f32(2, 3, 4), f32(3), f32(), i32(2, 2), single(draw(3, complex=True))):
        check(la.norm, np.linalg.norm, t)
        check(lambda t: la.norm(t, keepdims=True), lambda t: np.linalg.norm(t, keepdims=True), t)
    assert la.norm(bnp.ones(4, "bfloat16")).dtype == bnp.bfloat16


@BATCHES
@pytest.mark.parametrize("n", range(1, 6))
@COMPLEX
def test_determinants(lead, n, complex):
    x = draw(*lead, n, n, complex=complex)
    np.testing.assert_allclose(np.asarray(la.det(arr(x, x.dtype))), np.linalg.det(x), rtol=1e-10)
    got, want = la.slogdet(arr(x, x.dtype)), np.linalg.slogdet(x)
    assert got.logabsdet.dtype == np.float64
    np.testing.assert_allclose(np.asarray(got.sign), want.sign, rtol=1e-10)
    np.testing.assert_allclose(np.asarray(got.logabsdet), want.logabsdet, rtol=1e-10)
    check(la.det, np.linalg.det, i32(*lead, n, n), rtol=1e-4, atol=1e-3, dtype=False)


def test_determinants_of_singular_matrices():
    for n in range(1, 6):
        x = np.ones((n, n), np.float32) if n > 1 else np.zeros((1, 1), np.float32)
        same(la.det(bnp.asarray(x)), np.float32(0))
        same(tuple(la.slogdet(bnp.asarray(x))), (np.float32(0), np.float32(-np.inf)))
        same(tuple(la.slogdet(bnp.asarray(x + 0j))), (np.complex64(0), np.float32(-np.inf)))


@pytest.mark.parametrize("p", [None, 2, -2, 1, -1, np.inf, "fro", "nuc"], ids=str)
def test_cond(p):
    check(lambda x: la.cond(x, p), lambda x: np.linalg.cond(x, p), f32(2, 3, 3), rtol=1e-3)
    if p != "nuc":  # NumPy takes singular values of infinities there, and raises
        check(lambda x: la.cond(x, p), lambda x: np.linalg.cond(x, p), np.zeros((2, 2), np.float32))
    if p in (None, 2, -2):
        check(lambda x: la.cond(x, p), lambda x: np.linalg.cond(x, p), f32(2, 3, 4), rtol=1e-4)


def test_matrix_rank():
    x = np.stack([np.eye(3), np.diag([1, 1, 0]), np.zeros((3, 3)), np.diag([1, 1e-9, 0])]).astype(np.float32)
    check(la.matrix_rank, lambda x: np.linalg.matrix_rank(x).astype(np.int32), x)
    check(lambda x: la.matrix_rank(x, hermitian=True), lambda x: np.array([3, 2, 0, 1], np.int32), x)
    check(lambda x: la.matrix_rank(x, tol=1e-12), lambda x: np.array([3, 2, 0, 2], np.int32), x)
    check(lambda x: la.matrix_rank(x, rtol=1e-12), lambda x: np.array([3, 2, 0, 2], np.int32), x)
    check(la.matrix_rank, lambda x: np.linalg.matrix_rank(x).astype(np.int32), f32(3, 4))
    check(la.matrix_rank, lambda x: np.int32(1), f32(3))
    check(la.matrix_rank, lambda x: np.int32(0), np.zeros(3, np.float32))


# -- products --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [*range(9), 13, -1, -3])
def test_matrix_power(n):
    check(
        lambda x: la.matrix_power(x, n),
        lambda x: np.linalg.matrix_power(x, n),
        f32(2, 3, 3),
        rtol=1e-2,
        atol=1e-3,
    )
    if n >= 0:
        check(
            lambda x: la.matrix_power(x, n), lambda x: np.linalg.matrix_power(x, n), i32(3, 3, low=0, high=3)
        )
    steps = {0: 0, 1: 0, 2: 1, 3: 2, 7: 4, 8: 3, 13: 5}
    if n in steps:
        text = str(make_jaxpr(lambda x: la.matrix_power(x, n))(bnp.ones((2, 2))))
        assert text.count("dot_general") == steps[n]


def test_products():
    xs = [f32(3, 4), f32(4, 2, seed=1), f32(2, 5, seed=2), f32(5, 3, seed=3)]
    v, w = f32(3, seed=4), f32(3, seed=5)
    for given in (xs, xs[:2], [v, *xs], [*xs, w], [v, *xs, w], [v, np.eye(3, dtype=np.float32), w]):
        check(
            lambda *given: la.multi_dot(given), lambda *given: np.linalg.multi_dot(given), *given, rtol=1e-4
        )
    check(la.outer, np.linalg.outer, v, xs[0][0])
    for axis in (-1, 0, 1):
        of = f32(3, 3, 3), f32(3, 3, 3, seed=1)
        check(functools.partial(la.cross, axis=axis), functools.partial(np.linalg.cross, axis=axis), *of)
    check(
        functools.partial(la.cross, axis=-2),
        functools.partial(np.linalg.cross, axis=-2),
        f32(3, 4),
        f32(3, 1),
    )
    x = f32(2, 3, 4)
    for offset in (-1, 0, 2):
        for ours, theirs in ((la.diagonal, np.linalg.diagonal), (la.trace, np.linalg.trace)):
            check(functools.partial(ours, offset=offset), functools.partial(theirs, offset=offset), x)
    check(la.matrix_transpose, np.linalg.matrix_transpose, x)
    check(la.vecdot, np.linalg.vecdot, x, x)
    check(la.matmul, np.matmul, x, f32(4, 5))
    check(lambda x, y: la.tensordot(x, y, axes=1), lambda x, y: np.tensordot(x, y, 1), x, f32(4, 5))


# -- errors ----------------------------------------------------------------------------------------

X, V = bnp.ones((2, 3)), bnp.ones(3)
WRONG = {
    "a vector": (lambda: la.det(V), errors.ShapeError),
    "not square": (lambda: la.inv(X), errors.ShapeError),
    "half precision": (lambda: la.cholesky(bnp.eye(2, dtype="bfloat16")), errors.DtypeError),
    "rows": (lambda: la.solve(bnp.eye(2), V), errors.ShapeError),
    "a number": (lambda: la.solve(bnp.eye(2), 1.0), errors.ShapeError),
    "a mode": (lambda: la.qr(X, "economic"), errors.ValueRangeError),
    "a triangle": (lambda: la.eigh(bnp.eye(2), UPLO="M"), errors.ValueRangeError),
    "a method": (lambda: la.slogdet(bnp.eye(2), method="qr"), errors.UnsupportedError),
    "a norm": (lambda: la.norm(X, "max"), errors.ValueRangeError),
    "a norm of a matrix": (lambda: la.norm(X, 3), errors.ValueRangeError),
    "a norm of too much": (lambda: la.norm(bnp.ones((2, 2, 2)), 2), errors.ShapeError),
    "an axis twice": (lambda: la.norm(X, axis=(0, -2)), errors.ValueRangeError),
    "a traced order": (lambda: jit(lambda x, p: la.norm(x, p))(V, 2), errors.ArgumentError),
    "pinv": (lambda: la.pinv(X, 0.1, rcond=0.1), errors.ArgumentError),
    "multi_dot": (lambda: la.multi_dot([X, X]), errors.ShapeError),
    "multi_dot of one": (lambda: la.multi_dot([X]), errors.ShapeError),
    "outer": (lambda: la.outer(X, V), errors.ShapeError),
    "cross": (lambda: la.cross(V[:2], V[:2]), errors.ShapeError),
    "cross along another axis": (lambda: la.cross(X, X, axis=0), errors.ShapeError),
    "tensorsolve": (lambda: la.tensorsolve(X, V), errors.ShapeError),
    "tensorinv": (lambda: la.tensorinv(X, 1), errors.ShapeError),
    "matrix_power": (lambda: la.matrix_power(X, 2), errors.ShapeError),
    "triangular_solve": (lambda: lax.linalg.triangular_solve(bnp.eye(2), X), errors.ShapeError),
    "mixed": (lambda: lax.linalg.triangular_solve(bnp.eye(2), bnp.ones((2, 2), "float64")), errors.DtypeError),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    call, error = WRONG[name]
    with pytest.raises(error) as caught:
        call()
    assert "test_linalg.py" in caught.value.where and caught.value.what


@pytest.mark.parametrize("f", [lambda x: lax.linalg.qr(x)[0], lambda x: la.svd(x)[0]], ids=["qr", "svd"])
def test_what_is_not_a_function_of_the_matrix_has_no_derivative(f):
    with pytest.raises(errors.GradError, match="no derivative") as caught:
        grad(lambda x: f(x).sum())(bnp.ones((3, 2)))
    assert caught.value.why and caught.value.fix
    close(
        grad(lambda x: la.svd(x, compute_uv=False)[0])(arr(np.eye(3, 2) * [2, 1])),
        arr([[1, 0], [0, 0], [0, 0]]),
    )
