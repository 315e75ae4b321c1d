"""Cost of a call with negligible arithmetic, in blufunc, JAX or PyTorch.

    python -m benchmarks.peers.dispatch --library torch

Calls run back to back, as in a program; the figure is the time of one.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np

from benchmarks.peers import clock

PRODUCTS = 20


def main() -> None:
    """Emit one row per case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=["blufunc", "jax", "torch"], required=True)
    parser.add_argument("--platform", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    clock.emit_versions(options.library)
    make = {"blufunc": _functional, "jax": _functional, "torch": _torch}[options.library]
    sin, total, put, jit, wait = make(options)
    rng = np.random.default_rng(0)
    x = put(rng.standard_normal(8, dtype=np.float32))
    square = put(rng.standard_normal((64, 64), dtype=np.float32) / 8)

    def products(y):
        for _ in range(PRODUCTS):
            y = sin(y @ y)
        return y

    small, chain = jit(lambda x: total(sin(x) * 2.0 + x)), jit(products)
    cases = {
        "eager add of two arrays of 8": lambda _: x + x,
        "compiled sum(sin(x) * 2 + x) of 8": lambda _: small(x),
        f"compiled {PRODUCTS} of sin(y @ y), 64x64": lambda _: chain(square),
    }
    for what, call in cases.items():
        us = 1e3 * clock.wall_ms(call, wait)
        clock.emit(what=what, us=us)


def _functional(options: argparse.Namespace) -> tuple[Any, ...]:
    from benchmarks.suites import kernel_cases

    if options.library == "jax":
        os.environ["JAX_PLATFORMS"] = options.platform
        lib = kernel_cases.in_jax()
    else:
        lib = kernel_cases.in_blufunc(options.platform)
    return lib.numpy.sin, lib.numpy.sum, lib.put, lib.jit, lib.wait


def _torch(options: argparse.Namespace) -> tuple[Any, ...]:
    import torch

    def wait(_):
        if options.platform == "cuda":
            torch.cuda.synchronize()

    compile = lambda f: torch.compile(f, mode="reduce-overhead")
    return torch.sin, torch.sum, lambda x: torch.from_numpy(x).to(options.platform), compile, wait


if __name__ == "__main__":
    main()
