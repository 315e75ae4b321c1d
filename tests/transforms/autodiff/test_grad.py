"""``grad``, ``vjp``, ``jvp``: arguments, pytrees, aux data, subgradients."""

import functools
from typing import NamedTuple

import numpy as np
import pytest

from blufunc import errors
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.core.primitives import linear_ops
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, value_and_grad, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr


def arr(x, dtype=np.float32):
    return from_numpy(np.asarray(x, dtype))


def total(x):
    return linear_ops.reduce_sum(x, tuple(range(x.ndim)))


def check(got, want, rtol=1e-6):
    got = np.asarray(got)
    assert got.shape == np.shape(want)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


X = np.array([0.5, -1.0, 2.0], np.float32)
Y = np.array([1.5, 0.25, -2.0], np.float32)


# -- arguments -------------------------------------------------------------------------------------


def test_grad():
    g = grad(lambda x: total(ew.sin(x)))(X)
    check(g, np.cos(X))
    assert g.dtype == np.float32


def test_python_scalars_are_differentiable():
    g = grad(lambda x: ew.mul(x, x))(3.0)
    check(g, 6.0)


def test_argnums():
    f = lambda x, y: total(ew.mul(ew.sin(x), y))
    check(grad(f, 1)(X, Y), np.sin(X))
    check(grad(f, -1)(X, Y), np.sin(X))
    g = grad(f, (1, 0))(X, Y)
    assert isinstance(g, tuple)
    check(g[0], np.sin(X))
    check(g[1], np.cos(X) * Y)
    assert isinstance(grad(f, (0,))(X, Y), tuple)


class Pair(NamedTuple):
    left: object
    right: object


def test_pytrees():
    def f(p):
        return ew.add(total(ew.mul(p["a"], p["b"].left)), total(ew.square(p["b"].right[0])))

    p = {"a": X, "b": Pair(Y, [X, None])}
    g = grad(f)(p)
    assert isinstance(g["b"], Pair)
    assert g["b"].right[1] is None
    check(g["a"], Y)
    check(g["b"].left, X)
    check(g["b"].right[0], 2 * X)


def test_keyword_arguments_are_not_differentiated():
    g = grad(lambda x, *, scale: total(ew.mul(x, scale)))(X, scale=arr(3.0))
    check(g, [3, 3, 3])


def test_value_and_grad():
    value, g = value_and_grad(lambda x: total(ew.square(x)))(X)
    check(value, np.sum(X**2))
    check(g, 2 * X)


def test_has_aux():
    def f(x):
        y = ew.sin(x)
        return total(y), {"y": y, "n": 3}

    g, aux = grad(f, has_aux=True)(X)
    check(g, np.cos(X))
    check(aux["y"], np.sin(X))
    assert int(aux["n"]) == 3
    (value, aux), g = value_and_grad(f, has_aux=True)(X)
    check(value, np.sum(np.sin(X)))
    check(aux["y"], np.sin(X))


def test_auxiliary_data_under_a_second_derivative():
    def f(x):
        return ew.mul(ew.sin(x), x), ew.cos(x)

    def g(x):
        d, aux = grad(f, has_aux=True)(x)
        return ew.add(d, aux)

    x = 0.7
    check(grad(g)(arr(x, np.float64)), 2 * np.cos(x) - x * np.sin(x) - np.sin(x))


def test_the_gradient_of_an_unused_argument_is_zero():
    g = grad(lambda x, y: total(x), (0, 1))(X, Y)
    check(g[1], np.zeros(3))
    assert g[1].dtype == np.float32


def test_the_gradient_of_a_constant_is_zero():
    check(grad(lambda x: arr(2.0))(X), np.zeros(3))


def test_allow_int():
    g = grad(lambda x, n: total(ew.mul(x, ew.convert(n, dtypes.float32))), (0, 1), allow_int=True)(
        X, np.array([1, 2, 3])
    )
    check(g[0], [1, 2, 3])
    assert g[1].dtype == dtypes.float0
    assert g[1].shape == (3,)


def test_every_float_dtype_keeps_its_own():
    for d in (dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64):
        assert grad(lambda x: total(ew.square(x)))(arr(X, d)).dtype == d


def test_gradients_through_other_dtypes_come_back_in_the_arguments():
    f = lambda x: total(ew.convert(ew.square(ew.convert(x, dtypes.bfloat16)), dtypes.float64))
    g = grad(f)(arr(X))
    assert g.dtype == np.float32
    check(g, 2 * X, 1e-2)


