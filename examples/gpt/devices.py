"""The devices of a run: one, or a mesh that divides each batch (data parallelism).

Stands before the training loop. In: how many devices are asked for, and the processes that a launcher started. Out: a
``Layout``, which puts parameters and batches where they belong. What computes with them is written for one device:
``jit`` follows its arguments, and sums gradients over the mesh where they need it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import blufunc as bf
from blufunc import P
from blufunc.errors import DataError


@dataclasses.dataclass(frozen=True)
class Layout:
    """One device where there is no mesh; otherwise parameters are on each device, and batches are divided."""

    mesh: bf.Mesh | None = None

    @property
    def leads(self) -> bool:
        """Whether this process is the one that prints and saves."""
        return bf.process_index() == 0

    def everywhere(self, values: Any) -> Any:
        """The arrays of a pytree on each device."""
        return values if self.mesh is None else bf.device_put(values, bf.NamedSharding(self.mesh, P()))

    def divided(self, batch: np.ndarray) -> Any:
        """The rows of a batch shared out; each process takes its own."""
        if self.mesh is None:
            return batch
        sharding = bf.NamedSharding(self.mesh, P("data"))
        return bf.make_array_from_callback(batch.shape, sharding, lambda rows: batch[rows])

    def here(self, values: Any) -> Any:
        """Arrays that are on each device, on this process's alone."""
        return values if self.mesh is None else bf.device_put(values, bf.local_devices()[0])

    def any(self, flag: bool) -> bool:
        """Whether any process says so: all stop at the same step, or some would wait for the others."""
        return flag if bf.process_count() == 1 else bool(bf.multihost.process_allgather(flag).any())


def layout(asked: dict[str, int] | None, batch: int) -> Layout:
    """The layout for the axes of a mesh, by default that of all processes.

    A process that is alone takes the CPU for as many devices as it needs.
    """
    processes = bf.process_count()
    if asked is None and processes == 1:
        return Layout()
    n = (asked or {}).get("data", processes)
    if processes > 1 and n != processes:
        raise DataError(
            f"a mesh of {n} devices for {processes} processes",
            where=f"--mesh data={n}",
            why="each process has one device of the mesh",
            fix=f"--mesh data={processes}, or launch {n} processes",
        )
    if batch % n:
        raise DataError(
            f"a batch of {batch} cannot be divided among {n} devices",
            where=f"--mesh data={n}",
            fix=f"--batch {-(-batch // n) * n}",
        )
    if processes == 1 and bf.default_backend() == "cpu":
        bf.config.cpu_devices = max(bf.config.cpu_devices, n)
    return Layout(bf.make_mesh((n,), ("data",)))
