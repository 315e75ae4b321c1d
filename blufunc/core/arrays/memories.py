"""Memories: where a device keeps arrays, and their names.

Core, used wherever a user names a memory. In: a ``Space``, or a kind as a string. Out: the kind that types carry
(``ShapedArray.memory``). A CUDA device has two memories: its own, and page-locked memory of its host, which its copy
engines reach while it computes. A CPU has one, whatever the kind.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.avals import DEVICE, PINNED_HOST

KINDS = (DEVICE, PINNED_HOST)
"""All kinds of memory, the default one first."""


class Space(enum.Enum):
    """A memory without its device: ``device_put(x, Space.Host)`` keeps the device.

    ``Any`` is either: a value that is put there stays where it is.
    """

    Device = DEVICE
    Host = PINNED_HOST
    Any = "any"

    def __repr__(self) -> str:
        return f"Space.{self.name}"


def move_to(kind: str, value: str = "value") -> str:
    """The call that moves a value into a kind of memory, for errors."""
    return f"bf.device_put({value}, bf.memory.{Space(kind)!r})"


@dataclass(frozen=True)
class Memory:
    """A memory of a device.

    Attributes:
      kind: ``"device"`` or ``"pinned_host"``.
      device: the device that it belongs to.
    """

    kind: str
    device: Any

    @property
    def platform(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.device.platform

    @property
    def process_index(self) -> int:
        """Rank of the owning process."""
        return self.device.process_index

    def addressable_by_devices(self) -> list[Any]:
        """The devices whose programs reach this memory."""
        return [self.device]

    def __str__(self) -> str:
        return f"{self.kind} of {self.device}"


def kind_of(memory: Any, what: str) -> str:
    """The kind of memory that a string names; None is the default one.

    Args:
      what: the user's name for it, for the error.
    Raises:
      ValueRangeError: it is no kind of memory.
    """
    if memory is None:
        return DEVICE
    if memory not in KINDS:
        raise errors.ValueRangeError(
            f"{what}: there is no memory {memory!r:.60}.",
            where=source.here(),
            fix=f"use {' or '.join(map(repr, KINDS))}",
        )
    return memory
