"""``associative_scan``: any length and axis, logarithmic depth, and errors.

Values and derivatives under every transform are in ``test_compositions.py``.
"""

import itertools
import math

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax, tree
from blufunc.lax import associative_scan
from blufunc.transforms.autodiff.grad import grad, jvp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31])
@pytest.mark.parametrize("reverse", [False, True])
def test_sums_of_any_length(n, reverse):
    x = arr(np.arange(n) + 1.0)
    turn = slice(None, None, -1 if reverse else 1)
    want = arr(np.cumsum(np.asarray(x)[turn])[turn])
    close(associative_scan(lambda a, b: a + b, x, reverse=reverse), want)
    close(jit(lambda x: associative_scan(bnp.add, x, reverse))(x), want)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 11])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_order_of_the_arguments(n, reverse):
    """For products that do not commute: operands keep their order, also in reverse."""
    x = draw(n, 2, 2)
    got = associative_scan(lambda a, b: a @ b, x, reverse=reverse)
    order = range(n)[:: -1 if reverse else 1]
    products = list(itertools.accumulate([np.asarray(x)[i] for i in order], np.matmul))
    close(got, arr(np.stack(products[:: -1 if reverse else 1])))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("reverse", [False, True])
def test_axes(axis, reverse):
    x = draw(3, 4, 5)
    turn = (lambda y: np.flip(y, axis)) if reverse else (lambda y: y)
    want = arr(turn(np.maximum.accumulate(turn(np.asarray(x)), axis)))
    close(associative_scan(bnp.maximum, x, axis=axis, reverse=reverse), want)


def test_pytrees_of_different_ranks_and_dtypes():
    elems = {
        "p": draw(6, 2),
        "n": arr(np.arange(6), np.int32),
        "b": arr([0, 1, 0, 0, 1, 0], bool),
        "none": None,
    }

    def fn(a, b):
        """Sums that begin anew at every mark, and the position of the last mark."""
        keep = ~b["b"]
        return {
            "p": bnp.where(keep[:, None], a["p"], 0.0) + b["p"],
            "n": bnp.where(keep, a["n"], b["n"]),
            "b": a["b"] | b["b"],
            "none": None,
        }

    got = associative_scan(fn, elems)
    p = np.asarray(elems["p"])
    want = np.concatenate([np.cumsum(p[:1], 0), np.cumsum(p[1:4], 0), np.cumsum(p[4:], 0)])
    close(got["p"], arr(want))
    assert np.asarray(got["n"]).tolist() == [0, 1, 1, 1, 4, 4]
    assert associative_scan(fn, ()) == ()


@pytest.mark.parametrize("reverse", [False, True])
def test_derivatives_are_affine_recurrences(reverse):
    """Of coupled states, staged as one operation and traced step by step."""

    def loss(a, b):
        step = lambda p, q: (p[0] * q[0], q[1] + q[0] * p[1])
        return (associative_scan(step, (a, b), reverse=reverse)[1] ** 2).sum()

    args = np.linspace(0.5, 0.9, 6, dtype=np.float32), np.linspace(-1, 1, 6, dtype=np.float32)
    found = make_jaxpr(jit(grad(loss, (0, 1))))(*args)
    assert "affine_recurrence" in str(found)
    batches = [np.stack([x, x + 0.1]) for x in args]
    second = lambda a, b: grad(lambda a: grad(loss)(a, b).sum())(a)
    for f, given in ((grad(loss, (0, 1)), args), (second, args), (vmap(grad(loss, (0, 1))), batches)):
        for got, want in zip(tree.leaves(jit(f)(*given)), tree.leaves(f(*given)), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-4)


