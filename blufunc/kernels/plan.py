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
given on to the next step without waiting. ``check_plan`` replays a plan on labelled bytes, and believes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from blufunc import errors

ROOMY = 1 << 62  # the end of a space without a limit
GOOD_ENOUGH = 1.005  # a gain below this is not worth a search, nor another order of the steps
LARGE = 1 / 256  # of the arena: what is smaller stays there
ROUNDS, PLACEMENTS = 48, 16_000  # the longest search for a better packing: about 0.3 s


@dataclass(frozen=True)
class Step:
    """One launch or library call.

    Attributes:
      reads: ids of the values read.
      writes: ids of the values written.
      inplace: pairs (written id, read id) that may share storage if the value read dies here.
      scratch: bytes needed during the step only.
      after: indices of steps that must come first although no value says so (effects).
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inplace: tuple[tuple[int, int], ...] = ()
    scratch: int = 0
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Value:
    """What a step reads or writes; its id is its place in the list of values.

    Attributes:
      nbytes: the size.
      kind: ``"argument"`` (the caller's memory: read only), ``"donated"`` (an argument whose storage is
        ours after its last read), ``"output"`` (handed to the caller: in no arena) or ``"temp"``.
      label: its name and the user's line, for reports.
      alias_of: the value that it is a view of: one storage, alive while either is needed.
    """

    nbytes: int
    kind: str
    label: str = ""
    alias_of: int | None = None


@dataclass(frozen=True)
class Placement:
    """Where a value lies: ``offset`` bytes into a block of memory.

    Attributes:
      space: ``"arena"``; ``"output"``, an allocation of its own that output ``owner`` is returned in; or
        ``"argument"``, the storage of argument ``owner``.
      owner: the id of that output or argument; -1 in the arena.
      offset: in bytes. A view has the offset of what it is a view of.
    """

    space: str
    owner: int
    offset: int


@dataclass(frozen=True)
class Plan:
    """Where everything lies, and in which order to run.

    Attributes:
      order: the indices of the steps as they run.
      placement: for each value that some step touches, and each argument, its memory.
      scratch: for each step that asks for scratch, its memory.
      allocations: for each output that takes over no donated argument, the bytes to allocate for it.
      arena_bytes: the size of the one arena.
      arena_bound: the most bytes that are needed in the arena at once; no packing can be smaller.
      output_bytes: the sum of ``allocations``.
      argument_bytes: what the caller holds in arguments, donated or not.
      peak_bytes: ``argument_bytes + output_bytes + arena_bytes``.
      peak_step: the index of a step at which ``arena_bound`` is needed; None without steps.
    """

    order: tuple[int, ...]
    placement: dict[int, Placement]
    scratch: dict[int, Placement]
    allocations: dict[int, int]
    arena_bytes: int
    arena_bound: int
    output_bytes: int
    argument_bytes: int
    peak_step: int | None
    values: Sequence[Value] = field(repr=False)
    spans: dict[int, tuple[int, int]] = field(repr=False)  # first and last position; views with their root

    @property
    def peak_bytes(self) -> int:
        """Bytes of memory while the program runs: arguments, outputs and the arena."""
        return self.argument_bytes + self.output_bytes + self.arena_bytes

    def live_at(self, step: int) -> list[tuple[int, int]]:
        """The values in memory while a step runs, as (id, bytes), the largest first.

        Views are left out, and so is an operand that the step overwrites. Arguments that are not donated
        are always there.
        """
        at = self.order.index(step)
        holds: dict[Placement, int] = {}
        for value, (start, end) in self.spans.items():
            if start <= at <= end:
                place = self.placement[value]
                if place not in holds or self.spans[holds[place]][0] < start:
                    holds[place] = value
        live = [(value, self.values[value].nbytes) for value in holds.values()]
        return sorted(live, key=lambda pair: (-pair[1], pair[0]))

    def report(self, n: int = 10) -> str:
        """A table of the ``n`` largest values alive at the peak, with their labels."""
        lines = [
            f"planned peak {_size(self.peak_bytes)}: arguments {_size(self.argument_bytes)}, "
            f"outputs {_size(self.output_bytes)}, arena {_size(self.arena_bytes)} "
            f"({_size(self.arena_bound)} of it in use at once)"
        ]
        if self.peak_step is None:
            return lines[0]
        live = self.live_at(self.peak_step)
        at = self.order.index(self.peak_step)
        lines.append(f"alive at step {at + 1} of {len(self.order)}, where the arena is fullest:")
        for value, nbytes in live[:n]:
            info = self.values[value]
            lines.append(f"  {_size(nbytes):>10}  {info.kind:<8}  {info.label or f'value {value}'}")
        if len(live) > n:
            rest = sum(nbytes for _, nbytes in live[n:])
            lines.append(f"  {_size(rest):>10}  in {len(live) - n} smaller")
        return "\n".join(lines)


def plan(
    steps: Sequence[Step],
    values: Sequence[Value],
    *,
    alignment: int = 256,
    reorder: bool = True,
    borrow: bool = True,
) -> Plan:
    """Orders the steps and gives every value its memory.

    Args:
      steps: in an order that works.
      values: the values, by id.
      alignment: of every offset, in bytes.
      reorder: whether steps may run in another order; taken only where it needs less memory.
      borrow: whether temporaries may lie in an output's memory before it is written, and in a donated
        argument's once it is dead. Without it, only results of the same size take over donated memory.

    Raises:
      ValueRangeError: for a list of steps that cannot run: a value read before it is written, an argument
        written, an output that no step writes, a view larger than what it views.
    """
    graph = _Graph(steps, values)
    layout = _Layout(graph, range(len(steps)), alignment, borrow)
    if reorder and (order := _better_order(graph)) is not None:
        other = _Layout(graph, order, alignment, borrow)
        if other.least * GOOD_ENOUGH < layout.least:
            other.pack()
            if other.total <= layout.least:  # packing is the dear part: the given order cannot win any more
                return other.plan()
            layout.pack()
            return (other if other.total < layout.total else layout).plan()
    layout.pack()
    return layout.plan()


# ------------------------------------------------------------------------------------------------ the graph


class _Graph:
    """What the steps need of each other, and the storage behind each value.

    Attributes:
      root: for each value, the one that owns its storage: itself, unless it is a view.
      kind: for each root, what its storage is; a temporary with a view that is returned is an output.
      read_as: for each step, the views through which it reads each root.
      before: for each step, the steps that must come before it.
      temps: for each step, the temporary roots that it touches.
      touched_by: for each temporary root, the steps that touch it.
      overwrites: for each step, pairs of roots (written, read) of one size that may be in one place.
    """

    def __init__(self, steps: Sequence[Step], values: Sequence[Value]):
        self.steps, self.values = steps, values
        self.root = _roots(values)
        self.kind = [value.kind for value in values]
        self.returned: dict[int, int] = {}  # root -> the output that it is
        for i, value in enumerate(values):
            if value.kind == "output":
                self.returned.setdefault(self.root[i], i)
        for r in self.returned:
            if self.kind[r] == "temp":
                self.kind[r] = "output"
        self.read_as: list[dict[int, set[int]]] = []
        for step in steps:
            views: dict[int, set[int]] = {}
            for v in step.reads:
                views.setdefault(self.root[v], set()).add(v)
            self.read_as.append(views)
        self.before = self._dependencies()
        self.temps = [
            tuple({r for v in (*s.reads, *s.writes) if self.kind[r := self.root[v]] == "temp"}) for s in steps
        ]
        self.touched_by: dict[int, list[int]] = {}
        for i, roots in enumerate(self.temps):
            for r in roots:
                self.touched_by.setdefault(r, []).append(i)
        self.overwrites = [
            [(self.root[w], self.root[v]) for w, v in step.inplace if self.may_overwrite(i, w, v)]
            for i, step in enumerate(steps)
        ]

    def _dependencies(self) -> list[set[int]]:
        writers: dict[int, list[int]] = {}
        readers: dict[int, list[int]] = {}
        before: list[set[int]] = []
        for i, step in enumerate(self.steps):
            needs = set(step.after)
            if not all(0 <= j < i for j in needs):
                _reject(f"step {i} must come after steps {step.after}, which are not all before it")
            if not {w for w, _ in step.inplace} <= {*step.writes} or not {v for _, v in step.inplace} <= {
                *step.reads
            }:
                _reject(f"step {i} has in-place pairs of what it does not write and read: {step.inplace}")
            for v in step.reads:
                r = self.root[v]
                if r in writers:
                    needs.update(writers[r])
                elif not self.is_argument(r):
                    _reject(f"step {i} reads {self.name(v)}, which no step before it writes")
                readers.setdefault(r, []).append(i)
            for v in step.writes:
                r = self.root[v]
                if self.kind[r] == "argument":
                    _reject(f"step {i} writes {self.name(v)}, which is the caller's")
                # A buffer that is written piece by piece, through views: keep what came before it.
                needs.update(writers.get(r, ()))
                needs.update(readers.get(r, ()))
                writers.setdefault(r, []).append(i)
            needs.discard(i)
            before.append(needs)
        for r, v in self.returned.items():
            if r not in writers and not self.is_argument(r):
                _reject(f"{self.name(v)} is an output, and no step writes it")
        return before

    def updates_last(self) -> list[set[int]]:
        """``before``, and each step that updates a donated argument waits for those that read it first.

        Run too early, an update could not be made in place. These edges follow the given order, so there
        is no cycle.
        """
        readers: dict[int, set[int]] = {}
        before = []
        for i, step in enumerate(self.steps):
            needs = set(self.before[i])
            for _, v in step.inplace:
                if self.kind[self.root[v]] == "donated":
                    needs |= readers.get(self.root[v], set())
            for v in step.reads:
                if self.kind[self.root[v]] == "donated":
                    readers.setdefault(self.root[v], set()).add(i)
            before.append(needs)
        return before

    def is_argument(self, root: int) -> bool:
        return self.kind[root] in ("argument", "donated")

    def name(self, value: int) -> str:
        label = self.values[value].label
        return f"value {value} ({label})" if label else f"value {value}"

    def spans(self, order: Iterable[int]) -> dict[int, tuple[int, int]]:
        """The first and the last position at which the storage of each root is needed.

        Arguments are there from position -1; what the caller keeps is there up to the number of steps.
        """
        start: dict[int, int] = {
            r: -1 for r in range(len(self.values)) if self.is_argument(r) and self.owns(r)
        }
        end = dict(start)
        for at, i in enumerate(order):
            step = self.steps[i]
            for v in (*step.reads, *step.writes):
                r = self.root[v]
                start.setdefault(r, at)
                end[r] = at
        for r in start:
            if self.kind[r] == "argument" or r in self.returned:
                end[r] = len(self.steps)
        return {r: (start[r], end[r]) for r in start}

    def owns(self, value: int) -> bool:
        return self.root[value] == value

    def may_overwrite(self, i: int, written: int, read: int) -> bool:
        """Whether a step's pair is of one size, and harmless: it reads no other view of the operand meanwhile."""
        if self.values[self.root[written]].nbytes != self.values[self.root[read]].nbytes:
            return False
        views = self.read_as[i][self.root[read]]
        return len(views) == 1 or all((written, v) in self.steps[i].inplace for v in views)


