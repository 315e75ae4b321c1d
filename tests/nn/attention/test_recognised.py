"""Hand-written attention: recognized forms, near misses, and equivalence."""

import math
import re
from collections import Counter

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, nn, tree
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import subjaxprs
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.backends.cuda.program import Draft
from tests.emulation import fake_cuda

B, T, N, H = 2, 40, 3, 16
BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
BTNH, BNTH, NTH, TH = (B, T, N, H), (B, N, T, H), (N, T, H), (T, H)
NOTE = "recognised as attention at test_recognised.py"


def planned(f, *args, arch="sm_90a"):
    """The plan of a function under jit for an absent device."""
    traced = bf.jit(f).trace(*args)
    return Draft(traced.jaxpr, (False,) * len(traced.jaxpr.invars), arch).schedule


def calls(made):
    """The attention equations of a plan, by name."""
    return {e.prim.name: e for e in equations(made.jaxpr) if e.prim.name.startswith("attention")}


def equations(jaxpr):
    """All equations, loop bodies included, but not definitions of operations."""
    for e in jaxpr.eqns:
        yield e
        if e.prim.kind == "control" or e.prim.name == "checkpoint":
            for inner in subjaxprs(e.params):
                yield from equations(inner)


def weights_in(made):
    """True if a plan computes an array with all pairs of a head or more."""
    shapes = [v.aval.shape for e in equations(made.jaxpr) for v in e.outvars]
    return any(math.prod(shape) >= T * T and shape.count(T) > 1 for shape in shapes)


def notes(made):
    """The notes on attention in a plan, without lines."""
    return [re.sub(r" at \S+ \(\S+\)", "", n) for n in made.notes]


def avals(*shapes, dtype=BF16):
    return [bf.ShapeDtypeStruct(s, dtype) for s in shapes]


def normal(*shapes, dtype=BF16, seed=0):
    rng = np.random.default_rng((seed, *shapes[0]))
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


def as_loss(attend):
    """A scalar loss of attention with distinct cotangents."""

    def loss(*args):
        out = attend(*args).astype("float32")
        return (out * bnp.cos(bnp.arange(out.size, dtype="float32")).reshape(out.shape)).sum()

    return loss


# -- common spellings ------------------------------------------------------------------------------

SCALE = 1 / math.sqrt(H)


def tril():
    return bnp.tril(bnp.ones((T, T), bool))


def softmax(x, stop=True, norm=lambda e, total: e / total):
    top = x.max(-1, keepdims=True)
    e = bnp.exp(x - (lax.stop_gradient(top) if stop else top))
    return norm(e, e.sum(-1, keepdims=True))


def einsum(q, k, v):
    scores = bnp.einsum("bqhd,bkhd->bhqk", q, k) / H**0.5
    return bnp.einsum("bhqk,bkhd->bqhd", nn.softmax(bnp.where(tril(), scores, -bnp.inf)), v)


def einsum_of_other_axes(q, k, v):
    scores = bnp.einsum("bqhd,bkhd->bqhk", q, k) * SCALE
    return bnp.einsum("bqhk,bkhd->bqhd", nn.softmax(scores), v)


def matmul(q, k, v):
    scores = (q * SCALE) @ k.swapaxes(-1, -2)
    return softmax(scores) @ v


