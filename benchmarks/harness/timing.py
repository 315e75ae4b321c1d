"""Shared by the CPU suites: medians after warm-up, ratios to a peer, records."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import blufunc

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("numpy", "jax", "torch", "transformers")
"""Packages whose versions a record has, if they are installed."""


def seconds(function: Callable[[], object], calls: int) -> float:
    """Seconds per call, averaged over ``calls`` calls after a warm-up."""
    for _ in range(max(1, calls // 5)):
        function()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def together(
    ours: Callable[[], object], theirs: Callable[[], object], calls: int, repeats: int = 9
) -> tuple[float, float]:
    """Median ``seconds`` of both, measured alternately: noise affects both equally."""
    pairs = [(seconds(ours, calls), seconds(theirs, calls)) for _ in range(repeats)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def row(what: str, ours: float, theirs: float, unit: str = "us", peer: str = "jax") -> dict:
    """Print both times and blufunc's ratio to the peer; return them as a record."""
    ratio = ours / theirs
    print(
        f"{what:<42} blufunc {ours:10.3f} {unit}   {peer} {theirs:10.3f} {unit}   ratio {ratio:6.3f}",
        flush=True,
    )
    return {"what": what, "unit": unit, "blufunc": ours, peer: theirs, "ratio": ratio}


def report(name: str, rows: list[dict], platform_name: str = "cpu", device: str = "") -> None:
    """Write records to ``results/NAME-PLATFORM.json``.

    Only if ``BLUFUNC_SAVE_RESULTS`` is set. The record includes date, machine and versions.
    """
    if not os.environ.get("BLUFUNC_SAVE_RESULTS"):
        return
    record = {
        "benchmark": name,
        "platform": platform_name,
        "date": datetime.date.today().isoformat(),
        "device": device or f"{_processor()}, {os.cpu_count()} cores",
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "default"),
        "versions": {"python": platform.python_version(), "blufunc": blufunc.__version__}
        | {p: metadata.version(p) for p in PACKAGES if importlib.util.find_spec(p)},
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}-{platform_name}.json").write_text(json.dumps(record, indent=1) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
