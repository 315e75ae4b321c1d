"""``custom_vjp``: the rules differentiate, under every transform, checked."""

import functools
from typing import NamedTuple

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax, tree
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.pytree import nodes
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, value_and_grad, vjp
from blufunc.transforms.autodiff.linearize import linearize_flat
from blufunc.transforms.autodiff.symbolic_zeros import CustomVJPPrimal, SymbolicZero, instantiate
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.checkpointing.policies import everything_saveable
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.custom_rules.custom_gradient import custom_gradient
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw


def ruled(fun, fwd, bwd, **options):
    f = custom_vjp(fun, **options)
    f.defvjp(fwd, bwd)
    return f


X, T = arr(0.7), arr(1.3)


# -- the rules under each transform ----------------------------------------------------------------
# They are wrong on purpose, each by a factor that ordinary differentiation would not give.


@custom_vjp
def triple(x):
    """sin, with three times its derivative."""
    return bnp.sin(x)


def triple_fwd(x):
    return bnp.sin(x), {"cos": bnp.cos(x), "nothing": None}


def triple_bwd(residuals, ct):
    return (3.0 * ct * residuals["cos"],)


triple.defvjp(triple_fwd, triple_bwd)

same_function = lambda f: f
WRAPS = {
    "plain": same_function,
    "jit": jit,
    "jit of jit": lambda f: jit(lambda x: jit(f)(x)),
    "checkpoint": checkpoint,
    "everything saved": lambda f: checkpoint(f, policy=everything_saveable),
    "checkpoint in jit": lambda f: jit(checkpoint(f)),
    "vmap": lambda f: lambda x: vmap(f)(bnp.stack([x, x * 2]))[0],
    "vmap of vmap": lambda f: lambda x: vmap(vmap(f), 1)(bnp.stack([x, x * 2])[None])[0, 0],
    "jit of vmap": lambda f: jit(lambda x: vmap(f)(bnp.stack([x, x * 2]))[0]),
    "vmap of jit": lambda f: lambda x: vmap(jit(f))(bnp.stack([x, x * 2]))[0],
    "scan": lambda f: lambda x: scan(lambda c, _: (f(x), None), x, length=2)[0],
    "scan over xs": lambda f: lambda x: scan(lambda c, x: (c, f(x)), (), bnp.stack([x, x * 2]))[1][0],
    "scan in checkpoint": lambda f: checkpoint(lambda x: scan(lambda c, _: (f(x), None), x, length=2)[0]),
    "vmap of scan": lambda f: vmap_of_scan(f),
    "in another rule": lambda f: ruled(f, lambda x: vjp(f, x), lambda pull, ct: pull(ct)),
}
WRAP = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def vmap_of_scan(f):
    one = lambda x: scan(lambda c, x: (c, f(x)), (), bnp.stack([x, x * 2]))[1][0]
    return lambda x: vmap(one)(bnp.stack([x, x * 2]))[0]


@WRAP
def test_the_rules_are_used(wrap):
    f = wrap(triple)
    x = np.asarray(X)
    first, second, third = 3 * np.cos(x), -3 * np.sin(x), -3 * np.cos(x)
    close(f(X), np.sin(x))
    close(value_and_grad(f)(X), (arr(np.sin(x)), arr(first)))
    close(vjp(f, X)[1](T)[0], first * 1.3)
    close(jit(grad(f))(X), first)
    close(grad(jit(f))(X), first)
    close(vmap(grad(f))(bnp.stack([T, X]))[1], first)
    close(grad(lambda v: vmap(f)(v).sum())(bnp.stack([T, X]))[1], first)
    close(grad(lambda v: scan(lambda c, x: (c + f(x), None), T, v)[0])(bnp.stack([T, X]))[1], first)
    # What is differentiated again is what the rules compute.
    close(grad(grad(f))(X), second)
    close(jvp(grad(f), (X,), (T,))[1], second * 1.3)
    close(jit(grad(grad(grad(f))))(X), third)
    close(vmap(grad(grad(f)))(bnp.stack([T, X]))[1], second)


@WRAP
def test_primals_are_bit_identical(wrap):
    f = wrap(triple)
    want = wrap(bnp.sin)(X)
    for value in (f(X), jit(f)(X), value_and_grad(f)(X)[0], vjp(f, X)[0], jit(value_and_grad(f))(X)[0]):
        close(value, want, 0)


def test_the_pullback_can_be_called_often_and_batched():
    f = lambda x: triple(x) * x[0]
    x = draw(3)
    want = 3 * np.diag(np.cos(np.asarray(x))) * np.asarray(x)[0]
    want[:, 0] += np.sin(np.asarray(x))
    for g in (f, jit(f), checkpoint(f), lambda x: vmap(triple)(x) * x[0]):
        _, pull = vjp(g, x)
        jacobian = vmap(pull)(arr(np.eye(3)))[0]
        close(jacobian, want)
        close(jit(vmap(pull))(arr(np.eye(3)))[0], want)
        close(bnp.stack([pull(row)[0] for row in arr(np.eye(3))]), want)
        _, pull = vjp(grad(lambda x: g(x).sum()), x)  # noqa: B023
        close(vmap(pull)(arr(np.eye(3)))[0], bnp.stack([pull(row)[0] for row in arr(np.eye(3))]))


