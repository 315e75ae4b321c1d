"""``checkpoint``: same values and derivatives, fewer residuals, recomputation."""

import functools

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, tree
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import subjaxprs
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import exp_p, sin_p
from blufunc.core.programs.simplify import cse
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, value_and_grad, vjp
from blufunc.transforms.autodiff.linearize import linearize_flat
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.checkpointing.policies import dots_saveable, everything_saveable, nothing_saveable
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw


def count(jaxpr, prim):
    """How often a primitive stands in a jaxpr, at any depth."""
    own = sum(e.prim.name == prim for e in jaxpr.eqns)
    return own + sum(count(s, prim) for e in jaxpr.eqns for s in subjaxprs(e.params))


def calls(jaxpr, prim="checkpoint"):
    return [e for e in jaxpr.eqns if e.prim.name == prim]


def only_exp(prim, *avals, **params):
    return prim is exp_p


POLICIES = {
    "nothing": nothing_saveable,
    "everything": everything_saveable,
    "dots": dots_saveable,
    "custom": only_exp,
    "by type": lambda prim, *avals, **params: bool(avals) and avals[0].ndim == 1,
}
POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


# -- the table of functions ------------------------------------------------------------------------


@custom_jvp
def triple_slope(x):
    return bnp.sin(x)


@triple_slope.defjvp
def _(primals, tangents):
    return triple_slope(primals[0]), tangents[0] * bnp.cos(primals[0]) * TABLE[:1][0] * 3.0


TABLE = arr([1.0, 2.0, 3.0])


@custom_vjp
def double_slope(x):
    return bnp.sin(x)


double_slope.defvjp(lambda x: (bnp.sin(x), (x, TABLE)), lambda r, ct: (ct * bnp.cos(r[0]) * 2.0 * r[1][0],))

FUNCTIONS = {
    "mlp": lambda w, x: (bnp.tanh(w @ bnp.sin(w @ x)) * bnp.exp(x)).sum(),
    "scan": lambda w, x: scan(lambda c, a: (bnp.sin(w @ c) * a, c), x, x)[1].sum(),
    "jit": lambda w, x: jit(lambda x: jit(lambda x: bnp.sin(w @ x))(x) * bnp.exp(x))(x).sum(),
    "checkpoint": lambda w, x: checkpoint(lambda x: checkpoint(bnp.sin)(w @ x) * bnp.exp(x))(x).sum(),
    "custom_jvp": lambda w, x: (triple_slope(w @ x) * bnp.exp(x)).sum(),
    "custom_vjp": lambda w, x: (double_slope(w @ x) * bnp.exp(x)).sum(),
    "gradient": lambda w, x: grad(lambda x: (bnp.sin(w @ x) * x).sum())(x).sum(),
    "vmap": lambda w, x: vmap(lambda row: bnp.sin(row * x).sum())(w).sum(),
    "without a derivative": lambda w, x: (bnp.floor(w @ x * 3) * bnp.sign(x) * bnp.sin(x)).sum(),
    "constant": lambda w, x: arr(2.0),
    "argument": lambda w, x: x[0],
}
ALL = pytest.mark.parametrize("name", FUNCTIONS)
NO_FORWARD = {"custom_vjp"}


@POLICY
@ALL
def test_values_and_derivatives(name, policy):
    f, w, x = FUNCTIONS[name], draw(3, 3), draw(3)
    g = checkpoint(f, policy=policy)
    want = value_and_grad(f, (0, 1))(w, x)
    close(g(w, x), want[0])
    close(jit(g)(w, x), want[0])
    close(value_and_grad(g, (0, 1))(w, x), want)
    close(jit(value_and_grad(g, (0, 1)))(w, x), want)
    close(grad(jit(g), (0, 1))(w, x), want[1])
    close(grad(g, 1)(w, x), want[1][1])
    if name not in NO_FORWARD:
        slope = jvp(f, (w, x), (w * 2, x + 1))[1]
        close(jvp(g, (w, x), (w * 2, x + 1))[1], slope)
        close(linearize(g, w, x)[1](w * 2, x + 1), slope)


def second_derivatives(f, name):
    """Reverse over reverse, forward over reverse and reverse over forward."""
    w, x = draw(3, 3), draw(3)
    slope = lambda w, x: sum((a * draw(*a.shape)).sum() for a in grad(f, (0, 1))(w, x))
    found = [grad(slope, (0, 1))(w, x)]
    found.append(jvp(lambda x: grad(f, 1)(w, x), (x,), (x,))[1])
    if name not in NO_FORWARD:
        found.append(grad(lambda x: jvp(lambda x: f(w, x), (x,), (x,))[1])(x))
    return found


