"""Matmuls with epilogues against the library and fused kernels.

``python -m benchmarks.suites.gemm_epilogues [--only SwiGLU]``

Each case is one matmul with its elementwise operations, compiled twice: with the epilogue in the matmul whatever the
cost model says, and without. Both run by turns, many calls in a row where these are long, so that the device is as
warm as in training; times are medians in microseconds. ``model`` is what the cost model expects the epilogue to gain:
where its sign differs from that of the gain, a constant of ``device_model.py`` is wrong. ``error`` is the largest
difference of results, relative to the largest result. ``--only`` takes names or shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.peers import clock
from blufunc import nn
from blufunc.config import config
from blufunc.kernels.backends.cuda.device_model import H200, L2_BYTES, L2_SPEEDUP
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.library import pointwise_gemm
from blufunc.kernels.ops.pointwise_gemm import dot_pointwise_p

SHAPES = [(m, k, n) for m in (1024, 4096, 8192, 32768) for k, n in ((768, 3072), (2048, 5632))]
"""Rows, terms and columns: GPT-2's and Llama's, from few tokens to many."""


LONG, IN_A_ROW = 8192, 60
"""Fewest rows of which calls follow each other, as in training; their count."""


def in_a_row(call: Callable[[int], Any], stream: Any) -> float:
    """Milliseconds of a call among others."""
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    for i in range(IN_A_ROW):
        call(i)
    stop.record(stream)
    stream.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop) / IN_A_ROW


def squared_relu(x: Any) -> Any:
    return bnp.square(nn.relu(x))


def swiglu(gate: Any, up: Any) -> Any:
    return nn.silu(gate) * up


def exact(x: Any) -> Any:
    return nn.gelu(x, approximate=False)


def slope_of(f: Callable) -> Callable:
    """The derivative of a function at a given array, times a matmul."""
    return lambda x, w, h: bf.vjp(f, h)[1](bnp.einsum("mk,nk->mn", x, w))


def with_sums(f: Callable) -> Callable:
    """With the sums of the first result over all rows."""

    def both(*args):
        first, *rest = f(*args)
        return first, *rest, first.astype(np.float32).sum(0)

    return both


CASES: dict[str, tuple[Callable, str]] = {  # a function, and its operands: rows, terms and columns by letters
    "bias, GELU, and its argument": (lambda x, w, b: (nn.gelu(h := x @ w + b), h), "mk kn n"),
    "derivative of GELU": (slope_of(nn.gelu), "mk nk mn"),
    "derivative of GELU, and sums": (with_sums(slope_of(nn.gelu)), "mk nk mn"),
    "exact GELU, and its argument": (lambda x, w: (exact(h := x @ w), h), "mk kn"),
    "derivative of exact GELU": (slope_of(exact), "mk nk mn"),
    "SwiGLU, and one operand": (lambda x, w, g: (swiglu(g, u := x @ w), u), "mk kn mn"),
    "derivatives of SwiGLU": (
        lambda x, w, g, u: bf.vjp(swiglu, g, u)[1](bnp.einsum("mk,nk->mn", x, w)), "mk nk mn mn"
    ),
    "squared ReLU, and its argument": (lambda x, w: (squared_relu(h := x @ w), h), "mk kn"),
    "derivative of squared ReLU": (slope_of(squared_relu), "mk nk mn"),
    "SiLU and a residual": (lambda x, w, r: nn.silu(x @ w) + r, "mk kn mn"),
}  # fmt: skip


@contextlib.contextmanager
def losing(seconds: float) -> Iterator[None]:
    """Plan as if an epilogue cost some seconds more than the library."""
    usual = pointwise_gemm.GEMM_SECONDS
    pointwise_gemm.GEMM_SECONDS = seconds
    try:
        yield
    finally:
        pointwise_gemm.GEMM_SECONDS = usual


def measured(name: str, m: int, k: int, n: int, rounds: int, device: Any) -> str:
    """The row of one case and shape."""
    fun, labels = CASES[name]
    sizes = {"m": m, "k": k, "n": n}
    draw = lambda i, shape: bf.jit(
        lambda key: (bf.random.normal(key, shape) / (k**0.5 if i == 1 else 1)).astype(bnp.bfloat16)
    )(bf.device_put(bf.random.key(i), device))
    args = [draw(i, tuple(sizes[c] for c in label)) for i, label in enumerate(labels.split())]
    compiled = []
    for seconds in (-1.0, 1.0):
        with losing(seconds):
            compiled.append(bf.jit(lambda *args: fun(*args)).lower(*args).compile())
    joined, separate = compiled
    eqns = [s.eqn for s in joined.program.schedule.steps if hasattr(s, "eqn")]
    (eqn,) = [e for e in eqns if e.prim is dot_pointwise_p]
    results = [[np.asarray(x, np.float32) for x in bf.tree.leaves(c(*args))] for c in compiled]
    error = max(
        np.abs(a - b).max() / np.abs(b).max() for a, b in zip(*results, strict=True) if a.shape == (m, n)
    )
    stream, times = driver.compute_stream(0), ([], [])
    for turn in range(2 * rounds):
        call = compiled[turn % 2]
        run = lambda i, c=call: c(*args)
        times[turn % 2].append(
            1e3 * (in_a_row(run, stream) if m >= LONG else clock.event_ms(run, stream, repeats=9))
        )
    fused, apart = map(statistics.median, times)
    nbytes, stored = 2 * m * n, eqn.params["epilogue"].stored is not None
    rate = H200.bandwidth * (L2_SPEEDUP if nbytes <= L2_BYTES else 1)
    expected = (nbytes * (2 - stored) / rate + H200.launch - pointwise_gemm.extra_seconds(eqn)) * 1e6
    return (
        f"| {name} | {m} x {k} x {n} | {apart:.1f} | {fused:.1f} | {apart - fused:+.1f} | {expected:+.1f} "
        f"| {2e-6 * m * n * k / fused:.0f} | {error:.1e} |"
    )


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases and shapes with this in their names")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each of the two programs")
    o = parser.parse_args()
    config.plan_cache = False  # plans do not know of ``losing``
    device = bf.devices("cuda")[0]
    print(
        f"{device}\n\n| epilogue | m x k x n | apart, us | joined | gain | model | TFLOP/s | error |",
        flush=True,
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for m, k, n in SHAPES:
        for name in CASES:
            if o.only in f"{name} {m} x {k} x {n}":
                print(measured(name, m, k, n, o.rounds, device), flush=True)


if __name__ == "__main__":
    main()
