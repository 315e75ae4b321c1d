"""Device memory in use, as the driver reports it for every library.

``Watch`` polls NVML, the driver's own library, while programs run. The figure includes everything that a process
allocates: arrays, allocator caches, kernel code, workspaces, and the context (about half a gigabyte).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

INTERVAL = 0.02  # seconds between two polls


class Watch:
    """Context manager; ``peak``: the rise in allocated bytes, None without a device.

    Allocators keep their largest footprint, so short-lived allocations show up in the next poll.
    """

    def __init__(self, platform: str, used: Callable[[], int] | None = None):
        self.used = used or (reader() if platform == "cuda" else None)
        self.peak: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        if self.used is not None:
            self._least, self.peak = self.used(), 0
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        if self.used is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL):
            try:
                now = self.used()
            except OSError:
                self.peak = None  # a partial figure would be misleading
                return
            self._least = min(self._least, now)  # memory of the previous process may still be freed
            self.peak = max(self.peak, now - self._least)


class _Memory(ctypes.Structure):
    """The struct nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def first_device() -> int:
    """Index of the first visible device in the numbering of the driver and its tools."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return int(first) if first.isdecimal() else 0


def reader() -> Callable[[], int] | None:
    """Function for the allocated bytes of the first device; None without NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(first_device(), ctypes.byref(device)):
        return None

    def used() -> int:
        status = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        if status:
            raise OSError(f"nvmlDeviceGetMemoryInfo: error {status}")
        return memory.used

    return used
