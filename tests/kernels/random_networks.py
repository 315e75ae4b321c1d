"""Random training steps: gradients of layers with values saved for the backward.

As of ``random_graphs``, ``choose`` takes a sequence and returns one of its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import nn, random
from blufunc.core.arrays.array import from_numpy

ROWS, WIDTH = 96, 16

LAYERS: dict[str, Callable] = {
    "product": lambda x, before, weight, key: x @ weight,
    "wide": lambda x, before, weight, key: bnp.tanh(x @ bnp.concatenate([weight, weight], 1))[:, ::2],
    "tanh": lambda x, before, weight, key: bnp.tanh(x),
    "gelu": lambda x, before, weight, key: nn.gelu(x),
    "norm": lambda x, before, weight, key: (x - x.mean(-1, keepdims=True)) / (1 + x.std(-1, keepdims=True)),
    "softmax": lambda x, before, weight, key: nn.softmax(x) * 3,
    "residual": lambda x, before, weight, key: x + before,
    "gate": lambda x, before, weight, key: x * nn.sigmoid(before @ weight),
    "columns": lambda x, before, weight, key: x - x.mean(0),
    "transposed": lambda x, before, weight, key: (x.T @ x / ROWS @ x.T).T,
    "gather": lambda x, before, weight, key: x[bnp.arange(ROWS)[::-1]],
    "dropout": lambda x, before, weight, key: bnp.where(random.bernoulli(key, 0.8, x.shape), x / 0.8, 0),
    "sorted": lambda x, before, weight, key: bnp.sort(x, -1),
    "checkpoint": lambda x, before, weight, key: bf.checkpoint(lambda x, w: bnp.tanh(bnp.tanh(x @ w) @ w))(x, weight),
    "scanned": lambda x, before, weight, key: bnp.cumsum(x, 0) / ROWS,
}  # fmt: skip
"""Functions of a value, an earlier layer's value, a weight and a key, all [ROWS,
WIDTH].
"""


def network(names: Sequence[str]) -> Callable:
    """Loss and gradients of x [ROWS, WIDTH], a key, and [WIDTH, WIDTH] layer weights."""

    def loss(x, weights, key):
        values = [x]
        for i, name in enumerate(names):
            before = values[max(0, len(values) - 3)]
            values.append(LAYERS[name](values[-1], before, weights[i], random.fold_in(key, i)))
        return (values[-1] ** 2).mean()

    return lambda x, key, *weights: bf.value_and_grad(loss, argnums=(0, 1))(x, weights, key)


def arguments(n: int) -> list[Any]:
    """Arguments of a network of ``n`` layers."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    weights = (rng.normal(size=(n, WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
    return [from_numpy(x), random.key(n), *map(from_numpy, weights)]
