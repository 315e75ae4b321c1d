"""Engines: the collectives of one rank of a program.

Parallel, used at stage 8. In: an array of the rank, from a collective of a local program
(``collectives/primitives.py``), through the engine of the rank, ``current()``. Out: an array that shares no memory with
other ranks. All ranks must make the same calls in the same order.

``reference`` defines every collective on all parts at once: engines without a library use it, and tests compare the
others with it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source

if TYPE_CHECKING:
    from blufunc.parallel.mesh.mesh import AbstractMesh

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
"""Collectives and options: ``all_reduce(op)``, ``all_gather(dim, tiled)``,
``reduce_scatter(dim, tiled)``, ``all_to_all(split_dim, concat_dim, tiled)``, ``permute(perm)``."""


class Engine(Protocol):
    """One rank's side of the collectives of a mesh.

    Attributes:
      rank: the index of this rank in the mesh, row-major.
      mesh: the mesh of all ranks.
      coordinates: the index of this rank along each axis.
    """

    rank: int
    mesh: AbstractMesh
    coordinates: dict[str, int]

    def collective(self, kind: str, x: np.ndarray, axes: tuple[str, ...], **options: Any) -> np.ndarray:
        """Run a collective with ranks that differ in ``axes`` only, major first.

        Args:
          kind: one of ``KINDS``, with its options; see ``reference``.
        Raises:
          CollectiveError: ranks do not arrive, or call different collectives.
        """


class _Current(threading.local):
    engine: Engine | None = None


_current = _Current()


def current() -> Engine:
    """The engine of the rank that runs in this thread.

    Raises:
      CollectiveError: no rank runs in this thread.
    """
    if _current.engine is None:
        raise errors.CollectiveError(
            "a collective over an axis of a mesh ran outside of a program of that mesh.",
            where=source.here(),
            why="there are no other ranks here.",
            fix="call it inside of bf.shard_map(f, mesh=..., in_specs=..., out_specs=...)",
        )
    return _current.engine


@contextlib.contextmanager
def use(engine: Engine) -> Iterator[Engine]:
    """Context manager: make ``engine`` current in this thread."""
    previous, _current.engine = _current.engine, engine
    try:
        yield engine
    finally:
        _current.engine = previous


def coordinates_of(rank: int, mesh: AbstractMesh) -> dict[str, int]:
    """The index of ``rank`` along each axis of ``mesh``, row-major."""
    places = np.unravel_index(rank, mesh.axis_sizes) if mesh.axis_sizes else ()
    return {name: int(i) for name, i in zip(mesh.axis_names, places, strict=True)}


def group_of(rank: int, mesh: AbstractMesh, axes: tuple[str, ...]) -> list[int]:
    """The ranks that differ from ``rank`` in ``axes`` only, row-major.

    Raises:
      CollectiveError: the mesh has no such axis.
    """
    missing = [a for a in axes if a not in mesh.axis_names]
    if missing:
        raise errors.CollectiveError(
            f"a collective over the axis {missing[0]!r}, and the mesh has the axes {mesh.axis_names}.",
            where=source.here(),
        )
    ranks = np.arange(math.prod(mesh.axis_sizes)).reshape(mesh.axis_sizes)
    places = coordinates_of(rank, mesh)
    here = ranks[tuple(slice(None) if a in axes else places[a] for a in mesh.axis_names)]
    left = [a for a in mesh.axis_names if a in axes]
    return [int(r) for r in here.transpose([left.index(a) for a in axes]).ravel()]


def rank_in(process: int, mesh: AbstractMesh, members: Sequence[int]) -> int:
    """The rank in ``mesh`` of a process, given ``members`` in mesh order.

    Raises:
      ValueRangeError: the mesh size differs from ``members``, or the process is not among them.
    """
    size = math.prod(mesh.axis_sizes)
    if size != len(members) or process not in members:
        raise errors.ValueRangeError(
            f"a mesh of {size} ranks, and process {process} of the {len(members)} processes {list(members)[:8]}.",
            where=source.here(),
            why="each rank of a mesh is a process, and all processes of the mesh run the program.",
            fix="a mesh as large as the job: the launcher's -n",
        )
    return list(members).index(process)


_OPS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def reduced(parts: Sequence[np.ndarray], op: str = "sum") -> np.ndarray:
    """Reduce the parts in order; half-precision floats are summed in float32."""
    dtype = parts[0].dtype
    accumulator = (
        np.dtype(np.float32) if op == "sum" and dtypes.is_floating(dtype) and dtype.itemsize <= 2 else dtype
    )
    total = parts[0].astype(accumulator)
    for part in parts[1:]:
        total = _OPS[op](total, part, dtype=accumulator) if op == "sum" else _OPS[op](total, part)
    return np.asarray(total).astype(dtype, copy=False)


def reference(kind: str, parts: Sequence[np.ndarray], **options: Any) -> list[np.ndarray]:
    """The results of a collective for all ranks of a group, from all operands.

    Args:
      kind: one of

        - ``all_reduce`` (``op``: sum, max or min): every rank gets the reduction of all parts;
        - ``all_gather`` (``dim``, ``tiled``): every rank gets all parts, concatenated along ``dim`` or, if not tiled,
          stacked along a new dimension ``dim``;
        - ``reduce_scatter`` (``dim``, ``tiled``): rank i gets the i-th slice along ``dim`` of the sum; if not tiled,
          slices have size 1, and the dimension is removed;
        - ``all_to_all`` (``split_dim``, ``concat_dim``, ``tiled``): rank i gets the i-th slice along ``split_dim`` of
          every part, concatenated along ``concat_dim``; if not tiled, the first is removed, and the second is new;
        - ``permute`` (``perm``): rank dst gets the part of rank src for each (src, dst); other ranks get zeros.
    Returns:
      arrays that share no memory with the parts, nor with each other.
    """
    n = len(parts)
    if kind == "all_reduce":
        total = reduced(parts, options.get("op", "sum"))
        return [total, *(total.copy() for _ in range(n - 1))]
    if kind == "all_gather":
        join = np.concatenate if options.get("tiled", True) else np.stack
        return [join(parts, axis=options["dim"]) for _ in range(n)]
    if kind == "reduce_scatter":
        shares = split(reduced(parts), n, options["dim"], options.get("tiled", True))
        return [np.array(s, order="C") for s in shares]
    if kind == "all_to_all":
        tiled = options.get("tiled", True)
        rows = [split(p, n, options["split_dim"], tiled) for p in parts]
        join = np.concatenate if tiled else np.stack
        return [join([row[i] for row in rows], axis=options["concat_dim"]) for i in range(n)]
    if kind == "permute":
        sources = {dst: src for src, dst in options["perm"]}
        return [
            parts[sources[i]].copy() if i in sources else np.zeros(p.shape, p.dtype)
            for i, p in enumerate(parts)
        ]
    raise errors.ValueRangeError(f"no collective is called {kind!r:.60}.", fix=f"one of {', '.join(KINDS)}")


def split(x: np.ndarray, n: int, dim: int, tiled: bool) -> list[np.ndarray]:
    """Split ``x`` into n parts along ``dim``, which is removed if not tiled."""
    if x.shape[dim] % n or (not tiled and x.shape[dim] != n):
        raise errors.ShapeError(
            f"dimension {dim} of an array of shape {x.shape} cannot be split among {n} ranks."
        )
    parts = np.split(x, n, axis=dim)
    return parts if tiled else [p.squeeze(dim) for p in parts]
