"""``scan``: values, derivatives, batches, residuals, and errors.

Each loop of the table is compared with itself unrolled, and its derivatives with differences too.
"""

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, random, tree
from blufunc.core.ir import dtypes
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ir.jaxpr import subjaxprs
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, value_and_grad, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.control_flow.scan import scan, scan_p
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw


def unrolled(f, init, xs=None, length=None, reverse=False, unroll=1):
    """Reference implementation of ``scan``."""
    n = length if length is not None else tree.leaves(xs)[0].shape[0]
    carry, ys = init, [None] * n
    for i in range(n)[:: -1 if reverse else 1]:
        carry, ys[i] = f(carry, tree.map(operator.itemgetter(i), xs))
    return carry, tree.map(lambda *y: bnp.stack(y), *ys)


def scans(jaxpr):
    """All scan equations, at any depth."""
    found = []
    for e in jaxpr.eqns:
        found += [e] if e.prim is scan_p else []
        for sub in subjaxprs(e.params):
            found += scans(sub)
    return found


def names(jaxpr):
    return [e.prim.name for e in jaxpr.eqns]


# -- the table of loops ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A loop: ``body(consts, carry, x)``, and what it is run on."""

    body: Callable
    consts: Any = ()
    init: Any = ()
    xs: Any = None
    options: dict = field(default_factory=dict)

    def run(self, loop, consts, init, xs):
        return loop(lambda c, x: self.body(consts, c, x), init, xs, **self.options)


def rnn(p, h, x):
    h = bnp.tanh(p["w"] @ h + p["b"] * x)
    return h, h * p["b"]


def branching(p, c, x):
    a = bnp.sin(c["a"] * x["u"]) + p
    return {"a": a, "b": (c["b"][0] * a, c["b"][1])}, [x["v"] * a, {"y": c["b"][0]}]


W = {"w": draw(3, 3), "b": draw(3)}
LOOPS = {
    "rnn": Loop(rnn, W, draw(3), draw(4, 3)),
    "reverse": Loop(rnn, W, draw(3), draw(4, 3), {"reverse": True}),
    "pytrees": Loop(
        branching, draw(), {"a": draw(), "b": (draw(3), draw(2))}, {"u": draw(4), "v": draw(4, 3)}
    ),
    "no xs": Loop(lambda p, c, x: (bnp.sin(c) * p, c * c), draw(3), draw(3), None, {"length": 4}),
    "no xs, reverse": Loop(
        lambda p, c, x: (bnp.sin(c) * p, c), draw(), draw(), None, {"length": 3, "reverse": True}
    ),
    "no carry": Loop(lambda p, c, x: ((), bnp.sin(x * p)), draw(3), (), draw(4, 3)),
    "no ys": Loop(lambda p, c, x: (bnp.sin(c * x) + p, None), draw(3), draw(3), draw(4, 3)),
    "no consts": Loop(lambda p, c, x: (c * x, c + x), (), draw(), draw(4)),
    "length 1": Loop(rnn, W, draw(3), draw(1, 3)),
    "unroll": Loop(rnn, W, draw(3), draw(5, 3), {"unroll": 2}),
    "counter": Loop(
        lambda p, c, x: ((c[0] + 1, c[1] * bnp.sin(p * c[0].astype("float64"))), (c[0], c[1] * x)),
        draw(),
        (arr(0, np.int32), draw()),
        draw(4),
    ),
    "integer xs": Loop(
        lambda p, c, x: (c * p + x[0].astype("float64") * x[1], x[0] + 1),
        draw(),
        draw(),
        (arr([3, 1, 2], np.int32), draw(3)),
    ),
    "rotating": Loop(
        lambda p, c, x: ((c[1], c[2], c[0] * p), c[0] * x), draw(), (draw(), arr(0.3), arr(0.6)), draw(5)
    ),
    "delayed": Loop(  # tangents reach a carry one after the other
        lambda p, c, x: ((c[0] + x, c[1] + bnp.sin(c[0]), c[2] * c[1], c[3]), c[2]),
        (),
        (draw(), arr(0.5), arr(0.7), arr(0.1)),
        draw(4),
    ),
    "passing": Loop(lambda p, c, x: (c, (c, x, p, x * c)), draw(2), draw(2), draw(3, 2)),
    "constant": Loop(lambda p, c, x: (arr([1.0, 2.0]), (arr(3.0), c * p)), draw(2), draw(2), draw(3)),
}
ALL = pytest.mark.parametrize("name", LOOPS)
PARTS = ("consts", "init", "xs")


