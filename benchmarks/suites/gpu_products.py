"""float32 matmuls by each precision on a CUDA device.

    python -m benchmarks.suites.gpu_products [--only GPT]

For each shape and precision, one table lists the time of a program that multiplies two arrays and writes the result,
including operand splits and joins of sums (in a model, those are mostly parts of other kernels); its rate, and that
relative to IEEE arithmetic; the time of the matmuls alone; and the error of sampled elements against float64, relative
to the size of the results. A number after a precision is the accumulation chunk in terms.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import blufunc as bf
from benchmarks.peers import clock
from blufunc.kernels.precision import ALGORITHMS

SHAPES = {  # an einsum, and its sizes
    "GPT-2 projection": ("mk,kn->mn", {"m": 32768, "k": 768, "n": 768}),
    "GPT-2 up": ("mk,kn->mn", {"m": 32768, "k": 768, "n": 3072}),
    "GPT-2 down": ("mk,kn->mn", {"m": 32768, "k": 3072, "n": 768}),
    "GPT-2 gradient of up": ("km,kn->mn", {"m": 768, "k": 32768, "n": 3072}),
    "GPT-2 logits": ("mk,nk->mn", {"m": 8192, "k": 768, "n": 50304}),
    "GPT-2 gradient of logits": ("mk,kn->mn", {"m": 8192, "k": 50304, "n": 768}),
    "square": ("mk,kn->mn", {"m": 8192, "k": 8192, "n": 8192}),
}
TINY = {"tiny": ("mk,kn->mn", {"m": 64, "k": 1100, "n": 32})}
PRECISIONS: tuple[tuple[str, int | None], ...] = (
    ("highest", None), ("TF32_TF32_F32", None), ("F16_F16_F32_SCALED", None),
    ("F16_F16_F32_X3", 512), ("F16_F16_F32_X3", 256), ("F16_F16_F32_X3", 1024),
)  # fmt: skip
SAMPLE = 64
HEAD = "| product | precision | ms | TFLOP/s | of IEEE | products alone, ms | error |\n|---|---|---|---|---|---|---|"


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", help="shapes with this in their names")
    parser.add_argument("--tiny", action="store_true")
    o = parser.parse_args()
    device = bf.devices(o.platform)[0]
    print(f"{device}\n\n{HEAD}", flush=True)
    for name, (equation, sizes) in (TINY if o.tiny else SHAPES).items():
        if o.only in name:
            for row in rows(name, equation, sizes, device):
                print(row, flush=True)


def rows(name: str, equation: str, sizes: dict[str, int], device: Any) -> Iterator[str]:
    """The rows of one shape."""
    labels = equation.split("->")[0].split(",")
    x, y = (
        bf.jit(lambda key, shape=tuple(sizes[c] for c in part): bf.random.normal(key, shape))(
            bf.device_put(bf.random.key(i), device)
        )
        for i, part in enumerate(labels)
    )
    exact = sampled(equation, x, y)
    flops = 2 * sizes["m"] * sizes["k"] * sizes["n"]
    ieee = None
    for precision, chunk in PRECISIONS:
        with chunks_of(precision, chunk):
            compiled = (
                bf.jit(lambda x, y, p=precision: bf.numpy.einsum(equation, x, y, precision=p))
                .lower(x, y)
                .compile()
            )
            ms, products = time(compiled, x, y, device.platform)
        ieee = ieee or ms
        part = np.asarray(compiled(x, y)[:SAMPLE, :SAMPLE], np.float64)
        error = np.linalg.norm(part - exact) / np.linalg.norm(exact)
        label = f"{precision}, {chunk}" if chunk else precision
        yield (
            f"| {name} | {label} | {ms:.3f} | {flops / ms / 1e9:.0f} | {ieee / ms:.2f} | {products:.3f} | {error:.1e} |"
        )


def sampled(equation: str, x: Any, y: Any) -> np.ndarray:
    """First rows and columns of a matmul in float64."""
    labels = equation.split("->")[0].split(",")
    few = [
        np.asarray(v[tuple(slice(SAMPLE if c in "mn" else None) for c in part)], np.float64)
        for v, part in zip((x, y), labels, strict=True)
    ]
    return np.einsum(equation, *few, optimize=True)


def time(compiled: Any, x: Any, y: Any, platform: str) -> tuple[float, float]:
    """Milliseconds of the program, and of its matmul steps."""
    call = lambda i: compiled(x, y)
    if platform == "cuda":
        from blufunc.kernels.backends.cuda.driver import driver

        bf.block_until_ready(call(0))
        ms = clock.event_ms(call, driver.compute_stream(0), repeats=15)
    else:
        ms = clock.wall_ms(call, bf.block_until_ready)
    steps = compiled.program.timings([x.buffer, y.buffer], repeats=3)
    return ms, sum(s.ms for s in steps if s.name.startswith("dot_general"))


@contextlib.contextmanager
def chunks_of(precision: str, chunk: int | None) -> Iterator[None]:
    """Context: compiled programs accumulate an algorithm in chunks of this size."""
    usual = ALGORITHMS.get(precision)
    if usual is not None and chunk is not None:
        ALGORITHMS[precision] = replace(usual, chunk=chunk)
    try:
        yield
    finally:
        if usual is not None:
            ALGORITHMS[precision] = usual


if __name__ == "__main__":
    main()