def test_states_of_two_float_dtypes():
    def loss(a, b):
        step = lambda p, q: (p[0] * q[0], q[1] + p[1] * p[0].astype("float64"))
        return associative_scan(step, (a, b))[1].sum()

    args = np.linspace(0.5, 1, 7, dtype=np.float32), bnp.linspace(1, 2, 7, dtype="float64")
    for got, want in zip(jit(grad(loss, (0, 1)))(*args), grad(loss, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    for got, want in zip(grad(jit(loss), (0, 1))(*args), grad(loss, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_linear_recurrence():
    """``h = a h + b`` against a loop: values, both modes, order 2, batches."""
    a, b = draw(7, 3, seed=1), draw(7, 3, seed=2)

    def prefix(a, b):
        return associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, b))[1]

    def loop(a, b):
        return lax.scan(lambda h, x: (x[0] * h + x[1],) * 2, bnp.zeros_like(a[0]), (a, b))[1]

    total = lambda f: lambda a, b: bnp.sin(f(a, b)).sum()
    close(prefix(a, b), loop(a, b))
    close(grad(total(prefix), (0, 1))(a, b), grad(total(loop), (0, 1))(a, b))
    close(jvp(prefix, (a, b), (b, a)), jvp(loop, (a, b), (b, a)))
    hvp = lambda f: jvp(grad(total(f)), (a, b), (b, a))[1]
    close(hvp(prefix), hvp(loop))
    many = vmap(prefix, in_axes=(None, 0))(a, bnp.stack([b, b * 2.0]))
    close(many, bnp.stack([loop(a, b), loop(a, b * 2.0)]))


@pytest.mark.parametrize("n", [2, 16, 100, 1000])
def test_the_number_of_steps_is_logarithmic(n):
    count = []

    def fn(a, b):
        count.append(a.shape[0])
        return a + b

    jaxpr = make_jaxpr(lambda x: associative_scan(fn, x))(draw(n))
    assert len(count) <= 2 * math.log2(n) + 1
    assert sum(count) <= 2 * n, "and the work is linear"
    assert not any(e.prim.name in ("scan", "while") for e in jaxpr.eqns)


# -- errors ----------------------------------------------------------------------------------------

X = draw(4)
ERRORS = {
    "no function": (
        lambda: associative_scan(X, X),
        errors.ArgumentError,
        ("associative_scan takes a function",),
    ),
    "different lengths": (
        lambda: associative_scan(lambda a, b: b, {"a": draw(3), "b": draw(4)}),
        errors.ShapeError,
        ("elems['a'] f64[3]", "elems['b'] f64[4]"),
    ),
    "a number": (
        lambda: associative_scan(bnp.add, arr(1.0)),
        errors.BlufuncError,
        ("associative_scan", "axis"),
    ),
    "an axis out of range": (
        lambda: associative_scan(bnp.add, X, axis=1),
        errors.BlufuncError,
        ("associative_scan", "axis"),
    ),
    "a different structure": (
        lambda: associative_scan(lambda a, b: (a, b), X),
        errors.CarryError,
        ("must return the types of its arguments",),
    ),
    "another shape": (
        lambda: associative_scan(lambda a, b: a.sum(), X),
        errors.CarryError,
        ("f64[2]", "f64[]"),
    ),
    "another dtype": (
        lambda: associative_scan(lambda a, b: (a + b).astype("float32"), X),
        errors.CarryError,
        ("f64[2]", "f32[2]"),
    ),
    "no array": (
        lambda: associative_scan(bnp.add, {"u": "text"}),
        errors.ArgumentError,
        ("elems['u']", "str"),
    ),
    "a result of no array": (
        lambda: associative_scan(lambda a, b: "text", X),
        errors.ArgumentError,
        ("result", "str"),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("wrap", [lambda f: f(), lambda f: jit(f)()], ids=["eager", "jit"])
def test_errors(name, wrap):
    run, error, says = ERRORS[name]
    with pytest.raises(error) as info:
        wrap(run)
    for text in says:
        assert text in str(info.value)
    assert "test_associative_scan.py" in info.value.where


# -- the peer --------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("reverse", [False, True])
def test_against_jax(reverse):
    import jax

    def program(np_, scan):
        def f(a, b):
            fn = lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1])
            p, h = scan(fn, (np_.tanh(a), b), reverse=reverse, axis=1)
            return np_.sin(p + h).sum()

        return f

    ours, theirs = program(bnp, associative_scan), program(jax.numpy, jax.lax.associative_scan)
    rng = np.random.default_rng(0)
    args = [rng.normal(size=(2, 11)).astype(np.float32) for _ in range(2)]
    for a, b in zip(tree.leaves(grad(ours, (0, 1))(*args)), jax.grad(theirs, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
