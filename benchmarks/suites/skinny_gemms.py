"""GEMMs of few rows against cuBLASLt, in a graph, with weights beyond L2.

    python -m benchmarks.suites.skinny_gemms [--tiles 32/8,32/16]

A graph has one launch for each of several copies of the weights. A row has the microseconds of a launch by cuBLASLt's
fastest algorithm and by the kernel, which overlaps with the end of the one before, by columns and warps of a block; and
the share of the bandwidth of the data sheet.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import blufunc.numpy as bnp
from benchmarks.harness.programs import device
from benchmarks.suites.decoding import BANDWIDTH
from blufunc.kernels.backends.cuda.driver import driver, graph
from blufunc.kernels.backends.cuda.library import cublaslt
from blufunc.kernels.backends.cuda.library.decoding.skinny_gemm import Kernel, SkinnyGemm
from blufunc.kernels.gemm_layout import Gemm, Layout

SHAPES = [(2048, 2048), (2048, 3072), (2048, 5632), (5632, 2048), (2048, 32000), (4096, 4096), (768, 3072)]
"""Terms and columns: a Llama-like decoder's, and others."""

BYTES = 400 << 20
"""Weights of a graph, in all copies."""

LAUNCHES = 64


def microseconds(launch: Callable[[int, Any], object]) -> float:
    """Median time of a launch in a graph of ``LAUNCHES``."""
    stream = driver.compute_stream(0)
    for i in range(3):
        launch(i, stream)
    stream.synchronize()
    made = graph.capture(lambda streams: [launch(i, streams[0]) for i in range(LAUNCHES)])
    for _ in range(3):
        made.launch()
    times = [driver.elapsed_ms(made.launch, stream, 5) for _ in range(7)]
    return 1e3 * statistics.median(times) / LAUNCHES


def measured(
    m: int, k: int, n: int, by_terms: bool, tiles: Sequence[tuple[int, int]]
) -> tuple[float, dict[str, float]]:
    """Times of the library, and of the kernel by tile."""
    bf16 = np.dtype(bnp.bfloat16)
    copies = max(2, BYTES // (2 * k * n))
    x, w, out = (cublaslt.random_buffer(size, bf16) for size in (m * k, copies * k * n, m * n))
    at = lambda i: w.ptr + i % copies * 2 * k * n
    gemm = Gemm(Layout(m, n, k, False, by_terms, k, k if by_terms else n, n), bf16, bf16, bf16)
    plan = cublaslt.Plan(gemm, 0, (x.ptr, w.ptr, out.ptr))
    library = microseconds(lambda i, s: plan.run(x.ptr, at(i), 0, out.ptr, stream=s.ptr))
    own = SkinnyGemm(m, n, k, bf16, bf16, by_terms=by_terms)
    times = {}
    for columns, warps in ((0, 0), *tiles):
        p = replace(own, columns=columns, warps=warps).tiled()
        kernel = Kernel(p, (k, k if by_terms else n), 0)
        launch = lambda i, s, kernel=kernel: kernel((x.ptr, at(i)), (out.ptr,), s, overlaps=i > 0)
        times[f"{p.columns}/{p.warps}"] = microseconds(launch)
    return library, times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", default="", help="columns and warps to try besides the chosen ones")
    parser.add_argument("--rows", default="1,8,16")
    options = parser.parse_args()
    listed = lambda text: [part for part in text.split(",") if part]
    tiles = [(int(c), int(w)) for c, w in (part.split("/") for part in listed(options.tiles))]
    name = device()["name"]
    bandwidth = next((rate for card, rate in BANDWIDTH.items() if card in name), 1e12)
    for k, n in SHAPES:
        for by_terms in (False, True):
            for m in map(int, listed(options.rows)):
                library, times = measured(m, k, n, by_terms, tiles)
                share = lambda us, k=k, n=n: 100 * 2 * k * n / (1e-6 * us) / bandwidth
                cells = " ".join(f"{name} {us:6.2f} ({share(us):3.0f}%)" for name, us in times.items())
                print(
                    f"{m:3} x {k:5} x {n:5} {'by terms' if by_terms else '        '} "
                    f"cuBLASLt {library:6.2f} us ({share(library):3.0f}%)  kernel {cells}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
