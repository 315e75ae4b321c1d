"""``Transform``: rules reach every operation, and transforms compose with it.

The main witness is forward mode itself, written as a user would: a box is a value with its tangent, and the default
rule asks each primitive for its jvp. What it gives is compared with ``jvp`` on all programs with control flow.
"""

import dataclasses
import functools
import threading
from typing import NamedTuple

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, extend, lax, testing, tree
from blufunc.core.ir import dtypes
from tests.transforms.common import arr, close, draw
from tests.transforms.programs import LAX, PROGRAMS, floats_of

X = arr([0.3, -0.7, 1.2])


# -- forward mode as a user's transform ------------------------------------------------------------


class Dual(NamedTuple):
    value: bf.Array
    tangent: bf.Array


def with_zero(x):
    """A constant; what has no tangents stays as it is."""
    return Dual(x, bnp.zeros_like(x)) if dtypes.is_inexact(x.dtype) else x


dual = bf.Transform("dual", box=Dual, lift=with_zero)


@dual.default
def differentiate(prim, *xs, **params):
    values = [x.value if isinstance(x, Dual) else x for x in xs]
    tangents = [x.tangent if isinstance(x, Dual) else extend.zero(x.aval) for x in xs]
    outs, ts = prim.jvp(values, tangents, **params)
    if not prim.multiple_results:
        return boxed(outs, ts)
    return [boxed(x, t) for x, t in zip(outs, ts, strict=True)]


def boxed(x, t):
    return Dual(x, extend.instantiate(t)) if dtypes.is_inexact(x.dtype) else x


def is_dual(x):
    return isinstance(x, Dual)


def by_dual(f):
    """``jvp`` by the transform: values and tangents of inexact results."""

    def run(xs, ts):
        found = tree.leaves(dual(f)([Dual(x, t) for x, t in zip(xs, ts, strict=True)]), is_leaf=is_dual)
        pairs = [x if is_dual(x) else with_zero(bnp.asarray(x)) for x in found]
        return [p for p in pairs if is_dual(p)]

    return run


def by_jvp(f):
    def run(xs, ts):
        outs, out_ts = bf.jvp(f, (xs,), (ts,))
        pairs = zip(tree.leaves(outs), tree.leaves(out_ts), strict=True)
        return [Dual(x, t) for x, t in pairs if dtypes.is_inexact(x.dtype)]

    return run


def problem(program):
    """A program as a function of the list of its floats, a point and a direction."""
    args = program.args(0)
    xs, with_floats = floats_of(args)
    ts = [draw(*x.shape, seed=i + 20).astype(x.dtype) for i, x in enumerate(xs)]
    return (lambda xs: program.run(LAX, *with_floats(xs))), xs, ts


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", PROGRAMS)
def test_forward_mode_of_programs(name):
    f, xs, ts = problem(PROGRAMS[name])
    want = by_jvp(f)(xs, ts)
    close(by_dual(f)(xs, ts), want)
    close(bf.jit(by_dual(f))(xs, ts), want)
    close(by_dual(bf.jit(f))(xs, ts), want)
    close(by_dual(bf.checkpoint(f))(xs, ts), want)


@pytest.mark.parametrize("name", PROGRAMS)
def test_reverse_over_forward(name):
    """The derivative of what the rules compute."""
    program = PROGRAMS[name]
    f, xs, ts = problem(program)

    def total(run):
        return lambda xs: sum((p.value * 2 + bnp.sin(p.tangent)).sum() for p in run(xs, ts))

    transform = bf.grad if program.reverse else bf.jacfwd
    close(transform(total(by_dual(f)))(xs), transform(total(by_jvp(f)))(xs), rtol=1e-10)


@pytest.mark.parametrize("name", PROGRAMS)
def test_batches_of_forward_mode(name):
    """``vmap`` around the transform, over the directions."""
    f, xs, ts = problem(PROGRAMS[name])
    many = [bnp.stack([t, -t, 2 * t]) for t in ts]
    along = lambda run: bf.vmap(lambda ts: run(xs, ts))(many)
    close(along(by_dual(f)), along(by_jvp(f)), rtol=1e-10)


