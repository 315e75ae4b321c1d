"""Kernel cases shared by all libraries, with identical data.

Large operands repeat a block of random rows made by NumPy, so a program needs little host memory. Each library emits
the same few elements of its results, so results can be compared afterwards.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.suites.kernel_cases import gpt_shapes

ROWS_16K = {"layer norm": ((16384, 768), (16384, 4096)), "cross-entropy": ((8192, 50304), (16384, 128256))}
GELU = ((16, 1024, 3072), (16, 1024, 16384))
SUMS = ((16384, 768), (16384, 50304))
CASES: tuple[tuple[str, tuple[int, ...]], ...] = tuple(
    (name + suffix, shape)
    for name, shapes in ({"gelu": GELU} | ROWS_16K).items()
    for shape in shapes
    for suffix in ("", " and gradient" if name == "cross-entropy" else " backward")
) + tuple((name, shape) for shape in SUMS for name in ("sum of rows", "sum of columns"))
TINY = tuple(dict.fromkeys((name, (64, *(4 for _ in shape[1:-1]), 96)) for name, shape in CASES))

ADAMW = gpt_shapes(layers=12, width=768, vocab=50304, context=1024)  # GPT-2's 124M
ADAMW_TINY = gpt_shapes(layers=1, width=16, vocab=64, context=8)

BLOCK = 1 << 24
SAMPLES = 16


def cases(tiny: bool, only: str = "") -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes; ``only`` selects by a part of the name."""
    return [(name, shape) for name, shape in (TINY if tiny else CASES) if only in name]


def label(name: str, shape: tuple[int, ...]) -> str:
    """Label of a row."""
    return f"{name} {'x'.join(map(str, shape))}"


def adamw_label(shapes: dict) -> str:
    """Label of the row of AdamW."""
    return f"adamw, {sum(map(math.prod, shapes.values())) / 1e6:.0f}M parameters"


def block(shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, int]:
    """Random rows [rows / n, ...], and the repetition count n that fills ``shape``."""
    rows, repeats = shape[0], 1
    while rows % 2 == 0 and rows * math.prod(shape[1:]) > BLOCK:
        rows, repeats = rows // 2, repeats * 2
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, *shape[1:]), dtype=np.float32), repeats


def row(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random values of the last axis's length."""
    return np.random.default_rng(seed).standard_normal(shape[-1:], dtype=np.float32)


def labels(shape: tuple[int, ...]) -> np.ndarray:
    """A random class per row."""
    return np.random.default_rng(7).integers(0, shape[-1], shape[:-1], dtype=np.int32)


def sampled(size: int) -> np.ndarray:
    """Indices of the sampled elements of a result."""
    return np.unique(np.random.default_rng(11).integers(0, size, SAMPLES)).astype(np.int32)
