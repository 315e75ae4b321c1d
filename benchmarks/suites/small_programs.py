"""Small programs without loops, as one source for blufunc and JAX.

``programs(lib)`` gives, by name, a function and its arguments as NumPy arrays: what a newcomer, a test suite or a robot
runs. ``small.py`` times them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

Program = tuple[Callable, tuple]


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _spd(n: int, *batch: int) -> np.ndarray:
    m = _normal(*batch, n, n)
    return m @ np.swapaxes(m, -1, -2) + n * np.eye(n, dtype=np.float32)


def _ints(high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, high, shape).astype(np.int32)


def programs(lib: Any) -> dict[str, Program]:
    """All programs in a library."""
    return {**_elementwise(lib), **_rows(lib), **_indexed(lib), **_linear(lib), **_models(lib)}


def _elementwise(lib: Any) -> dict[str, Program]:
    np_, nn = lib.numpy, lib.nn
    v, m, big = _normal(1_000), _normal(64, 64), _normal(200, 200)
    one = np.float32(0.5)
    return {
        "add numbers": (lambda a, b: a + b, (one, one)),
        "polynomial of a number": (lambda x: 3 * x**3 - 2 * x**2 + x - 7, (one,)),
        "derivative of a number": (lib.grad(lambda x: np_.sin(x) * np_.exp(-x * x)), (one,)),
        "sin of 1,000": (np_.sin, (v,)),
        "chain of ten on 1,000": (
            lambda x: functools.reduce(lambda y, _: np_.tanh(y) * 1.1 + 0.1, range(10), x),
            (v,),
        ),
        "gelu of 64 x 64": (nn.gelu, (m,)),
        "swish and its gradient": (lib.grad(lambda x: nn.swish(x).sum()), (m,)),
        "clip and scale 200 x 200": (lambda x: np_.clip(x * 2 + 1, -1, 1), (big,)),
        "compare and choose": (lambda x: np_.where(x > 0, x, 0.01 * x), (big,)),
        "outer difference": (lambda x: x[:, None] - x[None, :], (v[:100],)),
        "broadcast a bias": (lambda x, b: x + b, (m, v[:64])),
        "to half and back": (lambda x: x.astype(np_.bfloat16).astype(np_.float32) * 2, (big,)),
        "integers": (lambda x: (x * 7 + 3) % 11, (_ints(100, 1_000),)),
        "complex modulus": (lambda x: np_.abs(x * (1 + 2j)), (v,)),
        "hessian of six": (lib.hessian(lambda x: (np_.sin(x) * x[::-1]).sum() ** 2), (v[:6],)),
    }


def _rows(lib: Any) -> dict[str, Program]:
    np_, nn = lib.numpy, lib.nn
    v, m, big = _normal(1_000), _normal(64, 64), _normal(200, 200)
    return {
        "sum of 1,000": (lambda x: x.sum(), (v,)),
        "mean of rows": (lambda x: x.mean(1), (big,)),
        "variance of columns": (lambda x: x.var(0), (big,)),
        "maximum and its place": (lambda x: (x.max(1), x.argmax(1)), (big,)),
        "softmax 64 x 64": (lambda x: nn.softmax(x, axis=-1), (m,)),
        "logsumexp and its gradient": (lib.grad(lambda x: nn.logsumexp(x, axis=-1).sum()), (m,)),
        "layer norm": (
            lambda x: (x - x.mean(-1, keepdims=True)) / np_.sqrt(x.var(-1, keepdims=True) + 1e-5),
            (big,),
        ),
        "norms of three": (lambda x: np_.sqrt((x * x).sum(-1)), (_normal(1_000, 3),)),
        "distances": (lambda x: ((x[:, None] - x[None]) ** 2).sum(-1), (_normal(100, 3),)),
        "cumsum of rows": (lambda x: np_.cumsum(x, 1), (big,)),
        "cumulative maximum": (lambda x: lib.lax.cummax(x, axis=0), (v,)),
        "sort 1,000": (np_.sort, (v,)),
        "argsort rows": (lambda x: np_.argsort(x, 1), (big,)),
        "top 5 of rows": (lambda x: lib.lax.top_k(x, 5), (big,)),
        "median": (np_.median, (v,)),
        "any and all": (lambda x: ((x > 3).any(), (x < 9).all(1)), (big,)),
    }


def _indexed(lib: Any) -> dict[str, Program]:
    np_, nn, lax = lib.numpy, lib.nn, lib.lax
    v, m, big = _normal(1_000), _normal(64, 64), _normal(200, 200)
    rows = _ints(200, 64)
    return {
        "rows of a table": (lambda x, i: x[i], (big, rows)),
        "gradient of a table": (lib.grad(lambda x, i: (x[i] ** 2).sum()), (big, rows)),
        "add into bins": (lambda i, x: np_.zeros(50).at[i].add(x), (_ints(50, 1_000), v)),
        "set rows": (lambda x, i: x.at[i].set(0.0), (big, rows)),
        "one-hot": (lambda i: nn.one_hot(i, 32), (_ints(32, 200),)),
        "take along axis": (lambda x, i: np_.take_along_axis(x, i, 1), (big, _ints(200, 200, 3))),
        "update a slice": (lambda x, u: lax.dynamic_update_slice(x, u, (3, 4)), (big, m)),
        "concatenate and split": (lambda x, y: np_.split(np_.concatenate([x, y], 1), 4, 1), (m, m)),
        "transpose and flatten": (lambda x: x.T.reshape(-1)[::3], (big,)),
        "pad and roll": (lambda x: np_.roll(np_.pad(x, 2), 3, 1), (m,)),
        "search sorted": (lambda x, y: np_.searchsorted(x, y), (np.sort(v), v[:100])),
        "histogram by segments": (lambda x, i: lib.ops.segment_sum(x, i, 16), (v, _ints(16, 1_000))),
        "random normal": (lambda k: lib.random.normal(lib.random.key(k), (1_000,)), (np.int32(3),)),
        "permutation": (lambda k: lib.random.permutation(lib.random.key(k), 200), (np.int32(3),)),
    }


def _linear(lib: Any) -> dict[str, Program]:
    np_, linalg = lib.numpy, lib.numpy.linalg
    v, m, big = _normal(64), _normal(64, 64), _normal(200, 200)
    return {
        "matmul 64": (lambda a, b: a @ b, (m, m)),
        "matrix times vector": (lambda a, x: a @ x, (big, _normal(200))),
        "batch of 4 x 4": (lambda a, b: a @ b, (_normal(100, 4, 4), _normal(100, 4, 4))),
        "einsum of three": (lambda a, b, x: np_.einsum("ij,jk,k->i", a, b, x), (m, m, v)),
        "solve 20": (linalg.solve, (_spd(20), _normal(20))),
        "solve 50 of 3": (linalg.solve, (_spd(3, 50), _normal(50, 3, 1))),
        "inverse of 10": (linalg.inv, (_spd(10),)),
        "determinant of 10": (linalg.det, (_spd(10),)),
        "cholesky of 30": (linalg.cholesky, (_spd(30),)),
        "eigenvalues of 20": (linalg.eigvalsh, (_spd(20),)),
        "svd of 20 x 10": (lambda x: linalg.svd(x, full_matrices=False), (_normal(20, 10),)),
        "fft of 1,024": (np_.fft.fft, (_normal(1_024),)),
        "real fft of rows": (np_.fft.rfft, (_normal(32, 256),)),
        "convolve 1,000 by 31": (lambda x, k: np_.convolve(x, k), (_normal(1_000), _normal(31))),
    }


def _models(lib: Any) -> dict[str, Program]:
    np_, nn, lax = lib.numpy, lib.nn, lib.lax

    def mlp(params, x):
        for w, b in params[:-1]:
            x = nn.relu(x @ w + b)
        w, b = params[-1]
        return x @ w + b

    sizes = (8, 64, 64, 4)
    params = [(_normal(m, n) / math.sqrt(m), np.zeros(n, np.float32)) for m, n in itertools.pairwise(sizes)]
    x, y = _normal(32, 8), _ints(4, 32)

    def loss(params, x, y):
        return -np_.take_along_axis(nn.log_softmax(mlp(params, x)), y[:, None], 1).mean()

    def step(params, x, y):
        return lib.tree.map(lambda p, g: p - 0.1 * g, params, lib.grad(loss)(params, x, y))

    def attention(q, k, v):
        scores = np_.einsum("bqhd,bkhd->bhqk", q, k) / 4
        return np_.einsum("bhqk,bkhd->bqhd", nn.softmax(scores, axis=-1), v)

    heads = _normal(2, 16, 4, 16)
    image, kernel = _normal(1, 16, 16, 8), _normal(3, 3, 8, 8) / 9
    conv = lambda x, k: lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    pool = lambda x: lax.reduce_window(x, -np_.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return {
        "policy of one observation": (mlp, (params, x[0])),
        "mlp of a batch": (mlp, (params, x)),
        "loss and gradient": (lib.value_and_grad(loss), (params, x, y)),
        "training step": (step, (params, x, y)),
        "attention 2 x 16 x 4 x 16": (attention, (heads, heads, heads)),
        "gradient of attention": (lib.grad(lambda q, k, v: attention(q, k, v).sum()), (heads, heads, heads)),
        "convolution 16 x 16 x 8": (conv, (image, kernel)),
        "gradient of a convolution": (
            lib.grad(lambda x, k: (conv(x, k) ** 2).sum(), (0, 1)),
            (image, kernel),
        ),
        "max pool": (pool, (image,)),
        "jacobian of an mlp": (lib.jacfwd(lambda x: mlp(params, x)), (x[0],)),
        "per-example gradients": (lib.vmap(lib.grad(loss), (None, 0, 0)), (params, x[:, None], y[:, None])),
    }
