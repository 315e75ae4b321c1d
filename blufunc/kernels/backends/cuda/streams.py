"""Stream assignment: runs independent steps of a graph concurrently.

Kernels, stage 8. In: the steps of an executor with their memory accesses. Out: a ``StreamSlot`` for each. The order
and memory of the plan do not change. Two steps may overlap if neither writes bytes that the other touches; values that
share memory in turn therefore conflict.

Streams are assigned by list scheduling (Graham 1966) in plan order: each step goes where it can begin first by
estimated times. A device overlaps only kernels that do not fill it, so long steps stay on one stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn, Var
from blufunc.core.ops.offload import offload_p
from blufunc.kernels.backends.cuda.device_model import (
    BANDWIDTH,
    COLLECTIVE_SECONDS,
    H200,
    LINK_BANDWIDTH,
    MATMUL,
    MATMUL_TF32,
)
from blufunc.kernels.cost import of_eqn
from blufunc.kernels.precision import is_tf32, resolved
from blufunc.kernels.schedule import OpaqueStep, Step

WORTH = H200.launch / 2
"""Minimum seconds that another stream must save: less is lost in synchronization."""

PAUSE = 8e-6
"""Seconds to delay a step so that an overlapped collective gets its SMs first."""


OUT, IN = 1, 2
"""Directions of copies between memories: to the host, and from it."""


class Access(NamedTuple):
    """Bytes ``start`` to ``end`` of a root, read or possibly ``written`` by a step."""

    root: int
    start: int
    end: int
    written: bool


@dataclass(frozen=True)
class Task:
    """Memory, time and constraints of a step.

    Attributes:
      accesses: the memory that it touches; None if unknown: nothing overlaps with it.
      seconds: estimated time.
      collective: True if it waits for other devices.
      overlapped: index of an earlier collective; the step begins when that may, and not before.
      copies: ``OUT`` or ``IN`` for a copy between memories; else 0.
    """

    accesses: tuple[Access, ...] | None
    seconds: float
    collective: bool = False
    overlapped: int | None = None
    copies: int = 0


@dataclass(frozen=True)
class StreamSlot:
    """Stream and dependencies of a step; all work begins and ends on stream 0.

    Attributes:
      stream: index of its stream.
      waits: indices of the steps on other streams to wait for.
    """

    stream: int
    waits: tuple[int, ...]


def estimate(step: Step, nbytes: int) -> float:
    """Estimated seconds of a step that touches ``nbytes``, on an H200."""
    if not isinstance(step, OpaqueStep):
        return H200.launch + nbytes / BANDWIDTH
    if step.eqn.prim.kind == "collective":
        return exchange_seconds(step.eqn)
    if step.eqn.prim is offload_p:
        return H200.copy + step.eqn.outvars[0].aval.nbytes / H200.host_link
    return H200.launch + max(nbytes / BANDWIDTH, product_seconds(step.eqn))


def exchange_seconds(eqn: Eqn) -> float:
    """Estimated seconds of a collective."""
    operands = {a for a in eqn.invars if a.__class__ is Var}
    return COLLECTIVE_SECONDS + sum(a.aval.nbytes for a in (*operands, *eqn.outvars)) / LINK_BANDWIDTH


def product_seconds(eqn: Eqn) -> float:
    """Estimated seconds of a matmul on a large device; 0 for other equations."""
    low = all(a.aval.dtype.itemsize < 4 for a in eqn.invars[:2])
    single = all(a.aval.dtype == dtypes.float32 for a in eqn.invars[:2])
    tf32 = single and "precision" in eqn.params and is_tf32(resolved(eqn.params["precision"]))
    return of_eqn(eqn, "library").products / (MATMUL if low else MATMUL_TF32 if tf32 else H200.products)


def dependencies(tasks: Sequence[Task]) -> list[tuple[int, ...]]:
    """For each step, the earlier steps that it must wait for."""
    last: dict[int, list[tuple[Access, int]]] = {}
    since: list[int] = []  # the last step without overlap, and the steps after it
    out = []
    for n, task in enumerate(tasks):
        if task.accesses is None:
            out.append(tuple(since))
            since = [n]
            last.clear()
            continue
        needed = {since[0]} if since and tasks[since[0]].accesses is None else set()
        for access in task.accesses:
            touched = last.setdefault(access.root, [])
            needed.update(m for other, m in touched if m != n and _conflict(access, other))
            if access.written:
                touched[:] = [t for t in touched if not _covers(access, t[0])]
            touched.append((access, n))
        since.append(n)
        out.append(tuple(sorted(needed)))
    return out


def _conflict(a: Access, b: Access) -> bool:
    return a.start < b.end and b.start < a.end and (a.written or b.written)


def _covers(a: Access, b: Access) -> bool:
    return a.start <= b.start and b.end <= a.end


def turns(tasks: Sequence[Task], streams: int) -> list[StreamSlot]:
    """Stream and dependencies of each step.

    Args:
      streams: number of streams for compute. Collectives use one more, at index ``streams``, in the same order on all
        devices. Copies between memories use two more, one per direction.
    """
    computing, streams = streams, streams + 1 + (2 if any(t.copies for t in tasks) else 0)
    free = [0.0] * streams
    done: list[float] = []
    # by stream: the last steps of the others that it has waited for
    seen = [[-1] * streams for _ in range(streams)]
    known: list[list[int]] = []  # by step: the last steps of all streams that precede it
    chosen: list[StreamSlot] = []
    direct = dependencies(tasks)
    for n, (task, needed) in enumerate(zip(tasks, direct, strict=True)):
        if task.overlapped is not None:
            needed = tuple(sorted({*needed, *direct[task.overlapped]}))
        ready = max((done[m] for m in needed), default=0.0)
        if task.accesses is None:
            at = 0
        elif task.collective or task.copies:
            at = computing + task.copies
        else:
            at = _earliest(free[:computing], ready, _latest(needed, done, chosen))
        begin = max(ready, free[at])
        done.append(begin + task.seconds)
        free[at] = done[n]
        waits = []
        for m in reversed(needed):  # later ones imply most of the earlier
            other = chosen[m].stream
            if other != at and seen[at][other] < m:
                waits.append(m)
                seen[at] = _later(seen[at], known[m])
        seen[at][at] = n
        known.append(list(seen[at]))
        chosen.append(StreamSlot(at, tuple(sorted(waits))))
    return chosen


def _latest(needed: Iterable[int], done: Sequence[float], chosen: Sequence[StreamSlot]) -> int:
    """Stream of the dependency that finishes last: continuing there needs no wait."""
    last = max(needed, key=lambda m: done[m], default=None)
    return 0 if last is None else chosen[last].stream


def _earliest(free: Sequence[float], ready: float, preferred: int) -> int:
    """Stream to begin on: the preferred one unless another is earlier by ``WORTH``."""
    begins = [max(ready, f) for f in free]
    best = min(range(len(free)), key=lambda s: (begins[s], s))
    if preferred >= len(free):  # the last dependency is a collective or a copy
        return best
    return best if begins[best] + WORTH < begins[preferred] else preferred


def _later(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [max(pair) for pair in zip(a, b, strict=True)]