def test_the_call_stays_whole_until_it_is_lowered():
    jaxpr = str(make_jaxpr(jit(lambda x: triple(x) * 2.0))(X))
    assert "custom_vjp_call" in jaxpr and "name=triple" in jaxpr
    lowered = str(jit(lambda x: triple(x) * 2.0).lower(X).jaxpr)
    assert "custom_vjp_call" not in lowered and "sin" in lowered
    assert "custom_vjp" not in str(jit(grad(triple)).lower(X).jaxpr)


def test_results_that_nobody_reads():
    """The backward rule receives a cotangent per result, zeros for unread ones."""
    f = ruled(
        lambda x: (bnp.sin(x), {"b": x * 2.0}),
        lambda x: ((bnp.sin(x), {"b": x * 2.0}), x),
        lambda x, ct: (ct[0] * 5.0 + ct[1]["b"] * bnp.exp(x),),
    )
    first = lambda x: f(x)[1]["b"]
    loop = lambda x: scan(lambda c, _: (first(c), None), x, length=1)[0]
    for g in (first, jit(first), checkpoint(first), checkpoint(jit(checkpoint(first))), checkpoint(loop)):
        for _ in range(3):
            g = grad(g)
            close(g(X), np.exp(0.7))
            close(vmap(g)(X[None])[0], np.exp(0.7))


# -- what rules are for ----------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [same_function, jit, checkpoint])
def test_clipping_a_gradient(wrap):
    @functools.partial(custom_vjp, nondiff_argnums=(0, 1))
    def clip_gradient(low, high, x):
        return x

    clip_gradient.defvjp(lambda low, high, x: (x, None), lambda low, high, _, ct: (bnp.clip(ct, low, high),))
    f = lambda x: (wrap(lambda x: clip_gradient(-0.5, 0.5, x))(x) ** 2).sum()
    x = draw(5) * 2
    want = np.clip(2 * np.asarray(x), -0.5, 0.5)
    close(grad(f)(x), want)
    close(vmap(grad(f))(x[None])[0], want)
    close(jit(grad(lambda x: scan(lambda c, a: (c + f(a[None]), None), arr(0.0), x)[0]))(x), want)


def test_a_stable_function():
    """log(1 + exp(x)) far from zero, where the plain derivative is NaN."""
    f = ruled(
        lambda x: bnp.where(x > 30.0, x, bnp.log(1.0 + bnp.exp(x))),
        lambda x: (bnp.where(x > 30.0, x, bnp.log(1.0 + bnp.exp(x))), x),
        lambda x, ct: (ct / (1.0 + bnp.exp(-x)),),
    )
    close(vmap(grad(f))(arr([1000.0, 0.0])), arr([1.0, 0.5]))


def test_a_fixed_point_by_the_implicit_function_theorem():
    """The backward rule runs a loop and a pullback of its own."""
    step = lambda a, x: bnp.cos(a * x)
    iterate = lambda f, x: scan(lambda x, _: (f(x), None), x, length=80)[0]
    solve = custom_vjp(lambda a: iterate(lambda x: step(a, x), arr(0.5)))

    def bwd(residuals, ct):
        a, x = residuals
        pull = vjp(step, a, x)[1]
        return (pull(iterate(lambda u: ct + pull(u)[1], ct))[0],)

    solve.defvjp(lambda a: (solve.fun(a), (a, solve.fun(a))), bwd)
    a = arr(0.6)
    plain = grad(solve.fun)
    for g in (
        grad(solve),
        jit(grad(solve)),
        lambda a: vmap(grad(solve))(a[None])[0],
        grad(checkpoint(solve)),
    ):
        close(g(a), plain(a), 1e-10)
    close(grad(grad(solve))(a), grad(plain)(a), 1e-8)


def test_control_flow_on_values():
    """Without staging, all three functions see values, also in nested calls."""

    @custom_vjp
    def f(x):
        return x * 2.0 if float(x) > 0 else x * 0.5

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * (20.0 if float(x) > 0 else 5.0),))
    for x, value, slope in ((1.0, 2.0, 20.0), (-1.0, -0.5, 5.0)):
        x = arr(x)
        assert float(f(x)) == value
        assert [float(v) for v in value_and_grad(f)(x)] == [value, slope]
        assert float(grad(lambda x: f(x) * f(x))(x)) == 2 * value * slope
    with pytest.raises(errors.ConcretizationError):
        jit(f)(X)


def test_second_order_where_the_forward_rule_calls_the_function():
    """Reverse over reverse uses the rules; forward over reverse is unavailable."""
    f = ruled(
        lambda x: bnp.sin(x), lambda x: (f(x), (f(x), x)), lambda r, ct: (ct * r[0] * bnp.cos(r[1]) * 5.0,)
    )
    s, c = np.sin(0.7), np.cos(0.7)
    first = 5 * s * c
    close(grad(f)(X), first)
    for g in (grad(grad(f)), jit(grad(grad(f))), grad(jit(grad(f))), grad(checkpoint(grad(f)))):
        close(g(X), 5 * (first * c - s * s))
    with pytest.raises(errors.GradError, match="forward-mode"):
        jvp(grad(f), (X,), (T,))


def test_custom_rules_within_custom_rules():
    """A jvp rule that linearizes, and a vjp rule whose parts have a jvp rule."""
    inner = custom_jvp(bnp.sin)
    inner.defjvp(lambda p, t: (inner(*p), t[0] * bnp.cos(p[0]) * 2.0))
    outer = ruled(lambda x: inner(x) * x, lambda x: (inner(x) * x, x), lambda x, ct: (ct * grad(inner)(x),))
    close(grad(outer)(X), 2 * np.cos(0.7))
    close(grad(grad(outer))(X), -2 * np.sin(0.7))
    through = custom_jvp(triple.fun)
    through.defjvp(lambda p, t: (lambda y, lin: (y, lin(*t)))(*linearize(triple, *p)))
    for g in (through, jit(through), checkpoint(through), lambda x: vmap(through)(x[None])[0]):
        close(grad(g)(X), 3 * np.cos(0.7))
        close(grad(grad(g))(X), -3 * np.sin(0.7))


