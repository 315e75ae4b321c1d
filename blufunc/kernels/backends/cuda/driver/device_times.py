"""Times of a device's steps on the clock of the host, for recordings.

Kernels, stage 8. In: events between the steps of programs. Out, when the recording ends: the steps with the host's
times. A pair of an event and the host's clock, taken when the device is idle, ties the two clocks together.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from blufunc.core.arrays import recording
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory

_MOST = 4096
"""Maximum events that wait to be read."""

_LONGEST = 10.0
"""Seconds after which the clocks are tied again: elapsed times are float32."""


class _Tie(NamedTuple):
    """An event, and the host's clock when it had just passed."""

    event: Any
    at: int


class _Run(NamedTuple):
    """A run of a program: an event before each step, and one after the last."""

    program: Any
    names: Sequence[str]
    events: Sequence[Any]
    tie: _Tie


class DeviceTimes:
    """The steps that a device ran during a recording.

    Args:
      to: the recording.
      device: its index.
    """

    def __init__(self, to: recording.Recording, device: int):
        self.to, self.device = to, device
        self._lock = threading.RLock()  # steps of two threads would be in turns on the one stream
        self._depth = 0
        self._waiting: list[_Run] = []
        self._last = 0  # the end of what was read
        self._tie = self._tied()

    def _tied(self) -> _Tie:
        """Tie the device's clock to the host's."""
        cuda_memory.synchronize(self.device)
        with driver.on_device(self.device):
            event = driver.recorded(driver.compute_stream(self.device))
        cuda_memory.synchronize(self.device)
        return _Tie(event, max(recording.clock(), self._last))  # rounding may not turn time back

    @contextlib.contextmanager
    def running(self, program: Any, names: Sequence[str]) -> Iterator[list[Any]]:
        """Context of a run; its events are to be appended to the list."""
        events: list[Any] = []
        with self._lock:
            if not self._depth and self._is_due():
                self.read()
                self._tie = self._tied()
            self._depth += 1
            try:
                yield events
            finally:
                self._depth -= 1
                self._waiting.append(_Run(program, names, events, self._tie))

    def _is_due(self) -> bool:
        waiting = sum(len(run.events) for run in self._waiting)
        return waiting > _MOST or recording.clock() - self._tie.at > 1e9 * _LONGEST

    def read(self) -> None:
        """Wait for the device, and add its steps to the recording."""
        with self._lock:
            runs, self._waiting = self._waiting, []
            cuda_memory.synchronize(self.device)
            for run in runs:
                if run.events:
                    times = _times(run)
                    self._last = max(self._last, times[-1])
                    self.to.steps(run.program, run.names, f"cuda:{self.device}", 0, times)


def _times(run: _Run) -> list[int]:
    """The events of a run on the host's clock, each measured from the one before it."""
    times = [run.tie.at + round(1e9 * driver.seconds_between(run.tie.event, run.events[0]))]
    for before, event in itertools.pairwise(run.events):
        times.append(times[-1] + round(1e9 * driver.seconds_between(before, event)))
    return times


def of(to: recording.Recording, device: int) -> DeviceTimes:
    """The times of a device in a recording."""
    with to.lock:
        found = to.devices.get(device)
        if found is None:
            found = to.devices[device] = DeviceTimes(to, device)
            to.finishing.append(found.read)
    return found