def is_float(x):
    return dtypes.is_floating(x.aval.dtype)


def losses(loop, parts):
    """The loop as a scalar function of some floats: scanned, unrolled; the floats."""
    whole = {"consts": loop.consts, "init": loop.init, "xs": loop.xs}
    leaves, structure = tree.flatten(whole)
    owners = [p for p in sorted(whole) for _ in tree.leaves(whole[p])]
    chosen = [i for i, x in enumerate(leaves) if owners[i] in parts and is_float(x)]

    def loss(how):
        def f(floats):
            full = list(leaves)
            for i, x in zip(chosen, floats, strict=True):
                full[i] = x
            outs = tree.leaves(loop.run(how, **tree.unflatten(structure, full)))
            total = 0.0
            for k, y in enumerate(outs):
                if is_float(y):
                    total = total + (bnp.sin(y + 0.1 * k) * draw(*y.shape, seed=k + 1)).sum()
            return total

        return f

    return loss(scan), loss(unrolled), [leaves[i] for i in chosen]


def directions(xs):
    return [draw(*x.shape, seed=9 + i) for i, x in enumerate(xs)]


def difference(f, xs, ts, h=5e-3):
    """The derivative of ``f`` along ``ts``, to sixth order."""
    at = lambda k: np.asarray(f([arr(np.asarray(x) + k * h * np.asarray(t)) for x, t in zip(xs, ts)]))
    return sum(w * (at(k) - at(-k)) for k, w in ((1, 45 / 60), (2, -9 / 60), (3, 1 / 60))) / h


def along(g, ts):
    return lambda xs: sum([(a * t).sum() for a, t in zip(g(xs), ts)], 0.0)


def chosen_parts(name):
    """The parts of a loop that have floats, one at a time and all together."""
    for parts in [*((p,) for p in PARTS), PARTS]:
        if losses(LOOPS[name], parts)[2]:
            yield pytest.param(name, parts, id=f"{name}-{'+'.join(parts)}")


EACH_PART = pytest.mark.parametrize("name, parts", [c for n in LOOPS for c in chosen_parts(n)])
SOME_PARTS = pytest.mark.parametrize(
    "name, parts",
    [c for n in LOOPS for c in [*chosen_parts(n)][0 if n in ("rnn", "pytrees", "delayed") else -1 :]],
)


# -- values ----------------------------------------------------------------------------------------


@ALL
def test_values(name):
    loop = LOOPS[name]
    want = loop.run(unrolled, loop.consts, loop.init, loop.xs)
    close(loop.run(scan, loop.consts, loop.init, loop.xs), want)
    close(jit(lambda *a: loop.run(scan, *a))(loop.consts, loop.init, loop.xs), want)
    close(jit(lambda: loop.run(scan, loop.consts, loop.init, loop.xs))(), want)


@pytest.mark.parametrize("reverse", [False, True])
def test_ys_stand_in_the_order_of_xs(reverse):
    carry, ys = scan(lambda c, x: (c + x, c), arr(0.0), arr([1.0, 2.0, 4.0]), reverse=reverse)
    assert float(carry) == 7.0
    assert np.asarray(ys).tolist() == ([6, 4, 0] if reverse else [0, 1, 3])


def test_no_steps():
    xs = arr(np.zeros((0, 3)))
    f = lambda c, x: (c * x, (x, c.sum()))
    for run in (scan, jit(scan, static_argnums=0)):
        carry, (a, b) = run(f, arr([1.0, 2.0, 3.0]), xs)
        assert np.asarray(carry).tolist() == [1, 2, 3]
        assert a.shape == (0, 3) and b.shape == (0,)
    loss = lambda c, xs: (scan(f, c, xs)[0] * arr([1.0, 2.0, 3.0])).sum()
    g = grad(loss, (0, 1))(arr([1.0, 1.0, 1.0]), xs)
    close(g, (arr([1.0, 2.0, 3.0]), xs))
    close(jit(grad(loss, (0, 1)))(arr([1.0, 1.0, 1.0]), xs), g)
    close(vmap(lambda c: scan(f, c, xs)[0])(draw(2, 3)), draw(2, 3))
    assert scan(lambda c, x: (c, x), (), None, length=0) == ((), None)


