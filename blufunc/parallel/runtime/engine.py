"""Engines: the collectives of one rank of a program.

Parallel, used at stage 8. In: an array of the rank, from a collective of a local program
(``collectives/primitives.py``), through the engine of the rank, ``current()``. Out: an array that shares no memory with
other ranks. All ranks must make the same calls in the same order.

``reference`` defines every collective on all parts at once: engines without a library use it, and tests compare the
others with it. ``run`` expresses a collective in contiguous parts, which a library moves through a ``Transport``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source

if TYPE_CHECKING:
    from blufunc.parallel.mesh.mesh import AbstractMesh
    from blufunc.parallel.runtime.watchdog import Recorder

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
"""The collectives; ``reference`` defines them and their options."""


class Engine:
    """One rank's side of the collectives of a mesh.

    Attributes:
      rank: the index of this rank in the mesh, row-major.
      mesh: the mesh of all ranks.
      coordinates: the index of this rank along each axis.
    """

    def __init__(self, rank: int, mesh: AbstractMesh):
        self.rank, self.mesh, self.coordinates = rank, mesh, mesh.coordinates(rank)
        self._groups: dict[tuple[str, ...], Any] = {}

    def collective(self, kind: str, x: np.ndarray, axes: tuple[str, ...], **options: Any) -> np.ndarray:
        """Run a collective with ranks that differ in ``axes`` only, major first.

        Args:
          kind: one of ``KINDS``, with its options; see ``reference``.
        Raises:
          CollectiveError: ranks do not arrive, or call different collectives.
        """
        raise NotImplementedError

    def group(self, axes: tuple[str, ...]) -> Any:
        """The ranks that differ in ``axes`` only, connected on first use."""
        found = self._groups.get(axes)
        if found is None:
            found = self._groups[axes] = self.connect(axes, group_of(self.rank, self.mesh, axes))
        return found

    def connect(self, axes: tuple[str, ...], ranks: list[int]) -> Any:
        """Make the group of ``ranks``; without a library, their list."""
        return ranks


class Peers(Protocol):
    """The ranks of a job, as one sees them: a ``bootstrap.World``, or threads."""

    rank: int
    recorder: Recorder
    watchdog: Any

    @property
    def members(self) -> Sequence[int]:
        """All ranks."""

    def gather(self, name: str, value: bytes, members: Sequence[int]) -> list[bytes]:
        """Gather the values of ``members`` under ``name``."""


class ProcessEngine(Engine):
    """Base of engines whose ranks are members of a job.

    Args:
      world: the job; its recorder logs every collective.
      mesh: the mesh of all ranks.
      members: the process of each rank of the mesh; default all processes in order.
    Raises:
      ValueRangeError: the mesh size differs from ``members``, or this process is not among them.
    """

    def __init__(self, world: Peers, mesh: AbstractMesh, members: Sequence[int] | None = None):
        self.world, self.members = world, tuple(world.members if members is None else members)
        if mesh.size != len(self.members) or world.rank not in self.members:
            raise errors.ValueRangeError(
                f"a mesh of {mesh.size} ranks, and process {world.rank} of the {len(self.members)} processes "
                f"{list(self.members)[:8]}.",
                where=source.here(),
                why="each rank of a mesh is a process, and all processes of the mesh run the program.",
                fix="a mesh as large as the job: the launcher's -n",
            )
        super().__init__(self.members.index(world.rank), mesh)

    def members_in(self, ranks: Sequence[int]) -> list[int]:
        """The processes of some ranks."""
        return [self.members[r] for r in ranks]


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
    ranks = np.arange(mesh.size).reshape(mesh.axis_sizes)
    places = mesh.coordinates(rank)
    here = ranks[tuple(slice(None) if a in axes else places[a] for a in mesh.axis_names)]
    left = [a for a in mesh.axis_names if a in axes]
    return [int(r) for r in here.transpose([left.index(a) for a in axes]).ravel()]


def described(kind: str, x: np.ndarray, axes: Sequence[str], options: Mapping[str, Any]) -> str:
    """A call of a collective, for messages and to compare calls between ranks."""
    shown = "".join(f", {k}={v}" for k, v in sorted(options.items()))
    return f"{kind}({dtypes.short_name(x.dtype)}[{','.join(map(str, x.shape))}], axes={axes}{shown})"


def disagreement(what: str, two: Sequence[tuple[int, str]]) -> errors.CollectiveError:
    """The error of two ranks that run different programs; ``two`` describes them."""
    return errors.CollectiveError(
        what,
        where=source.here(),
        why="\n".join(f"rank {rank}: {text}" for rank, text in two),
        fix="all ranks run one program, on shards of one shape; branch only on what all ranks agree on",
    )


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
        - ``all_gather`` (``dim``): every rank gets all parts, concatenated along ``dim``;
        - ``reduce_scatter`` (``dim``): rank i gets the i-th slice along ``dim`` of the sum;
        - ``all_to_all`` (``split_dim``, ``concat_dim``): rank i gets the i-th slice along ``split_dim`` of every part,
          concatenated along ``concat_dim``;
        - ``permute`` (``perm``): rank dst gets the part of rank src for each (src, dst); other ranks get zeros.
    Returns:
      arrays that share no memory with the parts, nor with each other.
    """
    n = len(parts)
    if kind == "all_reduce":
        total = reduced(parts, options.get("op", "sum"))
        return [total, *(total.copy() for _ in range(n - 1))]
    if kind == "all_gather":
        return [np.concatenate(parts, axis=options["dim"]) for _ in range(n)]
    if kind == "reduce_scatter":
        return [np.array(s, order="C") for s in split(reduced(parts), n, options["dim"])]
    if kind == "all_to_all":
        rows = zip(*[split(p, n, options["split_dim"]) for p in parts], strict=True)
        return [np.concatenate(row, axis=options["concat_dim"]) for row in rows]
    if kind == "permute":
        sources = {dst: src for src, dst in options["perm"]}
        return [
            parts[sources[i]].copy() if i in sources else np.zeros(p.shape, p.dtype)
            for i, p in enumerate(parts)
        ]
    raise unknown(kind)


