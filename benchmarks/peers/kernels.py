"""The kernels in blufunc or JAX: identical functions and data, under ``jit``.

python -m benchmarks.peers.kernels --library blufunc
"""

from __future__ import annotations

import argparse
import functools
import math
import os
from typing import Any

import numpy as np

from benchmarks.peers import clock, kernel_shapes
from benchmarks.suites import kernel_cases


def main() -> None:
    """Emit one row per kernel."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=["blufunc", "jax"], required=True)
    parser.add_argument("--platform", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    clock.emit_versions("numpy", options.library, *(["cupy-cuda13x"] if options.library == "blufunc" else []))
    if options.library == "jax":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ["JAX_PLATFORMS"] = options.platform
    lib = kernel_cases.in_jax() if options.library == "jax" else kernel_cases.in_blufunc(options.platform)
    events = options.library == "blufunc" and options.platform == "cuda"
    for name, shape in kernel_shapes.cases(options.tiny, options.only):
        clock.attempt(
            kernel_shapes.label(name, shape), functools.partial(time_kernel, lib, name, shape, events)
        )
    if options.only in "adamw":
        shapes = kernel_shapes.ADAMW_TINY if options.tiny else kernel_shapes.ADAMW
        clock.attempt(kernel_shapes.adamw_label(shapes), lambda: time_adamw(lib, shapes, events))


def time_kernel(lib: Any, name: str, shape: tuple[int, ...], events: bool) -> None:
    """Time of one kernel, and a sample of its results."""
    kernel = kernel_cases.kernels(lib)[name]
    f = lib.jit(kernel.function)
    nbytes = kernel.nbytes(shape)
    n = clock.copies(nbytes)
    args = [[operand(lib, o, shape, i) for i, o in enumerate(kernel.operands)] for _ in range(n)]
    call = lambda i: f(*args[i % n])
    check = sample(lib, lib.leaves(call(0)))
    tell(kernel_shapes.label(name, shape), call, lib, events, nbytes, check)


def time_adamw(lib: Any, shapes: dict, events: bool) -> None:
    """AdamW over a model's parameters; each call reuses the previous results' memory."""
    rng = np.random.default_rng(0)
    params, grads = (
        {name: lib.put(rng.standard_normal(shape, dtype=np.float32)) for name, shape in shapes.items()}
        for _ in range(2)
    )
    init, update = kernel_cases.adamw_update(lib)
    state = [params, init(params)]

    def call(_: int) -> list:
        state[:] = update(*state, grads)
        return state

    check = sample(lib, [call(0)[0]["tokens"]])
    nbytes = 4 * sum(map(math.prod, shapes.values())) * kernel_cases.ADAMW_PASSES
    tell(kernel_shapes.adamw_label(shapes), call, lib, events, nbytes, check)


def tell(what: str, call: Any, lib: Any, events: bool, nbytes: int, check: list[float]) -> None:
    """Time the call and emit the row: by device events, else by the wall clock."""
    times = {}
    # ahead of the wall clock's calls, which heat the device
    if events:
        from blufunc.kernels.backends.cuda.driver import driver

        times["event_ms"] = clock.event_ms(call, driver.compute_stream(0))
    times["wall_ms"] = clock.wall_ms(call, lib.wait)
    ms = times.get("event_ms", times["wall_ms"])
    clock.emit(what=what, ms=ms, GB_s=nbytes / ms / 1e6, bytes=nbytes, **times, check=check)


def operand(lib: Any, name: str, shape: tuple[int, ...], seed: int) -> Any:
    """An operand, by its name in the table of kernels."""
    if name == "labels":
        return lib.put(kernel_shapes.labels(shape))
    if name == "row":
        return lib.put(kernel_shapes.row(shape, seed))
    rows, repeats = kernel_shapes.block(shape, seed)
    fill = lib.jit(lambda x: lib.numpy.broadcast_to(x, (repeats, *x.shape)).reshape(shape))
    return lib.wait(fill(lib.put(rows)))


def sample(lib: Any, results: list) -> list[float]:
    """Sampled elements of each result."""
    take = lib.jit(lambda x, where: x.reshape(-1)[where])
    return [
        float(v)
        for x in results
        for v in np.asarray(take(x, lib.put(kernel_shapes.sampled(math.prod(x.shape)))))
    ]


if __name__ == "__main__":
    main()
