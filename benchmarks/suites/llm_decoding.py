"""Decoding of a Llama by ``examples/llm``, against ``transformers``.

    python -m benchmarks.suites.llm_decoding --platform cuda [--batch 1 8] [--alone]

Both read one folder of random bfloat16 weights in the shape of Llama 3.2 1B, and continue the same prompts greedily, as
a user would: ``generate.stream`` whose tokens are read one by one, and ``model.generate`` with a static cache and
``torch.compile``. The time per token is the difference between long and short continuations, divided by their tokens,
so reading of prompts is no part of it. A row also has the share of the device's bandwidth that weights and cache
amount to. Ahead of timing, logits of the prompts are compared. On a CPU: tiny sizes in float32, without
``torch.compile``.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.programs import device
from benchmarks.harness.timing import report, row
from benchmarks.suites.decoding import BANDWIDTH, TOLERANCE
from examples.llm.config import TINY, Config

LLAMA_1B = Config(
    "llama",
    vocab=128256,
    width=2048,
    layers=16,
    heads=32,
    key_heads=8,
    features=64,
    hidden=8192,
    context=131072,
    eps=1e-5,
    tied=True,
    rope=(
        ("factor", 32.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0),
        ("original_max_position_embeddings", 8192), ("rope_theta", 500000.0), ("rope_type", "llama3"),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Model and dtype; tokens of a prompt, a short and a long continuation."""

    config: Config
    dtype: str
    prompt: int
    short: int
    long: int


SIZES = {"cuda": Sizes(LLAMA_1B, "bfloat16", 64, 64, 320), "cpu": Sizes(TINY, "float32", 8, 8, 40)}

Continue = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""A function of prompts and a number of tokens, to the tokens."""


def bytes_per_token(sizes: Sizes, batch: int, nbytes: int) -> float:
    """Bytes of the weights, and on average of the visible part of the cache."""
    c = sizes.config
    position = 2 * c.layers * batch * c.key_heads * c.features * np.dtype(_dtype(sizes.dtype)).itemsize
    return nbytes + position * (sizes.prompt + (sizes.short + sizes.long) / 2)


def _dtype(name: str) -> Any:
    import ml_dtypes

    return getattr(ml_dtypes, name, name)


def seconds_per_token(run: Continue, prompts: Sequence[Sequence[int]], sizes: Sizes, repeats: int) -> float:
    """Median seconds of a step, after a call of each length that compiles."""

    def timed(n: int) -> float:
        begin = time.perf_counter()
        run(prompts, n)
        return time.perf_counter() - begin

    timed(sizes.short), timed(sizes.long)
    each = [timed(sizes.long) - timed(sizes.short) for _ in range(repeats)]
    return statistics.median(each) / (sizes.long - sizes.short)


def ours(folder: Path, sizes: Sizes) -> tuple[Continue, Callable, int]:
    """Continuation, logits of the last tokens, and bytes of the weights."""
    import blufunc as bf
    from examples.llm import generate, model, weights

    params, config = weights.load(folder)

    def run(prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
        slots = sizes.prompt + sizes.long  # one cache for both continuations: the same program
        return generate.generate(params, config, prompts, n, stop=(), slots=slots)

    logits = lambda prompts: np.asarray(
        bf.jit(model.forward, static_argnums=2)(params, np.asarray(prompts, np.int32), config)[:, -1]
    )
    return run, logits, sum(leaf.nbytes for leaf in bf.tree.leaves(params))


def theirs(folder: Path, platform: str) -> tuple[Continue, Callable]:
    """Continuation and logits of the last tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(platform).eval()
    batch = lambda prompts: torch.tensor(prompts, dtype=torch.long, device=platform)

    def run(prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
        with torch.no_grad():
            found = made.generate(
                batch(prompts), attention_mask=torch.ones_like(batch(prompts)), do_sample=False,
                min_new_tokens=n, max_new_tokens=n, cache_implementation="static" if platform == "cuda" else None,
            )  # fmt: skip
        return found[:, len(prompts[0]) :].tolist()

    def logits(prompts: Sequence[Sequence[int]]) -> np.ndarray:
        with torch.no_grad():
            return made(batch(prompts)).logits[:, -1].float().cpu().numpy()

    return run, logits


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu", help="cpu: tiny sizes")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="prompts (default: 1 8)")
    parser.add_argument("--repeats", type=int, default=5, help="timed pairs of calls of each side")
    parser.add_argument("--alone", action="store_true", help="measure blufunc only")
    options = parser.parse_args()

    import blufunc as bf
    from blufunc import random
    from examples.llm import model, weights

    cuda = options.platform == "cuda"
    if cuda:
        bf.config.update("default_device", "cuda")
    name = device()["name"] if cuda else ""
    bandwidth = next((rate for card, rate in BANDWIDTH.items() if card in name), 1e11)
    sizes = SIZES[options.platform]
    rows = []
    with tempfile.TemporaryDirectory(prefix="blufunc-bench-") as scratch:
        folder = Path(scratch) / "model"
        init = bf.jit(lambda key: model.init(key, sizes.config, sizes.dtype))
        weights.save(folder, init(random.key(0)), sizes.config)
        for batch in options.batch:
            made = compared(batch, folder, sizes, bandwidth, options)
            rows += [made] if made else []
    report("llm_decoding", rows, options.platform, name)


def compared(batch: int, folder: Path, sizes: Sizes, bandwidth: float, options: Any) -> dict | None:
    """The row of a batch, after printing a line per library."""
    prompts = np.random.default_rng(0).integers(3, sizes.config.vocab, (batch, sizes.prompt)).tolist()
    run, logits, nbytes = ours(folder, sizes)
    moved = bytes_per_token(sizes, batch, nbytes)

    def record(library: str, seconds: float) -> None:
        print(
            f"batch {batch}  {library:<13} {1e3 * seconds:8.3f} ms/step {batch / seconds:9.0f} tokens/s"
            f" {moved / seconds / 1e9:7.0f} GB/s {100 * moved / seconds / bandwidth:5.1f}% of bandwidth",
            flush=True,
        )

    mine = seconds_per_token(run, prompts, sizes, options.repeats)
    record("blufunc", mine)
    if options.alone:
        return None
    found, tokens = logits(prompts), run(prompts, sizes.short)
    del run, logits
    run, logits = theirs(folder, options.platform)
    expected = logits(prompts)
    worst = np.abs(found.astype(np.float32) - expected).max() / np.abs(expected).max()
    assert worst <= TOLERANCE, f"logits differ by {worst}"
    agree = np.mean(np.asarray(tokens) == np.asarray(run(prompts, sizes.short)))
    print(f"batch {batch}: {100 * agree:.1f}% of the tokens are those of transformers", flush=True)
    peer = seconds_per_token(run, prompts, sizes, options.repeats)
    record("transformers", peer)
    made = row(f"a token, batch {batch}", 1e3 * mine, 1e3 * peer, unit="ms", peer="transformers")
    return made | {"tokens_s": batch / mine, "share": moved / mine / bandwidth, "GB_token": moved / 1e9}


if __name__ == "__main__":
    main()
