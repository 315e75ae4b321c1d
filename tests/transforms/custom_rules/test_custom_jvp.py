"""``custom_jvp``: the rule differentiates, under every transform, checked."""

import functools
from typing import NamedTuple

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, tree
from blufunc.core.ir import dtypes
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, value_and_grad, vjp
from blufunc.transforms.autodiff.linear_transpose import linear_transpose
from blufunc.transforms.autodiff.symbolic_zeros import SymbolicZero, instantiate, zero_from_primal
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.checkpointing.policies import everything_saveable
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw


def same(got, want):
    """To the last bit."""
    close(got, want, 0)


X, T = arr(0.7), arr(1.3)


# -- the rule under each transform -----------------------------------------------------------------
# The rules below are wrong on purpose, each by a factor that ordinary differentiation would not give.


@custom_jvp
def triple(x):
    """sin, with three times its derivative."""
    return bnp.sin(x)


@triple.defjvp
def triple_rule(primals, tangents):
    (x,), (t,) = primals, tangents
    return triple(x), 3.0 * t * bnp.cos(x)


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
    "in another rule": lambda f: through_rule(f),
}
WRAP = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def vmap_of_scan(f):
    one = lambda x: scan(lambda c, x: (c, f(x)), (), bnp.stack([x, x * 2]))[1][0]
    return lambda x: vmap(one)(bnp.stack([x, x * 2]))[0]


def through_rule(f):
    @custom_jvp
    def g(x):
        return f(x)

    g.defjvp(lambda primals, tangents: jvp(f, primals, tangents))
    return g


@pytest.mark.second
@WRAP
def test_the_rule_is_used(wrap):
    f = wrap(triple)
    x, t = np.asarray(X), np.asarray(T)
    first, second, third = 3 * np.cos(x), -3 * np.sin(x), -3 * np.cos(x)
    close(f(X), np.sin(x))
    close(jvp(f, (X,), (T,)), (arr(np.sin(x)), arr(first * t)))
    close(value_and_grad(f)(X), (arr(np.sin(x)), arr(first)))
    close(linearize(f, X)[1](T), first * t)
    close(vjp(f, X)[1](T)[0], first * t)
    close(jit(grad(f))(X), first)
    close(jvp(jit(f), (X,), (T,))[1], first * t)
    close(vmap(grad(f))(bnp.stack([T, X]))[1], first)
    close(grad(lambda v: vmap(f)(v).sum())(bnp.stack([T, X]))[1], first)
    # The derivative of the rule, where the sine of the value is differentiated by the rule again.
    close(grad(grad(f))(X), second)
    close(jvp(grad(f), (X,), (T,))[1], second * t)
    close(grad(lambda x: jvp(f, (x,), (T,))[1])(X), second * t)
    close(jit(grad(grad(grad(f))))(X), third)
    close(vmap(grad(grad(f)))(bnp.stack([T, X]))[1], second)


@WRAP
def test_primals_are_bit_identical(wrap):
    f = wrap(triple)
    want = wrap(bnp.sin)(X)
    for value in (f(X), jit(f)(X), jvp(f, (X,), (T,))[0], value_and_grad(f)(X)[0], vjp(f, X)[0]):
        same(value, want)
    same(jit(value_and_grad(f))(X)[0], want)


def test_the_call_stays_whole_until_it_is_lowered():
    jaxpr = make_jaxpr(jit(lambda x: triple(x) * 2.0))(X)
    assert "custom_jvp_call" in str(jaxpr) and "rule=triple_rule" in str(jaxpr)
    lowered = str(jit(lambda x: triple(x) * 2.0).lower(X).jaxpr)
    assert "custom_jvp_call" not in lowered and "sin" in lowered
    assert "rule=triple_rule" in str(make_jaxpr(vmap(triple))(draw(2)))


