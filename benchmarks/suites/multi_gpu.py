"""GPT-2 124M on several GPUs of one host in every layout, against PyTorch and JAX.

    python -m benchmarks.suites.multi_gpu --gpus 2
    python -m benchmarks.suites.multi_gpu --gpus 2 --layouts context,pipeline,experts --merge
    python -m benchmarks.suites.multi_gpu --gpus 2 --device cpu    # tiny sizes on simulated devices, to try it out

A step has 32 x 1024 tokens per GPU, so that rates are comparable: with "data", "fsdp", "zero1" and "zero2", each GPU
has its own 32 sequences; with "tensor", all GPUs share each of the N x 32. Three layouts have a step of their own
(``Work``): "context", 2 sequences of 16384 tokens, sharded over all GPUs; "pipeline", as many layers as its chunks
divide, N x 32 sequences in 4 N microbatches; "experts", 8 in the place of each MLP. Programs run one after the other
(``benchmarks/harness/programs.py``). blufunc runs in both forms: one process with all GPUs, and one process per GPU
under its launcher.

The efficiency of a row is its tokens/s over those of the same library on one GPU with a step of the same work, times
the number of GPUs. Losses are compared with those of blufunc on one GPU with the whole batch, in as many microbatches.
The bubble of a pipeline is that of its schedule's table.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.programs import PEERS, Program, Record, add_options, chosen, device, names
from benchmarks.suites.gpt2 import GPT2, TINY

OURS = PEERS + "gpt2_blufunc"
TORCH = PEERS + "gpt2_torch"
LAUNCHED = ("blufunc.parallel.launch", "-n", "{n}", "--engine", "{engine}", "-m", OURS)
TORCHRUN = ("torch.distributed.run", "--nproc-per-node={n}", "-m", TORCH)
ONE, EACH = "blufunc, one process", "blufunc, a process each"
OF_PIPELINE = {"1f1b": (), "interleaved": ("--chunks=2",), "zb-h1": ()}
TRAINERS = {  # layout, then the module and its options; {n} is the number of GPUs, {m} of microbatches
    ONE: ("data", OURS),
    EACH: ("data", *LAUNCHED),
    f"{ONE}, fsdp": ("fsdp", OURS, "--layout=fsdp"),
    f"{EACH}, fsdp": ("fsdp", *LAUNCHED, "--layout=fsdp"),
    f"{ONE}, tensor": ("tensor", OURS, "--layout=tensor"),
    f"{EACH}, tensor": ("tensor", *LAUNCHED, "--layout=tensor"),
    **{
        f"{ONE}, {layout}": (layout, OURS, f"--layout={layout}", "--microbatches={m}")
        for layout in ("zero1", "zero2")
    },
    **{
        f"{ONE}, context, {routing}": ("context", OURS, "--layout=context", f"--routing={routing}")
        for routing in ("ring", "all_gather", "all_to_all")
    },
    **{
        f"{ONE}, pipeline, {name}": (
            "pipeline", OURS, "--layout=pipeline", "--microbatches={m}", f"--schedule={name}", *chunks
        )
        for name, chunks in OF_PIPELINE.items()
    },
    f"{ONE}, experts": ("experts", OURS, "--layout=experts"),
    "torch-compile ddp": ("data", *TORCHRUN, "--parallel=ddp", "--compile"),
    "torch-compile fsdp2": ("fsdp", *TORCHRUN, "--parallel=fsdp", "--compile"),
    "torch-compile tensor": ("tensor", *TORCHRUN, "--parallel=tensor", "--compile"),
    "torch-compile zero1": ("zero1", *TORCHRUN, "--parallel=zero1", "--compile"),
    "torch-compile zero2": ("zero2", *TORCHRUN, "--parallel=zero2", "--compile"),
    "torch-eager context": ("context", *TORCHRUN, "--parallel=context"),
    "torch-compile context": ("context", *TORCHRUN, "--parallel=context", "--compile"),
    "jax": ("data", PEERS + "gpt2_jax"),
}  # fmt: skip
ALONE = {  # the same on one GPU
    "blufunc": (OURS,),
    "torch-compile": (TORCH, "--compile"),
    "jax": (PEERS + "gpt2_jax",),
}
SAME = "blufunc, one GPU, the whole batch"
"""One GPU with the whole batch: the reference for the losses of all layouts."""


@dataclass(frozen=True)
class Work:
    """The computation of a step, with its own reference and rates of one GPU.

    Attributes:
      options: of all programs, on one GPU and on several.
      alone: libraries on one GPU.
      whole: of the reference.
    """

    options: tuple[str, ...] = ()
    alone: tuple[str, ...] = ("blufunc",)
    whole: tuple[str, ...] = ()


LONG = 16384
"""Tokens of a sequence for context parallelism."""

USUAL = "gpt2"
"""The work of layouts that have none of their own."""


def works(n: int, sizes: dict[str, int]) -> dict[str, Work]:
    """The work of GPT-2, and of each layout with one of its own, on n GPUs."""
    parts = 2 * n  # chunks of layers of an interleaved pipeline
    layers = -(-sizes["layers"] // parts) * parts
    return {
        USUAL: Work(alone=tuple(ALONE), whole=(f"--microbatches={n}",)),
        "context": Work(
            ("--batch=2", f"--context={LONG if sizes is GPT2 else 2 * sizes['context']}"),
            alone=("blufunc", "torch-compile", "torch-eager"),
        ),
        "pipeline": Work((f"--layers={layers}",), whole=(f"--microbatches={n}",)),
        "experts": Work(("--experts=8",), whole=(f"--groups={n}",)),
    }


def main() -> None:
    """Run the programs and print their table."""
    options = _parser().parse_args()
    deadline = time.monotonic() + options.limit
    planned = list(programs(options))
    record = Record("multi", device(), options, planned, name=f"gpu_multi_{options.gpus}")
    with tempfile.TemporaryDirectory(prefix="blufunc-bench-") as scratch:
        record.run_all(planned, deadline, Path(scratch))


def programs(o: argparse.Namespace) -> Iterator[Program]:
    """For each work one GPU in each library, then several."""
    sizes = TINY if o.device == "cpu" else GPT2
    usual = [*(f"--{name}={value}" for name, value in sizes.items()), "--platform", o.device]
    usual += ["--precision", o.precision, "--warmup", str(o.warmup), "--steps", str(o.steps)]
    low = o.precision == "bf16" and o.device == "cuda"
    attention = {"jax": ["--attention", "cudnn" if low else "xla"]}
    found = works(o.gpus, sizes)
    for work, of in found.items():
        several = {
            library: program
            for library, program in TRAINERS.items()
            if (program[0] if program[0] in found else USUAL) == work
            and chosen(_name(library), o.libraries)
            and (not o.layouts or program[0] in o.layouts)
            and _fits(library, o, sizes)
        }
        if not several:
            continue
        tags = {"precision": o.precision, "layout": "one", "gpus": 1}
        tags |= {} if work == USUAL else {"work": work}
        alone = ALONE | {"torch-eager": (TORCH,)}
        for library in of.alone:
            if chosen(library, o.libraries):
                module, *args = alone[library]
                args = [*args, *attention.get(library, []), *usual, *of.options]
                yield Program(library, module, tuple(args), tags, limit=90, cache=library)
        if chosen("blufunc", o.libraries) and work != "context":  # which has the same batch on one GPU
            args = [*usual, *of.options, f"--batch={sizes['batch'] * o.gpus}", *of.whole]
            yield Program(SAME, OURS, tuple(args), tags, limit=90, cache="blufunc")
        for library, (layout, module, *args) in several.items():
            values = {"n": o.gpus, "m": _microbatches(layout, o, sizes)}
            values["engine"] = "mpi" if o.device == "cpu" else "nccl"
            filled = [a.format(**values) for a in args] + attention.get(library, []) + [*usual, *of.options]
            filled += [] if library.startswith("torch") else [f"--gpus={o.gpus}"]
            tags_here = {**tags, "layout": layout, "gpus": o.gpus}
            yield Program(library, module, tuple(filled), tags_here, limit=90, cache=_name(library))


def _name(library: str) -> str:
    return library.partition(",")[0].partition(" ")[0]


def _fits(library: str, o: argparse.Namespace, sizes: dict[str, int]) -> bool:
    """False for what divides heads unevenly, or has no kernel on a CPU."""
    if o.device == "cpu" and library.startswith("torch") and library.endswith("context"):
        return False
    return not sizes["heads"] % o.gpus or not library.endswith(("tensor", "all_to_all"))


def _microbatches(layout: str, o: argparse.Namespace, sizes: dict[str, int]) -> int:
    """Of a pipeline 4 for each GPU, otherwise 4, or as many as there are sequences."""
    return min(4 * o.gpus, o.gpus * sizes["batch"]) if layout == "pipeline" else min(4, sizes["batch"])


def _known() -> list[str]:
    return list(dict.fromkeys(layout for layout, *_ in TRAINERS.values()))


def _layouts(text: str) -> list[str]:
    found = names(text)
    if unknown := [name for name in found if name not in _known()]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no layout: {', '.join(_known())}")
    return found


def _several(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(p, limit=1800)
    p.add_argument("--gpus", type=_several, default=2)
    p.add_argument("--layouts", type=_layouts, default=[], help=f"{', '.join(_known())}; all by default")
    p.add_argument("--precision", choices=["bf16", "tf32", "fp32"], default="bf16")
    p.add_argument("--steps", type=int, default=20, help="timed steps")
    p.add_argument("--warmup", type=int, default=5, help="steps after the first that are not timed")
    return p


if __name__ == "__main__":
    main()
