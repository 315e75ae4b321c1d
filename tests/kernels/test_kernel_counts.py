"""Kernel counts of programs: the parts of models are one pass over memory.

A row with a higher count than one would wish says why.
Matmuls and other library calls are not kernels.
"""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, nn, random
from blufunc.core.arrays.array import from_numpy
from blufunc.kernels.schedule import OpaqueStep
from tests.kernels.differential import case, differences


def draw(*shape):
    return from_numpy(np.random.default_rng(shape).normal(size=shape).astype(np.float32))


ROWS, LANES = 70, 96
X, Y, G = draw(ROWS, LANES), draw(ROWS, LANES) + 1, draw(ROWS, LANES) * 2
LARGE = draw(700, 300)
SCALE, BIAS = draw(LANES), draw(LANES) + 1
LABELS = from_numpy(np.random.default_rng(0).integers(0, LANES, ROWS).astype(np.int32))
KEY = random.key(0)


def layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / bnp.sqrt(variance + 1e-5) * scale + bias


def rms_norm(x, scale):
    return x / bnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def cross_entropy(x, labels):
    return -bnp.take_along_axis(nn.log_softmax(x), labels[:, None], 1).mean()


def head_loss(x, weight, labels):
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "soft_cap": 20.0, "ignore_index": 0}
    return nn.linear_cross_entropy(x, weight, labels, reduction="sum", **options)