def _roots(values: Sequence[Value]) -> list[int]:
    roots = []
    for i, value in enumerate(values):
        root, hops = i, 0
        while (up := values[root].alias_of) is not None:
            root, hops = up, hops + 1
            if hops > len(values):
                _reject(f"value {i} is a view of itself")
        if value.nbytes > values[root].nbytes:
            _reject(f"value {i} has {value.nbytes} bytes, and is a view of {values[root].nbytes}")
        roots.append(root)
    return roots


def _reject(what: str) -> NoReturn:
    raise errors.ValueRangeError(f"plan: {what}", why="the list of steps and values is not a program")


# ------------------------------------------------------------------------------------------------ the order


def _better_order(graph: _Graph) -> Sequence[int] | None:
    """The list schedule with the lowest peak of temporaries, or None if none is below the given order's.

    Two changes to an order are made in turn. Hoisting runs a step that frees something as soon as it is ready:
    an update as soon as its gradient is there. Sinking is the same from the end: a cast waits until it
    is needed. They start from the given order, hoisting first and sinking first, and from a
    greedy one that always takes the step that frees most; each of the three is at times the best by far.
    """
    n = len(graph.steps)
    before = graph.updates_last()
    after: list[set[int]] = [set() for _ in range(n)]
    for i, needs in enumerate(before):
        for j in needs:
            after[j].add(i)

    def hoist(base: Sequence[int]) -> list[int]:
        return _list_schedule(graph, base, before, after, eager=True)

    def sink(base: Sequence[int]) -> list[int]:
        return _list_schedule(graph, base[::-1], after, before, eager=True)[::-1]

    given = range(n)
    greedy = _list_schedule(graph, given, before, after, eager=False)
    orders = (sink(hoist(given)), hoist(sink(given)), hoist(sink(greedy)))
    peaks = [_peak_of_temps(graph, order) for order in orders]
    best = min(range(len(orders)), key=peaks.__getitem__)
    return orders[best] if peaks[best] < _peak_of_temps(graph, given) else None


