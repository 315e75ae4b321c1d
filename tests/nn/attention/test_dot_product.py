"""Attention: float64 loops over heads, masks, shared heads, half precision, JAX."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.special

import blufunc.numpy as bnp
from blufunc import errors, nn
from blufunc.transforms.autodiff.grad import grad

RNG = np.random.default_rng(0)
B, T, S, N, H = 2, 5, 7, 4, 8


def inputs(K=N, dtype=np.float64):
    shapes = [(B, T, N, H), (B, S, K, H), (B, S, K, H)]
    return [RNG.normal(size=s).astype(dtype) for s in shapes]


def arrays(*xs):
    return [bnp.asarray(x, dtype=x.dtype) for x in xs]


def wide(options):
    """NumPy arrays without a dtype would become float32."""
    return {k: bnp.asarray(x, dtype="float64") if k == "bias" else x for k, x in options.items()}


def reference(q, k, v, bias=None, mask=None, scale=None, is_causal=False):
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    out = np.zeros((B, T, N, H))
    bias = np.broadcast_to(0 if bias is None else bias, (B, N, T, S))
    mask = np.broadcast_to(True if mask is None else mask, (B, N, T, S))
    for b, n in itertools.product(range(B), range(N)):
        kv = n // (N // K)
        scores = q[b, :, n] @ k[b, :, kv].T * (H**-0.5 if scale is None else scale) + bias[b, n]
        seen = mask[b, n] & (np.tri(T, S, dtype=bool) if is_causal else True)
        weights = scipy.special.softmax(np.where(seen, scores, -1e30), -1)
        out[b, :, n] = weights @ v[b, :, kv]
    return out


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "mask": {"mask": RNG.random((B, N, T, S)) > 0.3},
    "keys": {"mask": RNG.random((B, 1, 1, S)) > 0.3},
    "small": {"mask": RNG.random((T, S)) > 0.3, "is_causal": True},
    "bias": {"bias": RNG.normal(size=(N, T, S))},
    "all": {
        "bias": RNG.normal(size=(1, N, 1, S)), "mask": RNG.random((B, 1, T, 1)) > 0.2, "is_causal": True, "scale": 0.7,
    },
}  # fmt: skip


@pytest.mark.parametrize("K", [4, 2, 1])
@pytest.mark.parametrize("name", MASKS)
def test_values(name, K):
    q, k, v = inputs(K)
    found = nn.dot_product_attention(*arrays(q, k, v), **wide(MASKS[name]))
    assert found.shape == (B, T, N, H) and found.dtype == np.float64
    np.testing.assert_allclose(np.asarray(found), reference(q, k, v, **MASKS[name]), atol=1e-12)


@pytest.mark.parametrize("K", [4, 2])
def test_without_batch(K):
    q, k, v = inputs(K)
    found = nn.dot_product_attention(*arrays(q[0], k[0], v[0]), is_causal=True)
    np.testing.assert_allclose(np.asarray(found), reference(q, k, v, is_causal=True)[0], atol=1e-12)


@pytest.mark.parametrize("K", [4, 2])
@pytest.mark.parametrize("name", ["causal", "all"])
def test_gradients(name, K):
    options = MASKS[name]
    q, k, v = inputs(K)
    c = RNG.normal(size=q.shape)
    (ours,) = arrays(c)
    f = lambda *x: (nn.dot_product_attention(*x, **wide(options)) * ours).sum()
    grads = grad(f, (0, 1, 2))(*arrays(q, k, v))
    h = 1e-5
    for i, g in enumerate(grads):
        direction = RNG.normal(size=g.shape)
        ends = []
        for step in (h, -h):
            moved = [q, k, v]
            moved[i] = moved[i] + step * direction
            ends.append((reference(*moved, **options) * c).sum())
        np.testing.assert_allclose(
            (np.asarray(g) * direction).sum(), (ends[0] - ends[1]) / (2 * h), rtol=1e-7
        )


SUBSETS = [of for n in (1, 2) for of in itertools.combinations(range(3), n)]


@pytest.mark.parametrize("of", SUBSETS, ids=str)
def test_gradients_of_some_operands(of):
    """Values alone do not affect the statistic of the softmax."""
    q, k, v = (bnp.asarray(RNG.normal(size=(2, 40, 2, 8))) for _ in range(3))
    f = lambda *x: (nn.dot_product_attention(*x, is_causal=True) ** 2).sum()
    every = grad(f, (0, 1, 2))(q, k, v)
    for got, i in zip(grad(f, of)(q, k, v), of, strict=True):
        np.testing.assert_allclose(got, every[i], rtol=1e-5, atol=1e-6)


def test_arrays_that_only_a_mask_reads_have_no_gradient():
    q, k, v = (bnp.asarray(RNG.normal(size=(2, 40, 2, 8))) for _ in range(3))
    f = lambda limit: nn.dot_product_attention(q, k, v, mask_mod=lambda b, h, i, j: j <= limit[i]).sum()
    np.testing.assert_array_equal(grad(f)(bnp.arange(40.0)), 0)


def test_bias_gradient():
    q, k, v = arrays(*inputs(2))
    bias = bnp.asarray(RNG.normal(size=(N, 1, S)), dtype="float64")
    g = grad(lambda b: nn.dot_product_attention(q, k, v, b).sum())(bias)
    assert g.shape == bias.shape and np.isfinite(np.asarray(g)).all()


def test_causal_looks_back_only():
    q, k, v = inputs(4)
    k2, v2 = k.copy(), v.copy()
    k2[:, 3:], v2[:, 3:] = 9.0, -9.0
    one = np.asarray(nn.dot_product_attention(*arrays(q, k, v), is_causal=True))
    two = np.asarray(nn.dot_product_attention(*arrays(q, k2, v2), is_causal=True))
    np.testing.assert_array_equal(one[:, :3], two[:, :3])
    assert not np.allclose(one[:, 3:], two[:, 3:])


def test_a_row_without_keys_is_finite():
    q, k, v = inputs(4, np.float32)
    nothing = np.zeros((T, S), bool)
    f = lambda q: nn.dot_product_attention(q, *arrays(k, v), mask=nothing)
    expected = np.broadcast_to(v.mean(1, keepdims=True), q.shape)
    np.testing.assert_allclose(np.asarray(f(*arrays(q))), expected, rtol=1e-5, atol=1e-6)
    # its scores are constant, so it has no gradient
    np.testing.assert_array_equal(np.asarray(grad(lambda q: f(q).sum())(*arrays(q))), 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    q, k, v = [bnp.asarray(x, dtype=dtype) for x in inputs(2)]
    found = nn.dot_product_attention(q * 8, k, v, is_causal=True)
    assert found.dtype == q.dtype
    wide = [np.asarray(x).astype(np.float64) for x in (q * 8, k, v)]
    np.testing.assert_allclose(
        np.asarray(found).astype(np.float64), reference(*wide, is_causal=True), rtol=2e-2, atol=2e-2
    )


BAD_SHAPES = {
    "axes": [(B, T, N, H), (S, N, H), (S, N, H)],
    "key and value differ": [(B, T, N, H), (B, S, N, H), (B, S + 1, N, H)],
    "a batch of 2": [(B, T, N, H), (B + 1, S, N, H), (B + 1, S, N, H)],
    "heads of 8 features": [(B, T, N, H), (B, S, N, H + 1), (B, S, N, H + 1)],
    "4 query heads cannot share 3": [(B, T, N, H), (B, S, 3, H), (B, S, 3, H)],
}


@pytest.mark.parametrize("why", BAD_SHAPES)
def test_shape_errors(why):
    with pytest.raises(errors.ShapeError, match=why):
        nn.dot_product_attention(*[bnp.zeros(s) for s in BAD_SHAPES[why]])


def test_other_errors():
    q, k, v = arrays(*inputs(4, np.float32))
    with pytest.raises(errors.DtypeError, match="one floating dtype"):
        nn.dot_product_attention(q, k, v.astype("float16"))
    with pytest.raises(errors.DtypeError, match="mask must be of booleans"):
        nn.dot_product_attention(q, k, v, mask=bnp.zeros((T, S)))
    with pytest.raises(
        errors.ShapeError, match=r"mask of shape \(7, 5\) does not broadcast to \(2, 4, 5, 7\)"
    ):
        nn.dot_product_attention(q, k, v, mask=np.ones((S, T), bool))
    with pytest.raises(errors.ShapeError, match="bias"):
        nn.dot_product_attention(q, k, v, bias=bnp.zeros((3, T, S)))


@pytest.mark.peer
@pytest.mark.parametrize("name, K", [("causal", 4), ("mask", 2), ("all", 4), ("all", 2)])
def test_against_jax(name, K):
    jax = pytest.importorskip("jax")
    options = {k: x.astype(np.float32) if k == "bias" else x for k, x in MASKS[name].items()}
    theirs = {k: np.array(x, ndmin=4) if k in ("bias", "mask") else x for k, x in options.items()}
    q, k, v = inputs(K, np.float32)

    @jax.jit
    def peer(q, k, v):
        f = lambda *x: jax.nn.dot_product_attention(*x, **theirs)
        return f(q, k, v), jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2))(q, k, v)

    expected, slopes = peer(q, k, v)
    found = nn.dot_product_attention(*arrays(q, k, v), **options)
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=2e-6)
    grads = grad(lambda *x: (nn.dot_product_attention(*x, **options) ** 2).sum(), (0, 1, 2))(*arrays(q, k, v))
    for a, b in zip(grads, slopes):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)
