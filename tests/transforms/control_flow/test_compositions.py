"""Control flow under every transform, and nested in control flow.

The programs of ``programs.py`` are run with ``lax`` and with Python's own statements; the values and derivatives of
both agree, alone, over batches, and where a transform of the one meets rules of the other.
"""

import functools
import itertools

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import lax, tree
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ops.elementwise import sin_p
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, value_and_grad, vjp
from blufunc.transforms.autodiff.jacobian import hessian
from blufunc.transforms.autodiff.linear_transpose import linear_transpose
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.checkpointing import policies
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw
from tests.transforms.programs import LAX, PROGRAMS, PYTHON, floats_of, is_float, loss_of, stacked

ALL = pytest.mark.parametrize("name", PROGRAMS)
REVERSE = pytest.mark.parametrize("name", [n for n in PROGRAMS if PROGRAMS[n].reverse])
FORWARD_ONLY = pytest.mark.parametrize("name", [n for n in PROGRAMS if not PROGRAMS[n].reverse])
EACH = range(3)


def directions(xs):
    return [draw(*x.shape, seed=9 + i) for i, x in enumerate(xs)]


def inner(gs, ts):
    return sum([(g * t).sum() for g, t in zip(gs, ts, strict=True)], arr(0.0))


def along(f, ts):
    """The derivative of ``f`` along ``ts`` by reverse mode, as a function."""
    return lambda xs: inner(grad(f)(xs), ts)


def forward(f, ts):
    """The same by forward mode."""
    return lambda xs: jvp(f, (xs,), (ts,))[1]


def both(name, i):
    """A program with ``lax`` and with Python, as scalar functions; a direction."""
    args = PROGRAMS[name].args(i)
    (f, xs), (g, _) = (loss_of(PROGRAMS[name], cf, args) for cf in (LAX, PYTHON))
    return f, g, xs, directions(xs)


@functools.cache
def gradient(name, i):
    """By reverse mode through Python's own statements."""
    _, g, xs, _ = both(name, i)
    return grad(g)(xs)


@functools.cache
def second_derivative(name, i):
    """The gradient of the derivative along the direction, of the same."""
    _, g, xs, ts = both(name, i)
    return grad(along(g, ts))(xs)


@ALL
def test_values(name):
    run = PROGRAMS[name].run
    ours = lambda *args: run(LAX, *args)
    compiled = jit(ours)
    for i in EACH:
        args = PROGRAMS[name].args(i)
        want = run(PYTHON, *args)
        close(ours(*args), want)
        close(compiled(*args), want)
        close(jit(lambda: ours(*args))(), want)  # noqa: B023
        check_jaxpr(make_jaxpr(ours)(*args))


@ALL
def test_forward_mode(name):
    for i in EACH:
        f, g, xs, ts = both(name, i)
        want = inner(gradient(name, i), ts)
        close(forward(f, ts)(xs), want)
        close(jit(lambda xs, ts: jvp(f, (xs,), (ts,))[1])(xs, ts), want)  # noqa: B023
        close(linearize(f, xs)[1](ts), want)
        close(linearize(jit(f), xs)[1](ts), want)
        close(forward(forward(f, ts), ts)(xs), forward(forward(g, ts), ts)(xs), 1e-11)


@REVERSE
def test_reverse_mode(name):
    for i in EACH:
        f, g, xs, _ = both(name, i)
        want = gradient(name, i)
        close(value_and_grad(f)(xs), (g(xs), want))
        close(jit(grad(f))(xs), want)
        close(grad(jit(f))(xs), want)
        close(vjp(f, xs)[1](arr(1.0))[0], want)
        check_jaxpr(jit(grad(f)).lower(xs).jaxpr)


@REVERSE
def test_second_derivatives(name):
    for i in EACH:
        f, _, xs, ts = both(name, i)
        want = second_derivative(name, i)
        close(grad(along(f, ts))(xs), want, 1e-11)
        close(jit(lambda xs: jvp(grad(f), (xs,), (ts,))[1])(xs), want, 1e-11)  # noqa: B023
        close(grad(forward(jit(f), ts))(xs), want, 1e-11)


