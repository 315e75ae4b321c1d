"""``bf.elementwise``: values, derivatives, transforms, kernels, errors."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.programs.simplify import simplify
from blufunc.testing import check_grads
from tests.transforms.common import arr, close, draw


@bf.elementwise
def leaky(x, alpha=0.1):
    return bnp.where(x > 0, x, alpha * x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_numbers_take_the_dtype_of_the_arrays_and_stay_exact(dtype):
    x = bnp.asarray([-1.0, 0.5], dtype)
    for got in (leaky(x), leaky(x, 0.1), leaky(x, alpha=0.1), bf.jit(leaky)(x)):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, bnp.where(x > 0, x, x * 0.1))


def test_shapes_broadcast():
    f = bf.elementwise(lambda x, y: x * 10 + y)
    x, y = arr([[1.0], [2.0]]), arr([3.0, 4.0, 5.0])
    close(f(x, y), x * 10 + y)
    close(f(x, 2.0), x * 10 + 2)
    close(f(bnp.asarray(2.0), y), 20 + y)
    assert bf.elementwise(lambda x: 1.0)(x).shape == (2, 1)
    assert bf.elementwise(lambda x, y: x)(bnp.ones(()), bnp.ones((2, 3))).shape == (2, 3)
    assert float(f(2, 3.5)) == 23.5


def test_the_function_sees_scalars():
    """A reduction over all axes is the identity for scalars."""
    x = draw(2, 3)
    close(bf.elementwise(lambda x: bnp.mean(x) + x.ndim)(x), x)


def test_arguments_may_be_trees():
    f = bf.elementwise(lambda p: p["x"] * p["scale"])
    x = draw(3)
    close(f({"x": x, "scale": 2.0}), 2 * x)


SMOOTH = [
    (lambda x, y: x * y + bnp.tanh(x) / (1 + y * y), 3),
    (lambda x, y: x**3 * bnp.exp(-y * y), 3),
    (lambda x, y: bnp.where(x > 0, x * y, bnp.sin(y)), 3),
    (lambda x, y: bnp.where(x > 0, bnp.where(y > 0, x * y, x / y), bnp.log(1 + x * x)), 2),
    (lambda x, y: bnp.maximum(x, y) * bnp.minimum(x, 2 * y) + abs(x) + bnp.hypot(x, y), 2),
    (lambda x, y: lax.cond(x < y, lambda: x * y, lambda: x - y) ** 2, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("fun, order", SMOOTH)
def test_derivatives(fun, order):
    f, x, y = bf.elementwise(fun), arr([[-0.7], [1.3]]), arr([0.8, -1.1, 0.4])  # away from the kinks
    check_grads(f, (x[:, 0], y[:2]), order)
    check_grads(f, (x, y), 2)
    check_grads(f, (x, y[0]), 2)


BRANCHES = [
    (lambda x: bnp.where(x > 0, bnp.sqrt(x), 0.0), 0.0, 0.0, 0.0),
    (lambda x: bnp.where(x > 0, x * bnp.log(x), 0.0), 0.0, 0.0, 0.0),
    (lambda x: bnp.where(x == 0, 1.0, bnp.sin(x) / x), 0.0, 1.0, 0.0),
    (lambda x: bnp.where(x > 700, x, bnp.log(1 + bnp.exp(x))), 1e4, 1e4, 1.0),
]


@pytest.mark.parametrize("fun, at, value, slope", BRANCHES)
def test_the_derivative_is_that_of_the_branch_taken(fun, at, value, slope):
    f = bf.elementwise(fun)
    x = arr([at, 0.25])
    with np.errstate(all="ignore"):
        assert np.isnan(bf.grad(lambda x: fun(x).sum())(x)[0])  # the usual derivative
        for transform in (bf.grad, lambda g: bf.jit(bf.grad(g)), bf.jacfwd):
            assert transform(lambda x: f(x).sum())(x)[0] == slope
        assert f(x)[0] == value
        second = bf.grad(lambda x: bf.grad(lambda x: f(x).sum())(x).sum())(x)
    assert np.isfinite(second).all()


def test_a_rule_inside_is_kept():
    @bf.custom_jvp
    def rounded(x):
        return bnp.round(x)

    rounded.defjvp(lambda ps, ts: (rounded(*ps), ts[0]))
    f, x = bf.elementwise(lambda x: 2 * rounded(x)), arr([0.3, 1.7])
    close(f(x), 2 * bnp.round(x))
    close(bf.grad(lambda x: f(x).sum())(x), 2 * bnp.ones_like(x))


def test_vmap_and_compositions():
    f = bf.elementwise(lambda x, y: x * y + bnp.sin(x))
    x, y = draw(4, 3), draw(4, seed=1)
    want = x * y[:, None] + bnp.sin(x)
    close(bf.vmap(f)(x, y), want)
    close(bf.jit(bf.vmap(f, (1, None), 1))(x, 2.0), x * 2 + bnp.sin(x))
    slope = bf.vmap(bf.grad(lambda x, y: f(x, y).sum(), (0, 1)))
    close(slope(x, y), (y[:, None] + bnp.cos(x), x.sum(1)))
    close(bf.hessian(f)(arr(0.3), arr(2.0)), -bnp.sin(arr(0.3)))


def test_rules_in_a_scope_are_seen_and_forgotten():
    f = bf.elementwise(lambda x: bnp.tanh(x) * 2)
    x = arr(0.3)
    usual = bf.grad(f)(x)
    with bf.override(lax.tanh_p, jvp=lambda ps, ts: (lax.tanh_p.bind(*ps), ts[0])):
        assert bf.grad(f)(x) == 2.0
    close(bf.grad(f)(x), usual)


def test_under_autocast():
    f = bf.elementwise(lambda x: bnp.where(x > 0, x * x, 0.5 * bnp.tanh(x)))
    x, w = bnp.asarray([[0.5, -1.0]]), bnp.asarray([[1.0, 2.0], [0.25, -0.5]])
    loss = lambda w: f(x @ w).sum()
    np.testing.assert_allclose(bf.grad(bf.autocast(loss))(w), bf.grad(loss)(w), rtol=2e-2, atol=1e-2)
    assert bf.grad(bf.autocast(loss))(w).dtype == "float32"


def test_integers_have_no_derivative():
    f = bf.elementwise(lambda n, x: n * x * x)
    n, x = bnp.asarray([1, 2]), arr([3.0, 4.0])
    close(bf.grad(lambda x: f(n, x).sum())(x), 2 * n * x)
    _, t = bf.jvp(bf.elementwise(lambda x: x > 0), (x,), (x,))
    assert t.dtype == bf.float0


def test_it_becomes_the_operations_that_where_gives():
    """Nothing is left that a fuser would have to know."""
    jaxpr = simplify(bf.make_jaxpr(bf.jit(lambda x: leaky(x * 2) + 1))(bnp.ones((2, 3))))
    assert [e.prim for e in jaxpr.eqns] == [lax.mul_p, lax.gt_p, lax.mul_p, lax.select_p, lax.add_p]
    slope = simplify(bf.make_jaxpr(bf.grad(lambda x: leaky(x).sum()))(bnp.ones(3)))
    assert "select" in [e.prim.name for e in slope.eqns]


def test_kernels_are_those_of_where():
    x = bnp.ones((256, 1024))
    plain = lambda x: bnp.where(x > 0, x, 0.1 * x)
    sources = []
    for fun in (leaky, plain):
        step = bf.jit(lambda x, fun=fun: fun(x * 2) + 1)
        lines = step.trace(x).lower().source().splitlines()
        sources.append([line for line in lines if "//" not in line])  # comments name the user's lines
    assert sources[0] == sources[1]
    assert len(sources[0]) > 5


ERRORS = {
    "C": (lambda: bf.elementwise("x > 0 ? x : 0"), errors.ArgumentError, "a Python function, not C source"),
    "no function": (lambda: bf.elementwise(3), errors.ArgumentError, "takes a function"),
    "complex": (lambda: leaky(bnp.ones(3, "complex64")), errors.DtypeError, "its argument x is complex64"),
    "key": (lambda: leaky(bf.random.key(0)), errors.DtypeError, "takes real numbers"),
    "text": (lambda: leaky(bnp.ones(3), "a"), errors.ArgumentError, "the argument alpha"),
    "shapes": (lambda: leaky(bnp.ones(3), bnp.ones(4)), errors.ShapeError, "do not broadcast"),
    "array": (
        lambda: bf.elementwise(lambda x: bnp.stack([x, x]))(bnp.ones(3)),
        errors.ShapeError,
        "one scalar for each element",
    ),
    "two": (lambda: bf.elementwise(lambda x: (x, x))(bnp.ones(3)), errors.ShapeError, "for scalars"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, kind, says = ERRORS[case]
    with pytest.raises(kind, match=says):
        call()
