"""Derivatives of ``bnp.linalg`` and ``lax.linalg`` against differences and JAX."""

import functools
import itertools

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import lax, tree
from blufunc.core.arrays.array import from_numpy
from blufunc.transforms.autodiff.grad import grad, jvp, vjp
from blufunc.transforms.autodiff.jacobian import hessian, jacrev
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.numpy.matrices import draw
from tests.transforms.common import arr, close

la = bnp.linalg
COMPLEX = pytest.mark.parametrize("complex", [False, True], ids=["real", "complex"])

# -- derivatives: of what is composed here; those of primitives are in the table of operations -----


def spd(x):
    return x @ bnp.conj(bnp.matrix_transpose(x)) + bnp.eye(x.shape[-1], dtype=x.dtype)


def herm(x):
    return x + bnp.conj(bnp.matrix_transpose(x))


def spectral(f, decompose):
    """``V f(w) V^H``: of eigenvectors, only what does not depend on their phases."""

    def g(x):
        w, v = decompose(x)
        return (v * f(w)[..., None, :]) @ bnp.conj(bnp.matrix_transpose(v))

    return g


def by_svd(x):
    u, s, vh = la.svd(x, full_matrices=False)
    return (u * bnp.tanh(s)[..., None, :]) @ vh


CASES = {
    "solve": (la.solve, [(3, 3), (3, 2)]),
    "solve-vector": (la.solve, [(4, 4), (4,)]),
    "solve-batch": (la.solve, [(2, 3, 3), (3, 2)]),
    "inv": (la.inv, [(3, 3)]),
    "inv-batch": (la.inv, [(2, 3, 3)]),
    "det-1": (la.det, [(1, 1)]),
    "det-2": (la.det, [(2, 2)]),
    "det-3": (la.det, [(2, 3, 3)]),
    "det-4": (la.det, [(4, 4)]),
    "det-5": (la.det, [(2, 5, 5)]),
    "slogdet": (lambda x: la.slogdet(x), [(4, 4)]),
    "slogdet-batch": (lambda x: la.slogdet(x), [(2, 3, 3)]),
    "pinv": (la.pinv, [(3, 3)]),
    "pinv-tall": (la.pinv, [(4, 2)]),
    "pinv-wide": (la.pinv, [(2, 4)]),
    "pinv-batch": (la.pinv, [(2, 3, 2)]),
    "lstsq": (lambda a, b: la.lstsq(a, b)[:2], [(4, 2), (4,)]),
    "lstsq-wide": (lambda a, b: la.lstsq(a, b)[0], [(2, 4), (2, 3)]),
    "matrix-power": (lambda x: la.matrix_power(x, 5), [(3, 3)]),
    "matrix-power-negative": (lambda x: la.matrix_power(x, -2), [(3, 3)]),
    "cond": (la.cond, [(3, 3)]),
    "cond-fro": (lambda x: la.cond(x, "fro"), [(3, 3)]),
    "nuc": (lambda x: la.norm(x, "nuc"), [(3, 4)]),
    "spectral": (lambda x: la.norm(x, 2), [(3, 4)]),
    "fro": (la.norm, [(3, 4)]),
    "norm-3": (lambda x: la.norm(x, 3), [(4,)]),
    "multi-dot": (lambda *xs: la.multi_dot(xs), [(3,), (3, 2), (2, 4)]),
    "tensorsolve": (la.tensorsolve, [(2, 2, 4), (2, 2)]),
    "tensorinv": (lambda x: la.tensorinv(x, 1), [(4, 2, 2)]),
    "cholesky": (lambda x: la.cholesky(spd(x)), [(3, 3)]),
    "cholesky-upper": (lambda x: la.cholesky(spd(x), upper=True), [(2, 3, 3)]),
    "qr": (lambda x: la.qr(x), [(4, 3)]),
    "svdvals": (la.svdvals, [(3, 4)]),
    "svd": (by_svd, [(3, 3)]),
    "svd-tall": (by_svd, [(4, 2)]),
    "svd-wide": (by_svd, [(2, 4)]),
    "svd-hermitian": (lambda x: la.svd(herm(x), compute_uv=False, hermitian=True), [(3, 3)]),
    "eigh": (spectral(bnp.tanh, lambda x: la.eigh(herm(x))), [(3, 3)]),
    "eigvalsh": (lambda x: la.eigvalsh(herm(x)), [(3, 3)]),
    "eigvals": (lambda x: bnp.abs(la.eigvals(x)).sum(), [(3, 3)]),
    "eig": (
        lambda x: bnp.real(bnp.matmul(la.eig(x)[1] * bnp.sin(la.eig(x)[0]), la.inv(la.eig(x)[1]))),
        [(3, 3)],
    ),
}