@FORWARD_ONLY
def test_the_derivative_of_a_derivative_needs_no_reverse_mode(name):
    """Results of an unbounded loop allow reverse mode if its inputs are constant."""
    f, g, xs, ts = both(name, 2)
    want = grad(lambda s: forward(g, [t * s for t in ts])(xs))(arr(1.0))
    close(jvp(lambda s: forward(f, [t * s for t in ts])(xs), (arr(1.0),), (arr(1.0),))[1], want)


def masks(name):
    n = len(PROGRAMS[name].batch)
    return [m for m in itertools.product([0, None], repeat=n) if 0 in m]


def over(mask, batch):
    """Arguments for a ``vmap`` with ``mask``, and the i-th example of them."""
    pick = lambda i: tuple(
        tree.map(lambda x: x[i if m == 0 else 1], a)  # noqa: B023
        for a, m in zip(batch, mask, strict=True)
    )
    return tuple(a if m == 0 else tree.map(lambda x: x[1], a) for a, m in zip(batch, mask, strict=True)), pick


@ALL
def test_batches(name):
    program = PROGRAMS[name]
    for mask in masks(name):
        args, pick = over(mask, program.batch)
        want = stacked([program.run(PYTHON, *pick(i)) for i in EACH])
        run = vmap(lambda *a: program.run(LAX, *a), in_axes=mask)
        close(run(*args), want)
        close(jit(run)(*args), want)


def derivative(program, cf):
    """The gradient of a program's floats, or else a directional derivative."""

    def f(*args):
        loss, xs = loss_of(program, cf, args)
        return grad(loss)(xs) if program.reverse else forward(loss, directions(xs))(xs)

    return f


@ALL
def test_batches_of_derivatives(name):
    program = PROGRAMS[name]
    for mask in masks(name):
        args, pick = over(mask, program.batch)
        want = stacked([derivative(program, PYTHON)(*pick(i)) for i in EACH])
        close(vmap(derivative(program, LAX), in_axes=mask)(*args), want)


@REVERSE
def test_derivatives_of_batches(name):
    program = PROGRAMS[name]
    xs, with_floats = floats_of(program.batch)

    def loss(*args):
        f, ys = loss_of(program, LAX, args)
        return f(ys)

    whole = lambda xs: vmap(loss)(*with_floats(xs)).sum()
    want = stacked([derivative(program, PYTHON)(*program.args(i)) for i in EACH])
    close(grad(whole)(xs), want)
    ts = directions(xs)
    close(jit(along(whole, ts))(xs), inner(want, ts))
    seconds = [both(name, i) for i in EACH]
    want = stacked([grad(along(g, [t[i] for t in ts]))(ys) for i, (_, g, ys, _) in enumerate(seconds)])
    close(grad(along(whole, ts))(xs), want, 1e-11)
    close(jvp(grad(whole), (xs,), (ts,))[1], want, 1e-11)


@ALL
def test_batches_of_batches(name):
    program = PROGRAMS[name]
    run = vmap(vmap(lambda *a: program.run(LAX, *a)), in_axes=1, out_axes=1)
    twice = tuple(tree.map(lambda x: bnp.stack([x, x[::-1]], 1), a) for a in program.batch)
    args = [program.args(i) for i in EACH]
    want = [stacked([program.run(PYTHON, *a) for a in part]) for part in (args, args[::-1])]
    close(
        vmap(vmap(lambda *a: program.run(LAX, *a)), in_axes=1, out_axes=1)(*twice),
        tree.map(lambda a, b: bnp.stack([a, b], 1), *want),
    )
    close(jit(run)(*twice), tree.map(lambda a, b: bnp.stack([a, b], 1), *want))


