"""Stage 7 of the path of a program: the memory of a whole step, planned before anything runs.

In: the steps (launches and library calls) in an order that works, and the sizes of the values that
they read and write. Out: an order with a low peak, and for every value the memory that it lies in:
one arena for what is temporary, an output's own allocation, or the storage of a donated argument.
Nothing here knows a device, a dtype or an equation: it is a problem of rectangles, bytes by time.

    1  order    the given one, or a list schedule of it that needs less
    2  share    values that are one buffer: views, results written over a dying operand, donation
    3  borrow   temporaries move into the idle memory of outputs and donated arguments
    4  pack     what is left gets offsets in the arena

Packing is greedy: dynamic storage allocation is NP-hard, and on training steps greedy comes within a few
per cent of the bound. A plan holds for steps that run one after another, as on one stream: memory is
given on to the next step without waiting.

What it takes and gives is in ``types.py``; the graph of the steps, their order, the sharing of buffers and the
packing have a file each (``dependencies.py``, ``order.py``, ``buffers.py``, ``pack.py``).
``verify.py`` replays a plan on labelled bytes, and believes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blufunc.kernels.memory.buffers import Buffer, share, windows
from blufunc.kernels.memory.dependencies import Graph
from blufunc.kernels.memory.order import better_order
from blufunc.kernels.memory.pack import GOOD_ENOUGH, pack
from blufunc.kernels.memory.types import Placement, Plan, Step, Value

LARGE = 1 / 256  # of the arena: what is smaller stays there


def plan(
    steps: Sequence[Step],
    values: Sequence[Value],
    *,
    alignment: int = 256,
    reorder: bool = True,
    borrow: bool = True,
    search: bool = True,
) -> Plan:
    """Orders the steps and gives every value its memory.

    Args:
      steps: in an order that works.
      values: the values, by id.
      alignment: of every offset, in bytes.
      reorder: whether steps may run in another order; taken only where it needs less memory.
      borrow: whether temporaries may lie in an output's memory before it is written, and in a donated
        argument's once it is dead. Without it, only results of the same size take over donated memory.
      search: whether to search for a packing of the arena that is better than the first few.

    Raises:
      ValueRangeError: for a list of steps that cannot run: a value read before it is written, an argument
        written, an output that no step writes, a view larger than what it views.
    """
    graph = Graph(steps, values)
    layout = _Layout(graph, range(len(steps)), alignment, borrow)
    if reorder and (order := better_order(graph)) is not None:
        other = _Layout(graph, order, alignment, borrow)
        if other.least * GOOD_ENOUGH < layout.least:
            other.pack(search)
            if other.total <= layout.least:  # packing is the dear part: the given order cannot win any more
                return other.plan()
            layout.pack(search)
            return (other if other.total < layout.total else layout).plan()
    layout.pack(search)
    return layout.plan()


class _Layout:
    """The memory of the steps in one order: buffers, what they borrow, and the arena's bound."""

    def __init__(self, graph: Graph, order: Sequence[int], alignment: int, borrow: bool):
        self.graph, self.order, self.alignment = graph, order, alignment
        self.spans = graph.spans(order)
        self.buffers = share(graph, order, self.spans)
        self.allocations = {
            b.home[1]: b.nbytes for b in self.buffers if b.home is not None and b.home[0] == "output"
        }
        self.output_bytes = sum(self.allocations.values())
        loose = []
        for b in self.buffers:
            if b.home is not None:
                b.place = Placement(*b.home, 0)
            elif b.nbytes:
                loose.append(b)
            else:
                b.place = Placement("arena", -1, 0)
        self.profile = np.zeros(len(order) + 1, np.int64)  # bytes of the arena needed at each position
        for b in loose:
            self.profile[b.start : b.end + 1] += self.aligned(b.nbytes)
        if borrow:
            self.borrow(loose)
        self.loose = [b for b in loose if b.place is None]
        self.bound = int(self.profile.max())
        self.arena_bytes = 0

    @property
    def least(self) -> int:
        """What the outputs and the arena need at least."""
        return self.output_bytes + self.bound

    @property
    def total(self) -> int:
        """What they need as packed."""
        return self.output_bytes + self.arena_bytes

    def aligned(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def borrow(self, loose: list[Buffer]) -> None:
        """Moves buffers into idle memory, as long as one that is alive at the arena's peak can move."""
        idle = sorted(windows(self.buffers, len(self.order)), key=lambda w: w.limit)
        if not idle:
            return
        least = int(self.profile.max()) * LARGE
        loose = sorted((b for b in loose if b.nbytes >= least), key=lambda b: -b.nbytes)
        starts, ends = np.array([b.start for b in loose]), np.array([b.end for b in loose])
        untried = np.ones(len(loose), bool)
        while untried.any():
            peak = int(self.profile.argmax())
            candidates = np.flatnonzero(untried & (starts <= peak) & (ends >= peak))
            if not len(candidates):
                return
            which = candidates[0]
            untried[which] = False  # memory only fills up: what does not fit now never will
            b, start, end = loose[which], int(starts[which]), int(ends[which])
            for window in idle:
                if window.limit >= b.nbytes and window.start <= start and end <= window.end:
                    offset = window.shelf.fit(start, end, b.nbytes, window.limit)
                    if offset is not None:
                        window.shelf.put(start, end, offset, self.aligned(b.nbytes))
                        b.place = Placement(*window.home, offset)
                        self.profile[start : end + 1] -= self.aligned(b.nbytes)
                        break

    def pack(self, search: bool) -> None:
        """Gives the rest their offsets in the arena."""
        rectangles = [(b.start, b.end, self.aligned(b.nbytes)) for b in self.loose]
        offsets, self.arena_bytes = pack(rectangles, self.bound, search)
        for b, offset in zip(self.loose, offsets, strict=True):
            b.place = Placement("arena", -1, offset)

    def plan(self) -> Plan:
        """The finished plan."""
        graph = self.graph
        placement: dict[int, Placement] = {}
        scratch: dict[int, Placement] = {}
        for b in self.buffers:
            assert b.place is not None
            if b.scratch is not None:
                scratch[b.scratch] = b.place
            placement.update(dict.fromkeys(b.roots, b.place))
        for v, r in enumerate(graph.root):
            if r in placement:
                placement[v] = placement[r]
        return Plan(
            order=tuple(self.order),
            placement=placement,
            scratch=scratch,
            allocations=self.allocations,
            arena_bytes=self.arena_bytes,
            arena_bound=self.bound,
            output_bytes=self.output_bytes,
            argument_bytes=sum(
                v.nbytes for i, v in enumerate(graph.values) if graph.owns(i) and graph.is_argument(i)
            ),
            peak_step=self.order[int(self.profile[:-1].argmax())] if self.order else None,
            values=graph.values,
            spans=self.spans,
        )
