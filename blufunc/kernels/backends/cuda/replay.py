"""Calls of a program as CUDA graphs: which calls are alike enough to be one.

Kernels, stage 8. In: an executor and the buffers of a call. Out: the call, put on the compute stream kernel by kernel,
or as a graph that was captured at an earlier call with the same addresses. A training step that donates its state is
called with the same addresses each time, but for small things: a batch of tokens, a learning rate, the loss that it
returns. These are copied, so that the graph always finds them in the same place.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from blufunc import errors
from blufunc.config import config
from blufunc.core.ir.avals import ShapedArray
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver import graph as cuda_graph
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.executor import Executor

STAGED_BYTES = 1 << 20
"""Up to which size what moves from call to call is copied."""

KEPT = 4
"""How many graphs a program keeps."""

FEWEST = 3
"""How many steps a program must have for a graph to gain anything."""

_PATIENCE = 8
"""How many captures may be in vain."""


@dataclass
class _Captured:
    """A graph, and where it finds what is copied.

    Attributes:
      staged: by root, the buffers that small arguments are copied to, and small results from.
      dynamic: the results that steps made the memory of.
    """

    graph: cuda_graph.Graph
    staged: dict[int, DeviceBuffer]
    dynamic: dict[int, DeviceBuffer]


class Replays:
    """The graphs of one executor.

    Args:
      movable: the arguments that may be copied: what is donated may not, since results take its place.

    Attributes:
      why: why there can be no graphs, or None.
      replayed: how many calls were graphs.
    """

    def __init__(self, executor: Executor, movable: Sequence[bool]):
        self.executor = executor
        self.why: str | None = None if executor.captured else _why_not(executor)
        self.replayed = 0
        self._movable = movable
        self._graphs: OrderedDict[tuple, _Captured] = OrderedDict()
        self._seen: OrderedDict[tuple, None] = OrderedDict()
        self._moved: set[int] = set()  # the roots whose addresses have changed, and that can be copied
        self._before: list[int] | None = None
        self._in_vain = 0

    def run(self, bases: list[DeviceBuffer]) -> tuple[dict[int, DeviceBuffer], bool]:
        """Put a call on the compute stream.

        Args:
          bases: the arguments, then the allocations for results.
        Returns:
          the results that steps made the memory of, and whether they are the graph's own.
        """
        executor = self.executor
        if self.why is None and config.cuda_graphs and len(executor.works) >= FEWEST:
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
        executor.launch(bases, driver.compute_stream(executor.device))
        return executor.dynamic(), False

    def _key(self, bases: Sequence[DeviceBuffer]) -> tuple:
        """The addresses that a graph of this call would have; 0 for what is copied."""
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
        small = buffer.nbytes <= STAGED_BYTES
        return small and (root >= len(self._movable) or self._movable[root])

    def _capture(self, key: tuple, bases: Sequence[DeviceBuffer]) -> _Captured | None:
        executor = self.executor
        if self._in_vain >= _PATIENCE:
            self._refuse("the addresses of its arguments change from call to call")
            return None
        staged = {
            i: executor.own(ShapedArray(bases[i].shape, bases[i].dtype), "staged for a graph")
            for i in self._moved
        }
        fixed = [staged.get(i, b) for i, b in enumerate(bases)]
        try:
            graph = cuda_graph.capture(
                lambda streams: executor.launch_beside(fixed, streams),
                executor.device,
                (executor, list(staged.values())),
                executor.lanes,
            )
        except errors.BlufuncError:
            raise
        except RuntimeError as e:  # the class of all errors of CUDA
            self._refuse(f"{type(e).__name__}: {e}")
            return None
        fixed.clear()  # the graph keeps the function, which must not keep the caller's arrays
        made = self._graphs[key] = _Captured(graph, staged, executor.dynamic())
        self._in_vain += 1
        if len(self._graphs) > KEPT:
            self._graphs.popitem(last=False)
        return made

    def _replay(self, found: _Captured, bases: Sequence[DeviceBuffer]) -> None:
        stream = driver.compute_stream(self.executor.device)
        driver.use_device(self.executor.device)
        first_result = self.executor.roots.arguments
        for root, at in found.staged.items():
            if root < first_result:
                driver.copy_on_device(at.ptr, bases[root].ptr, at.nbytes, stream)
        found.graph.launch()
        for root, at in found.staged.items():
            if root >= first_result:
                driver.copy_on_device(bases[root].ptr, at.ptr, at.nbytes, stream)
        self.replayed += 1
        if self.replayed > 2 * self._in_vain:
            self._in_vain = 0

    def _refuse(self, why: str) -> None:
        self.why = why
        self._graphs.clear()
        if config.shows("launch"):
            config.show(f"{self.executor.name} runs kernel by kernel, not as a graph: {why}")


def _why_not(executor: Executor) -> str:
    """Why the steps of an executor cannot be a graph."""
    if any(w.exchanges and not w.captured for w in executor.works):
        return "it exchanges with other devices, and config.nccl_graphs is off"
    return "it has steps that the host takes part in"