def dropout(key, x):
    return bnp.where(random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def adamw(p, g, m, v):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p - 1e-3 * (m / 0.9 / (bnp.sqrt(v / 0.99) + 1e-8) + 0.01 * p), m, v


def rotated(x):
    return bnp.concatenate([-x[:, 48:], x[:, :48]], -1) * SCALE + x * BIAS


def by_halves(x):
    """A rotary embedding of the halves of a head, with computed angles."""
    angles = bnp.arange(ROWS)[:, None] / 1e4 ** (bnp.arange(0, LANES, 2) / LANES)
    a, b = bnp.split(x.astype("float32"), 2, -1)
    cos, sin = bnp.cos(angles)[:, None], bnp.sin(angles)[:, None]
    return bnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def by_position(x, position):
    """The same of one token, at a position that is known when it runs."""
    angles = position / 1e4 ** (bnp.arange(0, LANES, 2) / LANES)
    a, b = bnp.split(x.astype("float32"), 2, -1)
    cos, sin = bnp.cos(angles), bnp.sin(angles)
    return bnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def by_rotated_half(x, cos, sin):
    wide = x.astype("float32")
    a, b = bnp.split(wide, 2, -1)
    return (wide * cos + bnp.concatenate([-b, a], -1) * sin).astype(x.dtype)


def interleaved(x, cos, sin):
    wide = x.astype("float32")
    a, b = wide[..., ::2], wide[..., 1::2]
    return bnp.stack([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def backward(fun):
    return lambda x, g, *rest: bf.vjp(lambda x: fun(x, *rest), x)[1](g)[0]


HEADS = draw(ROWS, 20, LANES).astype("bfloat16")
ANGLES = draw(ROWS, 1, LANES // 2)

COUNTS = {
    "softmax": (1, lambda x: nn.softmax(x), X),
    "softmax, backward": (1, lambda x, g: bf.vjp(nn.softmax, x)[1](g), X, G),
    "softmax of masked": (1, lambda x: nn.softmax(bnp.where(bnp.tril(bnp.ones(x.shape, bool)), x, -1e9)), X),
    "log_softmax": (1, lambda x: nn.log_softmax(x), X),
    "log_softmax, backward": (1, lambda x, g: bf.vjp(nn.log_softmax, x)[1](g), X, G),
    "layer norm": (1, layer_norm, X, SCALE, BIAS),
    "layer norm, backward": (1, lambda g, *a: bf.vjp(layer_norm, *a)[1](g), G, X, SCALE, BIAS),
    "RMS norm": (1, rms_norm, X, SCALE),
    "RMS norm, backward": (1, lambda g, *a: bf.vjp(rms_norm, *a)[1](g), G, X, SCALE),
    "GELU": (1, lambda x: nn.gelu(x), X),
    "GELU, exact": (1, lambda x: nn.gelu(x, approximate=False), X),
    "GELU, backward": (1, lambda x, g: bf.vjp(nn.gelu, x)[1](g), X, G),
    "bias and GELU after a product": (1, lambda x, w, b: nn.gelu(x @ w + b), X, draw(LANES, 32), draw(32)),
    "cross-entropy": (1, cross_entropy, X, LABELS),
    "cross-entropy with gradient": (1, bf.value_and_grad(cross_entropy), X, LABELS),
    "cross-entropy, gradient alone": (1, bf.grad(cross_entropy), X, LABELS),
    "cross-entropy of a product with all options, with gradient": (
        1,
        bf.value_and_grad(head_loss, (0, 1)),
        X,
        draw(40, LANES),
        LABELS % 40,
    ),
    "squares with gradient": (1, bf.value_and_grad(lambda x, y: ((x - y) ** 2).mean()), X, Y),
    "dropout": (1, dropout, KEY, X),
    "dropout, backward": (1, lambda k, x, g: bf.vjp(lambda x: dropout(k, x), x)[1](g), KEY, X, G),
    "normal numbers": (1, lambda k: random.normal(k, (ROWS, LANES)), KEY),
    "draws from logits": (1, lambda k, x: random.categorical(k, x), KEY, X),
    "AdamW": (1, adamw, X, G, Y, Y * Y),
    "sum": (1, lambda x: x.sum(), X),
    "sum of many": (1, lambda x: x.sum(), LARGE),
    "standard deviation": (1, lambda x: x.std(), X),
    "clipped by norm": (1, lambda x: x * bnp.minimum(1, 1 / bnp.sqrt((x * x).sum())), X),
    "accuracy": (1, lambda x, labels: (x.argmax(-1) == labels).mean(), X, LABELS),
    "variances of rows": (1, lambda x: x.var(1), X),
    "sums of columns": (1, lambda x: x.sum(0), X),
    "sums of rows and columns": (1, lambda x: (x.sum(0), x.sum(1)), X),
    "sums so far": (1, lambda x: bnp.tanh(bnp.cumsum(x * 2, -1)) * x, X),
    "sums so far, backward": (1, lambda x, g: bf.vjp(lambda x: bnp.cumsum(bnp.tanh(x), -1), x)[1](g), X, G),
    "softmax of sums so far": (1, lambda x: nn.softmax(bnp.cumsum(x * 2, -1)), X),
    "softmax of sums so far, too long to be kept": (1, lambda x: nn.softmax(bnp.cumsum(x)), draw(60_000)),
    "shares of a row so far": (1, lambda x: bnp.cumsum(x / x.sum(-1, keepdims=True), -1), X),
    "sums so far of sums from the end": (1, lambda x: lax.cumsum(lax.cumsum(x, 1, reverse=True), 1), X),
    "sums so far and sums of columns": (1, lambda x: (bnp.cumsum(x, -1), bnp.cumsum(x, -1).sum(0)), X),
    "sums down columns": (1, lambda x: bnp.tanh(bnp.cumsum(x * 2, 0)) * x, X),
    "extrema of sums down columns, and their sums": (1, lambda x: lax.cummax(bnp.cumsum(x, 0), 0).sum(0), X),
    # cosines and sines of angles are stored once, as all heads read them
    "rotary embedding": (3, by_halves, HEADS),
    "rotary embedding, backward": (3, backward(by_halves), HEADS, HEADS),
    "rotary embedding of a position": (2, by_position, HEADS, np.float32(3)),
    "rotary embedding by a rotated half": (
        1,
        by_rotated_half,
        HEADS,
        draw(ROWS, 1, LANES),
        draw(ROWS, 1, LANES),
    ),
    "rotary embedding by a rotated half, backward": (
        1,
        backward(by_rotated_half),
        HEADS,
        HEADS,
        draw(ROWS, 1, LANES),
        draw(ROWS, 1, LANES),
    ),
    "rotary embedding of interleaved pairs": (1, interleaved, HEADS, ANGLES, ANGLES),
    "rotary embedding of interleaved pairs, backward": (
        1,
        backward(interleaved),
        HEADS,
        interleaved(HEADS, ANGLES, ANGLES),
        ANGLES,
        ANGLES,
    ),
    "rows of a table that is rounded": (
        2,
        lambda e, i: e.astype("bfloat16")[i] * 2,
        draw(700, LANES),
        LABELS,
    ),
    # what chunks of a long row sum up to, and then their own sums
    "sums so far of a long row": (2, lambda x: bnp.tanh(bnp.cumsum(x * 2, -1)) * x, draw(2, 70_000)),
    "long sums so far, backward": (
        2,
        lambda x, g: bf.vjp(lambda x: bnp.cumsum(x * x), x)[1](g),
        *[draw(70_000)] * 2,
    ),
    # rows go one way in a kernel, and the lanes of a row that goes with others do not meet
    "sums down and up columns": (2, lambda x: lax.cumsum(x, 0) + lax.cumsum(x, 0, reverse=True), X),
    "softmax of sums down columns": (2, lambda x: nn.softmax(bnp.cumsum(x, 0)), X),
    # all lanes of a large array must have met before any can go on
    "standard deviation of many": (2, lambda x: x.std(), LARGE),
    "many, clipped by norm": (2, lambda x: x * bnp.minimum(1, 1 / bnp.sqrt((x * x).sum())), LARGE),
    # what the chunks of rows sum up to is added up at the end
    "sums of rows and columns of many": (2, lambda x: (x.sum(0), x.sum(1)), LARGE),
    # what is computed of the sums of columns takes a kernel of its own
    "means of columns": (2, lambda x: x.mean(0), X),
    "variances of columns": (4, lambda x: x.var(0), X),
    "logsumexp of columns": (4, lambda x: nn.logsumexp(x, 0), X),
    # what others read at other elements than their own is not computed once more there
    "halves exchanged": (2, rotated, X),
    "rows of a table": (2, lambda e, i: e[i] + 1, X, LABELS),
}


@pytest.mark.parametrize("name", [name for name in COUNTS if "rotary" in name or "rounded" in name])
def test_fused_copies_compute_the_same(name):
    _, fun, *args = COUNTS[name]
    c = case(fun, *args, name=name)
    assert not differences(c.interpreted(), c.expected(), exact=True)


@pytest.mark.parametrize("name", COUNTS)
def test_kernels(name):
    most, fun, *args = COUNTS[name]
    made = case(fun, *args, name=name).schedule
    assert len(made.kernels) <= most, str(made.fusion)


LIBRARY = {
    "a product": (["dot_general"], lambda x, w: nn.gelu(x @ w), X, draw(LANES, 32)),
    "products so far of one long row": (["cumprod"], lambda x: bnp.cumprod(x * 2), draw(70_000)),
    "sums down few long columns": (["cumsum"], lambda x: bnp.cumsum(x * 2, 0), draw(30_000, 3)),
    "complex sums so far": (["cumsum"], lambda x: bnp.cumsum(x + 1j, -1), X),
    "positions along columns": ([], lambda x: x.argmax(0), X),
    "gradient of a table": (["scatter_add"], lambda e, i: bf.grad(lambda e: (e[i] ** 2).sum())(e), X, LABELS),
    "random bits, splits and folds": ([], lambda k: random.uniform(random.fold_in(random.split(k)[1], 3), (9,)), KEY),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARY)
def test_what_libraries_do(name):
    """Opaque steps, and no kernel."""
    prims, fun, *args = LIBRARY[name]
    steps = case(fun, *args, name=name).schedule.steps
    assert [s.eqn.prim.name for s in steps if isinstance(s, OpaqueStep)] == prims


def test_what_is_moved_and_then_rounded_is_stored_so():
    """Kernels that only round would reread it; matmuls take strided operands in place."""

    def parts(x, w):
        a, b = bnp.tanh(x).reshape(ROWS, 2, -1).transpose(1, 0, 2)
        return (a.astype("bfloat16") @ w) @ b.astype("bfloat16").T

    made = case(parts, X, draw(LANES // 2, LANES // 2).astype("bfloat16"), name="parts").schedule
    (kernel,) = made.kernels
    assert [b.dtype.name for b in kernel.buffers] == ["float32", "bfloat16"]


def test_what_others_read_as_it_is_stays_so():
    def parts(x):
        y = bnp.tanh(x).reshape(-1)
        return y[:10].astype("bfloat16"), y[10:]

    (kernel, *_) = case(parts, X, name="parts").schedule.kernels
    assert all(b.dtype == np.float32 for b in kernel.buffers)


def test_why_equations_are_apart():
    """Fusion says what kept an equation out of the kernel of its operand."""
    fusion = case(lambda x: bnp.cumsum(x, 0)[::-1].sum(1) + x.sum(), LARGE, name="apart").schedule.fusion
    assert fusion.apart
    assert all(why for _, _, why in fusion.apart)
