"""Timing and output of the peer programs: rows as JSON lines, asynchronous work.

A program prints one JSON object per line; ``benchmarks/suites/gpu.py`` reads them on arrival, so an interrupted program
has still reported its rows.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

FLUSH_BYTES = 256 << 20  # larger than the L2 of any device
ROTATE_BYTES = 512 << 20  # inputs rotate until this many bytes have been read between two uses of one


def emit(**row: Any) -> None:
    """Emit one row."""
    print(json.dumps(row), flush=True)


def emit_versions(*packages: str) -> None:
    """Emit the versions of the installed packages."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    emit(versions=found)


def attempt(what: str, measurement: Callable[[], None]) -> None:
    """Run it; on failure, emit an error row so that the other rows still run."""
    try:
        measurement()
    except Exception as error:
        emit(what=what, error=f"{type(error).__name__}: {error}"[:600])


def copies(nbytes: int) -> int:
    """Number of copies of inputs of ``nbytes``, so that no cache holds the next one."""
    return max(1, min(16, math.ceil(ROTATE_BYTES / max(1, nbytes)))) if nbytes < ROTATE_BYTES else 1


def wall_ms(
    call: Callable[[int], Any],
    wait: Callable[[Any], Any],
    budget: float = 0.3,
    repeats: int = 5,
    least: int = 3,
) -> float:
    """Milliseconds of one asynchronous ``call(i)``; ``wait(result)`` synchronizes.

    Calls run back to back, as in a program; the result is the median of ``repeats`` such runs of ``budget`` seconds in
    total, and of ``least`` calls each.
    """
    for i in range(3):
        wait(call(i))
    start = time.perf_counter()
    wait(call(0))
    one = time.perf_counter() - start
    n = max(least, min(500, int(budget / repeats / max(one, 1e-6))))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for i in range(n):
            result = call(i)
        wait(result)
        times.append((time.perf_counter() - start) / n)
    return 1e3 * statistics.median(times)


def event_ms(call: Callable[[int], Any], stream: Any, repeats: int | None = None) -> float:
    """Milliseconds of device time of one ``call(i)`` on a CuPy stream, as a median.

    Ahead of each call, L2 is overwritten on the same stream, which also gives the host time to enqueue the whole
    call. Without ``repeats``, the counts are those of Triton's ``do_bench`` for PyTorch (50 milliseconds of warm-up
    calls and 200 that count), so that devices are equally warm.
    """
    import cupy

    scratch = cupy.cuda.alloc(FLUSH_BYTES)

    def runs(count: int) -> list[tuple]:
        events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(count)]
        for i, (start, stop) in enumerate(events):
            cupy.cuda.runtime.memsetAsync(scratch.ptr, 0, FLUSH_BYTES, stream.ptr)
            start.record(stream)
            call(i)
            stop.record(stream)
        stream.synchronize()
        return events

    if repeats is None:
        for i in range(3):  # these compile and capture
            call(i)
        stream.synchronize()
        few = runs(6)
        each = cupy.cuda.get_elapsed_time(few[0][1], few[-1][1]) / 5
        for i in range(max(1, int(50 / each))):
            call(i)
        repeats = max(1, int(200 / each))
    return statistics.median(cupy.cuda.get_elapsed_time(*pair) for pair in runs(repeats))
