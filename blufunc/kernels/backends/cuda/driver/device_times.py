"""Times of a device's steps on the clock of the host, for recordings.

Kernels, stage 8. In: events between the steps of programs. Out, when the recording ends: the steps with the host's
times. A pair of an event and the host's clock, taken when the device is idle, ties the two clocks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blufunc.core.arrays import recording
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory

_MOST = 4096
"""Maximum events that wait to be read; more wait for the device."""


class DeviceTimes:
    """The steps that a device ran during a recording.

    Args:
      to: the recording.
      device: its index.
    """

    def __init__(self, to: recording.Recording, device: int):
        self.to, self.device = to, device
        self._waiting: list[tuple[Any, Sequence[str], Sequence[Any]]] = []
        self._count = 0
        self._tie()

    def _tie(self) -> None:
        """Tie the device's clock to the host's."""
        cuda_memory.synchronize(self.device)
        with driver.on_device(self.device):
            self._first = driver.recorded(driver.compute_stream(self.device))
        cuda_memory.synchronize(self.device)
        self._first_ns = recording.clock()

    def append(self, program: Any, names: Sequence[str], events: Sequence[Any]) -> None:
        """Add a run: an event before each step, and one after the last."""
        self._waiting.append((program, names, events))
        self._count += len(events)
        if self._count > _MOST:
            self.read()
            self._tie()

    def read(self) -> None:
        """Wait for the device, and add its steps to the recording."""
        cuda_memory.synchronize(self.device)
        for program, names, events in self._waiting:
            times = [self._first_ns + round(1e9 * driver.seconds_between(self._first, e)) for e in events]
            self.to.steps(program, names, f"cuda:{self.device}", times)
        self._waiting.clear()
        self._count = 0


def of(to: recording.Recording, device: int) -> DeviceTimes:
    """The times of a device in a recording."""
    with to.lock:
        found = to.devices.get(device)
        if found is None:
            found = to.devices[device] = DeviceTimes(to, device)
            to.finishing.append(found.read)
    return found
