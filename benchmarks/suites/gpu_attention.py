"""Causal attention in blufunc, PyTorch and JAX.

    python -m benchmarks.suites.gpu_attention [--precisions bf16]

``nn.dot_product_attention``, forward and with gradients, against ``scaled_dot_product_attention`` with each of
PyTorch's backends, with its default, and compiled, and against JAX's with cuDNN and XLA. Precisions: bfloat16;
float32 with matmuls in TF32 and in IEEE arithmetic; and "float32_tc", whose peers are those of IEEE arithmetic.
Errors are relative to float64. ``benchmarks/harness/programs.py`` runs the libraries; results are in
``DIR/gpu_attention.json``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.programs import PEERS, Program, Record, add_options, chosen, device, names

HALF, SINGLE = ("bf16",), ("tf32", "fp32")
LIBRARIES = {  # the precisions, the module and its options
    "blufunc": (("bf16", "tf32", "fp32", "float32_tc"), "attention", "--library", "blufunc"),
    "torch": (HALF + SINGLE, "attention_torch"),
    "torch-flash": (HALF, "attention_torch", "--backend", "flash"),
    "torch-cudnn": (HALF, "attention_torch", "--backend", "cudnn"),
    "torch-efficient": (HALF + SINGLE, "attention_torch", "--backend", "efficient"),
    "torch-math": (SINGLE, "attention_torch", "--backend", "math"),
    "torch-compile": (HALF + SINGLE, "attention_torch", "--compile"),
    "jax-cudnn": (HALF, "attention", "--library", "jax", "--implementation", "cudnn"),
    "jax-xla": (SINGLE, "attention", "--library", "jax", "--implementation", "xla"),
}


def main() -> None:
    """Run the programs and print their table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, limit=1800)
    parser.add_argument("--precisions", type=names, default=["bf16", "tf32", "fp32", "float32_tc"])
    o = parser.parse_args()
    deadline = time.monotonic() + o.limit
    planned = list(programs(o))
    with tempfile.TemporaryDirectory(prefix="blufunc-bench-") as scratch:
        Record("attention", device(), o, planned).run_all(planned, deadline, Path(scratch))


def programs(o: argparse.Namespace) -> Iterator[Program]:
    """One program per precision and library; on a CPU only its backends."""
    for precision in o.precisions:
        for library, (precisions, module, *args) in LIBRARIES.items():
            absent = o.device == "cpu" and library.endswith(("-flash", "-cudnn", "-efficient"))
            if precision in precisions and chosen(library, o.libraries) and not absent:
                args = [*args, "--platform", o.device, "--precision", precision]
                args += ["--tiny"] if o.device == "cpu" else []
                tags = {"precision": precision}
                yield Program(library, PEERS + module, tuple(args), tags, limit=90)


if __name__ == "__main__":
    main()
