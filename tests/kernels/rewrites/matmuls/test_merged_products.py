"""Sums of matmuls as one, and matmuls that share an operand."""

import dataclasses

import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, nn, tree
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.programs.simplify import inline_bodies, simplify
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.backends.cuda.program import TARGET
from blufunc.kernels.rewrites.matmuls.merged_products import with_merged_products
from tests.kernels.backends.cuda.test_program import on, program_of, uniform
from tests.kernels.rewrites.test_gemm_epilogue import half
from tests.kernels.rewrites.test_packed_outputs import same

BF16, F32 = dtypes.bfloat16, dtypes.float32
T, D, H, HEAD = 32, 64, 64, 16
X = half(2, T, D) / 4
WQ, WK, WV = (uniform(D, n, seed=s) / 8 for s, n in enumerate((H, H // 2, H // 2)))
GQ, GK, GV = (half(2, T, n, seed=s + 5) for s, n in enumerate((H, H // 2, H // 2)))
ANGLES = uniform(T, HEAD // 2)
LOW = [w.astype(BF16) for w in (WQ, WK, WV)]


EAGER = dataclasses.replace(TARGET, machine=dataclasses.replace(TARGET.machine, launch=0.0))
"""A device where concatenations of a few elements cost nothing."""


def program(fun, *args, target=EAGER):
    """The jaxpr that the pass meets, and what it makes of it."""
    origins = {}
    jaxpr = inline_bodies(simplify(bf.jit(fun).trace(*args).jaxpr), lambda e: False, origins)[0]
    return jaxpr, with_merged_products(jaxpr, origins, target)


def matmuls(jaxpr):
    """The shapes of the results of all matmuls."""
    return [e.outvars[0].aval.shape for e in jaxpr.eqns if e.prim.name == "dot_general"]


def of_inputs(x, wq, wk, wv, gq, gk, gv):
    """The gradient of what three weights are multiplied by."""
    weights = [w.astype(BF16) for w in (wq, wk, wv)]
    q, k, v = (bnp.tanh(g) @ w.T for g, w in zip((gq, gk, gv), weights, strict=True))
    return q + k + v


def by_heads(g, w):
    return lax.dot_general(g, w, (((2, 3), (1, 2)), ((), ())))


def rotate(x, angles):
    """Pairs of features, the halves of a head, turned by angles."""
    a, b = bnp.split(x.astype(F32), 2, -1)
    cos, sin = bnp.cos(angles)[:, None], bnp.sin(angles)[:, None]
    return bnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(BF16)


def rotated_back(g, angles, heads):
    """The gradient of a rotary embedding, whose transposes pad and add."""
    g = g.reshape(2, T, heads, -1)
    return bf.vjp(lambda x: rotate(x, angles), g)[1](g)[0].reshape(2, T, -1)


def layer(x, *args):
    """Three matmuls, and the gradients of weights and inputs by computed cotangents."""
    weights, gs = args[:3], args[3:]
    out, back = bf.vjp(lambda x, *ws: [x @ w.astype(BF16) for w in ws], x, *weights)
    return [bnp.tanh(y) for y in out], back([bnp.tanh(g) for g in gs])


ALL = X, WQ, WK, WV, GQ, GK, GV
OUT, GRADS, WHOLE = (2, T, D), (D, 2 * H), (2, T, 2 * H)
MERGED = {  # with the shapes of the matmuls that are left
    "a sum": (of_inputs, ALL, [OUT]),
    "forward and backward": (layer, ALL, [WHOLE, GRADS, OUT]),
    "weights in bfloat16": (layer, (X, *LOW, GQ, GK, GV), [WHOLE, GRADS, OUT]),
    "in float32": (layer, [a.astype(F32) for a in ALL], [WHOLE, GRADS, OUT]),
    "two terms, and a residual": (
        lambda r, w, v, g, h: r + (bnp.tanh(g) @ w.astype(BF16).T + bnp.tanh(h) @ v.astype(BF16).T),
        (X, WQ, WK, GQ, GK),
        [OUT],
    ),
    "cotangents of heads": (
        lambda w, v, g, h: by_heads(bnp.tanh(g), w.astype(BF16)) + by_heads(bnp.tanh(h), v.astype(BF16)),
        (WQ.reshape(D, 4, 16), WK.reshape(D, 2, 16), GQ.reshape(2, T, 4, 16), GK.reshape(2, T, 2, 16)),
        [OUT],
    ),
    "a rotary embedding": (
        lambda w, v, g, h, angles: (
            rotated_back(g, angles, 4) @ w.astype(BF16).T + rotated_back(h, angles, 2) @ v.astype(BF16).T
        ),
        (WQ, WK, GQ, GK, ANGLES),
        [OUT],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MERGED)
def test_are_one_matmul(name):
    fun, args, shapes = MERGED[name]
    before, after = program(fun, *args)
    assert sorted(matmuls(after)) == sorted(shapes)
    flat = tree.leaves(args)
    same(eval_jaxpr(after, flat), eval_jaxpr(before, flat), 1e-5 if name == "in float32" else 2e-2)


def twice(g, w, v):
    a = bnp.tanh(g) @ w.T
    return a + bnp.sin(g) @ v.T, a


def in_turn(x, w, v):
    """The second term needs the first one's cotangent to go through another matmul."""
    first = bnp.tanh(x)
    return first @ w.T + bnp.tanh(lax.cumsum(first @ v.T, 1)) @ v.T


SQUARE = half(D, D, seed=1)
APART = {
    "a term with another reader": (twice, (GQ, LOW[0], half(D, H))),
    "no sum": (lambda x, w, v: (x @ w, x @ v), (X, LOW[0], LOW[1])),
    "a token of decoding": (
        lambda x, *ws: [x @ w for w in ws], (half(1, 1, D), *LOW)
    ),
    "batches": (
        lambda x, y, w, v: bnp.tanh(x) @ w + bnp.tanh(y) @ v, (X, X[::-1], half(2, D, H), half(2, D, H, seed=2))
    ),
    "other dtypes": (
        lambda x, y, w, v: (bnp.tanh(x) @ w).astype(F32) + bnp.tanh(y) @ v, (X, X.astype(F32), LOW[1], WV)
    ),
    "sums in float32 of bfloat16": (
        lambda x, w, v: (
            bnp.matmul(bnp.tanh(x), w, preferred_element_type=F32)
            + bnp.matmul(bnp.sin(x), v, preferred_element_type=F32)
        ),
        (X, SQUARE, LOW[0]),
    ),
    "other precisions": (
        lambda x, w, v: bnp.matmul(bnp.tanh(x), w, precision="highest") + bnp.matmul(bnp.sin(x), v, precision="tf32"),
        (X.astype(F32), WQ, WQ + 1),
    ),
    "other axes": (
        lambda x, w, v: bnp.tanh(x) @ w + lax.dot_general(bnp.sin(x), v, (((2,), (1,)), ((), ()))),
        (X, SQUARE, half(D, D, seed=2)),
    ),
    "one weight": (lambda x, w: bnp.tanh(x) @ w + bnp.sin(x) @ w, (X, SQUARE)),
    "a term that waits for another matmul": (in_turn, (X, SQUARE, half(D, D, seed=2))),
    "parts that are not aligned": (
        lambda x, y, w, v: bnp.tanh(x) @ w + bnp.tanh(y) @ v, (X[..., :7], X[..., :5], LOW[0][:7], LOW[0][:5])
    ),
    "operands that a matmul computes": (
        lambda x, u, w, v: bnp.tanh(x @ u) @ w + bnp.sin(x @ u) @ v, (X, SQUARE, LOW[0], half(D, H, seed=2))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_other_programs_stay(name):
    fun, args = APART[name]
    before, after = program(fun, *args)
    assert after is before


FEW = [half(64, 64, seed=n) for n in range(4)]
LARGE = [bf.ShapeDtypeStruct(shape, BF16) for shape in [(1 << 18, 64)] * 2 + [(64, 64)] * 2]
COSTS = {
    "copies of large operands": (lambda x, y, w, v: x @ w + y @ v, LARGE, False),
    "large operands that a kernel computes": (
        lambda x, y, w, v: bnp.tanh(x) @ w + bnp.tanh(y) @ v,
        LARGE,
        True,
    ),
    "small matrices": (
        lambda x, y, w, v: bnp.tanh(x) @ w + bnp.tanh(y) @ v,
        FEW,
        False,
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_what_pays(name):
    fun, args, pays = COSTS[name]
    before, after = program(fun, *args, target=TARGET)
    assert (after is not before) is pays


def test_devices_without_a_model_merge_nothing():
    jaxpr, _ = program(of_inputs, *ALL)
    assert with_merged_products(jaxpr, {}, dataclasses.replace(TARGET, matmul_seconds=None)) is jaxpr


def attention_step(x, g, angles, *ws):
    """Rotary embeddings and attention with shared heads, and the gradients."""

    def f(x, *ws):
        q, k, v = ((x @ w.astype(BF16)).reshape(2, T, -1, HEAD) for w in ws)
        y = nn.dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        return y.reshape(2, T, -1)

    y, back = bf.vjp(f, x, *ws)
    return y, back(g)


def test_a_layer_on_a_device(cuda, monkeypatch):
    """One matmul for the gradients of weights, one for that of inputs.

    The values are kept for the backward pass, and a slice would keep queries and keys as well: so the forward pass has
    three, of slices of one array of weights.
    """
    args = X, GQ, ANGLES, WQ, WK, WV

    def run():
        step = bf.jit(lambda *args: attention_step(*args))
        made = program_of(step, *on(cuda, *args)).schedule
        eqns = [s.eqn for s in made.steps if hasattr(s, "eqn")]
        shapes = [e.outvars[0].aval.shape for e in eqns if e.prim.name.startswith("dot_general")]
        return sorted(shapes), len(made.steps) - len(eqns), step(*on(cuda, *args))

    shapes, kernels, got = run()
    forward = [(2, T, H), (2, T, H // 2), (2, T, H // 2)]
    assert shapes == sorted([*forward, GRADS, OUT])
    monkeypatch.setattr(cuda_program, "TARGET", dataclasses.replace(TARGET, matmul_seconds=None))
    apart, more, want = run()
    assert apart == sorted([*forward, (D, H), *[(D, H // 2)] * 2, *[OUT] * 3])
    assert kernels <= more
    same(got, want, 2e-2)


TIMES = {  # rows, columns, terms; the time of the merged matmul by that of its terms, at least and at most
    "terms that fill the SMs": ((8192, 8192, 8192), 2, (0.97, 1.01)),
    "short contractions": ((8192, 2048, 512), 2, (0.6, 0.9)),
    "few tiles": ((2048, 512, 8192), 1, (0.4, 0.6)),
}


@pytest.mark.parametrize("name", TIMES)
def test_the_model_of_a_matmul(name):
    """``axis``: of rows, columns and terms, the one that doubles."""
    sizes, axis, (least, most) = TIMES[name]
    whole = [n * (1 + (d == axis)) for d, n in enumerate(sizes)]
    one, both = (seconds_of(*s) for s in (sizes, whole))
    assert least < both / (2 * one) < most


def seconds_of(m, n, k):
    x, w = (bf.ShapeDtypeStruct(s, BF16) for s in ((m, k), (k, n)))
    (eqn,) = bf.jit(lambda x, w: x @ w).trace(x, w).jaxpr.eqns
    return cuda_program.TARGET.matmul_seconds(eqn)
