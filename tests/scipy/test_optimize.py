"""``scipy.optimize.minimize`` on functions whose minima are known."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.scipy.optimize import minimize
from tests.transforms.common import arr


def rosenbrock(x):
    return bnp.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def himmelblau(p):
    x, y = p
    return (x**2 + y - 11) ** 2 + (x + y**2 - 7) ** 2


def eggs(x):
    return bnp.sum(bnp.sin(x) + 0.1 * x**2) + 3.0


CASES = {
    "a quadratic": (lambda x: bnp.sum(bnp.arange(1.0, 5.0) * (x - 2.0) ** 2), np.zeros(4), np.full(4, 2.0)),
    "rosenbrock": (rosenbrock, np.array([-1.2, 1.0]), np.ones(2)),
    "rosenbrock of five": (rosenbrock, np.array([1.3, 0.7, 0.8, 1.9, 1.2]), np.ones(5)),
    "himmelblau": (himmelblau, np.array([1.0, 1.0]), np.array([3.0, 2.0])),
    "eggs": (eggs, np.array([-1.0, -0.5]), np.full(2, -1.30644)),
    "badly scaled": (lambda x: (1e4 * x[0] - 1) ** 2 + (x[1] + 3) ** 2, np.zeros(2), np.array([1e-4, -3.0])),
}


@pytest.mark.parametrize("name", CASES)
def test_finds_the_minimum(name):
    fun, x0, want = CASES[name]
    for run in (minimize, bf.jit(minimize, static_argnames=("fun", "method"))):
        found = run(fun, arr(x0), method="BFGS")
        assert bool(found.success) and int(found.status) == 0
        np.testing.assert_allclose(np.asarray(found.x), want, atol=2e-5)
        assert 0 < int(found.nit) < 60 and int(found.nfev) >= int(found.nit)
        assert float(bnp.abs(found.jac).max()) <= 1e-5


def test_in_float32():
    found = minimize(rosenbrock, bnp.array([-1.2, 1.0]), method="BFGS", tol=1e-3)
    np.testing.assert_allclose(np.asarray(found.x), np.ones(2), atol=2e-2)
    assert found.x.dtype == np.float32


def test_under_vmap_and_with_arguments():
    f = lambda x, c: bnp.sum((x - c) ** 4 + (x - c) ** 2)
    centres = arr([[1.0, 2.0], [-3.0, 0.5], [0.0, 0.0]])
    found = bf.vmap(lambda c: minimize(f, bnp.zeros_like(c), (c,), method="bfgs").x)(centres)
    np.testing.assert_allclose(np.asarray(found), np.asarray(centres), atol=1e-4)


def test_says_why_it_stopped():
    few = minimize(rosenbrock, arr([-1.2, 1.0]), method="BFGS", options={"maxiter": 3})
    assert not bool(few.success) and int(few.status) == 1 and int(few.nit) == 3
    nan = minimize(lambda x: bnp.sum(bnp.log(x)), arr([-1.0]), method="BFGS")
    assert not bool(nan.success) and int(nan.status) == 5


def test_hess_inv_approximates_the_inverse():
    a = np.array([[3.0, 1.0], [1.0, 2.0]])
    found = minimize(lambda x: 0.5 * x @ arr(a) @ x + x.sum(), arr([4.0, -7.0]), method="BFGS", tol=1e-10)
    np.testing.assert_allclose(np.asarray(found.hess_inv), np.linalg.inv(a), rtol=0.2)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: minimize(eggs, arr([1.0]), method="Nelder-Mead"), "BFGS"),
        (lambda: minimize(eggs, arr([[1.0]]), method="BFGS"), "rank 1"),
        (lambda: minimize(eggs, arr([1]).astype("int32"), method="BFGS"), "floats"),
        (lambda: minimize(eggs, arr([1.0]), method="BFGS", options={"steps": 3}), "no option steps"),
        (lambda: minimize(eggs, arr([1.0]), 3, method="BFGS"), "tuple"),
    ],
)
def test_errors(call, words):
    with pytest.raises(errors.BlufuncError, match=words):
        call()


@pytest.mark.parametrize("name", ["L-BFGS", "l-bfgs-experimental-do-not-rely-on-this"])
def test_lbfgs(name):
    """Rosenbrock's valley in 40 dimensions with a history of 6 steps, also in a batch."""
    chain = lambda x: bnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)
    options = {"maxcor": 6, "ftol": 0.0}
    run = lambda x: minimize(chain, x, method=name, tol=1e-8, options=options)
    start = np.linspace(-1, 1, 40)
    found = run(arr(start))
    assert found.success and found.status == 0 and found.hess_inv is None
    np.testing.assert_allclose(found.x, np.ones(40), atol=1e-6)
    assert found.nit < 200 and found.nfev >= found.nit
    several = bf.jit(bf.vmap(lambda x: run(x).x))(arr(np.stack([start, -0.5 * start])))
    np.testing.assert_allclose(several, np.ones((2, 40)), atol=1e-6)


def test_lbfgs_limits():
    run = lambda **options: minimize(rosenbrock, arr([-1.2, 1.0]), method="l-bfgs", options=options)
    assert run(maxiter=3).status == 1 and run(maxiter=3).nit == 3
    assert run(maxfun=4).status == 2 and run(maxgrad=4).status == 2
    assert run(ftol=1e9).status == 4 and run(ftol=1e9).nit == 1
    nan = minimize(lambda x: bnp.sum(bnp.log(x)), arr([-1.0]), method="l-bfgs")
    assert nan.status == 5 and not nan.success
    with pytest.raises(errors.ArgumentError, match="has no option line_search_maxiter"):
        run(line_search_maxiter=3)
