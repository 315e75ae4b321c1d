"""``shard_map``: values and derivatives, against a single-device function."""

from __future__ import annotations

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, tree
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.parallel.collectives.shard_map import shard_map
from blufunc.parallel.collectives.shard_map_equation import divide
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import P
from blufunc.parallel.partition.partition import localise
from blufunc.parallel.runtime.sharded_buffer import assemble
from blufunc.parallel.runtime.simulated import run_ranks
from tests.parallel.exchanged import exchanged
from tests.transforms.common import draw

MESH = AbstractMesh((4,), ("x",))
GRID = AbstractMesh((2, 2), ("x", "y"))
X, W1, W2 = (draw(*shape).astype(np.float32) for shape in ((8, 6), (6, 8), (8, 6)))
RING = [(i, (i + 1) % 4) for i in range(4)]


def same(got, want):
    assert tree.structure(got) == tree.structure(want)
    for g, w in zip(tree.leaves(got), tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=2e-4, atol=2e-5)


def mlp(x, w1, w2):
    return bnp.tanh(x @ w1) @ w2


def loss_of(f):
    return lambda *args: (f(*args) ** 2).sum()


def mean_loss(x, w1, w2):
    return (mlp(x, w1, w2) ** 2).mean()


def tensor_parallel(x, w1, w2):
    return lax.psum(mlp(x, w1, w2), "x")


def ring(q, k):
    def step(carry, _):
        total, k = carry
        return (total + bnp.tanh(q * k), lax.ppermute(k, "x", RING)), None

    (total, _), _ = lax.scan(step, (bnp.zeros_like(q), k), None, length=4)
    return total


def whole_ring(q, k):
    q, k = (a.reshape(4, -1, a.shape[-1]) for a in (q, k))
    return bnp.tanh(q[:, None] * k[None]).sum(1).reshape(-1, q.shape[-1])


def fsdp(x, w1, w2):
    w1 = lax.all_gather(w1, "x", axis=1, tiled=True, to="reduced")
    w2 = lax.all_gather(w2, "x", tiled=True, to="reduced")
    return lax.pmean(mean_loss(x, w1, w2), "x")


def unreduced_sums(x, w1, w2):
    """The second matmul of a tensor-parallel pair; linear operations precede its sum."""
    y = lax.pcast(mlp(x, w1, w2), "x", to="unreduced") * 2.0
    return lax.psum_scatter(y + y, "x", tiled=True)


def on_grid(x, w1, w2):
    """Data over x, tensors over y."""
    return lax.pmean(mean_sum(x, w1, w2), "x")


def mean_sum(x, w1, w2):
    return (lax.psum(mlp(x, w1, w2), "y") ** 2).mean()


