"""GPT-2 124M over several GPUs of one host, beside PyTorch and JAX: ``python -m benchmarks.multi_gpu --gpus 2``.

Each GPU has a batch of 32 x 1024. Every program runs in processes of its own, one after the other, and its rows come
as in ``gpu.py``. blufunc runs in both forms: one process with all GPUs, and a process for each under its launcher. The
efficiency of a row is its tokens a second over those of the same library on one GPU, times the number of GPUs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import gpu, gpu_tables
from benchmarks.gpu import GPT2, PROGRAMS, TINY, Program, Record
from benchmarks.peers import RESULTS

TRAINERS = {  # layout, then the module and its options; {n} is the number of GPUs
    "blufunc, one process": ("data", "benchmarks.gpu_peers.gpt2_blufunc", "--gpus={n}"),
    "blufunc, a process each": (
        "data", "blufunc.parallel.launch", "-n", "{n}", "--engine", "{engine}",
        "-m", PROGRAMS + "gpt2_blufunc", "--gpus={n}",
    ),
    "blufunc, one process, fsdp": ("fsdp", "benchmarks.gpu_peers.gpt2_blufunc", "--gpus={n}", "--layout=fsdp"),
    "blufunc, a process each, fsdp": (
        "fsdp", "blufunc.parallel.launch", "-n", "{n}", "--engine", "{engine}",
        "-m", PROGRAMS + "gpt2_blufunc", "--gpus={n}", "--layout=fsdp",
    ),
    "torch-compile ddp": (
        "data", "torch.distributed.run", "--nproc-per-node={n}", "-m", PROGRAMS + "gpt2_torch",
        "--parallel=ddp", "--compile",
    ),
    "torch-compile fsdp2": (
        "fsdp", "torch.distributed.run", "--nproc-per-node={n}", "-m", PROGRAMS + "gpt2_torch",
        "--parallel=fsdp", "--compile",
    ),
    "jax": ("data", PROGRAMS + "gpt2_jax", "--gpus={n}"),
}  # fmt: skip
ALONE = {  # the same on one GPU
    "blufunc": (PROGRAMS + "gpt2_blufunc",),
    "torch-compile": (PROGRAMS + "gpt2_torch", "--compile"),
    "jax": (PROGRAMS + "gpt2_jax",),
}
SAME = "blufunc, one GPU, the whole batch"
"""One GPU that computes what all of them do: whose losses theirs should have."""


def main() -> None:
    """Run the programs and print their table."""
    options = _parser().parse_args()
    deadline = time.monotonic() + options.limit
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    planned = list(programs(options))
    record = Record("multi", out / f"gpu_multi_{options.gpus}.json", gpu.device(), options, planned)
    with tempfile.TemporaryDirectory(prefix="blufunc-bench-") as scratch:
        for program in planned:
            record.run(program, deadline, Path(scratch))
    if record.contents["rows"]:
        print("\n" + gpu_tables.table(record.contents), flush=True)


def programs(o: argparse.Namespace) -> Iterator[Program]:
    """One GPU of each library, then several."""
    sizes = TINY if o.device == "cpu" else GPT2
    usual = [*(f"--{name}={value}" for name, value in sizes.items()), "--platform", o.device]
    usual += ["--precision", o.precision, "--warmup", "5", "--steps", str(o.steps)]
    here = lambda name: gpu.chosen(name.partition(",")[0].partition(" ")[0], o.libraries)
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
        yield Program(SAME, PROGRAMS + "gpt2_blufunc", (*usual, *whole), tags, limit=90, cache="blufunc")
    for library, (layout, module, *args) in TRAINERS.items():
        if not here(library) or (o.layouts and layout not in o.layouts):
            continue
        filled = [a.format(n=o.gpus, engine="mpi" if o.device == "cpu" else "nccl") for a in args]
        filled += attention.get(library, [])
        tags = {"precision": o.precision, "layout": layout, "gpus": o.gpus}
        cache = library.partition(",")[0].partition(" ")[0]
        yield Program(library, module, (*filled, *usual), tags, limit=90, cache=cache)


def _parser() -> argparse.ArgumentParser:
    names = lambda text: [name for name in text.split(",") if name]
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--gpus", type=int, default=2)
    p.add_argument("--libraries", type=names, default=[], help="blufunc, torch, jax; all by default")
    p.add_argument("--layouts", type=names, default=[], help="data, fsdp; all by default")
    p.add_argument("--precision", choices=["bf16", "tf32", "fp32"], default="bf16")
    p.add_argument("--steps", type=int, default=20, help="timed steps")
    p.add_argument("--out", default=str(RESULTS), help="the folder of the record")
    p.add_argument("--merge", action="store_true", help="keep rows that were measured on this device before")
    p.add_argument("--limit", type=float, default=1800, help="seconds for everything")
    p.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny sizes, to try this out"
    )
    p.add_argument(
        "--torch-python", default=gpu.sys.executable, help="an interpreter that has torch and NumPy"
    )
    return p


if __name__ == "__main__":
    main()
