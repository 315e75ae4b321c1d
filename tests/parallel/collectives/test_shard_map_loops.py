"""Derivatives of loops and branches in ``shard_map``, against whole arrays."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import P, lax, make_mesh, shard_map
from tests.parallel.lockstep import collectives

N = 4


@pytest.fixture
def mesh(eight):
    return make_mesh((N,), ("x",))


def floats(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


X, W, V = floats(8, 4), 0.5 * floats(4, 4), 0.5 * floats(4)


# Each row: the function of shards, its specs, and the same of whole arrays. Of the arguments x is divided by rows, the
# weights are whole or divided.


def steps_with_sums(psum):
    def f(x, w):
        def step(h, _):
            h = bnp.tanh(h @ w)
            return h - psum(h.sum(0)) / 8, h.sum(1)

        h, ys = lax.scan(step, x, None, length=3)
        return h, ys

    return f


def carry_that_is_the_same_everywhere(psum):
    def f(x, w):
        def step(total, row):
            return bnp.sin(total) + psum((x * row).sum(0)), total * row

        return lax.scan(step, bnp.zeros(4), w)

    return f


def invariant_and_varying_carries(psum):
    def f(x, w):
        def step(carry, k):
            h, v, n = carry
            h = bnp.tanh(h @ w + v)
            return (h, v * 0.5 + psum(h.sum(0)) * k, n + 1), (h * k).sum(1)

        (h, v, _), ys = lax.scan(step, (x, w[0], 0), bnp.arange(1.0, 4.0))
        return h, v, ys

    return f


def counted_loop(psum):
    return lambda x, w: lax.fori_loop(0, 3, lambda i, h: bnp.tanh(h @ w) + psum(h.sum(0)) * 0.1, x)


def bounded_while(psum):
    def f(x, w):
        step = lambda s: (s[0] + 1, bnp.tanh(s[1] @ w) * 0.9)
        return lax.while_loop(
            lambda s: (s[0] < 3) & (psum((s[1] ** 2).sum()) > 0.01), step, (0, x), max_steps=5
        )[1]

    return f


def branches_in_a_loop(psum):
    def f(x, w):
        def step(h, k):
            h = lax.cond(k % 2 == 0, lambda h: bnp.tanh(h @ w), lambda h: h * psum(h.sum(0)) * 0.1, h)
            return h, None

        return lax.scan(step, x, bnp.arange(4))[0]

    return f


def loops_in_loops(psum):
    def f(x, w):
        inner = lambda h, row: (bnp.sin(h * row) + psum((h * row).sum(0)) * 0.01, h.sum(1))
        outer = lambda h, _: lax.scan(inner, h, w)
        return lax.scan(outer, x, None, length=2)

    return f


def computed_again(psum):
    def f(x, w):
        step = bf.checkpoint(lambda h, row: (bnp.tanh(h @ w + row) - psum(h.sum(0)) * 0.1, None))
        return lax.scan(step, x, w)[0]

    return f


ROWS, STACKED = P("x"), P(None, "x")
LOOPS = {
    "steps with sums": (steps_with_sums, (ROWS, STACKED)),
    "a carry that is the same everywhere": (carry_that_is_the_same_everywhere, (P(), P())),
    "invariant and varying carries": (invariant_and_varying_carries, (ROWS, P(), STACKED)),
    "counted": (counted_loop, ROWS),
    "bounded while": (bounded_while, ROWS),
    "branches in a loop": (branches_in_a_loop, ROWS),
    "loops in loops": (loops_in_loops, (ROWS, P(None, None, "x"))),
    "computed again": (computed_again, ROWS),
}


def weighted(f):
    """A number that depends on all results of ``f`` in different ways."""

    def total(*args):
        outs = bf.tree.leaves(f(*args))
        return sum((bnp.sin(o) * bnp.arange(1.0, o.size + 1).reshape(o.shape)).sum() for o in outs)

    return total


def agree(mapped, whole, args, tol=2e-4):
    np.testing.assert_allclose(weighted(mapped)(*args), weighted(whole)(*args), rtol=tol, atol=tol)
    for derive in (
        lambda f: bf.grad(weighted(f), (0, 1)),
        lambda f: bf.jit(bf.grad(weighted(f), (0, 1))),
        lambda f: lambda *args: bf.jvp(weighted(f), args, tuple(bnp.cos(a) for a in args)),
    ):
        for got, expected in zip(derive(mapped)(*args), derive(whole)(*args), strict=True):
            atol = tol * max(1, float(np.abs(expected).max()))  # elements are sums of others as large
            np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=tol, atol=atol)


@pytest.mark.parametrize("w_spec", [P(), P("x")], ids=["whole", "gathered"])
@pytest.mark.parametrize("case", LOOPS)
def test_loops_in_functions_of_shards_differentiate(mesh, case, w_spec):
    make, out_specs = LOOPS[case]
    body = make(lambda x: lax.psum(x, "x"))
    if w_spec == P("x"):
        local = lambda x, w: body(x, lax.all_gather(w, "x", tiled=True, to="reduced"))
    else:
        local = body
    mapped = shard_map(local, mesh=mesh, in_specs=(P("x"), w_spec), out_specs=out_specs)
    agree(mapped, make(lambda x: x), (X, W))


@pytest.mark.parametrize("case", ["steps with sums", "invariant and varying carries", "loops in loops"])
def test_second_derivatives_and_batches_of_loops(mesh, case):
    make, out_specs = LOOPS[case]
    mapped = shard_map(
        make(lambda x: lax.psum(x, "x")), mesh=mesh, in_specs=(P("x"), P()), out_specs=out_specs
    )
    whole = make(lambda x: x)
    product = lambda f: bf.jvp(bf.grad(weighted(f), 1), (X, W), (X * 0.1, bnp.cos(W)))[1]
    np.testing.assert_allclose(product(mapped), product(whole), rtol=2e-3, atol=2e-3)
    batch = lambda f: bf.vmap(bf.grad(weighted(f), 1), (0, None))(np.stack([X, X * 0.5]), W)
    np.testing.assert_allclose(batch(mapped), batch(whole), rtol=2e-3, atol=2e-3)


def test_a_ring_in_a_loop(mesh):
    """Each shard visits every rank, as keys and values do in ring attention."""
    around = [(i, (i + 1) % N) for i in range(N)]

    def local(q, k):
        def step(carry, _):
            total, k = carry
            total = total + bnp.tanh(q @ k.T).sum(1)
            return (total, lax.ppermute(k, "x", around)), None

        start = lax.pcast(bnp.zeros(q.shape[0]), "x", to="varying")
        return lax.scan(step, (start, k), None, length=N)[0][0]

    mapped = shard_map(local, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
    agree(mapped, lambda q, k: bnp.tanh(q @ k.T).sum(1), (X, floats(8, 4, seed=1)))


def test_the_gradient_of_a_whole_weight_is_summed_once_after_the_loop(mesh):
    step = lambda w: lambda h, _: (bnp.tanh(h @ w), None)
    local = lambda x, w: lax.psum(lax.scan(step(w), x, None, length=3)[0].sum(), "x")
    mapped = shard_map(local, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
    whole = lambda x, w: lax.scan(step(w), x, None, length=3)[0].sum()
    agree(mapped, whole, (X, W))
    maps = [
        e.params["jaxpr"] for e in bf.make_jaxpr(bf.grad(mapped, 1))(X, W).eqns if e.prim.name == "shard_map"
    ]
    assert [collectives(j) for j in maps] == [{"psum_invariant": 1}] * 2  # of the value, and of the gradient
    (loop,) = [e for e in maps[1].eqns if e.prim.name == "scan"]
    assert collectives(loop.params["jaxpr"]) == {}