SHARDED = P(), P(None, "x"), P("x")
# a function of shards, its mesh and specs, the same function of whole arrays
CASES = {
    "tensor parallel": (tensor_parallel, MESH, SHARDED, P(), mlp),
    "data parallel": (
        lambda *a: lax.pmean(mean_loss(*a), "x"), MESH, (P("x"), P(), P()), P(), mean_loss,
    ),
    "fully sharded": (fsdp, MESH, (P("x"), P(None, "x"), P("x")), P(), mean_loss),
    "scattered sums": (unreduced_sums, MESH, SHARDED, P("x"), lambda *a: 4.0 * mlp(*a)),
    "an unreduced result": (
        lambda *a: lax.pcast(mlp(*a), "x", to="unreduced"), MESH, SHARDED, P(unreduced={"x"}), mlp,
    ),
    "a reduced argument": (
        lambda *a: lax.psum(mlp(*a), "x"), MESH, (P(reduced={"x"}), P(None, "x"), P("x")), P(), mlp,
    ),
    "a grid": (on_grid, GRID, (P("x"), P(None, "y"), P("y")), P(), mean_loss),
    "two axes at once": (
        lambda x, w1, w2: lax.psum(mlp(x, w1, w2), ("y", "x")),
        GRID, (P(), P(None, ("x", "y")), P(("x", "y"))), P(), mlp,
    ),
    "what all ranks add": (
        lambda x, w1, w2: lax.psum((x @ w1).sum() + w2.sum() / 4, "x"),
        MESH, (P("x"), P(), P()), P(), lambda x, w1, w2: (x @ w1).sum() + w2.sum(),
    ),
    "all to all": (
        lambda x, w1, w2: lax.all_to_all(x @ w1, "x", 1, 0, tiled=True) @ w2[:2],
        MESH, (P("x"), P(), P()), P("x"),
        lambda x, w1, w2: (x @ w1).reshape(8, 4, 2).transpose(1, 0, 2).reshape(32, 2) @ w2[:2],
    ),
    "all to all, stacked": (
        lambda x, w1, w2: lax.all_to_all((x @ w1).reshape(2, 4, 2), "x", 1, 2) @ w2[:4],
        MESH, (P("x"), P(), P()), P("x"),
        lambda x, w1, w2: (x @ w1).reshape(4, 2, 4, 2).transpose(2, 1, 3, 0).reshape(8, 2, 4) @ w2[:4],
    ),
    "the maximum": (
        lambda x, w1, w2: lax.pmax((x @ w1).max(0), "x") @ w2,
        MESH, (P("x"), P(), P()), P(), lambda x, w1, w2: (x @ w1).max(0) @ w2,
    ),
    "a gather over two axes": (
        lambda x, w1, w2: lax.all_gather(x, ("y", "x"), tiled=True, to="invariant") @ w1 @ w2,
        GRID, (P(("y", "x")), P(), P()), P(), lambda x, w1, w2: x @ w1 @ w2,
    ),
    "a stack over two axes": (
        lambda x, w1, w2: (lax.all_gather(x, ("x", "y"), axis=1) * bnp.arange(4)[:, None]).sum(1) @ w1 @ w2,
        GRID, (P(("x", "y")), P(), P()), P(("x", "y")),
        lambda x, w1, w2: bnp.tile((x.reshape(4, 2, 6) * bnp.arange(4)[:, None, None]).sum(0) @ w1 @ w2, (4, 1)),
    ),
    "sums scattered over two axes": (
        lambda *a: lax.psum_scatter(mlp(*a), ("y", "x"), tiled=True),
        GRID, (P(), P(None, ("x", "y")), P(("x", "y"))), P(("y", "x")), mlp,
    ),
    "sums scattered over two axes, of which one is owed": (
        lambda *a: lax.psum_scatter(lax.pcast(mlp(*a), "x", to="unreduced") * 2.0, ("y", "x"), tiled=True),
        GRID, (P(), P(None, ("x", "y")), P(("x", "y"))), P(("y", "x")), lambda *a: 2.0 * mlp(*a),
    ),
    "all to all over two axes": (
        lambda x, w1, w2: lax.all_to_all(x @ w1, ("x", "y"), 1, 0, tiled=True) @ w2[:2],
        GRID, (P(("x", "y")), P(), P()), P(("x", "y")),
        lambda x, w1, w2: (x @ w1).reshape(8, 4, 2).transpose(1, 0, 2).reshape(32, 2) @ w2[:2],
    ),
    "a ring over two axes": (
        lambda x, w1, w2: lax.ppermute(x @ w1, ("x", "y"), RING) @ w2,
        GRID, (P(("x", "y")), P(), P()), P(("x", "y")), lambda x, w1, w2: bnp.roll(x @ w1, 2, 0) @ w2,
    ),
    "a message that some do not get": (
        lambda x, w1, w2: lax.ppermute(x @ w1, "x", [(0, 2), (3, 1)]) @ w2,
        MESH, (P("x"), P(), P()), P("x"),
        lambda x, w1, w2: bnp.concatenate([0 * x[:2], x[6:], x[:2], 0 * x[:2]]) @ w1 @ w2,
    ),
    "an axis of one rank": (
        lambda x, w1, w2: lax.psum(mlp(lax.all_gather(x, "one", tiled=True, to="reduced"), w1, w2), ("x", "one")),
        AbstractMesh((4, 1), ("x", "one")), (P("one"), P(None, "x"), P("x")), P(), mlp,
    ),
    "sums over no axis": (
        lambda *a: lax.psum(lax.pmax(lax.pcast(lax.psum(mlp(*a), "x"), (), to="varying"), ()), ()),
        MESH, SHARDED, P(), mlp,
    ),
    "stacked": (
        lambda x, w1, w2: lax.all_gather(x, "x", axis=1, to="invariant").sum(1) @ w1 @ w2,
        MESH, (P("x"), P(), P()), P(),
        lambda x, w1, w2: x.reshape(4, 2, 6).sum(0) @ w1 @ w2,
    ),
    "a place": (
        lambda x, w1, w2: x @ w1 @ w2 * lax.axis_index("x"),
        MESH, (P("x"), P(), P()), P("x"),
        lambda x, w1, w2: x @ w1 @ w2 * bnp.repeat(bnp.arange(4), 2)[:, None],
    ),
    "inside of jit and checkpoint": (
        lambda x, w1, w2: lax.psum(bf.checkpoint(bf.jit(mlp))(x, w1, w2), "x"), MESH, SHARDED, P(), mlp,
    ),
    "a collective inside of checkpoint": (
        lambda *a: bf.checkpoint(tensor_parallel)(*a), MESH, SHARDED, P(), mlp,
    ),
    "branches": (
        lambda x, w1, w2: lax.cond(lax.psum(x.sum(), "x") > 1e9, lambda: lax.psum(x @ w1, "x"),
                                   lambda: lax.psum(x * 1.0, "x") @ w1) @ w2,
        MESH, (P("x"), P(), P()), P(),
        lambda x, w1, w2: x.reshape(4, 2, 6).sum(0) @ w1 @ w2,
    ),
    "a varying branch": (
        lambda x, w1, w2: lax.cond(lax.axis_index("x") < 2, lambda: x @ w1, lambda: w1.sum() * (x @ w1)) @ w2,
        MESH, (P("x"), P(), P()), P("x"),
        lambda x, w1, w2: x @ w1 * bnp.where(bnp.arange(8) < 4, 1, w1.sum())[:, None] @ w2,
    ),
}  # fmt: skip


