"""GPT-2 124M on several GPUs of one host, against PyTorch and JAX.

    python -m benchmarks.suites.multi_gpu --gpus 2

A step has 32 x 1024 tokens per GPU in every layout, so that rates are comparable: with "data" and "fsdp", each GPU has
its own 32 sequences; with "tensor", all GPUs share each of the N x 32. Programs run one after the other
(``benchmarks/harness/programs.py``). blufunc runs in both forms: one process with all GPUs, and one process per GPU
under its launcher. The efficiency of a row is its tokens/s over those of the same library on one GPU, times the number
of GPUs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.programs import PEERS, Program, Record, add_options, chosen, device, names
from benchmarks.suites.gpt2 import GPT2, TINY

OURS = PEERS + "gpt2_blufunc"
LAUNCHED = ("blufunc.parallel.launch", "-n", "{n}", "--engine", "{engine}", "-m", OURS)
TORCHRUN = ("torch.distributed.run", "--nproc-per-node={n}", "-m", PEERS + "gpt2_torch")
TRAINERS = {  # layout, then the module and its options; {n} is the number of GPUs
    "blufunc, one process": ("data", OURS, "--gpus={n}"),
    "blufunc, a process each": ("data", *LAUNCHED, "--gpus={n}"),
    "blufunc, one process, fsdp": ("fsdp", OURS, "--gpus={n}", "--layout=fsdp"),
    "blufunc, a process each, fsdp": ("fsdp", *LAUNCHED, "--gpus={n}", "--layout=fsdp"),
    "blufunc, one process, tensor": ("tensor", OURS, "--gpus={n}", "--layout=tensor"),
    "blufunc, a process each, tensor": ("tensor", *LAUNCHED, "--gpus={n}", "--layout=tensor"),
    "torch-compile ddp": ("data", *TORCHRUN, "--parallel=ddp", "--compile"),
    "torch-compile fsdp2": ("fsdp", *TORCHRUN, "--parallel=fsdp", "--compile"),
    "jax": ("data", PEERS + "gpt2_jax", "--gpus={n}"),
}
ALONE = {  # the same on one GPU
    "blufunc": (OURS,),
    "torch-compile": (PEERS + "gpt2_torch", "--compile"),
    "jax": (PEERS + "gpt2_jax",),
}
SAME = "blufunc, one GPU, the whole batch"
"""One GPU with the whole batch: the reference for the losses of all layouts."""


def main() -> None:
    """Run the programs and print their table."""
    options = _parser().parse_args()
    deadline = time.monotonic() + options.limit
    planned = list(programs(options))
    record = Record("multi", device(), options, planned, name=f"gpu_multi_{options.gpus}")
    with tempfile.TemporaryDirectory(prefix="blufunc-bench-") as scratch:
        record.run_all(planned, deadline, Path(scratch))


def programs(o: argparse.Namespace) -> Iterator[Program]:
    """One GPU in each library, then several."""
    sizes = TINY if o.device == "cpu" else GPT2
    usual = [*(f"--{name}={value}" for name, value in sizes.items()), "--platform", o.device]
    usual += ["--precision", o.precision, "--warmup", "5", "--steps", str(o.steps)]
    here = lambda name: chosen(name.partition(",")[0].partition(" ")[0], o.libraries)
    low = o.precision == "bf16" and o.device == "cuda"
    attention = {"jax": ["--attention", "cudnn" if low else "xla"]}
    for library, (module, *args) in ALONE.items():
        if here(library):
            tags = {"precision": o.precision, "layout": "one", "gpus": 1}
            args += attention.get(library, [])
            yield Program(library, module, (*args, *usual), tags, limit=90, cache=library)
    whole = [f"--batch={sizes['batch'] * o.gpus}"]
    if here("blufunc"):
        tags = {"precision": o.precision, "layout": "one", "gpus": 1}
        yield Program(SAME, OURS, (*usual, *whole), tags, limit=90, cache="blufunc")
    for library, (layout, module, *args) in TRAINERS.items():
        if not here(library) or (o.layouts and layout not in o.layouts):
            continue
        filled = [a.format(n=o.gpus, engine="mpi" if o.device == "cpu" else "nccl") for a in args]
        filled += attention.get(library, [])
        tags = {"precision": o.precision, "layout": layout, "gpus": o.gpus}
        cache = library.partition(",")[0].partition(" ")[0]
        yield Program(library, module, (*filled, *usual), tags, limit=90, cache=cache)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(p, limit=1800)
    p.add_argument("--gpus", type=int, default=2)
    p.add_argument("--layouts", type=names, default=[], help="data, fsdp, tensor; all by default")
    p.add_argument("--precision", choices=["bf16", "tf32", "fp32"], default="bf16")
    p.add_argument("--steps", type=int, default=20, help="timed steps")
    return p


if __name__ == "__main__":
    main()
