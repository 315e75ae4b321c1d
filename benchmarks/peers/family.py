"""One model family in one library.

    python -m benchmarks.peers.family --library jax --family llama

The step of ``benchmarks/suites/families.py`` is compiled, warmed up, and timed by the wall clock over rounds of
back-to-back steps. Steps that return their parameters and state receive donated arguments, as in a training loop.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from benchmarks.peers import clock
from benchmarks.suites.families import FAMILIES

TRAINING = ("gpt2", "llama")  # step(params, state, *batch) -> (params, state, value)


def main() -> None:
    """Emit one row."""
    p = argparse.ArgumentParser()
    p.add_argument("--library", choices=["blufunc", "jax"], default="blufunc")
    p.add_argument("--family", choices=list(FAMILIES), default="llama")
    p.add_argument("--platform", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--size", choices=["tiny", "full"], default="full")
    p.add_argument("--attention", default="", help="an implementation of JAX's attention: cudnn, xla")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--rounds", type=int, default=5)
    o = p.parse_args()
    if o.library == "blufunc" and o.platform == "cuda":
        os.environ.setdefault("BLUFUNC_DEFAULT_DEVICE", "cuda")
    lib = importlib.import_module(o.library)
    importlib.import_module(f"{o.library}.numpy")
    importlib.import_module(f"{o.library}.nn")
    clock.emit_versions(o.library)
    if o.library == "jax":
        lib.config.update("jax_platforms", o.platform)
    emit(o, lib)


def emit(o: argparse.Namespace, lib: object) -> None:
    """Compile, time and emit the row."""
    options = {"attention": {"implementation": o.attention}} if o.attention else {}
    step, make = FAMILIES[o.family](lib, o.size, **options)
    trains = o.family in TRAINING
    compiled = lib.jit(step, donate_argnums=(0, 1) if trains else ())  # type: ignore[attr-defined]
    state = list(make())
    begin = time.perf_counter()

    def run(n: int) -> object:
        out = None
        for _ in range(n):
            out = compiled(*state)
            if trains:
                state[:2] = out[:2]
        return lib.block_until_ready(out)  # type: ignore[attr-defined]

    out = run(1)
    first = time.perf_counter() - begin
    run(o.steps)
    times = []
    for _ in range(o.rounds):
        begin = time.perf_counter()
        out = run(o.steps)
        times.append((time.perf_counter() - begin) / o.steps)
    row = {"family": o.family, "size": o.size, "step_ms": 1e3 * statistics.median(times), "first_s": first}
    clock.emit(**row, min_ms=1e3 * min(times), loss=float(out[2]) if trains else None)


if __name__ == "__main__":
    main()
