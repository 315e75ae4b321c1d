"""Loss curves of blufunc and PyTorch, and errors against float64.

    python -m benchmarks.suites.gpt2_curves

*Curves*: 200 steps of GPT-2 124M on real text, from one start, in blufunc and PyTorch, with two or more data orders
each, in every precision. ``seed_noise.py`` decides whether two libraries' curves lie within seed noise.

*Gradients*: loss and gradients of one batch in a smaller model, in every precision and library, against PyTorch in
float64. Errors are relative: of the gradients as one vector of all parameters, and of the worst parameter.
float32-accurate matmuls should be as close as PyTorch's IEEE ones.

Results are in ``DIR/gpu_gpt2_curves.json``. ``--variants`` are those of ``benchmarks/suites/gpt2.py``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import text
from benchmarks.harness.programs import PEERS, Program, Record, add_options, chosen, device, names
from benchmarks.suites import gpt2

BATCH = 8  # of 1024 tokens: a quarter of the benchmark's, so that float32 has its 200 steps in time
SMALLER = {"layers": 2, "heads": 12, "width": 768, "context": 1024, "vocab": 8192, "batch": 4}
LIBRARIES = {
    "blufunc": ("gpt2_blufunc",),
    "torch-eager": ("gpt2_torch",),
    "torch-compile": ("gpt2_torch", "--compile"),
    "jax-xla": ("gpt2_jax", "--attention", "xla"),
}
USUAL = ["blufunc", "torch-eager"]
REFERENCE = "torch in float64"


def main() -> None:
    """Run the programs and print their tables."""
    o = _parser().parse_args()
    deadline = time.monotonic() + o.limit
    with tempfile.TemporaryDirectory(prefix="blufunc-bench-") as folder:
        scratch = Path(folder)
        near, far = list(gradients(o, scratch)), list(curves(o, scratch))
        record = Record("gpt2_curves", device(), o, near + far, steps=o.steps, batch=o.batch)
        for program in near:
            rows = record.run(program, deadline, scratch)
            beside_float64(program, rows, scratch)
            record.save()
        record.run_all(far, deadline, scratch)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(p, limit=3600)
    p.set_defaults(libraries=USUAL)
    p.add_argument("--only", type=names, default=["gradients", "curves"], help="gradients, curves")
    p.add_argument("--precisions", type=names, default=["bf16", "tf32", "fp32"])
    p.add_argument("--variants", type=names, default=[], help="of blufunc: default,chunk=4096,...")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--orders", default="0,1,2", help="seeds of the order of the data")
    p.add_argument("--batch", type=int, default=BATCH, help="sequences a step")
    return p


def gradients(o: argparse.Namespace, scratch: Path) -> Iterator[Program]:
    """Programs of the float64 reference and of every precision and library.

    Each writes a file of gradients to ``scratch``.
    """
    if "gradients" not in o.only:
        return
    sizes = gpt2.TINY if o.device == "cpu" else SMALLER
    usual = _usual(o, sizes, scratch / "few.npy", batches=1)
    where = lambda what, precision: ("--gradients", str(gradients_file(scratch, what, precision)))
    exact = (*usual, "--float64", "--precision", "fp32", *where(REFERENCE, "fp32"))
    yield Program(REFERENCE, PEERS + "gpt2_torch", exact, {"precision": "fp32", "what": "gradients"})
    for precision, name, module, args in _programs(o):
        tags = {"precision": precision, "what": "gradients"}
        yield Program(name, module, (*args, *usual, "--precision", precision, *where(name, precision)), tags)


def curves(o: argparse.Namespace, scratch: Path) -> Iterator[Program]:
    """Every precision and library, the fastest precisions first."""
    if "curves" not in o.only:
        return
    tiny = o.device == "cpu"
    sizes = gpt2.TINY if tiny else gpt2.GPT2 | {"batch": o.batch}
    usual = _usual(o, sizes, scratch / "tokens.npy", batches=o.steps)
    for precision, name, module, args in _programs(o):
        given = (*args, *usual, "--precision", precision, "--steps", str(o.steps), "--orders", o.orders)
        tags = {"precision": precision, "what": "curves"}
        needs = 0.0 if tiny else 30.0
        yield Program(name, module, given, tags, limit=600.0, needs=needs)


def _programs(o: argparse.Namespace) -> Iterator[tuple[str, str, str, list[str]]]:
    """Precision, name, module and options of the programs of both parts."""
    for precision in o.precisions:
        for library, (module, *args) in LIBRARIES.items():
            if chosen(library, o.libraries):
                for name, settings in gpt2.variants(library, precision, o.variants):
                    yield precision, name, PEERS + module, [*args, *settings]


def _usual(o: argparse.Namespace, sizes: dict[str, int], path: Path, batches: int) -> list[str]:
    """Options of all programs of a part; writes their batches of text to ``path``."""
    length = sizes["context"] + 1
    found = text.windows(batches * sizes["batch"], length)
    np.save(path, found.reshape(batches, sizes["batch"], length))
    size = [f"--{name}={value}" for name, value in sizes.items()]
    return ["--platform", o.device, *size, "--tokens", str(path)]


def gradients_file(scratch: Path, library: str, precision: str) -> Path:
    """File for a program's gradients."""
    return scratch / f"{library}-{precision}.npz".replace(" ", "-")


def beside_float64(program: Program, rows: list[dict], scratch: Path) -> None:
    """Add errors to a program's row; the reference and failed programs have none."""
    precision = program.tags["precision"]
    reference = gradients_file(scratch, REFERENCE, "fp32")
    path = gradients_file(scratch, program.library, precision)
    if program.library == REFERENCE and rows and "loss" in rows[0]:
        (scratch / "loss").write_text(repr(rows[0]["loss"]))
    elif rows and "loss" in rows[0] and path.is_file() and reference.is_file():
        exact = float((scratch / "loss").read_text())
        rows[0] |= {"loss_error": abs(rows[0]["loss"] - exact) / exact} | errors(path, reference)
        path.unlink()


def errors(found: Path, reference: Path) -> dict:
    """Relative errors of gradients in a file: as one vector, and the worst parameter."""
    apart, whole, worst = 0.0, 0.0, (0.0, "")
    with np.load(found) as ours, np.load(reference) as exact:
        if set(ours.files) != set(exact.files):
            raise ValueError(f"{found.name} has other parameters than {reference.name}")
        for name in exact.files:
            true = exact[name].astype(np.float64)
            square, of = float(np.sum((ours[name] - true) ** 2)), float(np.sum(true**2))
            apart, whole = apart + square, whole + of
            worst = max(worst, ((square / of) ** 0.5 if of else square**0.5, name))
    return {"gradients": (apart / whole) ** 0.5, "worst": worst[0], "worst_of": worst[1]}


if __name__ == "__main__":
    main()