def _list_schedule(
    graph: _Graph, base: Sequence[int], before: list[set[int]], after: list[set[int]], eager: bool
) -> list[int]:
    """Takes the ready step with the largest gain: bytes that die with it less bytes that begin with it.

    A buffer is alive from the first step that touches it to the last, in either direction of time, so the
    same code schedules from the end when ``before`` and ``after`` change places.
    Ties, and with ``eager`` all steps that free nothing, go by ``base``.
    """
    rank = [0] * len(base)
    for at, i in enumerate(base):
        rank[i] = at
    left = {r: len(steps) for r, steps in graph.touched_by.items()}
    nbytes = [value.nbytes for value in graph.values]
    gain = [sum([-nbytes[r] for r in roots if left[r] > 1]) for roots in graph.temps]
    waits = list(map(len, before))
    done = [False] * len(base)
    heap: list[tuple[int, int, int]] = []  # entries with an old gain stay, and are skipped

    def key(i: int) -> tuple[int, int, int]:
        worth = gain[i]
        return (0 if eager and worth < 0 else -worth, rank[i], i)

    for i, count in enumerate(waits):
        if not count:
            heap.append(key(i))
    heapq.heapify(heap)
    order = []
    while heap:
        entry = heapq.heappop(heap)
        i = entry[2]
        if done[i] or entry != key(i):
            continue
        done[i] = True
        order.append(i)
        for r in graph.temps[i]:
            users = graph.touched_by[r]
            remaining = left[r] = left[r] - 1
            begins, ends = remaining + 1 == len(users), remaining == 1
            if begins or ends:
                raised = nbytes[r] * (begins + ends)
                for j in users:
                    if not done[j]:
                        gain[j] += raised
                        if not waits[j]:
                            heapq.heappush(heap, key(j))
        for j in after[i]:
            waits[j] -= 1
            if not waits[j]:
                heapq.heappush(heap, key(j))
    return order


