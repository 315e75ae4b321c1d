"""CPU kernels at sizes far beyond the caches, under ``jit``, against JAX.

These kernels are memory-bound, so each row also reports the share of a plain copy's bandwidth. Both libraries receive
the same random inputs, and their results must agree ahead of timing. They are timed alternately, in blocks of calls, so
that the threads of one sleep while the other works.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.harness.gpu_tables import geometric_mean
from benchmarks.harness.timing import report, together
from benchmarks.suites.kernel_cases import (
    ADAMW_PASSES,
    adamw_update,
    gpt_shapes,
    host_operand,
    in_blufunc,
    in_jax,
    kernels,
)

CASES = (
    ("gelu", (16384, 1024)),
    ("gelu", (65536, 1024)),
    ("gelu backward", (16384, 1024)),
    ("gelu backward", (65536, 1024)),
    ("softmax", (4096, 4096)),
    ("softmax", (16384, 768)),
    ("softmax backward", (4096, 4096)),
    ("layer norm", (4096, 4096)),
    ("layer norm", (16384, 768)),
    ("layer norm backward", (4096, 4096)),
    ("layer norm backward", (16384, 768)),
    ("cross-entropy", (512, 50304)),
    ("cross-entropy and gradient", (512, 50304)),
    ("sum of rows", (16384, 1024)),
    ("sum of columns", (16384, 1024)),
)
GPT = {"layers": 6, "width": 512, "vocab": 4096, "context": 256}  # of 21 million parameters, for AdamW
TOLERANCE = (
    1e-4  # relative to the largest element; sums of 16,384 float32 values in another order differ by 1e-5
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the cases with this in their names")
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide the rows of every case, to try things out"
    )
    parser.add_argument("--calls", type=int, default=3, help="calls in a block")
    parser.add_argument("--repeats", type=int, default=7, help="blocks of each side")
    options = parser.parse_args()
    libraries = in_blufunc(), in_jax()
    copy = copy_bandwidth()
    print(f"a copy moves {copy:.1f} GB/s, counting bytes read and bytes written")
    rows = []
    for name, (*outer, last) in CASES:
        shape = (max(1, outer[0] // options.shrink), last)
        if options.only in name:
            calls = [kernel_call(lib, name, shape) for lib in libraries]
            nbytes = kernels(libraries[0])[name].nbytes(shape)
            rows.append(_row(f"{name} {'x'.join(map(str, shape))}", calls, nbytes, copy, options))
    if options.only in "adamw":
        shapes = gpt_shapes(**GPT | {"layers": max(1, GPT["layers"] // options.shrink)})
        count = sum(map(math.prod, shapes.values()))
        calls = [adamw_call(lib, shapes) for lib in libraries]
        nbytes = 4 * count * ADAMW_PASSES
        rows.append(_row(f"adamw, {count / 1e6:.0f}M parameters", calls, nbytes, copy, options))
    if not rows:
        raise SystemExit(f"no case has {options.only!r} in its name")
    print(f"geometric mean of the ratios: {geometric_mean(r['ratio'] for r in rows):.3f}")
    report("cpu_kernels", rows)


def kernel_call(lib, name: str, shape: tuple[int, ...]) -> Callable:
    """Function that runs the kernel once, waits, and returns the results."""
    rng = np.random.default_rng(0)
    kernel = kernels(lib)[name]
    f, args = lib.jit(kernel.function), [lib.put(host_operand(o, shape, rng)) for o in kernel.operands]
    return lambda: lib.wait(f(*args))


def adamw_call(lib, shapes: dict) -> Callable:
    """Function that runs one step of AdamW and returns the parameters, its next input."""
    rng = np.random.default_rng(0)
    params, grads = (
        {name: lib.put(rng.standard_normal(shape, dtype=np.float32)) for name, shape in shapes.items()}
        for _ in range(2)
    )
    init, update = adamw_update(lib)
    state = [params, init(params)]

    def call():
        state[:] = lib.wait(update(*state, grads))
        return state[0]

    return call


def check(what: str, results: list) -> None:
    """Raise if the results of the two differ by more than rounding."""
    ours, theirs = (leaves(r) for r in results)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = np.asarray(a), np.asarray(b)
        error = float(np.abs(a - b).max() / np.abs(b).max()) if a.shape == b.shape else math.inf
        if not error <= TOLERANCE:
            raise SystemExit(f"{what}: result {i} differs from JAX's by {error:.2e} of its largest element")


def leaves(x) -> list:
    """Arrays of a result: one, a tuple of them, or a dict."""
    import jax

    return jax.tree.leaves(x)


def _row(what: str, calls: list[Callable], nbytes: int, copy: float, options) -> dict:
    check(what, [call() for call in calls])
    ours, theirs = together(*calls, options.calls, options.repeats)
    rates = [nbytes / t / 1e9 for t in (ours, theirs)]
    print(
        f"{what:<36} blufunc {1e3 * ours:8.2f} ms {rates[0]:6.1f} GB/s ({rates[0] / copy:4.0%} of a copy)"
        f"   jax {1e3 * theirs:8.2f} ms {rates[1]:6.1f} GB/s   ratio {ours / theirs:6.3f}",
        flush=True,
    )
    figures = {"blufunc": 1e3 * ours, "jax": 1e3 * theirs, "ratio": ours / theirs}
    return {"what": what, "unit": "ms"} | figures | {"bytes": nbytes, "copy_GB_s": copy}


def copy_bandwidth(floats: int = 1 << 25, repeats: int = 7) -> float:
    """Bandwidth of copying an array with all cores, in GB/s: the best of a few runs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    source, target = np.ones(floats, np.float32), np.zeros(floats, np.float32)
    parts = [slice(floats * i // cores, floats * (i + 1) // cores) for i in range(cores)]
    best = math.inf
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))
            best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best / 1e9


if __name__ == "__main__":
    main()
