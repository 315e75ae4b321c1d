"""Sharded attention with masks, windows and score functions, against one device."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import P, errors, nn
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.recipes import context_parallel_attention, unzigzag, zigzag
from tests.parallel.exchanged import equations, exchanged, same, same_with_gradients, weighted

B, T, N, H = 2, 16, 4, 8
ROUTINGS = "all_gather", "ring", "all_to_all"
ORDERS = "contiguous", "zigzag"
IDS = bnp.asarray(np.repeat([[0, 1, 2, 2], [0, 0, 0, 1]], T // 4, axis=1))
SLOPES = nn.score_mods.alibi_slopes(N)


def by_entry_and_head(b, h, q, k):
    return (q >= k) | ((b + h) % 2 == 0) & (k < 7)


def odd_queries_see_nothing(b, h, q, k):
    return (q % 2 == 0) & (q >= k)


FORMS = {
    "documents": {"mask_mod": nn.masks.document(IDS)},
    "causal documents": {"mask_mod": nn.masks.document(IDS), "is_causal": True},
    "a prefix": {"mask_mod": nn.masks.prefix_lm(5)},
    "entries and heads": {"mask_mod": by_entry_and_head},
    "rows without keys": {"mask_mod": odd_queries_see_nothing},
    "a window": {"local_window_size": (3, 2)},
    "a causal window": {"local_window_size": (3, 0)},
    "lengths": {"key_value_seq_lengths": bnp.asarray([5, 16]), "query_seq_lengths": bnp.asarray([16, 9])},
    "causal, soft cap": {"is_causal": True, "score_mod": nn.score_mods.soft_cap(2.0)},
    "alibi": {"score_mod": nn.score_mods.alibi(SLOPES)},
    "documents, scores": {"mask_mod": nn.masks.document(IDS), "score_mod": nn.score_mods.alibi(SLOPES)},
    "causal": {"is_causal": True},
}


def operands(K=2):
    rng = np.random.default_rng(0)
    return [bnp.asarray(rng.standard_normal((B, T, heads, H)), np.float32) for heads in (N, K, K)]


def divided(n, routing, order, wrapped=lambda f: f, **form):
    """Attention of whole sequences, by ``n`` ranks."""
    mapped = bf.shard_map(
        wrapped(lambda *qkv: context_parallel_attention(*qkv, "seq", routing=routing, order=order, **form)),
        mesh=AbstractMesh((n,), ("seq",)),
        in_specs=P(None, "seq"),
        out_specs=P(None, "seq"),
    )
    if order == "contiguous":
        return mapped
    return lambda *qkv: unzigzag(mapped(*(zigzag(x, n) for x in qkv)), n)


def whole(**form):
    return lambda *qkv: nn.dot_product_attention(*qkv, **form)


@pytest.mark.second
@pytest.mark.sampled(12)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form, routing, order, n):
    K = 4 if routing == "all_to_all" else 2
    form = FORMS[form]
    same_with_gradients(divided(n, routing, order, **form), whole(**form), operands(K), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_learnt_scores(routing, order):
    """The gradient of a table that the score function reads, from all blocks."""
    table = bnp.asarray(np.random.default_rng(1).standard_normal((N, 2 * T + 1)), np.float32)
    args = [*operands(4), table]

    def form(table):
        return {"is_causal": True, "score_mod": nn.score_mods.relative_bias(table)}

    def local(q, k, v, table):
        return context_parallel_attention(q, k, v, "seq", routing=routing, order=order, **form(table))

    rows = P(None, "seq")
    mapped = bf.shard_map(
        local, mesh=AbstractMesh((2,), ("seq",)), in_specs=(rows, rows, rows, P()), out_specs=rows
    )

    def got(q, k, v, table):
        if order == "contiguous":
            return mapped(q, k, v, table)
        return unzigzag(mapped(*(zigzag(x, 2) for x in (q, k, v)), table), 2)

    same_with_gradients(got, lambda q, k, v, t: whole(**form(t))(q, k, v), args, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("outer", ["forward", "reverse"])
@pytest.mark.parametrize("form", ["causal documents", "rows without keys", "causal, soft cap"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_second_derivatives(routing, form, outer):
    form = FORMS[form]
    args = operands(4)
    v = [bnp.cos(x) for x in args]

    def along(f):
        g = bf.grad(weighted(f), (0, 1, 2))
        if outer == "forward":
            return bf.jvp(g, args, v)[1]
        return bf.grad(lambda *a: sum((x * y).sum() for x, y in zip(g(*a), v, strict=True)), (0, 1, 2))(*args)

    same(along(divided(2, routing, "zigzag", **form)), along(whole(**form)), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("wrapped", [bf.checkpoint, bf.jit, bf.vmap])
def test_under_transforms(routing, wrapped):
    form = FORMS["causal documents"]
    if wrapped is bf.vmap:
        args = [bnp.stack([x, 0.5 * x]) for x in operands(4)]
        return same_with_gradients(
            bf.vmap(divided(2, routing, "zigzag", **form)), bf.vmap(whole(**form)), args, rtol=1e-4
        )
    got = divided(2, routing, "zigzag", wrapped, **form)
    return same_with_gradients(got, whole(**form), operands(4), rtol=1e-4)


@pytest.mark.parametrize("before, hops", [(0, 0), (1, 1), (4, 1), (5, 2), (64, 3)])
def test_a_ring_ends_where_the_window_ends(before, hops):
    n, args = 4, operands()
    form = {"local_window_size": (before, 0)}
    f = divided(n, "ring", "contiguous", **form)
    sent = 2 * 2 * B * (T // n) * H * 4  # keys and values of two heads
    assert exchanged(f, *args) == ({"ppermute": (hops, hops * sent)} if hops else {})
    home = (
        {"ppermute": (3 * hops, 3 * hops * sent)} if hops else {}
    )  # keys and values again, and their cotangents
    assert exchanged(bf.value_and_grad(weighted(f), (0, 1, 2)), *args) == home
    same_with_gradients(f, whole(**form), args, rtol=1e-4)


@pytest.mark.parametrize("order", ORDERS)
def test_only_tiles_decide_masks(order):
    """The positions of chunks are values of the entry, so bounds over tiles are known."""
    f = divided(2, "ring", order, is_causal=True, local_window_size=(3, 0))
    calls = [e for e, _ in equations(bf.jit(f).lower(*operands()).jaxpr) if e.prim.name == "attention"]
    assert len(calls) == 2 and all(e.params["mods"].bounds is not None for e in calls)


def test_errors():
    q, k, v = operands()
    with pytest.raises(errors.ArgumentError, match="order is one of contiguous, zigzag, not 'striped'"):
        divided(2, "ring", "striped")(q, k, v)
    with pytest.raises(errors.DtypeError, match="mask_mod returns"):
        divided(2, "ring", "contiguous", mask_mod=lambda b, h, q, k: q - k)(q, k, v)
    for size in (2.5, (None, 0), (1, 0, 2)):
        with pytest.raises(errors.ArgumentError, match="local_window_size is an integer or two"):
            divided(2, "ring", "contiguous", local_window_size=size)(q, k, v)
