"""Kernels timed by the benchmarks, for either library, and their minimum traffic.

A kernel is a function of a few operands, named by role: ``x`` an array of the case's shape, ``ct`` another one (a
cotangent), ``row`` one of the shape of the last axis, ``labels`` one class per row. ``passes`` counts the reads and
writes of arrays of the case's shape. ``passes * bytes / bandwidth`` is a lower bound of the time of any implementation.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

ADAMW_PASSES = 7  # reads parameter, both moments and gradient; writes parameter and both moments


@dataclass(frozen=True)
class Kernel:
    """A function to time.

    Attributes:
      function: of the operands; to be passed to ``jit``.
      operands: their names.
      passes: number of arrays of the case's shape that it must read or write.
    """

    function: Callable
    operands: tuple[str, ...]
    passes: int

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes that a call with float32 operands must move."""
        return 4 * math.prod(shape) * self.passes


def kernels(lib: Any) -> dict[str, Kernel]:
    """The table of kernels; ``lib`` is one of the libraries below."""

    def gelu(x):
        return lib.nn.gelu(x, approximate=True)

    def xent(x, labels):
        return lib.nn.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    def backward(f):
        """Cotangents of all operands but the last one, the result's cotangent."""
        return lambda *args: lib.vjp(f, *args[:-1])[1](args[-1])

    layer_norm, softmax = lib.nn.layer_norm, lib.nn.softmax
    return {
        "gelu": Kernel(gelu, ("x",), 2),
        "gelu backward": Kernel(backward(gelu), ("x", "ct"), 3),
        "softmax": Kernel(softmax, ("x",), 2),
        "softmax backward": Kernel(backward(softmax), ("x", "ct"), 3),
        "layer norm": Kernel(layer_norm, ("x", "row", "row"), 2),
        "layer norm backward": Kernel(backward(layer_norm), ("x", "row", "row", "ct"), 3),
        "cross-entropy": Kernel(xent, ("x", "labels"), 1),
        "cross-entropy and gradient": Kernel(lib.value_and_grad(xent), ("x", "labels"), 2),
        "sum of rows": Kernel(lambda x: x.sum(-1), ("x",), 1),
        "sum of columns": Kernel(lambda x: x.sum(0), ("x",), 1),
    }


def adamw_update(lib: Any) -> tuple[Callable, Callable]:
    """AdamW as ``init(params)`` and a donating ``update(params, state, grads)``.

    ``update`` returns the new parameters and state.
    """
    optimizer = lib.optim.adamw(1e-3, b1=0.9, b2=0.95, weight_decay=0.1)

    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return lib.optim.apply_updates(params, updates), state

    return optimizer.init, lib.jit(update, donate_argnums=(0, 1))


def gpt_shapes(layers: int, width: int, vocab: int, context: int) -> dict:
    """Shapes of a GPT's parameters by name, for AdamW."""
    C = width
    matrices = {"qkv": (C, 3 * C), "out": (C, C), "up": (C, 4 * C), "down": (4 * C, C)}
    block = matrices | {f"{name}_bias": shape[1:] for name, shape in matrices.items()}
    block |= {f"norm{i}_{what}": (C,) for i in (1, 2) for what in ("scale", "bias")}
    ends = {"tokens": (vocab, C), "positions": (context, C), "norm_scale": (C,), "norm_bias": (C,)}
    return ends | {f"block{i}_{name}": shape for i in range(layers) for name, shape in block.items()}


def host_operand(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random operand of this name (see the module's docstring)."""
    if name == "labels":
        return rng.integers(0, shape[-1], shape[:-1], dtype=np.int32)
    return rng.standard_normal(shape[-1:] if name == "row" else shape, dtype=np.float32)


# ------------------------------------------------------------------------------------------- the libraries


def in_jax() -> types.SimpleNamespace:
    """JAX and optax, with the functions of ``nn`` that JAX names differently or lacks."""
    import jax
    import jax.numpy as jnp
    import optax

    from benchmarks.suites import gpt_in_jax

    nn = types.SimpleNamespace(**vars(gpt_in_jax.nn), softmax=jax.nn.softmax)
    return types.SimpleNamespace(
        name="jax",
        nn=nn,
        numpy=jnp,
        optim=optax,
        jit=jax.jit,
        vjp=jax.vjp,
        grad=jax.grad,
        value_and_grad=jax.value_and_grad,
        map=jax.tree.map,
        leaves=jax.tree.leaves,
        put=jax.device_put,
        wait=jax.block_until_ready,
    )


def in_blufunc(platform: str = "cpu") -> types.SimpleNamespace:
    """blufunc, with arrays on the first device of ``platform``."""
    import blufunc as bf

    device = bf.devices(platform)[0]
    return types.SimpleNamespace(
        name="blufunc",
        nn=bf.nn,
        numpy=bf.numpy,
        optim=bf.optim,
        jit=bf.jit,
        vjp=bf.vjp,
        grad=bf.grad,
        value_and_grad=bf.value_and_grad,
        map=bf.tree.map,
        leaves=bf.tree.leaves,
        put=lambda x: bf.device_put(x, device),
        wait=bf.block_until_ready,
    )