PLAIN = functools.cache(lambda name: second_derivatives(FUNCTIONS[name], name))


@POLICY
@ALL
def test_second_derivatives(name, policy):
    f = checkpoint(FUNCTIONS[name], policy=policy)
    close(second_derivatives(f, name), PLAIN(name), 1e-11)
    close(jit(lambda: second_derivatives(f, name))(), PLAIN(name), 1e-11)


@ALL
def test_vmap(name):
    f, w, x = FUNCTIONS[name], draw(2, 3, 3), draw(3)
    g = checkpoint(f, policy=dots_saveable)
    rows = lambda f: tree.map(lambda *r: bnp.stack(r), *(f(w[i], x) for i in range(2)))
    close(vmap(g, (0, None))(w, x), rows(f))
    close(vmap(grad(g, (0, 1)), (0, None))(w, x), rows(grad(f, (0, 1))))
    close(checkpoint(vmap(grad(g, 1), (0, None)))(w, x), rows(grad(f, 1)))
    summed = lambda h: lambda w, x: h(w, x).sum()
    want = grad(summed(lambda w, x: bnp.stack([f(w[i], x) for i in range(2)])), (0, 1))(w, x)
    close(grad(summed(vmap(g, (0, None))), (0, 1))(w, x), want)
    close(grad(summed(jit(vmap(g, (0, None)))), (0, 1))(w, x), want)


def test_pytrees_and_keyword_arguments():
    @checkpoint(policy=dots_saveable)
    def f(params, x, *, scale, flags=(None,)):
        """Documented."""
        return {"y": bnp.sin(params["w"] @ x) * scale, "none": None}, [params["b"]]

    p, x = {"w": draw(3, 3), "b": draw()}, draw(3)
    assert f.__name__ == "f" and f.__doc__ == "Documented."
    close(f(p, x, scale=2.0), f.__wrapped__(p, x, scale=2.0))
    loss = lambda f: lambda p, x, s: (f(p, x, scale=s)[0]["y"] ** 2).sum() + f(p, x=x, scale=s)[1][0]
    close(grad(loss(f), (0, 1, 2))(p, x, arr(3.0)), grad(loss(f.__wrapped__), (0, 1, 2))(p, x, arr(3.0)))


def test_integer_arguments():
    f = checkpoint(lambda n, x: (n + 1, x * n.astype("float64")))
    (n, y), pull = vjp(f, arr(3, np.int32), arr(2.0))
    assert int(n) == 4 and float(y) == 6.0
    ct_n, ct_x = pull((np.zeros((), dtypes.float0), arr(1.0)))
    assert ct_n.dtype == dtypes.float0 and float(ct_x) == 3.0


@POLICY
def test_closures_over_tracers(policy):
    def f(wrap):
        def outer(w, x):
            inner = wrap(lambda x: bnp.sin(w @ x) * w[0] * TABLE)
            return (vmap(inner)(bnp.stack([x, x * 2])) ** 2).sum() + grad(lambda x: inner(x).sum())(x).sum()

        return outer

    w, x = draw(3, 3), draw(3)
    for order in (lambda f: grad(f, (0, 1)), lambda f: grad(lambda w, x: (grad(f)(w, x) ** 2).sum(), (0, 1))):
        want = order(f(lambda g: g))(w, x)
        close(order(f(functools.partial(checkpoint, policy=policy)))(w, x), want, 1e-11)
        close(jit(order(f(functools.partial(checkpoint, policy=policy))))(w, x), want, 1e-11)


def test_in_a_loop_and_around_it():
    """``checkpoint`` of the body stores the carries; around the loop, nothing."""

    def f(body, loop):
        return lambda w, x: loop(lambda w, x: scan(body(lambda c, a: (bnp.sin(w @ c) * a, None)), x, x)[0])(
            w, x
        ).sum()

    same = lambda f: f
    w, x = draw(3, 3), draw(3)
    want = grad(f(same, same), (0, 1))(w, x)
    for body, loop in ((checkpoint, same), (same, checkpoint), (checkpoint, checkpoint)):
        close(grad(f(body, loop), (0, 1))(w, x), want)
        close(jit(grad(f(body, loop), (0, 1)))(w, x), want)

    def stacked(body):
        lowered = jit(grad(f(body, same), (0, 1))).lower(w, x).jaxpr
        ahead, _ = calls(lowered, "scan")
        return len(ahead.outvars) - ahead.params["n_carry"]

    assert stacked(checkpoint) == 1 < stacked(same)
    lowered = jit(grad(f(same, checkpoint), (0, 1))).lower(w, x).jaxpr
    assert calls(lowered, "scan") == [], "the forward loop is not needed for the gradient alone"
    assert count(lowered, "scan") == 2


