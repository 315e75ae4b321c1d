"""Attention over sharded sequences, against one device; cost of the routings."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import P, errors, lax, nn
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.recipes import (
    context_parallel_attention,
    unzigzag,
    zigzag,
    zigzag_order,
    zigzag_positions,
)
from tests.parallel.exchanged import equations, exchanged, same, same_with_gradients, weighted

B, T, N, H = 2, 16, 4, 8
ROUTINGS = "all_gather", "ring", "all_to_all"


def operands(K=N, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [bnp.asarray(rng.standard_normal((B, T, heads, H)), dtype) for heads in (N, K, K)]


def divided(n, routing, is_causal, wrapped=lambda f: f):
    """Attention of whole sequences, by ``n`` ranks."""

    def local(*qkv):
        return context_parallel_attention(*qkv, "seq", routing=routing, is_causal=is_causal)

    mapped = bf.shard_map(
        wrapped(local),
        mesh=AbstractMesh((n,), ("seq",)),
        in_specs=P(None, "seq"),
        out_specs=P(None, "seq"),
    )
    if not is_causal:
        return mapped
    return lambda *qkv: unzigzag(mapped(*(zigzag(x, n) for x in qkv)), n)


def whole(is_causal):
    return lambda *qkv: nn.dot_product_attention(*qkv, is_causal=is_causal)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n, K", [(1, 4), (2, 4), (4, 4), (2, 2), (8, 4), (4, 1)])
def test_values_and_gradients(routing, is_causal, n, K):
    if routing == "all_to_all" and K % n:
        with pytest.raises(errors.ShapeError, match="cannot share the heads"):
            divided(n, routing, is_causal)(*operands(K))
        return
    same_with_gradients(divided(n, routing, is_causal), whole(is_causal), operands(K))


def forward(f, args, directions):
    return bf.jvp(f, args, directions)


def forward_over_reverse(f, args, directions):
    return bf.jvp(bf.grad(weighted_squares(f), (0, 1, 2)), args, directions)[1]


def reverse_over_forward(f, args, directions):
    return bf.grad(lambda *xs: bf.jvp(weighted_squares(f), xs, directions)[1], (0, 1, 2))(*args)


def reverse_over_reverse(f, args, directions):
    def along(*xs):
        grads = bf.grad(weighted_squares(f), (0, 1, 2))(*xs)
        return sum((g * d).sum() for g, d in zip(grads, directions, strict=True))

    return bf.grad(along, (0, 1, 2))(*args)


def weighted_squares(f):
    return weighted(lambda *args: f(*args) ** 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "derivative", [forward, forward_over_reverse, reverse_over_forward, reverse_over_reverse]
)
def test_forward_mode_and_second_derivatives(routing, is_causal, derivative):
    args = tuple(operands(2))
    directions = tuple(bnp.cos(3 * x) for x in args)
    got, want = (derivative(f, args, directions) for f in (divided(2, routing, is_causal), whole(is_causal)))
    same(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("wrapped", [bf.checkpoint, bf.jit])
def test_under_checkpoint_and_jit(routing, wrapped):
    args, got, want = operands(), divided(2, routing, True, wrapped), whole(True)
    same_with_gradients(got, want, args)
    same(bf.jit(bf.grad(weighted(got)))(*args), bf.grad(weighted(want))(*args))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_under_vmap(routing):
    args = [bnp.stack([x, 0.5 * x]) for x in operands()]
    same_with_gradients(bf.vmap(divided(2, routing, True)), bf.vmap(whole(True)), args)


@pytest.mark.slow
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("outer", ["forward", "reverse"])
def test_second_derivatives(routing, is_causal, outer):
    """Rows span blocks, so derivatives for whole rows do not apply."""
    args = operands()
    v = [bnp.cos(x) for x in args]

    def along(f):
        g = bf.grad(weighted(f), (0, 1, 2))
        if outer == "forward":
            return bf.jvp(g, args, v)[1]
        return bf.grad(lambda *a: sum((x * y).sum() for x, y in zip(g(*a), v, strict=True)), (0, 1, 2))(*args)

    same(along(divided(4, routing, is_causal)), along(whole(is_causal)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_half_precision_is_summed_in_float32(routing):
    """Large log-sum-exps: rounded to eight bits, they would give wrong weights."""
    q, k, v = operands(dtype=bf.dtypes.bfloat16)
    low = q.at[..., 0].set(16), k.at[..., 0].set(16), v
    want = whole(True)(*(x.astype("float32") for x in low))
    got = divided(4, routing, True)(*low)
    assert got.dtype == bf.dtypes.bfloat16
    same(got.astype("float32"), want, rtol=0.02, atol=0.02)
    gradients = [bf.grad(weighted(f), (0, 1, 2))(*low) for f in (divided(4, routing, True), whole(True))]
    same(*gradients, rtol=0.02, atol=0.1)


def counted(n, K=N):
    """Counts and bytes of the collectives of a pass, forward and backward."""
    block = B * (T // n) * H * 4  # of one head
    return {
        "all_gather": (
            {"all_gather": (1, 2 * K * block)},
            {"all_gather": (1, 2 * K * block), "psum_scatter": (1, 2 * K * block * n)},
        ),
        # keys and values go n - 1 times; backwards they do again, and their cotangents as often
        "ring": (
            {"ppermute": (n - 1, (n - 1) * 2 * K * block)},
            {"ppermute": (2 * (n - 1), 2 * (n - 1) * 2 * K * block)},
        ),
        # one all-to-all for query, key and value, one for the result; backward the same
        "all_to_all": (
            {"all_to_all": (2, (2 * N + 2 * K) * block)},
            {"all_to_all": (2, (2 * N + 2 * K) * block)},
        ),
    }


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("n", [2, 4])
def test_collectives(routing, n):
    args, f = operands(), divided(n, routing, True)
    forward, backward = counted(n)[routing]
    assert exchanged(f, *args) == forward
    both = {
        name: tuple(a + b for a, b in zip(forward.get(name, (0, 0)), backward.get(name, (0, 0)), strict=True))
        for name in forward | backward
    }
    assert exchanged(bf.value_and_grad(weighted(f), (0, 1, 2)), *args) == both


@pytest.mark.parametrize("routing", ["all_gather", "ring"])
def test_causal_work_is_the_same_on_all_ranks_and_half_of_all(routing):
    """The program has no branches, so each rank computes all of it."""
    n, t = 4, T // 4
    jaxpr = bf.jit(divided(n, routing, True)).lower(*operands()).jaxpr
    calls = [e for e, _ in equations(jaxpr) if e.prim.name == "attention"]
    assert not [e for e, _ in equations(jaxpr) if e.prim.name == "cond"]
    assert [e.params["is_causal"] for e in calls] == [True] + [False] * (n - 1)
    scores = [
        e.invars[0].aval.shape[0] // B * e.invars[0].aval.shape[1] * e.invars[1].aval.shape[1] for e in calls
    ]
    assert scores == [t * t] + [t * t // 2] * (n - 1)


@pytest.mark.parametrize("routing", ["all_gather", "ring"])
@pytest.mark.parametrize("n", [2, 4])
def test_nothing_of_other_ranks_is_kept_for_the_backward_pass(routing, n):
    """Residuals: the operands, the result, and this rank's log-sum-exps."""
    jaxpr = bf.make_jaxpr(bf.grad(weighted(divided(n, routing, True)), (0, 1, 2)))(*operands())
    forward, backward = (e for e in jaxpr.eqns if e.prim.name == "shard_map")
    kept = [v for v in forward.outvars if v in backward.invars]
    assert sorted(v.aval.size for v in kept) == [B * N * T, B * T * N * H]


