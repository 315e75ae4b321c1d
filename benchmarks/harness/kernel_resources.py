"""Registers, spills and shared memory of kernels, from compilation logs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from blufunc.kernels.backends.cuda.driver.nvrtc import Binary

_FUNCTION = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """Resource usage of a kernel.

    Attributes:
      registers: per thread.
      shared: static shared memory per block in bytes, without that of the launch.
      spill_stores: bytes that a thread spills.
      spill_loads: bytes that a thread reloads.
      stack: bytes of a thread's stack frame.
    """

    registers: int
    shared: int
    spill_stores: int
    spill_loads: int
    stack: int


def resources(binary: Binary) -> dict[str, Resources]:
    """Resources of each kernel, by name."""
    found = {}
    for block in re.split(r"(?=Function properties for )", binary.log):
        function, stack, used = (r.search(block) for r in (_FUNCTION, _STACK, _REGISTERS))
        if function and stack and used:  # device functions have no register line
            shared = _SHARED.search(block)
            frame, stores, loads = map(int, stack.groups())
            found[function[1]] = Resources(
                int(used[1]), int(shared[1]) if shared else 0, stores, loads, frame
            )
    return found
