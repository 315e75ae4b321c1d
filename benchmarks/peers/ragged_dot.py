"""Matmuls of groups of rows: value and both gradients in one library.

    python -m benchmarks.peers.ragged_dot --library torch

In bfloat16, with sizes as in mixtures of experts. blufunc and JAX run ``lax.ragged_dot`` and ``ragged_dot_general``
under ``jit``, PyTorch its grouped GEMM (``_grouped_mm``). ``dense`` is one matmul of as many operations.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from benchmarks.peers import clock

CASES = {  # rows, terms, columns, groups
    "8 experts, 1024 to 4096": (16384, 1024, 4096, 8),
    "8 experts, 4096 to 1024": (16384, 4096, 1024, 8),
    "64 experts, 1024 to 512": (16384, 1024, 512, 64),
}
TINY = {"tiny": (256, 64, 128, 4)}

Timed = dict[str, Callable[[], Any]]


def sizes_of(m: int, groups: int, skewed: bool) -> np.ndarray:
    """Sizes of groups: equal, or by a power law in a random order, some of them 0."""
    if not skewed:
        return np.full(groups, m // groups, np.int32)
    rng = np.random.default_rng(0)
    shares = rng.permutation(np.arange(1, groups + 1) ** -1.0)
    shares[0] = 0
    sizes = np.floor(m * shares / shares.sum()).astype(np.int32)
    sizes[1] += m - sizes.sum()
    return sizes


def of_library(lib: Any, m: int, k: int, n: int, groups: int, sizes: np.ndarray) -> Timed:
    """The operations of blufunc or JAX."""
    jnp, lax = lib.numpy, lib.lax
    rng = np.random.default_rng(0)
    shapes = (m, k), (groups, k, n), (m, n)
    x, w, ct = (jnp.asarray(rng.standard_normal(s, np.float32)).astype(jnp.bfloat16) for s in shapes)
    sizes = jnp.asarray(sizes)
    summed = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    forward = lib.jit(lax.ragged_dot)
    left = lib.jit(lambda ct, w, sizes: lax.ragged_dot(ct, jnp.swapaxes(w, 1, 2), sizes))
    right = lib.jit(lambda x, ct, sizes: lax.ragged_dot_general(x, ct, sizes, summed))
    dense = lib.jit(lambda x, w: x @ w[0])
    return {
        "value": lambda: forward(x, w, sizes),
        "gradient of rows": lambda: left(ct, w, sizes),
        "gradient of matrices": lambda: right(x, ct, sizes),
        "dense": lambda: dense(x, w),
    }


def of_torch(m: int, k: int, n: int, groups: int, sizes: np.ndarray) -> Timed:
    """The operations of PyTorch."""
    import torch

    draw = lambda *shape: torch.randn(*shape, device="cuda").to(torch.bfloat16)
    x, w, ct = draw(m, k), draw(groups, k, n), draw(m, n)
    ends = torch.from_numpy(np.cumsum(sizes).astype(np.int32)).cuda()
    return {
        "value": lambda: torch._grouped_mm(x, w, offs=ends),
        "gradient of rows": lambda: torch._grouped_mm(ct, w.transpose(1, 2), offs=ends),
        "gradient of matrices": lambda: torch._grouped_mm(x.t(), ct, offs=ends),
        "dense": lambda: x @ w[0],
    }


def main() -> None:
    """Emit one row per operation."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=["blufunc", "jax", "torch"], required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of calls per operation")
    options = parser.parse_args()
    if options.library == "torch":
        import torch

        wait: Callable[[Any], Any] = lambda _: torch.cuda.synchronize()
        make: Callable[..., Timed] = of_torch
    else:
        if options.library == "blufunc":
            import blufunc as lib
        else:
            import jax as lib
        wait = lambda y: y.block_until_ready()
        make = lambda *case: of_library(lib, *case)
    clock.emit_versions("numpy", options.library)
    for name, (m, k, n, groups) in (TINY if options.tiny else CASES).items():
        for skewed in (False, True):
            calls = make(m, k, n, groups, sizes_of(m, groups, skewed))
            for what, call in calls.items():
                label = f"{name}, {'skewed' if skewed else 'balanced'}: {what}"
                timed = functools.partial(emit, label, call, wait, options.budget, 2 * m * k * n)
                clock.attempt(label, timed)


def emit(label: str, call: Callable[[], Any], wait: Any, budget: float, flops: int) -> None:
    """Time an operation and emit its row."""
    ms = clock.wall_ms(lambda _: call(), wait, budget)
    clock.emit(what=label, us=1e3 * ms, tflops=flops / ms / 1e9)


if __name__ == "__main__":
    main()
