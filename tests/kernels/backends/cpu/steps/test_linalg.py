"""Native linear algebra against the same programs as NumPy calls."""

import contextlib

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.kernels.backends.cpu import blas, toolchain
from blufunc.kernels.backends.cpu.steps import linalg

pytestmark = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")

LARGE = 130
"""More rows than blufunc factors itself."""


def draw(*shape, dtype="float32"):
    rng = np.random.default_rng(sum(shape))
    x = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if "complex" in dtype else 0)
    return x.astype(dtype)


def positive(*shape, dtype="float32"):
    x = draw(*shape, dtype=dtype)
    return x @ x.swapaxes(-1, -2).conj() + shape[-1] * np.eye(shape[-1], dtype=dtype)


def regular(*shape, dtype="float32"):
    return (draw(*shape, dtype=dtype) + shape[-1] ** 0.5 * 2 * np.eye(*shape[-2:])).astype(dtype)


def both(fun, *args, whole=True):
    """Results of NumPy calls and of the compiled program."""
    args = [bnp.asarray(x, dtype=x.dtype) for x in args]  # otherwise 64 bits become 32
    out = []
    for compiler in ("never", "always"):
        with host_compiler(compiler):
            program = bf.jit(lambda *args: fun(*args))
            out.append([np.asarray(y) for y in bf.tree.leaves(program(*args))])
            if compiler == "always" and whole and all(x.size for x in args):
                assert program.lower(*args).compile().program.is_native
    return out


@contextlib.contextmanager
def host_compiler(choice):
    before, config.host_compiler = config.host_compiler, choice
    try:
        yield
    finally:
        config.host_compiler = before


def close(fun, *args, tolerance=None, **options):
    want, got = both(fun, *args, **options)
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        single = w.dtype in (np.float32, np.complex64)
        rtol = tolerance or (2e-4 if single else 1e-10)
        scale = np.abs(w[np.isfinite(w)]).max(initial=1) if w.size else 1
        np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol * scale)


LU = lambda x: lax.linalg.lu(x)
CHOLESKY = lambda x: lax.linalg.cholesky(x, symmetrize_input=False)
DTYPES = ("float32", "float64", "complex64", "complex128")


SHAPES = [
    (1, 1),
    (2, 2),
    (5, 5),
    (3, 7),
    (7, 3),
    (30, 30),
    (3, 4, 4),
    (2, 3, 6, 5),
    (0, 3, 3),
    (LARGE, LARGE),
    (2, LARGE, 4),
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_lu(shape, dtype):
    close(LU, draw(*shape, dtype=dtype))


def test_lu_of_views():
    x = draw(3, 4, 5)
    for view in (
        lambda x: x.mT,
        lambda x: x[:, ::-1],
        lambda x: x[:, 1:, ::2],
        lambda x: bnp.broadcast_to(x[0], (2, 4, 5)),
    ):
        close(lambda x, view=view: LU(view(x)), x)
    close(lambda x: LU(x)[0] + 1, x)  # unread pivots and permutations
    close(lambda x: LU(x)[2], draw(4, 4))


def test_many_matrices():
    close(LU, draw(3000, 3, 3))
    close(LU, draw(40, 50, 50))
    close(CHOLESKY, positive(300, 10, 10))
    close(bnp.linalg.inv, regular(500, 6, 6))


@pytest.mark.parametrize("n", [4, LARGE])
def test_singular_matrices(n):
    x = draw(n, n)
    x[:, 1] = 0
    zero = np.zeros((n, n), np.float32)
    for a in (zero, np.ones((n, n), np.float32)):
        close(LU, a)
    close(lambda x: LU(x)[1:], x)
    (want,), (got,) = both(lambda a: bnp.linalg.solve(a, a[:, :2]), zero)
    assert not np.isfinite(want).any() and not np.isfinite(got).any()
    close(bnp.linalg.det, zero[:4, :4])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (30, 30), (2, 3, 4, 4), (0, 2, 2), (LARGE, LARGE)])