def test_results_do_not_share_storage_with_arguments():
    init = arr([1.0, 2.0])
    step = jit(lambda c: scan(lambda c, x: (c, None), c, length=0)[0], donate_argnums=0)
    kept = scan(lambda c, x: (c, None), init, length=0)[0]
    assert np.asarray(step(init)).tolist() == [1, 2]
    assert np.asarray(kept).tolist() == [1, 2]


def test_a_weak_carry_takes_the_dtype_that_the_body_gives_it():
    def dtypes_of(init, xs):
        carry, ys = scan(lambda c, x: (c + x, c), init, xs)
        assert carry.dtype == ys.dtype and not carry.weak_type
        return carry.dtype.name

    assert dtypes_of(0, arr([1.0, 2.0])) == "float64"
    assert dtypes_of(0.0, arr([1.0, 2.0])) == "float64"
    assert dtypes_of(0.0, arr([1.0, 2.0], np.float16)) == "float16", "as in the second step of a Python loop"
    assert dtypes_of(0, arr([1, 2], np.int16)) == "int16"
    assert scan(lambda c, x: (c * 2, None), 1, length=3)[0].dtype == np.int32
    assert scan(lambda c, x: (c * 2.5, None), 1, length=3)[0].dtype == np.float32
    assert float(jit(lambda: scan(lambda c, x: (c + x, None), 0.0, arr([1.0, 2.0])))()[0]) == 3.0
    assert float(grad(lambda c: scan(lambda c, x: (c * x, None), c, arr([3.0, 2.0]))[0])(1.0)) == 6.0


def test_the_body_is_traced_once_and_again_only_for_a_weak_carry():
    count = []

    def body(c, x):
        count.append(c.aval)
        return c * x, None

    scan(body, arr(1.0), arr([1.0, 2.0, 3.0]))
    assert len(count) == 1
    scan(body, 1.0, arr([1.0, 2.0, 3.0]))
    assert [a.weak_type for a in count[1:]] == [True, False]


def test_the_body_is_traced_anew_in_each_call():
    """A changed closure shows outside ``jit``."""
    w = arr(2.0)
    body = lambda c, x: (c * w, None)
    assert float(scan(body, arr(1.0), length=3)[0]) == 8.0
    w = arr(3.0)
    assert float(scan(body, arr(1.0), length=3)[0]) == 27.0


def test_random_keys_as_inputs_and_as_carry():
    keys = random.split(random.key(0), 3)
    ys = scan(lambda c, k: (c, random.normal(k, (2,))), (), keys)[1]
    close(ys, bnp.stack([random.normal(keys[i], (2,)) for i in range(3)]))

    def step(key, _):
        key, use = random.split(key)
        return key, random.uniform(use)

    close(scan(step, random.key(1), length=3)[1], unrolled(step, random.key(1), length=3)[1])


# -- derivatives -----------------------------------------------------------------------------------


@EACH_PART
def test_first_derivatives(name, parts):
    f, g, xs = losses(LOOPS[name], parts)
    ts = directions(xs)
    want = grad(g)(xs)
    slope = along(lambda _: want, ts)(xs)
    value, got = value_and_grad(f)(xs)
    close(value, g(xs))
    close(got, want)
    close(jit(grad(f))(xs), want)
    close(vjp(f, xs)[1](arr(1.0))[0], want)
    for forward in (jvp(f, (xs,), (ts,))[1], jit(lambda xs, ts: jvp(f, (xs,), (ts,))[1])(xs, ts)):
        close(forward, slope)
    close(linearize(f, xs)[1](ts), slope)
    close(arr(difference(f, xs, ts)), slope, 1e-9)


@SOME_PARTS
def test_second_derivatives(name, parts):
    f, g, xs = losses(LOOPS[name], parts)
    ts = directions(xs)
    want = grad(along(grad(g), ts))(xs)
    close(grad(along(grad(f), ts))(xs), want, 1e-11)
    close(jit(lambda xs: jvp(grad(f), (xs,), (ts,))[1])(xs), want, 1e-11)
    close(grad(lambda xs: jvp(f, (xs,), (ts,))[1])(xs), want, 1e-11)
    if parts == PARTS:
        rough = difference(jit(along(grad(f), ts)), xs, ts)
        close(arr(rough), along(lambda _: want, ts)(xs), 1e-8)


def test_third_derivatives_of_every_mode():
    f, g, xs = losses(LOOPS["rnn"], PARTS)
    ts = directions(xs)
    forward = lambda f: lambda xs: jvp(f, (xs,), (ts,))[1]
    reverse = lambda f: along(grad(f), ts)
    want = forward(forward(forward(g)))(xs)
    for modes in itertools.product([forward, reverse], repeat=3):
        h = f
        for mode in modes:
            h = mode(h)
        close(h(xs), want, 1e-10)


