"""Any composition of the transforms, to any depth, computes what it says.

A program is a function from an array of a shape to an array of that shape, written once for blufunc and once
for NumPy. Each transform keeps that form, and has a definition of its own for the NumPy side: ``vmap`` is a
loop, derivatives are differences of sixth order, ``jit`` and ``checkpoint`` are nothing.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as hs

from blufunc import errors, lax
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ops import cumulative, dot, dynamic, shape
from blufunc.core.ops import elementwise as ew
from blufunc.core.primitives import linear_ops
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp
from blufunc.transforms.extension.transform import Transform
from blufunc.transforms.staging.jit import jit

N = 3
W = np.array([[0.3, -0.5, 0.2], [0.4, 0.1, -0.3], [-0.2, 0.6, 0.5]])
MASK = np.array([True, False, True])
_W, _MASK = from_numpy(W), from_numpy(MASK)


# -- the language of programs ----------------------------------------------------------------------


@custom_jvp
def _soft_sine(x):
    return ew.mul(ew.sin(x), 0.5)


@_soft_sine.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return _soft_sine(x), ew.mul(ew.mul(t, ew.cos(x)), 0.5)


def _scan_bf(x):
    def body(h, a):
        h = ew.tanh(ew.add(ew.mul(h, 0.5), a))
        return h, ew.mul(h, a)

    h, ys = scan(body, ew.mul(dynamic.dynamic_index_in_dim(x, 0, 0, False), 0.0), x)
    return ew.add(ys, h)


def _scan_np(x):
    h, ys = 0.0, []
    for a in x:
        h = np.tanh(0.5 * h + a)
        ys.append(h * a)
    return np.array(ys) + h


class Kink(Exception):
    """A value so near to where a branch changes that differences would step over it."""


def _holds(a, threshold):
    """``a > threshold`` on the NumPy side."""
    if abs(a - threshold) < 0.05 * (1 + abs(a)):
        raise Kink
    return a > threshold


def _first(x):
    return dynamic.dynamic_index_in_dim(x, 0, 0, False)


def _while_np(x):
    h, steps = x, 0
    while steps < 4 and _holds(np.sum(h * h), 0.3):
        h, steps = h * 0.6 + 0.01 * x, steps + 1
    return h


def _fori_np(x):
    h = x
    for i in range(3):
        h = np.sin(h) + 0.1 * i * x
    return h


@custom_vjp
def _soft_cube(x):
    return ew.mul(ew.integer_pow(x, 3), 0.2)


_soft_cube.defvjp(
    lambda x: (ew.mul(ew.integer_pow(x, 3), 0.2), x),
    lambda x, ct: (ew.mul(ct, ew.mul(ew.square(x), 0.6)),),
)
_SOLVED = W + 2 * np.eye(3)


def _solve(matvec, b):
    return _matvec(from_numpy(np.linalg.inv(_SOLVED)), b)


def _solve_transposed(matvec, b):
    return _matvec(from_numpy(np.linalg.inv(_SOLVED.T)), b)


def _matvec(w, x):
    return dot.dot_general(w, x, (((1,), (0,)), ((), ())))


UNARY: dict[str, tuple[Callable, Callable]] = {
    "sin": (ew.sin, np.sin),
    "tanh": (ew.tanh, np.tanh),
    "half": (lambda x: ew.mul(x, 0.5), lambda x: x * 0.5),
    "exp": (lambda x: ew.exp(ew.tanh(x)), lambda x: np.exp(np.tanh(x))),
    "root": (lambda x: ew.sqrt(ew.add(ew.square(x), 1.0)), lambda x: np.sqrt(x * x + 1)),
    "matvec": (lambda x: _matvec(_W, x), lambda x: W @ x),
    "mean": (
        lambda x: linear_ops.broadcast_to(ew.div(linear_ops.reduce_sum(x, (0,)), float(N)), x.shape),
        lambda x: np.full_like(x, np.mean(x)),
    ),
    "rev": (lambda x: shape.rev(x, (0,)), lambda x: x[::-1]),
    "roll": (
        lambda x: shape.concatenate([shape.slice_in_dim(x, 1, N), shape.slice_in_dim(x, 0, 1)], 0),
        lambda x: np.roll(x, -1),
    ),
    "pick": (lambda x: ew.add(dynamic.dynamic_index_in_dim(x, 1, 0, False), x), lambda x: x[1] + x),
    "cumsum": (lambda x: cumulative.cumsum(x, 0), np.cumsum),
    "masked": (lambda x: ew.select(_MASK, ew.cos(x), x), lambda x: np.where(MASK, np.cos(x), x)),
    "jit": (jit(lambda x: ew.mul(ew.sin(x), ew.cos(x))), lambda x: np.sin(x) * np.cos(x)),
    "checkpoint": (checkpoint(lambda x: ew.sin(ew.tanh(x))), lambda x: np.sin(np.tanh(x))),
    "custom_jvp": (_soft_sine, lambda x: 0.5 * np.sin(x)),
    "scan": (_scan_bf, _scan_np),
    "vmap": (vmap(lambda x: ew.mul(ew.sin(x), x)), lambda x: np.sin(x) * x),
    "grad": (
        vmap(grad(lambda x: ew.mul(ew.sin(x), x))),
        lambda x: np.cos(x) * x + np.sin(x),
    ),
    "constant": (lambda x: from_numpy(np.ones(N)), lambda x: np.ones(N)),
    "cond": (
        lambda x: lax.cond(
            ew.gt(_first(x), 0.0), lambda x: ew.mul(ew.sin(x), x), lambda x: ew.mul(x, 0.5), x
        ),
        lambda x: np.sin(x) * x if _holds(x[0], 0) else x * 0.5,
    ),
    "switch": (
        lambda x: lax.switch(
            ew.convert(ew.gt(_first(x), 0.1), np.dtype("int32")),
            [ew.tanh, lambda x: ew.mul(ew.cos(x), _first(x))],
            x,
        ),
        lambda x: np.cos(x) * x[0] if _holds(x[0], 0.1) else np.tanh(x),
    ),
    "while": (
        lambda x: lax.while_loop(
            lambda h: ew.gt(total(ew.square(h)), 0.3),
            lambda h: ew.add(ew.mul(h, 0.6), ew.mul(x, 0.01)),
            x,
            max_steps=4,
        ),
        _while_np,
    ),
    "fori": (
        lambda x: lax.fori_loop(
            0, 3, lambda i, h: ew.add(ew.sin(h), ew.mul(x, ew.mul(ew.convert(i, x.dtype), 0.1))), x
        ),
        _fori_np,
    ),
    "map": (lambda x: lax.map(lambda a: ew.mul(a, ew.sin(a)), x, batch_size=2), lambda x: x * np.sin(x)),
    "associative": (lambda x: lax.associative_scan(ew.mul, x), np.cumprod),
    "custom_vjp": (_soft_cube, lambda x: 0.2 * x**3),
    "named": (vmap(lambda a: ew.mul(a, lax.psum(a, "k")), axis_name="k"), lambda x: x * np.sum(x)),
    "solve": (
        lambda x: lax.custom_linear_solve(
            lambda v: _matvec(from_numpy(_SOLVED), v), x, _solve, _solve_transposed
        ),
        lambda x: np.linalg.solve(_SOLVED, x),
    ),
}
BINARY: dict[str, tuple[Callable, Callable]] = {
    "add": (ew.add, np.add),
    "sub": (ew.sub, np.subtract),
    "mul": (ew.mul, np.multiply),
}


@dataclass(frozen=True)
class Program:
    """Straight-line code: each step applies an operation to earlier values."""

    steps: tuple[tuple[str, int, int], ...]

    def run(self, side: int, x):
        values = [x]
        for name, i, j in self.steps:
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            values.append(UNARY[name][side](a) if name in UNARY else BINARY[name][side](a, b))
        return values[-1]

    def on_blufunc(self, x):
        return self.run(0, x)

    def on_numpy(self, x):
        return np.asarray(self.run(1, x), np.float64)


# -- transforms, twice -----------------------------------------------------------------------------


def weights(shape_):
    """A fixed direction in the space of arrays of a shape."""
    return np.random.default_rng(len(shape_) + sum(shape_)).uniform(-1, 1, shape_)


def direction(x):
    return from_numpy(weights(x.shape))


def total(x):
    return linear_ops.reduce_sum(x, tuple(range(x.ndim)))


_STENCIL = ((1, 45 / 60), (2, -9 / 60), (3, 1 / 60))
_H = 5e-3


def difference(f, x, t):
    """The derivative of ``f`` at ``x`` along ``t``, to sixth order."""
    return sum(c * (f(x + k * _H * t) - f(x - k * _H * t)) for k, c in _STENCIL) / _H


def numeric_gradient(f):
    def gradient(x):
        c = weights(f(x).shape)
        units = np.eye(x.size).reshape(x.size, *x.shape)
        return np.array([np.sum(c * difference(f, x, e)) for e in units]).reshape(x.shape)

    return gradient


def loop(f, axis):
    return lambda x: np.stack([f(v) for v in np.moveaxis(x, axis, 0)], axis)


def weighted(f):
    def loss(x):
        y = f(x)
        return total(ew.mul(y, direction(y)))

    return loss


def pullback(f):
    def back(x):
        y, pull = vjp(f, x)
        return pull(direction(y))[0]

    return back


TRANSFORMS: dict[str, tuple[Callable, Callable]] = {
    "jit": (jit, lambda f: f),
    "checkpoint": (checkpoint, lambda f: f),
    "vmap": (vmap, lambda f: loop(f, 0)),
    "vmap_last": (lambda f: vmap(f, in_axes=-1, out_axes=-1), lambda f: loop(f, -1)),
    "grad": (lambda f: grad(weighted(f)), numeric_gradient),
    "vjp": (pullback, numeric_gradient),
    "jvp": (
        lambda f: lambda x: jvp(f, (x,), (direction(x),))[1],
        lambda f: lambda x: difference(f, x, weights(x.shape)),
    ),
    "linearize": (
        lambda f: lambda x: linearize(f, x)[1](direction(x)),
        lambda f: lambda x: difference(f, x, weights(x.shape)),
    ),
}
identity = Transform("identity")
identity.default(lambda prim, *operands, **params: prim.bind(*operands, **params))

TRANSFORMS |= {
    "identity": (identity, lambda f: f),
    "cond": (
        lambda f: lambda x: lax.cond(ew.gt(total(x), -1e6), f, lambda x: ew.mul(x, 0.0), x),
        lambda f: f,
    ),
    "scan": (
        lambda f: lambda x: scan(lambda c, _: (ew.tanh(f(c)), ()), x, None, length=2)[0],
        lambda f: lambda x: np.tanh(f(np.tanh(f(x)))),
    ),
    "while": (
        lambda f: (
            lambda x: lax.while_loop(
                lambda c: ew.lt(c[0], 1), lambda c: (ew.add(c[0], 1), f(c[1])), (0, x), max_steps=2
            )[1]
        ),
        lambda f: f,
    ),
}
DERIVATIVES = {"grad", "vjp", "jvp", "linearize"}
BATCHES = {"vmap", "vmap_last"}


def compose(names, program, seed):
    """The transformed program, its NumPy definition, and an argument."""
    f, g, shape_ = program.on_blufunc, program.on_numpy, (N,)
    for name in names:
        f, g = TRANSFORMS[name][0](f), TRANSFORMS[name][1](g)
        if name in BATCHES:
            shape_ = (2, *shape_) if name == "vmap" else (*shape_, 2)
    return f, g, np.random.default_rng(seed).uniform(-1, 1, shape_)


def check(names, program):
    """Compare both sides at the first point where differences are a reference.

    Raises:
      Kink: there is none.
    """
    for seed in range(7, 15):
        f, g, x = compose(names, program, seed)
        try:
            want = g(x)
        except Kink:
            continue
        got = np.asarray(f(from_numpy(x)))
        assert got.shape == want.shape and got.dtype == np.float64
        scale = max(1.0, float(np.max(np.abs(want))))
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-8 * scale)
        return
    raise Kink


def defined(names, program):
    """True if the derivatives exist: a custom_vjp has no forward mode."""
    first = next((n for n in names if n in DERIVATIVES), "grad")
    return first in ("grad", "vjp") or all(name != "custom_vjp" for name, *_ in program.steps)


# -- one program, all compositions -----------------------------------------------------------------

EVERYTHING = Program(
    (("scan", 0, 0), ("matvec", 0, 0), ("jit", 0, 0), ("mul", 0, 1), ("pick", 0, 0), ("checkpoint", 0, 0),
     ("roll", 2, 0), ("custom_jvp", 0, 0), ("add", 0, 2), ("masked", 0, 0)),
)  # fmt: skip


def sequences(names, longest):
    for n in range(1, longest + 1):
        for names_ in itertools.product(names, repeat=n):
            if sum(x in DERIVATIVES for x in names_) < 3:
                yield names_


@pytest.mark.sampled(38)
@pytest.mark.parametrize("names", [*sequences(["jit", "vmap", "grad", "jvp"], 3)], ids="-".join)
def test_every_order_of_three(names):
    check(names, EVERYTHING)


@pytest.mark.second
@pytest.mark.parametrize(
    "names",
    [
        ("jit", "grad", "jit", "vmap"),
        ("vjp", "jvp", "vmap", "jit"),
        ("grad", "jit", "grad", "vmap"),
        ("vmap", "grad", "vmap_last", "jit"),
        ("checkpoint", "grad", "grad"),
        ("checkpoint", "vmap", "grad", "jvp"),
        ("linearize", "vmap", "vjp", "jit"),
        ("linearize", "linearize"),
        ("vjp", "vjp", "vmap_last"),
        ("jit", "checkpoint", "jit", "grad", "vmap_last"),
        ("scan", "grad", "vmap", "jit"),
        ("grad", "scan", "jit"),
        ("while", "vjp", "vmap_last"),
        ("cond", "linearize", "scan", "jit"),
        ("identity", "grad", "vmap"),
        ("vmap", "grad", "identity", "jit"),
        ("jvp", "identity", "grad"),
        ("checkpoint", "scan", "checkpoint", "grad"),
        ("jit", "while", "scan", "vjp"),
    ],
    ids="-".join,
)
def test_longer_compositions(names):
    check(names, EVERYTHING)


@pytest.mark.parametrize("op", [*UNARY, *BINARY])
@pytest.mark.parametrize(
    "names",
    [
        ("grad", "grad"),
        ("jit", "grad", "vmap"),
        ("vmap", "vjp", "jvp"),
        ("jvp", "grad"),
        ("scan", "grad", "vmap"),
        ("checkpoint", "vmap", "grad", "jit"),
        ("identity", "vmap", "vjp"),
    ],
    ids="-".join,
)
def test_every_operation(op, names):
    program = Program((("sin", 0, 0), (op, 0, 1), ("mul", 0, 1)))
    if defined(names, program):
        check(names, program)
    else:
        with pytest.raises(errors.GradError, match="custom_vjp"):
            check(names, program)


@pytest.mark.slow
def test_third_derivatives_of_both_modes():
    """Every order of modes gives the same symmetric form."""
    f = weighted(EVERYTHING.on_blufunc)
    x = from_numpy(np.random.default_rng(7).uniform(-1, 1, N))
    forward = lambda f: lambda x: jvp(f, (x,), (direction(x),))[1]
    reverse = lambda f: lambda x: total(ew.mul(grad(f)(x), direction(x)))
    results = []
    for modes in itertools.product([forward, reverse], repeat=3):
        g = f
        for mode in modes:
            g = mode(g)
        results += [
            float(g(x)),
            float(jit(g)(x)),
            float(np.asarray(vmap(g)(from_numpy(np.asarray(x)[None])))[0]),
        ]
    np.testing.assert_allclose(results, results[0], rtol=1e-10)


# -- random programs under random compositions -----------------------------------------------------

_STEP = hs.tuples(hs.sampled_from([*UNARY, *BINARY]), hs.integers(0, 3), hs.integers(0, 3))
_PROGRAMS = hs.lists(_STEP, min_size=1, max_size=6).map(lambda steps: Program(tuple(steps)))
_COMPOSITIONS = hs.lists(hs.sampled_from(list(TRANSFORMS)), min_size=1, max_size=4).filter(
    lambda names: sum(n in DERIVATIVES for n in names) <= 2 and sum(n in BATCHES for n in names) <= 2
)


@pytest.mark.slow
@given(_PROGRAMS, _COMPOSITIONS)
@settings(max_examples=300)
def test_random_compositions_of_random_programs(program, names):
    assume(defined(names, program))
    try:
        check(names, program)
    except Kink:
        reject()


@pytest.mark.slow
@given(_PROGRAMS, hs.lists(hs.booleans(), min_size=4, max_size=4))
@settings(max_examples=40)
def test_jit_changes_nothing_wherever_it_stands(program, where):
    """``vmap(grad(jvp(f)))`` with ``jit`` at any of the four places."""
    assume(defined(["jvp"], program))
    wrap = lambda f, k: jit(f) if where[k] else f
    f = wrap(program.on_blufunc, 0)
    f = wrap(TRANSFORMS["jvp"][0](f), 1)
    f = wrap(TRANSFORMS["grad"][0](f), 2)
    f = wrap(vmap(f), 3)
    plain = vmap(TRANSFORMS["grad"][0](TRANSFORMS["jvp"][0](program.on_blufunc)))
    x = from_numpy(np.random.default_rng(7).uniform(-1, 1, (2, N)))
    np.testing.assert_allclose(np.asarray(f(x)), np.asarray(plain(x)), rtol=1e-11, atol=1e-12)