# -- arguments and results -------------------------------------------------------------------------


class Point(NamedTuple):
    x: object
    y: object


def pytree_function():
    def f(p, options, scale=None):
        return Point({"s": p.x * p.y["z"]}, (options[0], None))

    def fwd(p, options, scale):
        assert isinstance(p, Point) and scale is None
        return f(p, options), {"p": p, "more": [options[0], None, (options[0] * 2.0,)], "n": 3}

    def bwd(residuals, ct):
        assert isinstance(ct, Point) and ct.y[1] is None and isinstance(residuals["p"], Point)
        a, _, (b,) = residuals["more"]
        return Point(ct.x["s"] * 5.0, {"z": ct.x["s"] * b}), [ct.y[0] * a * residuals["n"]], None

    return ruled(f, fwd, bwd)


@pytest.mark.parametrize("wrap", [same_function, jit, checkpoint, lambda f: jit(jit(f))])
def test_pytrees_and_keyword_arguments(wrap):
    g = wrap(pytree_function())
    p, o = Point(X, {"z": T}), [arr(2.0)]
    close(g(p, o), Point({"s": X * T}, (arr(2.0), None)))
    loss = lambda p, o: (lambda out: out.x["s"] * 10.0 + out.y[0])(g(options=o, p=p))
    want = (Point(arr(50.0), {"z": arr(40.0)}), [arr(6.0)])
    close(grad(loss, (0, 1))(p, o), want)
    batch = tree.map(lambda x: bnp.stack([x, x]), (p, o))
    close(vmap(grad(loss, (0, 1)))(*batch), tree.map(lambda x: bnp.stack([x, x]), want))
    unmapped = grad(lambda p, o: vmap(loss, (0, None))(p, o).sum(), 1)(batch[0], o)
    close(unmapped, [arr(12.0)])


@pytest.mark.parametrize(
    "given, want",
    [
        ((None, None), ([0.0, 0.0], 0.0)),
        (({"a": None, "b": T}, None), ([0.0, 1.3], 0.0)),
        (({"a": T, "b": None}, X), ([1.3, 0.0], 0.7)),
        ([None, X], ([0.0, 0.0], 0.7)),
    ],
)
@pytest.mark.parametrize(
    "wrap", [same_function, jit, checkpoint, lambda f: lambda p, y: vmap(f, None, axis_size=1)(p, y)[0]]
)
def test_none_for_zero(given, want, wrap):
    """In the place of a cotangent or of a whole subtree."""
    f = ruled(lambda p, y: p["a"] + p["b"] + y, lambda p, y: (p["a"] + p["b"] + y, None), lambda r, ct: given)
    (a, b), y = want
    close(grad(wrap(f), (0, 1))({"a": X, "b": X}, X), ({"a": arr(a), "b": arr(b)}, arr(y)))


def test_nondiff_argnums():
    @functools.partial(custom_vjp, nondiff_argnums=(0, 2))
    def apply(g, x, n):
        return g(x) * n

    def fwd(g, x, n):
        assert n == 3 and callable(g)
        return apply(g, x, n), g(x)

    def bwd(g, n, y, ct):
        assert n == 3 and callable(g)
        return (ct * y * 100.0,)

    apply.defvjp(fwd, bwd)
    f = lambda x: apply(bnp.sin, x, 3)
    close(f(X), 3 * np.sin(0.7))
    for g in (grad(f), grad(jit(f)), jit(grad(f)), lambda x: vmap(grad(f))(x[None])[0], grad(checkpoint(f))):
        close(g(X), 100 * np.sin(0.7))
    close(grad(lambda x: apply(bnp.sin, n=3, x=x))(X), 100 * np.sin(0.7))


def test_methods():
    class Layer:
        def __init__(self, w):
            self.w = w

        @functools.partial(custom_vjp, nondiff_argnums=(0,))
        def __call__(self, x):
            return x * self.w

        __call__.defvjp(lambda self, x: (self(x), x), lambda self, x, ct: (ct * self.w * x * 4.0,))

    layer = Layer(2.0)
    close(layer(X), 1.4)
    for wrap in (same_function, jit, checkpoint):
        close(grad(wrap(layer.__call__))(X), 8.0 * 0.7)
    assert Layer.__call__ is Layer.__dict__["__call__"]
    assert triple.__name__ == "triple" and triple.__doc__.startswith("sin")


@pytest.mark.parametrize("ct", [None, 0.0, np.zeros((), dtypes.float0)], ids=["None", "zero", "float0"])
def test_integer_arguments_and_results(ct):
    """Their cotangents are nothing, whatever the rule returns for them."""
    f = ruled(
        lambda n, x: (x * n.astype("float64"), n + 1),
        lambda n, x: ((x * n.astype("float64"), n + 1), (n, x)),
        lambda r, cts: (ct, cts[0] * 50.0),
    )
    n = arr(3, np.int32)
    for wrap in (same_function, jit, checkpoint):
        g = wrap(f)
        close(grad(lambda x: g(n, x)[0])(X), 50.0)  # noqa: B023
        assert grad(lambda n: g(n, X)[0], allow_int=True)(n).dtype == dtypes.float0  # noqa: B023
        (y, m), pull = vjp(g, n, X)
        assert int(m) == 4
        ct_n, ct_x = pull((T, np.zeros((), dtypes.float0)))
        assert ct_n.dtype == dtypes.float0
        close(ct_x, 65.0)
        for axes in ((None, 0), (0, None), (0, 0)):
            args = [x if a is None else bnp.stack([x, x]) for x, a in zip((n, X), axes, strict=True)]
            h = lambda n, x: vmap(lambda n, x: g(n, x)[0], axes)(n, x).sum()  # noqa: B023
            close(grad(h, 1)(*args), arr(100.0 if axes[1] is None else [50.0, 50.0]))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 1), (-1, 0), (1, None)], ids=str)
