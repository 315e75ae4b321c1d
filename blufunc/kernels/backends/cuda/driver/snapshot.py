"""Snapshots: host copies of buffers that overlap the device's work.

Kernels, stage 8, above ``memory``. In: a buffer. Out: a function that copies it to the host, for a thread that saves a
checkpoint. A snapshot holds its buffer until it is copied, so a program that the buffer is donated to gets a copy
(``CudaBackend.claim``). If memory runs out meanwhile, the pool waits for the copies.
"""

from __future__ import annotations

import threading
import time
import weakref

import numpy as np

from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer

_PATIENCE = 60.0
"""Seconds that an allocation waits for snapshots: enough for a whole device."""


class Snapshot:
    """The values that a buffer has once the work issued so far is done."""

    def __init__(self, buffer: DeviceBuffer):
        self.device = buffer.device
        self.copied = threading.Event()
        self._buffer: DeviceBuffer | None = buffer
        with driver.on_device(self.device):
            self._after = driver.recorded(driver.compute_stream(self.device))
        with _lock:
            _pending.add(self)

    def __call__(self) -> np.ndarray:
        """The values, read-only; once."""
        buffer = self._buffer
        assert buffer is not None, "a snapshot is read once"
        x = np.empty(buffer.shape, buffer.dtype)
        driver.copy_out_aside(x, buffer.ptr, self.device, self._after)
        self._buffer = buffer = None
        self.copied.set()
        with _lock:
            _pending.discard(self)
        x.flags.writeable = False
        return x


_pending: weakref.WeakSet[Snapshot] = weakref.WeakSet()
_lock = threading.Lock()


def wait(device: int) -> None:
    """Wait until the snapshots of a device have been copied, or were given up."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with _lock:
            found = next((s.copied for s in _pending if s.device == device), None)
        if found is None:
            return
        found.wait(0.1)


cuda_memory.reliefs.append(wait)
