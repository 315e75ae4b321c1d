"""How much of a device's memory is taken, as the driver counts it: the same way for every library.

``Watch`` asks NVML, the driver's own library, while programs run. What it finds has all in it that a process takes: its
arrays, what its allocator holds beside them, the kernels' code, workspaces, and the context (about half a gigabyte).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

INTERVAL = 0.02  # seconds between two questions


class Watch:
    """A context; ``peak`` is then how many bytes more were taken at most than at least, or None without a device.

    Allocators keep what they once had, so that what comes and goes between two questions is in the next answer.
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
                self.peak = None  # no figure is better than one of a part of the time
                return
            self._least = min(self._least, now)  # what others have just left may still go at the start
            self.peak = max(self.peak, now - self._least)


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def first_device() -> int:
    """The number of the first device that programs see, as the driver and its tools count all devices."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return int(first) if first.isdecimal() else 0


def reader() -> Callable[[], int] | None:
    """A function for the bytes that are taken of the first device; None where there is no NVML or no such device."""
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
