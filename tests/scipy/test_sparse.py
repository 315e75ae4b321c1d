"""Iterative solvers: solutions, pytrees, derivatives, and errors."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.flatten_util import ravel_pytree
from blufunc.scipy.sparse.linalg import bicgstab, cg, gmres
from tests.transforms.common import arr, close

rng = np.random.default_rng(0)
N = 12
S = rng.normal(size=(N, N))
SPD = S @ S.T + N * np.eye(N)
ANY = S + 6 * np.eye(N)
B = rng.normal(size=N)
SOLVERS = {"cg": (cg, SPD), "bicgstab": (bicgstab, ANY), "gmres": (gmres, ANY)}


@pytest.fixture(params=SOLVERS)
def solver(request):
    return SOLVERS[request.param]


def test_solves(solver):
    solve, a = solver
    want = np.linalg.solve(a, B)
    for matrix in (arr(a), lambda v: arr(a) @ v):
        x, info = solve(matrix, arr(B), tol=1e-12)
        assert info is None
        np.testing.assert_allclose(np.asarray(x), want, rtol=1e-8)
    x, _ = bf.jit(lambda b: solve(arr(a), b, tol=1e-12))(arr(B))
    np.testing.assert_allclose(np.asarray(x), want, rtol=1e-8)


def test_complex_systems(solver):
    solve, a = solver
    skew = 0.5j * (S - S.T)
    a = a + skew  # Hermitian where a is symmetric
    b = B + 1j * B[::-1]
    x, _ = solve(arr(a, np.complex128), arr(b, np.complex128), tol=1e-12)
    np.testing.assert_allclose(np.asarray(x), np.linalg.solve(a, b), rtol=1e-7)


def test_preconditioner_and_start(solver):
    solve, a = solver
    inverse = np.linalg.inv(a)
    x, _ = solve(arr(a), arr(B), M=arr(inverse), maxiter=2, tol=1e-10)  # exact: one step is enough
    np.testing.assert_allclose(np.asarray(x), inverse @ B, rtol=1e-7)
    x, _ = solve(arr(a), arr(B), x0=arr(inverse @ B), maxiter=0)
    np.testing.assert_allclose(np.asarray(x), inverse @ B)


def test_derivatives_are_those_of_the_solution(solver):
    solve, a = solver
    by_iteration = lambda m, b: solve(lambda v: m @ v, b, tol=1e-13)[0]
    direct = lambda m, b: bnp.linalg.solve(m, b)
    loss = lambda f: lambda m, b: bnp.sum(bnp.sin(f(m, b)))
    sym = lambda f: lambda m, b: f((m + m.T) / 2, b)  # cg sees the symmetric part
    wrap = sym if solve is cg else lambda f: f
    args = arr(a), arr(B)
    close(bf.grad(wrap(loss(by_iteration)), (0, 1))(*args), bf.grad(wrap(loss(direct)), (0, 1))(*args), 1e-7)
    tangents = arr(a) * 0.1, arr(B) + 1
    close(bf.jvp(wrap(by_iteration), args, tangents), bf.jvp(wrap(direct), args, tangents), 1e-7)
    second = lambda f: bf.grad(lambda b: bf.grad(wrap(loss(f)), 1)(arr(a), b).sum())(arr(B))
    close(second(by_iteration), second(direct), 1e-7)


def test_vmap(solver):
    solve, a = solver
    bs = arr(rng.normal(size=(3, N)))
    x = bf.vmap(lambda b: solve(arr(a), b, tol=1e-12)[0])(bs)
    np.testing.assert_allclose(np.asarray(x), np.linalg.solve(a, np.asarray(bs).T).T, rtol=1e-7)


def test_pytrees(solver):
    solve, _ = solver
    apply = lambda t: {"a": 3 * t["a"] + t["b"].sum(), "b": t["b"] * 2 + t["a"]}
    b = {"a": arr(1.5), "b": arr([[1.0, 2.0], [0.5, -1.0]])}
    x, _ = solve(apply, b, tol=1e-13)
    close(apply(x), b, 1e-9)


def test_short_restarts_still_converge():
    x, _ = gmres(arr(ANY), arr(B), restart=3, tol=1e-10)
    np.testing.assert_allclose(np.asarray(x), np.linalg.solve(ANY, B), rtol=1e-6)


def test_a_singular_direction_makes_no_nan():
    """The space of directions is exhausted after one step."""
    x, _ = gmres(arr(2 * np.eye(4)), arr([1.0, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(np.asarray(x), [0.5, 0, 0, 0], atol=1e-12)
    for solve in (cg, bicgstab, gmres):
        x, _ = solve(arr(np.eye(3)), arr(np.zeros(3)))
        np.testing.assert_array_equal(np.asarray(x), np.zeros(3))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: cg(arr(np.ones((2, 3))), arr([1.0, 2.0])), "square"),
        (lambda: cg(lambda v: v[:1], arr([1.0, 2.0])), "returns 1 elements for 2"),
        (lambda: cg(arr(np.eye(2)), bnp.array([1, 2])), "floats"),
        (lambda: cg(arr(np.eye(2)), arr([1.0, 2.0]), x0=[arr([1.0, 2.0])]), "structure"),
        (lambda: gmres(arr(np.eye(2)), arr([1.0, 2.0]), restart=0), "restart=0"),
        (lambda: gmres(arr(np.eye(2)), arr([1.0, 2.0]), solve_method="fast"), "solve_method"),
    ],
)
def test_errors(call, words):
    with pytest.raises(errors.BlufuncError, match=words):
        call()


def test_ravel_pytree():
    t = {"w": bnp.arange(6.0).reshape(2, 3), "n": bnp.array([1, 2]), "s": bnp.float32(7)}
    flat, unravel = ravel_pytree(t)
    np.testing.assert_array_equal(np.asarray(flat), [1, 2, 7, 0, 1, 2, 3, 4, 5])
    back = unravel(flat)
    close(back, t)
    g = bf.grad(lambda v: unravel(v)["w"].sum() * 2)(flat)
    np.testing.assert_array_equal(np.asarray(g), [0, 0, 0, 2, 2, 2, 2, 2, 2])
    with pytest.raises(errors.ShapeError, match="9 elements"):
        unravel(flat[:3])
    assert ravel_pytree(())[0].shape == (0,)
