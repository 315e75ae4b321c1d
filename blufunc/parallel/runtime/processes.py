"""Meshes of several processes: the engine of this process, and agreement checks.

Parallel, at the end of stage 3 and used at stage 8. In: a mesh of which each process owns one device. Out: its engine.
Before a program first runs, it is compared between processes (``consistency_check.py``). The engine logs its
collectives for the job's watchdog (``bootstrap.World``), which ends this process when another is gone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.parallel.mesh.mesh import Mesh
from blufunc.parallel.runtime import bootstrap, consistency_check, engine
from blufunc.parallel.runtime.mpi import MpiEngine
from blufunc.parallel.runtime.nccl import NcclEngine


def members_of(mesh: Mesh) -> list[int]:
    """The process of each rank of a mesh."""
    return [device.process_index for device in mesh.device_list]


def world_of(mesh: Mesh) -> bootstrap.World:
    """The job whose processes own the devices of ``mesh``.

    Raises:
      CollectiveError: this process has left the job.
    """
    world = bootstrap.world()
    if world is None:
        raise errors.CollectiveError(
            f"a program ran on mesh({mesh}) of several processes, and this process has left their job.",
            where=source.here(),
            fix="bf.distributed.shutdown() at the end of the program only",
        )
    return world


def engine_in_use(mesh: Mesh) -> AbstractContextManager[engine.Engine]:
    """Context manager: connect this thread's collectives with all processes.

    Raises:
      UnsupportedError: no engine works here; the message says why.
    """
    world = world_of(mesh)
    found = world.engines.get(mesh)
    if found is None:
        (device,), members = mesh.local_devices, members_of(mesh)
        if device.platform == "cuda":
            found = NcclEngine(world, mesh.abstract, device.index, members)
        else:
            found = MpiEngine(world, mesh.abstract, members)
        world.engines[mesh] = found
    return engine.use(found)


def check_agreement(jaxpr: Jaxpr, mesh: Mesh) -> None:
    """Compare the local programs of all processes, which call it before the first run.

    Raises:
      CollectiveError: programs differ, or a process does not arrive.
    """
    world, members = world_of(mesh), members_of(mesh)
    with world.recorder.during(f"comparison of {jaxpr.name}", mesh.axis_names, 0, members):
        consistency_check.check_agreement(jaxpr, world, members)


def check_same(values: Mapping[str, np.ndarray], mesh: Mesh, what: str) -> None:
    """Check by hash that all processes of ``mesh``, which call it, have equal arrays.

    Args:
      values: arrays by name, for the message.
      what: the caller.
    Raises:
      CollectiveError: values differ, which is raised in all processes and names the first difference; or a process does
        not arrive.
    """
    world, members = world_of(mesh), members_of(mesh)
    mine = [f"{name}: {_described(x)}" for name, x in values.items()]
    with world.recorder.during(f"comparison of values in {what}", mesh.axis_names, 0, members):
        gathered = [
            json.loads(t) for t in world.gather(f"the values of {what}", json.dumps(mine).encode(), members)
        ]
    first = gathered[0]
    other = next((i for i, theirs in enumerate(gathered) if theirs != first), None)
    if other is None:
        return
    pairs = itertools.zip_longest(first, gathered[other], fillvalue="nothing")
    a, b = next((a, b) for a, b in pairs if a != b)
    raise errors.CollectiveError(
        f"{what} got different values in process {members[other]} and in process {members[0]}.",
        where=source.here(),
        why=f"process {members[0]}: {a}; process {members[other]}: {b}.",
        fix="the same values in all processes; or bf.make_array_from_process_local_data, where each has its own part",
    )


def _described(x: np.ndarray) -> str:
    """The type of an array, and its values or, if there are many, their hash."""
    kind = f"{dtypes.short_name(x.dtype)}[{','.join(map(str, x.shape))}]"
    if x.size <= 4:
        return f"{kind} {x.tolist()}"
    return f"{kind} of hash {hashlib.blake2b(np.ascontiguousarray(x).view(np.uint8).data, digest_size=8).hexdigest()}"