def smooth(x):
    return bnp.tanh(bnp.sin(x) * bnp.exp(x)) / (2 + bnp.square(x))


def test_compositions():
    report = testing.check_transform(dual, smooth, (Dual(X, X / 2),))
    assert not report.unsupported


def ruled(f):
    """f with a rule that is its derivative."""
    g = bf.custom_jvp(f)
    g.defjvp(lambda ps, ts: bf.jvp(f, ps, ts))
    return g


AROUND = {
    "jit": bf.jit,
    "checkpoint": bf.checkpoint,
    "custom_jvp": ruled,
    "vmap": bf.vmap,
    "scan": lambda f: lambda x: lax.scan(lambda c, y: (f(c) + y, c), x, bnp.stack([x, 2 * x]))[0],
    "cond": lambda f: lambda x: lax.cond(True, f, lambda v: v * 0.0, x),
    "while_loop": lambda f: (
        lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, x), max_steps=3)[1]
    ),
    "grad": lambda f: bf.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: bf.jvp(f, (x,), (x,))[1],
}


@pytest.mark.second
@pytest.mark.parametrize("inner", AROUND)
@pytest.mark.parametrize("outer", AROUND)
def test_orders(outer, inner):
    """Every pair in every order, around the function and around the transform."""
    f, x = AROUND[outer](AROUND[inner](smooth)), bnp.stack([X, 2 * X])
    want = by_jvp(lambda xs: f(*xs))([x], [x / 2])
    close(by_dual(lambda xs: f(*xs))([x], [x / 2]), want, rtol=1e-9)
    close(bf.jit(by_dual(lambda xs: f(*xs)))([x], [x / 2]), want, rtol=1e-9)
    slope = lambda run: bf.grad(lambda x: run(lambda xs: f(*xs))([x], [x / 2])[0].tangent.sum())(x)
    close(slope(by_dual), slope(by_jvp), rtol=1e-9)


def test_nested():
    """Duals of duals: the inner transform's operations are the outer one's operands."""
    ones = bnp.ones_like(X)
    inner = lambda x: dual(smooth)(Dual(x, ones)).tangent
    got = dual(inner)(Dual(X, ones))
    want = bf.vmap(bf.grad(bf.grad(smooth)))(X)
    close(got.tangent, want)
    close(bf.jit(dual(bf.jit(inner)))(Dual(X, ones)).tangent, want)
    third = dual(lambda y: dual(inner)(Dual(y, ones)).tangent)(Dual(X, ones)).tangent
    close(third, bf.vmap(bf.grad(bf.grad(bf.grad(smooth))))(X))


def test_inside_other_transforms_inside():
    """grad, jvp and vmap of the function, under the transform."""
    point = Dual(X, bnp.ones_like(X))
    slope = bf.vmap(bf.grad(smooth))
    close(dual(slope)(point).tangent, bf.vmap(bf.grad(bf.grad(smooth)))(X))
    for f in (
        lambda x: bf.jvp(smooth, (x,), (x,))[1],
        bf.hessian(lambda v: smooth(v).sum()),
        bf.vmap(lambda a: a * X),
        lambda x: bf.linearize(smooth, x)[1](x),
    ):
        close(dual(f)(point).tangent, bf.jvp(f, (X,), (point.tangent,))[1])


# -- functions with rules of their own -------------------------------------------------------------


def with_custom_jvp():
    f = bf.custom_jvp(lambda x, y: bnp.sin(x) * y)
    f.defjvp(lambda ps, ts: (f(*ps), 100 * ts[0]))
    return f


def with_custom_vjp():
    f = bf.custom_vjp(lambda x, y: bnp.sin(x) * y)
    f.defvjp(lambda x, y: (f(x, y), x), lambda x, ct: (100 * ct, 0 * ct))
    return f


def with_custom_vmap():
    f = bf.custom_batching.custom_vmap(lambda x, y: bnp.sin(x) * y)
    f.def_vmap(lambda size, batched, x, y: (100 * x, True))
    return f