def test_holomorphic():
    z = arr([1 + 2j, 0.5 - 1j], np.complex128)
    g = grad(lambda z: total(ew.exp(z)), holomorphic=True)(z)
    check(g, np.exp(np.asarray(z)))


def test_the_decorator_keeps_the_name():
    def loss(x):
        """A docstring."""
        return total(x)

    assert grad(loss).__name__ == "loss"
    assert grad(loss).__doc__ == "A docstring."


# -- conventions -----------------------------------------------------------------------------------


def derivative(f, x):
    return float(grad(f)(arr(x, np.float64)))


def test_ties_share_the_derivative():
    assert derivative(lambda x: ew.max(x, 1.0), 1.0) == 0.5
    assert derivative(lambda x: ew.min(x, 1.0), 1.0) == 0.5
    assert derivative(lambda x: ew.max(x, x), 1.0) == 1.0


def test_derivatives_at_the_edges_of_domains():
    assert derivative(ew.abs, 0.0) == 0.0  # the symmetric one
    assert derivative(lambda x: ew.pow(x, 2.0), 0.0) == 0.0
    assert derivative(lambda x: ew.pow(x, 0.0), 0.0) == 0.0
    assert derivative(lambda x: ew.pow(0.0, x), 2.0) == 0.0
    assert derivative(lambda x: ew.integer_pow(x, 0), 0.0) == 0.0
    assert derivative(lambda x: ew.integer_pow(x, 1), 0.0) == 1.0
    assert derivative(ew.square, 0.0) == 0.0
    assert derivative(ew.sqrt, 0.0) == np.inf
    assert derivative(ew.logistic, 1000.0) == 0.0
    assert derivative(ew.logistic, -1000.0) == 0.0
    assert derivative(ew.tanh, 1000.0) == 0.0


def test_mixed_derivatives_of_powers_at_zero():
    both = grad(lambda y: grad(ew.pow)(arr(2.0, np.float64), y))
    check(both(arr(0.0, np.float64)), 0.5)


def test_clamp_passes_the_derivative_inside_of_its_bounds():
    f = lambda x: ew.clamp(-1.0, x, 1.0)
    assert [derivative(f, x) for x in (-2.0, -1.0, 0.0, 1.0, 2.0)] == [0, 0, 1, 0, 0]


def test_select_does_not_mix_its_cases():
    f = lambda x: ew.select(ew.gt(x, 0.0), ew.log(ew.select(ew.gt(x, 0.0), x, 1.0)), x)
    assert derivative(f, -2.0) == 1.0
    assert derivative(f, 2.0) == 0.5


def test_stop_gradient():
    f = lambda x: ew.mul(ew.stop_gradient(ew.sin(x)), x)
    x = 0.7
    assert derivative(f, x) == pytest.approx(np.sin(x))
    assert float(jvp(f, (x,), (1.0,))[1]) == pytest.approx(np.sin(x))
    assert derivative(lambda y: grad(f)(y), x) == 0.0


def test_comparisons_and_rounding_have_no_derivative():
    assert derivative(lambda x: ew.mul(ew.convert(ew.gt(x, 0.0), dtypes.float64), x), 2.0) == 1.0
    assert derivative(lambda x: ew.mul(ew.floor(x), x), 2.5) == 2.0


# -- jvp, linearize, vjp ---------------------------------------------------------------------------


def test_jvp():
    out, t = jvp(lambda x, y: {"p": ew.mul(x, y), "n": ew.convert(x, dtypes.int32)}, (X, Y), (Y, X))
    check(t["p"], Y * Y + X * X)
    assert t["n"].dtype == dtypes.float0
    check(out["p"], X * Y)


def test_jvp_has_aux():
    out, t, aux = jvp(lambda x: (ew.sin(x), [x]), (X,), (Y,), has_aux=True)
    check(t, np.cos(X) * Y)
    check(aux[0], X)


def test_jvp_with_integer_arguments():
    f = lambda x, n: ew.mul(x, ew.convert(n, dtypes.float32))
    check(jvp(f, (X, np.array([1, 2, 3])), (Y, np.zeros(3, dtypes.float0)))[1], Y * [1, 2, 3])


