"""What a device takes of energy, and how much power it may take: by NVML, the driver's own library.

Kernels, stage 8, below ``cublaslt``. The counter goes up by what was taken since it last moved, some ten times a second
on an H200. Where there is no such library or counter there is no ``Meter``, and nothing else is lost.
"""

from __future__ import annotations

import ctypes
import functools

from blufunc.kernels import cuda_runtime


class Meter:
    """A device's counter of energy.

    Args:
      pci_bus: where the device is, as the driver writes it.
      nvml: the library.
    Raises:
      OSError: the device has no counter, or no limit of power.

    Attributes:
      limit: the power that it may take, in watts.
    """

    def __init__(self, pci_bus: str, nvml: ctypes.CDLL):
        self._nvml, self._device = nvml, ctypes.c_void_p()
        _check(nvml.nvmlInit_v2(), "open NVML")
        found = nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_bus.encode(), ctypes.byref(self._device))
        _check(found, f"find the device at {pci_bus}")
        milliwatts = ctypes.c_uint()
        status = nvml.nvmlDeviceGetEnforcedPowerLimit(self._device, ctypes.byref(milliwatts))
        _check(status, "read the limit of power")
        self.limit = milliwatts.value / 1e3
        self.joules()

    def joules(self) -> float:
        """What the device has taken since its driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        status = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules))
        _check(status, "read the counter of energy")
        return millijoules.value / 1e3


@functools.cache
def meter(device: int = 0) -> Meter | None:
    """That of a CUDA device; None: it has none."""
    import cupy

    cuda_runtime.require()
    try:
        made = Meter(cupy.cuda.runtime.deviceGetPCIBusId(device), ctypes.CDLL("libnvidia-ml.so.1"))
    except (OSError, AttributeError):  # no library, no counter, or a library that does not know of counters
        return None
    return made if made.limit > 0 else None


def _check(status: int, what: str) -> None:
    if status:
        raise OSError(f"NVML could not {what}: error {status}")