def _peak_of_temps(graph: _Graph, order: Sequence[int]) -> int:
    """The most bytes of temporaries and scratch alive at once, results written over dying operands."""
    left: dict[int, int] = {}
    for roots in graph.temps:
        for r in roots:
            left[r] = left.get(r, 0) + 1
    live = peak = 0
    begun: set[int] = set()
    for i in order:
        step = graph.steps[i]
        for r in graph.temps[i]:
            left[r] -= 1
            if r not in begun:
                begun.add(r)
                live += graph.values[r].nbytes
        saved = 0
        reused = set()
        for w, v in step.inplace:
            r = graph.root[v]
            size = graph.values[r].nbytes
            if left.get(r) == 0 and r not in reused and size == graph.values[graph.root[w]].nbytes:
                reused.add(r)
                saved += size
        peak = max(peak, live + step.scratch - saved)
        live -= sum(graph.values[r].nbytes for r in graph.temps[i] if not left[r])
    return peak


# ----------------------------------------------------------------------------------------------- the layout


@dataclass(eq=False)
class _Buffer:
    """Bytes that one value after another lies in.

    Attributes:
      spans: when they are needed: first and last position of each value in it.
      roots: those values.
      home: None for what may lie anywhere; else the block that it is, ("output" or "argument", id).
      scratch: the step whose scratch it is.
    """

    nbytes: int
    spans: list[tuple[int, int]]
    roots: list[int]
    home: tuple[str, int] | None = None
    scratch: int | None = None
    place: Placement | None = None

    @property
    def start(self) -> int:
        return min(s for s, _ in self.spans)

    @property
    def end(self) -> int:
        return max(e for _, e in self.spans)