def test_results_that_nobody_reads():
    """The rule returns all results, whichever are read."""

    @custom_jvp
    def f(x):
        return bnp.sin(x), bnp.cos(x), x * 2

    f.defjvp(lambda p, t: (f(*p), (t[0] * 5.0, t[0] * bnp.exp(p[0]), t[0])))
    first = lambda x: f(x)[1]
    loop = lambda x: scan(lambda c, _: (first(c), None), x, length=1)[0]
    for g in (first, jit(first), checkpoint(first), checkpoint(jit(checkpoint(first))), checkpoint(loop)):
        for _ in range(3):
            g = grad(g)
            close(g(X), np.exp(0.7))
            close(vmap(g)(X[None])[0], np.exp(0.7))


# -- Python in the function ------------------------------------------------------------------------


def test_control_flow_on_values():
    """Without staging, function and rule see values, also in nested calls."""

    @custom_jvp
    def f(x):
        return x * 2.0 if float(x) > 0 else x * 0.5

    @f.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return f(x), t * (20.0 if float(x) > 0 else 5.0)

    for x, value, slope in ((1.0, 2.0, 20.0), (-1.0, -0.5, 5.0)):
        x = arr(x)
        assert float(f(x)) == value
        assert [float(v) for v in value_and_grad(f)(x)] == [value, slope]
        assert [float(v) for v in jvp(f, (x,), (arr(1.0),))] == [value, slope]
        assert float(grad(lambda x: f(x) * f(x))(x)) == 2 * value * slope
    with pytest.raises(errors.ConcretizationError):
        jit(f)(X)


def test_rules_may_use_any_transform():
    """A rule with calls and loops is split into its primal and tangent halves."""
    impl = lambda x: bnp.sin(x) * x
    loop = lambda f: lambda x: scan(lambda c, _: (f(c) * x, None), x, length=3)[0]
    for make in (jit, checkpoint, loop, lambda f: jit(loop(jit(f))), lambda f: checkpoint(jit(f))):
        g = make(impl)
        f = through_rule(g)
        close(value_and_grad(f)(X), value_and_grad(g)(X))
        close(jit(value_and_grad(f))(X), value_and_grad(g)(X))
        close(grad(grad(f))(X), grad(grad(g))(X))
        close(vmap(grad(f))(draw(3)), vmap(grad(g))(draw(3)))
        value, linear = linearize(f, X)
        close(value, g(X))
        close(linear(T), jvp(g, (X,), (T,))[1])


# -- arguments -------------------------------------------------------------------------------------


def test_nondiff_argnums():
    @functools.partial(custom_jvp, nondiff_argnums=(0, 2))
    def apply(g, x, n):
        return g(x) * n

    @apply.defjvp
    def _(g, n, primals, tangents):
        assert n == 3 and callable(g)
        (x,), (t,) = primals, tangents
        return apply(g, x, n), t * 100.0

    f = lambda x: apply(bnp.sin, x, 3)
    close(f(X), 3 * np.sin(0.7))
    for g in (grad(f), grad(jit(f)), jit(grad(f)), lambda x: vmap(grad(f))(x[None])[0]):
        close(g(X), 100.0)
    close(grad(lambda x: apply(bnp.sin, n=3, x=x))(X), 100.0)


def test_a_negative_nondiff_argument():
    @functools.partial(custom_jvp, nondiff_argnums=(-1,))
    def power(x, n):
        return x**n

    power.defjvp(lambda n, p, t: (power(*p, n), t[0] * n))
    close(grad(lambda x: power(x, 3))(X), 3.0)


@pytest.mark.parametrize(
    "wrap", [same_function, jit, checkpoint, lambda f: lambda x, y: vmap(f)(x[None], y[None])[0]]
)
def test_defjvps(wrap):
    @custom_jvp
    def f(x, y):
        return x * y

    f.defjvps(lambda t, out, x, y: t * out * 10.0, None)
    g = wrap(f)
    close(grad(g, (0, 1))(X, T), (arr(0.91 * 10), arr(0.0)))
    close(jvp(g, (X, T), (T, T))[1], 0.91 * 10 * 1.3)
    f.defjvps(lambda t, out, x, y: t, lambda t, out, x, y: t * x)
    close(grad(wrap(f), (0, 1))(X, T), (arr(1.0), X))
    f.defjvps(None, None)
    close(grad(wrap(f), (0, 1))(X, T), (arr(0.0), arr(0.0)))