def flat(out):
    return [out] if not isinstance(out, (tuple, list)) else list(out)


def inexact(out):
    return [x for x in flat(out) if np.issubdtype(x.dtype, np.inexact)]


def differences(f, points, tangents, h=1e-5):
    moved = lambda s: inexact(f(*[from_numpy(p + s * h * t) for p, t in zip(points, tangents)]))
    return [(np.asarray(a) - np.asarray(b)) / (2 * h) for a, b in zip(moved(1), moved(-1))]


def agree(got, want, rtol=1e-6):
    for g, w in zip(got, want, strict=True):
        scale = max(1.0, np.max(np.abs(w), initial=0))
        np.testing.assert_allclose(np.asarray(g), w, rtol=rtol, atol=rtol * scale)


def pair(xs, ys):
    return sum(np.sum(np.asarray(x) * np.asarray(y)) for x, y in zip(xs, ys, strict=True)).real


def sample(shapes, complex, seed):
    return [draw(*s, seed=seed + i, complex=complex) for i, s in enumerate(shapes)]


def first_order(f, points, complex, seed):
    """jvp against differences, vjp against jvp."""
    ts = sample([p.shape for p in points], complex, seed)
    values, tangents = tuple(map(from_numpy, points)), tuple(map(from_numpy, ts))
    out_t = inexact(jvp(f, values, tangents)[1])
    agree(out_t, differences(f, points, ts))
    out, back = vjp(lambda *xs: inexact(f(*xs)), *values)
    cts = [
        from_numpy(draw(*x.shape, seed=7, complex=np.iscomplexobj(x)).astype(x.dtype))
        for x in map(np.asarray, out)
    ]
    np.testing.assert_allclose(pair(back(cts), ts), pair(cts, out_t), rtol=1e-9, atol=1e-9)
    return cts


@pytest.mark.parametrize("name", CASES)
@COMPLEX
def test_derivatives(name, complex):
    """Forward against differences, reverse against forward; also under jit and vmap."""
    f, shapes = CASES[name]
    points = sample(shapes, complex, seed=3)
    cts = first_order(f, points, complex, 20)
    pullback = lambda *xs: list(vjp(lambda *xs: inexact(f(*xs)), *xs)[1](cts))
    first_order(pullback, points, complex, 40)
    values = tuple(map(from_numpy, points))
    agree(jit(pullback)(*values), [np.asarray(g) for g in pullback(*values)], 1e-9)
    many = [from_numpy(np.stack([p, 1.5 * p])) for p in points]
    loop = [pullback(*[x[i] for x in many]) for i in range(2)]
    agree(vmap(pullback)(*many), [np.stack([np.asarray(g) for g in gs]) for gs in zip(*loop)], 1e-8)


def singular(n, rank, seed=0):
    return draw(n, rank, seed=seed) @ draw(rank, n, seed=seed + 1)


def cofactors(x):
    n = len(x)
    minor = lambda i, j: np.linalg.det(np.delete(np.delete(x, i, 0), j, 1)) if n > 1 else 1.0
    return np.array([[(-1) ** (i + j) * minor(i, j) for j in range(n)] for i in range(n)])


