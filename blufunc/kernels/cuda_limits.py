"""What a CUDA device allows, and the device that figures were chosen for.

Kernels, stage 6, below all that writes kernels for a GPU; ``cuda_runtime.py`` asks the device that is there.
"""

from __future__ import annotations

from typing import NamedTuple

SM_COUNT = 132
"""Multiprocessors of the device that figures were chosen for."""

SHARED_BYTES = 227 << 10
"""What a block may have of shared memory there."""

UNASKED_BYTES = 48 << 10
"""What a block may have of shared memory without telling the driver before; static, it may not have more (CUDA C++
Programming Guide, "Compute Capabilities")."""

STATIC_BYTES = 4 << 10
"""What is left of shared memory for exchanges, and to the system."""

CLUSTER_BLOCKS = 8
"""Blocks that a cluster may have on every device that has clusters (CUDA C++ Programming Guide, "Thread Block
Clusters")."""


class Limits(NamedTuple):
    """What a device allows.

    Attributes:
      shared_bytes: of shared memory for a block.
      cluster: blocks of a cluster; 1: it has no clusters.
    """

    shared_bytes: int = SHARED_BYTES
    cluster: int = CLUSTER_BLOCKS

    @property
    def bulk(self) -> bool:
        """Whether one instruction copies many bytes to shared memory: what has clusters has it."""
        return self.cluster > 1


HOPPER = Limits()
"""The limits of the device that figures were chosen for."""


def limits_of(capability: tuple[int, int], shared_bytes: int) -> Limits:
    """The limits of a device of a compute capability, whose blocks may have so many bytes of shared memory."""
    return Limits(shared_bytes, CLUSTER_BLOCKS if capability >= (9, 0) else 1)