class _Layout:
    """The memory of the steps in one order: buffers, what they borrow, and the arena's bound."""

    def __init__(self, graph: _Graph, order: Sequence[int], alignment: int, borrow: bool):
        self.graph, self.order, self.alignment = graph, order, alignment
        self.spans = graph.spans(order)
        self.buffers = _share(graph, order, self.spans)
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

    def borrow(self, loose: list[_Buffer]) -> None:
        """Moves buffers into idle memory, as long as one that is alive at the arena's peak can move."""
        windows = sorted(_windows(self.buffers, len(self.order)), key=lambda w: w.limit)
        if not windows:
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
            for window in windows:
                if window.limit >= b.nbytes and window.start <= start and end <= window.end:
                    offset = window.shelf.fit(start, end, b.nbytes, window.limit)
                    if offset is not None:
                        window.shelf.put(start, end, offset, self.aligned(b.nbytes))
                        b.place = Placement(*window.home, offset)
                        self.profile[start : end + 1] -= self.aligned(b.nbytes)
                        break

    def pack(self) -> None:
        """Gives the rest their offsets in the arena."""
        offsets, self.arena_bytes = _pack(
            [(b.start, b.end, self.aligned(b.nbytes)) for b in self.loose], self.bound
        )
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


def _share(graph: _Graph, order: Sequence[int], spans: dict[int, tuple[int, int]]) -> list[_Buffer]:
    """One buffer for each storage, those that can be one merged.

    Outputs choose first, so that an updated parameter takes the place of the old one: in place where the
    step allows it, else by taking over an argument of the same size that is dead. Then every other
    result is written over an operand that dies with the step.
    """
    holder: dict[int, _Buffer] = {}
    for r, span in spans.items():
        kind = graph.kind[r]
        home = ("argument", r) if graph.is_argument(r) else None
        if kind == "output":
            home = ("output", graph.returned[r])
        holder[r] = _Buffer(graph.values[r].nbytes, [span], [r], home)

    def overwrite(wanted: Callable[[int, int], bool]) -> None:
        for i in order:
            for written, read in graph.overwrites[i]:
                if wanted(written, read):
                    _merge(holder, written, read)

    overwrite(lambda written, read: graph.kind[written] == "output" and graph.kind[read] == "donated")
    idle: dict[int, list[int]] = {}  # donated arguments by size, the first to die first
    for r in sorted((r for r in spans if graph.kind[r] == "donated"), key=lambda r: spans[r][1]):
        idle.setdefault(graph.values[r].nbytes, []).append(r)
    for r in sorted((r for r in spans if graph.kind[r] == "output"), key=lambda r: spans[r][0]):
        if holder[r].home == ("output", graph.returned[r]):
            free = idle.get(graph.values[r].nbytes, [])
            for donated in free:
                if holder[donated].end < spans[r][0]:
                    free.remove(donated)
                    _merge(holder, r, donated)
                    break
    overwrite(lambda written, read: True)
    scratch = [
        _Buffer(graph.steps[i].scratch, [(at, at)], [], scratch=i)
        for at, i in enumerate(order)
        if graph.steps[i].scratch
    ]
    return [*{id(b): b for b in holder.values()}.values(), *scratch]


def _merge(holder: dict[int, _Buffer], written: int, read: int) -> None:
    """Makes two buffers one if they fit: equal sizes, at most one owner, never both needed.

    Where the value written begins as the one read dies, the two share that position.
    """
    a, b = holder[read], holder[written]
    takes_over = (
        a.home is not None and a.home[0] == "argument" and b.home is not None and b.home[0] == "output"
    )
    if a is b or a.nbytes != b.nbytes or not (a.home is None or b.home is None or takes_over):
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
class _Window:
    """A block of memory while its owner does not need it: positions ``start`` to ``end``, both included."""

    home: tuple[str, int]
    start: int
    end: int
    limit: int
    shelf: _Shelf


