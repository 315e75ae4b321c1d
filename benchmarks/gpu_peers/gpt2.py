"""What the GPT-2 programs of all libraries share: sizes, options, initial weights, tokens, and how steps are timed.

Weights and tokens come from NumPy's generator, so that every library starts from the same numbers and their losses
can be compared step by step. The recipe is plain: AdamW with a constant learning rate, no clipping, decay of all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_peers import clock

ADAMW = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
LEARNING_RATE = 6e-4
BATCHES = 4  # of tokens, taken in turns


def parser() -> argparse.ArgumentParser:
    """The options that all programs take."""
    p = argparse.ArgumentParser()
    p.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="bf16")
    p.add_argument("--platform", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--vocab", type=int, default=50304)
    p.add_argument("--steps", type=int, default=20, help="timed steps")
    p.add_argument("--warmup", type=int, default=5, help="steps after the first that are not timed")
    return p


def weights(o: argparse.Namespace) -> dict:
    """The parameters as ``examples/gpt/model.py`` nests them, float32 on the host. Matrices are [inputs, outputs]."""
    rng, C = np.random.default_rng(0), o.width

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)

    def linear(inputs, outputs):
        return {"weight": normal(inputs, outputs), "bias": np.zeros(outputs, np.float32)}

    def norm():
        return {"scale": np.ones(C, np.float32), "bias": np.zeros(C, np.float32)}

    def block():
        return {
            "norm1": norm(),
            "attention": {"qkv": linear(C, 3 * C), "out": linear(C, C)},
            "norm2": norm(),
            "mlp": {"up": linear(C, 4 * C), "down": linear(4 * C, C)},
        }

    return {
        "tokens": normal(o.vocab, C),
        "positions": normal(o.context, C),
        "blocks": [block() for _ in range(o.layers)],
        "norm": norm(),
    }


def tokens(o: argparse.Namespace) -> np.ndarray:
    """Random tokens [BATCHES, batch, context + 1], int32."""
    rng = np.random.default_rng(1)
    return rng.integers(0, o.vocab, (BATCHES, o.batch, o.context + 1), dtype=np.int32)


def measure(o: argparse.Namespace, step: Callable[[int], Any], after: Callable[[], dict]) -> None:
    """Take the steps and tell one row.

    Args:
      o: the options.
      step: takes training step ``i``, waits for it, and returns its loss.
      after: what else to tell when the steps are taken, such as the most memory there was.
    """
    begin = time.perf_counter()
    losses = [float(step(0))]
    first, since_start = time.perf_counter() - begin, process_age()
    losses += [float(step(i + 1)) for i in range(o.warmup)]
    times, later = [], []
    for i in range(o.steps):
        begin = time.perf_counter()
        later.append(float(step(1 + o.warmup + i)))
        times.append(time.perf_counter() - begin)
    row: dict[str, Any] = {"first_step_s": first, "start_to_first_loss_s": since_start}
    if times:
        s = statistics.median(times)
        row |= {"tokens_s": o.batch * o.context / s, "step_ms": 1e3 * s, "min_ms": 1e3 * min(times)}
        row |= {"TFLOP_s": model_flops(o) / s / 1e12, "losses": [round(x, 6) for x in losses + later]}
    clock.emit(**row, **after())


def take(o: argparse.Namespace, step: Callable[[int], Any]) -> None:
    """Take the steps that ``measure`` takes, and tell nothing: for the ranks that are not the first."""
    for i in range(1 + o.warmup + o.steps):
        float(step(i))


def process_age() -> float:
    """Seconds since this process began, imports and all (Linux: field 22 of proc_pid_stat(5))."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def count(o: argparse.Namespace) -> int:
    """The number of parameters."""
    C = o.width
    return (o.vocab + o.context) * C + o.layers * (12 * C * C + 13 * C) + 2 * C


def model_flops(o: argparse.Namespace) -> float:
    """Floating-point operations of a step's products: 6 for each weight and token, and causal attention at half."""
    matrices = o.layers * 12 * o.width**2 + o.vocab * o.width
    attention = (
        o.layers * 6 * o.width * o.context
    )  # 12 C T for both products and both passes, halved by the mask
    return o.batch * o.context * (6.0 * matrices + attention)
