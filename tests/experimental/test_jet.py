"""``jet`` against nested derivatives, and JAX's."""

import functools

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import from_numpy
from blufunc.experimental.jet import jet

RNG = np.random.default_rng(0)
M = RNG.normal(size=(3, 3)) + 3 * np.eye(3)
m = from_numpy(M)
at = lambda *xs: tuple([from_numpy(np.asarray(x)) for x in xs])


def nested(f, order, x, terms):
    """The derivatives along the curve, by forward mode of forward mode."""

    def along(t):
        powers = [t ** (k + 1) / float(np.prod(range(1, k + 2))) for k in range(order)]
        return f(*[p + sum(s * d for s, d in zip(powers, ds)) for p, ds in zip(x, terms)])

    derivatives, g = [], along
    for _ in range(order + 1):
        derivatives.append(g(from_numpy(np.zeros(()))))
        g = functools.partial(lambda g, t: bf.jvp(g, (t,), (bnp.ones_like(t),))[1], g)
    return derivatives


UNARY = (
    "exp exp2 expm1 log log1p sin cos tan tanh logistic sqrt rsqrt cbrt asin acos atan sinh cosh asinh erf erfc lgamma "
    "digamma square abs sign floor neg"
).split()
FUNCTIONS = {
    **{name: (lambda x, name=name: getattr(lax, name)(x), 1) for name in UNARY},
    "mul": (lambda x, y: x * y * x, 2),
    "div": (lambda x, y: x / (1 + y) + 2 / x, 2),
    "pow": (lambda x, y: x**y + x**-2 + x**3 + 2.0**x, 2),
    "max": (lambda x, y: bnp.maximum(x, y) + bnp.where(x > y, x * x, y), 2),
    "dot": (lambda x, y: bnp.sin(m @ x) @ (y * x), 2),
    "softmax": (lambda x: bf.nn.softmax(m @ x), 1),
    "gelu": (lambda x: bf.nn.gelu(x) + bf.nn.softplus(x) + bf.nn.relu(x), 1),
    "logsumexp": (lambda x: bf.nn.logsumexp(x * x), 1),
    "solve": (lambda x: bnp.linalg.solve(m + x[:, None] * x, x), 1),
    "indices": (lambda x: x[np.array([2, 0])] * x.at[1].set(x[0] ** 2)[1:], 1),
    "cumulative": (lambda x: bnp.cumsum(x * x) * bnp.cumprod(x), 1),
    "sort": (lambda x: bnp.sort(bnp.sin(3 * x)) * bnp.max(x), 1),
    "scan": (lambda x: lax.scan(lambda c, a: (bnp.sin(c) * a, c * c), x[0], x)[1], 1),
    "fori_loop": (lambda x: lax.fori_loop(0, 3, lambda i, v: v * v * 0.5 + i, x), 1),
    "while_loop": (lambda x: lax.while_loop(lambda v: v.sum() < 30, lambda v: v * v + 1, x), 1),
    "cond": (lambda x: lax.cond(x[0] > 0, lambda v: bnp.exp(v), lambda v: v, x), 1),
    "custom rules": (lambda x: bnp.linalg.norm(x) * bf.scipy.special.xlogy(x, x), 1),
    "calls": (bf.jit(lambda x: bf.checkpoint(bnp.tanh)(x * x)), 1),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_along_a_curve(name):
    f, n = FUNCTIONS[name]
    order = 4
    x = at(*RNG.uniform(0.2, 0.8, (n, 3)))
    terms = [at(*RNG.normal(size=(order, 3))) for _ in range(n)]
    want = nested(f, order, x, terms)
    value, series = bf.jit(lambda x, terms: jet(f, x, terms))(x, terms)
    for got, exact in zip([value, *series], want, strict=True):
        scale = 1 + float(abs(exact).max())
        np.testing.assert_allclose(np.asarray(got), np.asarray(exact), rtol=1e-9, atol=1e-9 * scale)


def test_coefficients_and_structures():
    x = from_numpy(np.array(0.5))
    one, zero = bnp.ones_like(x), bnp.zeros_like(x)
    value, series = jet(bnp.exp, (x,), ((one, zero, zero),), factorial_scaled=False)
    np.testing.assert_allclose([float(s / value) for s in series], [1, 1 / 2, 1 / 6])
    out, series = jet(lambda x: {"a": x * x, "b": x > 0, "c": 3.0}, (x,), ((one, zero),))
    assert out["b"].dtype == "bool" and [float(v) for v in series["a"]] == [1, 2]
    assert [float(v) for v in series["b"] + series["c"]] == [0] * 4
    assert jet(bnp.sin, (x,), ((),))[1] == []


def test_transforms_of_jet():
    third = lambda x: jet(bnp.sin, (x,), ((bnp.ones_like(x), bnp.zeros_like(x), bnp.zeros_like(x)),))[1][2]
    x = from_numpy(np.linspace(0, 1, 3))
    np.testing.assert_allclose(np.asarray(bf.vmap(third)(x)), -np.cos(np.asarray(x)), rtol=1e-12)
    np.testing.assert_allclose(np.asarray(bf.vmap(bf.grad(third))(x)), np.sin(np.asarray(x)), rtol=1e-12)


def test_the_cost_grows_by_the_square_of_the_order():
    f = lambda x: bnp.exp(bnp.sin(x))

    def size(order):
        terms = [from_numpy(np.ones(()))] * order
        return len(bf.make_jaxpr(lambda x: jet(f, (x,), (terms,)))(0.5).eqns)

    assert size(16) < 5 * size(8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: jet(bnp.sin, (0.5, 0.5), ((1.0,),)),
        lambda: jet(bnp.multiply, (0.5, 0.5), ((1.0,), (1.0, 0.0))),
        lambda: jet(bnp.sin, (1,), ((1.0,),)),
        lambda: jet(3, (1.0,), ((1.0,),)),
        lambda: jet(lambda x: x, ({"a": 1.0},), ((1.0,),)),
    ],
)
def test_errors(call):
    with pytest.raises(errors.BlufuncError, match="at:"):
        call()


@pytest.mark.peer
@pytest.mark.parametrize("name", ["exp", "log", "tanh", "sin", "sqrt", "logistic", "expm1", "erf", "square"])
def test_against_jax(name):
    jax = pytest.importorskip("jax")
    from jax.experimental.jet import jet as theirs

    with jax.enable_x64(True):
        x, terms = 0.4, [0.7, -0.3, 1.1, 0.2]
        want = theirs(getattr(jax.lax, name), (x,), (terms,))
        got = jet(getattr(lax, name), at(x), (at(*terms),))
        for a, b in zip([got[0], *got[1]], [want[0], *want[1]], strict=True):
            np.testing.assert_allclose(float(a), float(b), rtol=1e-9)