def _windows(buffers: list[_Buffer], n: int) -> list[_Window]:
    """The idle times of every block that is not the arena."""
    windows = []
    for b in buffers:
        if b.home is None or not b.nbytes:
            continue
        free = 0
        for start, end in [*sorted(b.spans), (n, n)]:
            if start > free:
                windows.append(_Window(b.home, free, start - 1, b.nbytes, _Shelf()))
            free = max(free, end + 1)
    return windows


# ------------------------------------------------------------------------------------------------- packing


class _Shelf:
    """Rectangles that lie in one space, bytes by positions, sorted by offset."""

    def __init__(self, capacity: int = 16):
        self.count = 0
        self.table = np.empty((4, capacity), np.int64)  # first and last position, offset, top

    def fit(self, start: int, end: int, nbytes: int, limit: int = ROOMY) -> int | None:
        """The offset of the tightest gap that is free all the while, or None."""
        table = self.table[:, : self.count]
        table = table[:, (table[0] <= end) & (table[1] >= start)]
        floors = np.zeros(table.shape[1] + 1, np.int64)  # the tops below each gap; the last gap is open
        np.maximum.accumulate(table[3], out=floors[1:])
        room = np.full(len(floors), limit, np.int64)
        room[:-1] = table[2]
        room -= floors
        room[room < nbytes] = ROOMY + 1
        which = int(room.argmin())
        return int(floors[which]) if room[which] <= ROOMY else None

    def put(self, start: int, end: int, offset: int, nbytes: int) -> None:
        """Adds a rectangle; ``nbytes`` is aligned, so that every gap begins at an aligned offset."""
        if self.count == self.table.shape[1]:
            self.table = np.concatenate([self.table, np.empty_like(self.table)], axis=1)
        at = int(self.table[2, : self.count].searchsorted(offset))
        self.table[:, at + 1 : self.count + 1] = self.table[:, at : self.count]
        self.table[:, at] = start, end, offset, offset + nbytes
        self.count += 1


Rectangle = tuple[int, int, int]  # first position, last position, bytes

# What comes first lies best. The first row is usually within the aim on training steps.
_STRATEGIES: tuple[Callable[[Rectangle], tuple[int, ...]], ...] = (
    lambda r: (-r[2], r[0] - r[1]),  # the largest
    lambda r: ((r[0] - r[1] - 1) * r[2],),  # the largest area
)


def _pack(rectangles: list[Rectangle], bound: int) -> tuple[list[int], int]:
    """Offsets for rectangles, and the height that they reach: the lowest of a few packings."""
    best: list[int] = []
    lowest = ROOMY
    for offsets in _packings(rectangles, bound):
        height = max((offset + r[2] for offset, r in zip(offsets, rectangles, strict=True)), default=0)
        if height < lowest:
            best, lowest = offsets, height
        if lowest <= bound * GOOD_ENOUGH:
            break
    return best, lowest