@pytest.mark.parametrize("make", [with_custom_jvp, with_custom_vjp, with_custom_vmap])
def test_functions_with_rules_are_gone_through(make):
    """Rules of custom functions are for arrays: the transform sees the function."""
    f = make()

    def run(h):
        return lambda x: dual(lambda x: h(x, 2 * x))(Dual(x, bnp.ones_like(x))).tangent

    def summed(h):
        return lambda x: run(h)(x).sum()

    plain = lambda x, y: bnp.sin(x) * y
    for g in (f, bf.jit(f), lambda x, y: lax.scan(lambda c, _: (c, f(x, y)), 0.0, None, length=1)[1][0]):
        close(run(g)(X), run(plain)(X))
        close(bf.jit(run(g))(X), run(plain)(X))
        close(bf.grad(summed(g))(X), bf.grad(summed(plain))(X))
        close(bf.vmap(run(g))(X), run(plain)(X))


def test_a_rule_for_functions_with_rules():
    t = bf.Transform("as ruled", box=Dual)

    @t.rule(extend.custom_jvp_call_p)
    def call(*xs, jaxpr, rule, n_consts, name):
        return [Dual(xs[0].value, 7 * xs[0].tangent)]

    f = bf.custom_jvp(bnp.sin)
    f.defjvp(lambda ps, ts: (f(*ps), ts[0]))
    close(t(f)(Dual(X, X)), Dual(X, 7 * X))


def test_solvers_are_gone_through():
    """Derivatives of the iterations agree with implicit ones at convergence."""
    a = arr([[4.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 5.0]])
    solver = lambda matvec, b: bnp.linalg.solve(a, b)
    linear = lambda b: lax.custom_linear_solve(lambda v: a @ v, b, solver, symmetric=True)
    close(dual(linear)(Dual(X, X * 2)), Dual(linear(X), linear(X * 2)))
    newton = lambda f, x: lax.fori_loop(0, 8, lambda i, x: x - f(x) / (2 * x), x)
    root = lambda y: lax.custom_root(lambda x: x * x - y, bnp.ones_like(y), newton, lambda g, b: b / g(1.0))
    got = dual(bf.vmap(root))(Dual(arr([2.0, 9.0]), arr([1.0, 1.0])))
    np.testing.assert_allclose(got.value, [2**0.5, 3], rtol=1e-9)
    np.testing.assert_allclose(got.tangent, [0.5 / 2**0.5, 1 / 6], rtol=1e-6)


# -- a transform that watches ----------------------------------------------------------------------


def watcher(seen):
    """The identity, which notes the primitives that it meets."""
    t = bf.Transform("watcher")

    @t.default
    def note(prim, *xs, **params):
        seen.append(prim.name)
        return prim.bind(*xs, **params)

    return t


def test_every_operation_on_what_depends_on_arguments():
    seen = []
    f = lambda x: bnp.sin(x) + bnp.sum(bnp.cos(bnp.ones(3)))
    close(watcher(seen)(f)(X), f(X))
    assert seen == ["sin", "add"]


def test_bodies_are_transformed_once():
    """A loop's body is transformed once, and so is a compiled function."""
    seen = []
    t = watcher(seen)
    f = bf.jit(lambda x: lax.scan(lambda c, _: (bnp.sin(c), None), x, None, length=5)[0])
    for _ in range(3):
        close(t(f)(X), f(X))
    assert seen.count("sin") == 1


def test_named_axes():
    """Collectives of a vmap outside and inside."""
    seen = []
    t = watcher(seen)
    f = lambda x: x - lax.pmean(x, "i")
    close(bf.vmap(t(f), axis_name="i")(X), bf.vmap(f, axis_name="i")(X))
    close(t(bf.vmap(f, axis_name="i"))(X), bf.vmap(f, axis_name="i")(X))
    assert "psum" in seen


def test_arguments_and_results_are_trees():
    f = lambda d, *rest, scale: {"a": [d["x"] * scale, rest[0]], "n": 3, "none": None}
    got = dual(f)({"x": Dual(X, X)}, Dual(2 * X, X), scale=3.0)
    close(got["a"], [Dual(3 * X, 3 * X), Dual(2 * X, X)])
    assert int(got["n"]) == 3 and got["none"] is None