def test_vmap_over_each_axis(axes):
    """Cotangents of what is not mapped are summed over the axis."""
    f = ruled(
        lambda x, y: (x * y.sum(), y),
        lambda x, y: ((x * y.sum(), y), (x, y, arr(2.0), draw(3))),
        lambda r, ct: (ct[0] * r[1] * r[2], ct[1] * r[0] + r[3] * ct[0].sum()),
    )
    at = lambda x, d, i: x if d is None else bnp.moveaxis(x, d, 0)[i]
    rows = lambda g: (
        lambda x, y: tree.map(
            lambda *r: bnp.stack(r), *(g(at(x, axes[0], i), at(y, axes[1], i)) for i in range(3))
        )
    )
    x, y = draw(3, 3), draw(3, 3, seed=1)
    x, y = (a if d is not None else a[0] for a, d in zip((x, y), axes, strict=True))
    loss = lambda x, y: (f(x, y)[0] ** 2).sum() + f(x, y)[1].sum()
    summed = lambda g: lambda x, y: (g(x, y) * draw(3)).sum()
    for g in (f, grad(loss, (0, 1))):
        want = rows(g)(x, y)
        close(vmap(g, axes)(x, y), want)
        close(jit(vmap(g, axes))(x, y), want)
        close(vmap(jit(g), axes)(x, y), want)
    want = grad(summed(rows(loss)), (0, 1))(x, y)
    for g in (vmap(loss, axes), jit(vmap(loss, axes)), vmap(jit(loss), axes), checkpoint(vmap(loss, axes))):
        close(grad(summed(g), (0, 1))(x, y), want)
    second_order = lambda g: grad(lambda x, y: (grad(summed(g), 1)(x, y) ** 2).sum(), (0, 1))
    close(second_order(vmap(loss, axes))(x, y), second_order(rows(loss))(x, y))


def test_rules_that_mix_more_than_the_function_does():
    """Results constant over the batch, with rules that are not."""
    f = ruled(lambda x, y: y, lambda x, y: (y + x * 0.0, x), lambda x, ct: (ct * x, ct * x))
    g = lambda x, y: (vmap(f, (0, None))(x, y) * arr([1.0, 10.0])).sum()
    x = draw(2)
    for wrap in (same_function, jit):
        gx, gy = grad(wrap(g), (0, 1))(x, X)
        close(gx, x * arr([1.0, 10.0]))
        close(gy, (x * arr([1.0, 10.0])).sum())


def test_cotangents_that_are_not_batched():
    f = ruled(lambda x: x * 2.0, lambda x: (x * 2.0, None), lambda r, ct: (ct * 0.0 + 7.0,))
    constant = ruled(lambda x: x * 2.0, lambda x: (x * 2.0, None), lambda r, ct: (arr(7.0),))
    for g in (f, constant):
        close(grad(lambda v: vmap(g)(v).sum())(draw(3)), arr([7.0] * 3))  # noqa: B023
        close(vmap(grad(g))(draw(3)), arr([7.0] * 3))
        close(grad(lambda x: vmap(g, None, axis_size=3)(x).sum())(X), 7.0)  # noqa: B023


def test_closures():
    """Rules may close over arrays, and over tracers that are not differentiated."""
    c = draw(3)

    def outer(x, scale):
        f = custom_vjp(lambda x: (x * c * scale).sum())
        f.defvjp(lambda x: (f(x), None), lambda r, ct: (ct * c * scale * 2.0,))
        return f(x)

    g = grad(outer)
    want = 2 * np.asarray(c) * 1.3
    close(g(draw(3), T), want)
    close(jit(g)(draw(3), T), want)
    close(vmap(g, (0, None))(draw(2, 3), T), np.stack([want, want]))
    inner = lambda x: outer(x, 1.3)
    for f in (
        jit(inner),
        checkpoint(inner),
        lambda x: scan(lambda c, _: (inner(x), None), arr(0.0), length=2)[0],
    ):
        close(grad(f)(draw(3)), want)
    close(grad(lambda x: vmap(inner)(x).sum())(draw(2, 3)), np.stack([want, want]))
    close(grad(lambda x: jit(vmap(inner))(x).sum())(draw(2, 3)), np.stack([want, want]))


def test_rules_run_once():
    runs = []
    f = ruled(
        lambda x: runs.append("f") or x,
        lambda x: (runs.append("fwd") or x, None),
        lambda r, ct: (runs.append("bwd") or ct,),
    )
    grad(f)(X)
    assert runs == ["fwd", "bwd"]
    runs.clear()
    f(X)
    grad(lambda x: f(T) * x)(X)
    assert runs == ["f", "f"], "without a tangent the function itself runs"
    runs.clear()
    step = jit(grad(lambda x: scan(lambda c, _: (f(c), None), x, length=5)[0]))
    step(X)
    step(X)
    assert [runs.count(r) for r in ("fwd", "bwd")] == [1, 1]


