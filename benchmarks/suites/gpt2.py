"""GPT-2 124M's training step in every library, in one table.

    python -m benchmarks.suites.gpt2 [--precisions bf16]

The same step in blufunc, PyTorch (eager, compiled, and compiled with max-autotune if that ends in time) and JAX (with
its best attention for the precision): the same initial weights and tokens, AdamW, 32 x 1024 tokens per step, matmuls in
the named precision. One process at a time uses the device; see ``benchmarks/harness/programs.py``.

Rates are medians after warm-up. Memory is the driver's figure for the device, in all libraries. The first step is timed
twice, the second time in a new process with the first one's caches on disk. Utilization is the model's FLOPs over the
matmul rates of this device in this run (``peers/products.py``): for each shape, the best of all libraries.

``--variants`` also runs blufunc with other settings: ``--variants default,chunk=4096,chunk=auto+recompute=1``, where
``+`` joins settings: ``chunk``, tokens of the loss at a time (0: all); ``recompute=1``, rematerialize each layer in the
backward pass; ``budget=9.7GB``, ``jit(memory_budget=)``; ``products=float32_tc`` and others, for fp32 only.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import text
from benchmarks.harness.programs import PEERS, SLOW, Program, Record, add_options, chosen, device, names

GPT2 = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "vocab": 50304, "batch": 32}
SMALL = {"layers": 6, "heads": 6, "width": 384, "context": 256, "vocab": 256, "batch": 16}
TINY = {"layers": 2, "heads": 2, "width": 64, "context": 32, "vocab": 256, "batch": 2}
STEPS = {
    "gpt2": ["--warmup", "5", "--steps", "20"],
    "small": ["--warmup", "100", "--steps", "400"],  # a second: until clocks are up
    "tiny": ["--warmup", "2", "--steps", "5"],
}
TRAINERS = {  # the module and its options
    "blufunc": ("gpt2_blufunc",),
    "torch-eager": ("gpt2_torch",),
    "torch-compile": ("gpt2_torch", "--compile"),
    "torch-reduce-overhead": ("gpt2_torch", "--compile", "--mode", "reduce-overhead"),
    "jax-cudnn": ("gpt2_jax", "--attention", "cudnn"),
    "jax-xla": ("gpt2_jax", "--attention", "xla"),
    "torch-max-autotune": ("gpt2_torch", "--compile", "--mode", "max-autotune"),
}
PRODUCTS = ("torch", "blufunc", "jax")
VARIANTS = {  # the fastest, and one that fits into 0.6 of the best peer's memory
    "bf16": ["default", "chunk=8192+budget=9.35GB"],
    "tf32": ["chunk=4096"],
    "fp32": ["default", "chunk=2048+products=float32_tc"],
}
BATCHES = 4  # of tokens, used cyclically
NEEDS = 30.0  # minimum seconds of a training program, start-up included
TUNING = 150.0  # the same with max-autotune


def main() -> None:
    """Run the programs and print their table."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, limit=3600)
    add_training_options(parser, tuning=420)
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit
    with tempfile.TemporaryDirectory(prefix="blufunc-bench-") as scratch:
        planned = list(programs(options, Path(scratch)))
        record = Record("gpt2", device(), options, planned, data=options.data)
        record.run_all(planned, deadline, Path(scratch))


def add_training_options(parser: argparse.ArgumentParser, tuning: float) -> None:
    """Options of training programs; ``tuning``: default limit of max-autotune."""
    parser.add_argument(
        "--precisions", type=names, default=["bf16", "tf32", "fp32"], help="of training steps"
    )
    parser.add_argument("--steps", type=int, help="timed training steps, if not the usual number")
    parser.add_argument(
        "--data", choices=["random", "text"], default="random", help="text: Python's own sources"
    )
    parser.add_argument("--variants", type=names, default=[], help="of blufunc: default,chunk=4096,...")
    parser.add_argument("--warm", choices=["blufunc", "all", "none"], default="all", help="who starts twice")
    parser.add_argument(
        "--autotune", type=float, default=tuning, help="seconds for torch-max-autotune; 0: without it"
    )


def programs(o: argparse.Namespace, scratch: Path) -> Iterator[Program]:
    """Programs of the table, the slowest last; ``scratch`` has their shared files."""
    sizes, extra = (TINY if o.device == "cpu" else GPT2), []
    if o.data == "text":
        path = scratch / "tokens.npy"
        shape = (BATCHES, sizes["batch"], sizes["context"] + 1)
        np.save(path, text.windows(BATCHES * sizes["batch"], sizes["context"] + 1).reshape(shape))
        extra = ["--tokens", str(path)]
    size = [f"--{name}={value}" for name, value in sizes.items()]
    for library in PRODUCTS:
        if not o.libraries or any(name.partition("-")[0] == library for name in o.libraries):
            wanted = ",".join(o.precisions)
            args = ["--library", library, "--platform", o.device, "--precisions", wanted, *size]
            args += ["--square", "64"] if o.device == "cpu" else []
            yield Program(library, PEERS + "products", tuple(args), {"products": wanted}, needs=20)
    found = list(trainers("gpt2", o, skip={"torch-reduce-overhead"}, extra=extra))
    yield from sorted(found, key=lambda p: p.library in SLOW)


def trainers(part: str, o: argparse.Namespace, skip: set[str], extra: list[str]) -> Iterator[Program]:
    """Training programs of a part, "gpt2" or "small", with ``extra`` arguments."""
    tiny = o.device == "cpu"
    sizes = TINY if tiny else {"gpt2": GPT2, "small": SMALL}[part]
    size = [f"--{name}={value}" for name, value in sizes.items()]
    steps = STEPS["tiny" if tiny else part] + ([f"--steps={o.steps}"] if o.steps is not None else [])
    for precision in o.precisions:
        for library, (module, *args) in TRAINERS.items():
            if library in skip or (library == "jax-cudnn" and (precision != "bf16" or tiny)):
                continue
            if library == "jax-xla" and precision == "bf16" and not tiny and "jax-xla" not in o.libraries:
                continue  # cuDNN's attention is faster there
            slow = library in SLOW
            if not (chosen(library, o.libraries) or (slow and o.autotune and chosen("torch", o.libraries))):
                continue
            limits = {"limit": o.autotune or 420.0, "needs": TUNING} if slow else {"needs": NEEDS}
            limits |= {"needs": 0.0} if tiny else {}
            for name, settings in variants(library, precision, o.variants):
                given = (*args, *settings, "--platform", o.device, "--precision", precision, *size, *extra)
                cache = f"{part}-{name}-{precision}".replace(" ", "-")
                tags = {"precision": precision}
                yield Program(name, PEERS + module, (*given, *steps), tags, cache=cache, **limits)
                if (o.warm == "all" and not slow) or o.warm == library:
                    warm_args, tags = (*given, "--warmup=0", "--steps=0"), tags | {"cache": "warm"}
                    yield Program(name, PEERS + module, warm_args, tags, cache=cache)


def variants(library: str, precision: str, wanted: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Names of a library's variants, with the program options of each."""
    if library != "blufunc":
        yield library, []
        return
    for variant in wanted or VARIANTS[precision]:
        settings = [] if variant == "default" else [f"--{setting}" for setting in variant.split("+")]
        if precision == "fp32" or not any(s.startswith("--products=") for s in settings):
            yield (f"blufunc {variant}" if settings else "blufunc"), settings


if __name__ == "__main__":
    main()
