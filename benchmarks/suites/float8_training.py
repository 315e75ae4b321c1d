"""Training in fp8 against bfloat16: the rate, and the loss over 300 steps.

    BLUFUNC_SAVE_RESULTS=1 python -m benchmarks.suites.float8_training --platform cuda

Options: ``--only bfloat16,tensor`` for some of the variants, ``--seeds 2`` for several orders of the data.

A model in the shape of Llama 3.2 1B, of fresh float32 weights, is trained by AdamW on windows of the Python standard
library's source, as bytes. All variants begin at the same weights and read the same batches: ``bf.autocast`` alone, and
its matmuls in fp8 with scales of tensors, rows and blocks, and with a history of 16 steps. The product with the
vocabulary is one operation with its own kernels and stays in bfloat16, and so does attention. Layers are recomputed in
the backward pass: both read as many operands again.

A row has the median of the last half of the steps, the mean loss of the last 20, the fp8 GEMMs of the plan, and the
planned peak. With several seeds of the data order, ``seed_noise`` says whether the curves of a variant and of bfloat16
differ by more than those of two orders. On a CPU: tiny sizes, where fp8 is emulated, to try the program itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import blufunc as bf
from benchmarks.harness.programs import device
from benchmarks.harness.timing import report
from benchmarks.suites import seed_noise
from benchmarks.suites.llm_decoding import LLAMA_1B
from blufunc import optim, random
from blufunc.nn.low_precision import DelayedFloat8, Float8, delayed_float8, float8
from examples.gpt import data
from examples.llm import model
from examples.llm.config import TINY, Config

LAST = 20
"""Steps whose losses are averaged."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model, windows of a batch, their tokens, steps, and the peak learning rate."""

    config: Config
    batch: int
    length: int
    steps: int
    rate: float


SIZES = {
    "cuda": Sizes(LLAMA_1B, 4, 2048, 300, 3e-4),
    "cpu": Sizes(dataclasses.replace(TINY, width=32, hidden=64, layers=1), 2, 32, 6, 1e-3),
}

Loss = Callable[..., Any]

VARIANTS: dict[str, Callable[[Loss], Any]] = {
    "bfloat16": bf.autocast,
    "tensor": lambda loss: float8(bf.autocast(loss)),
    "row": lambda loss: float8(bf.autocast(loss), Float8(scaling="row")),
    "block": lambda loss: float8(bf.autocast(loss), Float8(scaling="block", backward="float8_e4m3fn")),
    "delayed": lambda loss: delayed_float8(bf.autocast(loss)),
}


class Training:
    """A variant's step, and its state ahead of the first one.

    Attributes:
      step: (params, optimizer's state, histories, tokens) -> (the same three, loss).
      start: () -> the first three, of which ``bf.eval_shape`` has the types.
    """

    def __init__(self, name: str, sizes: Sizes):
        plain = lambda params, tokens: model.loss(params, tokens, sizes.config, recompute=True)
        loss = VARIANTS[name](plain)
        warm = optim.warmup_cosine_decay_schedule(0.0, sizes.rate, max(1, sizes.steps // 10), sizes.steps)
        optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(warm, weight_decay=0.01))
        has_history = isinstance(loss, DelayedFloat8)

        def start() -> tuple[Any, Any, Any]:
            params = model.init(random.key(0), sizes.config)
            return params, optimizer.init(params), loss.init(params, tokens_of(sizes)) if has_history else ()

        self.start = bf.jit(start)

        def step(params: Any, carried: Any, histories: Any, tokens: Any) -> tuple[Any, Any, Any, Any]:
            if has_history:
                value, (histories, grads) = bf.value_and_grad(loss, (0, 1))(histories, params, tokens)
            else:
                value, grads = bf.value_and_grad(loss)(params, tokens)
            updates, carried = optimizer.update(grads, carried, params)
            return optim.apply_updates(params, updates), carried, histories, value

        self.step = bf.jit(step, donate_argnums=(0, 1, 2))


def tokens_of(sizes: Sizes) -> Any:
    """The type of a batch."""
    return bf.ShapeDtypeStruct((sizes.batch, sizes.length + 1), "int32")


def planned(name: str, sizes: Sizes, platform: str) -> dict[str, Any]:
    """fp8 GEMMs and the peak of the plan; without a device, of one for an H100."""
    training = Training(name, sizes)
    where = {} if platform == "cuda" else {"device": "cuda:sm_90"}
    sight = bf.explain(training.step, *bf.eval_shape(training.start), tokens_of(sizes), **where)
    # steps of a kind are a line of the table, with their number
    lines = re.findall(r"^ *\d+ +(?:(\d+) +)?\(library\) +float8_dot ", str(sight), re.M)
    return {"fp8_gemms": sum(int(n or 1) for n in lines), "plan_GB": sight.memory.peak_bytes / 1e9}


def trained(name: str, sizes: Sizes, seed: int) -> tuple[list[float], float]:
    """Losses of a run, and the median seconds of a step in its last half."""
    training = Training(name, sizes)
    state = training.start()
    windows = data.windows(data.load(None), sizes.length, sizes.config.vocab, sizes.batch)[0]
    batches = data.Batches(windows, sizes.batch, seed)
    losses, seconds = [], []
    for i in range(sizes.steps):
        begin = time.perf_counter()
        *state, loss = training.step(*state, batches[i])
        losses.append(float(loss))
        seconds.append(time.perf_counter() - begin)
    return losses, statistics.median(seconds[sizes.steps // 2 :])


def rows_of(names: list[str], sizes: Sizes, seeds: int, platform: str) -> list[dict]:
    """A row for each variant."""
    rows, curves = [], {}
    for name in names:
        runs = [trained(name, sizes, seed) for seed in range(seeds)]
        curves[name] = {seed: losses for seed, (losses, _) in enumerate(runs)}
        seconds = min(s for _, s in runs)
        row: dict[str, Any] = {
            "variant": name,
            "ms": 1e3 * seconds,
            "tokens_s": sizes.batch * sizes.length / seconds,
            "first_loss": runs[0][0][0],
            "last_loss": float(np.mean([losses[-LAST:] for losses, _ in runs])),
            **planned(name, sizes, platform),
        }
        if rows and rows[0]["variant"] == "bfloat16":
            row["speedup"] = rows[0]["ms"] / row["ms"]
            row["loss_difference"] = row["last_loss"] - rows[0]["last_loss"]
            noise = seed_noise.compare(curves[name], curves["bfloat16"])
            if noise is not None:
                row |= {"within_noise": noise.within_noise, "mean": noise.mean, "spread": noise.spread_mean}
        shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print(shown, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Print the rows, and record them."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu", help="cpu: tiny sizes")
    parser.add_argument(
        "--only", default=",".join(VARIANTS), help="variants, comma-separated; bfloat16 first"
    )
    parser.add_argument("--seeds", type=int, default=1, help="orders of the data (default: 1)")
    parser.add_argument("--steps", type=int, help="default: 300; on a CPU 6")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(VARIANTS)}")
    if options.platform == "cuda":
        bf.config.update("default_device", "cuda")
    sizes = SIZES[options.platform]
    sizes = dataclasses.replace(sizes, steps=options.steps or sizes.steps)
    rows = rows_of(names, sizes, options.seeds, options.platform)
    report("float8_training", rows, options.platform, device()["name"] if options.platform == "cuda" else "")


if __name__ == "__main__":
    main()
