"""Matmuls that compute few rows, and share them: which they are, and results."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, nn
from blufunc.kernels.backends.cuda.program import planned
from blufunc.kernels.ops.row_gemm import dot_rows_p
from blufunc.kernels.schedule import OpaqueStep
from tests.kernels.rewrites.test_gemm_epilogue import half

K, N = 512, 256
X, V, W, U, D = half(8, K), half(K), half(K, N), half(K, N), half(N, K)


def norm(x, v):
    wide = x.astype("float32")
    return (wide * lax.rsqrt(bnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype) * v


def block(x, v, w, u, d):
    h = norm(x, v)
    return x + (nn.silu(h @ w) * (h @ u)) @ d


def two_blocks(x, v, w, u, d):
    return norm(block(block(x, v, w, u, d), v, w, u, d), v) @ w


def of_batch(x, v, w):
    return norm(x.reshape(2, 4, K), v) @ w


PROGRAMS = {  # a function, its arguments, and (passes over rows or none, weights) of each step that is no kernel
    "a normalization": (lambda x, v, w: norm(x, v) @ w, (X, V, W), [(1, 1)]),
    "of a batch of tokens": (of_batch, (X, V, W), [(1, 1)]),
    "layer norm": (lambda x, v, w: nn.layer_norm(x, v, v) @ w, (X, V, W), [(2, 1)]),
    "what is elementwise": (lambda x, y, w: bnp.tanh(x + y) @ w, (X, X, W), [(0, 1)]),
    "SwiGLU": (lambda x, w, u: nn.silu(x @ w) * (x @ u), (X, W, U), [(None, 2)]),
    "SwiGLU of a token": (lambda x, w, u: nn.silu(x @ w) * (x @ u), (X[:1], W, U), [(None, 2)]),
    "transposed weights": (lambda x, w, u: nn.gelu(x @ w.T) * (x @ u.T), (X, D.T.copy().T, D), [(None, 2)]),
    "blocks": (two_blocks, (X, V, W, U, D), [(1, 2), None, (1, 2), None, (1, 1)]),
    "rows that are returned": (lambda x, v, w: [h := norm(x, v), h @ w], (X, V, W), [None]),
    "rows of a kernel": (lambda x, v, w: [y := bnp.cumsum(x, 0), norm(y, v) @ w], (X, V, W), [None]),
    "a normalization that others read": (lambda x, v, w: [h := norm(x, v), (h * 2) @ w], (X, V, W), [None]),
    "many rows": (lambda x, v, w: norm(x, v) @ w, (half(64, K), V, W), [None]),
    "weights of two layouts": (lambda x, w, d: nn.silu(x @ w) * (x @ d.T), (X, W, D), [None, None]),
    "a gate that is returned": (lambda x, w, u: [g := x @ w, nn.silu(g) * (x @ u)], (X, W, U), [(None, 2)]),
    "both with other readers": (lambda x, w, u: [g := x @ w, t := x @ u, nn.silu(g) * t], (X, W, U), [None, None]),
    "other rows": (lambda x, y, w, u: nn.silu(x @ w) * (y @ u), (X, half(8, K), W, U), [None, None]),
}  # fmt: skip


def steps_of(fun, args):
    jaxpr = bf.jit(fun).trace(*args).jaxpr
    return [
        s.eqn
        for s in planned(jaxpr, (False,) * len(jaxpr.invars), "sm_90a").steps
        if isinstance(s, OpaqueStep)
    ]


def described(eqn):
    if eqn.prim is not dot_rows_p:
        return None
    rows = eqn.params["rows"]
    return None if rows is None else len(rows.passes), eqn.params["weights"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_which_matmuls_compute_rows(name, fake, cuda):
    fun, args, expected = PROGRAMS[name]
    assert [described(e) for e in steps_of(fun, args)] == expected
    wide = lambda tree: [np.asarray(x).astype(np.float32) for x in bf.tree.leaves(tree)]
    got = wide(bf.jit(fun)(*(bf.device_put(a, cuda) for a in args)))
    for one, other in zip(got, wide(fun(*map(bnp.asarray, args))), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.03, atol=0.03 * np.abs(other).max())


SQUARE, WIDE = half(16, 16), half(16, 4096)
SQUARES = {  # numbers of each row, where rows are as long as there are rows
    "of rows": lambda x, v, w: bnp.tanh(x * v[:, None]) @ w,
    "of rows, reshaped": lambda x, v, w: (x * v.reshape(16, 1)) @ w,
    "of rows and along them": lambda x, v, w: bnp.tanh(x * v[:, None] + v) @ w,
    "sums of rows along the terms": lambda x, v, w: (x + bnp.sum(x * v, -1)) @ w,
}


@pytest.mark.parametrize("name", SQUARES)
def test_rows_as_long_as_there_are_rows(name, fake, cuda):
    fun, args = SQUARES[name], (SQUARE, half(16), WIDE)
    got = np.asarray(bf.jit(fun)(*(bf.device_put(a, cuda) for a in args))).astype(np.float32)
    want = np.asarray(fun(*map(bnp.asarray, args))).astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=0.03, atol=0.03 * np.abs(want).max())


def test_replaced_matmuls_are_left_alone():
    with bf.override(lax.dot_general_p, impl=lambda x, y, **params: np.full((8, N), 7, x.dtype)):
        assert all(e.prim is not dot_rows_p for e in steps_of(lambda x, v, w: norm(x, v) @ w, (X, V, W)))