def _packings(rectangles: list[Rectangle], bound: int) -> Iterator[list[int]]:
    """Offsets by each strategy, then by blame: what reached above ``bound`` is placed earlier next time."""
    indices = range(len(rectangles))
    largest: list[int] = []
    for strategy in _STRATEGIES:
        offsets = _place(rectangles, sorted(indices, key=lambda i: strategy(rectangles[i])))
        largest = largest or offsets
        yield offsets
    offsets = largest
    weights = [r[2] for r in rectangles]
    for _ in range(min(ROUNDS, PLACEMENTS // (len(rectangles) + 1))):
        for i in indices:
            if offsets[i] + rectangles[i][2] > bound:
                weights[i] *= 3
        offsets = _place(rectangles, sorted(indices, key=lambda i: -weights[i]))
        yield offsets


def _place(rectangles: list[Rectangle], order: list[int]) -> list[int]:
    """Offsets for rectangles, each placed in the tightest gap among those before it."""
    shelf = _Shelf(len(rectangles))
    offsets = [0] * len(rectangles)
    for i in order:
        start, end, nbytes = rectangles[i]
        offset = shelf.fit(start, end, nbytes)
        assert offset is not None  # the arena has no limit
        shelf.put(start, end, offset, nbytes)
        offsets[i] = offset
    return offsets


# ------------------------------------------------------------------------------------------------ checking


def check_plan(plan: Plan, steps: Sequence[Step], values: Sequence[Value], *, alignment: int = 256) -> None:
    """Checks that a plan's order and memory are sound, by running it on labelled bytes.

    Raises:
      ValueRangeError: naming the step and the value that would go wrong.
    """
    if sorted(plan.order) != list(range(len(steps))):
        _unsound("its order is not a permutation of the steps")
    done: set[int] = set()
    for i in plan.order:
        if not done.issuperset(steps[i].after):
            _unsound(f"step {i} runs before one of the steps {steps[i].after}")
        done.add(i)
    for place in (*plan.placement.values(), *plan.scratch.values()):
        if place.offset % alignment:
            _unsound(f"offset {place.offset} is not a multiple of {alignment}")
    simulate(plan, steps, values)


def simulate(plan: Plan, steps: Sequence[Step], values: Sequence[Value]) -> int:
    """Runs a plan on bytes that hold the names of values, not numbers.

    Returns:
      The highest byte of the arena that is used.

    Raises:
      ValueRangeError: if a step reads bytes that no longer or not yet hold its value, if two things that it
        needs at once overlap, if anything leaves its block, or if at the end an output is not whole, alone
        in its block, or an argument that was not donated has changed.
    """
    root = _roots(values)
    holds: dict[tuple[str, int], dict[int, tuple[int, int]]] = {}  # block -> value -> its range of bytes
    for i, value in enumerate(values):
        if value.kind in ("argument", "donated") and root[i] == i:
            holds["argument", i] = {i: (0, value.nbytes)}
    used = 0

    def region(place: Placement, nbytes: int) -> tuple[tuple[str, int], int, int]:
        block = (place.space, place.owner)
        size = plan.arena_bytes if place.space == "arena" else plan.allocations.get(place.owner, 0)
        if place.space == "argument":
            size = values[place.owner].nbytes
        if not 0 <= place.offset <= place.offset + nbytes <= size:
            _unsound(f"{place} with {nbytes} bytes leaves a block of {size}")
        return block, place.offset, place.offset + nbytes

    for i in plan.order:
        step = steps[i]
        reading = {r: region(plan.placement[r], values[r].nbytes) for r in {root[v] for v in step.reads}}
        for r, (block, low, high) in reading.items():
            if holds.get(block, {}).get(r) != (low, high):
                _unsound(f"step {i} reads value {r}, which is not in memory")
        writing = {r: region(plan.placement[r], values[r].nbytes) for r in {root[v] for v in step.writes}}
        if step.scratch:
            writing[-1] = region(plan.scratch[i], step.scratch)
        pairs = {(root[w], root[v]) for w, v in step.inplace}
        for w, here in writing.items():
            for v, there in (reading | writing).items():
                shared = (w, v) in pairs and here == there
                if v != w and not shared and _overlap(here, there):
                    _unsound(f"step {i} writes value {w} over value {v}, which it needs")
            block, low, high = here
            if block[0] == "argument" and values[block[1]].kind == "argument":
                _unsound(f"step {i} writes value {w} into argument {block[1]}, which is not donated")
            content = holds.setdefault(block, {})
            holds[block] = {v: x for v, x in content.items() if v == w or not _overlap((block, *x), here)}
            if w >= 0:
                holds[block][w] = (low, high)
            if block[0] == "arena":
                used = max(used, high)
    taken: set[tuple[str, int]] = set()
    for r in {root[i] for i, value in enumerate(values) if value.kind == "output"}:
        block, low, high = region(plan.placement[r], values[r].nbytes)
        if holds.get(block, {}).get(r) != (low, high):
            _unsound(f"output {r} is not in memory at the end")
        if block[0] == "arena" or block in taken or low:
            _unsound(f"output {r} has no memory of its own")
        taken.add(block)
    return used


def _overlap(a: tuple[tuple[str, int], int, int], b: tuple[tuple[str, int], int, int]) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


def _unsound(what: str) -> NoReturn:
    raise errors.ValueRangeError(f"check_plan: {what}", why="the plan would corrupt memory")


def _size(nbytes: int) -> str:
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"