def test_what_is_no_box_stays_plain():
    def f(x, y):
        assert isinstance(y, bf.Array), "an array that nothing boxed is seen as it is"
        return y * 2, x

    two, x = dual(f)(Dual(X, X), X)
    assert isinstance(two, bf.Array) and isinstance(x, Dual)


def test_arguments_that_are_no_arrays_are_left_alone():
    @functools.partial(bf.jit, static_argnums=(1, 2))
    def f(x, flag, name):
        return {"x": x if flag and name == "left" else -x}

    def g(x, flag, name, *, times):
        assert (flag, name, times) == (True, "left", 2)
        for _ in range(times):
            x = f(x, flag, name)["x"]
        return x

    close(dual(g)(Dual(X, X), True, "left", times=2), Dual(X, X))
    assert isinstance(dual(lambda x: x)(np.ones(2)), bf.Array)


@pytest.mark.parametrize("cls", [tuple, list, dict])
def test_containers_of_python_as_boxes(cls):
    """A tuple of arguments is not itself a box."""
    pair = cls([("a", X), ("b", X + 1)]) if cls is dict else cls([X, X + 1])
    t = bf.Transform("pairs", box=cls)
    t.leafwise(lax.sin_p)
    got = t(lambda x, y=None: bnp.sin(x))(pair, y=pair)
    close(got, tree.map(bnp.sin, pair))


# -- rules -----------------------------------------------------------------------------------------


def test_rules_that_change_are_used():
    t = bf.Transform("fickle", box=Dual)
    f = bf.jit(lambda x: lax.scan(lambda c, _: (bnp.sin(c), None), x, None, length=1)[0])
    for factor in (1, 2, 3):
        t.rule(lax.sin_p)(lambda x, factor=factor: Dual(x.value, factor * x.tangent))
        close(t(f)(Dual(X, X)), Dual(X, factor * X))
    g = bf.jit(t(f))
    close(g(Dual(X, X)).tangent, 3 * X)
    t.rule(lax.sin_p)(lambda x: x)
    close(g(Dual(X, X)).tangent, 3 * X)  # compiled, and so is what it was
    close(bf.jit(t(f))(Dual(X, X)).tangent, X)


def test_a_rule_for_what_runs_jaxprs_comes_first():
    t = bf.Transform("skipping", box=Dual)

    @t.rule(lax.scan_p)
    def skip(*xs, n_consts, n_carry, **params):
        return list(xs[n_consts : n_consts + n_carry])

    close(t(lambda x: lax.fori_loop(0, 5, lambda i, c: bnp.sin(c), x))(Dual(X, X)), Dual(X, X))


def test_rules_run_under_the_parent():
    """Operations of a rule are ordinary ones to outer transforms."""
    t = bf.Transform("squaring", box=Dual)
    t.rule(lax.sin_p)(lambda x: Dual(x.value**2, x.tangent))
    run = lambda x: t(bnp.sin)(Dual(x, x)).value
    close(bf.grad(lambda x: run(x).sum())(X), 2 * X)
    names = [e.prim.name for e in bf.make_jaxpr(run)(X).eqns]
    assert names in (["square"], ["integer_pow"])


def test_equations_of_rules_stand_at_the_line_of_the_function():
    t = bf.Transform("squaring", box=Dual)

    @t.rule(lax.sin_p)
    def rule(x):
        assert "return bnp.sin(x)  # here" in t.where()
        return Dual(x.value * x.value, x.tangent)

    def f(x):
        return bnp.sin(x)  # here

    for g in (f, bf.jit(f), lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0]):
        t(g)(Dual(X, X))
    (eqn,) = bf.make_jaxpr(t(f))(Dual(X, X)).eqns
    assert "return bnp.sin(x)  # here" in bf.core.ir.source.describe(eqn.source)


