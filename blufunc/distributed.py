"""One program as several processes, under the names of JAX's ``distributed``.

Face. After ``initialize()``, ``bf.devices()`` has the devices of all processes, and on meshes of them each process
computes its shards.
"""

from __future__ import annotations

import os

from blufunc.parallel.runtime import bootstrap
from blufunc.transforms.staging.transfer import (
    device_count,
    devices,
    local_device_count,
    local_devices,
    process_count,
    process_index,
)

__all__ = [
    "device_count",
    "devices",
    "initialize",
    "is_initialized",
    "is_launched",
    "local_device_count",
    "local_devices",
    "process_count",
    "process_index",
    "shutdown",
]


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | None = None,
    *,
    initialization_timeout: float | None = None,
) -> None:
    """Join the job that this process is part of; nothing happens if it has.

    What is not given is taken from the variables of the launcher: ``python -m blufunc.parallel.launch``, torchrun,
    Open MPI or Slurm. Without these, the process is a job of its own.

    Args:
      coordinator_address: ``host:port`` of process 0.
      num_processes: how many processes there are.
      process_id: the number of this one.
      local_device_ids: the number of its GPU among those that it sees: its number on its host.
      initialization_timeout: the seconds to wait for others, here and in every collective; ``BLUFUNC_DEADLINE``,
        or 300.
    Raises:
      ArgumentError, ValueRangeError: arguments, or variables of a launcher, that make no sense together.
      CollectiveError: the others do not come.
    """
    bootstrap.initialize(
        coordinator_address, num_processes, process_id, local_device_ids, deadline=initialization_timeout
    )


def shutdown() -> None:
    """Leave the job, at the end of the program; done by itself when it ends."""
    bootstrap.shutdown()


def is_initialized() -> bool:
    """Whether this process has joined a job."""
    return bootstrap.world() is not None


def is_launched() -> bool:
    """Whether a launcher's variables say that this process is one of several.

    Raises:
      ArgumentError, ValueRangeError: they make no sense together.
    """
    return bootstrap.find_placement(os.environ).size > 1