def test_cholesky(shape, dtype):
    close(CHOLESKY, positive(*shape, dtype=dtype))
    close(lambda x: lax.linalg.cholesky(x.mT), positive(*shape, dtype=dtype))


@pytest.mark.parametrize("n", [4, LARGE])
def test_matrices_that_are_not_positive_definite(n):
    good, nan, negative = positive(n, n), positive(n, n), positive(n, n)
    nan[2, 1], negative[-1, -1] = np.nan, -1
    many = np.stack([good, negative, nan, good, np.zeros_like(good)])
    close(CHOLESKY, many)
    (_,), (got,) = both(CHOLESKY, many)
    assert np.isnan(got[:, -1, -1]).tolist() == [False, True, True, False, True]
    assert not got[:, 0, 1].any()


FLAGS = ("left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal")


@pytest.mark.sampled(16)
@pytest.mark.parametrize("flags", range(32))
@pytest.mark.parametrize(("n", "k", "dtype"), [
    (1, 1, "float64"), (5, 1, "float32"), (6, 3, "float64"), (5, 4, "complex128"), (LARGE, 3, "float64"),
    (12, 1, "complex64"),
])  # fmt: skip
def test_triangular_solve(n, k, dtype, flags):
    options = {f: bool(flags >> i & 1) for i, f in enumerate(FLAGS)}
    a = np.tril(draw(2, n, n, dtype=dtype)) / n + 2 * np.eye(n, dtype=dtype)
    b = draw(2, n, k, dtype=dtype) if options["left_side"] else draw(2, k, n, dtype=dtype)
    a = (a if options["lower"] else a.swapaxes(-1, -2)).astype(dtype)
    a = (
        a + (1 - np.tri(n)) * 7 if options["lower"] else a + (1 - np.tri(n)).T * 7
    )  # the other triangle is not read
    a = a.astype(dtype)
    fun = lambda a, b: lax.linalg.triangular_solve(a, b, **options)
    close(fun, a, b)
    close(lambda a, b: fun(a.mT.mT[:, ::-1][:, ::-1], b), a, b)
    turned = {**options, "lower": not options["lower"], "transpose_a": not options["transpose_a"]}
    close(lambda a, b: lax.linalg.triangular_solve(a.mT, b, **turned), a, b)


@pytest.mark.parametrize(
    "view", [lambda a: a[:, ::-1, ::-1], lambda a: a[:, ::2, ::2], lambda a: a[:, :4, 2:6]]
)
def test_triangles_that_are_views(view):
    a, b = regular(2, 8, 8), draw(2, 4, 3)
    close(lambda a, b: lax.linalg.triangular_solve(view(a)[:, :4, :4], b, left_side=True, lower=True), a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 6, LARGE])
def test_solves_and_their_gradients(n, dtype):
    a, b = regular(n, n, dtype=dtype), draw(n, 2, dtype=dtype)
    close(bnp.linalg.solve, a, b, tolerance=1e-3 if "32" in dtype or "64" in dtype[7:] else 1e-8)
    if "complex" not in dtype:
        loss = lambda a, b: bnp.sin(bnp.linalg.solve(a, b)).sum()
        close(bf.grad(loss, (0, 1)), a, b, tolerance=1e-3 if dtype == "float32" else 1e-8)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (6, 3), (3, 6), (2, 5, 4), (0, 3, 3), (LARGE, 20)])
def test_qr(shape, dtype):
    for mode in ("reduced", "complete"):
        close(lambda x, mode=mode: bnp.linalg.qr(x, mode=mode), draw(*shape, dtype=dtype))


def rebuilt_eigh(x):
    w, v = bnp.linalg.eigh(x)
    return w, v @ (w[..., None] * v.mT.conj()), bnp.linalg.eigvalsh(x)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (2, 3, 3), (0, 3, 3), (40, 40)])
def test_eigh(shape, dtype):
    close(rebuilt_eigh, positive(*shape, dtype=dtype), whole=False)  # complex matmuls are not native


