"""Shared by the GPT-2 programs: sizes, options, initial weights, tokens, timing.

Weights come from NumPy's generator, and tokens from there or from a file, so every library starts from the same values
and losses are comparable step by step. The recipe is plain AdamW: constant learning rate, no clipping, decay of all
parameters. A library is a ``Trainer``; ``run`` does what the options request: time steps, emit the losses of runs with
other data orders, or save the gradients of the first batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import clock

ADAMW = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
LEARNING_RATE = 6e-4
BATCHES = 4  # of tokens, used cyclically


@dataclass(frozen=True)
class Trainer:
    """Training program of one library.

    Attributes:
      start: puts the initial weights and a fresh optimizer state on the device, replacing the previous ones.
      load: puts batches of tokens, int32 [n, batch, context + 1], on the device.
      step: runs training step ``i``, with batch ``i`` modulo n, waits for it, and returns its loss.
      settle: waits for all device work of the steps, which may outlast their losses.
      gradients: the loss of the first batch and the gradients in the tree of ``weights``; does not train.
      after: further figures after the steps, such as peak memory.
    """

    start: Callable[[], None]
    load: Callable[[np.ndarray], None]
    step: Callable[[int], Any]
    settle: Callable[[], Any]
    gradients: Callable[[], tuple[float, Any]]
    after: Callable[[], dict]


def parser() -> argparse.ArgumentParser:
    """Options of all programs."""
    p = argparse.ArgumentParser()
    p.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="bf16")
    p.add_argument("--tokens", help="a file of NumPy with batches of tokens, instead of random ones")
    p.add_argument(
        "--orders", help="seeds such as 0,1: take the steps for each, with tokens in another order"
    )
    p.add_argument("--gradients", help="a file of NumPy for the gradients of the first batch; takes no steps")
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
    """Parameters nested as in ``examples/gpt/model.py``, float32 on the host.

    Matrices are [inputs, outputs].
    """
    rng, C = np.random.default_rng(0), o.width

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)

    def linear(inputs, outputs, *stack):
        return {"weight": normal(*stack, inputs, outputs), "bias": np.zeros((*stack, outputs), np.float32)}

    def norm():
        return {"scale": np.ones(C, np.float32), "bias": np.zeros(C, np.float32)}

    def network(*stack):
        return {"up": linear(C, 4 * C, *stack), "down": linear(4 * C, C, *stack)}

    def block():
        E = experts(o)
        mlp = {"experts": {"router": {"weight": normal(C, E)}, **network(E)}} if E else {"mlp": network()}
        return {
            "norm1": norm(),
            "attention": {"qkv": linear(C, 3 * C), "out": linear(C, C)},
            "norm2": norm(),
            **mlp,
        }

    return {
        "tokens": normal(o.vocab, C),
        "positions": normal(o.context, C),
        "blocks": [block() for _ in range(o.layers)],
        "norm": norm(),
    }


def experts(o: argparse.Namespace) -> int:
    """Experts in the place of each MLP, of which a token visits two; 0: one MLP."""
    return getattr(o, "experts", 0)  # an option of blufunc's program


def tokens(o: argparse.Namespace) -> np.ndarray:
    """Tokens [n, batch, context + 1], int32: of the file, or random for ``BATCHES``."""
    if o.tokens:
        found = np.load(o.tokens)
        if found.shape[1:] != (o.batch, o.context + 1) or found.max() >= o.vocab:
            raise ValueError(
                f"{o.tokens} has tokens {found.dtype}{list(found.shape)} up to {found.max()}; wanted are batches of "
                f"[{o.batch}, {o.context + 1}] below {o.vocab}"
            )
        return found
    rng = np.random.default_rng(1)
    return rng.integers(0, o.vocab, (BATCHES, o.batch, o.context + 1), dtype=np.int32)


def ordered(tokens: np.ndarray, seed: int) -> np.ndarray:
    """The same sequences in other batches, in an order given by the seed."""
    sequences = tokens.reshape(-1, tokens.shape[-1])
    return np.random.default_rng(seed).permutation(sequences).reshape(tokens.shape)


def run(o: argparse.Namespace, trainer: Trainer, leads: bool = True) -> None:
    """Run what the options request; the process that ``leads`` emits the rows."""
    batches = tokens(o)
    if o.orders:
        for seed in map(int, o.orders.split(",")):
            trainer.start()
            trainer.load(ordered(batches, seed))
            losses = [float(trainer.step(i)) for i in range(o.steps)]
            if leads:
                clock.emit(order=seed, last=losses[-1], losses=[round(x, 6) for x in losses])
        return
    trainer.start()
    trainer.load(batches)
    if o.gradients:
        loss, grads = trainer.gradients()
        np.savez(o.gradients, **named(grads))
        clock.emit(loss=float(loss))
    elif leads:
        measure(o, trainer)
    else:  # the steps of ``measure``
        for i in range(1 + o.warmup + o.steps):
            float(trainer.step(i))


def measure(o: argparse.Namespace, trainer: Trainer) -> None:
    """Run the steps and emit one row."""
    step = trainer.step
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
    clock.emit(**row, **trainer.after())


def named(values: Any, name: str = "") -> dict[str, np.ndarray]:
    """Leaves of a tree as NumPy arrays, by names like "blocks.0.mlp.up.weight"."""
    if isinstance(values, dict | list):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        parts = (named(v, f"{name}.{k}" if name else str(k)) for k, v in items)
        return {k: v for part in parts for k, v in part.items()}
    return {name: np.asarray(values)}


def process_age() -> float:
    """Seconds since this process began, imports included.

    On Linux: field 22 of proc_pid_stat(5).
    """
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def count(o: argparse.Namespace) -> int:
    """Number of parameters."""
    C = o.width
    return (o.vocab + o.context) * C + o.layers * (12 * C * C + 13 * C) + 2 * C


def model_flops(o: argparse.Namespace) -> float:
    """FLOPs of a step's matmuls: 6 per weight and token, and causal attention at half."""
    of_mlps = 16 if experts(o) else 8
    matrices = o.layers * (4 + of_mlps) * o.width**2 + o.vocab * o.width
    attention = (
        o.layers * 6 * o.width * o.context
    )  # 12 C T for both matmuls and both passes, halved by the mask
    return o.batch * o.context * (6.0 * matrices + attention)