def test_leafwise():
    t = bf.Transform("pair", box=Dual, lift=lambda x: Dual(x, x) if dtypes.is_inexact(x.dtype) else x)
    t.leafwise(lax.add_p, lax.sin_p, lax.select_p, lax.top_k_p, lax.broadcast_in_dim_p)
    f = lambda x: (bnp.sin(x) + 1, bnp.where(bnp.arange(3) > 1, x, 0.0), lax.top_k(x, 2))
    got = t(f)(Dual(X, 2 * X))
    close(tree.map(lambda b: b.value, got, is_leaf=is_dual), f(X))
    close(tree.map(lambda b: b.tangent, got, is_leaf=is_dual), f(2 * X))


@dataclasses.dataclass(frozen=True)
class Tagged:
    value: bf.Array
    tag: str = dataclasses.field(metadata={"static": True})


def tagging():
    t = bf.Transform("tagged", box=Tagged, lift=lambda x: Tagged(x, "plain"))
    t.default(lambda prim, *xs, **params: Tagged(prim.bind(*[x.value for x in xs], **params), xs[0].tag))
    t.leafwise(lax.mul_p)
    return t


def test_leafwise_of_boxes_that_differ():
    with pytest.raises(errors.TreeError, match="tagged: mul was given boxes that differ") as info:
        tagging()(lambda x, y: x * y)(Tagged(X, "a"), Tagged(X, "b"))
    assert "lambda x, y: x * y" in info.value.where


def test_default_with_and_without_the_rest():
    t = tagging()
    assert t(lambda x: bnp.sin(x) + 1)(Tagged(X, "a")).tag == "a"
    assert repr(t) == "Transform('tagged')"


# -- boxes in loops and branches -------------------------------------------------------------------


def test_carries_are_lifted_where_a_step_boxes_them():
    """Also through a chain of carries, each boxed by the one before."""

    def f(x):
        def step(carry, _):
            a, b, c, n = carry
            return (b, c, c + x, n + 1), a

        zero = bnp.zeros_like(X)
        return lax.scan(step, (zero, zero, zero, 0), None, length=4)

    (a, b, c, n), ys = dual(f)(Dual(X, X))
    want = bf.jvp(f, (X,), (X,))
    close(c, Dual(want[0][0][2], want[1][0][2]))
    close(ys, Dual(want[0][1], want[1][1]))
    assert is_dual(a) and is_dual(b) and isinstance(n, bf.Array) and int(n) == 4


def test_settle():
    """Boxes whose structure a step changes, brought to one."""
    t = bf.Transform(
        "history",
        box=list,
        lift=lambda x: [x],
        settle=lambda box, aval: [*box, *[bnp.zeros(aval.shape, aval.dtype)] * (3 - len(box))][:3],
    )
    t.rule(lax.sin_p)(lambda x: [bnp.sin(x[0]), *x])  # which remembers one more
    f = lambda x: lax.scan(lambda c, _: (bnp.sin(c), None), x, None, length=2)[0]
    got = t(f)([X])
    close(got, [bnp.sin(bnp.sin(X)), bnp.sin(X), X])
    close(bf.jit(t(bf.jit(f)))([X]), got)
    branch = lambda x: lax.cond(True, bnp.sin, lambda v: v, x)
    close(t(branch)([X]), [bnp.sin(X), X, 0 * X])
    loop = lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, bnp.sin(c[1])), (0, x))[1]
    close(t(loop)([X]), got)
    unsettled = bf.Transform("history", box=list, lift=lambda x: [x])
    unsettled.rules.update(t.rules)
    with pytest.raises(errors.CarryError, match=r"a step of scan changes the box of its carry from .* to "):
        unsettled(f)([X])
    with pytest.raises(errors.BranchError, match="the branches of a cond have boxes that differ"):
        unsettled(branch)([X])


def test_static_parts_of_boxes_in_loops():
    t = tagging()
    f = lambda x: lax.fori_loop(0, 3, lambda i, c: bnp.sin(c), x)
    assert t(f)(Tagged(X, "a")).tag == "a"
    t.rule(lax.sin_p)(lambda x: Tagged(bnp.sin(x.value), "sin"))
    with pytest.raises(errors.CarryError, match="tagged: a step of scan") as info:
        t(f)(Tagged(X, "a"))
    assert "'a'" in str(info.value) and "'sin'" in str(info.value)
    assert t(f)(Tagged(X, "sin")).tag == "sin"


