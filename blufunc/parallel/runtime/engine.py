"""Engines: what has the ranks of one program exchange arrays.

Parallel, used at stage 8. A collective of a local program (``collectives/primitives.py``) asks the engine of the rank
that runs it, ``current()``; the engine meets those of the other ranks. All ranks make the same calls in the same order.
In come arrays of the rank, out come arrays that nobody else holds. Engines exchange, and decide nothing else.

``exchanged`` is the definition of every exchange, on all parts at once: engines without a library of collectives use
it, and tests compare the others with it.
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
"""The exchanges, with their options: ``all_reduce(op)``, ``all_gather(dim, tiled)``, ``reduce_scatter(dim, tiled)``,
``all_to_all(split_dim, concat_dim, tiled)``, ``permute(perm)``."""


class Engine(Protocol):
    """One rank's end of the exchanges of a mesh.

    Attributes:
      rank: the number of this rank: its place in the mesh, in row-major order.
      mesh: the mesh of all ranks.
      coordinates: the place of this rank along each axis.
    """

    rank: int
    mesh: AbstractMesh
    coordinates: dict[str, int]

    def exchange(self, kind: str, x: np.ndarray, axes: tuple[str, ...], **options: Any) -> np.ndarray:
        """Exchange ``x`` with the ranks that differ from this one in ``axes`` only; ``axes[0]`` counts slowest.

        Args:
          kind: one of ``KINDS``, with its options; ``exchanged`` says what each does.
        Raises:
          CollectiveError: the ranks do not meet, or do not agree on what to exchange.
        """


class _Current(threading.local):
    engine: Engine | None = None


_current = _Current()


def current() -> Engine:
    """The engine of the rank that runs in this thread.

    Raises:
      CollectiveError: none does.
    """
    if _current.engine is None:
        raise errors.CollectiveError(
            "a collective over an axis of a mesh ran outside of a program of that mesh.",
            where=source.here(),
            why="it exchanges arrays with other ranks, and there are none here.",
            fix="call it inside of bf.shard_map(f, mesh=..., in_specs=..., out_specs=...)",
        )
    return _current.engine


@contextlib.contextmanager
def use(engine: Engine) -> Iterator[Engine]:
    """Context manager: makes ``engine`` that of this thread within its block."""
    before, _current.engine = _current.engine, engine
    try:
        yield engine
    finally:
        _current.engine = before


def coordinates_of(rank: int, mesh: AbstractMesh) -> dict[str, int]:
    """The place of ``rank`` along each axis of ``mesh``, of which the last counts fastest."""
    places = np.unravel_index(rank, mesh.axis_sizes) if mesh.axis_sizes else ()
    return {name: int(i) for name, i in zip(mesh.axis_names, places, strict=True)}


def group_of(rank: int, mesh: AbstractMesh, axes: tuple[str, ...]) -> list[int]:
    """The ranks that differ from ``rank`` in ``axes`` only, in row-major order over ``axes`` as they are given.

    Raises:
      CollectiveError: the mesh has no such axis.
    """
    missing = [a for a in axes if a not in mesh.axis_names]
    if missing:
        raise errors.CollectiveError(
            f"an exchange over the axis {missing[0]!r}, and the mesh has the axes {mesh.axis_names}.",
            where=source.here(),
        )
    ranks = np.arange(math.prod(mesh.axis_sizes)).reshape(mesh.axis_sizes)
    places = coordinates_of(rank, mesh)
    here = ranks[tuple(slice(None) if a in axes else places[a] for a in mesh.axis_names)]
    left = [a for a in mesh.axis_names if a in axes]
    return [int(r) for r in here.transpose([left.index(a) for a in axes]).ravel()]


def rank_in(process: int, mesh: AbstractMesh, members: Sequence[int]) -> int:
    """The rank in ``mesh`` of a process of a job, where ``members`` are the processes of the ranks of the mesh.

    Raises:
      ValueRangeError: the mesh has another number of ranks than ``members``, or the process is not among them.
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
    """The parts combined from first to last; half-precision floats are summed in float32."""
    dtype = parts[0].dtype
    wide = (
        np.dtype(np.float32) if op == "sum" and dtypes.is_floating(dtype) and dtype.itemsize <= 2 else dtype
    )
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = _OPS[op](total, part, dtype=wide) if op == "sum" else _OPS[op](total, part)
    return np.asarray(total).astype(dtype, copy=False)


def exchanged(kind: str, parts: Sequence[np.ndarray], **options: Any) -> list[np.ndarray]:
    """What each rank of a group gets, of the parts that they gave, in order of their places in the group.

    Args:
      kind: one of

        - ``all_reduce`` (``op``: sum, max or min): everybody gets all parts combined;
        - ``all_gather`` (``dim``, ``tiled``): everybody gets all parts, joined along ``dim``, or stacked along a new
          dimension ``dim`` where not tiled;
        - ``reduce_scatter`` (``dim``, ``tiled``): rank i gets the i-th slice along ``dim`` of the sum; where not
          tiled the slices are of size 1, and the dimension goes;
        - ``all_to_all`` (``split_dim``, ``concat_dim``, ``tiled``): rank i gets the i-th slice along ``split_dim`` of
          every part, joined along ``concat_dim``; where not tiled the one dimension goes, and the other is new;
        - ``permute`` (``perm``): rank dst gets the part of rank src for each (src, dst); the others get zeros.
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
        shares = divided(reduced(parts), n, options["dim"], options.get("tiled", True))
        return [np.array(s, order="C") for s in shares]
    if kind == "all_to_all":
        tiled = options.get("tiled", True)
        rows = [divided(p, n, options["split_dim"], tiled) for p in parts]
        join = np.concatenate if tiled else np.stack
        return [join([row[i] for row in rows], axis=options["concat_dim"]) for i in range(n)]
    if kind == "permute":
        sources = {dst: src for src, dst in options["perm"]}
        return [
            parts[sources[i]].copy() if i in sources else np.zeros(p.shape, p.dtype)
            for i, p in enumerate(parts)
        ]
    raise errors.ValueRangeError(f"no exchange is called {kind!r:.60}.", fix=f"one of {', '.join(KINDS)}")


def divided(x: np.ndarray, n: int, dim: int, tiled: bool) -> list[np.ndarray]:
    """``x`` in n parts along ``dim``; where not tiled that dimension goes."""
    if x.shape[dim] % n or (not tiled and x.shape[dim] != n):
        raise errors.ShapeError(
            f"dimension {dim} of an array of shape {x.shape} cannot be divided among {n} ranks."
        )
    parts = np.split(x, n, axis=dim)
    return parts if tiled else [p.squeeze(dim) for p in parts]
