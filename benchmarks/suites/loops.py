"""Programs with loops, under ``jit``, against JAX.

    python -m benchmarks.suites.loops [--only LSTM] [--platform cuda]

One source for both libraries (``loop_programs.py``), the same arguments, results compared ahead of timing. A row has
the time of a call and of the first one, which includes compilation. The geometric mean of the ratios comes last.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.gpu_tables import geometric_mean
from benchmarks.harness.programs import device
from benchmarks.harness.timing import report, row, together
from benchmarks.suites.loop_programs import GPU_PROGRAMS, PROGRAMS

TOLERANCE = 1e-3
"""Relative to the largest element: iterations amplify rounding."""

CHAOTIC = ("Lorenz", "Monte Carlo")
"""Programs whose results depend on the last bit: they are compared by shape alone."""

BLOCK = 0.05
"""Seconds of a block of calls."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the programs with this in their names")
    parser.add_argument("--repeats", type=int, default=5, help="blocks of each side")
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["JAX_PLATFORMS"] = options.platform
    import jax

    import blufunc

    if options.platform == "cuda":
        blufunc.config.update("default_device", "cuda")
    programs = PROGRAMS if options.platform == "cpu" else GPU_PROGRAMS
    names = [name for name in programs if options.only in name]
    pairs = {name: [programs[name](lib) for lib in (blufunc, jax)] for name in names}
    rows = [compared(name, pair, options.repeats, check) for name, pair in pairs.items()]
    means = [geometric_mean([r[k] for r in rows]) for k in ("ratio", "first_ratio")]
    print(f"geometric mean {means[0]:.3f}, of first calls {means[1]:.3f}")
    name = device()["name"] if options.platform == "cuda" else ""
    report("loops", rows, options.platform, name)


def compared(
    name: str, made: Sequence[tuple[Callable, tuple]], repeats: int, check: Callable, jitted: bool = True
) -> dict:
    """The row of one program, made for blufunc and for JAX."""
    import jax

    import blufunc

    calls, firsts, results = [], [], []
    for lib, (fun, args) in zip((blufunc, jax), made, strict=True):
        args = lib.tree.map(lib.numpy.asarray, args)
        compiled = lib.jit(fun) if jitted else fun
        begin = time.perf_counter()
        results.append(lib.tree.leaves(lib.block_until_ready(compiled(*args))))
        firsts.append(time.perf_counter() - begin)
        calls.append(lambda lib=lib, compiled=compiled, args=args: lib.block_until_ready(compiled(*args)))
    check(name, *results)
    begin = time.perf_counter()
    for call in calls * 3:
        call()
    count = max(1, int(6 * BLOCK / (time.perf_counter() - begin)))
    ours, theirs = together(*calls, calls=count, repeats=repeats)
    first = {"first_s": firsts[0], "jax_first_s": firsts[1], "first_ratio": firsts[0] / firsts[1]}
    return row(name, 1e6 * ours, 1e6 * theirs) | first


def check(name: str, ours: list[Any], theirs: list[Any]) -> None:
    """Compare the results of both libraries."""
    for x, y in zip(ours, theirs, strict=True):
        a, b = np.asarray(x), np.asarray(y)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (name, a.dtype, b.dtype)
        if not any(word in name for word in CHAOTIC):
            a, b = a.astype(np.float64), b.astype(np.float64)
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * max(1.0, np.abs(b).max()), err_msg=name)


if __name__ == "__main__":
    main()
