"""Custom derivatives and bodies traced by themselves, inside ``shard_map``."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import AbstractMesh, P, errors, lax, shard_map
from blufunc.config import config

N = 4
MESH = AbstractMesh((N,), ("x",))
RING = [(i, (i + 1) % N) for i in range(N)]


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch):
    """Small arrays: calls of NumPy are faster than a compiler."""
    monkeypatch.setattr(config, "host_compiler", "never")


def floats(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


X, W = floats(8, 3), floats(3, 3) / 2


def mapped(f, ins=(P("x"), P()), outs=P()):
    return shard_map(f, mesh=MESH, in_specs=ins, out_specs=outs)


def check(f, want, *args):
    """Values and derivatives of orders 1 and 2, against one device."""
    along = tuple(range(len(args)))
    np.testing.assert_allclose(f(*args), want(*args), rtol=1e-4)
    second = lambda f: lambda *args: sum((g**2).sum() for g in bf.grad(f, along)(*args))
    for one, other in ((f, want), (second(f), second(want))):
        for g, w in zip(bf.grad(one, along)(*args), bf.grad(other, along)(*args), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-4 * max(1.0, float(abs(w).max())))


# -- rules -----------------------------------------------------------------------------------------


def ruled(fun, fwd, bwd):
    function = bf.custom_vjp(fun)
    function.defvjp(fwd, bwd)
    return function


def shifted():
    back = [(b, a) for a, b in RING]
    return ruled(
        lambda x: lax.ppermute(x, "x", RING),
        lambda x: (lax.ppermute(x, "x", RING), None),
        lambda _, ct: (lax.ppermute(ct, "x", back),),
    )


def gathered():
    f = lambda x: lax.all_gather(x, "x", tiled=True)
    return ruled(f, lambda x: (f(x), None), lambda _, ct: (lax.psum_scatter(ct, "x", tiled=True),))


def product():
    """A rule that sums the cotangent of the weights by itself."""
    sums = lambda x, w: lax.psum(bnp.tanh(x @ w).sum(), "x")

    def bwd(kept, ct):
        x, w = kept
        inner = ct * (1 - bnp.tanh(x @ w) ** 2)
        return inner @ w.T, lax.psum(x.T @ inner, "x")

    return ruled(sums, lambda x, w: (sums(x, w), (x, w)), bwd)


def parts():
    """A rule that leaves the sum to the types."""
    local = lambda x, w: bnp.tanh(x @ w)

    def bwd(kept, ct):
        x, w = kept
        inner = ct * (1 - bnp.tanh(x @ w) ** 2)
        return inner @ w.T, x.T @ inner

    return ruled(local, lambda x, w: (local(x, w), (x, w)), bwd)


def summed():
    @bf.custom_jvp
    def f(x):
        return lax.psum(bnp.sin(x).sum(0), "x")

    @f.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return f(x), lax.psum((bnp.cos(x) * t).sum(0), "x")

    return f


RULES = {
    "permutation": (
        lambda x, w: lax.psum((shifted()(x @ w) * x).sum(), "x"),
        lambda x, w: (bnp.roll((x @ w).reshape(N, -1, 3), 1, 0).reshape(8, 3) * x).sum(),
    ),
    "gather": (
        lambda x, w: lax.psum((gathered()(bnp.tanh(x @ w)).sum(0) * x).sum(), "x"),
        lambda x, w: (bnp.tanh(x @ w).sum(0) * x).sum(),
    ),
    "a sum in both rules": (lambda x, w: product()(x, w) ** 2, lambda x, w: bnp.tanh(x @ w).sum() ** 2),
    "parts of the cotangent": (
        lambda x, w: lax.psum((parts()(x, w) ** 2).sum(), "x"),
        lambda x, w: (bnp.tanh(x @ w) ** 2).sum(),
    ),
    "forward mode": (
        lambda x, w: (summed()(x @ w) ** 2).sum(),
        lambda x, w: (bnp.sin(x @ w).sum(0) ** 2).sum(),
    ),
    "in a loop": (
        lambda x, w: lax.psum(
            lax.scan(lambda h, _: (shifted()(bnp.tanh(h @ w)), h.sum()), x, None, length=3)[0].sum(), "x"
        ),
        lambda x, w: bnp.tanh(bnp.tanh(bnp.tanh(x @ w) @ w) @ w).sum(),
    ),
    "in a checkpoint and a branch": (
        lambda x, w: lax.cond(
            w[0, 0] > -9, lambda: bf.checkpoint(lambda w: product()(x, w))(w), lambda: w.sum()
        ),
        lambda x, w: bnp.tanh(x @ w).sum(),
    ),
    "under vmap": (
        lambda x, w: bf.vmap(lambda s: product()(x * s, w))(bnp.arange(1.0, 4.0)).sum(),
        lambda x, w: sum(bnp.tanh(x * s @ w).sum() for s in (1.0, 2.0, 3.0)),
    ),
    "a gradient of it inside": (
        lambda x, w: (bf.grad(lambda w: product()(x, w))(w) ** 2).sum(),
        lambda x, w: (bf.grad(lambda w: bnp.tanh(x @ w).sum())(w) ** 2).sum(),
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_rules_with_collectives(case):
    f, want = RULES[case]
    check(mapped(f), want, X, W)


def test_a_vmap_around_maps_the_rules():
    f, want = RULES["a sum in both rules"]
    over = np.stack([W, 2 * W])
    both = lambda f: lambda x, ws: bf.vmap(f, (None, 0))(x, ws).sum()
    check(both(mapped(f)), both(want), X, over)


def test_a_tangent_that_is_not_summed_is_an_error():
    f = bf.custom_jvp(lambda x: lax.psum(bnp.sin(x).sum(), "x"))
    f.defjvp(lambda p, t: (f(*p), (bnp.cos(p[0]) * t[0]).sum()))
    with pytest.raises(errors.ShardingError, match="varying over 'x' is not invariant"):
        bf.grad(mapped(lambda x, w: f(x @ w)))(X, W)


# -- gradients in what is traced by itself ---------------------------------------------------------


def loss(w, x):
    return (bnp.tanh(x @ w) ** 2).sum()


def descent(loss, steps=2):
    """By a loop, whose body takes the gradient."""
    return lambda x, w: lax.scan(lambda w, _: (w - 0.1 * bf.grad(loss)(w, x), None), w, None, length=steps)[0]


def square(f):
    return lambda x, w: (f(x, w) ** 2).sum()


BODIES = {
    "scan": (descent(loss), descent(loss)),
    "scan of a sum": (descent(lambda w, x: lax.psum(loss(w, x), "x")), descent(loss)),
    "scan in scan": (
        lambda x, w: lax.scan(lambda w, _: (descent(loss, 1)(x, w), None), w, None, length=2)[0],
        descent(loss),
    ),
    "bounded while": (
        lambda x, w: lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] - 0.1 * bf.grad(loss)(c[1], x)), (0, w), max_steps=3
        )[1],
        descent(loss),
    ),
    "fori": (
        lambda x, w: lax.fori_loop(0, 2, lambda i, w: w - 0.1 * bf.grad(loss)(w, x), w),
        descent(loss),
    ),
    "cond": (
        lambda x, w: lax.cond(w[0, 0] > -9, lambda: descent(loss, 1)(x, w), lambda: w),
        descent(loss, 1),
    ),
    "switch": (
        lambda x, w: lax.switch(1, [lambda w: w, lambda w: bf.grad(loss)(w, x)], w),
        lambda x, w: bf.grad(loss)(w, x),
    ),
    "checkpoint": (
        lambda x, w: bf.checkpoint(lambda w: bf.grad(loss)(w, x))(w),
        lambda x, w: bf.grad(loss)(w, x),
    ),
}


@pytest.mark.parametrize("case", BODIES)
def test_gradients_in_bodies(case):
    f, want = BODIES[case]
    check(square(mapped(f)), square(want), X, W)


def test_a_branch_that_ranks_choose_has_gradients_of_its_own_rank():
    def f(x, w):
        step = lambda: w - 0.1 * bf.grad(loss)(w, x)
        return lax.cond(x[0, 0] > 0, step, lambda: lax.pcast(w, "x", to="varying"))[None]

    got = mapped(f, outs=P("x"))(X, W)
    for one, rows in zip(got, np.split(X, N), strict=True):
        want = W - 0.1 * bf.grad(loss)(W, rows) if rows[0, 0] > 0 else W
        np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-6)


def test_a_loop_whose_ranks_stop_by_themselves():
    def f(x, w):
        def step(c):
            k, w = c
            return k + 1, w - 0.1 * bf.grad(loss)(w, x)

        return lax.while_loop(lambda c: c[0] <= lax.axis_index("x"), step, (0, w))[1][None]

    got = mapped(f, outs=P("x"))(X, W)
    for k, (one, rows) in enumerate(zip(got, np.split(X, N), strict=True)):
        np.testing.assert_allclose(one, descent(loss, k + 1)(rows, W), rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_varying_argument_varies_even_where_it_is_constant():
    seen = []

    def f(x, w):
        seen.append(bf.typeof(bf.grad(lambda x: (2 * x).sum())(x)).vma)
        seen.append(bf.typeof(bf.grad(lambda x: w.sum())(x)).vma)
        return w

    mapped(f)(X, W)
    assert seen == [{"x"}, {"x"}]
