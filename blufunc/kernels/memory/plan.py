"""Stage 7: the memory plan of a whole program, made before it runs.

Kernels. In: the steps (launches and library calls) in an order that works, and the sizes of the values that they read
and write. Out: an order with a low peak, and the memory of every value: one arena for temporaries, an output's own
allocation, or the storage of a donated argument. No device, dtype or equation occurs here: it is a problem of
rectangles, bytes by time.

    1  order    the given one, or a list schedule of it that needs less
    2  share    values that are one buffer: views, results written over a dying operand, donation
    3  borrow   temporaries move into the idle memory of outputs and donated arguments
    4  pack     the remaining buffers get offsets in the arena

Packing is greedy: dynamic storage allocation is NP-hard, and on training steps greedy comes within a few per cent of
the bound. A plan holds for steps on one stream, where the next step can reuse memory without a wait. The types are in
``types.py``, the graph and the order in ``order.py``; ``verify.py`` replays a plan on labelled bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from blufunc.kernels.memory.order import Graph, better_order
from blufunc.kernels.memory.types import Placement, Plan, Step, Value

# -- buffers ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Buffer:
    """Bytes that hold one value after another.

    Attributes:
      nbytes: the size.
      spans: first and last position of each value in it.
      roots: these values.
      home: None for a temporary; else the block that it is, ("output" or "argument", id).
      scratch: the step whose scratch it is.
      place: its memory, once assigned.
      on_host: whether it is in the memory of the host.
    """

    nbytes: int
    spans: list[tuple[int, int]]
    roots: list[int]
    home: tuple[str, int] | None = None
    scratch: int | None = None
    place: Placement | None = None
    on_host: bool = False

    @property
    def start(self) -> int:
        return min(s for s, _ in self.spans)

    @property
    def end(self) -> int:
        return max(e for _, e in self.spans)


def share(graph: Graph, order: Sequence[int], spans: dict[int, tuple[int, int]]) -> list[Buffer]:
    """One buffer per storage, merged if values can share it.

    Outputs choose first, so that an updated parameter replaces the old one: in place if the step or a chain of steps
    allows it, else in a dead argument of the same size. Then every other result overwrites an operand that dies with
    the step.
    """
    holder: dict[int, Buffer] = {}
    for r, span in spans.items():
        kind = graph.kind[r]
        home = ("argument", r) if graph.is_argument(r) else None
        if kind == "output":
            home = ("output", graph.returned[r])
        value = graph.values[r]
        holder[r] = Buffer(value.nbytes, [span], [r], home, on_host=value.on_host)

    def overwrite(allowed: Callable[[int, int], bool]) -> None:
        for i in order:
            for written, read in graph.overwrites[i]:
                if allowed(written, read):
                    _merge(holder, written, read)

    overwrite(lambda written, read: graph.kind[written] == "output" and graph.kind[read] == "donated")
    operands: dict[int, list[int]] = {}
    for pairs in graph.overwrites:
        for written, read in pairs:
            operands.setdefault(written, []).append(read)
    for r in [
        r for r in spans if graph.kind[r] == "output" and holder[r].home == ("output", graph.returned[r])
    ]:
        chain = _chain(graph, operands, r)
        for read, written in itertools.pairwise(chain):
            _merge(holder, written, read)
    idle: dict[tuple[int, bool], list[int]] = {}  # donated arguments by size, the first to die first
    kind_of = lambda r: (graph.values[r].nbytes, graph.values[r].on_host)
    for r in sorted((r for r in spans if graph.kind[r] == "donated"), key=lambda r: spans[r][1]):
        idle.setdefault(kind_of(r), []).append(r)
    for r in sorted((r for r in spans if graph.kind[r] == "output"), key=lambda r: spans[r][0]):
        if holder[r].home == ("output", graph.returned[r]):
            free = idle.get(kind_of(r), [])
            for donated in free:
                if holder[donated].end < spans[r][0]:
                    free.remove(donated)
                    _merge(holder, r, donated)
                    break
    overwrite(lambda written, read: True)
    scratch = [
        Buffer(graph.steps[i].scratch, [(at, at)], [], scratch=i)
        for at, i in enumerate(order)
        if graph.steps[i].scratch
    ]
    return [*{id(b): b for b in holder.values()}.values(), *scratch]


def _chain(graph: Graph, operands: dict[int, list[int]], output: int) -> list[int]:
    """Values from a donated argument to an output, each over the previous one.

    Empty if there are none.
    """
    paths = [[output]]
    seen = {output}
    while paths:
        path = paths.pop()
        for read in operands.get(path[-1], ()):
            if graph.kind[read] == "donated":
                return [read, *reversed(path)]
            if graph.kind[read] == "temp" and read not in seen:
                seen.add(read)
                paths.append([*path, read])
    return []


def _merge(holder: dict[int, Buffer], written: int, read: int) -> None:
    """Merge two buffers if they fit: equal sizes, one owner, never both needed.

    They may share the position at which the value written begins and the one read dies.
    """
    a, b = holder[read], holder[written]
    takes_over = (
        a.home is not None and a.home[0] == "argument" and b.home is not None and b.home[0] == "output"
    )
    if a is b or a.nbytes != b.nbytes or not (a.home is None or b.home is None or takes_over):
        return
    if a.on_host != b.on_host:
        return
    at = b.spans[b.roots.index(written)][0]
    for i, (s, e) in enumerate(a.spans):
        for j, (t, f) in enumerate(b.spans):
            touching = a.roots[i] == read and b.roots[j] == written and e == at == t
            if s <= f and t <= e and not touching:
                return
    a.spans += b.spans
    a.roots += b.roots
    a.home = a.home or b.home
    for r in b.roots:
        holder[r] = a


@dataclass(eq=False)
class Window:
    """An idle block of memory: positions ``start`` to ``end``, both included."""

    home: tuple[str, int]
    start: int
    end: int
    limit: int
    shelf: Shelf


def windows(buffers: list[Buffer], n: int) -> list[Window]:
    """The idle times of every block outside the arena."""
    windows = []
    for b in buffers:
        if b.home is None or not b.nbytes or b.on_host:
            continue
        free = 0
        for start, end in [*sorted(b.spans), (n, n)]:
            if start > free:
                windows.append(Window(b.home, free, start - 1, b.nbytes, Shelf()))
            free = max(free, end + 1)
    return windows


# -- packing ----------------------------------------------------------------------------------------


NO_LIMIT = 1 << 62  # the end of a space without a limit
GOOD_ENOUGH = 1.005  # a gain below this is not worth a search, nor another order of the steps
ROUNDS, PLACEMENTS = 48, 8_000  # the longest search for a better packing: about 0.1 s


class Shelf:
    """Rectangles in one space, bytes by positions, sorted by offset."""

    def __init__(self, capacity: int = 16):
        self.count = 0
        self.table = np.empty((4, capacity), np.int64)  # first and last position, offset, top

    def fit(self, start: int, end: int, nbytes: int, limit: int = NO_LIMIT) -> int | None:
        """The offset of the tightest gap that is free from start to end, or None."""
        firsts, lasts, offsets, tops = self.table
        n = self.count
        (meanwhile,) = ((firsts[:n] <= end) & (lasts[:n] >= start)).nonzero()
        floors = np.zeros(len(meanwhile) + 1, np.int64)  # the top below each gap; the last gap is open
        np.maximum.accumulate(tops[meanwhile], out=floors[1:])
        gaps = np.empty_like(floors)
        gaps[:-1], gaps[-1] = offsets[meanwhile], limit
        gaps -= floors
        gaps[gaps < nbytes] = NO_LIMIT + 1
        which = int(gaps.argmin())
        return int(floors[which]) if gaps[which] <= NO_LIMIT else None

    def put(self, start: int, end: int, offset: int, nbytes: int) -> None:
        """Add a rectangle; ``nbytes`` is aligned, so that every gap starts aligned."""
        if self.count == self.table.shape[1]:
            self.table = np.concatenate([self.table, np.empty_like(self.table)], axis=1)
        at = int(self.table[2, : self.count].searchsorted(offset))
        self.table[:, at + 1 : self.count + 1] = self.table[:, at : self.count]
        self.table[:, at] = start, end, offset, offset + nbytes
        self.count += 1


Rectangle = tuple[int, int, int]  # first position, last position, bytes

# Earlier rectangles are placed better. The first strategy usually suffices on training steps.
_STRATEGIES: tuple[Callable[[Rectangle], tuple[int, ...]], ...] = (
    lambda r: (-r[2], r[0] - r[1]),  # the largest
    lambda r: ((r[0] - r[1] - 1) * r[2],),  # the largest area
)


def pack(rectangles: list[Rectangle], bound: int, search: bool = True) -> tuple[list[int], int]:
    """Offsets for rectangles, and their height: the lowest of a few packings.

    ``search``: whether to search for a better packing if the first few are not good enough.
    """
    best: list[int] = []
    lowest = NO_LIMIT
    for offsets in _packings(rectangles, bound, search):
        height = max((offset + r[2] for offset, r in zip(offsets, rectangles, strict=True)), default=0)
        if height < lowest:
            best, lowest = offsets, height
        if lowest <= bound * GOOD_ENOUGH:
            break
    return best, lowest


def _packings(rectangles: list[Rectangle], bound: int, search: bool) -> Iterator[list[int]]:
    """Offsets by each strategy, then by blame: rectangles above ``bound`` first."""
    indices = range(len(rectangles))
    largest: list[int] = []
    for strategy in _STRATEGIES:
        offsets = _place(rectangles, sorted(indices, key=lambda i: strategy(rectangles[i])))
        largest = largest or offsets
        yield offsets
    offsets = largest
    weights = [r[2] for r in rectangles]
    for _ in range(min(ROUNDS, PLACEMENTS // (len(rectangles) + 1)) if search else 0):
        for i in indices:
            if offsets[i] + rectangles[i][2] > bound:
                weights[i] *= 3
        offsets = _place(rectangles, sorted(indices, key=lambda i: -weights[i]))
        yield offsets


def _place(rectangles: list[Rectangle], order: list[int]) -> list[int]:
    """Offsets for rectangles, each in the tightest gap among those placed before."""
    shelf = Shelf(len(rectangles))
    offsets = [0] * len(rectangles)
    for i in order:
        start, end, nbytes = rectangles[i]
        offset = shelf.fit(start, end, nbytes)
        assert offset is not None  # the arena has no limit
        shelf.put(start, end, offset, nbytes)
        offsets[i] = offset
    return offsets


# -- the plan ---------------------------------------------------------------------------------------


LARGE = 1 / 256  # of the arena: smaller buffers stay there


def plan(
    steps: Sequence[Step],
    values: Sequence[Value],
    *,
    alignment: int = 256,
    reorder: bool = True,
    borrow: bool = True,
    search: bool = True,
) -> Plan:
    """Order the steps and assign memory to every value.

    Args:
      steps: in an order that works.
      values: the values, by id.
      alignment: of every offset, in bytes; default 256.
      reorder: whether steps may run in another order, if it needs less memory; default True.
      borrow: whether temporaries may use an output's memory before it is written, and a donated argument's once it is
        dead; default True. Otherwise, only results of the same size take over donated memory.
      search: whether to search for a packing better than the first few; default True.

    Returns:
      The plan.

    Raises:
      ValueRangeError: a value is read before it is written, an argument is written, no step writes an output, or a
        view is larger than its base.
    """
    graph = Graph(steps, values)
    layout = _Layout(graph, range(len(steps)), alignment, borrow)
    if reorder and (order := better_order(graph)) is not None:
        other = _Layout(graph, order, alignment, borrow)
        if other.least * GOOD_ENOUGH < layout.least:
            other.pack(search)
            if other.total <= layout.least:  # the given order cannot win: skip its packing, which is slow
                return other.plan()
            layout.pack(search)
            return (other if other.total < layout.total else layout).plan()
    layout.pack(search)
    return layout.plan()


class _Layout:
    """The memory of steps in one order: buffers, borrowed memory, the arena's bound."""

    def __init__(self, graph: Graph, order: Sequence[int], alignment: int, borrow: bool):
        self.graph, self.order, self.alignment = graph, order, alignment
        self.spans = graph.spans(order)
        self.buffers = share(graph, order, self.spans)
        self.allocations = {
            b.home[1]: b.nbytes for b in self.buffers if b.home is not None and b.home[0] == "output"
        }
        outputs = [b for b in self.buffers if b.home is not None and b.home[0] == "output"]
        self.output_bytes = sum(b.nbytes for b in outputs if not b.on_host)
        self.host_output_bytes = sum(b.nbytes for b in outputs if b.on_host)
        loose, self.on_host = [], []
        for b in self.buffers:
            if b.home is not None:
                b.place = Placement(*b.home, 0)
            elif b.nbytes:
                (self.on_host if b.on_host else loose).append(b)
            else:
                b.place = Placement("arena", -1, 0)
        self.profile = np.zeros(len(order) + 1, np.int64)  # bytes of the arena needed at each position
        for b in loose:
            self.profile[b.start : b.end + 1] += self.aligned(b.nbytes)
        if borrow:
            self.borrow(loose)
        self.loose = [b for b in loose if b.place is None]
        self.bound = int(self.profile.max())
        self.arena_bytes = self.host_arena_bytes = 0

    @property
    def least(self) -> int:
        """A lower bound on the bytes of outputs and arena."""
        return self.output_bytes + self.bound

    @property
    def total(self) -> int:
        """The bytes of outputs and arena as packed."""
        return self.output_bytes + self.arena_bytes

    def aligned(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def borrow(self, loose: list[Buffer]) -> None:
        """Move buffers into idle memory, as long as that lowers the arena's peak."""
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
            untried[which] = False  # idle memory only fills up: a buffer that does not fit now never will
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
        """Assign offsets in the arena to the remaining buffers."""
        rectangles = [(b.start, b.end, self.aligned(b.nbytes)) for b in self.loose]
        offsets, self.arena_bytes = pack(rectangles, self.bound, search)
        for b, offset in zip(self.loose, offsets, strict=True):
            b.place = Placement("arena", -1, offset)
        rectangles = [(b.start, b.end, self.aligned(b.nbytes)) for b in self.on_host]
        offsets, self.host_arena_bytes = pack(rectangles, 0, search=False)
        for b, offset in zip(self.on_host, offsets, strict=True):
            b.place = Placement("host", -1, offset)

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
        arguments = [v for i, v in enumerate(graph.values) if graph.owns(i) and graph.is_argument(i)]
        return Plan(
            order=tuple(self.order),
            placement=placement,
            scratch=scratch,
            allocations=self.allocations,
            arena_bytes=self.arena_bytes,
            arena_bound=self.bound,
            output_bytes=self.output_bytes,
            argument_bytes=sum(v.nbytes for v in arguments if not v.on_host),
            peak_step=self.order[int(self.profile[:-1].argmax())] if self.order else None,
            values=graph.values,
            spans=self.spans,
            host_arena_bytes=self.host_arena_bytes,
            host_output_bytes=self.host_output_bytes,
            host_argument_bytes=sum(v.nbytes for v in arguments if v.on_host),
        )
