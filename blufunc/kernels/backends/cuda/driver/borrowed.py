"""Device memory of other libraries: its release, in stream order.

Kernels, stage 8, above ``driver``. In: memory that another library lends. Out: the storage of a buffer. The owner may
reuse the memory, on its own streams, as soon as it has it back. So kernels that were enqueued before must end first:
the owner's default stream waits for them at once, and the memory is returned when an event says that they are done.
"""

from __future__ import annotations

import collections
import sys
from typing import Any

from blufunc.core.arrays.dlpack import Memory
from blufunc.kernels.backends.cuda.driver import driver

_waiting: collections.deque[tuple[Any, Memory]] = collections.deque()


class Borrowed:
    """Storage of a buffer in memory of another library.

    Attributes:
      memory: what its owner gave.
      device: index of the CUDA device.
      label: for reports.
      lent: True if a third library has seen it; its owner orders what reads it then.
    """

    __slots__ = ("device", "label", "lent", "memory")

    def __init__(self, memory: Memory, device: int, label: str):
        self.memory, self.device, self.label, self.lent = memory, device, label, False

    def __del__(self) -> None:
        if not sys.is_finalizing():
            _waiting.append((driver.followed_by(driver.LEGACY_STREAM, self.device), self.memory))


def settle() -> None:
    """Return memory whose readers are done."""
    for _ in range(len(_waiting)):
        try:
            event, memory = _waiting.popleft()
        except IndexError:  # another thread took it
            return
        if driver.is_done(event):
            memory.release()
        else:
            _waiting.append((event, memory))