def test_vjp_may_be_called_again():
    out, pullback = vjp(lambda x, y: (ew.mul(x, y), ew.sin(x)), X, Y)
    check(out[1], np.sin(X))
    for ct in (X, Y):
        gx, gy = pullback((ct, ct))
        check(gx, ct * Y + ct * np.cos(X))
        check(gy, ct * X)


def test_vjp_has_aux():
    out, pullback, aux = vjp(lambda x: (ew.sin(x), {"double": ew.mul(x, 2.0)}), X, has_aux=True)
    check(pullback(Y)[0], Y * np.cos(X))
    check(aux["double"], 2 * X)


def test_vjp_of_integers():
    out, pullback = vjp(lambda x, n: (ew.mul(x, 2.0), n), X, np.array([1, 2]))
    gx, gn = pullback((Y, np.zeros(2, dtypes.float0)))
    check(gx, 2 * Y)
    assert gn.dtype == dtypes.float0


def test_linearize_evaluates_the_function_once():
    calls = []

    def f(x):
        calls.append(1)
        return ew.sin(x)

    out, df = linearize(f, X)
    check(out, np.sin(X))
    check(df(X), np.cos(X) * X)
    check(df(Y), np.cos(X) * Y)
    assert len(calls) == 1


def test_linear_maps_pass_through_jit_and_vmap():
    f = lambda x: ew.mul(ew.sin(x), x)
    _, pullback = jit(lambda x: vjp(f, x))(arr(X))
    check(pullback(Y)[0], Y * (np.cos(X) * X + np.sin(X)))
    _, df = jit(lambda x: linearize(f, x))(arr(X))
    check(jit(lambda df, t: df(t))(df, Y), Y * (np.cos(X) * X + np.sin(X)))
    jacobian = vmap(lambda ct: pullback(ct)[0])(np.eye(3, dtype=np.float32))
    check(jacobian, np.diag(np.cos(X) * X + np.sin(X)))


def test_residuals_are_computed_once():
    """The linear map saves cos(x); it does not recompute it."""
    _, df = linearize(lambda x: ew.sin(ew.exp(x)), X)
    jaxpr = make_jaxpr(df)(X)
    assert {e.prim.name for e in jaxpr.eqns} == {"mul"}


# -- rules of the user's ---------------------------------------------------------------------------


@custom_vjp
def scaled(w, x):
    """w * sin(x), with a backward pass that says which rule ran: it is doubled."""
    return ew.mul(w, ew.sin(x))


def _scaled_fwd(w, x):
    return scaled(w, x), (w, x)


def _scaled_bwd(residuals, ct):
    w, x = residuals
    return ew.mul(ct, ew.mul(ew.sin(x), 2.0)), ew.mul(ct, ew.mul(ew.mul(w, ew.cos(x)), 2.0))


scaled.defvjp(_scaled_fwd, _scaled_bwd)


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
def test_custom_vjp_in_compositions(wrap):
    w, x = arr(1.5, np.float64), arr(X, np.float64)
    f = wrap(scaled)
    check(f(w, x), 1.5 * np.sin(X))
    g = wrap(vmap(wrap(grad(f, (0, 1))), in_axes=(None, 0)))
    check(g(w, x)[0], 2 * np.sin(X.astype(float)), 1e-12)
    check(g(w, x)[1], 3 * np.cos(X.astype(float)), 1e-12)
    batched = lambda w, x: total(wrap(vmap(f, in_axes=(None, 0)))(w, x))
    g = wrap(grad(batched, (0, 1)))
    check(g(w, x)[0], 2 * np.sum(np.sin(X.astype(float))), 1e-12)
    check(g(w, x)[1], 3 * np.cos(X.astype(float)), 1e-12)
    twice = wrap(grad(wrap(grad(f, 1)), 0))  # of the backward pass, which is ordinary code
    check(twice(w, arr(0.3, np.float64)), 2 * np.cos(0.3), 1e-12)


def test_custom_vjp_has_no_forward_mode():
    with pytest.raises(errors.GradError, match="forward-mode") as info:
        jvp(scaled, (1.5, 0.3), (1.0, 1.0))
    assert "test_grad.py" in info.value.where


# -- higher orders ---------------------------------------------------------------------------------


