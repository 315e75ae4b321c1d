"""What runs while all wait for an exchange: products that nothing needs yet.

Kernels, stage 5, behind ``fusion/fuse.py``. In: the steps of a fusion. Out: the same in another order: some products
come behind an exchange whose result the very next work needs, and begin when it does. With tensor parallelism there are
four such exchanges a layer in the backward pass, and the gradients of its weights, which only the optimizer reads, take
about as long: multiprocessors would idle for the ones, and before that share themselves between the others and what
leads to the exchange. That these gradients can wait is known from pipelines (Qi et al., "Zero Bubble Pipeline
Parallelism", 2023).
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
from blufunc.kernels.fusion.fuse import Opaque, Step
from blufunc.kernels.ops.gemm import PRODUCTS

LEAST = 2e-5
"""Seconds of a product, and of an exchange, from which on it is worth it."""

SOON = 8
"""How much work comes before something reads a product that may wait."""

MOST = 4
"""How many products wait at a time: their operands stay in memory."""


def with_products_beside(steps: Sequence[Step]) -> list[Step]:
    """The steps with products that nobody needs yet behind exchanges that are waited for, as ``Opaque.beside`` says."""
    if sum(_exchanged(s) > LEAST for s in steps) < 2:
        return list(steps)
    _Cover(steps).choose()
    return _delayed(steps)


class _Cover:
    """Which products come behind which exchange.

    Attributes:
      work: the products and exchanges that are worth it, with their numbers, in their order.
      reads: for each step, the numbers of the work that its operands are made of, and its own, as bits.
      before: the same with what must be done before for the order of exchanges.
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
        """Set ``beside`` of products."""
        work = list(self.work)
        idle = {
            s for n, s in enumerate(work) if _product(s) and not self.is_read(n, work[n + 1 : n + 1 + SOON])
        }
        waiting: list[Opaque] = []
        last = -1  # the number of the work that came last and was not idle
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

    def is_read(self, number: int, steps: Iterable[Step]) -> bool:
        """Whether one of some steps reads what is made of the work of a number."""
        return any(self.reads[s] >> number & 1 for s in steps)


def _fitting(products: Sequence[Opaque], seconds: float) -> list[Opaque]:
    """What is done about when an exchange is, those first that have waited longest."""
    found: list[Opaque] = []
    for p in products:
        if _product(p) <= seconds:
            found.append(p)
            seconds -= _product(p)
    return found


def _delayed(steps: Sequence[Step]) -> list[Step]:
    """The steps as they came, but for those that are beside a later one, and what waits for them."""
    makers = _makers(steps)
    place = {s: n for n, s in enumerate(steps)}
    readers: list[list[int]] = [[] for _ in steps]
    missing = [0] * len(steps)
    for n, s in enumerate(steps):
        beside = [s.overlapped] if isinstance(s, Opaque) and s.overlapped is not None else []
        for m in {place[x] for x in (*_needs(s, makers), *beside)}:
            readers[m].append(n)
            missing[n] += 1
    ready = [n for n, count in enumerate(missing) if not count]
    out: list[Step] = []
    while ready:  # a heap: the numbers rise
        n = heapq.heappop(ready)
        out.append(steps[n])
        for r in readers[n]:
            missing[r] -= 1
            if not missing[r]:
                heapq.heappush(ready, r)
    assert len(out) == len(steps), "steps wait for each other"
    return out


def _makers(steps: Sequence[Step]) -> dict[Var, Step]:
    return {v: s for s in steps for v in s.outputs}


def _needs(step: Step, makers: dict[Var, Step]) -> Iterator[Step]:
    yield from dict.fromkeys(makers[v] for v in step.inputs if v in makers)
    if isinstance(step, Opaque) and step.after is not None:
        yield step.after


def _product(step: Step) -> float:
    """How long a product of the library's takes, about; 0 for anything else."""
    return product_seconds(step.eqn) if isinstance(step, Opaque) and step.eqn.prim in PRODUCTS else 0.0


def _exchanged(step: Step) -> float:
    """How long devices exchange in a step, about; 0 where they do not, and where they do other things besides."""
    if not isinstance(step, Opaque) or step.eqn.prim.kind != "collective" or not communicates(step.eqn):
        return 0.0
    return exchange_seconds(step.eqn)


def _seconds(step: Step) -> float:
    """How long work takes, about; 0 for what is none: kernels of ours are taken to be short beside it."""
    return _exchanged(step) or (product_seconds(step.eqn) if isinstance(step, Opaque) else 0.0)
