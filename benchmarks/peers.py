"""Timing helpers that the benchmarks share: medians after warm-up, and ratios to a peer in the same run."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata


def seconds(function: Callable[[], object], calls: int, repeats: int = 9) -> float:
    """The median over ``repeats`` of the time of one call, each measured over ``calls`` calls after a warm-up."""
    for _ in range(max(1, calls // 5)):
        function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def together(
    ours: Callable[[], object], theirs: Callable[[], object], calls: int, repeats: int = 9
) -> tuple[float, float]:
    """``seconds`` of both, measured in turns so that a noisy machine disturbs both alike."""
    pairs = [(seconds(ours, calls, 1), seconds(theirs, calls, 1)) for _ in range(repeats)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def row(what: str, ours: float, theirs: float, unit: str = "us", scale: float = 1e6) -> dict:
    """Print one line with both times and our time as a ratio to the peer's; return it as a record."""
    print(
        f"{what:<44} blufunc {ours * scale:10.2f} {unit}   jax {theirs * scale:10.2f} {unit}   ratio {ours / theirs:6.3f}"
    )
    return {
        "what": what,
        "unit": unit,
        "blufunc": ours * scale,
        "jax": theirs * scale,
        "ratio": ours / theirs,
    }


def report(name: str, rows: list[dict]) -> None:
    """Print a benchmark's records and the versions they hold for as one line of JSON."""
    versions = {p: metadata.version(p) for p in ("numpy", "jax")}
    print(json.dumps({"benchmark": name, "python": platform.python_version(), **versions, "rows": rows}))
