"""``custom_root``: roots, derivatives in the closure, batches, and errors.

Each problem of the table has a solution in closed form, or one that Newton's method finds and that is
differentiated through, step by step.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax, random, tree
from blufunc.core.ir import dtypes
from blufunc.core.ir.check import check_jaxpr
from blufunc.lax import custom_linear_solve, custom_root
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw
from tests.transforms.custom_rules.test_linear_solve import inverse

# -- methods, none of which can be differentiated in reverse ---------------------------------------


def bisect(f, guess):
    """A root of an increasing function within 8 of the guess."""

    def halve(c):
        low, high, n = c
        middle = 0.5 * (low + high)
        up = f(middle) > 0
        return bnp.where(up, low, middle), bnp.where(up, middle, high), n + 1

    low, high, _ = lax.while_loop(lambda c: c[2] < 60, halve, (guess - 8.0, guess + 8.0, arr(0, np.int32)))
    return 0.5 * (low + high)


def newton(f, x):
    """For functions of vectors of length 3, with a matrix that is written out."""

    def step(c):
        x, n = c
        a = vmap(linearize(f, x)[1])(arr(np.eye(3))).T
        return x - inverse(a) @ f(x), n + 1

    return lax.while_loop(
        lambda c: (bnp.abs(f(c[0])).sum() > 1e-13) & (c[1] < 50), step, (x, arr(0, np.int32))
    )


def divide(g, y):
    return y / g(1.0)


def by_matrix(g, y):
    return inverse(vmap(g)(arr(np.eye(3))).T) @ y


def by_solver(g, y):
    """With ``custom_linear_solve``, of the matrix written out."""
    a = lambda x: vmap(g)(arr(np.eye(3))).T @ x
    return custom_linear_solve(a, y, by_columns, by_columns)


def by_columns(matvec, b):
    return inverse(vmap(matvec)(arr(np.eye(3))).T) @ b


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A root as a function of parameters, twice, and parameters.

    Attributes:
      custom: with ``custom_root``.
      plain: in closed form, or by steps that are differentiated through.
    """

    custom: Callable
    plain: Callable
    args: tuple


def cube_root(a):
    return custom_root(lambda x: x * x * x - a, 1.0, bisect, divide)


def coupled(w, c):
    """``x + tanh(W x) / 2 = c``, which has one solution."""
    return lambda x: x + 0.5 * bnp.tanh(w @ x) - c


def coupled_plain(w, c):
    f, x = coupled(w, c), c
    for _ in range(7):
        x = x - inverse(vmap(linearize(f, x)[1])(arr(np.eye(3))).T, 12) @ f(x)
    return x


def with_aux(w, c):
    return custom_root(coupled(w, c), c, newton, by_solver, has_aux=True)


def pytrees(a, b):
    """``x y = a`` and ``x / y = b``."""

    def f(v):
        return {"x": v["x"] - a / v["y"], "y": (b - v["x"] / v["y"]) * 0.5}

    def solve(f, v):
        return lax.fori_loop(0, 200, lambda _, v: tree.map(lambda p, r: p - r * 0.3, v, f(v)), v)

    def tangent(g, y):
        units = ({"x": arr(1.0), "y": arr(0.0)}, {"x": arr(0.0), "y": arr(1.0)})
        (p, r), (q, s) = ((g(u)["x"], g(u)["y"]) for u in units)
        det = p * s - q * r
        return {"x": (s * y["x"] - q * y["y"]) / det, "y": (p * y["y"] - r * y["x"]) / det}

    return custom_root(f, {"x": arr(1.0), "y": arr(0.8)}, solve, tangent)


