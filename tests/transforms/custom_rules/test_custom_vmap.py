"""``custom_vmap``: the rule batches, under every transform, derivatives too."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax, tree
from blufunc.debug import callback
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, value_and_grad, vjp
from blufunc.transforms.autodiff.jacobian import hessian, jacfwd, jacrev
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.custom_rules.custom_vmap import custom_vmap, sequential_vmap
from blufunc.transforms.staging.callback import effects_barrier, io_callback
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw

X, T = arr(0.7), arr(1.3)


# A rule that is wrong on purpose, by a factor: it shows where it was used.


@custom_vmap
def sine(x):
    """sin; over a batch, three times sin."""
    return bnp.sin(x)


@sine.def_vmap
def sine_rule(axis_size, in_batched, x):
    assert in_batched == (True,)
    return 3.0 * bnp.sin(x), True


same_function = lambda f: f
WRAPS = {
    "plain": same_function,
    "jit": jit,
    "jit of jit": lambda f: jit(lambda x: jit(f)(x)),
    "checkpoint": checkpoint,
    "scan": lambda f: lambda x: scan(lambda c, _: (f(x), None), x, length=2)[0],
    "scan over xs": lambda f: lambda x: scan(lambda c, x: (c, f(x)), (), bnp.stack([x, x * 2]))[1][0],
    "checkpoint in jit": lambda f: jit(checkpoint(f)),
}
WRAP = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


@WRAP
def test_without_a_batch_the_function_is_used(wrap):
    f = wrap(sine)
    s, c = np.sin(0.7), np.cos(0.7)
    close(f(X), s)
    close(jvp(f, (X,), (T,)), (arr(s), arr(c * 1.3)))
    close(value_and_grad(f)(X), (arr(s), arr(c)))
    close(jit(grad(f))(X), c)
    close(linearize(f, X)[1](T), c * 1.3)
    close(vjp(f, X)[1](T)[0], c * 1.3)
    close(grad(grad(f))(X), -s)
    close(jvp(grad(f), (X,), (T,))[1], -s * 1.3)
    close(jit(grad(grad(grad(f))))(X), -c)


@WRAP
def test_over_a_batch_the_rule_is_used(wrap):
    f = wrap(sine)
    x = draw(4)
    s, c = np.sin(np.asarray(x)), np.cos(np.asarray(x))
    close(vmap(f)(x), 3 * s)
    close(jit(vmap(f))(x), 3 * s)
    close(vmap(jit(f))(x), 3 * s)
    close(jvp(vmap(f), (x,), (x,)), (arr(3 * s), arr(3 * c * np.asarray(x))))
    close(grad(lambda x: vmap(f)(x).sum())(x), 3 * c)
    # The derivative of the function over a batch is the derivative of the rule.
    close(vmap(lambda x, t: jvp(f, (x,), (t,))[1])(x, x), 3 * c * np.asarray(x))
    close(vmap(grad(f))(x), 3 * c)
    close(jit(vmap(grad(f)))(x), 3 * c)
    close(vmap(grad(grad(f)))(x), -3 * s)
    close(vmap(jvp_of_grad(f))(x), -3 * s)
    close(grad(lambda x: vmap(grad(f))(x).sum())(x), -3 * s)
    close(vmap(lambda x: vjp(f, x)[1](T)[0])(x), 3 * c * 1.3)


def jvp_of_grad(f):
    return lambda x: jvp(grad(f), (x,), (bnp.ones_like(x),))[1]


def test_nested_vmap_runs_the_rule_once_for_each():
    seen = []

    @custom_vmap
    def f(x, y):
        return x * y

    @f.def_vmap
    def _(axis_size, in_batched, x, y):
        seen.append((axis_size, in_batched, x.shape, y.shape))
        return f(x, y) * 10.0, True  # batched again by the vmap around

    x, y = draw(2, 3), draw(3, seed=1)
    close(vmap(vmap(f), (0, None))(x, y), x * y * 100.0)
    assert seen == [(3, (True, True), (3,), (3,)), (2, (True, False), (2, 3), (3,))]


def test_pytrees_and_arguments_that_are_not_batched():
    seen = []

    @custom_vmap
    def f(p, n, scale=None):
        return {"a": p["a"] * n.astype("float64"), "b": [p["b"], None]}

    @f.def_vmap
    def _(axis_size, in_batched, p, n, scale):
        seen.append(in_batched)
        out = {"a": p["a"] * n.astype("float64") * 5.0, "b": [p["b"], None]}
        return out, {"a": True, "b": [in_batched[0]["b"], None]}

    p, n = {"a": draw(3, 2), "b": draw(2)}, arr(4, np.int32)
    out = vmap(f, ({"a": 1, "b": None}, None))(p, n)
    assert seen == [({"a": True, "b": False}, False, None)]
    close(out["a"], p["a"].T * 20.0)
    close(out["b"], [bnp.stack([p["b"]] * 2), None])
    loss = lambda p: f(n=n, p=p)["a"].sum() + (f(p, n)["b"][0] ** 2).sum()
    g = vmap(grad(loss), ({"a": 1, "b": None},))(p)
    close(g["a"], np.full((2, 3), 20.0))
    close(g["b"], bnp.stack([2 * p["b"]] * 2))
    total = grad(lambda p: vmap(loss, ({"a": 1, "b": None},))(p).sum())(p)
    close(total, {"a": arr(np.full((3, 2), 20.0)), "b": 4 * p["b"]})


@pytest.mark.second
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 0), (-1, None)], ids=str)
def test_a_right_rule_changes_nothing(axes):
    """All derivatives over all axes: primal, tangent or both batched."""
    plain = lambda x, y: (bnp.sin(x) @ y, y * x.sum())
    f = custom_vmap(plain)
    calls = []

    @f.def_vmap
    def _(axis_size, in_batched, x, y):
        calls.append(in_batched)
        out = vmap(plain, tuple(0 if b else None for b in in_batched))(x, y)
        return out, (True, True)

    x = draw(3, 3) if axes[0] is not None else draw(3)
    y = draw(3, 3, seed=1) if axes[1] is not None else draw(3, seed=1)
    loss = lambda f: lambda x, y: (f(x, y)[1] ** 2).sum() * f(x, y)[0]
    for make in (
        lambda f: f,
        lambda f: lambda x, y: jvp(f, (x, y), (y, x)),
        lambda f: lambda x, y: jvp(lambda x: f(x, T * y), (x,), (x * x,)),
        lambda f: grad(loss(f), (0, 1)),
        lambda f: grad(loss(f)),
        lambda f: grad(lambda x, y: (grad(loss(f), 1)(x, y) ** 2).sum(), (0, 1)),
        lambda f: jacfwd(f, (0, 1)),
        lambda f: jacrev(f, 1),
    ):
        want = vmap(make(plain), axes)(x, y)
        calls.clear()
        close(vmap(make(f), axes)(x, y), want, 1e-10)
        assert calls
        close(jit(vmap(make(f), axes))(x, y), want, 1e-10)
        close(vmap(make(jit(f)), axes)(x, y), want, 1e-10)
    summed = lambda f: grad(lambda x, y: vmap(loss(f), axes)(x, y).sum(), (0, 1))
    close(summed(f)(x, y), summed(plain)(x, y), 1e-10)
    one = (x if axes[0] is None else x[0], y if axes[1] is None else y[0])
    close(jacfwd(f, (0, 1))(*one), jacrev(plain, (0, 1))(*one), 1e-10)
    close(
        hessian(lambda x: loss(f)(x, one[1]))(one[0]),
        hessian(lambda x: loss(plain)(x, one[1]))(one[0]),
        1e-10,
    )


def test_constant_results_and_unused_arguments():
    f = custom_vmap(lambda x, n: (arr(2.0), n + 1, x * 3.0))
    f.def_vmap(lambda size, batched, x, n: ((arr(2.0), n + 1, x * 3.0), (False, batched[1], batched[0])))
    n = arr(1, np.int32)
    out = vmap(f, (0, None))(draw(3), n)
    close(out, (arr([2.0] * 3), arr([2] * 3, np.int32), draw(3) * 3.0))
    close(grad(lambda x: vmap(f, (0, None))(x, n)[2].sum())(draw(3)), arr([3.0] * 3))
    close(vmap(grad(lambda x, n: f(x, n)[0]), (0, None))(draw(3), n), arr([0.0] * 3))


def test_the_call_stays_whole_until_it_is_lowered():
    jaxpr = str(make_jaxpr(jit(lambda x: sine(x) * 2.0))(X))
    assert "custom_vmap_call" in jaxpr and "name=sine" in jaxpr and "rule=sine" in jaxpr
    assert "custom_vmap_call" not in str(jit(lambda x: sine(x) * 2.0).lower(X).jaxpr)
    assert "custom_vmap_call" not in str(make_jaxpr(vmap(sine))(draw(2)))
    assert "custom_vmap_call" in str(make_jaxpr(grad(sine))(X))


def test_python_in_the_function_and_methods():
    class Layer:
        @custom_vmap
        def double(x):
            return x * 2.0

        double.def_vmap(lambda size, batched, x: (x * 20.0, True))

    f = custom_vmap(lambda x: x * 2.0 if float(x) > 0 else x)
    f.def_vmap(lambda size, batched, x: (x, True))
    assert float(f(arr(1.0))) == 2.0 and float(f(arr(-1.0))) == -1.0
    with pytest.raises(errors.ConcretizationError):
        jit(f)(X)
    close(vmap(Layer.double)(draw(2)), draw(2) * 20.0)
    assert (
        sine.__name__ == "sine" and sine.__doc__.startswith("sin") and sine.def_vmap(sine_rule) is sine_rule
    )


def test_closures():
    """Closures: arrays, outer tracers, and differentiated values without a batch."""
    c = draw(3)

    def outer(x, scale):
        f = custom_vmap(lambda x: (x * c * scale).sum())
        f.def_vmap(lambda size, batched, x: ((x * c * scale).sum(1) * 2.0, True))
        return f

    for g in (same_function, jit):
        close(g(lambda x, s: outer(x, s)(x))(draw(3), T), (draw(3) * c).sum() * T)
        close(g(lambda x, s: vmap(outer(x, s))(x))(draw(2, 3), T), (draw(2, 3) * c).sum(1) * T * 2.0)
        close(grad(g(lambda s: outer(X, s)(draw(3))))(T), (draw(3) * c).sum())
        close(grad(g(lambda s: vmap(outer(X, s))(draw(2, 3)).sum()))(T), (draw(2, 3) * c).sum() * 2.0)
    x = draw(2, 3)
    # the outer vmap's value is a constant of the inner one
    got = vmap(lambda s: vmap(lambda x: outer(x, s)(x))(x))(arr([1.0, 2.0]))
    close(got, bnp.stack([(x * c).sum(1) * 2.0, (x * c).sum(1) * 4.0]))


def test_effects_happen_once():
    """Reverse mode recomputes function and rule: reports once, no other effects."""
    seen = []

    def noisy(tag):
        def f(x):
            callback(lambda x: seen.append(tag), x)
            return bnp.sin(x)

        return f

    f = custom_vmap(noisy("function"))
    f.def_vmap(lambda size, batched, x: (noisy("rule")(x), True))
    for g in (grad(f), jit(grad(f)), lambda x: jvp(f, (x,), (x,))):
        seen.clear()
        g(X)
        effects_barrier()
        assert seen == ["function"]
    for g in (vmap(grad(f)), lambda x: grad(lambda x: vmap(f)(x).sum())(x)):
        seen.clear()
        close(g(draw(2)), np.cos(np.asarray(draw(2))))
        effects_barrier()
        assert seen == ["rule"]
    acting = custom_vmap(lambda x: io_callback(lambda x: x, X, x) * x)
    acting.def_vmap(lambda size, batched, x: (x, True))
    with pytest.raises(errors.UnsupportedError, match="custom_vmap with the effects io") as info:
        grad(acting)(X)
    assert "test_custom_vmap.py" in info.value.where


def test_sequential_vmap():
    seen = []

    @sequential_vmap
    def f(x, y):
        seen.append(x.shape)
        return {"s": bnp.sin(x) * y, "y": y}

    plain = lambda x, y: {"s": bnp.sin(x) * y, "y": y}
    x, y = draw(4, 3), draw(3, seed=1)
    close(f(x, x), plain(x, x))
    want = vmap(plain, (0, None))(x, y)
    seen.clear()
    close(vmap(f, (0, None))(x, y), want)
    assert set(seen) == {(3,)}
    assert [e.prim.name for e in make_jaxpr(vmap(f, (0, None)))(x, y).eqns] == ["scan"]
    close(jit(vmap(f, (0, None)))(x, y), want)
    close(vmap(vmap(f), (0, None))(x, y), want)
    loss = lambda f: lambda x, y: (f(x, y)["s"] ** 2).sum()
    close(vmap(grad(loss(f), (0, 1)), (0, None))(x, y), vmap(grad(loss(plain), (0, 1)), (0, None))(x, y))
    total = lambda f: grad(lambda x, y: vmap(loss(f), (0, None))(x, y).sum(), (0, 1))
    close(total(f)(x, y), total(plain)(x, y))
    close(vmap(sequential_vmap(lambda x: x * 2.0), 1)(x), x.T * 2.0)
    with pytest.raises(errors.ArgumentError, match="takes a function"):
        sequential_vmap(3)


# -- errors ----------------------------------------------------------------------------------------


def ruled(rule, fun=lambda x: {"y": x * 2.0}):
    f = custom_vmap(fun)
    f.def_vmap(rule)
    return f


BAD_RULES = {
    "no pair": (lambda n, b, x: x, errors.TreeError, "must return (out, out_batched)"),
    "a different structure": (lambda n, b, x: (x, True), errors.TreeError, "out has a different structure"),
    "flags": (lambda n, b, x: ({"y": x}, True), errors.TreeError, "out_batched has a different structure"),
    "no flag": (lambda n, b, x: ({"y": x}, {"y": 1.5}), errors.ArgumentError, "out_batched with 1.5"),
    "no batch": (lambda n, b, x: ({"y": x[0]}, {"y": True}), errors.ShapeError, "out['y'] as f64[]"),
    "a batch": (lambda n, b, x: ({"y": x}, {"y": False}), errors.ShapeError, "out['y'] as f64[2]"),
    "dtype": (lambda n, b, x: ({"y": x.astype("float32")}, {"y": True}), errors.ShapeError, "f32[2]"),
    "no array": (lambda n, b, x: ({"y": "a"}, {"y": True}), errors.ArgumentError, "not an array"),
}


@pytest.mark.parametrize("name", BAD_RULES)
@pytest.mark.parametrize("wrap", [same_function, jit, lambda f: jvp_wrap(f)], ids=["vmap", "jit", "jvp"])
def test_rules_are_checked(name, wrap):
    rule, error, says = BAD_RULES[name]
    with pytest.raises(error) as info:
        vmap(wrap(ruled(rule)))(draw(2))
    assert says in str(info.value) and "test_custom_vmap.py" in info.value.where


def jvp_wrap(f):
    return lambda x: jvp(f, (x,), (x,))


def test_other_errors():
    missing = custom_vmap(bnp.sin)
    for use in (missing, vmap(missing), jit(missing)):
        with pytest.raises(errors.ArgumentError, match="sin is a custom_vmap without a rule") as info:
            use(draw(2))
        assert "test_custom_vmap.py" in info.value.where and info.value.fix == "@sin.def_vmap"
    for call in (lambda: custom_vmap(3), lambda: missing.def_vmap(3)):
        with pytest.raises(errors.ArgumentError, match="takes a function"):
            call()
    with pytest.raises(errors.ArgumentError, match=r"the argument x\['a'\] is a str"):
        vmap(lambda y: ruled(lambda n, b, x: (x, b), lambda x: x["b"])({"a": "text", "b": y}))(draw(2))


def test_no_batch_of_a_closure():
    f = lambda x, c: ruled(lambda n, b, x: (x, True), lambda x: x * c)(x)
    for g in (lambda: vmap(f)(draw(2), draw(2)), lambda: jit(vmap(jit(f), (None, 0)))(X, draw(2))):
        with pytest.raises(
            errors.UnsupportedError, match="closes over a value that is mapped by vmap"
        ) as info:
            g()
        assert "test_custom_vmap.py" in info.value.where and info.value.fix == "pass the value as an argument"
    with pytest.raises(errors.UnsupportedError, match="closes over a value that is differentiated"):
        vmap(lambda x: grad(lambda c: f(x, c))(T))(draw(2))


# -- the peer --------------------------------------------------------------------------------------


@pytest.mark.peer
def test_against_jax():
    import jax
    from jax.custom_batching import custom_vmap as theirs_of

    def program(custom_vmap, np_, vmap, jvp):
        @custom_vmap
        def f(x, y):
            return np_.sin(x) * y, y + 1

        @f.def_vmap
        def _(axis_size, in_batched, x, y):
            assert axis_size == 3 and list(in_batched) == [True, False]
            return (np_.cos(x) * y, y * 2), (True, False)

        g = lambda x, y: jvp(f, (x, y), (x * 2, np_.ones_like(y)))
        return lambda x, y: (
            vmap(f, (0, None))(x, y),
            jvp(lambda x: vmap(f, (0, None))(x, y), (x,), (x,)),
            g(x, y),
        )

    x, y = np.float32([0.1, 0.2, 0.3]), np.float32(0.7)
    got = program(custom_vmap, bnp, vmap, jvp)(x, y)
    want = program(theirs_of, jax.numpy, jax.vmap, jax.jvp)(x, y)
    for g, w in zip(tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-5)


def test_lax_functions_in_a_rule():
    f = custom_vmap(lambda x: bnp.sin(x))
    f.def_vmap(lambda size, batched, x: (lax.rev(x, (0,)), True))
    close(vmap(f)(draw(3)), draw(3)[::-1])
