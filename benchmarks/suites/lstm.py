"""The gradient of an LSTM on a GPU, against cuDNN's in PyTorch and against JAX.

    python -m benchmarks.suites.lstm

The cell is written out for blufunc and JAX (``loop_programs.py``); PyTorch calls cuDNN, and its gradient includes that
of the inputs' weights, too. Without PyTorch or JAX, its rows are left out.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable

import blufunc
from benchmarks.harness.programs import device
from benchmarks.harness.timing import report, row, together
from benchmarks.suites.loop_programs import lstm_gradient

SHAPES = ((512, 64, 512), (128, 16, 1024), (128, 256, 256))
"""Steps, batch and width."""

CALLS = 5


def main() -> None:
    """Print the table."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    blufunc.config.update("default_device", "cuda")
    rows = []
    for steps, batch, width in SHAPES:
        ours = of_library(blufunc, steps, batch, width)
        peers: dict[str, Callable[[], object]] = {}
        if importlib.util.find_spec("torch"):
            peers["cudnn"] = of_cudnn(steps, batch, width)
        if importlib.util.find_spec("jax"):
            import jax

            peers["jax"] = of_library(jax, steps, batch, width)
        for peer, theirs in peers.items():
            times = [1e6 * s for s in together(ours, theirs, calls=CALLS, repeats=5)]
            what = f"LSTM {steps} x {batch} x {width}, bfloat16, gradient"
            rows.append(row(what, times[0], times[1], peer=peer))
    report("lstm", rows, "cuda", device()["name"])


def of_library(lib, steps: int, batch: int, width: int) -> Callable[[], object]:
    """A step of blufunc or JAX."""
    fun, args = lstm_gradient(lib, steps, batch, width, "bfloat16")
    compiled, args = lib.jit(fun), lib.tree.map(lib.numpy.asarray, args)
    return lambda: lib.block_until_ready(compiled(*args))


def of_cudnn(steps: int, batch: int, width: int) -> Callable[[], object]:
    """A step of PyTorch's module."""
    import torch

    net = torch.nn.LSTM(width, width, device="cuda", dtype=torch.bfloat16)
    net.flatten_parameters()
    x = torch.randn(steps, batch, width, device="cuda", dtype=torch.bfloat16) / math.sqrt(width)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        (net(x)[0].float() ** 2).mean().backward()
        torch.cuda.synchronize()

    return step


if __name__ == "__main__":
    main()