def test_only_the_residuals_of_the_rule_are_stored():
    f = ruled(lambda x: bnp.sin(bnp.exp(x)), lambda x: (bnp.sin(bnp.exp(x)), x), lambda x, ct: (ct * x,))
    x = draw(3)
    _, _, linear = linearize_flat(lambda x: [f(x)], [x])
    assert [c is x for c in linear.consts] == [True]
    assert [e.prim.name for e in linear.eqns] == ["custom_vjp_linear"]


# -- errors ----------------------------------------------------------------------------------------


def with_bwd(bwd):
    return ruled(lambda p: p["a"] * 2.0, lambda p: (p["a"] * 2.0, p), bwd)


def with_fwd(fwd):
    return ruled(lambda p: p["a"] * 2.0, fwd, lambda r, ct: ({"a": ct, "b": None},))


BAD = {
    "fwd returns no pair": (with_fwd(lambda p: p["a"]), ("fwd rule of <lambda>", "(out, residuals)")),
    "fwd returns a triple": (with_fwd(lambda p: (p["a"], 1, 2)), ("fwd rule of <lambda>", "tuple")),
    "bwd returns no tuple": (with_bwd(lambda r, ct: ct), ("bwd rule of <lambda>", "must return a tuple")),
    "bwd returns a dictionary": (with_bwd(lambda r, ct: r), ("must return a tuple", "dict", "return (ct,)")),
    "too few cotangents": (with_bwd(lambda r, ct: ()), ("bwd rule of <lambda>", "a different structure")),
    "too many cotangents": (
        with_bwd(lambda r, ct: (r, r)),
        ("bwd rule of <lambda>", "a different structure"),
    ),
    "a different structure": (with_bwd(lambda r, ct: ({"a": ct},)), ("a different structure", "['b']")),
    "one cotangent for a dictionary": (with_bwd(lambda r, ct: (ct,)), ("a different structure",)),
    "another shape": (
        with_bwd(lambda r, ct: ({"a": ct[None], "b": None},)),
        ("f64[1]", "argument [0]['a']", "f64[]"),
    ),
    "another dtype": (
        with_bwd(lambda r, ct: ({"a": None, "b": ct.astype("float32")},)),
        ("f32[]", "argument [0]['b']", "f64[]"),
    ),
}
NO_ARRAYS = {
    "a result": (with_fwd(lambda p: ("text", 1)), ("out of the fwd rule of <lambda>", "str")),
    "a cotangent": (with_bwd(lambda r, ct: ({"a": "text", "b": ct},)), ("cotangent [0]['a']", "str")),
}
STAGED_ONLY = {
    "a different structure of the result": (
        with_fwd(lambda p: ([p["a"]], 1)),
        ("fwd rule of <lambda>", "out has a different structure from the function's result"),
    ),
    "another shape of the result": (
        with_fwd(lambda p: (p["a"][None], 1)),
        ("fwd rule of <lambda>", "out as f64[1]", "returns f64[]"),
    ),
    "another dtype of the result": (
        with_fwd(lambda p: (p["a"].astype("float32"), 1)),
        ("out as f32[]", "returns f64[]"),
    ),
}
P = {"a": X, "b": T}
MODES = {
    "grad": lambda f: grad(f)(P),
    "vjp": lambda f: vjp(f, P)[1](T),
    "jit of grad": lambda f: jit(grad(f))(P),
    "vmap of grad": lambda f: vmap(grad(f))(tree.map(lambda x: x[None], P)),
}
STAGED = {
    "grad of jit": lambda f: grad(jit(f))(P),
    "grad of vmap": lambda f: grad(lambda p: vmap(f)(p)[0])(tree.map(lambda x: x[None], P)),
    "checkpoint": lambda f: grad(checkpoint(f))(P),
    "scan": lambda f: grad(lambda p: scan(lambda c, _: (f(p), None), X, length=2)[0])(P),
}


@pytest.mark.parametrize(
    "name, mode",
    [
        *((n, m) for n in [*BAD, *NO_ARRAYS] for m in [*MODES, *STAGED]),
        *((n, m) for n in STAGED_ONLY for m in STAGED),
    ],
)
def test_rules_are_checked(name, mode):
    f, says = {**BAD, **NO_ARRAYS, **STAGED_ONLY}[name]
    with pytest.raises(errors.ArgumentError if name in NO_ARRAYS else errors.GradError) as info:
        {**MODES, **STAGED}[mode](f)
    for text in says:
        assert text in str(info.value)
    assert "test_custom_vjp.py" in info.value.where


@WRAP
def test_there_is_no_forward_mode(wrap):
    f = wrap(triple) if wrap is not WRAPS["in another rule"] else triple
    for transform in (lambda: jvp(f, (X,), (T,)), lambda: jit(lambda x: jvp(f, (x,), (x,)))(X)):
        with pytest.raises(errors.GradError, match=r"forward-mode differentiation \(jvp\) of triple") as info:
            transform()
        assert "test_custom_vjp.py" in info.value.where and "custom_jvp" in info.value.fix
    jvp(lambda x: f(T) * x, (X,), (T,))  # where it is a constant there is nothing to differentiate