def transposed(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = (q @ bnp.swapaxes(k, 2, 3) * SCALE).astype("float32")
    scores = scores + bnp.where(tril(), 0.0, -1e9)
    out = softmax(scores, stop=False).astype(v.dtype) @ v
    return out.transpose(0, 2, 1, 3).reshape(B, T, N * H)


def plain(q, k, v):
    return nn.softmax(q @ k.T) @ v


def wide(q, k, v):
    scores = bnp.einsum("...qd,...kd->...qk", q, k, preferred_element_type="float32") * SCALE
    i = bnp.arange(T)
    scores = bnp.where(i[:, None] < i, bnp.finfo(scores.dtype).min, scores)
    weights = nn.softmax(scores, axis=-1).astype(q.dtype)
    return bnp.einsum("...qk,...kd->...qd", weights, v, preferred_element_type="float32").astype(q.dtype)


def cast_before(q, k, v):
    scores = q.astype("float32") @ (k.astype("float32") / math.sqrt(H)).swapaxes(-1, -2)
    mask = bnp.triu(bnp.ones((T, T)), k=1)
    return nn.softmax(scores + mask * -1e10).astype("bfloat16") @ v


def inverse(q, k, v):
    weights = softmax(q @ k.swapaxes(-1, -2), norm=lambda e, total: e * (1 / total))
    return bnp.matmul(weights, v)


def without_maximum(q, k, v):
    e = bnp.exp((q @ k.swapaxes(-1, -2)).astype("float32") / 4)
    return (e / e.sum(-1, keepdims=True)).astype(v.dtype) @ v


def mapped(q, k, v):
    def one(q, k, v):
        scores = bnp.where(tril(), q @ k.T * SCALE, -1e30)
        return nn.softmax(scores) @ v

    return bf.vmap(bf.vmap(one, 1, 1))(q, k, v)


def in_jit(q, k, v):
    weights = bf.jit(lambda q, k: softmax(q @ k.swapaxes(-1, -2) * SCALE))(q, k)
    return bf.jit(bnp.matmul)(weights, v)


def by_minus_tril(q, k, v):
    scores = q @ k.swapaxes(-1, -2)
    mask = (1 - bnp.tril(bnp.ones((T, T), "bfloat16"))) * -1e9
    return nn.softmax((scores + mask[None]) * SCALE) @ v


def less_triu(q, k, v):
    scores = (k @ q.swapaxes(-1, -2)).swapaxes(-1, -2) - 1e9 * (1 - bnp.tri(T, dtype="bfloat16"))
    return (v.swapaxes(-1, -2) @ softmax(scores * SCALE).swapaxes(-1, -2)).swapaxes(-1, -2)


FORMS = {
    "einsum": (einsum, BTNH, True),
    "einsum of other axes": (einsum_of_other_axes, BTNH, False),
    "matmul": (matmul, BNTH, False),
    "transposed": (transposed, BTNH, True),
    "one head": (plain, TH, False),
    "no batch": (wide, NTH, True),
    "wide": (wide, BNTH, True),
    "cast before": (cast_before, BNTH, True),
    "inverse": (inverse, NTH, False),
    "without maximum": (without_maximum, NTH, False),
    "mapped": (mapped, BTNH, True),
    "in jit": (in_jit, BNTH, False),
    "less triu": (less_triu, BNTH, True),
    "by minus tril": (by_minus_tril, NTH, True),
}
"""Spellings of attention: function, operand shapes, and causality."""


@pytest.mark.parametrize("name", FORMS)
def test_is_recognised(name):
    f, shape, causal = FORMS[name]
    made = planned(f, *avals(shape, shape, shape))
    (call,) = calls(made).values()
    assert call.params["is_causal"] == causal and "mods" not in call.params
    assert not weights_in(made)
    assert [NOTE in n for n in made.notes] == [True]


@pytest.mark.parametrize("name", FORMS)
def test_is_recognised_under_grad(name):
    f, shape, _ = FORMS[name]
    made = planned(bf.grad(as_loss(f), (0, 1, 2)), *avals(shape, shape, shape))
    assert sorted(calls(made)) == ["attention", "attention_grad"]
    assert not weights_in(made)


@pytest.fixture
def cuda(monkeypatch):
    fake_cuda.install(monkeypatch)
    return bf.devices("cuda")[0]


def close(got, want, tolerance):
    for g, w in zip(tree.leaves(got), tree.leaves(want), strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert g.shape == w.shape and g.dtype == w.dtype
        g, w = g.astype(np.float64), w.astype(np.float64)
        np.testing.assert_allclose(g, w, atol=tolerance * np.nanmax(np.abs(w)))


@pytest.mark.parametrize("name", FORMS)
def test_is_the_same_function(name, cuda):
    """On a device that runs definitions, compared with the original."""
    f, shape, _ = FORMS[name]
    args = normal(shape, shape, shape)
    both = bf.jit(lambda *xs: (f(*xs), bf.grad(as_loss(f), (0, 1, 2))(*xs)))
    got = both(*[from_numpy(x, cuda) for x in args])
    close(got, both(*map(bnp.asarray, args)), 3e-2)


@pytest.mark.parametrize("name", ["einsum", "einsum of other axes", "matmul", "one head", "in jit"])
def test_is_no_less_exact(name, cuda):
    """Scores rounded to bfloat16 by hand are not rounded by kernels."""
    f, shape, _ = FORMS[name]
    args = normal(shape, shape, shape)
    want = np.asarray(f(*[bnp.asarray(x.astype(np.float64), dtype="float64") for x in args]))
    error = lambda out: np.abs(np.asarray(out).astype(np.float64) - want).mean()
    run = bf.jit(f)
    assert error(run(*[from_numpy(x, cuda) for x in args])) <= error(run(*map(bnp.asarray, args)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["transposed", "wide", "mapped"])
def test_is_the_same_function_on_a_device(name):
    f, shape, _ = FORMS[name]
    args = normal(shape, shape, shape)
    both = bf.jit(lambda *xs: (f(*xs), bf.grad(as_loss(f), (0, 1, 2))(*xs)))
    got = both(*[from_numpy(x, bf.devices("cuda")[0]) for x in args])
    close(got, both(*map(bnp.asarray, args)), 3e-2)


# -- heads that share keys -------------------------------------------------------------------------


def repeated(q, k, v):
    k, v = (bnp.repeat(x, 2, axis=2) for x in (k, v))
    return bnp.einsum("bhqk,bkhd->bqhd", nn.softmax(bnp.einsum("bqhd,bkhd->bhqk", q, k)), v)


def broadcast(q, k, v):
    k, v = (bnp.broadcast_to(x[:, :, :, None], (B, T, N, 2, H)).reshape(B, T, 2 * N, H) for x in (k, v))
    return bnp.einsum("bhqk,bkhd->bqhd", nn.softmax(bnp.einsum("bqhd,bkhd->bhqk", q, k)), v)


def grouped(q, k, v):
    scores = bnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, N, 2, H), k) * SCALE
    weights = nn.softmax(bnp.where(tril(), scores, -1e9))
    return bnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, 2 * N, H)


