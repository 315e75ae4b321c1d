"""Gradients in buckets, and accumulated over microbatches with one reduction."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import P, errors, lax, tree
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.recipes import accumulated_value_and_grad, bucketed_psum
from examples.gpt import model
from tests.parallel.exchanged import equations, exchanged, meetings, same

N, M = 4, 3
MESH = AbstractMesh((N,), ("data",))
CONFIG = model.Config(layers=2, heads=2, width=8, context=6, vocab=11)
PARAMS = model.init(bf.random.key(0), CONFIG)
TOKENS = np.random.default_rng(0).integers(0, 11, (2 * N * M, 7)).astype(np.int32)
LEAVES = tree.leaves(PARAMS)
BYTES = sum(x.size * 4 for x in LEAVES)


def loss(params, tokens):
    return model.loss(params, tokens, CONFIG)


def data_parallel(reduce):
    """Value and gradient of a batch that is sharded over the ranks."""

    def step(params, tokens):
        params = lax.pcast(params, "data", to="reduced")
        value, grads = bf.value_and_grad(lambda p: loss(p, tokens) / N)(params)
        return lax.psum(value, "data"), reduce(grads)

    return bf.shard_map(step, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())


def in_buckets(size):
    return data_parallel(lambda grads: bucketed_psum(grads, "data", bytes=size))


@pytest.mark.slow
@pytest.mark.parametrize("size, count", [(1, len(LEAVES)), (10**9, 1), (BYTES // 3, None)])
def test_one_all_reduce_a_bucket_and_the_same_values(size, count):
    f = in_buckets(size)
    got = f(PARAMS, TOKENS)
    same(got, bf.value_and_grad(loss)(PARAMS, TOKENS))
    plain = data_parallel(lambda grads: lax.psum(grads, "data"))(PARAMS, TOKENS)
    for g, w in zip(tree.leaves(got), tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(g, w)  # bit by bit: the terms are added in the order of ranks
    calls, total = exchanged(f, PARAMS, TOKENS)["psum_invariant"]
    assert total == BYTES + 4  # each gradient once, and the loss
    sizes = [e.invars[0].aval.size * 4 for _, _, e in meetings(f, PARAMS, TOKENS) if e.invars[0].aval.ndim]
    largest = max(x.size * 4 for x in LEAVES)
    assert all(s <= max(size, largest) for s in sizes)
    assert calls - 1 == len(sizes) == (count if count is not None else len(sizes))
    if count is None:
        assert 3 <= len(sizes) <= 6


def test_buckets_are_in_the_order_in_which_gradients_are_made():
    jaxpr = bf.jit(in_buckets(BYTES // 3)).lower(PARAMS, TOKENS).jaxpr
    (body,) = [e.params["jaxpr"] for e in jaxpr.eqns if e.prim.name == "shard_map"]
    made = {v: i for i, e in enumerate(body.eqns) for v in e.outvars}

    def sources(v):
        """Position of a bucket's gradients: after the equations that concatenate them."""
        e = body.eqns[made[v]]
        if e.prim.name in ("concatenate", "reshape", "copy", "pcast"):
            return [i for a in e.invars for i in sources(a)]
        return [made[v]]

    reduced = [e for e in body.eqns if e.prim.name == "psum_invariant" and e.invars[0].aval.ndim]
    order = [i for e in reduced for i in sources(e.invars[0])]
    assert len(order) == len(LEAVES)
    assert order == sorted(order)
    # each follows its last gradient: the rest of the backward pass comes after it
    places = [made[e.outvars[0]] for e in reduced]
    left = [sum(e.prim.name == "dot_general" for e in body.eqns[i:]) for i in places]
    assert left == sorted(left, reverse=True)
    assert left[0] > left[1] > 0


def test_arrays_of_several_dtypes_have_their_own_buckets():
    def f(x, y, z):
        x, y, z = bucketed_psum((x, y, z), "data")
        return x, y, z

    a, b, c = np.ones(8, np.float32), np.ones(8, np.int32), np.ones((8, 2), np.float32)
    mapped = bf.shard_map(f, mesh=MESH, in_specs=P("data"), out_specs=P())
    assert exchanged(mapped, a, b, c) == {"psum_invariant": (2, 3 * 2 * 4 + 2 * 4)}
    same(mapped(a, b, c), (bnp.full(2, 4.0), bnp.full(2, 4, "int32"), bnp.full((2, 2), 4.0)))


def test_what_varies_and_is_unreduced_is_summed_at_once():
    mesh = AbstractMesh((2, 2), ("x", "y"))

    def f(x):
        return bucketed_psum(lax.pcast(x, "y", to="unreduced"), ("x", "y"))

    mapped = bf.shard_map(f, mesh=mesh, in_specs=P(("x", "y")), out_specs=P())
    assert exchanged(mapped, np.arange(8.0, dtype="float32")) == {"psum_invariant": (1, 8)}
    same(mapped(np.arange(8.0, dtype="float32")), bnp.asarray([12.0, 16.0]))


def test_accumulation_reduces_once_for_all_microbatches():
    def step(params, tokens):
        return accumulated_value_and_grad(loss, params, tokens, "data")

    f = bf.shard_map(step, mesh=MESH, in_specs=(P(), P(None, "data")), out_specs=P())
    microbatches = TOKENS.reshape(M, 2 * N, 7)
    same(f(PARAMS, microbatches), bf.value_and_grad(loss)(PARAMS, TOKENS))
    # one bucket and the loss, whatever M is; and no loss before all of them
    assert exchanged(f, PARAMS, microbatches) == {"psum_invariant": (2, BYTES + 4)}
    jaxpr = bf.jit(f).lower(PARAMS, microbatches).jaxpr
    (scan,) = [e for e, _ in equations(jaxpr) if e.prim.name == "scan"]
    assert scan.params["length"] == M
    # nothing is stacked: of no microbatch but the one at hand anything is kept
    assert len(scan.outvars) == scan.params["n_carry"] == len(LEAVES) + 1


