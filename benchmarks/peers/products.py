"""Matmul rates of a library: the reference for device utilization.

    python -m benchmarks.peers.products --library torch --precisions bf16,tf32,fp32

A square matmul, and every matmul of GPT-2's step by its own shape: forward, gradient of the input, and gradient of the
weight; "count" is its number in a step. Attention matmuls are excluded. Times are from the wall clock over back-to-back
calls in all libraries: each call takes long compared with its host cost.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.peers import clock, gpt2

SQUARE = 8192
BLOCK = 1 << 24
FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "x @ w": lambda x, w: x @ w,
    "x @ w.T": lambda x, w: x @ w.T,
    "x.T @ y": lambda x, y: x.T @ y,
}


def main() -> None:
    """Emit one row per matmul and precision."""
    parser = gpt2.parser()
    parser.add_argument("--library", choices=["blufunc", "jax", "torch"], required=True)
    parser.add_argument("--precisions", type=lambda text: text.split(","), required=True)
    parser.add_argument("--square", type=int, default=SQUARE)
    o = parser.parse_args()
    clock.emit_versions(o.library)
    prepare = {"blufunc": _blufunc, "jax": _jax, "torch": _torch}[o.library]
    for precision in o.precisions:
        library = prepare(o.platform, precision)
        for case in cases(o):
            clock.attempt(case.product, functools.partial(time_product, case, precision, *library))


@dataclass(frozen=True)
class Case:
    """A matmul: role, form, operand shapes, count in a step (0 for the square)."""

    what: str
    form: str
    x: tuple[int, int]
    y: tuple[int, int]
    count: int

    @property
    def product(self) -> str:
        """Label of its row."""
        return f"{self.what} {self.form}"

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return 2 * self.x[0] * self.x[1] * self.y[0 if self.form == "x @ w.T" else 1]


def time_product(case: Case, precision: str, put: Callable, compiled: Callable, wait: Callable) -> None:
    """Emit the row of a matmul."""
    rng = np.random.default_rng(0)
    args = [put(*block(shape, rng)) for shape in (case.x, case.y)]
    f = compiled(FORMS[case.form])
    ms = clock.wall_ms(lambda _: f(*args), wait, budget=0.2)
    clock.emit(
        product=case.product, precision=precision, ms=ms, TFLOP_s=case.flops / ms / 1e9, count=case.count
    )


def cases(o: argparse.Namespace) -> Iterator[Case]:
    """The square matmul and the matmuls of a step."""
    yield Case("square", "x @ w", (o.square, o.square), (o.square, o.square), 0)
    M, C, V = o.batch * o.context, o.width, o.vocab
    for what, inputs, outputs in (("qkv", C, 3 * C), ("out", C, C), ("up", C, 4 * C), ("down", 4 * C, C)):
        yield Case(what, "x @ w", (M, inputs), (inputs, outputs), o.layers)
        yield Case(what, "x @ w.T", (M, outputs), (inputs, outputs), o.layers)
        yield Case(what, "x.T @ y", (M, inputs), (M, outputs), o.layers)
    yield Case("logits", "x @ w.T", (M, C), (V, C), 1)  # the weight is that of the embedding
    yield Case("logits", "x @ w", (M, V), (V, C), 1)
    yield Case("logits", "x.T @ y", (M, V), (M, C), 1)


def block(shape: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Random rows and the repetition count that fills the shape; saves host memory."""
    rows, repeats = shape[0], 1
    while rows % 2 == 0 and rows * shape[1] > BLOCK:
        rows, repeats = rows // 2, repeats * 2
    return rng.standard_normal((rows, shape[1]), dtype=np.float32), repeats


def _blufunc(platform: str, precision: str) -> tuple:
    import blufunc as bf
    import blufunc.numpy as bnp

    bf.config.update("matmul_precision", "tf32" if precision == "tf32" else "default")
    low = bnp.bfloat16 if precision == "bf16" else bnp.float32
    fill = bf.jit(lambda x, n: bnp.tile(x.astype(low), (n, 1)), static_argnums=1)
    put = lambda rows, n: fill(bf.device_put(rows, bf.devices(platform)[0]), n)
    return put, lambda f: bf.jit(lambda x, y: f(x, y)), bf.block_until_ready


def _jax(platform: str, precision: str) -> tuple:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["JAX_PLATFORMS"] = platform
    import jax
    import jax.numpy as jnp

    exact = {"fp32": "highest", "tf32": "tensorfloat32", "bf16": "default"}[precision]
    jax.config.update("jax_default_matmul_precision", exact)
    low = jnp.bfloat16 if precision == "bf16" else jnp.float32
    fill = jax.jit(lambda x, n: jnp.tile(x.astype(low), (n, 1)), static_argnums=1)
    return fill, lambda f: jax.jit(lambda x, y: f(x, y)), jax.block_until_ready


def _torch(platform: str, precision: str) -> tuple:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    low = torch.bfloat16 if precision == "bf16" else torch.float32

    def wait(_):
        if platform == "cuda":
            torch.cuda.synchronize()

    return lambda rows, n: torch.from_numpy(rows).to(platform).to(low).repeat(n, 1), lambda f: f, wait


if __name__ == "__main__":
    main()