@pytest.mark.parametrize("wrap", [w for name, w in WRAPS.items() if name != "in another rule"])
def test_forward_mode_of_the_function_itself(wrap):
    both = custom_vjp(triple.fun)
    both.defvjp(triple_fwd, triple_bwd, forward_mode=True)
    f, x = wrap(both), np.asarray(X)
    forward = lambda x: jvp(f, (x,), (T,))
    close(forward(X), (arr(np.sin(x)), arr(1.3 * np.cos(x))))
    close(jit(forward)(X), (arr(np.sin(x)), arr(1.3 * np.cos(x))))
    close(vmap(forward)(bnp.stack([T, X]))[1][1], 1.3 * np.cos(x))
    # reverse mode is by the rules, and of a forward derivative what that computes is differentiated
    close(grad(f)(X), 3 * np.cos(x))
    close(jvp(grad(f), (X,), (T,))[1], -3 * 1.3 * np.sin(x))
    close(grad(lambda x: forward(x)[1])(X), -1.3 * np.sin(x))


def test_forward_mode_with_respect_to_a_closure():
    def f(x, y):
        both = custom_vjp(lambda x: x * y)
        both.defvjp(lambda x: (x * y, None), lambda _, ct: (ct,), forward_mode=True)
        return both(x)

    for g in (f, jit(f)):
        close(jvp(g, (X, T), (T, X)), (arr(0.7 * 1.3), arr(1.3 * 1.3 + 0.7 * 0.7)))


def test_the_derivative_cannot_be_evaluated_forward():
    _, linear = linearize(triple, X)
    with pytest.raises(errors.GradError, match="triple"):
        linear(T)


def test_missing_rules():
    f = custom_vjp(bnp.sin)
    for use in (f, jit(f), grad(f)):
        with pytest.raises(errors.GradError, match="sin is a custom_vjp without rules") as info:
            use(X)
        assert "test_custom_vjp.py" in info.value.where and info.value.fix == "sin.defvjp(fwd, bwd)"


@pytest.mark.parametrize("wrap", [jit, checkpoint, WRAPS["vmap"], WRAPS["scan"]])
def test_no_derivative_with_respect_to_a_closure(wrap):
    """Its rules could not give one, and zero would be wrong."""
    f = lambda c: wrap(ruled(lambda x: x * c, lambda x: (x, None), lambda r, ct: (ct,)))(X)
    for transform in (lambda: grad(f)(T), lambda: jit(grad(f))(T), lambda: grad(grad(f))(T)):
        with pytest.raises(errors.ClosureError, match="closes over a value that is differentiated") as info:
            transform()
        assert "test_custom_vjp.py" in info.value.where and info.value.fix == "pass the value as an argument"


def test_a_closure_over_a_value_that_another_transform_differentiates():
    """The rules run where that transform sees them."""

    def f(c):
        g = ruled(lambda x: x * c, lambda x: (x * c, None), lambda r, ct: (ct * c * 10.0,))
        return grad(g)(X) + grad(lambda x: vmap(g)(x[None])[0])(X)

    close(grad(f)(T), 20.0)
    close(jit(grad(f))(T), 20.0)
    close(jvp(f, (T,), (T,))[1], 26.0)


# -- the peer --------------------------------------------------------------------------------------


@pytest.mark.peer
def test_against_jax():
    import jax

    def program(custom_vjp, np_, vmap, scan, vjp):
        @custom_vjp
        def norm(x, eps):
            return x / np_.sqrt((x * x).sum() + eps)

        def fwd(x, eps):
            y, pull = vjp(lambda x: x / np_.sqrt((x * x).sum() + eps), x)
            return y, (pull, y)

        norm.defvjp(fwd, lambda r, ct: (r[0](ct)[0] + 0.1 * r[1], None))

        def loss(w, xs):
            def step(h, x):
                h = norm(np_.tanh(w @ h + x), 1e-2)
                return h, h

            h, ys = scan(step, xs[0], xs)
            return (vmap(norm, (0, None))(ys, 0.5) ** 3).sum() + h.sum()

        return loss

    rng = np.random.default_rng(0)
    w, xs = rng.normal(size=(3, 3)).astype(np.float32), rng.normal(size=(4, 3)).astype(np.float32)
    ours = program(custom_vjp, bnp, vmap, scan, vjp)
    theirs = program(jax.custom_vjp, jax.numpy, jax.vmap, jax.lax.scan, jax.vjp)
    for g, h in (
        (jit(grad(ours, (0, 1))), jax.jit(jax.grad(theirs, (0, 1)))),
        (
            grad(lambda w, xs: (grad(ours)(w, xs) ** 2).sum(), (0, 1)),
            jax.jit(jax.grad(lambda w, xs: (jax.grad(theirs)(w, xs) ** 2).sum(), (0, 1))),
        ),
    ):
        for a, b in zip(g(w, xs), h(w, xs), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-4)


# -- options of the decorator and of the rules -----------------------------------------------------


def test_nondiff_argnames():
    def apply(g, x, n=3):
        return g(x) * n

    for options in (
        {"nondiff_argnames": ("g", "n")},
        {"nondiff_argnums": (2,), "nondiff_argnames": "g"},
        {"nondiff_argnums": [2, 0]},
    ):
        f = ruled(
            apply, lambda g, x, n: (g(x) * n, x), lambda g, n, x, ct: (ct * g(x) * n * 100.0,), **options
        )
        close(grad(lambda x: f(bnp.sin, x))(X), 300 * np.sin(0.7))  # noqa: B023
        close(grad(jit(lambda x: f(bnp.sin, x, n=2)))(X), 200 * np.sin(0.7))  # noqa: B023


