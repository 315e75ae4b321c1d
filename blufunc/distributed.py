"""Multi-process programs, under the names of JAX's ``distributed``.

Face over ``parallel.runtime.bootstrap``. After ``initialize()``, ``bf.devices()`` has the devices of all processes, and
on meshes of them each process computes its shards.
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
    "job_id",
    "local_device_count",
    "local_devices",
    "process_count",
    "process_index",
    "restart_count",
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
    """Join the job of this process; no effect if it has already joined.

    Missing arguments come from the variables of the launcher: ``python -m blufunc.parallel.launch``, torchrun,
    Open MPI or Slurm. Without these, the process is a job by itself.

    Args:
      coordinator_address: ``host:port`` of process 0.
      num_processes: the number of processes.
      process_id: the index of this one.
      local_device_ids: the index of its GPU among visible ones: its index on its host.
      initialization_timeout: seconds to wait for others, here and in every collective; default ``BLUFUNC_DEADLINE``,
        or 300.
    Raises:
      ArgumentError, ValueRangeError: inconsistent arguments or variables of a launcher.
      CollectiveError: the others do not arrive in time.
    """
    bootstrap.initialize(
        coordinator_address, num_processes, process_id, local_device_ids, deadline=initialization_timeout
    )


def shutdown() -> None:
    """Leave the job; called automatically at exit."""
    bootstrap.shutdown()


def is_initialized() -> bool:
    """True if this process has joined a job."""
    return bootstrap.world() is not None


def is_launched() -> bool:
    """True if a launcher's variables describe a job of several processes.

    Raises:
      ArgumentError, ValueRangeError: inconsistent variables.
    """
    return bootstrap.find_placement(os.environ).size > 1


def restart_count() -> int:
    """Number of times that the launcher has started this job again; 0 without one.

    Of ``python -m blufunc.parallel.launch --restarts``, torchrun's ``--max-restarts`` or Slurm's requeue. The number of
    processes that are left is ``process_count()``, and ``make_mesh((-1, 2), ("data", "model"))`` is a mesh of them.

    Raises:
      ValueRangeError: the launcher's variable is not an integer.
    """
    return bootstrap.restart_count(os.environ)


def job_id() -> str | None:
    """The id that the launcher has given the job, the same after restarts; or None."""
    return bootstrap.job_id(os.environ)