W, C = draw(3, 3, seed=1), draw(3, seed=2)
PROBLEMS = {
    "a number": Problem(cube_root, lambda a: bnp.cbrt(a), (arr(1.7),)),
    "a function of the root": Problem(
        lambda a: bnp.sin(cube_root(a * a)) * a, lambda a: bnp.sin(bnp.cbrt(a * a)) * a, (arr(1.3),)
    ),
    "two parameters": Problem(
        lambda a, b: custom_root(lambda x: bnp.exp(x) * a - b, a, bisect, divide),
        lambda a, b: bnp.log(b / a),
        (arr(0.7), arr(1.9)),
    ),
    "a vector": Problem(
        lambda w, c: custom_root(coupled(w, c), c, lambda f, x: newton(f, x)[0], by_matrix),
        coupled_plain,
        (W, C),
    ),
    "by a linear solver": Problem(
        lambda w, c: custom_root(coupled(w, c), c, lambda f, x: newton(f, x)[0], by_solver),
        coupled_plain,
        (W, C),
    ),
    "aux": Problem(lambda w, c: with_aux(w, c)[0], coupled_plain, (W, C)),
    "pytrees": Problem(
        pytrees, lambda a, b: {"x": bnp.sqrt(a * b), "y": bnp.sqrt(a / b)}, (arr(1.2), arr(0.9))
    ),
    "jit inside": Problem(
        lambda a: custom_root(
            jit(lambda x: x * x * x - a), 1.0, jit(bisect, static_argnums=0), jit(divide, static_argnums=0)
        ),
        lambda a: bnp.cbrt(a),
        (arr(1.7),),
    ),
    "a root of a root": Problem(
        lambda a: custom_root(lambda x: x * x * x - cube_root(x + a), a, bisect, divide),
        lambda a: _ninth(a),
        (arr(1.1),),
    ),
}
ALL = pytest.mark.parametrize("name", PROBLEMS)
TOL = 1e-9


def _ninth(a):
    """The x with ``x**9 = x + a``, by Newton's method."""
    x = arr(1.2)
    for _ in range(12):
        x = x - (x**9 - x - a) / (9.0 * x**8 - 1.0)
    return x


def total(outs):
    return sum([(bnp.sin(y) * draw(*y.shape, seed=5)).sum() for y in tree.leaves(outs)], 0.0)


def losses(name):
    problem = PROBLEMS[name]
    return lambda xs: total(problem.custom(*xs)), lambda xs: total(problem.plain(*xs)), list(problem.args)


def directions(xs):
    return [draw(*x.shape, seed=9 + i) for i, x in enumerate(xs)]


def along(f, ts):
    return lambda xs: sum([(a * t).sum() for a, t in zip(grad(f)(xs), ts, strict=True)], 0.0)


@pytest.mark.second
@pytest.mark.sampled(4)
@ALL
def test_roots(name):
    problem = PROBLEMS[name]
    want = problem.plain(*problem.args)
    close(problem.custom(*problem.args), want, TOL)
    close(jit(problem.custom)(*problem.args), want, TOL)
    check_jaxpr(make_jaxpr(problem.custom)(*problem.args))


@pytest.mark.slow
@ALL
def test_first_derivatives(name):
    f, g, xs = losses(name)
    ts, want = directions(xs), grad(g)(xs)
    slope = along(g, ts)(xs)
    close(jvp(f, (xs,), (ts,))[1], slope, TOL)
    close(jit(lambda xs, ts: jvp(f, (xs,), (ts,))[1])(xs, ts), slope, TOL)
    close(linearize(f, xs)[1](ts), slope, TOL)
    for gradient in (grad(f), jit(grad(f)), grad(jit(f)), grad(checkpoint(f))):
        close(gradient(xs), want, TOL)


@pytest.mark.slow
@ALL
def test_second_derivatives(name):
    f, g, xs = losses(name)
    ts = directions(xs)
    want = grad(along(g, ts))(xs)
    close(grad(along(f, ts))(xs), want, TOL)
    close(jvp(grad(f), (xs,), (ts,))[1], want, TOL)
    close(jit(grad(lambda xs: jvp(f, (xs,), (ts,))[1]))(xs), want, TOL)


