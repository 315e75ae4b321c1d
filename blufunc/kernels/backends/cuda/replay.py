"""CUDA graph replay: decides which calls of a program can share a graph.

Kernels, stage 8. In: an executor and the buffers of a call. Out: the call on the compute stream, kernel by kernel or
as a graph captured at an earlier call with the same addresses. A training step that donates its state has stable
addresses, except for small values: a batch of tokens, a learning rate, the loss. Those are copied through staging
buffers, so the graph finds them in the same place. These buffers are on the device, for values on the host too: the
host would wait for a copy within its memory.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from blufunc import errors
from blufunc.config import config
from blufunc.core.ir.avals import ShapedArray
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver import graph as cuda_graph
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.executor import Executor

STAGED_BYTES = 1 << 20
"""Maximum bytes of a value that is staged when its address changes."""

KEPT = 4
"""Maximum graphs per program."""

FEWEST = 3
"""Minimum launches of a program for a graph to pay."""

_PATIENCE = 8
"""Maximum captures without enough replays."""


@dataclass
class _Captured:
    """A graph and its staging buffers.

    Attributes:
      staged: by root, the buffers that small arguments are copied to and small results from.
      dynamic: results whose memory steps allocated.
    """

    graph: cuda_graph.Graph
    staged: dict[int, DeviceBuffer]
    dynamic: dict[int, DeviceBuffer]


class Replays:
    """Graphs of one executor.

    Args:
      movable: arguments that may be staged; donated ones may not, since results reuse their memory.

    Attributes:
      why: reason that graphs are impossible, or None.
      replayed: number of calls that were graph replays.
    """

    def __init__(self, executor: Executor, movable: Sequence[bool]):
        self.executor = executor
        self.why: str | None = None if executor.captured else _why_not(executor)
        self.replayed = 0
        self._movable = movable
        self._graphs: OrderedDict[tuple, _Captured] = OrderedDict()
        self._seen: OrderedDict[tuple, None] = OrderedDict()
        self._moved: set[int] = set()  # stageable roots whose addresses have changed
        self._before: list[int] | None = None
        self._wasted = 0

    def run(self, bases: list[DeviceBuffer]) -> tuple[dict[int, DeviceBuffer], bool]:
        """Run a call on the compute stream.

        Args:
          bases: the arguments, then the allocations for results.
        Returns:
          dynamic results, and whether they belong to the graph.
        """
        executor = self.executor
        if self.why is None and config.cuda_graphs and executor.launches >= FEWEST:
            key = self._key(bases)
            found = self._graphs.get(key)
            if found is None and key in self._seen:
                found = self._capture(key, bases)
            if found is not None:
                self._graphs.move_to_end(key)
                self._replay(found, bases)
                return found.dynamic, True
            self._seen[key] = None
            if len(self._seen) > 4 * KEPT:
                self._seen.popitem(last=False)
        executor.launch_eagerly(bases)
        return executor.dynamic(), False

    def _key(self, bases: Sequence[DeviceBuffer]) -> tuple:
        """Addresses that a graph of this call depends on; 0 for staged values."""
        pointers = [b.ptr for b in bases]
        before, self._before = self._before or pointers, pointers
        changed = compress(range(len(pointers)), map(operator.ne, pointers, before))
        new = {i for i in changed if i not in self._moved and self._can_be_copied(i, bases[i])}
        if new:
            self._moved |= new
            self._graphs.clear()
        key = list(pointers)
        for i in self._moved:
            key[i] = 0
        return tuple(key)

    def _can_be_copied(self, root: int, buffer: DeviceBuffer) -> bool:
        return buffer.nbytes <= STAGED_BYTES and (root >= len(self._movable) or self._movable[root])

    def _capture(self, key: tuple, bases: Sequence[DeviceBuffer]) -> _Captured | None:
        executor = self.executor
        if self._wasted >= _PATIENCE:
            self._refuse("the addresses of its arguments change from call to call")
            return None
        staged = {
            i: executor.own(ShapedArray(bases[i].shape, bases[i].dtype), "staged for a graph")
            for i in self._moved
        }
        fixed = [staged.get(i, b) for i, b in enumerate(bases)]
        try:
            graph = cuda_graph.capture(
                lambda streams: executor.launch_concurrently(fixed, streams),
                executor.device,
                (executor, list(staged.values())),
                executor.lanes,
            )
        except errors.BlufuncError:
            raise
        except RuntimeError as e:  # base class of CUDA errors
            self._refuse(f"{type(e).__name__}: {e}")
            return None
        fixed.clear()  # the graph keeps the function, which must not keep the caller's arrays alive
        captured = self._graphs[key] = _Captured(graph, staged, executor.dynamic())
        self._wasted += 1
        if len(self._graphs) > KEPT:
            self._graphs.popitem(last=False)
        return captured

    def _replay(self, found: _Captured, bases: Sequence[DeviceBuffer]) -> None:
        stream = driver.compute_stream(self.executor.device)
        driver.use_device(self.executor.device)
        first_result = self.executor.roots.arguments
        for root, at in found.staged.items():
            if root < first_result:
                _copy(at, bases[root], stream)
        found.graph.launch()
        for root, at in found.staged.items():
            if root >= first_result:
                _copy(bases[root], at, stream)
        self.replayed += 1
        if self.replayed > 2 * self._wasted:
            self._wasted = 0

    def _refuse(self, why: str) -> None:
        self.why = why
        self._graphs.clear()
        if config.shows("launch"):
            config.show(f"{self.executor.name} runs kernel by kernel, not as a graph: {why}")


def _copy(to: DeviceBuffer, source: DeviceBuffer, stream: Any) -> None:
    """Copy a staged value, from or to the memory that its array is in."""
    on_device = to.memory_kind == source.memory_kind
    (driver.copy_on_device if on_device else driver.transfer)(to.ptr, source.ptr, to.nbytes, stream)


def _why_not(executor: Executor) -> str:
    """Reason that an executor's steps cannot be a graph."""
    if any(w.exchanges and not w.captured for w in executor.works):
        return "it has collectives, and config.nccl_graphs is off"
    return "it has steps that involve the host"
