"""``jax.experimental.multihost_utils``: arrays of a mesh from those of hosts.

Under the face ``as_jax``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import from_numpy
from blufunc.core.pytree import tree
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.programs.placement import make_array_from_process_local_data

__all__ = [
    "ProcessFailureError",
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
    "live_devices",
    "reached_preemption_sync_point",
]


def _mapped(function: Any, arrays: Any, pspecs: Any) -> Any:
    is_spec = lambda x: isinstance(x, PartitionSpec)
    if is_spec(pspecs):
        return tree.map(lambda x: function(x, pspecs), arrays)
    return tree.map(lambda s, part: tree.map(lambda x: function(x, s), part), pspecs, arrays, is_leaf=is_spec)


def host_local_array_to_global_array(local_inputs: Any, global_mesh: Any, pspecs: Any) -> Any:
    """Arrays on a mesh, of which each process gives the part that its devices hold.

    Args:
      pspecs: a ``PartitionSpec``, or a prefix of the tree of inputs with one for each array.
    """
    made = lambda x, spec: make_array_from_process_local_data(NamedSharding(global_mesh, spec), np.asarray(x))
    return _mapped(made, local_inputs, pspecs)


def global_array_to_host_local_array(global_inputs: Any, global_mesh: Any, pspecs: Any) -> Any:
    """The parts that the devices of this process hold, each as one array."""
    return _mapped(lambda x, spec: _local(x, NamedSharding(global_mesh, spec)), global_inputs, pspecs)


def _local(x: Any, sharding: NamedSharding) -> Any:
    if x.is_fully_addressable:
        return from_numpy(np.asarray(x))
    shards = {shard.index: shard.data for shard in x.addressable_shards}  # replicas have one index
    # positions along each dimension, in order: a process has a block of the array
    starts = [sorted({index[d].start or 0 for index in shards}) for d in range(x.ndim)]
    first = [{s: n for n, s in enumerate(row)} for row in starts]
    blocks = np.empty([len(row) for row in starts], object)
    for index, data in shards.items():
        blocks[tuple(first[d][index[d].start or 0] for d in range(x.ndim))] = np.asarray(data)
    return from_numpy(np.block(blocks.tolist()))


ProcessFailureError = errors.CollectiveError


@contextlib.contextmanager
def live_devices(devices: Sequence[Any]) -> Iterator[list[Any]]:
    """A block on the devices of live processes: a job ends when a rank fails.

    Raises:
      CollectiveError: a rank failed while a collective waited for it.
    """
    yield list(devices)


def reached_preemption_sync_point(step_id: int) -> bool:
    """False: no notice of preemption is received."""
    return False