def test_integers_have_float0_tangents():
    def f(n, x):
        (i, c), ys = scan(lambda c, x: ((c[0] + 1, c[1] * x), c[0]), (n, x), arr([2.0, 3.0]))
        return i, c, ys

    zero = np.zeros((), dtypes.float0)
    outs, ts = jvp(f, (arr(0, np.int32), arr(1.0)), (zero, arr(1.0)))
    assert int(outs[0]) == 2 and float(ts[1]) == 6.0
    assert ts[0].dtype == ts[2].dtype == dtypes.float0 and ts[2].shape == (2,)
    _, pull = vjp(f, arr(0, np.int32), arr(1.0))
    ct_n, ct_x = pull((zero, arr(2.0), np.zeros(2, dtypes.float0)))
    assert ct_n.dtype == dtypes.float0 and float(ct_x) == 12.0


def test_gradients_of_what_is_closed_over():
    """Closures: arrays, outer tracers, and jitted functions that close over tracers."""
    table = draw(4)

    def f(run, w, v):
        inner = jit(lambda c: c * w + table[0])
        return (run(lambda c, x: (bnp.sin(inner(c) * x) + table[1], c * v), w, table)[1] ** 2).sum()

    w, v = arr(0.7), arr(1.3)
    nested = lambda run: (
        lambda v: grad(lambda w: f(run, w, v))(w) + jvp(lambda w: f(run, w, v), (w,), (v,))[1]
    )
    for transform in (grad, lambda f: jit(grad(f)), lambda f: lambda v: vmap(grad(f))(bnp.stack([v, v * 2]))):
        close(transform(nested(scan))(v), transform(nested(unrolled))(v), 1e-11)


# -- batches ---------------------------------------------------------------------------------------


def batched(x, d):
    return x if d is None else tree.map(lambda x: bnp.stack([x, x * 0.5], d), x)


AXES = [a for a in itertools.product([0, -1, None], repeat=3) if a != (None,) * 3]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("name", ["rnn", "reverse", "pytrees", "counter"])
def test_vmap(name, axes):
    """Over each axis of constants, initial carry and inputs, in all mixtures."""
    loop = LOOPS[name]
    parts = [loop.consts, loop.init, loop.xs]
    if name == "counter":  # the counter itself is not batched, and stays so
        axes = (axes[0], (None, axes[1]), axes[2])
    args = [
        (p[0], batched(p[1], a[1])) if isinstance(a, tuple) else batched(p, a) for p, a in zip(parts, axes)
    ]
    got = vmap(lambda *a: loop.run(scan, *a), in_axes=axes)(*args) if tree.leaves(axes) else None
    pick = lambda x, a, i: x if a is None else tree.map(lambda x: bnp.moveaxis(x, a, 0)[i], x)
    rows = [
        loop.run(
            scan,
            *(
                (x[0], pick(x[1], a[1], i)) if isinstance(a, tuple) else pick(x, a, i)
                for x, a in zip(args, axes)
            ),
        )
        for i in range(2)
    ]
    close(got, tree.map(lambda *r: bnp.stack(r), *rows))


def test_carries_that_no_batch_reaches_are_not_batched():
    f = lambda x: scan(lambda c, _: ((c[0] + 1, c[1] * x), c[0]), (arr(0.0), arr(1.0)), length=3)
    (eqn,) = scans(make_jaxpr(vmap(f))(draw(2)))
    assert [v.aval.shape for v in eqn.outvars] == [(), (2,), (3,)]


@pytest.mark.parametrize("axes", [a for a in AXES if -1 not in a], ids=str)
def test_vmap_of_grad_and_grad_of_vmap(axes):
    loop = LOOPS["rnn"]
    args = [batched(p, a) for p, a in zip((loop.consts, loop.init, loop.xs), axes)]
    loss = lambda how: lambda *a: (loop.run(how, *a)[1] ** 2).sum()
    for f in (
        lambda how: vmap(grad(loss(how), (0, 1, 2)), in_axes=axes),
        lambda how: grad(lambda *a: (vmap(loss(how), in_axes=axes)(*a) ** 2).sum(), (0, 1, 2)),
    ):
        want = f(unrolled)(*args)
        close(f(scan)(*args), want, 1e-11)
        close(jit(f(scan))(*args), want, 1e-11)


