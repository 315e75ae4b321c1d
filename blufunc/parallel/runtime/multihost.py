"""Operations between processes, outside programs: gather, broadcast, barrier.

Parallel, after stage 8, above ``processes.py``. In: a pytree of each process. Out: a pytree of NumPy arrays. All
processes of the job call each function together; a single process gets its own values.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend, process_info
from blufunc.core.arrays.array import ConcreteArray, lift
from blufunc.core.ir import source
from blufunc.core.ir.trace import Tracer
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.parallel.mesh.mesh import Mesh
from blufunc.parallel.runtime import bootstrap, processes
from blufunc.parallel.runtime.sharded_buffer import ShardedBuffer

T = TypeVar("T")

_AXIS = "processes"


def process_allgather(in_tree: Any, tiled: bool = False) -> Any:
    """Gather the values of all processes into each of them.

    Args:
      in_tree: a pytree of arrays and scalars. Arrays on several processes are assembled. Of others each process
        contributes its own, of one shape and dtype.
      tiled: concatenate the latter along their first dimension; by default they are stacked along a new one.
    Returns:
      the pytree with NumPy arrays: arrays on several processes whole; others with a leading dimension of n processes,
      or, if tiled, n times as long.
    Raises:
      CollectiveError: shapes differ between processes, or one does not arrive.
      UnsupportedError: a value is traced.
    """

    def gathered(leaf: Any) -> np.ndarray:
        x = _array(leaf, "process_allgather")
        if isinstance(x.buffer, ShardedBuffer) and not x.buffer.is_fully_addressable:
            return x.device.whole(x.buffer)
        rows = _collective("all_gather", np.asarray(x)[None], dim=0)
        return rows.reshape(-1, *rows.shape[2:]) if tiled and rows.ndim > 1 else rows

    return tree.map(gathered, in_tree)


def broadcast_one_to_all(in_tree: T, is_source: bool | None = None) -> T:
    """Broadcast the values of one process to all.

    Args:
      in_tree: a pytree of arrays and scalars, of the same shapes and dtypes in all processes.
      is_source: True in the source process only; default process 0.
    Returns:
      the pytree with NumPy arrays.
    Raises:
      CollectiveError: shapes differ, there is no or more than one source, or a process does not arrive.
      UnsupportedError: a value is traced.
    """
    is_root = process_info.current().index == 0 if is_source is None else bool(is_source)
    sources = np.flatnonzero(_collective("all_gather", np.array([is_root]), dim=0))
    if len(sources) != 1:
        raise errors.CollectiveError(
            f"broadcast_one_to_all has {len(sources)} sources: the processes {sources.tolist()}.",
            where=source.here(),
            fix="is_source=True in one process",
        )

    def broadcast(leaf: Any) -> np.ndarray:
        x = np.array(_array(leaf, "broadcast_one_to_all"))
        data = (
            x.tobytes() if is_root else bytes(x.nbytes)
        )  # the maximum with zeros gives the bytes of the source
        got = _collective("all_reduce", np.frombuffer(data, np.uint8), op="max")
        return np.frombuffer(got.tobytes(), x.dtype).reshape(x.shape)

    return tree.map(broadcast, in_tree)


def sync_global_devices(name: str) -> None:
    """Wait until all processes have called it with this name.

    Raises:
      CollectiveError: a process has failed, or does not arrive.
    """
    world = bootstrap.world()
    if world is not None:
        world.barrier(name)


def assert_equal(in_tree: Any, fail_message: str = "") -> None:
    """Check that a pytree has the same values in all processes.

    Raises:
      CollectiveError: values differ; the error names the first difference.
      UnsupportedError: a value is traced.
    """
    if process_info.current().count == 1:
        return
    leaves, treedef = tree.flatten(in_tree)
    paths = treepath.leaf_paths(treedef)
    values = {
        f"in_tree{p}": np.asarray(_array(x, "assert_equal")) for p, x in zip(paths, leaves, strict=True)
    }
    processes.check_same(values, _all_processes(), fail_message or "assert_equal")


def _collective(kind: str, x: np.ndarray, **options: Any) -> np.ndarray:
    if process_info.current().count == 1:
        return x
    with processes.engine_in_use(_all_processes()) as engine:
        return engine.collective(kind, x, (_AXIS,), **options)


def _all_processes() -> Mesh:
    return Mesh(backend.all_devices(backend.default_device().platform), _AXIS)


def _array(x: Any, name: str) -> ConcreteArray:
    value = lift(x)
    if isinstance(value, Tracer):
        raise errors.UnsupportedError(
            f"{name} inside a traced function.",
            where=source.here(),
            why="programs communicate by collectives.",
            fix="call it on the results of the program",
        )
    return value  # type: ignore[return-value]
