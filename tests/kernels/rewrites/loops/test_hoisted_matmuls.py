"""Matmuls that leave a scan: before it all inputs at once, after it all sums."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.config import config
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.rewrites.loops.hoisted_matmuls import with_hoisted_matmuls

T, B, N, M = 6, 3, 5, 4
RNG = np.random.default_rng(0)
draw = lambda *shape: (RNG.standard_normal(shape) / 3).astype(np.float32)
XS, H, W, U = draw(T, B, N), draw(B, M), draw(N, M), draw(M, M)


def cell(multiply, **options):
    """The states of a recurrent cell whose input is multiplied by ``multiply(x, w)``."""

    def run(xs, h, w, u):
        def step(h, x):
            h = bnp.tanh(multiply(x, w) + h @ u)
            return h, h

        return lax.scan(step, h, xs, **options)

    return run


def sums(xs, h, w, u):
    def step(c, x):
        total, turned, other = c
        y = bnp.sin(x @ w)
        return (total + x.T @ y, turned + (x.T @ (y + 1)).T, other * 2 + x.T @ (y + 2)), y

    return lax.scan(step, (bnp.ones((N, M)), bnp.zeros((M, N)), bnp.zeros((N, M))), xs)


def of_the_carry(xs, h, w, u):
    """Sums of products of the carry before the step and the result."""

    def step(c, x):
        h, total = c
        new = bnp.tanh(x @ w + h @ u)
        return (new, total + h.T @ new), None

    return lax.scan(step, (h, bnp.zeros((M, M))), xs)[0]


def outputs(xs, h, w, u):
    step = lambda h, x: (bnp.sin(h + x @ w), (h @ u, bnp.einsum("mn,bm->nb", u, h)))
    return lax.scan(step, h, xs)


def halves(xs, h, w, u):
    low = lambda a: a.astype(bnp.bfloat16)
    return cell(lambda x, w: low(x) @ low(w))(xs, h, w, u)


loss = lambda f: lambda *args: sum((y.astype(bnp.float32) ** 2).sum() for y in bf.tree.leaves(f(*args)))
gradient = lambda f: bf.grad(loss(f), (0, 1, 2, 3))
PLAIN = cell(lambda x, w: x @ w)
CASES = {  # a program, and the matmuls in its loops before and after
    "a cell": (PLAIN, (2, 1)),
    "backwards": (cell(lambda x, w: x @ w, reverse=True), (2, 1)),
    "the input comes second": (cell(lambda x, w: bnp.einsum("nm,bn->mb", w, x).T), (2, 1)),
    "both transposed": (cell(lambda x, w: (w.T @ x.T).T), (2, 1)),
    "in half precision": (halves, (2, 1)),
    "not of the carry": (cell(lambda x, w: x @ w + bnp.tanh(x @ w) @ w.T @ w), (4, 3)),
    "sums": (sums, (4, 1)),
    "sums of the carry": (of_the_carry, (3, 1)),
    "gradients": (gradient(PLAIN), (6, 2)),
    "outputs": (outputs, (3, 0)),
    "a batch of weights": (bf.vmap(PLAIN, (None, None, 0, 0)), (2, 1)),
}
ARGS = {"a batch of weights": (XS, H, np.stack([W, -W]), np.stack([U, U * 2]))}


def in_loops(jaxpr):
    bodies = [simplify(e.params["jaxpr"]) for e in jaxpr.eqns if e.prim.name == "scan"]
    return sum(e.prim.name == "dot_general" for b in bodies for e in b.eqns)


@pytest.mark.parametrize("name", CASES)
def test_fewer_matmuls_are_in_loops(name):
    fun, (before, after) = CASES[name]
    jaxpr = simplify(bf.jit(fun).trace(*ARGS.get(name, (XS, H, W, U))).jaxpr)
    assert in_loops(jaxpr) == before
    assert in_loops(with_hoisted_matmuls(jaxpr, {})) == after


@pytest.mark.parametrize("derive", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("name", CASES)
def test_values(name, derive, monkeypatch):
    fun, args = CASES[name][0], ARGS.get(name, (XS, H, W, U))
    fun = gradient(fun) if derive else fun
    monkeypatch.setattr(config, "host_compiler", "never")
    want = bf.tree.leaves(bf.jit(lambda *args: fun(*args))(*args))
    if toolchain.find() is not None:
        monkeypatch.setattr(config, "host_compiler", "always")
    rtol = 4e-2 if name == "in half precision" else 2e-5
    for g, w in zip(bf.tree.leaves(bf.jit(fun)(*args)), want, strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(g, w, rtol=0, atol=rtol * max(1, np.abs(w).max()))


def carried(jaxpr):
    return [e.params["n_carry"] for e in jaxpr.eqns if e.prim.name == "scan"]


def test_sums_of_stacks_leave_loops():
    """The gradient of a bias sums a stack that that of weights needs."""

    def biased(xs, h, w, b):
        def step(h, x):
            return bnp.tanh(x @ w + h @ U + b), None

        return lax.scan(step, h, xs)[0]

    jaxpr = simplify(bf.jit(gradient(biased)).trace(XS, H, W, draw(M)).jaxpr)
    before, after = carried(jaxpr), carried(with_hoisted_matmuls(jaxpr, {}))
    assert after[-1] == 1 < before[-1]  # the gradient of the state remains
    args = XS, H, W, draw(M)
    for g, w in zip(bf.jit(gradient(biased))(*args), gradient(biased)(*args), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-5)


def test_sums_of_other_arrays_stay():
    def run(xs, h, w, u):
        step = lambda c, x: ((c[0] + bnp.sin(x).sum(0), c[1] * 2), None)
        return lax.scan(step, (bnp.zeros(N), h), xs)[0]

    jaxpr = simplify(bf.jit(run).trace(XS, H, W, U).jaxpr)
    assert carried(with_hoisted_matmuls(jaxpr, {})) == carried(jaxpr)


def test_few_steps_stay_as_they_are():
    jaxpr = simplify(bf.jit(PLAIN).trace(XS[:3], H, W, U).jaxpr)
    assert with_hoisted_matmuls(jaxpr, {}) is jaxpr