def test_vmap_twice_and_second_order():
    loop = LOOPS["no ys"]
    f = lambda how: lambda c, x: (loop.run(how, loop.consts, c, x)[0] ** 2).sum()
    both = lambda how: vmap(vmap(jvp_of_grad(f(how)), (0, None)), (None, 0))
    jvp_of_grad = lambda f: lambda c, x: jvp(lambda c: grad(f)(c, x), (c,), (c * 2,))[1]
    close(both(scan)(draw(2, 3), draw(5, 4, 3)), both(unrolled)(draw(2, 3), draw(5, 4, 3)), 1e-11)


# -- compositions ----------------------------------------------------------------------------------


def nested(run, p, x):
    """Nested loops: the inner carry is the outer input."""

    def outer(c, x):
        d, ys = run(lambda d, q: (bnp.sin(d * q) + c, d * c), x, p)
        return c * 0.5 + d, ys.sum()

    c, ys = run(outer, arr(0.3), x)
    return c + (ys**2).sum()


COMPOSED = {
    "nested": nested,
    "checkpointed body": lambda run, p, x: run(
        checkpoint(lambda c, a: (bnp.sin(c * a) * p[0], c))
        if run is scan
        else lambda c, a: (bnp.sin(c * a) * p[0], c),
        p[1],
        x,
    )[0],
    "checkpointed loop": lambda run, p, x: checkpoint(
        lambda p, x: run(lambda c, a: (bnp.sin(c * a) * p[0], c), p[1], x)[0]
    )(p, x),
    "jitted body": lambda run, p, x: run(jit(lambda c, a: (bnp.sin(c * a) * p[0], c)), p[1], x)[0],
    "vmapped body": lambda run, p, x: run(
        lambda c, a: (vmap(lambda c, q: bnp.sin(c * q * a))(c, p), c), p * 2, x
    )[1].sum(),
    "derivative in the body": lambda run, p, x: run(
        lambda c, a: (grad(lambda c: bnp.sin(c * a) * p[0])(c), c), p[1], x
    )[0],
    "loop in jit in vmap": lambda run, p, x: vmap(
        lambda q: jit(lambda q: run(lambda c, a: (bnp.sin(c * a), c), q, x)[0])(q)
    )(p).sum(),
}


@pytest.mark.second
@pytest.mark.parametrize("name", COMPOSED)
def test_compositions(name):
    f = lambda run: lambda p, x: COMPOSED[name](run, p, x)
    p, x = draw(3), draw(4)
    want = f(unrolled)(p, x)
    close(f(scan)(p, x), want)
    close(jit(f(scan))(p, x), want)
    for order in (lambda f: grad(f, (0, 1)), lambda f: grad(lambda p, x: (grad(f)(p, x) ** 2).sum(), (0, 1))):
        want = order(f(unrolled))(p, x)
        close(order(f(scan))(p, x), want, 1e-11)
        close(jit(order(f(scan)))(p, x), want, 1e-11)
        close(
            vmap(order(f(scan)), (0, None))(batched(p, 0), x),
            tree.map(lambda *r: bnp.stack(r), want, order(f(unrolled))(p * 0.5, x)),
            1e-11,
        )
    close(jvp(f(scan), (p, x), (x[:3], x))[1], jvp(f(unrolled), (p, x), (x[:3], x))[1])


@pytest.mark.parametrize("wrap", [lambda f: f, jit, checkpoint, lambda f: lambda x: vmap(f)(x[None])[0]])
def test_a_loop_in_custom_rules(wrap):
    """The forward rule keeps the ys of a loop, the backward rule runs another."""

    @custom_vjp
    def total(x):
        return scan(lambda c, a: (c * a, None), arr(1.0), x)[0]

    def fwd(x):
        out, before = scan(lambda c, a: (c * a, c), arr(1.0), x)
        return out, (before, x)

    def bwd(res, ct):
        step = lambda after, r: (after * r[1], after * r[0])
        return (scan(step, ct, res, reverse=True)[1],)

    total.defvjp(fwd, bwd)
    x = draw(4)
    f = wrap(total)
    plain = lambda x: unrolled(lambda c, a: (c * a, None), arr(1.0), x)[0]
    close(grad(f)(x), grad(plain)(x))
    twice = lambda f: grad(lambda x: (grad(f)(x) ** 2).sum())
    close(twice(f)(x), twice(plain)(x), 1e-11)


