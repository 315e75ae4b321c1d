"""``custom_linear_solve``: solutions, all derivatives, batches, and errors.

Each system of the table is compared with the same solution written with an inverse matrix that is differentiated
through.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax, tree
from blufunc.core.ir import dtypes
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ir.jaxpr import subjaxprs
from blufunc.lax import custom_linear_solve
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, vjp
from blufunc.transforms.autodiff.linear_transpose import linear_transpose
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.custom_rules.linear_solve import linear_solve_p
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw

N = 3
EYE = arr(np.eye(N))


def dominant(*batch, seed=0):
    """Matrices with a large diagonal."""
    return draw(*batch, N, N, seed=seed) + 3.0 * EYE


# -- solvers, none of which can be differentiated in reverse ---------------------------------------


def jacobi(matvec, b):
    """For diagonally dominant systems: iterate ``x = x + (b - A x) / 4``."""
    residual = lambda x: tree.map(lambda p, q: p - q, b, matvec(x))
    size = lambda r: sum([(bnp.abs(y) ** 2).sum() for y in tree.leaves(r)], arr(0.0))

    def step(c):
        x, r, n = c
        x = tree.map(lambda p, q: p + 0.25 * q, x, r)
        return x, residual(x), n + 1

    x = tree.map(bnp.zeros_like, b)
    x, _, n = lax.while_loop(lambda c: (size(c[1]) > 1e-30) & (c[2] < 500), step, (x, b, arr(0, np.int32)))
    return x, n


def loop(matvec, b):
    return jacobi(matvec, b)[0]


def by_columns(matvec, b):
    """The explicit matrix, and its inverse by ``Y (2 - A Y)`` (G. Schulz, 1933)."""
    return inverse(vmap(matvec)(EYE.astype(b.dtype)).T) @ b


def inverse(a, steps=40):
    y = a.T / (bnp.abs(a).sum(0).max() * bnp.abs(a).sum(1).max())
    for _ in range(steps):
        y = y @ (2.0 * EYE.astype(a.dtype) - a @ y)
    return y


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """A solution as a function of arguments, twice, and arguments for it.

    Attributes:
      custom: with ``custom_linear_solve``.
      plain: by arithmetic that is differentiated through.
    """

    custom: Callable
    plain: Callable
    args: tuple
    reverse: bool = True


def solver(**options):
    return lambda a, b: custom_linear_solve(lambda x: a @ x, b, **options)


def symmetric(a):
    return a + a.T + 4.0 * EYE.astype(a.dtype)


def blocks(a, b):
    """A system of a pair: ``(A x + y, y * 3 - x[0])``."""
    matvec = lambda v: {"x": a @ v["x"] + v["y"], "y": v["y"] * 3.0 - v["x"][0]}
    return custom_linear_solve(matvec, {"x": b, "y": b[1] * b[1]}, loop, loop)


def blocks_plain(a, b):
    one, zero = arr(np.ones((N, 1))), arr(np.zeros(N - 1))
    top = bnp.concatenate([a, one], 1)
    bottom = bnp.concatenate([arr([-1.0]), zero, arr([3.0])])[None]
    x = inverse_of_any(bnp.concatenate([top, bottom], 0)) @ bnp.concatenate([b, (b[1] * b[1])[None]])
    return {"x": x[:N], "y": x[N]}


def inverse_of_any(a, steps=40):
    y = a.T / (bnp.abs(a).sum(0).max() * bnp.abs(a).sum(1).max())
    for _ in range(steps):
        y = y @ (2.0 * arr(np.eye(a.shape[0])) - a @ y)
    return y


def with_aux(a, b):
    (x, n) = custom_linear_solve(lambda x: a @ x, b, jacobi, jacobi, has_aux=True)
    return x, n > 3


def nested(a, b):
    """A solver that solves: the rules meet the primitive inside of itself."""
    through = lambda matvec, b: custom_linear_solve(matvec, b, loop, loop)
    return custom_linear_solve(lambda x: bnp.sin(a) @ x, b, through, through)


A, B = dominant(), draw(N, seed=1)
SYSTEMS = {
    "transpose_solve": System(solver(solve=loop, transpose_solve=loop), lambda a, b: inverse(a) @ b, (A, B)),
    "by columns": System(
        solver(solve=by_columns, transpose_solve=by_columns), lambda a, b: inverse(a) @ b, (A, B)
    ),
    "symmetric": System(
        lambda a, b: custom_linear_solve(lambda x: symmetric(a) @ x, b, loop, symmetric=True),
        lambda a, b: inverse(symmetric(a)) @ b,
        (draw(N, N) * 0.3, B),
    ),
    "symmetric, both given": System(
        lambda a, b: custom_linear_solve(lambda x: symmetric(a) @ x, b, loop, loop, symmetric=True),
        lambda a, b: inverse(symmetric(a)) @ b,
        (draw(N, N) * 0.3, B),
    ),
    "forward only": System(solver(solve=loop), lambda a, b: inverse(a) @ b, (A, B), reverse=False),
    "a constant matrix": System(
        lambda b: custom_linear_solve(lambda x: A @ x, bnp.sin(b), loop, loop),
        lambda b: inverse(A) @ bnp.sin(b),
        (B,),
    ),
    "a constant right hand side": System(
        lambda a: custom_linear_solve(lambda x: a @ x, B, loop, loop), lambda a: inverse(a) @ B, (A,)
    ),
    "a number": System(
        lambda a, b: custom_linear_solve(
            lambda x: a * x, b, lambda f, y: y / f(1.0), lambda f, y: y / f(1.0)
        ),
        lambda a, b: b / a,
        (arr(1.7), arr(0.4)),
    ),
    "pytrees": System(blocks, blocks_plain, (A, B)),
    "aux": System(with_aux, lambda a, b: (inverse(a) @ b, arr(True, bool)), (A, B)),
    "a solver that solves": System(
        nested, lambda a, b: inverse(bnp.sin(a) + 0.0) @ b, (EYE * 1.2 + draw(N, N) * 0.2, B)
    ),
    "jit inside": System(
        lambda a, b: custom_linear_solve(
            jit(lambda x: a @ x), b, jit(loop, static_argnums=0), jit(loop, static_argnums=0)
        ),
        lambda a, b: inverse(a) @ b,
        (A, B),
    ),
    "a derivative as the system": System(
        lambda a, b: custom_linear_solve(
            lambda x: jvp(lambda z: a @ bnp.sin(z), (b * 0.1,), (x,))[1], b, loop, loop
        ),
        lambda a, b: inverse(a * bnp.cos(b * 0.1)) @ b,
        (A, B),
    ),
}
ALL = pytest.mark.parametrize("name", SYSTEMS)
REVERSE = pytest.mark.parametrize("name", [n for n in SYSTEMS if SYSTEMS[n].reverse])
TOL = 1e-9  # what the solvers leave over


def total(outs):
    return sum(
        [(bnp.sin(y) * draw(*y.shape, seed=5)).sum() for y in tree.leaves(outs) if y.dtype != bool], 0.0
    )


def losses(name):
    system = SYSTEMS[name]
    return lambda xs: total(system.custom(*xs)), lambda xs: total(system.plain(*xs)), list(system.args)


def directions(xs):
    return [draw(*x.shape, seed=9 + i) for i, x in enumerate(xs)]


def along(f, ts, reverse=True):
    if not reverse:
        return lambda xs: jvp(f, (xs,), (ts,))[1]
    return lambda xs: sum([(a * t).sum() for a, t in zip(grad(f)(xs), ts, strict=True)], 0.0)


@ALL
def test_solutions(name):
    system = SYSTEMS[name]
    want = system.plain(*system.args)
    close(system.custom(*system.args), want, TOL)
    close(jit(system.custom)(*system.args), want, TOL)
    jaxpr = make_jaxpr(system.custom)(*system.args)
    check_jaxpr(jaxpr)
    assert [e.prim for e in jaxpr.eqns].count(linear_solve_p) == 1


@ALL
def test_forward_mode(name):
    f, g, xs = losses(name)
    ts = directions(xs)
    want = along(g, ts)(xs)
    close(jvp(f, (xs,), (ts,))[1], want, TOL)
    close(jit(lambda xs, ts: jvp(f, (xs,), (ts,))[1])(xs, ts), want, TOL)
    close(linearize(f, xs)[1](ts), want, TOL)
    twice = along(along(g, ts, False), ts, False)(xs)
    close(along(along(f, ts, False), ts, False)(xs), twice, TOL)


@REVERSE
def test_reverse_mode(name):
    f, g, xs = losses(name)
    want = grad(g)(xs)
    close(grad(f)(xs), want, TOL)
    close(jit(grad(f))(xs), want, TOL)
    close(grad(jit(f))(xs), want, TOL)
    close(grad(checkpoint(f))(xs), want, TOL)


@REVERSE
def test_second_derivatives(name):
    f, g, xs = losses(name)
    ts = directions(xs)
    want = grad(along(g, ts))(xs)
    close(grad(along(f, ts))(xs), want, TOL)
    close(jvp(grad(f), (xs,), (ts,))[1], want, TOL)
    close(jit(grad(along(f, ts, False)))(xs), want, TOL)


@pytest.mark.slow
@REVERSE
def test_batches(name):
    f, g, xs = losses(name)
    for mask in itertools.product([0, None], repeat=len(xs)):
        if not any(m == 0 for m in mask):
            continue
        ins = [bnp.stack([x, x * 1.1, x * 0.9]) if m == 0 else x for x, m in zip(xs, mask, strict=True)]
        at = lambda i: [x[i] if m == 0 else x for x, m in zip(ins, mask, strict=True)]  # noqa: B023
        stack = lambda h: tree.map(lambda *ys: bnp.stack(ys), *[h(at(i)) for i in range(3)])  # noqa: B023
        run = lambda h: vmap(h, in_axes=(list(mask),))(ins)  # noqa: B023
        outs = lambda xs: SYSTEMS[name].custom(*xs)
        close(run(outs), stack(lambda xs: SYSTEMS[name].plain(*xs)), TOL)
        close(run(grad(f)), stack(grad(g)), TOL)
        close(jit(run, static_argnums=0)(grad(f)), stack(grad(g)), TOL)


def test_a_batch_of_a_part_of_the_right_hand_side():
    f = lambda b, c: custom_linear_solve(lambda v: (A @ v[0] + v[1][0], v[1] * 3.0), (b, c), loop, loop)
    b, c = draw(2, N), draw(N, seed=3)
    got = vmap(f, in_axes=(0, None))(b, c)
    want = [f(b[i], c) for i in range(2)]
    close(got, tree.map(lambda *xs: bnp.stack(xs), *want), TOL)


def test_a_batch_of_something_that_only_the_solver_reads():
    """Of a number of steps: the system is one, the solutions are several."""
    f = lambda a, n: custom_linear_solve(
        lambda x: a @ x,
        B,
        lambda matvec, b: lax.fori_loop(0, n, lambda _, x: x + 0.25 * (b - matvec(x)), bnp.zeros_like(b)),
        loop,
    )
    n = arr([1, 200], np.int32)
    outs = vmap(f, in_axes=(None, 0))(A, n)
    close(outs[0], 0.25 * B)
    close(outs[1], inverse(A) @ B, TOL)
    grads = vmap(lambda n: grad(lambda a: f(a, n).sum())(A))(n)
    close(grads[1], grad(lambda a: (inverse(a) @ B).sum())(A), TOL)


def test_gradients_are_those_of_differences():
    a, b, h = A, B, 1e-4
    f = lambda a, b: total(solver(solve=loop, transpose_solve=loop)(a, b))
    da, db = directions([a, b])
    at = lambda k: float(f(a + k * h * da, b + k * h * db))
    slope = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * h)
    ga, gb = grad(f, (0, 1))(a, b)
    np.testing.assert_allclose(float((ga * da).sum() + (gb * db).sum()), slope, rtol=1e-9)


def test_complex_systems():
    a = arr(np.asarray(A) + 0.5j * np.asarray(draw(N, N, seed=4)), np.complex128)
    b = arr(np.asarray(B) * (1 + 2j), np.complex128)
    f = lambda solve: lambda a, b: bnp.abs(solve(a, b)).sum()
    custom, plain = f(solver(solve=loop, transpose_solve=loop)), f(lambda a, b: inverse(a, 60) @ b)
    close(custom(a, b), plain(a, b), TOL)
    close(grad(custom, (0, 1))(a, b), grad(plain, (0, 1))(a, b), 1e-8)


def test_a_linear_function_of_the_right_hand_side_is_transposed():
    solve = lambda b: custom_linear_solve(lambda x: A @ x, b, loop, loop)
    close(linear_transpose(solve, B)(B)[0], inverse(A).T @ B, TOL)


def test_inside_a_custom_rule():
    """Where primals and tangents of one rule meet in one jitted function."""

    @custom_jvp
    def f(a, b):
        return solver(solve=loop, transpose_solve=loop)(a, b)

    @f.defjvp
    def f_jvp(primals, tangents):
        return jit(lambda ps, ts: jvp(solver(solve=loop, transpose_solve=loop), ps, ts))(primals, tangents)

    close(
        grad(lambda a, b: total(f(a, b)), (0, 1))(A, B),
        grad(lambda a, b: total(inverse(a) @ b), (0, 1))(A, B),
        TOL,
    )
    grads = vmap(grad(lambda a: total(f(a, B))))(bnp.stack([A, A * 1.1]))
    close(grads[0], grad(lambda a: total(inverse(a) @ B))(A), TOL)


def test_in_a_loop_whose_carry_is_differentiated():
    def f(solve):
        def loss(a):
            return lax.scan(lambda x, s: (bnp.sin(solve(a * s, x)), x.sum()), B, arr([1.0, 1.2, 0.9]))[
                0
            ].sum()

        return loss

    custom, plain = f(solver(solve=loop, transpose_solve=loop)), f(lambda a, b: inverse(a) @ b)
    close(grad(custom)(A), grad(plain)(A), TOL)
    close(jit(grad(custom))(A), grad(plain)(A), TOL)


def test_a_number_takes_the_dtype_of_the_system():
    a = arr(2.0)
    x = custom_linear_solve(lambda x: a * x, 1.0, lambda f, y: y / f(1.0))
    assert x.dtype == np.float64 and float(x) == 0.5
    x = custom_linear_solve(lambda x: 4 * x, 1.0, lambda f, y: y / f(1.0))
    assert x.dtype == np.float32 and float(x) == 0.25


def test_pulling_back_through_a_solution_with_aux():
    f = lambda b: custom_linear_solve(lambda x: A @ x, b, jacobi, jacobi, has_aux=True)
    (_, n), pull = vjp(f, B)
    assert int(n) > 3
    close(pull((B, np.zeros((), dtypes.float0)))[0], inverse(A).T @ B, TOL)


def test_solutions_are_not_differentiated_through():
    """The backward pass is one more solve, without a reversed loop."""
    f = lambda a, b: total(solver(solve=loop, transpose_solve=loop)(a, b))
    jaxpr = jit(grad(f, (0, 1))).lower(A, B).jaxpr
    check_jaxpr(jaxpr)
    solves = [e for e in jaxpr.eqns if e.prim is linear_solve_p]
    assert len(solves) == 2
    assert not any(e.prim.name in ("scan", "while") for e in jaxpr.eqns)
    assert all(not sub.consts for e in solves for sub in subjaxprs(e.params))


def test_functions_are_traced_a_fixed_number_of_times():
    count = []

    def matvec(x):
        count.append(1)
        return A @ x

    f = jit(lambda b: custom_linear_solve(matvec, b, lambda m, b: by_columns(m, b), symmetric=True))
    f(B)
    first = len(count)
    f(B * 2.0)
    jit(f)(B)
    assert len(count) == first == 2, "matvec once for itself and once in the solver"


# -- errors ----------------------------------------------------------------------------------------

solve_b = lambda matvec, b: b
ERRORS = {
    "no transpose_solve": (
        lambda: grad(lambda b: custom_linear_solve(lambda x: A @ x, b, loop).sum())(B),
        errors.GradError,
        ("transpose", "symmetric=True"),
    ),
    "not linear": (
        lambda: custom_linear_solve(lambda x: x * x, B, solve_b, solve_b),
        errors.GradError,
        ("not linear",),
    ),
    "a constant is transposed": (
        lambda: linear_transpose(lambda a: custom_linear_solve(lambda x: a * x, B, solve_b, solve_b), B),
        errors.GradError,
        ("not linear",),
    ),
    "a different structure of matvec": (
        lambda: custom_linear_solve(lambda x: (x,), B, solve_b),
        errors.TreeError,
        ("matvec", "a different structure"),
    ),
    "another shape of matvec": (
        lambda: custom_linear_solve(lambda x: {"a": x["a"].sum()}, {"a": B}, solve_b),
        errors.ShapeError,
        ("matvec", "x['a']", "f64[3]", "f64[]"),
    ),
    "a different structure of solve": (
        lambda: custom_linear_solve(lambda x: x, B, lambda f, b: [b]),
        errors.TreeError,
        ("solve", "a different structure"),
    ),
    "another dtype of solve": (
        lambda: custom_linear_solve(lambda x: x, B, lambda f, b: b.astype("float32")),
        errors.ShapeError,
        ("solve, <lambda>", "f32[3]"),
    ),
    "another shape of transpose_solve": (
        lambda: custom_linear_solve(lambda x: x, B, solve_b, lambda f, b: b[:2]),
        errors.ShapeError,
        ("transpose_solve", "f64[2]"),
    ),
    "no aux": (
        lambda: custom_linear_solve(lambda x: x, B, solve_b, has_aux=True),
        errors.TreeError,
        ("(x, aux)", "has_aux"),
    ),
    "integers": (
        lambda: custom_linear_solve(lambda x: x, arr([1, 2], np.int32), solve_b),
        errors.DtypeError,
        ("i32[2]", "astype"),
    ),
    "no function": (
        lambda: custom_linear_solve(A, B, solve_b),
        errors.ArgumentError,
        ("custom_linear_solve takes a function",),
    ),
    "no array": (
        lambda: custom_linear_solve(lambda x: x, {"u": "text"}, solve_b),
        errors.ArgumentError,
        ("b['u']", "str"),
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
    assert "test_linear_solve.py" in info.value.where


# -- the peer --------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_against_jax(is_symmetric):
    import jax

    def program(np_, lax_, custom, vmap_):
        def richardson(matvec, b):
            return lax_.fori_loop(0, 60, lambda _, x: x + 0.2 * (b - matvec(x)), np_.zeros_like(b))

        def loss(a, b):
            matvec = (lambda x: a @ x + a.T @ x) if is_symmetric else (lambda x: np_.sin(a) @ x + 3.0 * x)
            back = None if is_symmetric else richardson
            x = custom(matvec, b, richardson, back, symmetric=is_symmetric)
            return np_.sin(x).sum()

        return loss

    custom = program(bnp, lax, custom_linear_solve, vmap)
    theirs = program(jax.numpy, jax.lax, jax.lax.custom_linear_solve, jax.vmap)
    rng = np.random.default_rng(0)
    a = (rng.normal(size=(4, N, N)) * 0.2 + 2 * np.eye(N)).astype(np.float32)
    b = rng.normal(size=(4, N)).astype(np.float32)
    same = lambda x, y: [
        np.testing.assert_allclose(np.asarray(p), np.asarray(q), rtol=2e-4, atol=2e-5)
        for p, q in zip(tree.leaves(x), jax.tree.leaves(y), strict=True)
    ]
    same(vmap(custom)(a, b), jax.vmap(theirs)(a, b))
    same(vmap(grad(custom, (0, 1)))(a, b), jax.vmap(jax.grad(theirs, (0, 1)))(a, b))
    hvp = lambda grad, jvp, f: lambda a: jvp(grad(lambda a: f(a, b[0])), (a,), (a,))[1]
    same(hvp(grad, jvp, custom)(a[0]), hvp(jax.grad, jax.jvp, theirs)(a[0]))