@pytest.fixture(params=CASES, scope="module")
def case(request):
    local, mesh, in_specs, out_specs, whole = CASES[request.param]
    return shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs), whole


def test_value(case):
    mapped, whole = case
    same(mapped(X, W1, W2), whole(X, W1, W2))


def test_value_under_jit(case):
    mapped, whole = case
    same(bf.jit(lambda *a: mapped(*a) * 2)(X, W1, W2), whole(X, W1, W2) * 2)


def test_gradient(case):
    mapped, whole = case
    want = bf.grad(loss_of(whole), (0, 1, 2))(X, W1, W2)
    same(bf.grad(loss_of(mapped), (0, 1, 2))(X, W1, W2), want)
    same(bf.jit(bf.grad(loss_of(mapped), (0, 1, 2)))(X, W1, W2), want)


def test_jvp(case):
    mapped, whole = case
    tangents = tuple(bnp.cos(a) for a in (X, W1, W2))
    same(bf.jvp(mapped, (X, W1, W2), tangents), bf.jvp(whole, (X, W1, W2), tangents))


def test_second_derivative(case):
    mapped, whole = case
    v = bnp.sin(bnp.asarray(W1))

    def along(f, which):
        g = bf.grad(lambda w1: loss_of(f)(X, w1, W2))
        if which == "forward":
            return bf.jvp(g, (W1,), (v,))[1]
        return bf.grad(lambda w1: (g(w1) * v).sum())(W1)

    want = along(whole, "forward")
    same(along(mapped, "forward"), want)
    same(along(mapped, "reverse"), want)


def test_vmap(case):
    mapped, whole = case
    xs = bnp.stack([X, 2 * X, X + 1])
    same(bf.vmap(mapped, (0, None, None))(xs, W1, W2), bf.vmap(whole, (0, None, None))(xs, W1, W2))
    gradients = [bf.vmap(bf.grad(loss_of(f), 1), (0, None, None))(xs, W1, W2) for f in (mapped, whole)]
    same(*gradients)


