"""Attention written by hand: what is recognised, what is not and why, and that it stays the same function."""

import math

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, nn, tree
from blufunc.config import config
from blufunc.core import dtypes
from blufunc.core.array import from_numpy
from blufunc.core.jaxpr import subjaxprs
from blufunc.kernels.cuda_draft import Draft
from tests.kernels import fake_cuda

B, T, N, H = 2, 40, 3, 16
BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
BTNH, BNTH, NTH, TH = (B, T, N, H), (B, N, T, H), (N, T, H), (T, H)
NOTE = "recognised as attention at test_attention_recognised.py"


def planned(f, *args, arch="sm_90a"):
    """The plan of a function under jit on a device that is not there."""
    traced = bf.jit(f).trace(*args)
    return Draft(traced.jaxpr, (False,) * len(traced.jaxpr.invars), arch).schedule


def calls(made):
    """The equations of a plan that are attention, by name."""
    return {e.prim.name: e for e in equations(made.jaxpr) if e.prim.name.startswith("attention")}


def equations(jaxpr):
    """All equations, those of loops among them, but not what operations are defined as."""
    for e in jaxpr.eqns:
        yield e
        if e.prim.kind != "call":
            for inner in subjaxprs(e.params):
                yield from equations(inner)


def weights_in(made, size):
    """Whether an array of so many elements, or more, is made anywhere in a plan."""
    return any(v.aval.size >= size for e in equations(made.jaxpr) for v in e.outvars)


def avals(*shapes, dtype=BF16):
    return [bf.ShapeDtypeStruct(s, dtype) for s in shapes]


def normal(*shapes, dtype=BF16, seed=0):
    rng = np.random.default_rng((seed, *shapes[0]))
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


def as_loss(attend):
    """A scalar of attention, of which no cotangent is alike another."""

    def loss(*args):
        out = attend(*args).astype("float32")
        return (out * bnp.cos(bnp.arange(out.size, dtype="float32")).reshape(out.shape)).sum()

    return loss


# -- what people write -----------------------------------------------------------------------------

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
    "by minus tril": (by_minus_tril, NTH, True),
}
"""For each way to write attention: the function, the shape of its operands, and whether it is causal."""


@pytest.mark.parametrize("name", FORMS)
def test_is_recognised(name):
    f, shape, causal = FORMS[name]
    made = planned(f, *avals(shape, shape, shape))
    (call,) = calls(made).values()
    assert call.params["is_causal"] == causal and "mods" not in call.params
    assert not weights_in(made, T * T * math.prod(shape) // (T * H))
    assert [NOTE in n for n in made.notes] == [True]


@pytest.mark.parametrize("name", FORMS)
def test_is_recognised_under_grad(name):
    f, shape, _ = FORMS[name]
    made = planned(bf.grad(as_loss(f), (0, 1, 2)), *avals(shape, shape, shape))
    assert sorted(calls(made)) == ["attention", "attention_grad"]
    assert not weights_in(made, T * T * math.prod(shape) // (T * H))


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
    """On the device, where operations are computed as they are defined, and as it was written."""
    f, shape, _ = FORMS[name]
    args = normal(shape, shape, shape)
    both = bf.jit(lambda *xs: (f(*xs), bf.grad(as_loss(f), (0, 1, 2))(*xs)))
    got = both(*[from_numpy(x, cuda) for x in args])
    close(got, both(*map(bnp.asarray, args)), 3e-2)