def test_boxes_that_scan_cannot_take_apart():
    t = bf.Transform("whole", box=Dual)
    t.default(lambda prim, *xs, **params: xs[0])
    f = lambda x: lax.scan(lambda c, v: (c, bnp.sin(v)), 0, x)[1]
    with pytest.raises(errors.ShapeError, match=r"scan takes the elements of f64\[3\] apart"):
        t(f)(Dual(X, arr(1.0)))


def test_without_lift():
    t = bf.Transform("unlifted", box=Dual)
    t.default(lambda prim, *xs, **params: next(x for x in xs if is_dual(x)))
    assert is_dual(t(lambda x: x * 2)(Dual(X, X)))
    with pytest.raises(errors.UnsupportedError, match=r"unlifted meets a plain f64\[3\]") as info:
        t(lambda x: lax.cond(True, lambda: x, lambda: X))(Dual(X, X))
    assert "lift" in info.value.fix


def test_a_box_cannot_decide():
    t = bf.Transform("fuzzy", box=Dual, lift=lambda x: Dual(x, x))
    t.leafwise(lax.gt_p, lax.lt_p, lax.convert_p, lax.add_p, lax.reduce_sum_p)
    for f in (
        lambda x: lax.cond(x.sum() > 0, lambda: x, lambda: x),
        lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1.0, x),
    ):
        with pytest.raises(errors.UnsupportedError, match="under fuzzy"):
            t(f)(Dual(X, X))


# -- what arguments of Transform do ----------------------------------------------------------------


def test_without_a_class_of_boxes():
    """Any pytree is a box, made of each argument; lower makes the results."""
    t = bf.Transform(
        "counted", lift=lambda x: {"value": x, "ops": 0}, lower=lambda box, aval: (box["ops"], aval)
    )

    @t.default
    def count(prim, *xs, **params):
        value = prim.bind(*[x["value"] for x in xs], **params)
        return {"value": value, "ops": 1 + max(x["ops"] for x in xs)}

    ops, aval = t(lambda x, y: bnp.sin(bnp.sin(x)) + y)(X, X)
    assert int(ops) == 3 and aval.shape == (3,)
    assert int(bf.jit(lambda x: t(lambda x: bnp.sin(x) + 1)(x)[0])(X)) == 2


def test_like():
    t = bf.Transform("scaled", box=Dual, like=lambda box: box.tangent)
    seen = []
    t(lambda x: seen.append((x.shape, x.dtype)))(Dual(arr(1.0), bnp.ones((2, 3))))
    assert seen == [((2, 3), np.float32)]
    empty = bf.Transform("empty", box=list)
    with pytest.raises(errors.ArgumentError, match="holds no array") as info:
        empty(lambda x: x)([])
    assert "like" in info.value.fix


# -- errors ----------------------------------------------------------------------------------------


def nothing(name="bare"):
    return bf.Transform(name, box=Dual)


CONTEXTS = {
    "plain": lambda f: f,
    "jit": bf.jit,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: lax.cond(True, f, f, x),
    "while": lambda f: lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, x))[1],
    "checkpoint": bf.checkpoint,
    "vmap": bf.vmap,
    "grad": lambda f: bf.grad(lambda x: f(x).sum()),
}


@pytest.mark.parametrize("around", CONTEXTS.values(), ids=CONTEXTS)
def test_a_missing_rule_names_the_primitive_and_the_line(around):
    def f(x):
        return bnp.sin(x)  # this line

    for run in (nothing()(around(f)), bf.jit(nothing()(around(f)))):
        with pytest.raises(
            errors.UnsupportedError, match=r"the transform bare has no rule for \w+\."
        ) as info:
            run(Dual(X, X))
        assert "@bare.rule(lax." in info.value.fix
        if around is not CONTEXTS["grad"]:
            assert "no rule for sin" in str(info.value) and "# this line" in info.value.where