@pytest.mark.slow
@ALL
def test_batches(name):
    f, g, xs = losses(name)
    for mask in itertools.product([0, None], repeat=len(xs)):
        if not any(m == 0 for m in mask):
            continue
        ins = [bnp.stack([x, x * 1.05, x * 0.95]) if m == 0 else x for x, m in zip(xs, mask, strict=True)]
        at = lambda i: [x[i] if m == 0 else x for x, m in zip(ins, mask, strict=True)]  # noqa: B023
        stack = lambda h: tree.map(lambda *ys: bnp.stack(ys), *[h(at(i)) for i in range(3)])  # noqa: B023
        run = lambda h: vmap(h, in_axes=(list(mask),))(ins)  # noqa: B023
        close(run(lambda xs: PROBLEMS[name].custom(*xs)), stack(lambda xs: PROBLEMS[name].plain(*xs)), TOL)
        close(run(grad(f)), stack(grad(g)), TOL)


def test_gradients_are_those_of_differences():
    f = lambda w: total(with_aux(w, C)[0])
    t, h = draw(3, 3, seed=7), 1e-3
    at = lambda k: float(f(W + k * h * t))
    slope = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * h)
    np.testing.assert_allclose(float((grad(f)(W) * t).sum()), slope, rtol=1e-9)


def test_the_guess_has_no_derivative():
    f = lambda guess, a: custom_root(lambda x: x * x * x - a, guess, bisect, divide)
    close(grad(f, (0, 1))(arr(0.5), arr(8.0)), (arr(0.0), arr(1 / 12)), TOL)


def test_what_the_solver_alone_reads_has_no_derivative():
    f = lambda s, a: custom_root(lambda x: x - a, a, lambda f, x: x - s * f(x), lambda g, y: y / g(1.0))
    close(grad(f, (0, 1))(arr(1.0), arr(8.0)), (arr(0.0), arr(1.0)), TOL)


def test_aux_has_no_derivative():
    (x, n), pull = vjp(with_aux, W, C)
    assert n.dtype == np.int32 and int(n) > 1
    got = pull((x, np.zeros((), dtypes.float0)))
    close(got, vjp(coupled_plain, W, C)[1](x), TOL)
    (_, n), (_, n_dot) = jvp(with_aux, (W, C), (W, C))
    assert n_dot.dtype == dtypes.float0
    f = lambda a: custom_root(lambda x: x - a, a, lambda f, x: (x, x * 2.0), divide, has_aux=True)[1]
    assert float(grad(f)(arr(3.0))) == 0.0


def test_functions_that_close_over_integers_and_keys():
    key, n = random.key(0), arr(3, np.int32)
    f = lambda a, n, key: custom_root(
        lambda x: x * n.astype("float64") - a * (1.0 + random.uniform(key).astype("float64")),
        1.0,
        bisect,
        divide,
    )
    want = (1.0 + float(random.uniform(key))) / 3
    close(grad(f)(arr(1.5), n, key), arr(want), TOL)
    close(jit(grad(f))(arr(1.5), n, key), arr(want), TOL)
    close(
        vmap(grad(f), in_axes=(None, 0, None))(arr(1.5), arr([3, 6], np.int32), key),
        arr([want, want / 2]),
        TOL,
    )


def test_a_function_without_parameters():
    f = lambda: custom_root(lambda x: x * x * x - 8.0, 1.0, bisect, divide)
    assert f().dtype == np.float32 and abs(float(f()) - 2.0) < 1e-6
    close(jvp(lambda a: f() * a, (1.0,), (1.0,))[1], f(), 1e-6)


def test_in_loops_and_branches():
    def f(root):
        def step(x, a):
            x = lax.cond(a > 1.0, lambda: root(x * x + a), lambda: x * root(a))
            return x, x

        return lambda x, a: lax.scan(step, x, a)[1].sum()

    custom, plain = f(cube_root), f(bnp.cbrt)
    x, a = arr(0.8), arr([1.5, 0.6, 1.1])
    close(custom(x, a), plain(x, a), TOL)
    close(grad(custom, (0, 1))(x, a), grad(plain, (0, 1))(x, a), TOL)
    close(jit(grad(custom, (0, 1)))(x, a), grad(plain, (0, 1))(x, a), TOL)
    close(vmap(grad(custom, 1), (None, 0))(x, a[None] * 1.0), grad(plain, 1)(x, a)[None], TOL)


