"""Small linear algebra and pooling under blufunc, JAX and PyTorch, on a GPU.

``python -m benchmarks.suites.linalg [name ...]`` prints milliseconds per call: medians of runs of calls, the device
synchronized after each run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

RNG = np.random.default_rng(0)
_RUNS, _LEAST_SECONDS = 7, 0.02


def normal(*shape: int) -> np.ndarray:
    """Random matrices."""
    return RNG.standard_normal(shape).astype(np.float32)


def definite(*shape: int) -> np.ndarray:
    """Positive definite matrices."""
    x = normal(*shape)
    return x @ x.swapaxes(-1, -2) / shape[-1] + np.eye(shape[-1], dtype=np.float32)


def _pool(kind: str, window: int, stride: int, first: bool, gradient: bool) -> tuple[Callable, Callable]:
    """A pool in ``lax`` and in PyTorch, or a pool and its gradient."""
    pad = window // 2 if stride < window else 0

    def ours(m: Any, x: Any, ct: Any) -> Any:
        sizes = lambda n: (1, 1, n, n) if first else (1, n, n, 1)
        pads = tuple((pad, pad) if n > 1 else (0, 0) for n in sizes(window))
        start, combine = (-np.inf, m.lax.max) if kind == "max" else (0.0, m.lax.add)

        def pool(x: Any) -> Any:
            start_ = np.asarray(start, np.float32).astype(x.dtype)
            y = m.lax.reduce_window(x, start_, combine, sizes(window), sizes(stride), pads)
            return y if kind == "max" else y / window**2

        if not gradient:
            return pool(x)
        y, back = m.vjp(pool, x)
        return y, back(ct)[0]

    def torch(t: Any, x: Any, ct: Any) -> Any:
        f = t.nn.functional.max_pool2d if kind == "max" else t.nn.functional.avg_pool2d
        if not first:  # NHWC in memory
            x, ct = x.permute(0, 3, 1, 2), ct.permute(0, 3, 1, 2)
        if not gradient:
            return f(x, window, stride, pad)
        x = x.detach().requires_grad_()
        y = f(x, window, stride, pad)
        return y, t.autograd.grad(y, x, ct)[0]

    return ours, torch


def _pool_case(kind: str, window: int, stride: int, first: bool, gradient: bool) -> tuple:
    size = 112 if window < 7 else 28
    out = size // stride
    shape = lambda n: (64, 64, n, n) if first else (64, n, n, 64)
    return (
        *_pool(kind, window, stride, first, gradient),
        [normal(*shape(size)), normal(*shape(out))],
        "bfloat16",
    )


_LINALG = {
    "solve": (lambda m, a, b: m.numpy.linalg.solve(a, b), lambda t, a, b: t.linalg.solve(a, b)),
    "inv": (lambda m, a: m.numpy.linalg.inv(a), lambda t, a: t.linalg.inv(a)),
    "det": (lambda m, a: m.numpy.linalg.det(a), lambda t, a: t.linalg.det(a)),
    "cholesky": (lambda m, a: m.numpy.linalg.cholesky(a), lambda t, a: t.linalg.cholesky(a)),
    "eigh": (lambda m, a: m.numpy.linalg.eigh(a), lambda t, a: t.linalg.eigh(a)),
    "svd": (lambda m, a: m.numpy.linalg.svd(a), lambda t, a: t.linalg.svd(a)),
    "qr": (lambda m, a: m.numpy.linalg.qr(a), lambda t, a: t.linalg.qr(a)),
    "lu": (lambda m, a: m.lax.linalg.lu(a), lambda t, a: t.linalg.lu_factor(a)),
    "triangular solve": (
        lambda m, a, b: m.lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        lambda t, a, b: t.linalg.solve_triangular(a, b, upper=False),
    ),
}

CASES: dict[str, tuple] = {
    "solve 4096x32x32, 4 sides": (*_LINALG["solve"], [normal(4096, 32, 32), normal(4096, 32, 4)], "float32"),
    "solve 1024x64x64, 64 sides": (*_LINALG["solve"], [normal(1024, 64, 64), normal(1024, 64, 64)], "float32"),
    "solve 512x100x100, 1 side": (*_LINALG["solve"], [normal(512, 100, 100), normal(512, 100, 1)], "float32"),
    "solve 16x512x512, 1 side": (*_LINALG["solve"], [normal(16, 512, 512), normal(16, 512, 1)], "float32"),
    "solve one 2048, 1 side": (*_LINALG["solve"], [normal(2048, 2048), normal(2048, 1)], "float32"),
    "inv 4096x16x16": (*_LINALG["inv"], [normal(4096, 16, 16)], "float32"),
    "det 4096x16x16": (*_LINALG["det"], [normal(4096, 16, 16)], "float32"),
    "lu 4096x32x32": (*_LINALG["lu"], [normal(4096, 32, 32)], "float32"),
    "triangular 4096x64x64, 8 sides": (
        *_LINALG["triangular solve"], [definite(4096, 64, 64), normal(4096, 64, 8)], "float32"
    ),
    "cholesky 4096x64x64": (*_LINALG["cholesky"], [definite(4096, 64, 64)], "float32"),
    "cholesky 4096x16x16": (*_LINALG["cholesky"], [definite(4096, 16, 16)], "float32"),
    "cholesky 256x128x128": (*_LINALG["cholesky"], [definite(256, 128, 128)], "float32"),
    "cholesky one 4096": (*_LINALG["cholesky"], [definite(4096, 4096)], "float32"),
    "eigh 1024x16x16": (*_LINALG["eigh"], [definite(1024, 16, 16)], "float32"),
    "eigh 1024x32x32": (*_LINALG["eigh"], [definite(1024, 32, 32)], "float32"),
    "svd 1024x16x16": (*_LINALG["svd"], [normal(1024, 16, 16)], "float32"),
    "svd 1024x32x32": (*_LINALG["svd"], [normal(1024, 32, 32)], "float32"),
    "qr 1024x16x16": (*_LINALG["qr"], [normal(1024, 16, 16)], "float32"),
    "qr 1024x64x64": (*_LINALG["qr"], [normal(1024, 64, 64)], "float32"),
    **{
        f"{kind} pool {w}x{w}/{s} {'NCHW' if first else 'NHWC'}{', gradient' if grad else ''}": _pool_case(
            kind, w, s, first, grad
        )
        for kind, w, s, first, grad in [
            ("max", 3, 2, False, False), ("max", 3, 2, False, True), ("avg", 3, 2, False, False),
            ("avg", 3, 2, False, True), ("max", 2, 2, False, True), ("max", 3, 2, True, False),
            ("max", 3, 2, True, True), ("avg", 2, 2, True, True), ("max", 3, 1, False, True),
            ("max", 7, 1, False, False), ("max", 7, 1, False, True),
        ]
    },
}  # fmt: skip


def milliseconds(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Median time of a call, of runs that keep the device busy."""
    for _ in range(4):
        wait(call())
    began = time.perf_counter()
    wait(call())
    number = max(1, int(_LEAST_SECONDS / (time.perf_counter() - began)))
    times = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        for _ in range(number):
            out = call()
        wait(out)
        times.append((time.perf_counter() - began) / number)
    return 1e3 * statistics.median(times)