def test_defjvps_of_a_pytree():
    @custom_jvp
    def f(x, y):
        return {"a": x * y, "b": [y]}

    f.defjvps(lambda t, out, x, y: {"a": t, "b": [out["a"] * t]}, lambda t, out, x, y: {"a": t, "b": [t]})
    out, ts = jvp(f, (X, T), (arr(1.0), arr(10.0)))
    close(out, {"a": X * T, "b": [T]})
    close(ts, {"a": arr(11.0), "b": [arr(0.91 + 10)]})


class Point(NamedTuple):
    x: object
    y: object


@pytest.mark.parametrize("wrap", [same_function, jit, checkpoint, lambda f: jit(jit(f))])
def test_pytrees_and_keyword_arguments(wrap):
    @custom_jvp
    def f(p, options, scale=None):
        return Point({"s": p.x * p.y["z"]}, (options[0], None))

    @f.defjvp
    def _(primals, tangents):
        (p, o, s), (dp, do, ds) = primals, tangents
        assert isinstance(p, Point) and isinstance(dp, Point) and s is None and ds is None
        return f(p, o, s), Point({"s": dp.x * 5.0 + dp.y["z"]}, (do[0] * 7.0, None))

    p, o = Point(X, {"z": T}), [arr(2.0)]
    g = wrap(f)
    close(g(p, o), f.fun(p, o))
    loss = lambda p, o: (lambda out: out.x["s"] + out.y[0])(g(options=o, p=p))
    close(grad(loss, (0, 1))(p, o), (Point(arr(5.0), {"z": arr(1.0)}), [arr(7.0)]))
    close(jvp(loss, (p, o), (p, o))[1], 5 * 0.7 + 1.3 + 14.0)


@pytest.mark.parametrize(
    "wrap", [same_function, jit, checkpoint, lambda f: lambda n, x: vmap(f, (None, 0))(n, x[None])[0]]
)
def test_integers_have_float0_tangents(wrap):
    @custom_jvp
    def f(n, x):
        return x * n.astype("float64")

    @f.defjvp
    def _(primals, tangents):
        (n, x), (dn, dx) = primals, tangents
        assert dn.dtype == dtypes.float0
        return f(n, x), dx * 50.0

    g = wrap(f)
    close(grad(g, 1)(arr(3, np.int32), X), 50.0)
    gn, gx = grad(g, (0, 1), allow_int=True)(arr(3, np.int32), X)
    assert gn.dtype == dtypes.float0 and float(gx) == 50.0


def test_integer_results():
    @custom_jvp
    def f(x):
        return x * 2.0, bnp.floor(x).astype("int32")

    for tangent in (None, np.zeros((), dtypes.float0), 0.0):
        f.defjvp(lambda p, t, tangent=tangent: (f(*p), (t[0] * 9.0, tangent)))
        for wrap in (same_function, jit):
            (y, n), (dy, dn) = jvp(wrap(f), (arr(1.5),), (arr(1.0),))
            assert (float(y), int(n), float(dy)) == (3.0, 1, 9.0) and dn.dtype == dtypes.float0
            assert float(grad(lambda x: wrap(f)(x)[0])(arr(1.5))) == 9.0  # noqa: B023