# -- residuals and recomputation -------------------------------------------------------------------


def mlp(w, x):
    return bnp.exp(w @ bnp.sin(w @ x))


def backward(policy, f=mlp):
    """The lowered gradient: equations outside the backward call, and that call."""
    g = checkpoint(f, policy=policy)
    lowered = jit(value_and_grad(lambda w, x: g(w, x).sum())).lower(draw(3, 3), draw(3)).jaxpr
    (call,) = calls(lowered)
    return lowered, call


def outside(lowered, prim):
    return sum(e.prim.name == prim for e in lowered.eqns)


@pytest.mark.parametrize(
    "policy, dots, sines, exps",
    [
        # Of the gradient itself: two products for w, one for what is before the sine, and one cosine.
        ("nothing", 3 + 2, 1, 1),
        ("everything", 3, 0, 0),
        ("dots", 3, 1, 1),
        ("custom", 3 + 1, 1, 0),
    ],
)
def test_what_is_computed_again(policy, dots, sines, exps):
    lowered, call = backward(POLICIES[policy])
    assert [outside(lowered, p) for p in ("dot_general", "sin", "exp", "cos")] == [2, 1, 1, 0]
    body = call.params["jaxpr"]
    assert [count(body, p) for p in ("dot_general", "sin", "exp", "cos")] == [dots, sines, exps, 1]


@pytest.mark.parametrize("policy, stored", [("nothing", 2), ("everything", 5), ("dots", 4), ("custom", 3)])
def test_what_is_stored(policy, stored):
    """The residuals: ``w``, ``x``, and saved values that the derivative reads."""
    w, x = draw(3, 3), draw(3)
    f = checkpoint(mlp, policy=POLICIES[policy])
    _, _, linear = linearize_flat(lambda w, x: [f(w, x)], [w, x])
    assert len(linear.consts) == stored
    assert {id(w), id(x)} <= {id(c) for c in linear.consts}
    (call,) = linear.eqns
    assert call.prim.name == "checkpoint"


def test_nothing_but_the_arguments_is_stored():
    f = checkpoint(lambda x, y: bnp.sin(bnp.sin(x)) + y)
    x, y = draw(4), draw(4)
    _, _, linear = linearize_flat(lambda x, y: [f(x, y)], [x, y])
    assert [id(c) for c in linear.consts] == [id(x)], "the derivative does not read y"


def test_values_that_the_derivative_does_not_read_are_not_stored():
    f = checkpoint(lambda x: ((x + 1.0) * 2.0 - x).sum(), policy=everything_saveable)
    _, _, linear = linearize_flat(lambda x: [f(x)], [draw(4)])
    assert linear.consts == ()


def test_kept_values_of_operations_without_a_tangent_are_used():
    """``w @ w`` has no tangent here, and is kept all the same."""
    f = checkpoint(lambda w, x: bnp.sin((w @ w) @ x).sum(), policy=dots_saveable)
    lowered = jit(grad(f, 1)).lower(draw(3, 3), draw(3)).jaxpr
    assert outside(lowered, "dot_general") == 2
    assert count(calls(lowered)[0].params["jaxpr"], "dot_general") == 1


def test_cse_does_not_merge_the_recomputation_with_the_forward_pass():
    lowered, call = backward(nothing_saveable)
    assert count(cse(lowered), "sin") == 2
    g = jit(value_and_grad(lambda w, x: checkpoint(mlp)(w, x).sum()))
    program = g.lower(draw(3, 3), draw(3)).compile()
    close(program(draw(3, 3), draw(3)), value_and_grad(lambda w, x: mlp(w, x).sum())(draw(3, 3), draw(3)))
    assert program.source().count("checkpoint(") == 1
    plain = jit(value_and_grad(lambda w, x: mlp(w, x).sum())).lower(draw(3, 3), draw(3)).jaxpr
    assert count(plain, "sin") == 1


def test_two_calls_of_the_same_are_computed_twice():
    f = checkpoint(bnp.sin)
    assert count(jit(lambda x: f(x) + f(x)).lower(draw(3)).jaxpr, "sin") == 2