def test_derivatives_of_any_order():
    f = lambda x: ew.mul(ew.sin(x), x)
    x = 0.6
    want = [
        x * np.sin(x),
        np.sin(x) + x * np.cos(x),
        2 * np.cos(x) - x * np.sin(x),
        -3 * np.sin(x) - x * np.cos(x),
        -4 * np.cos(x) + x * np.sin(x),
    ]
    g = f
    for order, w in enumerate(want):
        check(g(arr(x, np.float64)), w, 1e-12)
        check(jit(g)(arr(x, np.float64)), w, 1e-12)
        check(vmap(g)(arr([x, x], np.float64)), [w, w], 1e-12)
        if order < 4:
            g = grad(jit(g) if order % 2 else g)


def test_forward_over_reverse_is_reverse_over_forward():
    f = lambda x: total(ew.mul(ew.exp(x), ew.sin(x)))
    x, t = arr(X, np.float64), arr(Y, np.float64)
    forward = jvp(grad(f), (x,), (t,))[1]
    reverse = grad(lambda x: jvp(f, (x,), (t,))[1])(x)
    check(forward, np.asarray(reverse), 1e-12)
    check(forward, 2 * np.exp(X.astype(float)) * np.cos(X.astype(float)) * Y, 1e-12)


def test_perturbations_are_not_confused():
    """Perturbation confusion: d/dx of x * (d/dy of x + y)."""
    f = lambda x: ew.mul(x, jvp(lambda y: ew.add(x, y), (1.0,), (1.0,))[1])
    check(jvp(f, (2.0,), (1.0,))[1], 1.0)
    check(grad(lambda x: ew.mul(x, grad(lambda y: ew.add(x, y))(1.0)))(2.0), 1.0)
    check(grad(lambda x: ew.mul(x, grad(lambda y: ew.mul(x, y))(1.0)))(3.0), 6.0)


def test_closures_are_differentiated():
    def outer(x):
        y = ew.sin(x)
        inner = lambda z: total(ew.mul(y, ew.square(z)))
        return total(ew.mul(grad(inner)(x), y))

    x = X.astype(float)
    want = 2 * np.sin(x) ** 2 + 4 * x * np.sin(x) * np.cos(x)
    check(grad(outer)(arr(X, np.float64)), want, 1e-12)


# -- how much work ---------------------------------------------------------------------------------


def count(fun, *args):
    jaxpr = make_jaxpr(fun)(*args)
    return [e.prim.name for e in jaxpr.eqns]


def test_dead_branches_are_not_differentiated():
    f = lambda x, y: (ew.sin(x), ew.exp(ew.exp(y)))
    names = count(lambda x, y: vjp(f, x, y)[1]((X, np.zeros(3, np.float32)))[0], X, Y)
    assert names.count("exp") == 2
    names = count(grad(lambda x, y: ew.add(total(ew.sin(x)), total(ew.exp(y)))), X, Y)
    assert names.count("exp") == 1, "y has no tangent"


def test_equations_keep_the_line_of_the_forward_pass():
    def f(x):
        return total(ew.sin(x))

    jaxpr = make_jaxpr(grad(f))(X)
    lines = {e.source[0].co_name for e in jaxpr.eqns}
    assert lines <= {"f", "total", "<lambda>"} and "f" in lines


def test_golden_grad(golden):
    def loss(w, x, y):
        h = ew.tanh(ew.mul(w["scale"], x))
        return total(ew.square(ew.sub(ew.add(h, w["shift"]), y)))

    w = {"scale": X, "shift": np.float32(0.5)}
    golden("grad", make_jaxpr(value_and_grad(loss))(w, X, Y))


def test_golden_grad_of_jit(golden):
    f = jit(lambda x: total(ew.mul(jit(ew.sin)(x), x)))
    golden("grad_of_jit", make_jaxpr(grad(f))(X))


def test_golden_second_order(golden):
    golden(
        "jvp_of_grad",
        make_jaxpr(lambda x, t: jvp(grad(lambda x: total(ew.exp(ew.sin(x)))), (x,), (t,)))(X, Y),
    )


# -- errors stay with the user ---------------------------------------------------------------------


def test_the_transform_ends_when_the_function_raises():
    def f(x):
        raise RuntimeError("mine")

    for t in (grad, jit, vmap, functools.partial(value_and_grad, argnums=(0,))):
        with pytest.raises(RuntimeError, match="mine"):
            t(f)(X)
    check(ew.sin(arr(X)), np.sin(X))


def test_gradients_of_integers_are_refused_by_type():
    with pytest.raises(TypeError):
        grad(lambda n: n)(3)
    with pytest.raises(errors.GradError):
        grad(lambda n: n)(3)
