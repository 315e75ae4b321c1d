"""Which steps of a graph run side by side: a stream for each, and what it waits for there.

Kernels, stage 8. In: the steps of an executor, with what they read and write. Out: a ``Turn`` for each. The order of
the plan stays as it is, and so does its memory: two steps may run at once where neither writes bytes that the other
touches, whatever values these are, for the plan gives the same ones to many values in turn.

Steps take streams by list scheduling (Graham 1966), in the order of the plan: each goes where it can begin first by an
estimate of what takes how long. A device runs side by side only what does not fill it, so long steps stay in line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Eqn, Var
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
"""Seconds that a step must begin earlier on a stream that is not the first: less is lost again in waiting."""

PAUSE = 8e-6
"""Seconds by which a step that overlaps a collective begins later, to get the SMs that this leaves."""


class Access(NamedTuple):
    """Bytes ``start`` to ``end`` of one piece of memory, which a step reads, or may write."""

    root: int
    start: int
    end: int
    written: bool


@dataclass(frozen=True)
class Task:
    """What there is to know of a step.

    Attributes:
      accesses: the memory that it touches; None where that is not known: it runs by itself, with nothing beside it.
      seconds: how long it takes, about.
      exchanges: whether it waits for other devices.
      beside: the number of an exchange before it: it begins when that may, and not before.
    """

    accesses: tuple[Access, ...] | None
    seconds: float
    exchanges: bool = False
    beside: int | None = None


@dataclass(frozen=True)
class Turn:
    """Attributes:
    stream: the number of the stream that a step goes on; 0 is the one that all work begins and ends on.
    waits: the steps of other streams that must be done before.
    """

    stream: int
    waits: tuple[int, ...]


def estimate(step: Step, nbytes: int) -> float:
    """The seconds of a step that touches so many bytes, about: on what device is not asked."""
    if not isinstance(step, OpaqueStep):
        return H200.launch + nbytes / BANDWIDTH
    if step.eqn.prim.kind == "collective":
        return exchange_seconds(step.eqn)
    return H200.launch + max(nbytes / BANDWIDTH, product_seconds(step.eqn))


def exchange_seconds(eqn: Eqn) -> float:
    """How long devices are busy with an exchange, about."""
    operands = {a for a in eqn.invars if a.__class__ is Var}
    return COLLECTIVE_SECONDS + sum(a.aval.nbytes for a in (*operands, *eqn.outvars)) / LINK_BANDWIDTH


def product_seconds(eqn: Eqn) -> float:
    """How long a product takes on a large device, about; 0 for what multiplies no matrices."""
    low = all(a.aval.dtype.itemsize < 4 for a in eqn.invars[:2])
    single = all(a.aval.dtype == dtypes.float32 for a in eqn.invars[:2])
    tf32 = single and "precision" in eqn.params and is_tf32(resolved(eqn.params["precision"]))
    return of_eqn(eqn, "library").products / (MATMUL if low else MATMUL_TF32 if tf32 else H200.products)


def dependencies(tasks: Sequence[Task]) -> list[tuple[int, ...]]:
    """For each step those before it that must be done, but for what they imply themselves."""
    last: dict[int, list[tuple[Access, int]]] = {}
    since: list[int] = []  # the steps since the last one that ran by itself, which is the first of them
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


def turns(tasks: Sequence[Task], streams: int) -> list[Turn]:
    """The stream of each step, and what it waits for.

    Args:
      streams: how many there are; exchanges have one more, numbered ``streams``, where they keep their order, for all
        devices must come to them in the same.
    """
    computing, streams = streams, streams + 1
    free = [0.0] * streams
    done: list[float] = []
    # by stream: the last steps of the others that it has waited for
    seen = [[-1] * streams for _ in range(streams)]
    known: list[list[int]] = []  # by step: the last steps of all streams that are done when it is
    chosen: list[Turn] = []
    direct = dependencies(tasks)
    for n, (task, needed) in enumerate(zip(tasks, direct, strict=True)):
        if task.beside is not None:
            needed = tuple(sorted({*needed, *direct[task.beside]}))
        ready = max((done[m] for m in needed), default=0.0)
        if task.accesses is None:
            at = 0
        elif task.exchanges:
            at = computing
        else:
            at = _earliest(free[:computing], ready, _latest(needed, done, chosen))
        begin = max(ready, free[at])
        done.append(begin + task.seconds)
        free[at] = done[n]
        waits = []
        for m in reversed(needed):  # the later ones imply most of the earlier
            other = chosen[m].stream
            if other != at and seen[at][other] < m:
                waits.append(m)
                seen[at] = _later(seen[at], known[m])
        seen[at][at] = n
        known.append(list(seen[at]))
        chosen.append(Turn(at, tuple(sorted(waits))))
    return chosen


def _latest(needed: Iterable[int], done: Sequence[float], chosen: Sequence[Turn]) -> int:
    """The stream of the step that is waited for longest: to go on there costs no waiting."""
    last = max(needed, key=lambda m: done[m], default=None)
    return 0 if last is None else chosen[last].stream


def _earliest(free: Sequence[float], ready: float, preferred: int) -> int:
    """The stream to begin on: the preferred one, unless another is earlier by what is worth it."""
    begins = [max(ready, f) for f in free]
    best = min(range(len(free)), key=lambda s: (begins[s], s))
    if preferred == len(free):  # an exchange was waited for
        return best
    return best if begins[best] + WORTH < begins[preferred] else preferred


def _later(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [max(pair) for pair in zip(a, b, strict=True)]
