"""GELU as one operation: one equation under each transform, and the same numbers. Values are in test_activations.py."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, nn
from blufunc.core.ir import dtypes
from blufunc.core.programs.simplify import simplify
from blufunc.nn.gelu_call import gelu_grad_p, gelu_p

RNG = np.random.default_rng(0)
X, T, C = (bnp.asarray(RNG.normal(size=(3, 4)), dtype="float64") for _ in range(3))


def primitives(f, *args):
    """The names of the equations of a function that are needed, without those of bodies."""
    return [e.prim.name for e in simplify(bf.make_jaxpr(f)(*args)).eqns]


def vjp(x, t):
    return bf.vjp(nn.gelu, x)[1](t)[0]


def jvp(x, t):
    return bf.jvp(nn.gelu, (x,), (t,))[1]


ONE = {
    "value": (["gelu"], nn.gelu, X),
    "forward mode": (["gelu", "gelu_grad"], lambda x, t: bf.jvp(nn.gelu, (x,), (t,)), X, T),
    "reverse mode": (["gelu_grad"], lambda x, t: vjp(x, t), X, T),
    "vmap": (["gelu"], lambda x: bf.vmap(nn.gelu, 1, 1)(x), X),
    "vmap of the derivative": (["gelu_grad"], lambda x, t: bf.vmap(vjp)(x, t), X, T),
    "linear in the tangent": (["gelu_grad"], lambda x, t: bf.linear_transpose(lambda t: jvp(x, t), t)(t), X, T),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_transforms_keep_it_one_operation(name):
    names, f, *args = ONE[name]
    assert [n for n in primitives(f, *args) if n.startswith("gelu") or n == "logistic"] == names


def test_both_modes_agree_at_every_order():
    near = lambda got, want: np.testing.assert_allclose(
        np.asarray(got), np.asarray(want), rtol=1e-9, atol=1e-9
    )
    near(vjp(X, T), jvp(X, T))
    slope = lambda x: vjp(x, T)  # a function of x, of which there are derivatives by x and by T
    near(bf.vjp(slope, X)[1](C)[0], bf.jvp(slope, (X,), (C,))[1])
    near(bf.vjp(lambda t: vjp(X, t), T)[1](C)[0], vjp(X, C))
    both = lambda x, t: (vjp(x, t) * C).sum()
    h = 1e-5
    by_x, by_t = bf.grad(both, (0, 1))(X, T)
    step = h * bnp.eye(12, dtype="float64")[6].reshape(3, 4)
    near(np.asarray(by_x)[1, 2], (both(X + step, T) - both(X - step, T)) / (2 * h))
    near(np.asarray(by_t)[1, 2], (both(X, T + step) - both(X, T - step)) / (2 * h))
    second = bf.grad(bf.grad(nn.gelu))
    x = bnp.asarray(0.3, dtype="float64")
    near(bf.grad(second)(x), (second(x + h) - second(x - h)) / (2 * h))


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0), (1, 0), (1, 1)])
def test_batches_of_one_operand_or_both(dims):
    stacked = np.stack([X, C]), np.stack([T, X])
    x, t = (a[0] if d is None else np.moveaxis(a, 0, d) for a, d in zip(stacked, dims, strict=True))
    got = bf.vmap(vjp, dims)(x, t)
    row = lambda a, d, i: a if d is None else np.take(a, i, d)
    want = [np.asarray(vjp(row(x, dims[0], i), row(t, dims[1], i))) for i in range(got.shape[0])]
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-12)


def test_half_precision_is_rounded_once():
    x, t = (a.astype(dtypes.bfloat16) for a in (X, T))
    for f, args in ((nn.gelu, (x,)), (vjp, (x, t))):
        want = np.asarray(f(*[a.astype(np.float32) for a in args])).astype(dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(f(*args)), want)
        np.testing.assert_array_equal(np.asarray(bf.jit(f)(*args)), want)


def test_complex_numbers():
    z = X + 1j * T
    got, z = np.asarray(nn.gelu(z)), np.asarray(z)
    inner = np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)
    np.testing.assert_allclose(got, 0.5 * z * (1 + np.tanh(inner)), rtol=1e-10)


def test_reverse_mode_keeps_the_argument_alone():
    """In the dtype that it has: of a half precision, half of the bytes that the slope would take."""
    x = X.astype(dtypes.bfloat16)
    f = lambda xs: lax.scan(lambda c, x: (c + nn.gelu(x).astype("float32").sum(), None), 0.0, xs)[0]
    jaxpr = bf.make_jaxpr(bf.grad(f))(x)
    kept = [v.aval for e in jaxpr.eqns if e.prim.name == "scan" for v in e.outvars]
    assert {a.dtype for a in kept if a.shape == X.shape} <= {x.dtype}


def test_mixed_precision():
    """Low between two products, unless the caller wants it otherwise."""
    x, w = (np.asarray(a).astype(np.float32) for a in (X, RNG.normal(size=(4, 4))))
    f = lambda x, w: nn.gelu(x @ w + x)

    def types(**options):
        jaxpr = bf.make_jaxpr(bf.value_and_grad(bf.autocast(lambda x, w: f(x, w).sum(), **options)))(x, w)
        eqns = jaxpr.eqns
        return {e.prim.name: e.outvars[0].aval.dtype.name for e in eqns if e.prim.name.startswith("gelu")}

    assert types() == {"gelu": "bfloat16", "gelu_grad": "bfloat16"}
    assert types(dtype="float16") == {"gelu": "float16", "gelu_grad": "float16"}
    assert types(float32=("dot_general",)) == types(float32=(gelu_p, gelu_grad_p)) == {}
    got, want = bf.autocast(f)(x, w), f(x, w)
    assert got.dtype == np.float32
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0.03, atol=0.03)
    f64 = bf.make_jaxpr(bf.autocast(nn.gelu))(X)
    assert [v.dtype.name for v in f64.out_avals] == ["float64"]


def test_programs_share_what_it_has_in_common_with_its_derivative():
    both = lambda x: bf.value_and_grad(lambda x: nn.gelu(x).sum())(x)
    source = bf.jit(both).lower(X.astype(np.float32)).compile().program.source()
    assert source.count("logistic(") == 1
    again = lambda x: bf.value_and_grad(lambda x: bf.checkpoint(nn.gelu)(x).sum())(x)
    for f in (both, again):
        for got, want in zip(bf.jit(f)(X), f(X), strict=True):
            np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-12)