POLICIES = {
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
    "dots": policies.dots_saveable,
    "sines": lambda prim, *avals, **params: prim is sin_p,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("policy", POLICIES)
@REVERSE
def test_under_checkpoint(name, policy):
    for i in EACH:
        f, _, xs, ts = both(name, i)
        kept = checkpoint(f, policy=POLICIES[policy])
        want = gradient(name, i)
        close(grad(kept)(xs), want)
        close(jit(grad(jit(kept)))(xs), want)
    close(grad(along(kept, ts))(xs), second_derivative(name, i), 1e-11)


@REVERSE
def test_checkpoint_inside(name):
    """The pieces are recomputed one by one."""
    program = PROGRAMS[name]
    args = program.args(0)
    xs, with_floats = floats_of(args)
    parts = checkpoint(lambda xs: tree.leaves(program.run(LAX, *with_floats(xs))))
    g, _ = loss_of(program, PYTHON, args)

    def f(xs):
        floats = [(k, y) for k, y in enumerate(parts(xs)) if np.issubdtype(y.dtype, np.floating)]
        return sum([(bnp.sin(y + 0.1 * k) * draw(*y.shape, seed=k + 1)).sum() for k, y in floats], arr(0.0))

    close(grad(f)(xs), grad(g)(xs))


@pytest.mark.second
@pytest.mark.sampled(2)
@ALL
def test_inside_a_rule_of_forward_mode(name):
    """A jitted derivative in a rule: one loop or branch with values and tangents."""
    for i in EACH:
        f, _, xs, ts = both(name, i)

        @custom_jvp
        def h(xs):
            return f(xs)  # noqa: B023

        @h.defjvp
        def _(primals, tangents):
            return jit(lambda ps, ts: jvp(f, ps, ts))(primals, tangents)  # noqa: B023

        want = gradient(name, i)
        close(forward(h, ts)(xs), inner(want, ts))
        close(linearize(h, xs)[1](ts), inner(want, ts))
        if PROGRAMS[name].reverse:
            close(grad(h)(xs), want)
            close(jit(grad(lambda xs: h(xs) * 2.0))(xs), [x * 2.0 for x in want])
            close(grad(along(h, ts))(xs), second_derivative(name, i), 1e-11)


@REVERSE
def test_inside_a_rule_of_reverse_mode(name):
    f, g, xs, _ = both(name, 2)

    @custom_vjp
    def h(xs):
        return f(xs)

    h.defvjp(lambda xs: (f(xs), xs), lambda xs, ct: ([x * ct for x in grad(f)(xs)],))
    close(grad(h)(xs), gradient(name, 2))
    close(jit(grad(lambda xs: h(xs) * 2.0))(xs), [x * 2.0 for x in grad(g)(xs)])


@ALL
def test_programs_are_traced_once(name):
    program = PROGRAMS[name]
    count = []

    def f(*args):
        count.append(1)
        return program.run(LAX, *args)

    compiled = jit(f)
    for i in EACH:
        compiled(*program.args(i))
    assert len(count) == 1
    batched = jit(vmap(f))
    batched(*program.batch)
    batched(*program.batch)
    assert len(count) == 2


@pytest.mark.slow
def test_what_is_mapped_may_be_anything():
    """Mapped parts of a loop in a branch: choice, condition, body, carry."""

    def f(cf, p, limit, w, x):
        body = lambda c: (c[0] + 1, c[1] * w + 0.1)
        long = lambda x: cf.while_loop(
            lambda c: (c[1] < limit) & (c[0] < 5), body, (arr(0, np.int32), x), max_steps=6
        )
        return cf.cond(p, long, lambda x: (arr(7, np.int32), bnp.sin(x) * limit), x)

    batch = (arr([True, False, True], bool), arr([0.9, 2.0, 1.5]), arr([1.5, 1.2, 2.0]), draw(3, seed=3))
    slopes = lambda cf: lambda p, limit, w, x: grad(lambda x, w: f(cf, p, limit, w, x)[1], (0, 1))(x, w)
    for mask in itertools.product([0, None], repeat=4):
        if 0 not in mask:
            continue
        args, pick = over(mask, batch)
        close(vmap(lambda *a: f(LAX, *a), in_axes=mask)(*args), stacked([f(PYTHON, *pick(i)) for i in EACH]))
        close(vmap(slopes(LAX), in_axes=mask)(*args), stacked([slopes(PYTHON)(*pick(i)) for i in EACH]))


def _linear_solve(a):
    rows = lambda x: lax.fori_loop(0, 4, lambda i, y: y.at[i].set(a[i] @ x), bnp.zeros_like(x))
    return lambda b: lax.custom_linear_solve(
        rows, b, lambda f, b: _inverse(a) @ b, lambda f, b: _inverse(a).T @ b
    )


def _inverse(a):
    return arr(np.linalg.inv(np.asarray(a)))


P, S = draw(4, seed=20), draw(4, 4, seed=21)
LINEAR = {
    "cond": lambda x: lax.cond(True, lambda x: S @ x, lambda x: x * 2.0, x),
    "switch": lambda x: lax.switch(2, [lambda x: S @ x, lambda x: x * 2.0, lambda x: x[::-1]], x),
    "a batch of choices": lambda x: vmap(lambda p, a: lax.cond(p, lambda a: a * 2.0, lambda a: -a, a))(
        P > 0, x
    ),
    "scan": lambda x: lax.scan(lambda c, a: (S @ c * a, c.sum()), x, P),
    "scan of inputs": lambda x: lax.scan(lambda c, a: (c * 0.5 + a, c * 2.0), arr(0.0), x),
    "scan of constants": lambda x: lax.scan(
        lambda c, a: (c + a * x, a * x.sum()), bnp.zeros(4, "float64"), P
    ),
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, x: S @ x * (i + 1.0), x),
    "two counters": lambda x: lax.scan(
        lambda c, a: ((c[1], c[0] + 1, c[2] * c[0]), c[2] * c[1]), (1, 2, x), P
    ),
    "a carry of values": lambda x: lax.scan(lambda c, a: ((bnp.sin(c[0]), c[1] * c[0] + a), c[1]), (P, x), x)[
        1
    ],
    "map": lambda x: lax.map(lambda a: a * P, x),
    "associative_scan": lambda x: lax.associative_scan(lambda a, b: a + b, x, reverse=True),
    "custom_linear_solve": _linear_solve(S + 3.0 * arr(np.eye(4))),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_functions_are_transposed(name):
    """Transposition without linearization: counters share carries with tangents."""
    f, x = LINEAR[name], draw(4, seed=22)
    ct = tree.map(lambda y: draw(*y.shape, seed=4) if is_float(y) else y, f(x))
    if not all(map(is_float, tree.leaves(ct))):
        f, ct = lambda x: tree.leaves(LINEAR[name](x))[-2:], tree.leaves(ct)[-2:]
    matrix = [np.concatenate([np.ravel(y) for y in tree.leaves(f(arr(e)))]) for e in np.eye(4)]
    want = np.stack(matrix) @ np.concatenate([np.ravel(y) for y in tree.leaves(ct)])
    close(linear_transpose(f, x)(ct)[0], arr(want))
    close(jit(linear_transpose(f, x))(ct)[0], arr(want))
    close(vjp(f, x)[1](ct)[0], arr(want))
    close(vmap(linear_transpose(f, x))(tree.map(lambda y: y[None], ct))[0], arr(want[None]))


MODES = {
    "grad": lambda f: grad(f, (0, 1)),
    "grad under jit": lambda f: jit(grad(f, (0, 1))),
    "jvp": lambda f: lambda x, y: jvp(f, (x, y), (y, x)),
    "hessian": lambda f: hessian(f, (0, 1)),
    "vmap of grad": lambda f: lambda x, y: vmap(grad(f, (0, 1)), (0, None))(bnp.stack([x, y]), y),
}


@pytest.mark.parametrize("mode", MODES)
def test_closures_over_tracers_of_several_transforms(mode):
    """A branch that reads what is differentiated and what two enclosing ``vmap`` map."""

    def program(choose):
        def f(x, y):
            def element(a, b):
                return choose(a > b, lambda: x * bnp.sin(a) * b, lambda: y * b * bnp.cos(a * x))

            return vmap(lambda a: vmap(lambda b: element(a, b))(P))(S[0]).sum() * x

        return f

    where = lambda p, yes, no: bnp.where(p, yes(), no())
    close(
        MODES[mode](program(lax.cond))(arr(0.3), arr(0.8)),
        MODES[mode](program(where))(arr(0.3), arr(0.8)),
        1e-11,
    )


@pytest.mark.parametrize("p", [True, False])
def test_complex_values(p):
    z = arr([1 + 2j, 0.5 - 1j], np.complex128)
    f = lambda z: bnp.abs(lax.cond(p, lambda z: z * z * (1 + 2j), lambda z: bnp.conj(z) * 1j, z)).sum()
    g = lambda z: bnp.abs(z * z * (1 + 2j) if p else bnp.conj(z) * 1j).sum()
    close(grad(f)(z), grad(g)(z))
    step = lambda c: (c[0] + 1, c[1] * z * (0.5 + 1j))
    f = lambda w: bnp.abs(
        lax.while_loop(lambda c: c[0] < 3, step, (arr(0, np.int32), w), max_steps=4)[1]
    ).sum()
    close(grad(f)(z), grad(lambda w: bnp.abs(w * (z * (0.5 + 1j)) ** 3).sum())(z), 1e-11)
