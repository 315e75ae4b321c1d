"""Memories of devices, and reports on what is in them.

Face. ``Space`` names a memory for ``device_put``. ``live_arrays`` and ``snapshot`` look at this process when they are
called: arrays are found through Python's garbage collector, and device memory through its allocator, so that nothing is
recorded at dispatch.
"""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from blufunc import errors
from blufunc.config import platform_of
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.arrays.memories import Memory, Space
from blufunc.core.ir import source
from blufunc.kernels.tables import size, table

__all__ = ["Allocation", "Memory", "Snapshot", "Space", "live_arrays", "snapshot"]


def live_arrays(platform: str | None = None) -> list[ConcreteArray]:
    """The arrays that Python holds and that are not deleted, in no order.

    It visits all objects of the process: fit for a report, not for every step.

    Args:
      platform: ``"cpu"`` or ``"cuda"``; default: all. An array on a mesh is on the platform of its devices.
    Raises:
      ValueRangeError: another platform.
    """
    wanted = None if platform is None else platform_of(platform)
    if wanted not in (None, "cpu", "cuda"):
        raise errors.ValueRangeError(
            f"live_arrays: there is no platform {platform!r:.60}.", where=source.here(), fix='"cpu" or "cuda"'
        )
    found = [x for x in gc.get_objects() if x.__class__ is ConcreteArray and not x.is_deleted()]
    return [x for x in found if wanted is None or x.device.own.platform == wanted]


@dataclass(frozen=True)
class Allocation:
    """Allocations of one kind.

    Attributes:
      nbytes: their bytes, all together.
      count: their number.
      memory: the kind of memory.
      type: dtype and shape.
      purpose: what they are for, with the user's line where the device keeps it.
    """

    nbytes: int
    count: int
    memory: str
    type: str
    purpose: str


@dataclass(frozen=True)
class Snapshot:
    """Contents of the memories of a device; prints as a table, the largest first.

    Attributes:
      device: its name.
      stats: ``device.memory_stats()``.
      allocations: by type and purpose, the largest first.
    """

    device: str
    stats: dict[str, int]
    allocations: tuple[Allocation, ...]

    def __str__(self) -> str:
        head = f"{self.device}: {size(self.stats['bytes_in_use'])} in use, peak {size(self.stats['peak_bytes_in_use'])}"
        if not self.allocations:
            return f"{head}; no allocation is live"
        rows = [(size(a.nbytes), str(a.count), a.memory, a.type, a.purpose) for a in self.allocations]
        return f"{head}\n" + table(("bytes", "n", "memory", "type", "purpose"), rows, ("bytes", "n"))

    def save(self, path: str | os.PathLike) -> None:
        """Write it as JSON, with the fields of this class."""
        with open(path, "w", encoding="utf-8") as f:
            json.dump(asdict(self), f, indent=1)
            f.write("\n")


def snapshot(device: backend.Device | None = None) -> Snapshot:
    """Look at the memories of a device.

    On a GPU these are the allocations of blufunc's pools, temporaries of programs included, with the user's lines. On
    the CPU they are the live arrays, of which no line is kept.

    Args:
      device: default: the default device.
    Raises:
      UnsupportedError: it is several devices, or of another process.
    """
    device = device or backend.default_device()
    stats = device.memory_stats()
    counted: Counter[tuple[str, str, str]] = Counter()
    nbytes: Counter[tuple[str, str, str]] = Counter()
    for n, *key in _allocations(device):
        counted[tuple(key)] += 1  # type: ignore[index]
        nbytes[tuple(key)] += n  # type: ignore[index]
    found = [Allocation(n, counted[key], *key) for key, n in nbytes.most_common()]
    return Snapshot(str(device), stats, tuple(found))


def _allocations(device: backend.Device) -> list[Any]:
    if device.platform != "cpu":
        return device.lender.memory_table(device)
    arrays = [x for x in live_arrays("cpu") if device in x.device.members]
    return [(x.aval.nbytes, x.aval.memory, str(x.aval), "an array") for x in arrays]