@pytest.mark.parametrize(
    "rule, error, message",
    [
        (lambda x: "a", errors.ArgumentError, "the result of the rule of bare for sin is a str"),
        (lambda x: x.value[:2], errors.ShapeError, r"returned an array f64\[2\] for one of type f64\[3\]"),
        (lambda x: x.value.astype("float32"), errors.ShapeError, r"returned an array f32\[3\]"),
        (lambda x: None, errors.ArgumentError, "the result of the rule"),
    ],
)
def test_results_of_rules_are_checked(rule, error, message):
    t = nothing()
    t.rule(lax.sin_p)(rule)
    with pytest.raises(error, match=message):
        t(bnp.sin)(Dual(X, X))


@pytest.mark.parametrize("result", [lambda x: x, lambda x: [x], lambda x: [x, x, x], lambda x: 3])
def test_rules_of_several_results_return_a_list(result):
    t = nothing()
    t.rule(lax.top_k_p)(lambda x, **params: result(x))
    with pytest.raises(errors.ArgumentError, match="for top_k must return a list of 2 results"):
        t(lambda x: lax.top_k(x, 2))(Dual(X, X))


def test_leaked_boxes():
    kept = []

    def f(x):
        kept.append(x)
        return x

    dual(f)(Dual(X, X))
    with pytest.raises(errors.LeakedTracerError, match="after the tracing of dual had ended"):
        kept[0] + 1
    with pytest.raises(errors.LeakedTracerError):
        dual(lambda x: x + kept[0])(Dual(X, X))


def test_boxes_have_no_value():
    with pytest.raises(errors.ConcretizationError, match="by dual"):
        dual(lambda x: x * float(x[0]))(Dual(X, X))


def test_a_rule_cannot_use_boxes_of_its_transform():
    """It is given what they hold; a box of the trace itself, closed over, is an error."""
    t, kept = nothing(), []
    t.rule(lax.sin_p)(lambda x: Dual(x.value + kept[0], x.tangent))

    def f(x):
        kept.append(x)
        return bnp.sin(x)

    with pytest.raises(errors.LeakedTracerError, match="used where that trace does not see it"):
        t(f)(Dual(X, X))


@pytest.mark.parametrize(
    "call",
    [
        lambda: bf.Transform("t", box=3),
        lambda: nothing().rule(bnp.sin),
        lambda: nothing().rule(lax.sin_p, "cos"),
        lambda: nothing().leafwise(bnp.sin),
        lambda: nothing()(3),
        lambda: nothing()(lambda x: x)("a"),
        lambda: nothing()(lambda x: "a")(Dual(X, X)),
        lambda: nothing()(lambda x: x)(Dual("a", X)),
        lambda: bf.Transform(3),
        lambda: bf.Transform("t", lift=3),
        lambda: bf.Transform("t", settle=3),
        lambda: nothing().rule(lax.sin_p)(3),
        lambda: nothing().default(None),
    ],
)
def test_bad_input(call):
    with pytest.raises(errors.ArgumentError) as info:
        call()
    assert "test_transform.py" in info.value.where


def test_threads():
    """A transform may be used in several at once."""
    t, found = tagging(), {}
    work = lambda tag: found.update(
        {tag: t(lambda x: lax.fori_loop(0, 2, lambda i, c: bnp.sin(c), x))(Tagged(X, tag))}
    )
    threads = [threading.Thread(target=functools.partial(work, tag)) for tag in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {tag: box.tag for tag, box in found.items()} == {tag: tag for tag in "abcd"}


def test_overrides_reach_bodies():
    """A body transformed under other rules is transformed anew."""
    f = bf.jit(lambda x: lax.scan(lambda c, _: (bnp.sin(c), None), x, None, length=1)[0])
    run = lambda: dual(f)(Dual(X, bnp.ones_like(X))).tangent
    close(run(), bnp.cos(X))
    with bf.override(lax.sin_p, jvp=lambda ps, ts: (lax.sin_p.bind(*ps), ts[0] * 5)):
        close(run(), 5 * bnp.ones_like(X))
    close(run(), bnp.cos(X))