def test_a_rule_that_carries_primals_and_tangents_together():
    """Two loops, over values and over tangents, whichever carries need it."""

    @custom_jvp
    def f(x, a):
        return scan(lambda c, a: (bnp.sin(c * a), c), x, a)

    @f.defjvp
    def _(primals, tangents):
        def body(c, a):
            (x, t, n), (a, da) = c, a
            s = bnp.sin(x * a)
            return (s, bnp.cos(x * a) * (t * a + x * da), n + 1), (x, t)

        init = (primals[0], tangents[0], arr(0, np.int32))
        (x, t, _), (xs, ts) = scan(body, init, (primals[1], tangents[1]))
        return (x, xs), (t, ts)

    plain = lambda x, a: unrolled(lambda c, a: (bnp.sin(c * a), c), x, a)

    def loss(f):
        def g(x, a):
            out, ys = f(x, a)
            return (ys**2).sum() + out

        return g

    x, a = draw(), draw(4)
    close(value_and_grad(loss(f), (0, 1))(x, a), value_and_grad(loss(plain), (0, 1))(x, a))
    close(jit(grad(loss(f), (0, 1)))(x, a), grad(loss(plain), (0, 1))(x, a))
    twice = lambda f: grad(lambda x, a: (grad(loss(f), 1)(x, a) ** 2).sum(), (0, 1))
    close(twice(f)(x, a), twice(plain)(x, a), 1e-11)
    close(vmap(grad(loss(f)), (0, None))(draw(2), a), vmap(grad(loss(plain)), (0, None))(draw(2), a))
    ahead, back = scans(jit(grad(loss(f))).lower(x, a).jaxpr)
    assert [v.aval.dtype.kind for v in ahead.outvars].count("i") == 0, "the counter serves nothing"
    assert back.params["reverse"] and not ahead.params["reverse"]


# -- what is computed and stored -------------------------------------------------------------------


def five_outputs(x, a):
    (c, d, e, n), (u, v) = scan(
        lambda c, a: (
            (bnp.sin(c[0] * a), c[1] + bnp.exp(c[2]), c[2] * a, c[3] + 1),
            (bnp.cos(c[0]), c[3] * 2),
        ),
        (x, x, x, arr(0, np.int32)),
        a,
    )
    return {"c": c, "d": d, "e": e, "n": n, "u": u, "v": v, "x": x}


@pytest.mark.parametrize(
    "kept, n_carry, n_ys, inside",
    [
        ("c", 1, 0, {"mul", "sin"}),
        ("d", 2, 0, {"add", "exp", "mul"}),  # d needs e
        ("e", 1, 0, {"mul"}),
        ("u", 1, 1, {"mul", "sin", "cos"}),
        ("v", 1, 1, {"add", "mul"}),
    ],
)
def test_outputs_that_nobody_reads_disappear(kept, n_carry, n_ys, inside):
    f = jit(lambda x, a: five_outputs(x, a)[kept])
    x, a = draw(), draw(4)
    lowered = f.lower(x, a).jaxpr
    check_jaxpr(lowered)
    (eqn,) = scans(lowered)
    assert (eqn.params["n_carry"], len(eqn.outvars)) == (n_carry, n_carry + n_ys)
    assert set(names(eqn.params["jaxpr"])) == inside
    close(f(x, a), five_outputs(x, a)[kept])


def test_operands_that_nobody_reads_disappear():
    lowered = jit(lambda x, a: five_outputs(x, a)["n"]).lower(draw(), draw(4)).jaxpr
    assert len(scans(lowered)[0].invars) == 1, "the counter, and no inputs"
    lowered = jit(lambda x, a: five_outputs(x, a)["x"]).lower(draw(), draw(4)).jaxpr
    assert scans(lowered) == []


def test_the_gradient_of_one_output_is_of_the_smaller_loop():
    f = lambda c, d: scan(lambda c, _: ((bnp.sin(c[0]), bnp.exp(c[1])), None), (c, d), length=3)[0]
    lowered = jit(grad(lambda c, d: f(c, d)[0])).lower(draw(), draw()).jaxpr
    assert "exp" not in str(lowered)


def forward_and_backward(f, *args):
    """The two scans of a gradient, lowered."""
    ahead, back = scans(jit(grad(f)).lower(*args).jaxpr)
    assert not ahead.params["reverse"] and back.params["reverse"]
    return ahead, back