def test_traced_nondiff_arguments_are_refused():
    f = ruled(
        lambda n, x: n * x, lambda n, x: (n * x, None), lambda n, r, ct: (ct * n,), nondiff_argnums=(0,)
    )
    close(grad(lambda x: f(T, x))(X), T)
    for use in (lambda: grad(f, 0)(T, X), lambda: jit(f)(T, X), lambda: vmap(f)(T[None], X[None])):
        with pytest.raises(
            errors.GradError, match="argument 0 of <lambda>, which is not differentiated"
        ) as info:
            use()
        assert "test_custom_vjp.py" in info.value.where and "residuals" in info.value.fix


SYMBOLIC_WRAPS = {
    "plain": same_function,
    "jit": jit,
    "checkpoint": checkpoint,
    "vmap": lambda f: lambda x, y, n: tree.map(lambda o: o[0], vmap(f, (0, 0, None))(x[None], y[None], n)),
    "jit of vmap": lambda f: jit(SYMBOLIC_WRAPS["vmap"](f)),
}


@pytest.mark.parametrize("name", SYMBOLIC_WRAPS)
def test_symbolic_zeros(name):
    """Rules know which arguments are perturbed and which cotangents are zero."""
    perturbed, cotangents = [], []

    def fwd(x, y, n):
        assert all(type(a) is CustomVJPPrimal for a in (x, y["a"], n))
        perturbed.append((x.perturbed, y["a"].perturbed, n.perturbed))
        return (x.value * 2.0, y["a"].value * 3.0), (y["a"].value if x.perturbed else None)

    def bwd(residual, cts):
        cotangents.append([type(ct) is SymbolicZero for ct in cts])
        for ct in cts:
            assert ct.shape == () and ct.dtype == np.float64
        ct_x = cts[0] if type(cts[0]) is SymbolicZero else cts[0] * 20.0
        return ct_x, {"a": instantiate(cts[1]) * 30.0}, None

    f = custom_vjp(lambda x, y, n: (x * 2.0, y["a"] * 3.0))
    f.defvjp(fwd, bwd, symbolic_zeros=True)
    g = SYMBOLIC_WRAPS[name](lambda x, y, n: f(x, {"a": y}, n))
    n = arr(1, np.int32)
    close(grad(lambda x: g(x, T, n)[0])(X), 20.0)
    assert perturbed[-1] == (True, False, False) and cotangents[-1] == [False, True]
    close(grad(lambda y: g(X, y, n)[1])(T), 30.0)
    assert perturbed[-1] == (False, True, False) and cotangents[-1] == [True, False]
    close(grad(lambda x, y: sum(g(x, y, n)), (0, 1))(X, T), (arr(20.0), arr(30.0)))
    assert perturbed[-1] == (True, True, False) and cotangents[-1] == [False, False]
    close(grad(lambda y: g(X, y, n)[0])(T), 0.0)


def test_without_symbolic_zeros_the_rules_get_arrays():
    seen = []
    f = ruled(
        lambda x, y: (x * 2.0, y),
        lambda x, y: ((x * 2.0, y), None),
        lambda r, ct: (seen.append(ct), (None, None))[1],
    )
    grad(lambda x: f(x, T)[0])(X)
    assert [float(ct) for ct in seen[0]] == [1.0, 0.0]


def test_each_run_of_the_forward_rule_has_its_own_backward_rule():
    """One staged call linearized at two points: each has its residual structure."""

    class Residual:
        def __init__(self, value, tag):
            self.value, self.tag = value, tag

    nodes.register_node(
        Residual, lambda r: ((r.value,), r.tag), lambda tag, children: Residual(children[0], tag)
    )
    runs = []

    def fwd(x):
        runs.append(x)
        return x * 1.0, Residual(x, len(runs))

    f = ruled(lambda x: x * 1.0, fwd, lambda r, ct: (ct * r.tag,))
    jaxpr = make_jaxpr(f)(X)
    pulls = [vjp(lambda x: eval_jaxpr(jaxpr, [x])[0], x)[1] for x in (X, T)]
    assert [float(pull(arr(1.0))[0]) for pull in pulls] == [1.0, 2.0]


def test_optimize_remat():
    """Under ``checkpoint`` the first pass computes no values for residuals alone."""
    for flag in (False, True):
        f = custom_vjp(lambda x: bnp.sin(x))
        f.defvjp(lambda x: (bnp.sin(x), bnp.cos(x)), lambda c, ct: (ct * c,), optimize_remat=flag)
        _, pull = vjp(checkpoint(f), X)
        close(pull(T)[0], 1.3 * np.cos(0.7))
        jaxpr = make_jaxpr(lambda x: vjp(checkpoint(f), x)[0])(X)  # noqa: B023
        assert "cos" not in str(jaxpr)


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda: custom_vjp(3), errors.ArgumentError, "takes a function"),
        (lambda: custom_vjp(bnp.sin).defvjp(None, bnp.sin), errors.ArgumentError, "takes a function"),
        (lambda: custom_vjp(bnp.sin).defvjp(bnp.sin, 1), errors.ArgumentError, "takes a function"),
        (lambda: custom_vjp(bnp.sin, nondiff_argnums="x"), errors.ArgumentError, "nondiff_argnums is an int"),
        (lambda: custom_vjp(lambda x: x, nondiff_argnames="y"), errors.ValueRangeError, "no parameter 'y'"),
        (lambda: custom_gradient(3), errors.ArgumentError, "takes a function"),
        (lambda: custom_gradient(lambda x: x)(X), errors.GradError, r"must return \(out, rule\)"),
        (lambda: grad(custom_gradient(lambda x: (x, 3)))(X), errors.GradError, r"must return \(out, rule\)"),
        (
            lambda: grad(custom_gradient(lambda x: (x, lambda ct: (ct, ct))))(X),
            errors.GradError,
            "a different structure",
        ),
        (
            lambda: grad(custom_gradient(lambda x: (x, lambda ct: draw(2))))(X),
            errors.GradError,
            "as the cotangent of argument",
        ),
    ],
)
def test_wrong_options(call, error, says):
    with pytest.raises(error, match=says) as info:
        call()
    assert "test_custom_vjp.py" in info.value.where