@pytest.mark.parametrize("n", range(1, 7))
def test_determinants_have_gradients_at_every_rank(n):
    for rank in range(n + 1):
        x = singular(n, rank)
        np.testing.assert_allclose(np.asarray(grad(la.det)(arr(x))), cofactors(x), atol=1e-10)
    for x in (np.diag([0.0, 1, 2, 3, 4, 5][:n]), np.diag([1.0, 1, 2, 3, 4, 0][:n]), np.zeros((n, n))):
        np.testing.assert_allclose(np.asarray(grad(la.det)(arr(x))), cofactors(x), atol=1e-12)
        np.testing.assert_allclose(np.asarray(jit(grad(la.det))(arr(x))), cofactors(x), atol=1e-12)


def test_pseudoinverses_have_derivatives_where_singular_values_are_equal():
    t = draw(3, 3)
    np.testing.assert_allclose(np.asarray(jvp(la.pinv, (arr(np.eye(3)),), (arr(t),))[1]), -t, atol=1e-12)
    x_t = jvp(lambda a: la.lstsq(a, arr(np.ones(3)))[0], (arr(np.eye(3)),), (arr(t),))[1]
    np.testing.assert_allclose(np.asarray(x_t), -t @ np.ones(3), atol=1e-12)


def test_values_have_derivatives_where_they_are_equal():
    eye = arr(np.eye(3))
    close(grad(lambda x: la.svdvals(x).sum())(eye), eye)
    close(grad(lambda x: la.eigvalsh(x).sum())(eye), eye)
    close(grad(lambda x: la.norm(x, "nuc"))(eye), eye)


def test_a_solve_and_its_gradient_share_one_decomposition():
    a, b = arr(draw(4, 4)), arr(draw(4))
    f = lambda a, b: la.solve(a, b).sum()
    text = str(make_jaxpr(grad(f, (0, 1)))(a, b))
    assert text.count(" lu ") == 1 and text.count("lu_solve") == 2
    text = str(make_jaxpr(grad(lambda a: la.slogdet(a)[1]))(a))
    assert text.count(" lu ") == 1


def test_vmap_over_right_hand_sides_solves_one_system():
    a, bs = arr(draw(4, 4)), arr(draw(5, 4))
    text = str(make_jaxpr(vmap(la.solve, in_axes=(None, 0)))(a, bs))
    assert "f64[4,4]" in text and "f64[5,4,4]" not in text
    want = np.linalg.solve(np.asarray(a), np.asarray(bs).T).T
    np.testing.assert_allclose(np.asarray(vmap(la.solve, in_axes=(None, 0))(a, bs)), want, rtol=1e-10)


def test_second_derivatives_of_solve():
    a, b = draw(3, 3), draw(3)
    got = hessian(lambda a: la.solve(a, arr(b)).sum())(arr(a))
    inverse = np.linalg.inv(a)
    x, u = inverse @ b, inverse.T @ np.ones(3)
    # x = a^-1 b: d2(1.x) = 1 a^-1 (da a^-1 da' + da' a^-1 da) x
    want = np.einsum("i,jk,l->ijkl", u, inverse, x)
    np.testing.assert_allclose(np.asarray(got), want + want.transpose(2, 3, 0, 1), rtol=1e-8, atol=1e-9)
    jac = jacrev(la.inv)(arr(a))
    np.testing.assert_allclose(
        np.asarray(jac), -np.einsum("ik,lj->ijkl", inverse, inverse), rtol=1e-9, atol=1e-10
    )


# -- against JAX -----------------------------------------------------------------------------------


@pytest.fixture
def jax64():
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield jax
    jax.config.update("jax_enable_x64", before)