def one_key_head(q, k, v):
    weights = nn.softmax(bnp.einsum("bnth,bsh->bnts", q, k) * SCALE)
    return bnp.einsum("bnts,bsh->bnth", weights, v)


GROUPED = {
    "repeated": (repeated, (B, T, 2 * N, H), BTNH),
    "broadcast": (broadcast, (B, T, 2 * N, H), BTNH),
    "grouped": (grouped, (B, T, 2 * N, H), BTNH),
    "one key head": (one_key_head, BNTH, (B, T, H)),
}


@pytest.mark.parametrize("name", GROUPED)
def test_heads_that_share_keys(name, cuda):
    f, queries, keys = GROUPED[name]
    shapes = queries, keys, keys
    both = bf.jit(lambda *xs: (f(*xs), bf.grad(as_loss(f), (0, 1, 2))(*xs)))
    made = planned(both, *avals(*shapes))
    for call in calls(made).values():
        query, key = (v.aval.shape for v in call.invars[:2])
        assert query[2] == math.prod(queries) // (B * T * H) and key[2] == math.prod(keys) // (B * T * H)
    assert len(calls(made)) == 2 and not weights_in(made)
    args = normal(*shapes)
    close(both(*[from_numpy(x, cuda) for x in args]), both(*map(bnp.asarray, args)), 3e-2)