def test_inside_a_custom_rule():
    @custom_vjp
    def f(a):
        return cube_root(a)

    f.defvjp(lambda a: (cube_root(a), a), lambda a, ct: (ct * grad(cube_root)(a),))
    close(grad(f)(arr(1.7)), grad(bnp.cbrt)(arr(1.7)), TOL)


# -- errors ----------------------------------------------------------------------------------------

A = arr([1.0, 2.0])
keep = lambda f, x: x
ERRORS = {
    "a different structure of f": (
        lambda: custom_root(lambda x: (x,), A, keep, keep),
        errors.TreeError,
        ("a different structure", "<lambda>"),
    ),
    "another shape of f": (
        lambda: custom_root(lambda x: {"a": x["a"].sum()}, {"a": A}, keep, keep),
        errors.ShapeError,
        ("x['a']", "f64[2]", "f64[]"),
    ),
    "another dtype of solve": (
        lambda: custom_root(lambda x: x, A, lambda f, x: x.astype("float32"), keep),
        errors.ShapeError,
        ("solve, <lambda>", "f32[2]"),
    ),
    "another shape of tangent_solve": (
        lambda: custom_root(lambda x: x, A, keep, lambda g, y: y[0]),
        errors.ShapeError,
        ("tangent_solve, <lambda>", "f64[]"),
    ),
    "a different structure of tangent_solve": (
        lambda: custom_root(lambda x: x, A, keep, lambda g, y: (y, y)),
        errors.TreeError,
        ("tangent_solve", "a different structure"),
    ),
    "no aux": (
        lambda: custom_root(lambda x: x, A, keep, keep, has_aux=True),
        errors.TreeError,
        ("(x, aux)", "has_aux"),
    ),
    "integers": (
        lambda: custom_root(lambda x: x, arr([1, 2], np.int32), keep, keep),
        errors.DtypeError,
        ("initial_guess", "i32[2]"),
    ),
    "no function": (
        lambda: custom_root(A, A, keep, keep),
        errors.ArgumentError,
        ("custom_root takes a function",),
    ),
    "no tangent_solve": (
        lambda: custom_root(lambda x: x, A, keep, None),
        errors.ArgumentError,
        ("custom_root takes a function",),
    ),
    "no array": (
        lambda: custom_root(lambda x: x, {"u": "text"}, keep, keep),
        errors.ArgumentError,
        ("initial_guess['u']", "str"),
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
    assert "test_custom_root.py" in info.value.where


# -- the peer --------------------------------------------------------------------------------------


@pytest.mark.peer
def test_against_jax():
    import jax

    def program(np_, lax_, vmap_):
        def steps(f, x):
            return lax_.fori_loop(0, 50, lambda _, x: x - 0.5 * f(x), x)

        def tangent(g, y):
            return lax_.custom_linear_solve(g, y, richardson, richardson)

        def richardson(matvec, b):
            return lax_.fori_loop(0, 60, lambda _, x: x + 0.5 * (b - matvec(x)), np_.zeros_like(b))

        def loss(w, c):
            f = lambda x: x + 0.5 * np_.tanh(w @ x) - c
            return np_.sin(lax_.custom_root(f, c, steps, tangent)).sum()

        return loss

    custom, theirs = program(bnp, lax, vmap), program(jax.numpy, jax.lax, jax.vmap)
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(4, 3, 3)) * 0.4).astype(np.float32)
    c = rng.normal(size=(4, 3)).astype(np.float32)
    same = lambda x, y: [
        np.testing.assert_allclose(np.asarray(p), np.asarray(q), rtol=2e-4, atol=2e-5)
        for p, q in zip(tree.leaves(x), jax.tree.leaves(y), strict=True)
    ]
    same(vmap(custom)(w, c), jax.vmap(theirs)(w, c))
    same(vmap(grad(custom, (0, 1)))(w, c), jax.vmap(jax.grad(theirs, (0, 1)))(w, c))
    hvp = lambda grad, jvp, f: lambda w: jvp(grad(lambda w: f(w, c[0])), (w,), (w,))[1]
    same(hvp(grad, jvp, custom)(w[0]), hvp(jax.grad, jax.jvp, theirs)(w[0]))
