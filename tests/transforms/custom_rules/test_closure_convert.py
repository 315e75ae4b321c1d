"""``closure_convert``: what may carry a derivative is handed out, and only that."""

import functools

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.transforms.arguments import ShapeDtypeStruct
from blufunc.transforms.autodiff.grad import grad, jvp, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.custom_rules.closure_convert import closure_convert
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp
from blufunc.transforms.staging.jit import jit
from tests.transforms.common import arr, close, draw

X, T = arr(0.7), arr(1.3)


def test_concrete_values_stay_closed_over():
    c = draw(3)
    converted, hoisted = closure_convert(lambda x: x * c * T, draw(3))
    assert hoisted == []
    close(converted(draw(3)), draw(3) * c * T)
    assert converted.__name__ == "converted_<lambda>"


def test_perturbed_values_are_handed_out():
    found = []

    def f(w, n, x):
        converted, hoisted = closure_convert(lambda x: {"y": [x * w * n.astype("float64")]}, x)
        found.append([h.aval.shape for h in hoisted])
        return converted(x, *hoisted)["y"][0].sum() + converted(x, *[h * 10.0 for h in hoisted])["y"][0].sum()

    n, x, w = arr(2, np.int32), draw(3), draw(3, seed=1)
    want = 22 * np.asarray(x)
    close(grad(f)(w, n, x), want)
    assert found == [[(3,)]]
    close(jit(grad(f))(w, n, x), want)
    close(grad(jit(f))(w, n, x), want)
    close(vmap(grad(f), (0, None, None))(w[None], n, x)[0], want)
    close(jvp(lambda w: f(w, n, x), (w,), (w,))[1], (w * arr(want)).sum())


def test_the_function_is_traced_once_and_for_good():
    runs = []

    def f(p, x):
        runs.append(p)
        return p["a"] * x

    converted, _ = closure_convert(f, {"a": X}, ShapeDtypeStruct((3,), "float64"))
    for _ in range(3):
        close(converted({"a": X}, draw(3)), X * draw(3))
    assert len(runs) == 1
    close(grad(lambda a: converted({"a": a}, draw(3)).sum())(X), np.asarray(draw(3)).sum())


def euler(f, steps=50):
    """An integrator with the adjoint equation as its rule; no closure allowed."""

    def forward(f, x0, *args):
        return scan(lambda x, _: (x + f(x, *args) / steps, None), x0, length=steps)[0]

    @functools.partial(custom_vjp, nondiff_argnums=(0,))
    def integrate(f, x0, *args):
        return forward(f, x0, *args)

    def fwd(f, x0, *args):
        return forward(f, x0, *args), (x0, args)

    def bwd(f, residuals, ct):
        x0, args = residuals
        xs = scan(lambda x, _: (x + f(x, *args) / steps, x), x0, length=steps)[1]

        def back(carry, x):
            a, g = carry
            da, *dg = vjp(f, x, *args)[1](a / steps)
            return (a + da, [s + t for s, t in zip(g, dg)]), None

        (a, g), _ = scan(back, (ct, [bnp.zeros_like(v) for v in args]), xs, reverse=True)
        return (a, *g)

    integrate.defvjp(fwd, bwd)
    return integrate


def test_an_adjoint_of_a_higher_order_function():
    """The use it is for: gradients of parameters that the vector field closes over."""

    def solve(w, x0, convert=True):
        field = lambda x: bnp.tanh(w @ x) - x
        if not convert:
            return scan(lambda x, _: (x + field(x) / 50, None), x0, length=50)[0]
        converted, hoisted = closure_convert(field, x0)
        return euler(field)(converted, x0, *hoisted)

    loss = lambda w, x0, **o: (solve(w, x0, **o) ** 2).sum()
    w, x0 = draw(3, 3), draw(3, seed=1)
    plain = lambda w, x0: loss(w, x0, convert=False)
    close(loss(w, x0), plain(w, x0))
    want = grad(plain, (0, 1))(w, x0)
    close(grad(loss, (0, 1))(w, x0), want, 1e-10)
    close(jit(grad(loss, (0, 1)))(w, x0), want, 1e-10)
    close(vmap(grad(loss), (0, None))(w[None], x0)[0], want[0], 1e-10)


ERRORS = {
    "no function": (lambda: closure_convert(3, X), "takes a function"),
    "no array": (lambda: closure_convert(lambda x: x, "a"), "argument x"),
    "number": (lambda: closure_convert(lambda x: x, X)[0](X, X), "1 arguments and 0 hoisted"),
    "structure": (lambda: closure_convert(lambda x: x, X)[0]((X,)), "structure"),
    "type": (lambda: closure_convert(lambda x: x, X)[0](draw(2)), r"argument x of the converted .* f64\[2\]"),
    "junk": (lambda: closure_convert(lambda x: x, X)[0]("a"), "leaf 0"),
    "hoisted": (
        lambda: grad(lambda w: closure_convert(lambda x: x * w, X)[0](X, draw(2)).sum())(X),
        "hoisted value 0",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, says = ERRORS[name]
    with pytest.raises(errors.BlufuncError, match=says) as info:
        call()
    assert "test_closure_convert.py" in info.value.where


@pytest.mark.peer
def test_against_jax():
    import jax

    def program(convert, np_, grad):
        def f(w, x):
            converted, hoisted = convert(lambda x: np_.sin(w * x) * 2.0, x)
            return len(hoisted), converted(x, *[h * 3.0 for h in hoisted])

        return f(np_.float32(0.5), np_.float32(2.0)), grad(lambda w, x: f(w, x)[1])(
            np_.float32(0.5), np_.float32(2.0)
        )

    ours = program(closure_convert, bnp, grad)
    theirs = program(jax.closure_convert, jax.numpy, jax.grad)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(ours[1]), np.asarray(theirs[1]), rtol=1e-5)