# -- masks and score modifications -----------------------------------------------------------------


def scores_of(q, k):
    return (q @ k.swapaxes(-1, -2)).astype("float32") * SCALE


def attend(scores, v):
    return nn.softmax(scores).astype(v.dtype) @ v


def window(q, k, v):
    i = bnp.arange(T)
    distance = i[:, None] - i
    return attend(bnp.where((distance >= 0) & (distance < 8), scores_of(q, k), -bnp.inf), v)


def slopes(q, k, v):
    """ALiBi, with slopes per head, whose axis precedes the queries here."""
    i, slope = bnp.arange(T), bnp.exp2(-bnp.arange(1, N + 1, dtype="float32"))
    scores = scores_of(q, k) - slope[:, None, None] * abs(i[:, None] - i)
    return attend(bnp.where(tril(), scores, -bnp.inf), v)


def capped(q, k, v):
    return attend(bnp.where(tril(), 3 * bnp.tanh(scores_of(q, k) / 3), -1e30), v)


def small_number(q, k, v):
    """The masking scalar is too large to mask: such a pair has a weight."""
    return attend(bnp.where(tril(), scores_of(q, k), -2.0), v)


def biased(q, k, v, bias):
    return attend(scores_of(q, k) + bias, v)


def padded(q, k, v, seen):
    return attend(bnp.where(seen[:, None, None], scores_of(q, k), -1e9), v)


def padded_by_infinity(q, k, v, seen):
    return attend(bnp.where(seen[:, None, None], scores_of(q, k), -bnp.inf), v)


def padded_by_zeros(q, k, v, seen):
    return nn.softmax(scores_of(q, k), where=seen[:, None, None]).astype(v.dtype) @ v


def padded_by_both(q, k, v, seen):
    scores = bnp.where(seen[:, None, None], scores_of(q, k), -1e9)
    return nn.softmax(scores, where=seen[::-1, None, None]).astype(v.dtype) @ v


SEEN = np.arange(T) < np.array([[T - 7], [0]])  # the second batch entry is fully masked
BIAS = np.linspace(-1, 1, N * T * T, dtype=np.float32).reshape(N, T, T)
MODS = {
    "window": (window, (), "mask_mod"),
    "slopes": (slopes, (), "score_mod"),
    "capped": (capped, (), "score_mod"),
    "small number": (small_number, (), "score_mod"),
    "biased": (biased, (BIAS,), "score_mod"),
    "padded": (padded, (SEEN,), "score_mod"),
    "padded by infinity": (padded_by_infinity, (SEEN,), "mask_mod"),
    "padded by zeros": (padded_by_zeros, (SEEN,), "mask_mod"),
}
"""Non-causal masks: function, tables, and resulting operation."""


@pytest.mark.parametrize("name", MODS)
def test_masks_and_changes_become_functions_of_pairs(name):
    f, tables, kind = MODS[name]
    types = [*avals(BNTH, BNTH, BNTH), *[bf.ShapeDtypeStruct(x.shape, x.dtype) for x in tables]]
    made = planned(bf.grad(as_loss(f), (0, 1, 2)), *types)
    assert [repr(e.params["mods"]) for e in calls(made).values()] == [kind, kind] and not weights_in(made)
    scale = SCALE / 3 if name == "capped" else SCALE  # the kernel applies an immediate scale
    assert all(e.params["scale"] == pytest.approx(scale) for e in calls(made).values())
    assert all(e.params["is_causal"] == (name in ("slopes", "capped")) for e in calls(made).values())