def test_residuals_that_are_constants_or_inputs_are_not_stacked():
    """Of ``c * w * x`` only the carry is new: ``w`` and ``x`` are there already."""
    w, x = draw(3), draw(4, 3)
    f = lambda c: scan(lambda c, x: (c * c * w * x, None), c, x)[0].sum()
    ahead, back = forward_and_backward(f, draw(3))
    stacked = [v.aval.shape for v in ahead.outvars[ahead.params["n_carry"] :]]
    assert stacked.count((4, 3)) == len(stacked) <= 2
    n = back.params["n_consts"]
    assert (3,) in [v.aval.shape for v in back.invars[:n]], "w is a constant of the backward loop"
    assert x.shape in [v.aval.shape for v in back.invars]
    jaxpr = jit(grad(lambda c: scan(lambda c, x: (c * w * x, None), c, x)[0].sum())).lower(draw(3)).jaxpr
    (back,) = scans(jaxpr)
    assert back.params["reverse"], "a loop linear in its carry leaves nothing to run ahead"


def test_residuals_that_are_ys_are_not_stacked_again():
    f = lambda c, x: (scan(lambda c, x: (bnp.exp(c * x),) * 2, c, x)[1] ** 2).sum()
    jaxpr = jit(value_and_grad(f)).lower(draw(3), draw(4, 3)).jaxpr
    ahead, _ = scans(jaxpr)
    assert [v.aval.shape for v in ahead.outvars[ahead.params["n_carry"] :]].count((4, 3)) == 1


def test_gradients_of_constants_are_summed_in_the_carry():
    w = draw(5, 5)
    f = lambda w: scan(lambda c, _: (bnp.tanh(w @ c), None), draw(5), length=100)[0].sum()
    _, back = forward_and_backward(f, w)
    assert (5, 5) in [v.aval.shape for v in back.outvars[: back.params["n_carry"]]]
    assert max(v.aval.size for v in back.outvars) == 25, "no stack of gradients of w"


def test_carries_without_a_tangent_are_not_in_the_backward_loop():
    f = lambda x: scan(lambda c, _: ((c[0] + 1, c[1] * bnp.sin(c[0])), None), (arr(0.0), x), length=3)[0][1]
    _, back = forward_and_backward(f, draw())
    assert back.params["n_carry"] == 1


def test_equations_of_the_body_keep_their_lines():
    jaxpr = make_jaxpr(grad(lambda x: scan(lambda c, _: (bnp.sin(c), None), x, length=3)[0]))(draw())
    for eqn in scans(jaxpr):
        assert all("test_scan.py" in e.source[0].co_filename for e in eqn.params["jaxpr"].eqns)


def test_golden_grad_of_scan(golden):
    f = lambda w, xs: (scan(lambda c, x: (bnp.tanh(w * c + x), c * x), arr(0.0), xs)[1] ** 2).sum()
    golden("scan_grad", jit(grad(f)).lower(draw(), draw(4)).jaxpr)


# -- errors ----------------------------------------------------------------------------------------

C = arr(1.0)


@tree.register_dataclass
@dataclass
class Counted:
    """A number, and one that belongs to the structure."""

    x: Any
    n: Any = field(metadata={"static": True})


