"""How the programs of this folder measure and tell: rows as JSON lines, and times of work that is done later.

A program's output is one JSON object a line; ``benchmarks/suites/gpu.py`` reads them as they come, so that a program
which is cut off has still told what it found.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

FLUSH_BYTES = 256 << 20  # more than any device's second-level cache
ROTATE_BYTES = 512 << 20  # inputs are taken in turns until this much has been read between two uses of one


def emit(**row: Any) -> None:
    """Tell one row."""
    print(json.dumps(row), flush=True)


def emit_versions(*packages: str) -> None:
    """Tell the versions of the packages, as far as they are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    emit(versions=found)


def attempt(what: str, measurement: Callable[[], None]) -> None:
    """Run it; a failure is told in the place of its row, and the other rows are still to be had."""
    try:
        measurement()
    except Exception as error:
        emit(what=what, error=f"{type(error).__name__}: {error}"[:600])


def copies(nbytes: int) -> int:
    """How many copies of inputs of ``nbytes`` to take in turns, so that no cache holds the next one."""
    return max(1, min(16, math.ceil(ROTATE_BYTES / max(1, nbytes)))) if nbytes < ROTATE_BYTES else 1


def wall_ms(
    call: Callable[[int], Any], wait: Callable[[Any], Any], budget: float = 0.3, repeats: int = 5
) -> float:
    """Milliseconds of one ``call(i)``, which may return before its work is done; ``wait(result)`` waits for it.

    Calls follow each other without waiting, as in a program; the median of ``repeats`` such runs of ``budget``
    seconds in all.
    """
    for i in range(3):
        wait(call(i))
    start = time.perf_counter()
    wait(call(0))
    one = time.perf_counter() - start
    n = max(3, min(500, int(budget / repeats / max(one, 1e-6))))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for i in range(n):
            result = call(i)
        wait(result)
        times.append((time.perf_counter() - start) / n)
    return 1e3 * statistics.median(times)


def event_ms(call: Callable[[int], Any], stream: Any, repeats: int | None = None) -> float:
    """Milliseconds of device time of one ``call(i)`` whose work goes on a CuPy stream: the median over ``repeats``.

    Before each call the second-level cache is overwritten on the same stream, which also gives the host time to
    put the whole call on the stream behind it. Without ``repeats`` there are as many as Triton's ``do_bench`` makes for
    PyTorch's functions, 50 milliseconds of calls to warm up and 200 that count, so that devices are as warm.
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
        for i in range(3):  # those that compile, and capture
            call(i)
        stream.synchronize()
        few = runs(6)
        each = cupy.cuda.get_elapsed_time(few[0][1], few[-1][1]) / 5
        for i in range(max(1, int(50 / each))):
            call(i)
        repeats = max(1, int(200 / each))
    return statistics.median(cupy.cuda.get_elapsed_time(*pair) for pair in runs(repeats))