def rebuilt_svd(full):
    def fun(x):
        u, s, vh = bnp.linalg.svd(x, full_matrices=full)
        k = s.shape[-1]
        return s, (u[..., :k] * s[..., None, :]) @ vh[..., :k, :], bnp.abs(u).sum() * 0, bnp.linalg.svdvals(x)

    return fun


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (6, 3), (3, 6), (2, 4, 3), (0, 3, 2), (60, 5)])
def test_svd(shape, dtype):
    for full in (True, False):
        close(rebuilt_svd(full), draw(*shape, dtype=dtype), whole=False)


def test_failures_are_nan():
    x = positive(3, 4, 4)
    x[1, 2, 2] = np.nan
    want, got = both(lambda x: (*bnp.linalg.svd(x), *bnp.linalg.eigh(x), bnp.linalg.svdvals(x)), x)
    for w, g in zip(want, got, strict=True):
        assert np.isnan(g[1]).any() == np.isnan(w[1]).any()
        assert np.isfinite(g[0]).all() and np.isfinite(g[2]).all()


@pytest.mark.parametrize("n", [1, 2, 7])
def test_tridiagonal_solve(n):
    dl, d, du, b = draw(2, n), draw(2, n) + 4, draw(2, n), draw(2, n, 3)
    close(lambda *args: lax.linalg.tridiagonal_solve(*args), dl, d, du, b)
    close(lambda *args: lax.linalg.tridiagonal_solve(*args), dl * 0, d * 0, du * 0, b)


def test_permutations_of_pivots():
    pivots = np.array([[3, 1, 2], [1, 1, 4]], np.int32)
    close(lambda p: lax.linalg.lu_pivots_to_permutation(p, 5), pivots)


def kalman(x):
    """Factorizations in the body of a loop."""

    def body(c, a):
        p = c @ c.mT + 3 * bnp.eye(4, dtype=c.dtype)
        low = bnp.linalg.cholesky(p)
        gain = bnp.linalg.solve(p, a)
        return 0.5 * bnp.tanh(c + gain @ low), (bnp.linalg.det(p), bnp.linalg.inv(p + a))

    return lax.scan(body, x[0], x)


def power(x):
    """A while loop of a QR iteration."""
    going = lambda c: (c[0] < 20) & (bnp.abs(bnp.tril(c[1], -1)).max() > 1e-3)

    def body(c):
        q, r = bnp.linalg.qr(c[1])
        return c[0] + 1, r @ q

    return lax.while_loop(going, body, (0, x[0] + x[0].T))


@pytest.mark.parametrize("fun", [kalman, power])
def test_loops(fun):
    x = draw(5, 4, 4, dtype="float64") * 0.5
    close(fun, x, tolerance=1e-6)
    close(bf.vmap(fun), np.stack([x, x[::-1]]), tolerance=1e-6, whole=False)
    if fun is kalman:
        close(bf.grad(lambda x: kalman(x)[0].sum()), x, tolerance=1e-6, whole=False)


def test_lapack_runs_on_one_thread(monkeypatch):
    x = positive(200, 200)
    program = bf.jit(CHOLESKY)
    with host_compiler("always"):
        before = program(x)
        seen = []
        enter = blas._OneThreadEach.__enter__
        monkeypatch.setattr(blas._OneThreadEach, "__enter__", lambda self: (seen.append(1), enter(self))[1])
        np.testing.assert_array_equal(np.asarray(program(x)), np.asarray(before))
    assert seen


def test_small_and_large_agree(monkeypatch):
    """The loops of blufunc against LAPACK."""
    x, p = draw(2, 20, 20, dtype="float64"), positive(2, 20, 20, dtype="float64")
    for limit in (0, 1000):
        monkeypatch.setattr(linalg, "_SMALL", {"f": limit, "c": limit})
        close(LU, x)
        close(CHOLESKY, p)
        close(bnp.linalg.solve, x, p)
