"""Snapshots: host copies of buffers that overlap the device's work.

Kernels, stage 8, above ``memory``. In: buffers. Out: for each a function that copies it to the host, for a thread that
saves a checkpoint. A snapshot holds its buffer until it is copied. Before a program overwrites the buffer, the snapshot
moves to a copy (``make_way``): so the program keeps its addresses, and with them its graph. If memory runs out
meanwhile, the pool waits for the snapshots.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.ir.avals import DEVICE
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer

_PATIENCE = 60.0
"""Seconds that an allocation waits for snapshots: enough for a whole device."""

_ALIGNMENT = 256
"""Alignment of copies in one allocation, in bytes: enough for fast ones."""


class Snapshot:
    """The values that a buffer has once an event has passed.

    Attributes:
      device: index of the CUDA device.
    """

    def __init__(self, buffer: DeviceBuffer, after: Any):
        self.device = buffer.device
        self._lock = threading.Lock()
        self._buffer: DeviceBuffer | None = buffer
        self._after: Any = after

    def __call__(self) -> np.ndarray:
        """The values, read-only; once."""
        with self._lock:
            assert self._buffer is not None, "a snapshot is read once"
            x = np.empty(self._buffer.shape, self._buffer.dtype)
        driver.copy_out_aside(x, self._enqueue, self.device)
        with self._lock:
            self._buffer = None
        with _changed:
            _pending.discard(self)
            _changed.notify_all()
        x.flags.writeable = False
        return x

    def _enqueue(self, to: int, start: int, nbytes: int, stream: Any) -> None:
        """Enqueue a copy of a part of the values on ``stream``."""
        with self._lock:
            assert self._buffer is not None
            if self._after is not None:
                stream.wait_event(self._after)
                self._after = None
            driver.transfer(to, self._buffer.ptr + start, nbytes, stream)

    def buffer_in(self, memories: set[int]) -> DeviceBuffer | None:
        """Buffer that is still to be copied, if in one of these allocations."""
        buffer = self._buffer
        return buffer if buffer is not None and buffer.memory in memories else None

    def move(self, copy: DeviceBuffer, after: Any) -> None:
        """Go on with a copy of the buffer, which is there after an event."""
        with self._lock:
            if self._buffer is not None:
                self._buffer, self._after = copy, after


_pending: weakref.WeakSet[Snapshot] = weakref.WeakSet()
_lock = threading.Lock()
_changed = threading.Condition(_lock)


def snapshots(buffers: Sequence[DeviceBuffer]) -> list[Snapshot]:
    """Snapshots of the values that the work issued so far gives to buffers."""
    events: dict[int, Any] = {}
    for device in {b.device for b in buffers}:
        with driver.on_device(device):
            events[device] = driver.recorded(driver.compute_stream(device))
    made = [Snapshot(b, events[b.device]) for b in buffers]
    with _lock:
        _pending.update(made)
    return made


def make_way(buffers: Sequence[DeviceBuffer]) -> None:
    """Let later work overwrite buffers: their snapshots move to copies."""
    memories = {b.memory for b in buffers}
    with _lock:
        found = [(s, b) for s in _pending if (b := s.buffer_in(memories)) is not None]
    for device in {s.device for s, _ in found}:
        _make_way(device, [(s, b) for s, b in found if s.device == device])


def _make_way(device: int, held: Sequence[tuple[Snapshot, DeviceBuffer]]) -> None:
    buffers = [b for _, b in held]
    try:
        copies = _like(buffers, device)
    except errors.OutOfMemoryError:
        wait(device)
        return
    stream = driver.compute_stream(device)
    pairs = [
        (c.ptr, b.ptr, b.nbytes) for c, b in zip(copies, buffers, strict=True) if b.memory_kind == DEVICE
    ]
    with driver.on_device(device):
        driver.copy_all_on_device(pairs, stream)
        for c, b in zip(copies, buffers, strict=True):
            if b.memory_kind != DEVICE:
                driver.transfer(c.ptr, b.ptr, b.nbytes, stream)
        copied = driver.recorded(stream)
    for (s, _), copy in zip(held, copies, strict=True):
        s.move(copy, copied)
    # No part of the buffers is read from here on, but for those that are under way.
    driver.follow_aside(device)


def _like(buffers: Sequence[DeviceBuffer], device: int) -> list[DeviceBuffer]:
    """Memory for copies of buffers; on the device it is one allocation."""
    label = "copies of donated arrays for a checkpoint"
    ends = list(
        itertools.accumulate(
            -(-b.nbytes // _ALIGNMENT) * _ALIGNMENT for b in buffers if b.memory_kind == DEVICE
        )
    )
    block = cuda_memory.allocate((ends[-1] if ends else 0,), np.dtype(np.uint8), device, label)
    starts = iter([0, *ends])
    return [
        block.view(b.shape, b.dtype, next(starts))
        if b.memory_kind == DEVICE
        else cuda_memory.pool_of(b.memory_kind, device).allocate(b.shape, b.dtype, label)
        for b in buffers
    ]


def wait(device: int) -> None:
    """Wait until the snapshots of a device have been copied, or were given up."""
    end = time.monotonic() + _PATIENCE
    with _changed:  # no notification tells of those that are given up
        while any(s.device == device for s in _pending) and time.monotonic() < end:
            _changed.wait(0.1)


cuda_memory.reliefs.append(wait)
