"""How long the steps of a program take on a CUDA device, and what share that is of what the device could do.

Kernels, beside stage 8: what ``CudaProgram.timings`` returns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from blufunc.core import source
from blufunc.kernels import cuda_runtime
from blufunc.kernels.cuda_executor import Executor, Work, touched, type_of
from blufunc.kernels.cuda_memory import DeviceBuffer
from blufunc.kernels.steps import OpaqueStep

_BANDWIDTH = {"H200": 4.8e12, "H100 NVL": 3.9e12, "H100 PCIe": 2.0e12, "H100": 3.35e12, "A100": 2.0e12}
"""Bytes a second of device memory, by a part of the device's name: the vendor's data sheets. The first that fits."""


class StepTime(NamedTuple):
    """One step.

    Attributes:
      name: the kernel, or the primitive.
      where: the user's lines.
      ms: milliseconds.
      bytes: what it reads and writes at least.
      flops: multiplications and additions of a product; 0 for other steps.
      share: the time in which the memory could move ``bytes``, as a part of the time taken; None where the memory's
        speed is not known.
    """

    name: str
    where: str
    ms: float
    bytes: int
    flops: int
    share: float | None


def times_of(executor: Executor, bases: Sequence[DeviceBuffer], repeats: int) -> list[StepTime]:
    """The least time of each step over some runs on these buffers."""
    import cupy

    stream = cuda_runtime.compute_stream(executor.device)
    executor.launch(bases, stream)  # what is loaded or chosen at the first run is not to be timed
    best = [math.inf] * len(executor.works)
    for _ in range(repeats):
        events: list[Any] = []

        def mark(n: int, events: list[Any] = events) -> None:
            events.append(cupy.cuda.Event())
            events[n].record(stream)

        executor.launch(bases, stream, between=mark)
        stream.synchronize()
        for n, (start, stop) in enumerate(itertools.pairwise(events)):
            best[n] = min(best[n], cupy.cuda.get_elapsed_time(start, stop))
    bandwidth = _bandwidth(cuda_runtime.properties(executor.device).name)
    return [_time(executor, w, ms, bandwidth) for w, ms in zip(executor.works, best, strict=True)]


def _bandwidth(name: str) -> float | None:
    return next((speed for part, speed in _BANDWIDTH.items() if part in name), None)


def _time(executor: Executor, work: Work, ms: float, bandwidth: float | None) -> StepTime:
    moved = sum(type_of(executor.made.values[v]).nbytes for v in dict.fromkeys(touched(work.step)))
    eqns = [work.step.eqn] if isinstance(work.step, OpaqueStep) else work.step.region.eqns
    where = "; ".join(dict.fromkeys(source.summary(e.source) for e in eqns))
    share = None if bandwidth is None or not ms else moved / bandwidth / (ms / 1e3)
    return StepTime(work.name, where, ms, moved, work.flops, share)
