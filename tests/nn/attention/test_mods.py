"""``mask_mod`` and ``score_mod`` against dense arrays, under each transform."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, nn
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.nn.attention.mods import traced

RNG = np.random.default_rng(0)
B, T, N, H = 2, 7, 4, 3
IDS = np.array([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]], np.int32)
SLOPES = np.array([0.5, 0.25, 0.1, -0.2])
TABLE = RNG.normal(size=(N, 5))
PREFIX = np.array([2, 5], np.int32)


def wide(x):
    return bnp.asarray(x, dtype="float64")


def operands(K=N, S=T, dtype="float64"):
    return [bnp.asarray(RNG.normal(size=(B, n, h, H)), dtype=dtype) for n, h in ((T, N), (S, K), (S, K))]


# name: options, and their dense form: visible pairs, and a function of scores [B, N, T, S]
b, h, q, k = np.ogrid[:B, :N, :T, :T]
MASKS = {
    "causal": (nn.masks.causal, q >= k),
    "window": (nn.masks.sliding_window(3), (q >= k) & (q - k < 3)),
    "prefix": (nn.masks.prefix_lm(3), (q >= k) | (k < 3)),
    "prefixes": (nn.masks.prefix_lm(PREFIX), (q >= k) | (k < PREFIX[b])),
    "documents": (nn.masks.document(IDS), IDS[b, q] == IDS[b, k]),
    "document": (nn.masks.document(IDS[1]), IDS[1][q] == IDS[1][k]),
    "heads": (lambda b, h, q, k: (h % 2 == 0) | (k <= q), (h % 2 == 0) | (k <= q)),
    "some see nothing": (lambda b, h, q, k: (q != 3) & (q + k + h != 5), (q != 3) & (q + k + h != 5)),
}
SCORES = {
    "alibi": (lambda: nn.score_mods.alibi(wide(SLOPES)), lambda s: s - wide(SLOPES[h] * abs(q - k))),
    "soft cap": (lambda: nn.score_mods.soft_cap(0.7), lambda s: 0.7 * bnp.tanh(s / 0.7)),
    "relative": (
        lambda: nn.score_mods.relative_bias(wide(TABLE)), lambda s: s + wide(TABLE[h, np.clip(k - q, -2, 2) + 2]),
    ),
    "of its own": (
        lambda: lambda s, b, h, q, k: bnp.where(k == 0, 2 * s, s * s + b),
        lambda s: bnp.where(k == 0, 2 * s, s * s + b),
    ),
    "minus infinity": (
        lambda: lambda s, b, h, q, k: bnp.where(q - k < 2, s, -bnp.inf), lambda s: bnp.where(q - k < 2, s, -bnp.inf),
    ),
}  # fmt: skip


def plain(query, key, value, seen=None, change=None, scale=H**-0.5):
    """The definition, on whole arrays; weights of fully masked rows are 0."""
    key, value = (bnp.repeat(x, N // x.shape[2], axis=2) for x in (key, value))
    scores = bnp.einsum("bthd,bshd->bhts", query, key) * scale
    scores = scores if change is None else change(scores)
    if seen is not None:
        scores = bnp.where(seen, scores, -bnp.inf)
    weights = bnp.where(scores > -bnp.inf, bnp.exp(bnp.where(scores > -bnp.inf, scores, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    return bnp.einsum("bhts,bshd->bthd", weights / bnp.where(total > 0, total, 1), value)


def agrees(ours, theirs, x, atol=1e-12):
    c = bnp.asarray(RNG.normal(size=(B, T, N, H)), dtype="float64")
    np.testing.assert_allclose(ours(*x), theirs(*x), atol=atol)
    places = tuple(range(len(x)))
    got, want = (bf.grad(lambda *x, f=f: (f(*x) * c).sum(), places)(*x) for f in (ours, theirs))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=10 * atol)
    got = bf.jit(bf.grad(lambda *x: (ours(*x) * c).sum(), places))(*x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=10 * atol)


@pytest.mark.parametrize("K", [4, 2])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, K):
    mask_mod, seen = MASKS[name]
    ours = lambda *x: nn.dot_product_attention(*x, mask_mod=mask_mod)
    agrees(ours, lambda *x: plain(*x, seen=seen), operands(K))


@pytest.mark.parametrize("K", [4, 1])
@pytest.mark.parametrize("name", SCORES)
def test_scores(name, K):
    make, change = SCORES[name]
    ours = lambda *x: nn.dot_product_attention(*x, score_mod=make())
    agrees(ours, lambda *x: plain(*x, change=change), operands(K))


def test_all_at_once():
    """With a bias, a mask, a causal mask, and a traced scale: in this order."""
    bias, mask = RNG.normal(size=(N, 1, T)), RNG.random((B, 1, T, T)) > 0.2

    def ours(q, k, v, bias, scale):
        how = {"score_mod": nn.score_mods.soft_cap(0.5), "mask_mod": MASKS["documents"][0], "is_causal": True}
        return nn.dot_product_attention(q, k, v, bias, mask, scale=scale, **how)

    def theirs(query, key, value, bias, scale):
        change = lambda s: 0.5 * bnp.tanh((s + bias) / 0.5)
        return plain(query, key, value, mask & MASKS["documents"][1] & (q >= k), change, scale)

    agrees(ours, theirs, [*operands(2), wide(bias), wide(-0.3)])


LENGTHS = np.array([3, 6], np.int32)
PARAMETERS = {
    "window": ({"local_window_size": (2, 1)}, (q - k <= 2) & (k - q <= 1)),
    "window of one number": ({"local_window_size": 1}, abs(q - k) <= 1),
    "lengths": (
        {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS[::-1]},
        (q < LENGTHS[b]) & (k < LENGTHS[::-1][b]),
    ),
    "all": (
        {
            "key_value_seq_lengths": LENGTHS, "local_window_size": (3, 0), "mask": IDS[0] != 1,
            "mask_mod": MASKS["prefix"][0],
        },
        (k < LENGTHS[b]) & (q - k <= 3) & (k <= q) & (IDS[0][k] != 1) & MASKS["prefix"][1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_that_are_masks(name):
    how, seen = PARAMETERS[name]
    agrees(lambda *x: nn.dot_product_attention(*x, **how), lambda *x: plain(*x, seen=seen), operands(2))


def test_without_a_batch():
    x = operands(2)
    got = nn.dot_product_attention(*[a[0] for a in x], mask_mod=MASKS["window"][0])
    np.testing.assert_allclose(got, plain(*x, seen=MASKS["window"][1])[0], atol=1e-12)
    got = nn.dot_product_attention(*[a[0] for a in x], local_window_size=(2, 0))
    np.testing.assert_allclose(got, plain(*x, seen=MASKS["window"][1])[0], atol=1e-12)


def test_more_keys_than_queries():
    x = operands(2, S=12)
    got = nn.dot_product_attention(*x, mask_mod=nn.masks.sliding_window(3))
    q, k = np.ogrid[:T, :12]
    np.testing.assert_allclose(got, plain(*x, seen=(q >= k) & (q - k < 3)), atol=1e-12)


def test_learnt_tables():
    def ours(q, k, v, slopes, table):
        first, then = nn.score_mods.alibi(slopes), nn.score_mods.relative_bias(table)
        both = lambda s, *pair: then(first(s, *pair), *pair)
        return nn.dot_product_attention(q, k, v, score_mod=both, mask_mod=MASKS["window"][0])

    def theirs(query, key, value, slopes, table):
        change = lambda s: s - slopes[h] * abs(q - k) + table[h, np.clip(k - q, -2, 2) + 2]
        return plain(query, key, value, MASKS["window"][1], change)

    agrees(ours, theirs, [*operands(2), wide(SLOPES), wide(TABLE)])
    # of the table only: no gradient of queries is requested
    x = operands(2)
    got, want = (
        bf.grad(lambda t, f=f: (f(*x, wide(SLOPES), t) ** 2).sum())(wide(TABLE)) for f in (ours, theirs)
    )
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_rows_that_see_nothing():
    x = operands(2, dtype="float32")
    f = lambda *x: nn.dot_product_attention(*x, mask_mod=lambda b, h, q, k: (q != 2) & (h != 1))
    out = np.asarray(f(*x))
    assert not out[:, 2].any() and not out[:, :, 1].any() and np.all(out[:, 0, 0] != 0)
    grads = bf.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2))(*x)
    assert all(np.isfinite(g).all() for g in grads)
    assert not np.asarray(grads[0])[:, 2].any()


def test_forward_mode_and_second_derivatives():
    x = operands(2)
    f = lambda *x: nn.dot_product_attention(
        *x, score_mod=nn.score_mods.soft_cap(0.7), mask_mod=MASKS["window"][0]
    )
    g = lambda *x: plain(*x, MASKS["window"][1], SCORES["soft cap"][1])
    t = operands(2)
    np.testing.assert_allclose(bf.jvp(f, x, t)[1], bf.jvp(g, x, t)[1], atol=1e-12)
    got, want = (bf.jvp(bf.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2)), x, t)[1] for f in (f, g))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-11)


EXAMPLES = 3


@pytest.mark.parametrize("of_table", [None, 0])
def test_vmap(of_table):
    """Indices of batch entries are per example; a table may be batched."""
    ids = RNG.integers(0, 3, (EXAMPLES, B, T) if of_table == 0 else (B, T)).astype(np.int32)
    xs = [bnp.stack(x) for x in zip(*[operands(2) for _ in range(EXAMPLES)], strict=True)]
    f = lambda q, k, v, ids: nn.dot_product_attention(
        q, k, v, mask_mod=nn.masks.document(ids), is_causal=True
    )
    got = bf.vmap(f, (0, 0, 0, of_table))(*xs, ids)
    each = [ids[n] if of_table == 0 else ids for n in range(EXAMPLES)]
    want = [f(*[x[n] for x in xs], each[n]) for n in range(EXAMPLES)]
    np.testing.assert_allclose(got, np.stack(want), atol=1e-12)
    grads = bf.vmap(bf.grad(lambda *x: (f(*x) ** 2).sum()), (0, 0, 0, of_table))(*xs, ids)
    want = [bf.grad(lambda *x: (f(*x) ** 2).sum())(*[x[n] for x in xs], each[n]) for n in range(EXAMPLES)]
    np.testing.assert_allclose(grads, np.stack(want), atol=1e-12)


def test_vmap_over_queries_alone():
    query, key, value = operands(2)
    both = bnp.stack([query, 2 * query])
    f = lambda q: nn.dot_product_attention(q, key, value, score_mod=SCORES["of its own"][0]())
    np.testing.assert_allclose(bf.vmap(f)(both), np.stack([f(query), f(2 * query)]), atol=1e-12)


def test_autocast():
    """Matmuls are low; scores, tables and arithmetic of mods are not."""
    x = operands(2, dtype="float32")
    table = bnp.asarray(TABLE, dtype="float32")
    mods = {"score_mod": nn.score_mods.relative_bias(table), "mask_mod": MASKS["documents"][0]}
    f = lambda *x: nn.dot_product_attention(*x, **mods)
    jaxpr = bf.make_jaxpr(bf.autocast(f))(*x)
    (eqn,) = [e for e in jaxpr.eqns if e.prim.name == "attention"]
    types = [a.aval.dtype.name for a in eqn.invars]
    assert types[:3] == ["bfloat16"] * 3 and set(types[3:]) == {"int32", "float32"}
    np.testing.assert_allclose(np.asarray(bf.autocast(f)(*x)).astype(np.float32), f(*x), atol=3e-2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    x = operands(2, dtype=dtype)
    got = nn.dot_product_attention(*x, score_mod=nn.score_mods.soft_cap(0.7), mask_mod=MASKS["window"][0])
    assert got.dtype == x[0].dtype
    want = plain(*[a.astype("float64") for a in x], MASKS["window"][1], SCORES["soft cap"][1])
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, atol=2e-2)


def test_closures_that_do_the_same_are_one_program():
    x = operands(2)
    f = lambda n: bf.make_jaxpr(lambda *x: nn.dot_product_attention(*x, mask_mod=nn.masks.sliding_window(n)))(
        *x
    )
    mods = [next(e.params["mods"] for e in f(n).eqns if "mods" in e.params) for n in (3, 3, 4)]
    assert mods[0] == mods[1] != mods[2]


def test_what_is_computed_of_tables_alone_is_computed_once():
    """Of all arrays of the function, one remains: the sums, read at a query."""
    lengths = bnp.asarray([2, 3, 2, 0, 0, 0, 0])
    ours = lambda b, h, q, k: k < bnp.cumsum(lengths)[q]
    jaxpr = bf.make_jaxpr(lambda *x: nn.dot_product_attention(*x, mask_mod=ours))(*operands(2))
    mods = next(e.params["mods"] for e in jaxpr.eqns if "mods" in e.params)
    assert mods.mask_tables == 1 and not [e for e in mods.mask.eqns if e.prim.name == "cumsum"]
    seen = k < np.cumsum([2, 3, 2, 0, 0, 0, 0])[q]
    agrees(
        lambda *x: nn.dot_product_attention(*x, mask_mod=ours), lambda *x: plain(*x, seen=seen), operands(2)
    )


def test_causal_alone_is_the_causal_operation():
    x = operands(4)
    texts = [
        str(bf.make_jaxpr(lambda *x, how=how: nn.dot_product_attention(*x, **how))(*x))
        for how in ({"is_causal": True}, {"mask_mod": nn.masks.causal})
    ]
    assert texts[0] == texts[1]


def test_slopes_of_the_paper():
    np.testing.assert_allclose(nn.score_mods.alibi_slopes(8), 2.0 ** -np.arange(1, 9))


ERRORS = {
    "not one number": (
        {"mask_mod": lambda b, h, q, k: bnp.arange(3) > k},
        errors.ShapeError,
        r"shape \(3,\)",
    ),
    "mask of numbers": (
        {"mask_mod": lambda b, h, q, k: q - k},
        errors.DtypeError,
        "returns int32, and not a bool",
    ),
    "score of booleans": ({"score_mod": lambda s, b, h, q, k: q > k}, errors.DtypeError, "returns bool"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    how, error, match = ERRORS[name]
    with pytest.raises(error, match=match):
        nn.dot_product_attention(*operands(), **how)


def test_errors_of_what_is_ready_made():
    for make, error in (
        (lambda: nn.masks.sliding_window(0), errors.ValueRangeError),
        (lambda: nn.masks.local_window(1, -1), errors.ValueRangeError),
        (lambda: nn.masks.lengths(keys=3), errors.ShapeError),
        (lambda: nn.masks.document(np.zeros((1, 2, 3), int)), errors.ShapeError),
        (lambda: nn.score_mods.soft_cap(0.0), errors.ValueRangeError),
        (lambda: nn.score_mods.relative_bias(np.zeros((4, 4))), errors.ShapeError),
        (lambda: nn.score_mods.alibi(np.arange(4)), errors.ShapeError),
    ):
        with pytest.raises(error):
            make()


@pytest.mark.peer
@pytest.mark.parametrize(
    "how",
    [
        {"local_window_size": 2},
        {"local_window_size": (3, 0)},
        {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
        {"key_value_seq_lengths": LENGTHS, "is_causal": True},
    ],
)
def test_parameters_against_jax(how):
    jax = pytest.importorskip("jax")
    x = [np.asarray(a) for a in operands(2, dtype="float32")]
    want = jax.nn.dot_product_attention(*x, **how)
    np.testing.assert_allclose(nn.dot_product_attention(*x, **how), np.asarray(want), atol=2e-6)


# -- whole tiles -----------------------------------------------------------------------------------

BOUNDED = {
    **{name: MASKS[name][0] for name in ("window", "prefix", "prefixes")},
    "not": lambda b, h, q, k: ~(abs(q - k) > 2) | (q == 4),
    "choice": lambda b, h, q, k: bnp.where(h % 2 == 0, bnp.maximum(q, 3) - 1 <= k, k != 2),
    "chosen number": lambda b, h, q, k: bnp.where(q < 3, k, -k) >= bnp.minimum(b, k) - 1,
    "lengths": nn.masks.lengths(PREFIX, PREFIX[::-1]),
    "local": nn.masks.local_window(2, 1),
    "clamped": lambda b, h, q, k: q + lax.clamp(0, bnp.asarray(PREFIX)[b], T) > k,
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_of_tiles_are_never_wrong(name):
    """For tiles of one pair they are exact."""
    mods, tables = traced(BOUNDED[name], None, np.dtype(np.float32))
    held = [np.asarray(t) for t in tables]
    at = lambda b, h, q, k: bool(np.asarray(eval_jaxpr(mods.mask, [*held, *map(np.int32, (b, h, q, k))])[0]))
    table = np.array(
        [[[[at(b, h, q, k) for k in range(T)] for q in range(T)] for h in range(2)] for b in range(B)]
    )
    settled = 0
    for b, h, (q0, q1), (k0, k1) in itertools.product(range(B), range(2), TILES, TILES):
        numbers = map(np.int32, (b, h, q0, q1, k0, k1))
        possible, certain = (bool(np.asarray(x)) for x in eval_jaxpr(mods.bounds, [*held, *numbers]))
        tile = table[b, h, q0 : q1 + 1, k0 : k1 + 1]
        assert possible or not tile.any()
        assert not certain or tile.all()
        if tile.size == 1:
            assert possible == certain == tile.all()
        settled += tile.size > 1 and (certain or not possible)
    assert settled > 5


TILES = [(0, 0), (3, 3), (6, 6), (0, 2), (2, 5), (5, 6), (0, 6)]


@pytest.mark.parametrize(
    "mask_mod",
    [
        MASKS["documents"][0],  # a table at q
        lambda b, h, q, k: q % 3 > k,
        lambda b, h, q, k: q + bnp.asarray(PREFIX)[b] > k,  # may wrap around
        lambda b, h, q, k: q * 0.5 > k,
    ],
)
def test_masks_that_intervals_do_not_bound(mask_mod):
    assert traced(mask_mod, None, np.dtype(np.float32))[0].bounds is None
