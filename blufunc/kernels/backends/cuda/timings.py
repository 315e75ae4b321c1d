"""Timings of a program's steps on a CUDA device.

Kernels, after stage 8. In: an executor and buffers. Out: the result of ``CudaProgram.timings``, which
``inspect/program.py`` compares with estimated costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.executor import Executor
from blufunc.kernels.timings import StepTime, medians


def times_of(executor: Executor, bases: Sequence[DeviceBuffer], repeats: int) -> list[StepTime]:
    """Median time of each step on these buffers, launched one by one."""
    stream = driver.compute_stream(executor.device)
    executor.launch(bases, stream)  # warm up: exclude loading and autotuning
    runs = [_run(executor, bases, stream) for _ in range(repeats)]
    return medians([w.name for w in executor.works], runs)


def _run(executor: Executor, bases: Sequence[DeviceBuffer], stream: Any) -> list[float]:
    """Seconds of each step."""
    events: list[Any] = []
    executor.launch(bases, stream, between=lambda n: events.append(driver.recorded(stream)))
    stream.synchronize()
    return [driver.seconds_between(a, b) for a, b in itertools.pairwise(events)]
