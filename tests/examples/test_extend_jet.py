"""The example of Taylor series, against nested ``jvp``, JAX and known solutions."""

import math

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, testing
from examples.extend import jet
from examples.extend.jet import Series, taylor
from tests.transforms.common import arr

FUNCTIONS = {
    "arithmetic": lambda x: (2 * x - 1) * (3 + x) - x,
    "quotient": lambda x: (1 + x) / (2 + x * x),
    "quotient of a constant": lambda x: 1 / x,
    "quotient by a constant": lambda x: x / 3,
    "exp": bnp.exp,
    "log": bnp.log,
    "log of exp": lambda x: bnp.log(1 + bnp.exp(x)),
    "sin": bnp.sin,
    "cos of square": lambda x: bnp.cos(bnp.square(x)),
    "tanh": bnp.tanh,
    "logistic": lambda x: lax.logistic(x * x),
    "sqrt": lambda x: bnp.sqrt(1 + x),
    "powers": lambda x: x**5 + x**-2 + x**0 + x**1,
    "power": lambda x: (1 + x) ** (x * 0.5),
    "max": lambda x: bnp.maximum(bnp.sin(x), bnp.minimum(x * x, 0.3)),
    "abs": lambda x: bnp.abs(x - 0.5),
    "choice": lambda x: bnp.where(x > 0.5, bnp.exp(x), x * x),
    "constants only": lambda x: bnp.exp(bnp.sqrt(2 * bnp.ones_like(lax.stop_gradient(x)))) + x,
    "network": lambda x: bnp.tanh(arr(np.arange(9).reshape(3, 3) / 9) @ x) @ x,
    "moved": lambda x: bnp.concatenate([x[::-1], x[:1]]).reshape(2, 2).sum(0),
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, c: bnp.sin(c) * x, x),
    "loop from a constant": lambda x: lax.scan(
        lambda c, _: (c * x + 1, c), bnp.zeros_like(x), None, length=3
    ),
    "branch": lambda x: lax.cond(x[0] > 0, bnp.exp, lambda v: v + 0, x),
}
X, V = arr([0.3, 0.7, 0.6]), arr([1.0, -0.5, 2.0])


def nested(f, x, v, order):
    """Derivatives along a line by ``jvp`` of ``jvp``."""
    results, g = [], lambda t: f(x + t * v)
    for _ in range(order + 1):
        results.append(g(arr(0.0)))
        g = lambda t, g=g: bf.jvp(g, (t,), (arr(1.0),))[1]
    return results


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_against_nested_jvp(f):
    order = 4
    want = nested(f, X, V, order)
    for run in (taylor(order)(f), bf.jit(taylor(order)(f))):
        out, structure = bf.tree.flatten(run(Series((X, V))), is_leaf=lambda x: isinstance(x, Series))
        for i, series in enumerate(out):
            for k, c in enumerate(series.padded(order + 1).terms):
                expected = bf.tree.leaves(want[k])[i]
                np.testing.assert_allclose(math.factorial(k) * c, expected, rtol=1e-9, atol=1e-9)
        assert structure.num_leaves == len(out)


@pytest.mark.peer
@pytest.mark.parametrize("name", ["exp", "log", "sin", "tanh", "logistic", "sqrt", "quotient", "network"])
def test_against_jax(name):
    """JAX's jet has derivatives where this has terms."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.jet import jet as jax_jet

    functions = {
        "exp": jnp.exp,
        "log": jnp.log,
        "sin": jnp.sin,
        "tanh": jnp.tanh,
        "logistic": lambda x: jax.nn.sigmoid(x * x),
        "sqrt": lambda x: jnp.sqrt(1 + x),
        "quotient": lambda x: (1 + x) / (2 + x * x),
        "network": lambda x: jnp.tanh(jnp.arange(9.0).reshape(3, 3) / 9 @ x) @ x,
    }
    derivatives = [np.array(V), np.array([0.2, 0.1, -0.4]), np.array([0.0, 1.0, 0.5])]
    terms = (X, *(arr(d) / math.factorial(k + 1) for k, d in enumerate(derivatives)))
    got = taylor(3)(FUNCTIONS[name])(Series(terms)).padded(4).terms
    value, rest = jax_jet(
        functions[name], (jnp.asarray(X, "float32"),), ([jnp.asarray(d, "float32") for d in derivatives],)
    )
    for k, want in enumerate([value, *rest]):
        np.testing.assert_allclose(math.factorial(k) * got[k], want, rtol=3e-5, atol=3e-5)


def test_derivatives():
    got = jet.derivatives(lambda x: bnp.exp(2 * x), arr([0.0, 1.0]), 6)
    for k, d in enumerate(got):
        np.testing.assert_allclose(d, 2**k * np.exp([0, 2]), rtol=1e-12)


def test_composition():
    f = lambda x: bnp.tanh(bnp.sin(x) * bnp.exp(x)) / (2 + bnp.square(x))
    assert not testing.check_transform(taylor(3), f, (Series((X, V, V * 0.1)),)).unsupported


def test_solutions():
    """Exponentials and circles, whose series and values are known."""
    series = jet.solution(lambda x: -x, arr(2.0), 8)
    np.testing.assert_allclose(
        [float(c) for c in series.terms], [2 * (-1) ** k / math.factorial(k) for k in range(9)]
    )
    circle = lambda x: bnp.stack([x[1], -x[0]])
    end = jet.solve(circle, arr([1.0, 0.0]), 2 * math.pi, 8, 20)
    np.testing.assert_allclose(end, [1, 0], atol=1e-12)


def test_the_solver_has_derivatives():
    """The solution of x' = -x is linear in its start: exp(-t)."""
    end = lambda x: jet.solve(lambda v: -v, x, 1.5, 5, 12)
    np.testing.assert_allclose(bf.jit(bf.grad(end))(arr(2.0)), math.exp(-1.5), rtol=1e-12)
    np.testing.assert_allclose(bf.vmap(end)(arr([1.0, 2.0])), np.exp(-1.5) * np.array([1, 2]), rtol=1e-12)


def test_what_has_no_rule_is_named():
    with pytest.raises(errors.UnsupportedError, match="no rule for erf"):
        taylor(2)(lax.erf)(Series((X, V)))


def test_main(capsys):
    jet.main()
    assert "order 16" in capsys.readouterr().out