@pytest.mark.parametrize("name", MODS)
def test_functions_of_pairs_are_what_was_written(name, cuda):
    """Fully masked rows too: the mean for finite masking scalars, NaN for -inf."""
    f, tables, _ = MODS[name]
    args = [*normal(BNTH, BNTH, BNTH), *tables]
    forward = bf.jit(f)
    got, want = forward(*[from_numpy(x, cuda) for x in args]), forward(*map(bnp.asarray, args))
    close(got, want, 2e-2)
    assert bool(np.isnan(np.asarray(want)[1]).any()) == (name == "padded by infinity")
    if name != "padded by infinity":
        derived = bf.jit(bf.grad(as_loss(f), (0, 1, 2)))
        close(derived(*[from_numpy(x, cuda) for x in args]), derived(*map(bnp.asarray, args)), 3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODS)
def test_functions_of_pairs_are_what_was_written_on_a_device(name):
    f, tables, _ = MODS[name]
    args = [*normal(BNTH, BNTH, BNTH), *tables]
    both = bf.jit(lambda *xs: (f(*xs), bf.grad(as_loss(f), (0, 1, 2))(*xs)))
    got = both(*[from_numpy(x, bf.devices("cuda")[0]) for x in args])
    want = both(*map(bnp.asarray, args))
    if name == "padded by infinity":  # gradients of the second batch entry are zeros, and NaN by hand
        got, want = ([np.asarray(x)[:1] for x in tree.leaves(xs)] for xs in (got, want))
    close(got, want, 3e-2)


def test_a_row_that_sees_nothing_is_nan_and_hides_no_other(cuda):
    """As in the original: NaN for fully masked rows, finite gradients elsewhere."""
    args = [*normal(BNTH, BNTH, BNTH), SEEN]
    out = np.asarray(bf.jit(padded_by_infinity)(*[from_numpy(x, cuda) for x in args]))
    assert np.isnan(out[1]).all() and not np.isnan(out[0]).any()
    grads = bf.jit(bf.grad(as_loss(padded_by_infinity), (0, 1, 2)))(*[from_numpy(x, cuda) for x in args])
    assert not any(np.isnan(np.asarray(g)[0]).any() for g in grads)


def test_a_learnt_bias_is_differentiated_as_it_is_written():
    """Its gradient would need all pairs anyway."""
    types = [*avals(BNTH, BNTH, BNTH), bf.ShapeDtypeStruct(BIAS.shape, F32)]
    made = planned(bf.value_and_grad(as_loss(biased), (0, 3)), *types)
    assert not calls(made)
    (note,) = notes(made)
    assert "its weights are kept for a backward pass" in note and "masks or biases" in note


# -- near misses -----------------------------------------------------------------------------------


def dropped(q, k, v, kept):
    return (nn.softmax(q @ k.swapaxes(-1, -2)) * kept / 0.9) @ v


def weights_too(q, k, v):
    weights = nn.softmax(q @ k.swapaxes(-1, -2))
    return weights @ v, weights


def weights_twice(q, k, v):
    weights = nn.softmax(q @ k.swapaxes(-1, -2))
    return weights @ v + weights.sum(-1, keepdims=True)


def wide_weights(q, k, v):
    return nn.softmax((q @ k.swapaxes(-1, -2)).astype("float32")) @ v


def wide_result(q, k, v):
    weights = nn.softmax(q @ k.swapaxes(-1, -2))
    return bnp.matmul(weights, v, preferred_element_type="float32")


def two_products(q, k, v):
    return nn.softmax(q @ k.swapaxes(-1, -2) + k @ q.swapaxes(-1, -2)) @ v


def mixed(q, k, v):
    return nn.softmax(q @ k.swapaxes(-1, -2)).astype(v.dtype) @ v


def many_keys(q, k, v):
    return bf.vmap(plain, (None, 0, 0))(q, k, v)