def test_ring():
    k = W2[:, :]
    mapped = shard_map(ring, mesh=MESH, in_specs=(P("x"), P("x")), out_specs=P("x"))
    same(mapped(X, k), whole_ring(X, k))
    same(bf.grad(loss_of(mapped), (0, 1))(X, k), bf.grad(loss_of(whole_ring), (0, 1))(X, k))


def test_gradient_inside():
    """Gradients of what all ranks share arrive summed, and the same everywhere."""

    def step(x, w1, w2):
        value, grads = bf.value_and_grad(lambda w1, w2: lax.pmean(bf.jit(mean_loss)(x, w1, w2), "x"), (0, 1))(
            w1, w2
        )
        return value, grads

    mapped = shard_map(step, mesh=MESH, in_specs=(P("x"), P(), P()), out_specs=P())
    want = bf.value_and_grad(lambda w1, w2: mean_loss(X, w1, w2), (0, 1))(W1, W2)
    same(mapped(X, W1, W2), want)
    same(bf.jit(mapped)(X, W1, W2), want)


def test_linear_transpose_inside():
    """The transpose in a replicated operand is a sum over ranks, as in derivatives."""

    def local(x, w):
        project = lambda w: lax.psum(x @ w, "x")
        return bf.linear_transpose(project, w)(project(w))[0]

    mapped = shard_map(local, mesh=MESH, in_specs=(P("x"), P()), out_specs=P())
    rows = X.reshape(4, 2, 6).sum(0)
    same(mapped(X, W1), rows.T @ (rows @ W1))
    abstract = lambda x: bf.linear_transpose(
        lambda w: lax.psum(x * w, "x"), bf.ShapeDtypeStruct((6,), "float32")
    )(x)
    with pytest.raises(
        errors.ArgumentError, match="the argument w is a ShapeDtypeStruct, which has no values"
    ):
        shard_map(abstract, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(X)


def test_gradient_inside_of_what_varies_is_of_each_rank():
    mapped = shard_map(
        lambda x: bf.grad(lambda x: (x**2).sum())(x), mesh=MESH, in_specs=P("x"), out_specs=P("x")
    )
    same(mapped(X), 2 * X)


def test_gradient_inside_of_a_loop_inside():
    """The body is traced with types: one sum after the loop, for all microbatches."""

    def step(xs, w1, w2):
        w1, w2 = lax.pcast((w1, w2), "x", to="reduced")

        def add(total, x):
            _, pullback = bf.vjp(lambda *w: mean_loss(x, *w) / 4, w1, w2)
            return tree.map(bnp.add, total, pullback(bnp.float32(1))), None

        zeros = tree.map(bnp.zeros_like, (w1, w2))
        total, _ = lax.scan(add, zeros, xs)
        return lax.psum(total, "x")

    mapped = shard_map(step, mesh=MESH, in_specs=(P(None, "x"), P(), P()), out_specs=P())
    xs = X.reshape(2, 4, 6)
    want = [sum(gs) for gs in zip(*(bf.grad(mean_loss, (1, 2))(x, W1, W2) for x in xs), strict=True)]
    assert str(bf.make_jaxpr(mapped)(xs, W1, W2)).count("psum_invariant") == 2
    same(mapped(xs, W1, W2), tuple(want))


def test_unreduced_carry():
    """A carry that starts as zeros takes the type of what the body adds."""

    def total(x, w):
        def add(carry, row):
            return carry + lax.pcast(row[:, None] * w, "x", to="unreduced"), None

        return lax.psum(lax.scan(add, bnp.zeros((6, 8), "float32"), x)[0], "x")

    mapped = shard_map(total, mesh=MESH, in_specs=(P("x"), P()), out_specs=P())
    text = str(bf.make_jaxpr(mapped)(X, W1))
    assert text.count("psum_invariant") == 1
    same(mapped(X, W1), X.sum(0)[:, None] * W1)
    same(
        bf.grad(loss_of(mapped), (0, 1))(X, W1),
        bf.grad(loss_of(lambda x, w: x.sum(0)[:, None] * w), (0, 1))(X, W1),
    )


def test_while_loop_that_stops_with_each_rank():
    def halve(x):
        return lax.while_loop(lambda v: v.max() > 1, lambda v: v / 2, x)

    values = bnp.asarray([1.5, 40.0, 0.5, 7.0])
    mapped = shard_map(halve, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    same(mapped(values), bnp.asarray([0.75, 0.625, 0.5, 0.875]))


def test_a_value_is_cast_once_and_summed_once():
    def local(x, w):
        return lax.psum((x * w + x / w).sum(), "x")

    mapped = shard_map(local, mesh=MESH, in_specs=(P("x"), P()), out_specs=P())
    w = np.float32(3)
    text = str(bf.make_jaxpr(bf.grad(mapped, 1))(X, w))
    assert text.count("psum_invariant") == 2  # one of the value, one of the gradient


def test_pytrees_and_prefixes():
    mapped = shard_map(
        lambda p, x: {"sum": lax.psum(x.sum() * p["a"], "x"), "parts": (x, x + p["b"])},
        mesh=MESH,
        in_specs=(P(), P("x")),
        out_specs={"sum": P(), "parts": P("x")},
    )
    same(
        mapped({"a": np.float32(2), "b": np.float32(1)}, X),
        {"sum": bnp.asarray(2 * X.sum()), "parts": (bnp.asarray(X), bnp.asarray(X + 1))},
    )


def test_closed_over_values_are_the_same_everywhere():
    def loss(w):
        mapped = shard_map(lambda x: lax.psum((x @ w).sum(), "x"), mesh=MESH, in_specs=P("x"), out_specs=P())
        return mapped(X)

    same(bf.grad(loss)(W1), bf.grad(lambda w: (X @ w).sum())(W1))


def test_vmap_inside_and_outside_with_names():
    def local(x):
        return bf.vmap(lambda row: lax.psum(lax.psum(row, "i"), "x"), axis_name="i")(x)

    mapped = shard_map(local, mesh=MESH, in_specs=P("x"), out_specs=P())
    same(mapped(X), bnp.broadcast_to(X.sum(0), (2, 6)))
    outer = shard_map(lambda x: lax.psum(x, "i"), mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    same(bf.vmap(outer, axis_name="i")(X[:, :4]), bnp.broadcast_to(X[:, :4].sum(0), (8, 4)))


def test_vmap_divided_over_the_mesh():
    mesh = AbstractMesh((2, 2), ("x", "y"))
    mapped = shard_map(
        lambda x, w: lax.psum(bnp.tanh(x @ w), "y"), mesh=mesh, in_specs=(P("y"), P("y")), out_specs=P()
    )

    def reference(x, w):
        return sum(bnp.tanh(x[3 * i : 3 * i + 3] @ w[3 * i : 3 * i + 3]) for i in range(2))

    divided = bf.vmap(mapped, (0, None), spmd_axis_name="x")
    assert "(x, y)" in str(bf.make_jaxpr(divided)(X, W1))
    same(divided(X, W1), bf.vmap(reference, (0, None))(X, W1))
    same(
        bf.grad(loss_of(divided), (0, 1))(X, W1),
        bf.grad(loss_of(bf.vmap(reference, (0, None))), (0, 1))(X, W1),
    )


def test_unchecked_results_are_taken_at_their_word():
    def local(x):
        return lax.all_gather(x, "x", tiled=True)

    with pytest.raises(errors.ShardingError, match="varies over 'x'"):
        shard_map(local, mesh=MESH, in_specs=P("x"), out_specs=P())(X)
    mapped = shard_map(local, mesh=MESH, in_specs=P("x"), out_specs=P(), check_vma=False)
    same(mapped(X), bnp.asarray(X))
    same(bf.grad(loss_of(mapped))(X), 2 * X)


def test_unused_results_and_arguments_go():
    mapped = shard_map(
        lambda x, w: (lax.psum(x, "x"), bnp.sin(w)), mesh=MESH, in_specs=(P("x"), P()), out_specs=P()
    )
    program = bf.jit(lambda x, w: mapped(x, w)[1]).lower(X, W1)
    assert "psum_invariant" not in str(program.jaxpr)
    same(bf.jit(lambda x, w: mapped(x, w)[1])(X, W1), bnp.sin(W1))


def test_the_current_mesh_and_the_decorator():
    @shard_map(mesh=MESH, in_specs=P("x"), out_specs=P())
    def total(x):
        return lax.psum(x.sum(), "x")

    same(total(X), bnp.asarray(X.sum()))
    with pytest.raises(errors.ArgumentError, match="has no mesh"):
        shard_map(lambda x: x, in_specs=P(), out_specs=P())(X)


# -- in programs for a mesh ------------------------------------------------------------------------


def test_a_gradient_is_partitioned_without_a_collective_more():
    """A mesh program contains the local program in place.

    Arguments that have the layouts of the specs are not moved.
    """
    loss = loss_of(shard_map(tensor_parallel, mesh=MESH, in_specs=SHARDED, out_specs=P()))
    jaxpr = bf.make_jaxpr(bf.grad(loss, (1, 2)))(X, W1, W2)
    local, out = localise(jaxpr, [NamedSharding(MESH, s) for s in SHARDED], MESH)
    assert [s.spec for s in out] == list(SHARDED[1:])
    meeting = [e.prim.name for e in local.eqns if getattr(e.prim, "communicates", False)]
    assert meeting == [
        "psum_invariant"
    ]  # of the forward pass; in the backward pass the cotangent is everywhere

    parts = zip(*(divide(a, MESH, s) for a, s in zip((X, W1, W2), SHARDED, strict=True)), strict=True)
    ranks = list(parts)
    outs = run_ranks(MESH, lambda r: [np.asarray(v) for v in eval_jaxpr(local, ranks[r])])
    got = tuple(
        assemble(bf.sharding.NamedSharding(MESH, s), w.shape, w.dtype, lambda r, i=i: outs[r][i])
        for i, (s, w) in enumerate(zip(SHARDED[1:], (W1, W2), strict=True))
    )
    same(got, bf.grad(loss_of(mlp), (1, 2))(X, W1, W2))


def test_arguments_are_moved_to_where_the_specs_want_them():
    mapped = shard_map(lambda x: lax.psum(x, "x"), mesh=MESH, in_specs=P("x"), out_specs=P())
    jaxpr = bf.make_jaxpr(lambda x: mapped(x * 2))(X)
    local, out = localise(jaxpr, [NamedSharding(MESH, P(None, None))], MESH)
    assert "shard_slice" in str(local)
    assert [s.spec for s in out] == [P()]


def test_a_program_for_another_mesh():
    mapped = shard_map(lambda x: x, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(errors.ShardingError, match="the program is for the mesh x=2, y=2"):
        localise(bf.make_jaxpr(mapped)(X), [NamedSharding(GRID, P("x"))], GRID)


def test_what_is_broadcast_is_summed_on_each_rank_before_it_is_exchanged():
    bias = bnp.arange(6, dtype=np.float32)
    f = shard_map(
        lambda b, x: lax.psum(loss_of(lambda b: x + b)(b), "x"),
        mesh=MESH,
        in_specs=(P(), P("x")),
        out_specs=P(),
    )
    same(bf.grad(f)(bias, X), bf.grad(lambda b: ((X + b) ** 2).sum())(bias))
    sums = exchanged(bf.grad(f), bias, X)["psum_invariant"]
    assert sums[1] <= 4 * (bias.size + 1)  # and perhaps the value


def test_axis_names():
    f = lambda x: lax.psum(x, "x")
    options = {"mesh": GRID, "in_specs": P("x"), "out_specs": P()}
    for names in ((), {"x", "y"}, ["y", "x"]):
        assert shard_map(f, axis_names=names, **options)(np.arange(4.0, dtype="float32")).tolist() == [
            2.0,
            4.0,
        ]
    for names in (3, 0, [3], [["x"]]):
        with pytest.raises(errors.ArgumentError, match="axis_names are names of mesh axes, not"):
            shard_map(f, axis_names=names, **options)(np.arange(4.0, dtype="float32"))
