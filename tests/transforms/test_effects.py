"""Effects: their number and order under every transform and composition."""

import functools

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir import check
from blufunc.core.primitives import effects
from blufunc.core.programs.simplify import simplify
from blufunc.transforms.staging.callback import debug_callback_p, io_callback_p
from tests.transforms.common import arr, close, draw

F64 = bf.ShapeDtypeStruct((), "float64")


class Log:
    """Notes the arguments of each call, as Python numbers."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args):
        self.calls.append([x.tolist() for x in args] if len(args) > 1 else args[0].tolist())

    def take(self):
        calls, self.calls = self.calls, []
        return calls


def reports(log, ordered=False):
    """A function that reports its argument, whatever is differentiated."""
    return lambda x: (bf.debug.callback(log, x, ordered=ordered), bnp.sin(x) * x)[1]


def stores(log, ordered=False):
    """A function that has an effect and reads its result."""

    def host(x):
        log(x)
        return np.asarray(x)

    def f(x):
        y = bf.io_callback(host, F64, lax.stop_gradient(x), ordered=ordered)
        return bnp.sin(x) * x + 0.0 * y

    return f


def acts(log, ordered=False):
    """A function that has an effect, and no result of it."""
    return lambda x: (bf.io_callback(log, None, lax.stop_gradient(x), ordered=ordered), bnp.sin(x) * x)[1]


slow = bf.custom_vjp(lambda f, x: f(x), nondiff_argnums=(0,))
slow.defvjp(lambda f, x: (f(x), x), lambda f, x, ct: (ct * (bnp.sin(x) + x * bnp.cos(x)),))

FUNCTIONS = [reports, stores, acts]
EFFECT = pytest.mark.parametrize(
    "effect",
    [functools.partial(f, ordered=o) for f in FUNCTIONS for o in (False, True)],
    ids=[f"{name}{f.__name__}" for f in FUNCTIONS for name in ("", "ordered ")],
)
X = 0.5

WRAPS = {
    "plain": lambda f: f,
    "jit": bf.jit,
    "jit of jit": lambda f: bf.jit(bf.jit(f)),
    "checkpoint": bf.checkpoint,
    "jit of checkpoint": lambda f: bf.jit(bf.checkpoint(f)),
    "checkpoint of jit": lambda f: bf.checkpoint(bf.jit(f)),
    "checkpoint of checkpoint": lambda f: bf.checkpoint(bf.checkpoint(f)),
    "all saved": lambda f: bf.checkpoint(f, policy=bf.checkpoint_policies.everything_saveable),
    "custom_vjp": lambda f: functools.partial(slow, f),
    "checkpoint of custom_vjp": lambda f: bf.checkpoint(functools.partial(slow, f)),
    "a call whose value is dropped": lambda f: lambda x: (bf.jit(f)(x), bnp.sin(x) * x)[1],
    "a checkpoint whose value is dropped": lambda f: lambda x: (bf.checkpoint(f)(x), bnp.sin(x) * x)[1],
}
NOT_STORED = {"checkpoint of checkpoint", "checkpoint of custom_vjp"}

DERIVATIVES = {
    "value": lambda f: f,
    "grad": bf.grad,
    "value_and_grad": bf.value_and_grad,
    "grad of jit": lambda f: bf.grad(bf.jit(f)),
    "jit of grad": lambda f: bf.jit(bf.grad(f)),
    "grad of grad": lambda f: bf.grad(bf.grad(f)),
    "jit of grad of grad": lambda f: bf.jit(bf.grad(bf.grad(f))),
    "vjp": lambda f: lambda x: bf.vjp(f, x)[1](x),
    "jvp": lambda f: lambda x: bf.jvp(f, (x,), (x,)),
    "jit of jvp": lambda f: lambda x: bf.jit(lambda x: bf.jvp(f, (x,), (x,)))(x),
    "jvp of grad": lambda f: lambda x: bf.jvp(bf.grad(f), (x,), (x,)),
    "linearize": lambda f: lambda x: bf.linearize(f, x)[1](x),
}


FORWARD = {"jvp", "jit of jvp", "jvp of grad", "linearize"}  # which custom_vjp does not have


@pytest.mark.parametrize(
    "wrap, derive", [(w, d) for w in WRAPS for d in DERIVATIVES if "custom_vjp" not in w or d not in FORWARD]
)
@EFFECT
def test_an_effect_happens_once(effect, wrap, derive):
    log = Log()
    if wrap in NOT_STORED and effect.func is stores and derive not in ("value", "jvp", "jit of jvp"):
        with pytest.raises(errors.UnsupportedError, match="would repeat the effect of"):
            DERIVATIVES[derive](WRAPS[wrap](effect(log)))(arr(X))
        return
    f = DERIVATIVES[derive](WRAPS[wrap](effect(log)))
    for _ in range(2):  # programs are cached, effects are not
        got = f(arr(X))
        assert log.take() == [X]
    close(got, DERIVATIVES[derive](lambda x: bnp.sin(x) * x)(arr(X)))


@pytest.mark.parametrize("derive", ["value", "grad", "jit of grad", "grad of jit", "jvp", "grad of grad"])
@pytest.mark.parametrize("body", ["plain", "jit", "checkpoint", "all saved"])
@EFFECT
def test_an_effect_in_a_loop_happens_in_each_step(effect, body, derive):
    log = Log()
    step = WRAPS[body](effect(log))
    f = DERIVATIVES[derive](lambda x: lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0])
    plain = lambda x: bnp.sin(x) * x
    want = [float(x) for x in (arr(X), plain(arr(X)), plain(plain(arr(X))))]
    for _ in range(2):
        got = f(arr(X))
        np.testing.assert_allclose(log.take(), want)
    close(got, DERIVATIVES[derive](lambda x: plain(plain(plain(x))))(arr(X)))


@pytest.mark.parametrize("derive", ["value", "grad", "jit of grad", "grad of jit", "grad of grad"])
def test_a_checkpoint_around_a_loop_reports_once_for_each_step(derive):
    log = Log()
    loop = lambda f: lambda x: lax.scan(lambda c, _: (f(c), c), x, None, length=3)[1].sum()
    f = DERIVATIVES[derive](bf.checkpoint(loop(reports(log))))
    got = f(arr(X))
    assert len(log.take()) == 3
    close(got, DERIVATIVES[derive](loop(lambda x: bnp.sin(x) * x))(arr(X)))


def test_a_checkpoint_around_a_loop_does_not_repeat_actions():
    log = Log()
    loop = lambda f: bf.checkpoint(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0])
    close(loop(stores(log))(arr(X)), loop(lambda x: bnp.sin(x) * x)(arr(X)))
    assert len(log.take()) == 3
    with pytest.raises(errors.UnsupportedError, match="would repeat the effect of scan") as info:
        bf.grad(loop(stores(log)))(arr(X))
    assert "test_effects.py" in info.value.where
    close(bf.grad(loop(acts(log)))(arr(X)), bf.grad(loop(lambda x: bnp.sin(x) * x))(arr(X)))
    assert len(log.take()) == 3, "an action without results is no part of what is computed again"


def test_a_loop_of_actions_without_a_tangent_is_stored():
    log = Log()
    host = lambda x: (log(x), np.asarray(x))[1]

    @bf.checkpoint
    def f(x, y):
        ys = lax.scan(lambda c, a: (c, bf.io_callback(host, F64, a)), None, y)[1]
        return (bnp.sin(x * ys) * x).sum()

    x, y = arr(2.0), draw(3)
    close(bf.grad(f)(x, y), bf.grad(lambda x, y: (bnp.sin(x * y) * x).sum())(x, y))
    close(log.take(), y.tolist())


@pytest.mark.parametrize(
    "wrap", [lambda f: f, bf.jit, bf.checkpoint, lambda f: bf.jit(bf.grad(lambda x: f(x).sum()))]
)
@pytest.mark.parametrize(
    "effect",
    [reports, functools.partial(reports, ordered=True), stores, acts],
    ids=["reports", "ordered reports", "stores", "acts"],
)
def test_vmap_has_the_effect_for_each_element_in_order(effect, wrap):
    log = Log()
    f = wrap(bf.vmap(effect(log)))
    f(arr([1.0, 2.0, 3.0]))
    assert log.take() == [1.0, 2.0, 3.0]
    wrap(bf.vmap(bf.vmap(effect(log))))(arr([[1.0, 2.0], [3.0, 4.0]]))
    assert log.take() == [1.0, 2.0, 3.0, 4.0]
    wrap(bf.vmap(bf.jit(effect(log)), in_axes=0))(arr([1.0, 2.0]))
    assert log.take() == [1.0, 2.0]


def test_vmap_of_what_is_not_mapped_has_one_effect():
    log = Log()
    bf.vmap(lambda x: (reports(log)(arr(1.0)), x)[1])(draw(3))
    bf.vmap(lambda x, y: (bf.debug.callback(log, x, y), x)[1], (0, None))(arr([1.0, 2.0]), arr([7.0]))
    assert log.take() == [1.0, [1.0, [7.0]], [2.0, [7.0]]]


def test_vmap_of_grad_and_of_scan():
    log = Log()
    bf.vmap(bf.grad(reports(log)))(arr([1.0, 2.0]))
    assert log.take() == [1.0, 2.0]
    loop = lambda x: lax.scan(lambda c, a: (c, reports(log)(a)), None, x)[1]
    bf.vmap(loop)(arr([[1.0, 2.0], [3.0, 4.0]]))
    assert log.take() == [1.0, 3.0, 2.0, 4.0], "the loop goes over the steps, each for the whole batch"


def test_branches_and_while_loops():
    log = Log()
    f = lambda x: lax.cond(x > 0.0, reports(log), lambda x: x, x)
    for g in (f, bf.jit(f), bf.grad(f), bf.jit(bf.grad(f)), bf.checkpoint(f), bf.grad(bf.checkpoint(f))):
        g(arr(1.0)), g(arr(-1.0))
        assert log.take() == [1.0]
    loop = lambda x: lax.while_loop(lambda x: x < 3.0, lambda x: (bf.debug.callback(log, x), x + 1.0)[1], x)
    for g in (loop, bf.jit(loop), lambda x: bf.jvp(loop, (x,), (x,))):
        g(arr(0.0))
        assert log.take() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("wrap", [lambda f: f, bf.jit, bf.grad])
def test_actions_of_elements_that_go_their_own_ways_are_refused(wrap):
    log = Log()
    branch = lambda x: lax.cond(x > 0.0, acts(log), lambda x: x, x)
    loop = lambda x: lax.scan(lambda c, _: (branch(c), None), x, None, length=2)[0]
    rounds = lambda x: lax.while_loop(lambda x: x < 3.0, lambda x: acts(log)(x) + 1.0, lax.stop_gradient(x))
    total = lambda f: lambda x: bf.vmap(f)(x).sum()
    for f, name in ((branch, "cond"), (loop, "cond"), (rounds, "while")):
        with pytest.raises(
            errors.UnsupportedError, match=f"vmap of a {name} with the effects io, where"
        ) as info:
            wrap(total(f))(arr([1.0, -1.0]))
        assert "test_effects.py" in info.value.where and info.value.fix
    assert log.take() == []
    steered = lambda x, y: lax.cond(y > 0.0, acts(log), lambda x: x, x)
    wrap(lambda x: bf.vmap(steered, (0, None))(x, arr(1.0)).sum())(arr([1.0, -1.0]))
    assert log.take() == [1.0, -1.0]
    reported = lambda x: lax.cond(x > 0.0, reports(log), lambda x: x, x)
    wrap(total(reported))(arr([1.0, -1.0]))
    assert log.take() == [1.0, -1.0], "reports come for all elements"


@EFFECT
def test_effects_come_in_the_order_of_the_program(effect):
    log = Log()
    f, other = effect(log), acts(log, ordered=True)

    @bf.jit
    def program(x):
        x = bf.jit(f)(x)
        bf.jit(other)(x + 1.0)
        ys = lax.scan(lambda c, a: (c, f(a)), None, bnp.stack([x + 2.0, x + 3.0]))[1]
        return bf.checkpoint(other)(x + 4.0) + ys[0] * 0.0

    x = arr(X)
    program(x)
    y = bnp.sin(x) * x
    np.testing.assert_allclose(log.take(), [X, *(float(y) + i for i in range(1, 5))])
    bf.grad(program)(x)
    np.testing.assert_allclose(log.take(), [X, *(float(y) + i for i in range(1, 5))])


def test_the_same_effect_twice_happens_twice():
    log = Log()
    f = lambda x: (bf.io_callback(log, None, x), bf.io_callback(log, None, x), x)[2]
    bf.jit(f)(arr(1.0))
    assert log.take() == [1.0, 1.0]
    jaxpr = bf.jit(f).lower(arr(1.0)).jaxpr
    assert [e.prim for e in jaxpr.eqns] == [io_callback_p] * 2


def with_rule(rule):
    """A function whose jvp rule does something to its tangent."""

    @bf.custom_jvp
    def f(x):
        return x * 2.0

    @f.defjvp
    def _(primals, tangents):
        return f(*primals), rule(tangents[0]) * 2.0

    return f


def test_callbacks_of_tangents_are_not_transposed():
    for api in (bf.pure_callback, bf.io_callback):
        f = with_rule(lambda t, api=api: api(np.negative, F64, t))
        close(bf.jvp(f, (arr(1.0),), (arr(3.0),))[1], arr(-6.0))
        with pytest.raises(errors.GradError, match="has no transpose"):
            bf.grad(f)(arr(1.0))
    g = with_rule(lambda t: (bf.io_callback(lambda t: None, None, t), t)[1])
    close(bf.jvp(g, (arr(1.0),), (arr(3.0),))[1], arr(6.0))
    with pytest.raises(errors.GradError, match="io_callback has no transpose"):
        bf.jit(bf.grad(g))(arr(1.0))


def test_rules_report_where_they_run():
    log = Log()

    @bf.custom_vjp
    def f(x):
        return bnp.sin(x)

    f.defvjp(
        lambda x: ((bf.debug.callback(log, x), bnp.sin(x))[1], x),
        lambda x, ct: ((bf.debug.callback(log, ct), ct * bnp.cos(x))[1],),
    )
    for g in (bf.grad(f), bf.jit(bf.grad(f)), bf.grad(bf.jit(f)), bf.grad(bf.checkpoint(f))):
        g(arr(2.0))
        assert log.take() == [2.0, 1.0]
    f(arr(2.0))
    assert log.take() == []


def test_reports_of_tangents_are_of_forward_mode():
    log = Log()
    f = with_rule(lambda t: (bf.debug.callback(log, t), t)[1])
    for g in (f, bf.jit(f), bf.checkpoint(f)):
        bf.jvp(g, (arr(1.0),), (arr(3.0),))
        assert log.take() == [3.0]
        bf.linearize(g, arr(1.0))[1](arr(4.0))
        assert log.take() == [4.0]
        bf.grad(g)(arr(1.0))
        assert log.take() == []


def test_looking_has_no_effect():
    log = Log()
    f = reports(log)
    jaxpr = bf.make_jaxpr(f)(arr(1.0))
    bf.eval_shape(bf.grad(f), arr(1.0))
    bf.jit(f).lower(arr(1.0)).compile()
    assert log.take() == []
    assert jaxpr.effects == {"debug"} and [e.prim for e in jaxpr.eqns].count(debug_callback_p) == 1


def test_effects_of_jaxprs():
    log = Log()
    of = lambda f: bf.make_jaxpr(bf.jit(f))(arr(1.0)).effects
    assert of(stores(log)) == {"io"} and of(stores(log, True)) == {"ordered_io"}
    assert of(reports(log)) == {"debug"} and of(reports(log, True)) == {"ordered_debug"}
    assert of(lambda x: bf.pure_callback(np.sin, x, x)) == set()
    assert of(lambda x: lax.scan(lambda c, _: (reports(log)(c), None), x, None, length=2)[0]) == {"debug"}


def test_a_program_without_results():
    log = Log()
    f = bf.jit(lambda x: (lax.scan(lambda c, a: (c, bf.debug.callback(log, a)), None, x), None)[1])
    assert f(arr([1.0, 2.0])) is None
    assert log.take() == [1.0, 2.0]
    text = f.lower(arr([1.0, 2.0])).compile().source()
    assert "\n    scan([v0])  #" in text and "return ()" in text
    assert str(bf.make_jaxpr(lambda: bf.debug.callback(log, 1.0))()).startswith(
        "{ lambda ; . let\n    debug_callback[callback=Log ordered=False] 1.0"
    )


def test_check_effects_finds_what_is_lost():
    log = Log()
    jaxpr = bf.make_jaxpr(lambda x: (reports(log)(x), stores(log)(x)))(arr(1.0))
    check.check_effects(jaxpr, simplify(jaxpr))
    lost = jaxpr.replace(eqns=[e for e in jaxpr.eqns if e.prim is not debug_callback_p])
    with pytest.raises(
        errors.JaxprTypeError, match="effects were debug_callback, io_callback and are now io_callback"
    ):
        check.check_effects(jaxpr, lost)


def test_silenced_jaxprs_keep_their_type():
    log = Log()
    loop = lambda x: lax.scan(lambda c, _: (stores(log)(reports(log)(c)), None), x, None, length=2)[0]
    jaxpr = bf.make_jaxpr(loop)(arr(1.0))
    silent = effects.silenced(jaxpr)
    check.check_jaxpr(silent)
    assert silent.effects == {"io"} and jaxpr.effects == {"io", "debug"}
    assert effects.silenced(silent).effects == {"io"}
    pure = bf.make_jaxpr(bnp.sin)(arr(1.0))
    assert effects.silenced(pure) is pure


# -- as in JAX ---------------------------------------------------------------------------------------

# Programs for either library: ``b`` has the transforms, ``f`` reports its argument.
COUNTED = {
    "call": lambda b, f: f,
    "jit": lambda b, f: b.jit(f),
    "grad": lambda b, f: b.grad(f),
    "grad of grad": lambda b, f: b.grad(b.grad(f)),
    "jit of grad of jit": lambda b, f: b.jit(b.grad(b.jit(f))),
    "jvp": lambda b, f: lambda x: b.jvp(f, (x,), (x,)),
    "vmap": lambda b, f: lambda x: b.vmap(f)(x * np.arange(3, dtype=np.float32)),
    "jit of vmap of grad": lambda b, f: b.jit(
        lambda x: b.vmap(b.grad(f))(x * np.arange(3, dtype=np.float32))
    ),
    "scan": lambda b, f: lambda x: b.lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0],
    "grad of scan": lambda b, f: b.grad(
        lambda x: b.lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0]
    ),
    "cond": lambda b, f: (
        lambda x: b.lax.cond(x > 0, f, lambda x: x, x) + b.lax.cond(x < 0, f, lambda x: x, x)
    ),
    "grad of cond": lambda b, f: b.grad(lambda x: b.lax.cond(x > 0, f, lambda x: x, x)),
    "while": lambda b, f: lambda x: b.lax.while_loop(lambda x: x < 3, lambda x: f(x) * 0 + x + 1, x),
    "fori": lambda b, f: b.grad(lambda x: b.lax.fori_loop(0, 3, lambda i, x: f(x), x)),
    "map": lambda b, f: lambda x: b.lax.map(f, x * np.arange(3, dtype=np.float32)),
    "checkpoint": lambda b, f: b.jit(b.checkpoint(f)),
}


@pytest.mark.peer
@pytest.mark.parametrize("name", COUNTED)
def test_reports_as_jax(name):
    import jax

    logs = []
    for b in (bf, jax):
        log = []
        report = lambda x, b=b, log=log: b.debug.callback(lambda x: log.append(float(x)), x)
        b.block_until_ready(COUNTED[name](b, lambda x, r=report: (r(x), x * x)[1])(b.numpy.float32(0.5)))
        b.effects_barrier()
        logs.append(log)
    assert sorted(logs[0]) == sorted(logs[1]) and logs[0]
