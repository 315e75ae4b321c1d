"""What programs of several processes do beside computing: gather values, give them to all, wait for one another.

Parallel, after stage 8, upon ``processes.py``. All processes of the job call each of these together. Alone, a process
gets what it gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend, process_info
from blufunc.core.arrays.array import Array, lift
from blufunc.core.ir import source
from blufunc.core.ir.trace import Tracer
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.parallel.mesh.mesh import Mesh
from blufunc.parallel.runtime import bootstrap, processes
from blufunc.parallel.runtime.sharded_buffer import ShardedBuffer

_AXIS = "processes"


def process_allgather(in_tree: Any, tiled: bool = False) -> Any:
    """The values of all processes, in each of them.

    Args:
      in_tree: a pytree of arrays and numbers. Arrays that lie on several processes are put together. Of others each
        process gives its own, of one shape and dtype.
      tiled: whether the latter are joined along their first dimension; they are stacked along a new one otherwise.
    Returns:
      the pytree with NumPy arrays: those that lie on several processes whole, those of n processes with a leading
      dimension of n, or n times as long.
    Raises:
      CollectiveError: processes give different shapes, or one does not come.
      UnsupportedError: a value is traced.
    """

    def gathered(leaf: Any) -> np.ndarray:
        x = _array(leaf, "process_allgather")
        if isinstance(x.buffer, ShardedBuffer) and not x.buffer.is_fully_addressable:
            return x.device.whole(x.buffer)
        rows = _exchange("all_gather", np.asarray(x), dim=0, tiled=False)
        return rows.reshape(-1, *rows.shape[2:]) if tiled and rows.ndim > 1 else rows

    return tree.map(gathered, in_tree)


def broadcast_one_to_all(in_tree: Any, is_source: bool | None = None) -> Any:
    """The values of one process, in all of them.

    Args:
      in_tree: a pytree of arrays and numbers, of the same shapes and dtypes in all processes.
      is_source: whether this process is the one; process 0 is by default.
    Returns:
      the pytree with NumPy arrays.
    Raises:
      CollectiveError: processes give different shapes, none or several are the source, or one does not come.
      UnsupportedError: a value is traced.
    """
    ours = process_info.current().index == 0 if is_source is None else bool(is_source)
    sources = np.flatnonzero(_exchange("all_gather", np.array(ours), dim=0, tiled=False))
    if len(sources) != 1:
        raise errors.CollectiveError(
            f"broadcast_one_to_all has {len(sources)} sources: the processes {sources.tolist()}.",
            where=source.here(),
            fix="is_source=True in one process",
        )

    def given(leaf: Any) -> np.ndarray:
        x = np.array(_array(leaf, "broadcast_one_to_all"))
        data = (
            x.tobytes() if ours else bytes(x.nbytes)
        )  # the maximum of these and zeros are the bytes of the source
        got = _exchange("all_reduce", np.frombuffer(data, np.uint8), op="max")
        return np.frombuffer(got.tobytes(), x.dtype).reshape(x.shape)

    return tree.map(given, in_tree)


def sync_global_devices(name: str) -> None:
    """Return when all processes have called it with this name.

    Raises:
      CollectiveError: one has failed, or does not come.
    """
    world = bootstrap.world()
    if world is not None:
        world.barrier(name)


def assert_equal(in_tree: Any, fail_message: str = "") -> None:
    """Check that a pytree has the same values in all processes.

    Raises:
      CollectiveError: it has not; the error says where they differ first.
      UnsupportedError: a value is traced.
    """
    if process_info.current().count == 1:
        return
    leaves, treedef = tree.flatten(in_tree)
    paths = treepath.leaf_paths(treedef)
    values = {
        f"in_tree{p}": np.asarray(_array(x, "assert_equal")) for p, x in zip(paths, leaves, strict=True)
    }
    processes.check_same(values, _everybody(), fail_message or "assert_equal")


def _exchange(kind: str, x: np.ndarray, **options: Any) -> np.ndarray:
    if process_info.current().count == 1:
        return x[None] if kind == "all_gather" else x
    with processes.engine_in_use(_everybody()) as engine:
        return engine.exchange(kind, x, (_AXIS,), **options)


def _everybody() -> Mesh:
    return Mesh(backend.all_devices(backend.default_device().platform), _AXIS)


def _array(x: Any, name: str) -> Array:
    value = lift(x)
    if isinstance(value, Tracer):
        raise errors.UnsupportedError(
            f"{name} inside a traced function.",
            where=source.here(),
            why="programs exchange arrays by collectives of their own.",
            fix="call it on the results of the program",
        )
    return value  # type: ignore[return-value]
