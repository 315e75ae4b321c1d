"""blufunc, PyTorch and JAX on a CUDA device.

    python -m benchmarks.suites.gpu [--only kernels,gpt2] [--out DIR]

``benchmarks/harness/programs.py`` runs the libraries one after the other; the results of each part are in
``DIR/gpu_PART.json``. The parts:

    copy     copy bandwidth of the device
    ops      cost of calls without arithmetic
    kernels  typical transformer kernels, by device time
    gpt2     GPT-2 124M's training step: ``benchmarks/suites/gpt2.py``
    small    the same for 6 layers of width 384, which is launch-bound
    repro    bitwise reproducibility of two runs from one key

``--libraries`` and ``--precisions`` select programs of a part, so that it can be split over several calls. ``--merge``
then keeps the rows of programs that are not run now, if they were measured on this device.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.programs import PEERS, Program, Record, add_options, chosen, device, names
from benchmarks.suites import gpt2
from benchmarks.suites.gpt2 import GPT2, SMALL, TINY

PARTS = ("copy", "ops", "kernels", "gpt2", "small", "repro")
KERNELS = {
    "blufunc": ("kernels", "--library", "blufunc"),
    "torch-eager": ("kernels_torch",),
    "torch-compile": ("kernels_torch", "--compile"),
    "jax": ("kernels", "--library", "jax"),
}
DISPATCH = {name: ("dispatch", "--library", name) for name in ("blufunc", "torch", "jax")}


def main() -> None:
    """Run the parts and print their tables."""
    options = _parser().parse_args()
    deadline = time.monotonic() + options.limit
    gpu = device()
    with tempfile.TemporaryDirectory(prefix="blufunc-bench-") as scratch:
        for part in options.only:
            planned = list(programs(part, options, Path(scratch)))
            facts = {"data": options.data} if part == "gpt2" else {}
            Record(part, gpu, options, planned, **facts).run_all(planned, deadline, Path(scratch))


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=f"The parts are {', '.join(PARTS)}."
    )
    p.add_argument("--only", type=names, default=list(PARTS), help="parts, with commas")
    p.add_argument("--kernel", default="", help="the kernels with this in their names")
    add_options(p, limit=3600)
    gpt2.add_training_options(p, tuning=0)
    return p


# ---------------------------------------------------------------------------------------------- what to run


def programs(part: str, options: argparse.Namespace, scratch: Path = Path()) -> Iterator[Program]:
    """Selected programs of a part; ``scratch``: the folder of their shared files."""
    if part == "gpt2":
        yield from gpt2.programs(options, scratch)
        return
    for program in _PROGRAMS[part](options):
        if part == "copy" or chosen(program.library, options.libraries):
            yield program


def _copy(o: argparse.Namespace) -> Iterator[Program]:
    if o.device == "cuda":
        yield Program("copy", PEERS + "copy_bandwidth", limit=120)


def _ops(o: argparse.Namespace) -> Iterator[Program]:
    for library, (module, *args) in DISPATCH.items():
        yield Program(library, PEERS + module, ("--platform", o.device, *args), limit=150)


def _kernels(o: argparse.Namespace) -> Iterator[Program]:
    extra = ["--platform", o.device, "--only", o.kernel, *(["--tiny"] if o.device == "cpu" else [])]
    for library, (module, *args) in KERNELS.items():
        yield Program(library, PEERS + module, (*args, *extra), limit=300)


def _small(o: argparse.Namespace) -> Iterator[Program]:
    yield from gpt2.trainers("small", o, skip={"torch-max-autotune"}, extra=[])


def _repro(o: argparse.Namespace) -> Iterator[Program]:
    tiny = o.device == "cpu"
    runs = [("6 layers of width 384", SMALL, "20"), ("GPT-2 124M", GPT2, "5")]
    for what, sizes, steps in [("tiny", TINY, "5")] if tiny else runs:
        size = [f"--{name}={value}" for name, value in sizes.items()]
        for precision in o.precisions:
            args = ("--precision", precision, *size, "--platform", o.device, "--steps", steps)
            for run in (1, 2):
                tags = {"what": what, "precision": precision, "run": run}
                yield Program(
                    "blufunc", PEERS + "gpt2_blufunc", (*args, "--hash", "--key", "0"), tags, cache="repro"
                )


_PROGRAMS = {
    "copy": _copy,
    "ops": _ops,
    "kernels": _kernels,
    "small": _small,
    "repro": _repro,
}

if __name__ == "__main__":
    main()