ERRORS = {
    "another dtype": (
        lambda: scan(lambda c, x: ({"a": [c["a"][0].astype("float32")]}, None), {"a": [C]}, length=2),
        errors.CarryError,
        ("carry['a'][0]", "f64[]", "f32[]"),
    ),
    "another shape": (
        lambda: scan(lambda c, x: ((c[0], bnp.stack([c[1], c[1]])), None), (C, C), length=2),
        errors.CarryError,
        ("carry[1]", "f64[]", "f64[2]"),
    ),
    "a weak carry of another shape": (
        lambda: scan(lambda c, x: (c + draw(2), None), 0.0, length=2),
        errors.CarryError,
        ("f64[2]",),
    ),
    "a weak carry that becomes an integer": (
        lambda: scan(lambda c, x: (arr(1, np.int32), None), 0.5, length=2),
        errors.CarryError,
        ("f32[]", "i32[]"),
    ),
    "a different structure": (
        lambda: scan(lambda c, x: ((c["a"], c["a"]), None), {"a": C}, length=2),
        errors.CarryError,
        ("different structure", "init"),
    ),
    "static data of another class": (
        lambda: scan(lambda c, x: (Counted(c.x * c.n, float(c.n)), None), Counted(C, 1), length=2),
        errors.CarryError,
        (".n: static, 1 in init, 1.0 in the returned carry",),
    ),
    "a missing entry": (
        lambda: scan(lambda c, x: ({"a": c["a"]}, None), {"a": C, "b": C}, length=2),
        errors.CarryError,
        ("['b']",),
    ),
    "no pair": (lambda: scan(lambda c, x: c, C, length=2), errors.CarryError, ("(carry, y)", "<lambda>")),
    "a triple": (
        lambda: scan(lambda c, x: (c, x, x), C, length=2),
        errors.CarryError,
        ("(carry, y)", "tuple"),
    ),
    "a list": (lambda: scan(lambda c, x: [c, x], C, length=2), errors.CarryError, ("(carry, y)", "list")),
    "lengths": (
        lambda: scan(lambda c, x: (c, None), C, {"u": draw(3), "v": (draw(4, 2),)}),
        errors.ShapeError,
        ("xs['u'] has 3", "xs['v'][0] has 4"),
    ),
    "length and xs": (
        lambda: scan(lambda c, x: (c, None), C, draw(3), length=4),
        errors.ShapeError,
        ("has 3", "length is 4"),
    ),
    "rank 0": (lambda: scan(lambda c, x: (c, None), C, [C]), errors.ShapeError, ("xs[0]", "rank 0")),
    "no length": (lambda: scan(lambda c, x: (c, None), C), errors.ArgumentError, ("length=",)),
    "a float length": (
        lambda: scan(lambda c, x: (c, None), C, length=2.0),
        errors.ArgumentError,
        ("length", "2.0"),
    ),
    "a negative length": (
        lambda: scan(lambda c, x: (c, None), C, length=-1),
        errors.ValueRangeError,
        ("length=-1",),
    ),
    "xs of no arrays": (
        lambda: scan(lambda c, x: (c, None), C, {"a": "text"}),
        errors.ArgumentError,
        ("xs['a']", "str"),
    ),
    "init of no arrays": (
        lambda: scan(lambda c, x: (c, None), ["text"], length=2),
        errors.ArgumentError,
        ("init[0]", "str"),
    ),
    "a result of no arrays": (
        lambda: scan(lambda c, x: (c, "text"), C, length=2),
        errors.ArgumentError,
        ("result of <lambda>", "str"),
    ),
    "a branch on the carry": (
        lambda: scan(lambda c, x: (c if c > 0 else -c, None), C, length=2),
        errors.ConcretizationError,
        ("bool[]", "bnp.where"),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("wrap", [lambda f: f(), lambda f: jit(f)()], ids=["eager", "jit"])
def test_errors(name, wrap):
    run, error, says = ERRORS[name]
    with pytest.raises(error) as info:
        wrap(run)
    for text in says:
        assert text in str(info.value)
    assert "test_scan.py" in info.value.where


def test_a_body_that_leaks_is_found():
    kept = []

    def body(c, x):
        kept.append(c)
        return c, None

    scan(body, C, length=2)
    with pytest.raises(errors.LeakedTracerError, match="carry"):
        kept[0] + 1.0


# -- the peer --------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("reverse", [False, True])
def test_against_jax(reverse):
    import jax

    def loss(np_, run):
        def f(p, h, xs):
            def cell(h, x):
                h = np_.tanh(p["w"] @ h + p["u"] @ x + p["b"])
                return h, (h**2).sum()

            h, ys = run(cell, h, xs, reverse=reverse)
            return (ys**2).sum() + h.sum()

        return f

    rng = np.random.default_rng(0)
    f32 = lambda *s: rng.normal(size=s).astype(np.float32) * np.float32(0.5)
    args = ({"w": f32(4, 4), "u": f32(4, 3), "b": f32(4)}, f32(4), f32(6, 3))
    ours = jit(value_and_grad(loss(bnp, scan), (0, 1, 2)))(*args)
    theirs = jax.jit(jax.value_and_grad(loss(jax.numpy, jax.lax.scan), (0, 1, 2)))(*args)
    for a, b in zip(tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-5)
    if reverse:
        return
    hvp = lambda grad, jvp, f: lambda w: jvp(grad(lambda w: f({**args[0], "w": w}, *args[1:])), (w,), (w,))[1]
    ours = hvp(grad, jvp, loss(bnp, scan))(args[0]["w"])
    theirs = hvp(jax.grad, jax.jvp, loss(jax.numpy, jax.lax.scan))(args[0]["w"])
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-4)