def test_zero_tangents():
    """A rule receives zeros, no symbolic zero, and may return None for them."""
    seen = []

    @custom_jvp
    def f(x, y):
        return x * y, y

    @f.defjvp
    def _(primals, tangents):
        seen.append(tangents)
        return f(*primals), (tangents[0] * 3.0, None)

    out, ts = jvp(lambda x: f(x, T), (X,), (arr(2.0),))
    close(ts, (arr(6.0), arr(0.0)))
    assert [float(t) for t in seen[0]] == [2.0, 0.0]
    f(X, T)
    grad(lambda x: f(arr(1.0), arr(2.0))[0] * x)(X)
    assert len(seen) == 1, "without a tangent the rule is not called"
    close(grad(lambda y: f(X, y)[1] * y)(T), 1.3)


@pytest.mark.parametrize(
    "given, a, b",
    [
        ({"a": None, "b": (T, None)}, [0.0, 0.0], 1.3),
        ({"a": [None, T], "b": None}, [0.0, 1.3], 0.0),
        ({"a": None, "b": None}, [0.0, 0.0], 0.0),
        (None, [0.0, 0.0], 0.0),
    ],
)
def test_none_for_a_subtree(given, a, b):
    f = custom_jvp(lambda x: {"a": [x, x * 2], "b": (x, None)})
    f.defjvp(lambda p, t: (f(*p), given))
    for wrap in (same_function, jit, lambda f: lambda x: tree.map(lambda y: y[0], vmap(f)(x[None]))):
        close(jvp(wrap(f), (X,), (X,))[1], {"a": [arr(t) for t in a], "b": (arr(b), None)})


def test_methods():
    class Layer:
        def __init__(self, w):
            self.w = w

        @functools.partial(custom_jvp, nondiff_argnums=(0,))
        def __call__(self, x):
            return x * self.w

        @__call__.defjvp
        def rule(self, primals, tangents):
            return self(*primals), tangents[0] * self.w * 4.0

    layer = Layer(2.0)
    close(layer(X), 1.4)
    for wrap in (same_function, jit, checkpoint):
        close(grad(wrap(layer.__call__))(X), 8.0)
    assert isinstance(Layer.__dict__["__call__"], custom_jvp) and Layer.__call__ is Layer.__dict__["__call__"]


def test_names_and_documentation():
    assert triple.__name__ == "triple" and triple.__doc__.startswith("sin")
    assert triple.defjvp(triple_rule) is triple_rule


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 1), (-1, 0), (1, None)], ids=str)
def test_vmap_over_each_axis(axes):
    @custom_jvp
    def f(x, y):
        return x * y.sum(), y

    f.defjvp(lambda p, t: (f(*p), (t[0] * p[1] + t[1], t[1] * p[0])))
    at = lambda x, d, i: x if d is None else bnp.moveaxis(x, d, 0)[i]
    rows = lambda g: tree.map(
        lambda *r: bnp.stack(r), *(g(at(x, axes[0], i), at(y, axes[1], i)) for i in range(3))
    )
    x, y = draw(3, 3), draw(3, 3, seed=1)
    x, y = (a if d is not None else a[0] for a, d in zip((x, y), axes, strict=True))
    ahead = lambda x, y: jvp(f, (x, y), (x * 2, y + 1))
    back = lambda x, y: grad(lambda x, y: (f(x, y)[0] ** 2).sum() + f(x, y)[1].sum(), (0, 1))(x, y)
    for g in (f, ahead, back):
        close(vmap(g, axes)(x, y), rows(g))
        close(jit(vmap(g, axes))(x, y), rows(g))
        close(vmap(jit(g), axes)(x, y), rows(g))


def test_a_rule_that_mixes_more_than_the_function_does():
    """Results constant over the batch, with tangents that are not."""

    @custom_jvp
    def f(x, y):
        return y, arr(1.0)

    f.defjvp(lambda p, t: (f(*p), (t[0] * p[0], t[0] * p[0] * 2.0)))
    for wrap in (same_function, jit):
        out, ts = jvp(wrap(vmap(f, (0, None))), (draw(2), X), (draw(2), T))
        close(out, (bnp.stack([X, X]), arr([1.0, 1.0])))
        close(ts, (draw(2) ** 2, draw(2) ** 2 * 2))