# -- custom_gradient -------------------------------------------------------------------------------


@WRAP
def test_custom_gradient(wrap):
    """A factor of three again; the rule closes over a residual, a number and an array."""
    c = arr(3.0)

    @custom_gradient
    def f(x):
        cos = bnp.cos(x)
        return bnp.sin(x), lambda ct: ct * cos * c

    g = wrap(f)
    x = np.asarray(X)
    close(g(X), np.sin(x))
    close(value_and_grad(g)(X), (arr(np.sin(x)), arr(3 * np.cos(x))))
    close(jit(grad(g))(X), 3 * np.cos(x))
    close(vmap(grad(g))(bnp.stack([T, X]))[1], 3 * np.cos(x))
    close(grad(lambda v: vmap(g)(v).sum())(bnp.stack([T, X]))[1], 3 * np.cos(x))
    close(grad(grad(g))(X), -3 * np.sin(x))
    close(jit(grad(grad(g)))(X), -3 * np.sin(x))


def test_custom_gradient_of_pytrees_methods_and_keywords():
    class Layer:
        @custom_gradient
        def apply(p, x, scale=2.0):
            return {"y": p["w"] * x * scale}, lambda ct: ({"w": ct["y"] * x * 10.0}, None, None)

    loss = lambda p, x: Layer.apply(x=x, p=p)["y"]
    close(Layer.apply({"w": X}, T)["y"], 0.7 * 1.3 * 2.0)
    close(grad(loss, (0, 1))({"w": X}, T), ({"w": arr(13.0)}, arr(0.0)))
    assert Layer.apply.__name__ == "apply"


def test_custom_gradients_at_two_points_of_one_jaxpr():
    """A number in a rule's closure belongs to its own run."""
    f = custom_gradient(lambda x: (x * 1.0, lambda ct: ct * x))
    jaxpr = make_jaxpr(f)(X)
    pulls = [vjp(lambda x: eval_jaxpr(jaxpr, [x])[0], x)[1] for x in (X, T)]
    close([pull(arr(1.0))[0] for pull in pulls], [X, T])


@pytest.mark.peer
def test_custom_gradient_and_symbolic_zeros_against_jax():
    import jax
    from jax.custom_derivatives import SymbolicZero as TheirZero

    def run(custom_vjp, custom_gradient, kind, np_, grad, vmap):
        seen = []
        f = custom_vjp(lambda x, y: (x * y, np_.sin(y)))

        def fwd(x, y):
            seen.append((x.perturbed, y.perturbed))
            return (x.value * y.value, np_.sin(y.value)), (x.value, y.value)

        def bwd(r, cts):
            seen.append([isinstance(ct, kind) for ct in cts])
            return (cts[0] * r[1] * 2.0, cts[0] * r[0] * 3.0)

        f.defvjp(fwd, bwd, symbolic_zeros=True)
        h = custom_gradient(lambda x: (np_.sum(x**3), lambda ct: ct * x))
        x, y = np.float32([0.5, 1.5]), np.float32(2.0)
        grads = [
            grad(lambda x: f(x, y)[0])(x[0]),
            grad(lambda y: f(x[0], y)[0])(y),
            grad(h)(x),
            vmap(grad(h))(np.stack([x, x * 2])),
        ]
        return seen, grads

    ours = run(custom_vjp, custom_gradient, SymbolicZero, bnp, grad, vmap)
    theirs = run(jax.custom_vjp, jax.custom_gradient, TheirZero, jax.numpy, jax.grad, jax.vmap)
    assert ours[0] == theirs[0]
    for g, w in zip(ours[1], theirs[1]):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-6)


def test_a_cotangent_that_a_collective_summed_is_not_summed_again():
    """Under vmap, cotangents of unmapped operands are summed, once."""

    def make(bwd):
        f = custom_vjp(lambda x, y: x * y)
        f.defvjp(lambda x, y: (x * y, (x, y)), bwd)
        return lambda x, y: vmap(f, (0, None), axis_name="i")(x, y).sum()

    x, y = arr([1.0, 2.0, 4.0]), arr(3.0)
    by_hand = make(lambda res, ct: (ct * res[1], lax.psum(ct * res[0], "i")))
    by_vmap = make(lambda res, ct: (ct * res[1], ct * res[0]))
    for f in (by_hand, by_vmap):
        close(grad(f, (0, 1))(x, y), (arr([3.0, 3.0, 3.0]), arr(7.0)))


@pytest.mark.parametrize("wrapper", [custom_jvp, custom_vjp])
def test_rules_of_a_wrapped_function_are_not_those_of_the_wrapper(wrapper):
    @custom_vjp
    def old(x):
        return x**2

    old.defvjp(lambda x: (x**2, x), lambda x, ct: (100.0 * ct,))

    @wrapper
    @functools.wraps(old)
    def new(x):
        return x**3

    with pytest.raises(errors.GradError, match="without"):
        grad(new)(1.0)