MISSES = {
    "dropout": (
        dropped,
        [*avals(BNTH, BNTH, BNTH, (B, N, T, T))],
        "changes its weights before they meet",
    ),
    "two masks": (
        padded_by_both,
        [*avals(BNTH, BNTH, BNTH), *avals((B, T), dtype=bool)],
        "mask for where=, and",
    ),
    "weights are returned": (weights_too, avals(BNTH, BNTH, BNTH), "its scores or weights are returned, too"),
    "weights are used": (weights_twice, avals(BNTH, BNTH, BNTH), "its scores or weights are read at"),
    "weights are float32": (wide_weights, avals(BNTH, BNTH, BNTH), "its weights meet the values in float32"),
    "result is float32": (
        wide_result,
        avals(BNTH, BNTH, BNTH),
        "its result is float32, and that of kernels is",
    ),
    "scores of two products": (two_products, avals(BNTH, BNTH, BNTH), "its scores are of two products"),
    "float32": (matmul, avals(BNTH, BNTH, BNTH, dtype=F32), "its elements are float32, and only those of 16"),
    "few keys": (plain, avals((H, H), (H, H), (H, H)), "its 16 keys are no more than the 16 features"),
    "features": (plain, avals((T, 24), (T, 24), (T, 24)), "features=24 is not a multiple of 16"),
    "other values": (matmul, avals(BNTH, BNTH, (B, N, T, 32)), "its keys are [batch, keys, heads, features]"),
    "dtypes": (mixed, [*avals(BNTH, BNTH), *avals(BNTH, dtype=F16)], "are bfloat16, bfloat16, float16"),
    "queries for many keys": (
        many_keys,
        avals(TH, NTH, NTH),
        "its keys have more axes than one of their own",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_say_why(name):
    f, types, why = MISSES[name]
    made = planned(f, *types)
    assert not calls(made)
    (note,) = made.notes
    assert note.startswith("not recognised as attention at test_recognised.py:") and why in note


@pytest.mark.parametrize(
    "f",
    [
        lambda q, k, v: q @ k.swapaxes(-1, -2) @ v,
        lambda q, k, v: nn.softmax(q) @ k.swapaxes(-1, -2) @ v,
        lambda q, k, v: nn.relu(q @ k.swapaxes(-1, -2)) @ v,
        lambda q, k, v: nn.softmax(q @ k.swapaxes(-1, -2), axis=-2) @ v,
        lambda q, k, v: nn.softmax(bnp.cumsum(q @ k.swapaxes(-1, -2), -1)) @ v,
    ],
)
def test_what_is_no_attention_is_left_in_silence(f):
    made = planned(f, *avals(BNTH, BNTH, BNTH))
    assert not calls(made) and made.notes == ()


def test_rules_of_derivatives_count():
    """A function with a custom rule between scores and softmax stays opaque."""

    @bf.custom_jvp
    def doubled_backwards(x):
        return x * 1.0

    @doubled_backwards.defjvp
    def rule(primals, tangents):
        return doubled_backwards(*primals), 2 * tangents[0]

    f = lambda q, k, v: nn.softmax(doubled_backwards(q @ k.swapaxes(-1, -2))) @ v
    assert not calls(planned(bf.grad(as_loss(f)), *avals(BNTH, BNTH, BNTH)))
    assert sorted(calls(planned(f, *avals(BNTH, BNTH, BNTH)))) == ["attention"]


def test_an_older_device_runs_what_was_written():
    made = planned(bf.grad(as_loss(einsum)), *avals(BTNH, BTNH, BTNH), arch="sm_75")
    assert not calls(made)
    assert all("runs as it is written, without a kernel: the device is sm_75" in n for n in made.notes)


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(config, "recognise", False)
    made = planned(bf.grad(as_loss(einsum)), *avals(BTNH, BTNH, BTNH))
    assert not calls(made) and made.notes == ()


def decoded(q, k, v):
    """Decoding from a cache, [B, S, K, H], with a group of query heads per key head."""

    def step(i, x):
        scores = bnp.einsum("bgqd,bmgd->bgqm", x, k)
        weights = nn.softmax(bnp.where(bnp.arange(T) <= i, scores, -bnp.inf))
        return bnp.einsum("bgqm,bmgd->bgqd", weights, v)

    return lax.fori_loop(0, 5, step, q)


@pytest.mark.parametrize("default", ["", "cuda"])
def test_a_mask_of_the_index_of_a_loop(default, cuda, monkeypatch):
    """Numbers of the replacement are literals, whatever the default device."""
    monkeypatch.setattr(config, "default_device", default)
    shapes = (B, N, 4, H), BTNH, BTNH
    made = planned(decoded, *avals(*shapes))
    assert sorted(calls(made)) == ["attention"] and not weights_in(made)
    args = normal(*shapes)
    run = bf.jit(decoded)
    on_host = [from_numpy(x, bf.devices("cpu")[0]) for x in args]
    close(run(*[from_numpy(x, cuda) for x in args]), run(*on_host), 3e-2)


@pytest.mark.parametrize(
    "seen",
    [
        lambda rows, columns: rows.astype("uint32") - columns.astype("uint32") >= 0,
        lambda rows, columns: rows.astype("float32") - columns < bnp.inf,
    ],
    ids=["unsigned", "infinite"],
)
def test_comparisons_that_are_no_inequalities_of_positions(seen):
    """Differences that wrap around, and an infinite bound."""

    def f(q, k, v):
        i = bnp.arange(T)
        return attend(bnp.where(seen(i[:, None], i), scores_of(q, k), -bnp.inf), v)

    made = planned(f, *avals(BNTH, BNTH, BNTH))
    assert [(e.params["is_causal"], repr(e.params["mods"])) for e in calls(made).values()] == [
        (False, "mask_mod")
    ]


# -- together with transforms ----------------------------------------------------------------------


def scanned(q, k, v):
    return lax.scan(lambda x, w: (einsum(x * w, k, v), None), q, bnp.linspace(0.5, 1, 3, dtype=q.dtype))[0]


def looped_again(q, k, v):
    body = bf.checkpoint(lambda x: einsum(x, k, v))
    return lax.scan(lambda x, w: (body(x * w), None), q, bnp.linspace(0.5, 1, 3, dtype=q.dtype))[0]


def branched(q, k, v):
    return lax.cond(q[0, 0, 0, 0] > -9, einsum, lambda q, k, v: q + v, q, k, v)


def examples(q, k, v):
    f = bf.vmap(bf.grad(as_loss(einsum)), (0, None, 0))
    return f(bnp.stack([q, q + 1]), k, bnp.stack([v, v - 1]))


def two_layers(q, k, v):
    return einsum(einsum(q, k, v), k, q)


TRANSFORMED = {
    "checkpoint": bf.grad(as_loss(bf.checkpoint(einsum)), (0, 1, 2)),
    "jit": bf.grad(bf.jit(as_loss(bf.jit(einsum))), (0, 1, 2)),
    "vjp": lambda q, k, v: bf.vjp(einsum, q, k, v)[1](q),
    "vmap of grad": examples,
    "grad of vmap": bf.grad(lambda *xs: bf.vmap(as_loss(einsum))(*[x[None] for x in xs])[0], (0, 1, 2)),
    "scan": bf.grad(as_loss(scanned), (0, 1, 2)),
    "checkpoint in a scan": bf.grad(as_loss(looped_again), (0, 1, 2)),
    "cond": bf.grad(as_loss(branched), (0, 1, 2)),
    "one batch entry": bf.grad(as_loss(lambda *xs: einsum(*[x[:1] for x in xs])), (0, 1, 2)),
    "two layers": bf.grad(as_loss(two_layers), (0, 1, 2)),
    "jacrev": lambda q, k, v: bf.jacrev(lambda q: einsum(q, k, v)[:, -1].sum((0, 1)))(q),
    "a closed-over array": lambda q, k, v: bf.grad(lambda q: as_loss(einsum)(q, k, v))(q),
    "with the value": bf.value_and_grad(as_loss(einsum), (0, 1, 2)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms(name, cuda):
    f = bf.jit(TRANSFORMED[name])
    made = planned(f, *avals(BTNH, BTNH, BTNH))
    assert sorted(calls(made)) == ["attention", "attention_grad"] and not weights_in(made)
    args = normal(BTNH, BTNH, BTNH)
    close(f(*[from_numpy(x, cuda) for x in args]), f(*map(bnp.asarray, args)), 4e-2)


def written(f):
    """The equations on the CPU, as a multiset without regard to order."""
    traced = bf.jit(f).trace(*avals(BTNH, BTNH, BTNH))
    made = bf.devices("cpu")[0].backend.draft(traced.jaxpr, (False,) * 3).schedule
    types = lambda atoms: tuple(str(a.aval) for a in atoms)
    return Counter((e.prim.name, types(e.invars), types(e.outvars)) for e in equations(made.jaxpr))


@pytest.mark.parametrize("name", sorted({*TRANSFORMED} - {"checkpoint in a scan"}))
def test_nothing_changes_where_there_is_no_kernel(name, monkeypatch):
    """The CPU program and its residuals are unchanged, in loops too."""
    with_it = written(TRANSFORMED[name])
    monkeypatch.setattr(config, "recognise", False)
    assert with_it == written(TRANSFORMED[name]) and with_it["dot_general", (), ()] == 0


def test_forward_mode_and_second_order(cuda):
    """These have no kernels; they are unchanged."""
    args = normal(BTNH, BTNH, BTNH)
    forward = bf.jit(lambda q, k, v: bf.jvp(einsum, (q, k, v), (k, v, q)))
    of_grad = bf.jit(
        lambda q, k, v: bf.grad(lambda x: (bf.grad(as_loss(einsum))(x, k, v).astype("float32") ** 2).sum())(q)
    )
    linear = bf.jit(lambda q, k, v: bf.linearize(einsum, q, k, v)[1](k, v, q))
    for f in (forward, of_grad, linear):
        close(f(*[from_numpy(x, cuda) for x in args]), f(*map(bnp.asarray, args)), 4e-2)


def test_a_training_step_in_mixed_precision():
    """Parameters in float32, attention by autocast in bfloat16."""
    width = N * H

    def loss(params, x):
        q, k, v = ((x @ params[n]).reshape(B, T, N, H) for n in "qkv")
        out = einsum(q, k, v).reshape(B, T, width) @ params["o"]
        return ((out - x) ** 2).mean()

    def step(params, x):
        grads = bf.grad(bf.autocast(loss))(params, x)
        return tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = {n: bf.ShapeDtypeStruct((width, width), F32) for n in "qkvo"}
    traced = bf.jit(step).trace(params, bf.ShapeDtypeStruct((B, T, width), F32))
    made = Draft(traced.jaxpr, (False,) * 5, "sm_90a").schedule
    assert sorted(calls(made)) == ["attention", "attention_grad"] and not weights_in(made)


def test_a_gradient_outside_of_programs(cuda, monkeypatch):
    """Under ``jit``: two programs with one attention kernel each, compiled once."""
    ran = []
    run = fake_cuda.Attention._run
    monkeypatch.setattr(
        fake_cuda.Attention, "_run", lambda self, *args: (ran.append(self.backward), run(self, *args))[1]
    )
    args = normal(BTNH, BTNH, BTNH)
    gradient = bf.grad(bf.jit(as_loss(einsum)), (0, 1, 2))
    there = [from_numpy(x, cuda) for x in args]
    got = gradient(*there)
    assert sorted(ran) == [False, True]
    close(got, gradient(*map(bnp.asarray, args)), 3e-2)
    made = len(cuda_program._programs)
    gradient(*there)
    assert sorted(ran) == [False, False, True, True] and len(cuda_program._programs) == made


def test_eagerly_nothing_is_traced_first():
    """A differentiated Python function outside jit may inspect values."""

    def f(q):
        return as_loss(plain)(q, q, q) if q[0, 0] > 0 else q.sum()

    q = bnp.asarray(abs(normal(TH)[0]))
    assert bf.grad(f)(q).shape == TH