def test_results_that_are_arguments_are_the_same_arrays():
    """Libraries test with ``is`` that a trivial conversion costs nothing."""
    first = custom_jvp(lambda x, y: x)
    first.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    x, y = arr([0.5, 2.0]), arr([1.0, 3.0])
    assert first(x, y) is x and vmap(first)(x, y) is x
    same(vmap(first, in_axes=(None, 0))(x[0], y), arr([0.5, 0.5]))


def test_closures():
    """A function may close over arrays, and over tracers that are not differentiated."""
    c = draw(3)

    def outer(x, scale):
        @custom_jvp
        def f(x):
            return (x * c * scale).sum()

        f.defjvp(lambda p, t: (f(*p), (t[0] * c * scale).sum() * 2.0))
        return f(x)

    g = grad(outer)
    want = 2 * np.asarray(c) * 1.3
    close(g(draw(3), T), want)
    close(jit(g)(draw(3), T), want)
    close(vmap(g, (0, None))(draw(2, 3), T), np.stack([want, want]))
    close(grad(lambda x: jit(lambda x: outer(x, 1.3))(x))(draw(3)), want)
    close(grad(lambda x: vmap(lambda x: outer(x, 1.3))(x).sum())(draw(2, 3)), np.stack([want, want]))
    close(grad(checkpoint(lambda x: outer(x, 1.3)))(draw(3)), want)


# -- errors ----------------------------------------------------------------------------------------


def ruled(rule, fun=lambda x: x * 2.0):
    f = custom_jvp(fun)
    f.defjvp(rule)
    return f


BAD_RULES = {
    "no pair": (lambda p, t: p[0], ("must return (out, out_tangent)",)),
    "a triple": (lambda p, t: (p[0], t[0], t[0]), ("must return (out, out_tangent)", "tuple")),
    "one tangent for two": (lambda p, t: ([p[0], p[0]], t[0]), ("a different structure",)),
    "a different structure of the tangent": (
        lambda p, t: (p[0], [t[0]]),
        ("jvp rule of <lambda>", "out_tangent has a different structure from out"),
    ),
    "another shape of the tangent": (
        lambda p, t: (p[0], bnp.stack([t[0], t[0]])),
        ("jvp rule of <lambda>", "tangent f64[2]", "result f64[]"),
    ),
    "another dtype of the tangent": (
        lambda p, t: (p[0], t[0].astype("float32")),
        ("tangent f32[]", "result f64[]"),
    ),
    "no array": (lambda p, t: (p[0], "text"), ("tangent from the jvp rule", "str")),
}
STAGED_RULES = {
    "a different structure of the result": (
        lambda p, t: ([p[0]], [t[0]]),
        ("out has a different structure from the function's result",),
    ),
    "another shape of the result": (
        lambda p, t: (bnp.stack([p[0], p[0]]),) * 2,
        ("jvp rule of <lambda>", "out as f64[2]", "returns f64[]"),
    ),
    "another dtype of the result": (
        lambda p, t: (p[0].astype("float32"), t[0].astype("float32")),
        ("out as f32[]", "returns f64[]"),
    ),
}
MODES = {
    "jvp": lambda f: jvp(f, (X,), (T,)),
    "grad": lambda f: grad(f)(X),
    "jit of grad": lambda f: jit(grad(f))(X),
    "linearize": lambda f: linearize(f, X),
}
STAGED = {
    "grad of jit": lambda f: grad(jit(f))(X),
    "jvp of jit": lambda f: jvp(jit(f), (X,), (T,)),
    "jvp of vmap": lambda f: jvp(vmap(f), (X[None],), (X[None],)),
    "checkpoint": lambda f: grad(checkpoint(f))(X),
    "scan": lambda f: grad(lambda x: scan(lambda c, _: (f(c), None), x, length=2)[0])(X),
}


