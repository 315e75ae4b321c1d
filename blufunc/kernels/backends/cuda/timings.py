"""How long the steps of a program take on a CUDA device.

Kernels, beside stage 8: what ``CudaProgram.timings`` returns; ``inspect/program.py`` puts it beside what the steps
cost.
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
    """The time of each step on these buffers, launched by itself: the median over some runs."""
    stream = driver.compute_stream(executor.device)
    executor.launch(bases, stream)  # what is loaded or chosen at the first run is not to be timed
    runs = [_run(executor, bases, stream) for _ in range(repeats)]
    return medians([w.name for w in executor.works], runs)


def _run(executor: Executor, bases: Sequence[DeviceBuffer], stream: Any) -> list[float]:
    """The seconds of each step."""
    events: list[Any] = []
    executor.launch(bases, stream, between=lambda n: events.append(driver.recorded(stream)))
    stream.synchronize()
    return [driver.seconds_between(a, b) for a, b in itertools.pairwise(events)]