def unknown(kind: str) -> errors.ValueRangeError:
    """The error of a collective that is none of ``KINDS``."""
    return errors.ValueRangeError(f"no collective is called {kind!r:.60}.", fix=f"one of {', '.join(KINDS)}")


def split(x: np.ndarray, n: int, dim: int) -> list[np.ndarray]:
    """Split ``x`` into n parts along ``dim``."""
    if x.shape[dim] % n:
        raise errors.ShapeError(
            f"dimension {dim} of an array of shape {x.shape} cannot be split among {n} ranks."
        )
    return np.split(x, n, axis=dim)


# -- libraries that move contiguous parts ----------------------------------------------------------


class Transport(Protocol):
    """Moves contiguous arrays (NumPy or CuPy) between the ``size`` ranks of a group."""

    size: int

    def all_reduce(self, x: Any, op: str) -> Any:
        """Reduce the arrays of all ranks; the shape of ``x``."""

    def gather(self, x: Any) -> Any:
        """Stack the arrays of all ranks: (size, *x.shape)."""

    def reduce_scatter(self, parts: Any) -> Any:
        """Sum every rank's ``parts[i]`` on rank i; ``parts`` is (size, ...)."""

    def swap(self, parts: Any) -> Any:
        """Stack every rank's ``parts[i]`` on rank i; the shape of ``parts``, (size, ...)."""

    def permute(self, x: Any, perm: Sequence[tuple[int, int]]) -> Any:
        """Send arrays by (src, dst) pairs of ranks; zeros without a source."""


def run(transport: Transport, kind: str, x: Any, **options: Any) -> Any:
    """Run a collective of ``engine.KINDS`` with its options; ``x`` is contiguous.

    Raises:
      ShapeError: a dimension cannot be split among the ranks.
      ValueRangeError: an unknown collective.
    """
    n = transport.size
    if kind == "all_reduce":
        return transport.all_reduce(x, options.get("op", "sum"))
    if kind == "all_gather":
        return np.concatenate(list(transport.gather(x)), axis=options["dim"])
    if kind == "reduce_scatter":
        return transport.reduce_scatter(np.stack(split(x, n, options["dim"])))
    if kind == "all_to_all":
        parts = np.stack(split(x, n, options["split_dim"]))
        return np.concatenate(list(transport.swap(parts)), axis=options["concat_dim"])
    if kind == "permute":
        return transport.permute(x, options["perm"])
    raise unknown(kind)