@pytest.mark.parametrize(
    "name, mode",
    [
        *((n, m) for n in BAD_RULES for m in [*MODES, *STAGED]),
        *((n, m) for n in STAGED_RULES for m in STAGED),
    ],
)
def test_rules_are_checked(name, mode):
    rule, says = {**BAD_RULES, **STAGED_RULES}[name]
    error = errors.ArgumentError if name == "no array" else errors.GradError
    with pytest.raises(error) as info:
        {**MODES, **STAGED}[mode](ruled(rule))
    for text in says:
        assert text in str(info.value)
    assert "test_custom_jvp.py" in info.value.where


def test_a_missing_rule():
    f = custom_jvp(bnp.sin)
    for use in (f, jit(f), grad(f)):
        with pytest.raises(errors.GradError, match="sin is a custom_jvp without a rule") as info:
            use(X)
        assert "test_custom_jvp.py" in info.value.where and info.value.fix == "@sin.defjvp"


def test_defjvps_takes_a_rule_for_each_argument():
    f = custom_jvp(lambda x, y: x * y)
    f.defjvps(lambda t, out, x, y: t)
    with pytest.raises(
        errors.GradError, match=r"gave <lambda> 1 rules, and it is called with 2 arguments"
    ) as info:
        grad(f)(X, T)
    assert "test_custom_jvp.py" in info.value.where
    with pytest.raises(errors.GradError, match="nondiff_argnums") as info:
        custom_jvp(lambda n, x: x, nondiff_argnums=(0,)).defjvps(None)
    assert "test_custom_jvp.py" in info.value.where


@pytest.mark.parametrize("wrap", [jit, checkpoint, WRAPS["vmap"], WRAPS["scan"]])
def test_no_derivative_with_respect_to_a_closure(wrap):
    """Its rule could not give one, and zero would be wrong."""
    f = lambda c: wrap(ruled(lambda p, t: (p[0], t[0]), lambda x: x * c))(X)
    for transform in (lambda: jvp(f, (T,), (T,)), lambda: grad(f)(T), lambda: jit(grad(f))(T)):
        with pytest.raises(errors.ClosureError, match="closes over a value that is differentiated") as info:
            transform()
        assert "test_custom_jvp.py" in info.value.where and info.value.fix == "pass the value as an argument"


def test_a_closure_over_a_value_that_another_transform_differentiates():
    """The rule runs where that transform sees it."""

    def f(c):
        g = ruled(lambda p, t: (p[0] * c, t[0] * c * 10.0), lambda x: x * c)
        return grad(g)(X) + grad(lambda x: vmap(g)(x[None])[0])(X)

    close(grad(f)(T), 20.0)
    close(jit(grad(f))(T), 20.0)


def test_arguments_that_are_no_arrays():
    with pytest.raises(errors.ArgumentError, match=r"the argument x\['a'\] is a str") as info:
        grad(lambda y: ruled(lambda p, t: (p, t), lambda x: x["b"])({"a": "text", "b": y}))(X)
    assert "test_custom_jvp.py" in info.value.where
    with pytest.raises(errors.ArgumentError, match="by keyword only") as info:
        ruled(lambda p, t: (p, t), lambda x, *, y: x)(X, y=X)
    assert "test_custom_jvp.py" in info.value.where


# -- the peer --------------------------------------------------------------------------------------