def test_nested_checkpoints():
    """Directly nested ones cost nothing; several inside another recompute once more."""
    exps = lambda f: count(jit(value_and_grad(lambda x: f(x).sum())).lower(draw(3)).jaxpr, "exp")
    step = lambda x: bnp.sin(bnp.exp(x))
    inner = checkpoint(step)
    assert exps(step) == 1
    assert exps(inner) == exps(checkpoint(inner)) == exps(checkpoint(checkpoint(inner))) == 2
    two = lambda x: inner(inner(x))
    assert exps(two) == 2 * 2
    assert exps(checkpoint(two)) == 2 * 2 + 1, "forward; to reach the second step; each for its derivative"


def test_policies_see_primitives_types_and_parameters_inside_of_jit():
    seen = []

    def policy(prim, *avals, **params):
        seen.append((prim, avals, params))
        return False

    f = checkpoint(jit(lambda w, x: jit(bnp.sin)(w @ x).sum()), policy=policy)
    grad(f)(draw(2, 3), draw(3))
    prims = [p for p, _, _ in seen]
    assert prims[:2] == [dot_general_p, sin_p]
    assert [str(a) for a in seen[0][1]] == ["f64[2,3]", "f64[3]"]
    assert "dims" in seen[0][2] or seen[0][2]


def test_the_body_of_a_memoised_call_is_split_once_for_each_policy():
    seen = []

    def policy(prim, *avals, **params):
        seen.append(prim)
        return False

    g = jit(checkpoint(lambda x: bnp.sin(x).sum(), policy=policy))
    for _ in range(3):
        grad(g)(draw(3))
    assert len(seen) == 2


def test_golden_grad_of_checkpoint(golden):
    f = lambda policy: jit(grad(lambda w, x: checkpoint(mlp, policy=policy)(w, x).sum()))
    texts = [
        f"{p.__name__}\n{f(p).lower(draw(3, 3), draw(3)).jaxpr}" for p in (nothing_saveable, dots_saveable)
    ]
    golden("checkpoint_grad", "\n\n".join(texts))


def test_the_default_is_to_keep_nothing():
    assert make_jaxpr(checkpoint(mlp))(draw(3, 3), draw(3)).eqns[0].params["policy"] is nothing_saveable


def test_a_checkpoint_without_derivative_is_a_plain_call():
    jaxpr = make_jaxpr(checkpoint(mlp))(draw(3, 3), draw(3))
    (call,) = jaxpr.eqns
    assert call.prim.name == "checkpoint" and call.params["name"] == "mlp"
    assert count(jaxpr, "dot_general") == 2


def test_static_arguments_and_prevent_cse():
    @functools.partial(checkpoint, static_argnums=(1, -1), prevent_cse=False)
    def f(x, power, scale, mode):
        """Documented."""
        assert isinstance(power, int) and mode == "sum"
        return getattr(bnp.sin(x) ** power * scale, mode)()

    x = draw(3)
    plain = lambda x, s: (bnp.sin(x) ** 3 * s).sum()
    assert f.__name__ == "f" and f.__doc__ == "Documented."
    close(f(x, 3, 2.0, "sum"), plain(x, 2.0))
    close(grad(lambda x, s: f(x, 3, s, "sum"), (0, 1))(x, arr(2.0)), grad(plain, (0, 1))(x, arr(2.0)))
    with pytest.raises(errors.ValueRangeError, match="static_argnums"):
        checkpoint(bnp.sin, static_argnums=3)(x)


# -- errors ----------------------------------------------------------------------------------------


def test_errors():
    with pytest.raises(errors.ArgumentError, match="checkpoint takes a function, not 3") as info:
        checkpoint(3)
    assert "test_checkpoint.py" in info.value.where
    with pytest.raises(errors.ArgumentError, match=r"the argument p\['a'\] is a str") as info:
        checkpoint(lambda p: p["b"])({"a": "text", "b": 1.0})
    assert "test_checkpoint.py" in info.value.where
    with pytest.raises(errors.ArgumentError, match=r"result of .*\['a'\]") as info:
        checkpoint(lambda x: {"a": "text"})(1.0)
    assert "test_checkpoint.py" in info.value.where
    with pytest.raises(errors.ConcretizationError, match="a truth value") as info:
        checkpoint(lambda x: x if x > 0.0 else -x)(arr(1.0))
    assert "test_checkpoint.py" in info.value.where


def test_forward_mode_through_custom_vjp_is_an_error_inside_too():
    with pytest.raises(errors.GradError, match="double_slope") as info:
        jvp(checkpoint(double_slope), (arr(1.0),), (arr(1.0),))
    assert "test_checkpoint.py" in info.value.where