def test_positions_are_those_of_the_zigzag_order():
    order = zigzag_order(16, 4)
    np.testing.assert_array_equal(order.reshape(4, 4)[[0, 3]], [[0, 1, 14, 15], [6, 7, 8, 9]])
    here = bf.shard_map(
        lambda x: zigzag_positions(x.shape[0], "seq"),
        mesh=AbstractMesh((4,), ("seq",)), in_specs=P("seq"), out_specs=P("seq"),
    )  # fmt: skip
    np.testing.assert_array_equal(here(np.zeros(16)), order)
    x = np.arange(32).reshape(2, 16)
    np.testing.assert_array_equal(unzigzag(zigzag(x, 4), 4), x)


@pytest.mark.slow
def test_the_gpt_with_a_divided_sequence():
    """The example's model in zigzag order: mean loss, and gradients in shard_map."""
    from examples.gpt import model

    n, config = 4, model.Config(layers=2, heads=4, width=16, context=16, vocab=11)
    params = model.init(bf.random.key(0), config)
    tokens = np.random.default_rng(1).integers(0, 11, (2, 17)).astype(np.int32)

    def attention(params, x):
        B, T, C = x.shape
        qkv = model.linear(params["qkv"], x).reshape(B, T, 3, 4, C // 4)
        out = context_parallel_attention(*(qkv[:, :, i] for i in range(3)), "seq", is_causal=True)
        return model.linear(params["out"], out.reshape(B, T, C))

    def loss(params, inputs, targets):
        x = params["tokens"][inputs] + params["positions"][zigzag_positions(inputs.shape[1], "seq")]
        for block in params["blocks"]:
            x = x + attention(block["attention"], model.norm(block["norm1"], x))
            x = x + model.mlp(block["mlp"], model.norm(block["norm2"], x))
        logits = model.norm(params["norm"], x) @ params["tokens"].T
        return lax.pmean(nn.softmax_cross_entropy_with_integer_labels(logits, targets).mean(), "seq")

    step = bf.shard_map(
        lambda *a: bf.value_and_grad(loss)(*a),
        mesh=AbstractMesh((n,), ("seq",)), in_specs=(P(), P(None, "seq"), P(None, "seq")), out_specs=P(),
    )  # fmt: skip
    got = step(params, zigzag(tokens[:, :-1], n), zigzag(tokens[:, 1:], n))
    same(got, bf.value_and_grad(lambda p: model.loss(p, tokens, config))(params))


def test_errors():
    q, k, v = operands()
    with pytest.raises(errors.ArgumentError, match="routing is one of all_gather, ring, all_to_all"):
        divided(2, "star", False)(q, k, v)
    with pytest.raises(errors.ShapeError, match="cannot be split into two chunks"):
        divided(16, "ring", True)(q, k, v)
    with pytest.raises(errors.ValueRangeError, match="zigzag order for 0 ranks"):
        zigzag(q, 0)
    with pytest.raises(errors.ValueRangeError, match="axis 4 is out of range"):
        unzigzag(q, 2, axis=4)
    odd = bf.shard_map(
        lambda *a: context_parallel_attention(*a, "seq", is_causal=True),
        mesh=AbstractMesh((16,), ("seq",)), in_specs=P(None, "seq"), out_specs=P(None, "seq"),
    )  # fmt: skip
    with pytest.raises(errors.ShapeError, match="a rank has two chunks of each sequence"):
        odd(q, k, v)
    with pytest.raises(errors.DtypeError, match="one floating dtype"):
        divided(2, "ring", False)(q, k, v.astype("bfloat16"))
    with pytest.raises(errors.ShapeError, match="as many keys as queries"):
        divided(2, "ring", False)(q, k[:, :8], v[:, :8])
    with pytest.raises(errors.AxisNameError, match="axis of a vmap"):
        bf.vmap(lambda *a: context_parallel_attention(*a, "i"), axis_name="i")(q[None], k[None], v[None])
    with pytest.raises(errors.AxisNameError, match="axis of a vmap"):  # which hides one of the mesh
        bf.shard_map(
            lambda *a: bf.vmap(lambda *a: context_parallel_attention(*a, "seq"), axis_name="seq")(*a),
            mesh=AbstractMesh((2,), ("seq",)), in_specs=P(), out_specs=P(),
        )(q[None], k[None], v[None])  # fmt: skip


@pytest.mark.parametrize("routing", ROUTINGS)
def test_with_data_and_tensor_parallelism_on_a_mesh_of_three_axes(routing):
    """Examples, tokens and heads over one axis each; all ranks hold all weights."""
    rng = np.random.default_rng(2)
    x, qkv, out = (
        0.3 * rng.standard_normal(s).astype(np.float32)
        for s in ((4, T, N * H), (N * H, 3, N, H), (N, H, N * H))
    )

    def layer(x, qkv, out, attend):
        q, k, v = (bnp.einsum("btc,cnh->btnh", x, qkv[:, i]) for i in range(3))
        return bnp.einsum("btnh,nhc->btc", attend(q, k, v), out)

    def local(x, qkv, out):
        def attend(*heads):
            return context_parallel_attention(*heads, "seq", routing=routing, is_causal=True)

        return lax.psum(layer(x, qkv, out, attend), "model")

    spec = P("data", "seq")
    mapped = bf.shard_map(
        local, mesh=AbstractMesh((2, 2, 2), ("data", "seq", "model")),
        in_specs=(spec, P(None, None, "model"), P("model")), out_specs=spec,
    )  # fmt: skip
    same_with_gradients(
        lambda x, qkv, out: unzigzag(mapped(zigzag(x, 2), qkv, out), 2),
        lambda x, qkv, out: layer(x, qkv, out, whole(True)),
        (x, qkv, out),
        rtol=1e-4,
    )