@pytest.mark.peer
def test_against_jax():
    import jax

    def program(custom_jvp, np_, vmap, scan):
        @custom_jvp
        def log1pexp(x):
            return np_.log(1.0 + np_.exp(x))

        @log1pexp.defjvp
        def _(primals, tangents):
            (x,), (t,) = primals, tangents
            return log1pexp(x), (1.0 - 1.0 / (1.0 + np_.exp(x))) * t

        return lambda x: scan(lambda c, a: (log1pexp(c * a), None), np_.sum(x), vmap(log1pexp)(x))[0]

    x = np.linspace(-2, 2, 5).astype(np.float32)
    ours = program(custom_jvp, bnp, vmap, scan)
    theirs = program(jax.custom_jvp, jax.numpy, jax.vmap, jax.lax.scan)
    for order in (lambda f, grad, jvp: grad(f)(x), lambda f, grad, jvp: jvp(grad(f), (x,), (x,))[1]):
        np.testing.assert_allclose(
            np.asarray(order(ours, grad, jvp)),
            np.asarray(order(theirs, jax.grad, jax.jvp)),
            rtol=1e-4,
            atol=1e-6,
        )


# -- options of the decorator and of the rule ------------------------------------------------------


def test_nondiff_argnames():
    def apply(g, x, n=3):
        return g(x) * n

    def rule(g, n, primals, tangents):
        (x,), (t,) = primals, tangents
        return apply(g, x, n), t * 100.0 * n

    for options in (
        {"nondiff_argnames": ("g", "n")},
        {"nondiff_argnames": ["n", "g"]},
        {"nondiff_argnums": (2,), "nondiff_argnames": "g"},
        {"nondiff_argnums": (2, 0)},
        {"nondiff_argnums": [0, 2], "nondiff_argnames": ("n",)},
        {"nondiff_argnums": (-1, 0)},
    ):
        f = custom_jvp(apply, **options)
        f.defjvp(rule)
        close(grad(lambda x: f(bnp.sin, x))(X), 300.0)  # noqa: B023
        close(grad(jit(lambda x: f(bnp.sin, x, n=2)))(X), 200.0)  # noqa: B023
    one = custom_jvp(apply, 0)
    one.defjvp(lambda g, p, t: (one(g, *p), t[0] * 7.0))
    close(grad(lambda x: one(bnp.sin, x, 1.0))(X), 7.0)


@pytest.mark.parametrize("wrap", [same_function, jit, checkpoint, WRAPS["vmap"], WRAPS["scan"]])
def test_traced_nondiff_arguments_are_constants(wrap):
    f = custom_jvp(lambda n, x: x * n, nondiff_argnums=(0,))
    f.defjvp(lambda n, p, t: (f(n, *p), t[0] * n * 10.0))
    close(grad(wrap(lambda x: f(x, x)))(X), 7.0)
    close(grad(wrap(lambda n: f(n, T)))(X), 0.0)
    close(grad(lambda n: jit(lambda x: f(n, x))(T))(X), 0.0)
    close(jit(grad(wrap(lambda x: f(x * 2.0, x))))(X), 14.0)


@pytest.mark.parametrize("wrap", [same_function, jit, WRAPS["vmap"]])
def test_a_linear_function_can_be_transposed(wrap):
    """Its rule has nothing to add: what is transposed is linear."""
    f = custom_jvp(lambda x: x * 3.0)
    f.defjvp(lambda p, t: (f(*p), t[0] * 10.0))
    close(linear_transpose(wrap(f), X)(T)[0], 3.9)


SYMBOLIC_WRAPS = {
    "plain": lambda f: f,
    "jit": jit,
    "checkpoint": checkpoint,
    "vmap": lambda f: lambda x, y, n: tree.map(lambda o: o[0], vmap(f, (0, 0, None))(x[None], y[None], n)),
    "jit of vmap": lambda f: jit(SYMBOLIC_WRAPS["vmap"](f)),
}