def under_blufunc(ours: Callable, args: list[np.ndarray], dtype: str) -> float:
    """Time on blufunc's first GPU."""
    import blufunc as m

    device = m.devices("cuda")[0]
    given = [m.device_put(m.numpy.asarray(a, dtype), device) for a in args]
    call = m.jit(lambda *xs: ours(m, *xs))
    return milliseconds(lambda: call(*given), m.block_until_ready)


def under_jax(ours: Callable, args: list[np.ndarray], dtype: str) -> float:
    """Time on JAX's first GPU."""
    import jax
    import jax.numpy as jnp

    given = [jnp.asarray(a, dtype) for a in args]
    call = jax.jit(lambda *xs: ours(jax, *xs))
    return milliseconds(lambda: call(*given), jax.block_until_ready)


def under_torch(theirs: Callable, args: list[np.ndarray], dtype: str) -> float:
    """Time on PyTorch's first GPU, eager."""
    import torch

    given = [torch.asarray(a).cuda().to(getattr(torch, dtype)) for a in args]
    return milliseconds(lambda: theirs(torch, *given), lambda out: torch.cuda.synchronize())


def main(names: list[str]) -> None:
    """Print a line per case as it ends."""
    print(f"{'case':40} {'blufunc':>9} {'JAX':>9} {'PyTorch':>9}  time / best peer", flush=True)
    for name, (ours, theirs, args, dtype) in CASES.items():
        if names and not any(n in name for n in names):
            continue
        found = []
        for run, f in ((under_blufunc, ours), (under_jax, ours), (under_torch, theirs)):
            try:
                found.append(run(f, args, dtype))
            except Exception as e:
                print(f"{name}: {run.__name__} raised {type(e).__name__}: {e!s:.200}", flush=True)
                found.append(float("nan"))
        best = float(np.nanmin(found[1:] + [np.inf]))
        line = " ".join(f"{t:9.4f}" for t in found)
        print(f"{name:40} {line}  {found[0] / best:.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
