"""Overlap of collectives with independent matmuls.

Kernels, stage 5, after ``fusion/fuse.py``. In: the steps of a fusion. Out: the same steps reordered: some matmuls are
delayed to overlap with a collective whose result the next work needs, and pointwise work that reads such a result waits
until its own is read. With tensor parallelism each layer has four such collectives in the backward pass. Its weight
gradients, which only the optimizer reads, take about as long: without overlap, SMs idle during the collectives.
Pipelines delay weight gradients likewise (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from blufunc.core.ir.jaxpr import Var, communicates
from blufunc.kernels.backends.cuda.streams import exchange_seconds, product_seconds
from blufunc.kernels.fusion.fuse import Opaque, Region, Step
from blufunc.kernels.ops.gemm import PRODUCTS

LEAST = 2e-5
"""Minimum seconds of a matmul, and of a collective, for overlap to pay."""

SOON = 8
"""Minimum steps of work before the first reader of a matmul that may be delayed."""

MOST = 4
"""Maximum delayed matmuls: their operands stay in memory."""


def overlapped_matmuls(steps: Sequence[Step]) -> list[Step]:
    """Order steps to overlap collectives with matmuls (``Opaque.overlapped``)."""
    if sum(_exchanged(s) > LEAST for s in steps) < 2:
        return list(steps)
    _Cover(steps).choose()
    return _late_readers(_delayed(steps))


class _Cover:
    """Assignment of matmuls to collectives.

    Attributes:
      work: indices of the matmuls and collectives above the minimum time, in order.
      reads: for each step, a bitset of the work that it depends on through data, including itself.
      before: the same, including the order of collectives.
    """

    def __init__(self, steps: Sequence[Step]):
        self.work: dict[Step, int] = {}
        self.reads: dict[Step, int] = {}
        self.before: dict[Step, int] = {}
        makers = _makers(steps)
        for s in steps:
            own = 0
            if _seconds(s) > LEAST:
                own = 1 << len(self.work)
                self.work[s] = len(self.work)
            first = {makers[v] for v in s.inputs if v in makers}
            self.reads[s] = functools.reduce(operator.or_, (self.reads[m] for m in first), own)
            self.before[s] = functools.reduce(operator.or_, (self.before[m] for m in _needs(s, makers)), own)

    def choose(self) -> None:
        """Set ``beside`` of the chosen matmuls."""
        work = list(self.work)
        idle = {
            s for n, s in enumerate(work) if _product(s) and not self.is_read(n, work[n + 1 : n + 1 + SOON])
        }
        waiting: list[Opaque] = []
        last = -1  # index of the latest work that cannot be delayed
        for n, step in enumerate(work):
            if step in idle:
                if step.overlapped is None:  # type: ignore[union-attr]
                    waiting.append(step)  # type: ignore[arg-type]
                    del waiting[:-MOST]
                continue
            rest = work[n + 1 :]
            needed = next((s for s in rest if s not in idle), None)
            follows = last >= 0 and self.is_read(last, [step])
            if _exchanged(step) and follows and needed is not None and self.is_read(n, [needed]):
                soon = itertools.takewhile(lambda s: not _exchanged(s), rest)
                later: list[Any] = [s for s in soon if s in idle and not self.is_read(n, [s])]
                others = [p for p in (*waiting, *later) if not self.before[step] >> self.work[p] & 1]
                others = [p for p in others if not any(self.is_read(self.work[q], [p]) for q in idle - {p})]
                for product in _fitting(others[:MOST], _exchanged(step)):
                    product.overlapped = step
                waiting = [p for p in waiting if p.overlapped is None]
            last = n

    def is_read(self, index: int, steps: Iterable[Step]) -> bool:
        """True if one of the steps depends on the work at an index."""
        return any(self.reads[s] >> index & 1 for s in steps)


def _fitting(products: Sequence[Opaque], seconds: float) -> list[Opaque]:
    """Matmuls that fit into the duration of a collective, oldest first."""
    found: list[Opaque] = []
    for p in products:
        if _product(p) <= seconds:
            found.append(p)
            seconds -= _product(p)
    return found


def _delayed(steps: Sequence[Step]) -> list[Step]:
    """Steps in their order, except matmuls delayed by ``beside`` and their readers."""
    makers = _makers(steps)
    place = {s: n for n, s in enumerate(steps)}
    readers: list[list[int]] = [[] for _ in steps]
    missing = [0] * len(steps)
    for n, s in enumerate(steps):
        overlapped = [s.overlapped] if isinstance(s, Opaque) and s.overlapped is not None else []
        for m in {place[x] for x in (*_needs(s, makers), *overlapped)}:
            readers[m].append(n)
            missing[n] += 1
    ready = [n for n, count in enumerate(missing) if not count]
    out: list[Step] = []
    while ready:  # a heap: keeps the original order
        n = heapq.heappop(ready)
        out.append(steps[n])
        for r in readers[n]:
            missing[r] -= 1
            if not missing[r]:
                heapq.heappush(ready, r)
    assert len(out) == len(steps), "dependency cycle between steps"
    return out


def _late_readers(steps: Sequence[Step]) -> list[Step]:
    """Pointwise readers of collectives, moved to where their results are read.

    Where a batch is in parts, a residual sum waits for the collective of one part, and matmuls of the other would wait
    for it. It moves only past matmuls of the minimum time, and not if it writes less than the largest value
    that it reads of a collective (a conversion of gathered parameters), since what it reads stays in memory longer.
    """
    makers = _makers(steps)
    before = list(itertools.accumulate((_product(s) for s in steps), initial=0.0))
    place = {s: n for n, s in enumerate(steps)}
    first = {s: len(steps) for s in steps}  # the place of the first reader
    late: dict[Var, None] = {}  # values of collectives, and those computed from them pointwise
    for s in steps:
        if _exchanged(s) > LEAST or (isinstance(s, Region) and any(v in late for v in s.inputs)):
            late.update(dict.fromkeys(s.outputs))
    waiting: dict[int, list[Step]] = {}  # by the place of the step that they now precede
    for n, s in reversed(list(enumerate(steps))):
        if isinstance(s, Region) and before[first[s]] - before[n] > LEAST:
            read = max((v.aval.nbytes for v in s.inputs if v in late), default=0)
            if 0 < read <= sum(v.aval.nbytes for v in s.outputs):
                place[s] = first[s]
                waiting.setdefault(first[s], []).append(s)
        for m in _needs(s, makers):
            first[m] = min(first[m], place[s])
    out: list[Step] = []
    for n, s in enumerate([*steps, None]):
        out.extend(reversed(waiting.get(n, ())))
        if s is not None and place[s] == n:
            out.append(s)
    return out


def _makers(steps: Sequence[Step]) -> dict[Var, Step]:
    return {v: s for s in steps for v in s.outputs}


def _needs(step: Step, makers: dict[Var, Step]) -> Iterator[Step]:
    yield from dict.fromkeys(makers[v] for v in step.inputs if v in makers)
    if isinstance(step, Opaque) and step.after is not None:
        yield step.after


def _product(step: Step) -> float:
    """Estimated seconds of a library matmul; 0 for other steps."""
    return product_seconds(step.eqn) if isinstance(step, Opaque) and step.eqn.prim in PRODUCTS else 0.0


def _exchanged(step: Step) -> float:
    """Estimated seconds of a collective; 0 for steps that do more than communicate."""
    if not isinstance(step, Opaque) or step.eqn.prim.kind != "collective" or not communicates(step.eqn):
        return 0.0
    return exchange_seconds(step.eqn)


def _seconds(step: Step) -> float:
    """Estimated seconds of a matmul or collective; other steps count as 0."""
    return _exchanged(step) or (product_seconds(step.eqn) if isinstance(step, Opaque) else 0.0)