@pytest.mark.parametrize("name", SYMBOLIC_WRAPS)
def test_symbolic_zeros(name):
    seen = []

    @custom_jvp
    def f(x, y, n):
        return x * 2.0, y * 3.0

    def rule(primals, tangents):
        seen.append(tangents)
        tx, ty, tn = tangents
        assert type(tn) is SymbolicZero and tn.dtype == dtypes.float0
        for p, t in zip(primals[:2], (tx, ty)):
            assert t.shape == p.shape == () and t.dtype == p.dtype and t.aval.shape == ()
        out = f(*primals)
        return out, (tx if type(tx) is SymbolicZero else tx * 20.0, instantiate(ty) * 30.0)

    assert f.defjvp(rule, symbolic_zeros=True) is rule
    g = SYMBOLIC_WRAPS[name](f)
    n = arr(1, np.int32)
    out, ts = jvp(lambda x: g(x, T, n), (X,), (arr(1.0),))
    close(out, (X * 2.0, T * 3.0))
    close(ts, (arr(20.0), arr(0.0)))
    assert [type(t) is SymbolicZero for t in seen[-1]] == [False, True, True]
    close(jvp(lambda y: g(X, y, n), (X,), (arr(1.0),))[1], (arr(0.0), arr(30.0)))
    assert [type(t) is SymbolicZero for t in seen[-1]] == [True, False, True]
    close(grad(lambda x, y: sum(g(x, y, n)), (0, 1))(X, T), (arr(20.0), arr(30.0)))
    close(grad(lambda x: g(x, T, n)[0] * g(x, T, n)[0])(X), 2 * 1.4 * 20.0)


def test_symbolic_zeros_are_leaves_that_say_what_they_are():
    z = zero_from_primal(draw(2, 3), symbolic_zeros=True)
    assert type(z) is SymbolicZero and tree.leaves(z) == [z]
    assert (z.shape, z.ndim, z.size, z.dtype) == ((2, 3), 2, 6, np.float64)
    assert repr(z) == "SymbolicZero(f64[2,3])"
    close(z.instantiate(), arr(np.zeros((2, 3))))
    close(instantiate(X), X)
    close(zero_from_primal(draw(2)), arr(np.zeros(2)))
    assert zero_from_primal(arr(1, np.int32)).dtype == dtypes.float0
    with pytest.raises(errors.ArgumentError, match="SymbolicZero, which is not an array"):
        bnp.sin(z)


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda: custom_jvp(3), errors.ArgumentError, "takes a function"),
        (lambda: custom_jvp(bnp.sin).defjvp(None), errors.ArgumentError, "takes a function"),
        (lambda: custom_jvp(bnp.sin, nondiff_argnums="x"), errors.ArgumentError, "nondiff_argnums is an int"),
        (
            lambda: custom_jvp(bnp.sin, nondiff_argnums=(1.5,)),
            errors.ArgumentError,
            "nondiff_argnums is an int",
        ),
        (
            lambda: custom_jvp(bnp.sin, nondiff_argnames=3),
            errors.ArgumentError,
            "nondiff_argnames holds names",
        ),
        (lambda: custom_jvp(lambda x: x, nondiff_argnames="y"), errors.ValueRangeError, "no parameter 'y'"),
    ],
)
def test_wrong_options(call, error, says):
    with pytest.raises(error, match=says) as info:
        call()
    assert "test_custom_jvp.py" in info.value.where and info.value.fix


@pytest.mark.peer
def test_symbolic_zeros_against_jax():
    import jax
    from jax.custom_derivatives import SymbolicZero as theirs

    def run(custom_jvp, kind, jvp, np_, jit):
        seen = []

        @custom_jvp
        def f(x, y):
            return x * y

        def rule(primals, tangents):
            seen.append([isinstance(t, kind) for t in tangents])
            return f(*primals), tangents[0] * 5.0

        f.defjvp(rule, symbolic_zeros=True)
        y = np_.float32(2.0)
        for wrap in (lambda f: f, jit):
            jvp(wrap(lambda x: f(x, y)), (np_.float32(1.0),), (np_.float32(1.0),))
            jvp(wrap(lambda x: f(x, x)), (np_.float32(1.0),), (np_.float32(1.0),))
        return seen

    assert run(custom_jvp, SymbolicZero, jvp, np, jit) == run(jax.custom_jvp, theirs, jax.jvp, np, jax.jit)