PEERS = {
    **{
        name: (lambda m, n=name: getattr(m.linalg, n), [(4, 4)])
        for name in ("inv", "det", "slogdet", "pinv", "eigvals")
    },
    "solve": (lambda m: m.linalg.solve, [(3, 3), (3, 2)]),
    "cholesky": (lambda m: lambda x: m.linalg.cholesky(x @ x.conj().mT + m.eye(3)), [(3, 3)]),
    "qr": (lambda m: lambda x: tuple(m.linalg.qr(x)), [(4, 3)]),
    "lstsq": (lambda m: lambda a, b: m.linalg.lstsq(a, b)[:2], [(4, 2), (4, 2)]),
    "eigh": (lambda m: lambda x: m.linalg.eigh(x + x.conj().mT)[0], [(4, 4)]),
    "svd": (lambda m: lambda x: m.linalg.svd(x, compute_uv=False), [(4, 3)]),
    "nuc": (lambda m: lambda x: m.linalg.norm(x, "nuc"), [(4, 3)]),
    "cond": (lambda m: lambda x: m.linalg.cond(x, 1), [(3, 3)]),
    "matrix_power": (lambda m: lambda x: m.linalg.matrix_power(x, -3), [(3, 3)]),
    "multi_dot": (lambda m: lambda *xs: m.linalg.multi_dot(xs), [(2, 3), (3, 4), (4, 2)]),
    "vector_norm": (lambda m: lambda x: m.linalg.vector_norm(x, ord=3), [(2, 3)]),
}  # fmt: skip
PRIMITIVES = {
    "lu": (lambda m: lambda x: m.linalg.lu(x)[0], [(3, 3)]),
    "lu-tall": (lambda m: lambda x: m.linalg.lu(x)[0], [(4, 2)]),
    "lu-wide": (lambda m: lambda x: m.linalg.lu(x)[0], [(2, 4)]),
    "tridiagonal": (
        lambda m: lambda dl, d, du, b: m.linalg.tridiagonal_solve(dl, d + 5, du, b),
        [(4,), (4,), (4,), (4, 2)],
    ),
    "qr-pivoting": (lambda m: lambda x: m.linalg.qr(x, full_matrices=False)[:2], [(4, 3)]),
    **{
        f"triangular-{int(left)}{int(lower)}{int(turn)}": (
            lambda m, left=left, lower=lower, turn=turn: (
                lambda a, b: m.linalg.triangular_solve(
                    a, b, left_side=left, lower=lower, transpose_a=turn, conjugate_a=turn
                )
            ),
            [(3, 3), (3, 3)],
        )
        for left, lower, turn in itertools.product((True, False), repeat=3)
    },
}


@pytest.mark.peer
@pytest.mark.parametrize("name", [*PEERS, *PRIMITIVES])
@COMPLEX
def test_peer(name, complex, jax64):
    """Values, jvp, vjp and the jvp of the vjp agree with JAX's in double precision."""
    jax = jax64
    make, shapes = {**PEERS, **PRIMITIVES}[name]
    ours, theirs = (bnp, jax.numpy) if name in PEERS else (lax, jax.lax)
    f, g = make(ours), make(theirs)
    points, ts = tuple(sample(shapes, complex, 3)), tuple(sample(shapes, complex, 30))
    leaves = lambda x: [np.asarray(t) for t in jax.tree.leaves(x)]
    results = jax.tree.leaves(jax.eval_shape(g, *points))
    cts = [draw(*w.shape, seed=9, complex=w.dtype.kind == "c").astype(w.dtype) for w in results]

    def everything(f, jvp, vjp, flat, cts, points, ts):
        pullback = lambda *xs: tuple(vjp(lambda *xs: flat(f(*xs)), *xs)[1](cts))
        first = jvp(f, points, ts)
        if name == "eigvals":  # JAX stops there: it would differentiate eigenvectors
            return first, pullback(*points)
        return first, pullback(*points), jvp(pullback, points, ts)[1]

    values = functools.partial(map, from_numpy)
    got = everything(f, jvp, vjp, flat, list(values(cts)), tuple(values(points)), tuple(values(ts)))
    want = jax.jit(lambda *args: everything(g, jax.jvp, jax.vjp, jax.tree.leaves, *args))(cts, points, ts)
    for ours, theirs, rtol in zip(got, want, (1e-9, 1e-8, 1e-7)):
        agree(tree.leaves(ours), leaves(theirs), rtol)
