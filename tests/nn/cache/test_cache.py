"""Key-value caches against attention to the whole history."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, nn
from blufunc.nn import cache as caches

B, S, K, G, H = 3, 16, 2, 2, 8
RNG = np.random.default_rng(0)
TABLES = RNG.permutation(3 * 4).reshape(3, 4)
MAKERS = {
    "contiguous": lambda: caches.contiguous(B, S, K, H),
    "paged": lambda: caches.paged(TABLES, 12, 4, K, H),
    "ring": lambda: caches.ring(B, 9, K, H),
}
WINDOW = {"contiguous": None, "paged": None, "ring": 6}

CHUNKS = {  # the lengths of each entry, chunk by chunk; equal ones are one position for all
    "one at a time": [(1, 1, 1)] * 14,
    "a prompt": [(4, 4, 4), *[(1, 1, 1)] * 9],
    "prompts of different lengths": [(4, 1, 2), *[(1, 1, 1)] * 11],
    "chunks": [(3, 4, 2), (4, 4, 1), (0, 2, 4), (1, 0, 1), (4, 3, 2)],
    "some have ended": [(2, 2, 2), (1, 0, 1), (1, 0, 0), (1, 1, 1)],
}


def full_attention(queries, keys, values, position, window):
    """Of one sequence: [T, N, H], [n, K, H] and the position of the first query."""
    scores = np.einsum("tkgh,skh->tkgs", queries.reshape(-1, K, G, H), keys) / np.sqrt(H)
    own, all_ = position + np.arange(len(queries))[:, None], np.arange(len(keys))
    seen = (all_ <= own) & (all_ > own - (window or 1000))
    scores = np.where(seen[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("tkgs,skh->tkgh", weights / weights.sum(-1, keepdims=True), values)
    return out.reshape(len(queries), K * G, H)


@bf.jit(static_argnames="window")
def step(cache, q, k, v, position, lengths, window):
    cache = caches.update(cache, k, v, position, lengths=lengths)
    return caches.attention(q, cache, position, lengths=lengths, window=window), cache


@pytest.mark.parametrize("each", [False, True], ids=["one position", "each position"])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("layout", MAKERS)
def test_as_attention_to_the_history(layout, chunks, each):
    ragged = any(len(set(n)) > 1 for n in CHUNKS[chunks])
    if ragged and not each:
        pytest.skip("positions differ")
    cache = MAKERS[layout]()
    history = [[np.zeros((0, K, H))] * 2 for _ in range(B)]
    for lengths in CHUNKS[chunks]:
        T = max(lengths)
        q, k, v = (RNG.normal(size=(B, T, n, H)).astype(np.float32) for n in (K * G, K, K))
        starts = np.array([len(h[0]) for h in history])
        position = starts if each else int(starts[0])
        out, cache = step(
            cache, q, k, v, bnp.asarray(position), np.array(lengths) if each else None, WINDOW[layout]
        )
        for b, n in enumerate(lengths):
            history[b] = [np.concatenate([h, x[b, :n]]) for h, x in zip(history[b], (k, v), strict=True)]
            want = full_attention(q[b, :n], *history[b], starts[b], WINDOW[layout])
            np.testing.assert_allclose(np.asarray(out)[b, :n], want, rtol=1e-4, atol=1e-5)
    shapes = lambda c: [(x.shape, x.dtype) for x in c]
    assert shapes(cache) == shapes(MAKERS[layout]())


def test_a_ring_of_its_window():
    """One query at a time sees all slots: without a window, and far beyond the size."""
    cache, keys = caches.ring(1, 4, 1, H), RNG.normal(size=(11, 1, H)).astype(np.float32)
    for p, k in enumerate(keys):
        cache = caches.update(cache, k[None, None], -k[None, None], p)
        out = caches.attention(k[None, None], cache, p)
        nearest = keys[max(p - 3, 0) : p + 1]
        weights = np.exp(nearest[:, 0] @ k[0] / np.sqrt(H))
        want = -(weights @ nearest[:, 0]) / weights.sum()
        np.testing.assert_allclose(np.asarray(out)[0, 0, 0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [None, (13, 2, 7)])
def test_a_ring_keeps_the_end_of_a_prompt(lengths):
    k = RNG.normal(size=(B, 13, K, H)).astype(np.float32)
    cache = caches.update(
        caches.ring(B, 4, K, H), k, -k, 0, lengths=None if lengths is None else np.array(lengths)
    )
    for b in range(B):
        n = 13 if lengths is None else lengths[b]
        for p in range(max(n - 4, 0), n):
            np.testing.assert_array_equal(np.asarray(cache.keys)[b, p % 4], k[b, p])
            np.testing.assert_array_equal(np.asarray(cache.values)[b, p % 4], -k[b, p])
    assert not np.asarray(cache.keys)[1, 2:].any() or lengths is None


def test_a_prompt_at_0_reads_its_own_positions_only():
    q, k = (bnp.asarray(RNG.normal(size=(B, 5, n, H)), dtype="float32") for n in (K * G, K))
    full = caches.contiguous(B, S, K, H)._replace(keys=bnp.full((B, S, K, H), bnp.nan))
    cache = caches.update(full, k, k, 0)
    got = caches.attention(q, cache, 0)
    np.testing.assert_allclose(got, nn.dot_product_attention(q, k, k, is_causal=True), rtol=1e-5, atol=1e-6)


def test_no_page_is_no_write():
    cache = caches.paged([[1, -1], [0, 2]], 4, 2, K, H)
    k = bnp.ones((2, 4, K, H))
    keys = np.asarray(caches.update(cache, k, k, np.array([0, 2])).keys)
    assert keys[1].all() and keys[2].all() and not keys[0].any() and not keys[3].any()


@pytest.mark.parametrize("layout", MAKERS)
def test_negative_positions_are_not_written(layout):
    """They do not count from the end; of one position for all entries, they are 0."""
    cache, k = MAKERS[layout](), bnp.ones((B, 3, K, H))
    starts = np.array([-1, -3, 2], np.int32)
    for lengths in (None, np.array([3, 3, 3])):
        got = caches.view(caches.update(cache, k, k, starts, lengths=lengths))[0]
        for row, start in zip(np.asarray(got)[..., 0, 0], starts, strict=True):
            np.testing.assert_array_equal(np.flatnonzero(row), [p for p in range(start, start + 3) if p >= 0])
    one = np.asarray(caches.view(bf.jit(caches.update)(cache, k[:, :1], k[:, :1], np.int32(-2)))[0])[
        ..., 0, 0
    ]
    written = [] if layout == "paged" else [0]
    assert all(np.flatnonzero(row).tolist() == written for row in one)


def test_vmap_and_other_dtypes():
    cache = caches.contiguous(B, S, K, H, "bfloat16")
    k = bnp.asarray(RNG.normal(size=(B, 2, K, H)), dtype="float32")
    want = caches.update(cache, k, k, np.array([1, 2, 3]))
    one = lambda c, k, p: caches.update(bf.tree.map(lambda x: x[None], c), k[None], k[None], p)
    got = bf.vmap(one)(cache, k, np.array([1, 2, 3]))
    assert want.keys.dtype == bnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(got.keys[:, 0].astype("float32")), np.asarray(want.keys.astype("float32"))
    )


@pytest.mark.parametrize("layout", MAKERS)
def test_masks_have_bounds(layout):
    """Kernels skip tiles of keys; a chunk in a ring is where there is no bound."""
    from blufunc.nn.attention.mods import traced

    for position in (np.int32(3), np.array([3, 4, 5], np.int32)):
        mods, _ = traced(caches.mask_mod(MAKERS[layout](), position), None, np.dtype("float32"))
        assert mods.bounds is not None
    mods, _ = traced(
        caches.mask_mod(MAKERS["contiguous"](), position, 4, window=5), None, np.dtype("float32")
    )
    assert mods.bounds is not None


ERRORS = {
    "too long": (lambda k: caches.update(caches.contiguous(B, 4, K, H), k, k, 0), errors.ShapeError, "5 positions"),
    "beyond the end": (lambda k: caches.update(MAKERS["contiguous"](), k, k, 12), errors.ShapeError, "from 12 on"),
    "a negative position": (lambda k: caches.update(MAKERS["ring"](), k, k, -1), errors.ValueRangeError, "position -1"),
    "a negative integer": (
        lambda k: caches.update(MAKERS["contiguous"](), k, k, np.int64(-1)), errors.ValueRangeError, "position -1",
    ),
    "an integer too large": (
        lambda k: caches.update(MAKERS["contiguous"](), k, k, np.int32(12)), errors.ShapeError, "from 12 on",
    ),
    "another head": (lambda k: caches.update(caches.ring(B, S, K, 4), k, k, 0), errors.ShapeError, "features"),
    "no time": (lambda k: caches.update(caches.ring(B, S, K, 4), k[:, 0], k[:, 0], 0), errors.ShapeError, "for one"),
    "no cache": (lambda k: caches.update((k, k), k, k, 0), errors.ArgumentError, "tuple is no cache"),
    "positions": (lambda k: caches.update(MAKERS["ring"](), k, k, np.zeros(2, int)), errors.ArgumentError, "position"),
    "floats": (lambda k: caches.update(MAKERS["ring"](), k, k, 0.5), errors.ArgumentError, "astype"),
    "a window of 0": (lambda k: caches.attention(k, MAKERS["paged"](), 0, window=0), errors.ValueRangeError, "itself"),
    "a ring without room": (
        lambda k: caches.attention(k, MAKERS["ring"](), 0, window=6), errors.ValueRangeError, "10 positions",
    ),
    "an empty cache": (lambda k: caches.ring(B, 0, K, H), errors.ValueRangeError, "from 1 on"),
    "tables of rank 1": (lambda k: caches.paged([0, 1], 2, 2, K, H), errors.ShapeError, "tables"),
    "tables of floats": (lambda k: caches.paged([[0.5]], 2, 2, K, H), errors.DtypeError, "integers"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    f, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message) as caught:
        f(bnp.ones((B, 5, K, H)))
    assert "test_cache.py" in caught.value.where