UNUSED = {
    "w": np.arange(1.0, 3.0, dtype=np.float32),
    "scale": np.float32(1),
    "unused": np.ones((2, 3), np.float32),
}


def test_parameters_that_are_not_used_have_gradients_of_zero():
    def loss(params, x):
        return ((x @ params["w"]) ** 2).mean()

    def step(params, x):
        return bucketed_psum(bf.grad(loss)(lax.pcast(params, "data", to="reduced"), x), "data")

    x = np.random.default_rng(1).standard_normal((2, 8, 2)).astype(np.float32)
    want = bf.value_and_grad(loss)(UNUSED, x.reshape(-1, 2))
    mapped = bf.shard_map(step, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    same(tree.map(lambda g: g / N, mapped(UNUSED, x.reshape(-1, 2))), want[1])
    f = bf.shard_map(
        lambda p, x: accumulated_value_and_grad(loss, p, x, "data"),
        mesh=MESH, in_specs=(P(), P(None, "data")), out_specs=P(),
    )  # fmt: skip
    same(f(UNUSED, x), want)


@pytest.mark.parametrize("of", ["w", "scale"])
def test_accumulation_of_a_loss_that_does_not_see_the_data(of):
    loss = lambda params, x: (3 * params[of]).sum()
    f = bf.shard_map(
        lambda p, x: accumulated_value_and_grad(loss, p, x, "data"),
        mesh=MESH, in_specs=(P(), P(None, "data")), out_specs=P(),
    )  # fmt: skip
    same(f(UNUSED, np.ones((2, N), np.float32)), bf.value_and_grad(loss)(UNUSED, None))


def test_accumulation_with_parameters_that_each_rank_has_parts_of():
    """Rows of ``own`` are gathered on use: the transpose scatters the sums."""

    def loss(params, x, own):
        return (bnp.tanh(x @ params["shared"]) @ own).mean()

    def local(params, x):
        whole = lambda p: lax.all_gather(p["own"], "data", tiled=True, to="reduced")
        return accumulated_value_and_grad(lambda p, x: loss(p, x, whole(p)), params, x, "data")

    rng = np.random.default_rng(3)
    params = {name: rng.standard_normal((8, 8)).astype(np.float32) for name in ("own", "shared")}
    x = rng.standard_normal((M, N, 8)).astype(np.float32)
    specs = {"own": P("data"), "shared": P()}
    f = bf.shard_map(local, mesh=MESH, in_specs=(specs, P(None, "data")), out_specs=(P(), specs))
    same(f(params, x), bf.value_and_grad(lambda p: loss(p, x, p["own"]))(params))
    assert exchanged(f, params, x)["psum_invariant"] == (
        2,
        4 + 8 * 8 * 4,
    )  # of the value, and of what is shared


def test_over_no_axis_nothing_is_summed():
    mapped = bf.shard_map(lambda x: bucketed_psum(x, ()), mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    same(mapped(np.arange(4.0, dtype="float32")), bnp.arange(4.0))


@pytest.mark.slow
def test_accumulation_over_several_axes_and_under_jit():
    mesh = AbstractMesh((2, 2), ("data", "pod"))

    def step(params, tokens):
        return accumulated_value_and_grad(loss, params, tokens, ("data", "pod"))

    f = bf.shard_map(step, mesh=mesh, in_specs=(P(), P(None, ("pod", "data"))), out_specs=P())
    microbatches = TOKENS.reshape(M, 2 * N, 7)
    same(bf.jit(f)(PARAMS, microbatches), bf.value_and_grad(loss)(PARAMS, TOKENS))
    assert exchanged(f, PARAMS, microbatches) == {"psum_invariant": (2, BYTES + 4)}


def test_bucketed_psum_in_a_loop():
    def in_loop(x):
        return lax.scan(lambda c, row: (c, bucketed_psum(row, "data")), 0.0, x)[1]

    x = np.arange(8.0, dtype=np.float32).reshape(2, 4)
    mapped = bf.shard_map(in_loop, mesh=MESH, in_specs=P(None, "data"), out_specs=P())
    np.testing.assert_allclose(mapped(x), x.sum(1, keepdims=True))


def test_errors():
    invariant = data_parallel(lambda grads: bucketed_psum(lax.psum(grads, "data"), "data"))
    with pytest.raises(errors.ShardingError, match="is already the same on all ranks along 'data'"):
        invariant(PARAMS, TOKENS)
    with pytest.raises(errors.ValueRangeError, match="a positive number of bytes, not 0"):
        in_buckets(0)(PARAMS, TOKENS)
    with pytest.raises(errors.UnsupportedError, match="bucketed_psum outside of shard_map"):
        bucketed_psum(PARAMS, "data")

    def of_several_numbers(params, x):
        return accumulated_value_and_grad(lambda p, m: p * m["a"].sum(), params, x, "data")

    with pytest.raises(errors.ShapeError, match=r"have the same leading dimension, \[M, \.\.\.\]"):
        bf.shard_map(of_several_numbers, mesh=MESH, in_specs=P(), out_specs=P())(
            np.float32(1), {"a": np.ones((2, 4)), "b": np.ones((3, 4))}
        )
