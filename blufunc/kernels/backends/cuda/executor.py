"""Executor of a CUDA program: binds memory and launches steps, one call at a time.

Kernels, stage 8. In: a ``Schedule`` with loaded kernels, and the buffers of a call. Out: work on a stream. An
``Executor`` owns the state of one concurrent run: an arena, and launches whose parameters are addresses. Arena
addresses are fixed; those of arguments and results are patched where they changed since the previous call.
``program.py`` picks the executor of a call, ``replay.py`` decides whether the call is a graph.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from blufunc.config import config
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.ir.jaxpr import Literal
from blufunc.kernels.backends.cuda import streams as cuda_streams
from blufunc.kernels.backends.cuda.driver import driver, sm_reservation
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.driver.modules import Addresses, Launch, Loaded, Wanted
from blufunc.kernels.gemm_layout import Gemm
from blufunc.kernels.loopir.access_map import view
from blufunc.kernels.loopir.index import strides_of
from blufunc.kernels.loopir.launch import Scratch
from blufunc.kernels.schedule import OpaqueStep, Schedule, Step, accesses, touched

ALIGNMENT = 256
"""Alignment of values in bytes: kernels need 16, libraries assume more."""

ARENA, HOST_ARENA = -1, -2


_ARENAS = {"arena": ARENA, "host": HOST_ARENA}
"""By space of a plan, its root."""


class Place(NamedTuple):
    """Location of a value: a byte offset into a root, an arena or one of ``Roots``."""

    root: int
    offset: int


class Roots:
    """Memory of a call besides the arena: arguments, allocations, dynamic values.

    Attributes:
      arguments, allocations: number of each.
      count: number of roots.
    """

    def __init__(self, made: Schedule):
        self.made = made
        self.arguments, self.allocations = len(made.inputs), len(made.plan.allocations)
        argument = {v: n for n, v in enumerate(made.inputs)}
        allocation = {v: self.arguments + n for n, v in enumerate(made.plan.allocations)}
        self._blocks = {"argument": argument, "output": allocation}
        dynamic = sorted(made.unplanned)
        self._dynamic = {v: self.arguments + self.allocations + n for n, v in enumerate(dynamic)}
        self.count = self.arguments + self.allocations + len(dynamic)

    def place(self, value: int) -> Place:
        """Location of a value."""
        while value in self.made.aliases:
            value = self.made.aliases[value]
        if value in self._dynamic:
            return Place(self._dynamic[value], 0)
        found = self.made.plan.placement[value]
        if found.space in _ARENAS:
            return Place(_ARENAS[found.space], found.offset)
        return Place(self._blocks[found.space][found.owner], found.offset)

    def is_dynamic(self, root: int) -> bool:
        """True if the step that computes a root's value allocates its memory."""
        return root >= self.arguments + self.allocations


def block_types(made: Schedule) -> list[ShapedArray]:
    """Types of the allocations for results; bytes where several values share one."""
    types = [(type_of(made.values[v]), nbytes) for v, nbytes in made.plan.allocations.items()]
    return [
        t if t.nbytes == nbytes else ShapedArray((nbytes,), dtypes.uint8, False, t.memory)
        for t, nbytes in types
    ]


def type_of(value: Any) -> ShapedArray:
    """Type of a value; scratch memory is a vector."""
    return ShapedArray((value.size,), value.dtype) if isinstance(value, Scratch) else value.aval


class Strided(NamedTuple):
    """View of a buffer, with ``offset`` and ``strides`` in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Operand:
    """Operand of a step that is not a generated kernel.

    Attributes:
      atom, aval: the operand and its type.
      chain: the movement equations that make it a view of a value.
      layout: its layout in the memory of that value.
      place: location of that value; None for a constant.
    """

    def __init__(self, executor: Executor, atom: Any, source: Literal | tuple[int, list]):
        self.atom, self.aval = atom, atom.aval
        self._constant: DeviceBuffer | None = None
        self._copy: Callable | None = None
        self.place: Place | None = None
        self.chain: list[Any] = []
        self.layout = Strided((), (), 0)
        if isinstance(source, Literal):
            self._constant = executor.constant(source)
            return
        value, self.chain = source
        self.place = executor.roots.place(value)
        self._source = type_of(executor.made.values[value])
        self.layout = strided(self._source.shape, self.chain)
        if not self._is_dense():
            self._copy = executor.copier(self.chain)

    def _is_dense(self) -> bool:
        """True if its layout is that of a dense buffer."""
        expected = strides_of(self.aval.shape)
        same = all(
            a == b for a, b, n in zip(self.layout.strides, expected, self.aval.shape, strict=True) if n > 1
        )
        return same and not self.layout.offset * self.aval.dtype.itemsize % ALIGNMENT

    @property
    def in_place(self) -> bool:
        """True if ``buffer`` returns existing memory without a copy."""
        return self._copy is None

    def base(self, executor: Executor) -> DeviceBuffer:
        """The buffer that it is a view of."""
        if self.place is None:
            assert self._constant is not None
            return self._constant
        return executor.buffer(self.place, self._source)

    def buffer(self, executor: Executor) -> DeviceBuffer:
        """Its elements, dense in row-major order."""
        base = self.base(executor)
        if self._copy is not None:
            return self._copy(base)
        if not self.chain:
            return base
        return base.view(self.aval.shape, self.aval.dtype, self.layout.offset * self.aval.dtype.itemsize)

    def address(self, executor: Executor) -> int:
        """Address of the element at index 0."""
        base = executor.address(self.place) if self.place is not None else self.base(executor).ptr
        return base + self.layout.offset * self.aval.dtype.itemsize

    def located(self, executor: Executor, in_place: bool) -> tuple[int, DeviceBuffer | None]:
        """Address ``in_place`` or of a dense copy, and what must live until it is read."""
        if in_place:
            return self.address(executor), None
        buffer = self.buffer(executor)
        return buffer.ptr, buffer


class Results:
    """Memory of a step's results: planned, or its own for unread ones.

    Attributes:
      places: planned locations; None for results that no step reads.
      unread: memory of those.
    """

    def __init__(self, executor: Executor, step: OpaqueStep):
        self.places = [None if r is None else executor.roots.place(r) for r in step.results]
        pairs = zip(step.eqn.outvars, self.places, strict=True)
        self.unread = [executor.own(v.aval, "an unread result") if p is None else None for v, p in pairs]
        executor.keep(self.unread)

    def addresses(self, executor: Executor) -> list[int]:
        """Address of each result."""
        pairs = zip(self.places, self.unread, strict=True)
        return [b.ptr if b is not None else executor.address(p) for p, b in pairs]  # type: ignore[arg-type]


def strided(shape: tuple[int, ...], chain: Sequence[Any]) -> Strided:
    """Strides and offset that movement equations produce from a dense array."""
    base = np.empty(1, np.uint8)  # a dummy array: only its strides are read
    model = np.lib.stride_tricks.as_strided(base, shape, strides_of(shape))
    for eqn in chain:
        model = view(eqn, model)
    start = model.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return Strided(model.shape, model.strides, start)


OUT, IN = cuda_streams.OUT, cuda_streams.IN


@dataclass
class Work:
    """A step that is ready to run.

    Attributes:
      run: enqueues the step on the stream of the executor passed to it; it must hold no reference to one.
      name: name in reports.
      step: the step of the schedule.
      drops: roots whose last use it is.
      captured: True if it can be part of a graph.
      anywhere: True if it touches only planned memory or its own, and enqueues everything on ``work_stream``: it may
        then overlap with other steps. Valid after the first run.
      ``exchanges``: True if it waits for other devices; such steps have their own stream.
      copies: direction of a copy between memories, which has a stream of its own too: ``OUT`` to the host, ``IN`` from
        it; else 0.
      launches: number of nodes that it adds to a graph, about.
      ends_in_kernel: True if the last that it enqueues is a kernel, on ``work_stream``.
    """

    run: Callable[[Executor], None]
    name: str
    step: Step
    drops: tuple[int, ...] = ()
    captured: bool = True
    anywhere: Callable[[], bool] = lambda: False
    exchanges: bool = False
    copies: int = 0
    launches: int = 1
    ends_in_kernel: bool = False


class Executor:
    """State of one concurrent run of a program.

    Attributes:
      made: the schedule.
      device: index of the CUDA device.
      arena: memory of temporaries.
      stream: handle of the current stream.
      works: the steps.
      products: cached matmul plans, by operands and options; steps share them.
      launches: number of nodes that a call adds to a graph, about.
      beside_exchange: True while enqueuing a step that overlaps with a collective.
      follows_kernel: True while enqueuing a step that follows a kernel of this program on its stream, with nothing
        between them: a kernel that waits for it by itself may begin earlier.
    """

    def __init__(
        self,
        made: Schedule,
        device: int,
        name: str,
        launches: dict[int, list[tuple[Wanted, Loaded]]],
        opaque: Callable[[Executor, OpaqueStep], Work],
        copier: Callable[[Sequence[Any]], Callable[[DeviceBuffer], DeviceBuffer]],
    ):
        self.made, self.device, self.name = made, device, name
        driver.use_device(device)
        self.roots = Roots(made)
        self.copier = copier
        self.stream = 0
        self.beside_exchange = self.follows_kernel = False
        self._kernel_last: dict[int, bool] = {}  # by stream, whether a kernel was enqueued last
        self._overlaps = config.cuda_overlap and driver.properties(device).capability >= (9, 0)
        self._side_stream: Any = None  # stream of a step that is not on the first one
        self._constants: dict[tuple, DeviceBuffer] = {}
        self.products: dict[Gemm, Any] = {}
        self._kept: list[DeviceBuffer | None] = []
        self._allocate = Allocator(made, device, name)
        self.arena = self._allocate.bytes(made.plan.arena_bytes, f"the arena of {name}")
        self._arenas = {ARENA: self.arena}
        if made.plan.host_arena_bytes:
            shape, label = (made.plan.host_arena_bytes,), f"what {name} offloads"
            own = cuda_memory.pinned_pool(device).allocate(shape, dtypes.uint8, label)
            self._arenas[HOST_ARENA] = own
        self._bases: list[DeviceBuffer | None] = [None] * self.roots.count
        self._pointers = [0] * self.roots.count
        self._slots: list[list[tuple[Addresses, int, int]]] = [[] for _ in range(self.roots.count)]
        counters = sum(loaded.counters for many in launches.values() for _, loaded in many)
        self._counters = self._allocate.zeros(4 * counters)
        self._next_counter = self._counters.ptr
        self.works = [
            opaque(self, step) if isinstance(step, OpaqueStep) else self._kernels(step, launches[n])
            for n, step in enumerate(made.steps)
        ]
        self._note_drops()
        for o in made.outputs:
            if isinstance(o, Literal):
                self.constant(o)  # now: a capture cannot copy from the host
        types = [*[type_of(made.values[v]) for v in made.inputs], *block_types(made)]
        self._makers = [_maker(self.roots, types, made, o) for o in made.outputs]
        self.copies = any(w.copies for w in self.works)
        self._side_by_side: list[cuda_streams.StreamSlot] | None = None  # slots of calls that are no graphs
        self._ran = False
        self.captured = all(w.captured for w in self.works)
        self.launches = sum(w.launches for w in self.works)
        if any(s.overlapped for s in made.steps if isinstance(s, OpaqueStep)):
            self._pause = sm_reservation.pause(device, cuda_streams.PAUSE)
            self._pause(driver.compute_stream(device).ptr)  # first-time initialization cannot be captured
        del self.copier  # avoids a reference cycle through the program

    # -- memory ----------------------------------------------------------------------------------------

    def constant(self, literal: Literal) -> DeviceBuffer:
        """A constant on the device."""
        x = np.asarray(literal.array.__array__())
        key = (x.dtype, x.tobytes())
        found = self._constants.get(key)
        if found is None:
            found = self._constants[key] = cuda_memory.to_device(x, self.device, f"a constant of {self.name}")
        return found

    def bind(self, first: int, buffers: Sequence[DeviceBuffer]) -> None:
        """Bind the roots from ``first`` on to buffers."""
        stop = first + len(buffers)
        before, pointers = self._pointers[first:stop], [b.ptr for b in buffers]
        self._bases[first:stop], self._pointers[first:stop] = buffers, pointers
        for root in compress(range(first, stop), map(operator.ne, pointers, before)):
            pointer = self._pointers[root]
            for addresses, i, offset in self._slots[root]:
                addresses[i] = pointer + offset

    def address(self, place: Place) -> int:
        """Address of a location."""
        base = self._arenas[place.root].ptr if place.root < 0 else self._pointers[place.root]
        return place.offset + base

    def buffer(self, place: Place, aval: ShapedArray) -> DeviceBuffer:
        """A value as a buffer."""
        base = self._arenas[place.root] if place.root < 0 else self._bases[place.root]
        assert base is not None, "a value was let go of before its last use"
        if not place.offset and base.shape == aval.shape and base.dtype == aval.dtype:
            return base
        return base.view(aval.shape, aval.dtype, place.offset)

    def own(self, aval: ShapedArray, label: str) -> DeviceBuffer:
        """Memory for a dynamic value."""
        return self._allocate(aval, label)

    def is_constant(self, operand: Operand) -> bool:
        """True if no step writes where an operand of a step is."""
        if operand.place is None:
            return True
        root = operand.place.root
        return 0 <= root < self.roots.arguments and root not in self._written

    @functools.cached_property
    def _written(self) -> frozenset[int]:
        """Roots that steps write."""
        return frozenset(
            self.roots.place(v).root for step in self.made.steps for v, written in accesses(step) if written
        )

    def keep(self, buffers: Sequence[DeviceBuffer | None]) -> None:
        """Keep buffers alive whose addresses launches hold."""
        self._kept.extend(buffers)

    def put(self, value: int, buffer: DeviceBuffer) -> None:
        """Store a result that a step allocated; copied if its location is planned."""
        place = self.roots.place(value)
        if self.roots.is_dynamic(place.root):
            self.bind(place.root, [buffer])
            return
        to = self.buffer(place, type_of(self.made.values[value]))
        driver.copy_on_device(to.ptr, buffer.ptr, buffer.nbytes, self.work_stream())

    def work_stream(self) -> Any:
        """Stream object of the current step."""
        return self._side_stream or driver.work_stream(self.device)

    # -- steps -----------------------------------------------------------------------------------------

    def _kernels(self, step: Any, launches: Sequence[tuple[Wanted, Loaded]]) -> Work:
        runs = [self._launch(request, loaded) for request, loaded in launches]
        name = f"{step.kernel.name} and alike" if len(launches[0][0].kernels) > 1 else step.kernel.name
        if len(runs) == 1:
            (launch,) = runs
            run_one = lambda executor: launch(executor.stream)
            if launches[0][1].waits:
                run_one = lambda executor: launch(executor.stream, executor.follows_kernel)
            return Work(run_one, name, step, anywhere=lambda: True, ends_in_kernel=True)

        def run(executor: Executor) -> None:
            for one in runs:
                one(executor.stream)

        return Work(run, name, step, anywhere=lambda: True, ends_in_kernel=True)

    def _launch(self, request: Wanted, loaded: Loaded) -> Launch:
        counters = [self._next_counter] if loaded.counters else []
        self._next_counter += 4 * loaded.counters
        launch, addresses = loaded.prepare([*[0] * len(request.values), *counters])
        places = map(self.roots.place, request.values)
        self.follow(
            addresses, [Place(p.root, p.offset + n) for p, n in zip(places, request.offsets, strict=True)]
        )
        return launch

    def follow(self, addresses: Addresses, places: Sequence[Place | None]) -> None:
        """Keep a launch's addresses up to date with these locations; None is left alone."""
        for i, p in enumerate(places):
            if p is None:
                continue
            if p.root < 0:
                addresses[i] = self._arenas[p.root].ptr + p.offset
            else:
                self._slots[p.root].append((addresses, i, p.offset))

    def _note_drops(self) -> None:
        """Set ``drops`` of each step: dynamic roots whose last use it is."""
        kept = {self.roots.place(o).root for o in self.made.outputs if isinstance(o, int)}
        last: dict[int, int] = {}
        for n, step in enumerate(self.made.steps):
            for v in touched(step):
                last[self.roots.place(v).root] = n
        for root, n in last.items():
            if root >= 0 and self.roots.is_dynamic(root) and root not in kept:
                self.works[n].drops += (root,)

    # -- running ---------------------------------------------------------------------------------------

    def launch(
        self,
        bases: Sequence[DeviceBuffer],
        stream: Any,
        between: Callable[[int], object] | None = None,
        overlapping: bool = True,
    ) -> None:
        """Enqueue all steps on a stream.

        Args:
          bases: the arguments, then the allocations for results.
          between: called with the index of each step before it, and with the number of steps at the end. It may switch
            the stream.
          overlapping: let kernels begin ahead of the end of those before them, where they can; default True.
        """
        self.stream = stream.ptr
        driver.use_device(self.device)
        self.bind(0, bases)
        shown = config.shows("launch")
        self._kernel_last = {}
        for n, work in enumerate(self.works):
            if between is not None:
                between(n)
            if shown:
                config.show(f"launch {n}: {work.name}")
            self.follows_kernel = overlapping and self._overlaps and self._kernel_last.get(self.stream, False)
            work.run(self)
            self._kernel_last[self.stream] = work.ends_in_kernel
            for root in work.drops:
                self._bases[root] = None
        if between is not None:
            between(len(self.works))

    def launch_eagerly(self, bases: Sequence[DeviceBuffer]) -> None:
        """Enqueue all steps on the compute stream, and copies between memories on theirs.

        The first run is on one stream: some steps allocate in it.
        """
        stream = driver.compute_stream(self.device)
        if not self.copies or not self._ran:
            self.launch(bases, stream)
            self._ran = True
            return
        if self._side_by_side is None:
            alone = [replace(t, collective=False, overlapped=None) for t in self._tasks()]
            self._side_by_side = cuda_streams.turns(alone, 1)
        streams = [stream, stream, *driver.copy_streams(self.device)]  # collectives stay on the first
        with driver.side_streams(self.device, [stream, *streams[2:]]):
            self._launch_on(bases, streams, self._side_by_side, None)

    def launch_concurrently(self, bases: Sequence[DeviceBuffer], streams: Sequence[Any]) -> None:
        """Enqueue all steps on a capture's streams, one per entry of ``lanes``."""
        if len(streams) == 1:
            self.launch(bases, streams[0])
            return
        tasks = self._tasks()
        self._launch_on(bases, streams, cuda_streams.turns(tasks, config.cuda_streams), tasks)

    def _launch_on(
        self,
        bases: Sequence[DeviceBuffer],
        streams: Sequence[Any],
        order: Sequence[cuda_streams.StreamSlot],
        tasks: Sequence[cuda_streams.Task] | None,
    ) -> None:
        """Enqueue all steps on these streams; ``tasks`` if some overlap with collectives."""
        awaited = {-1}.union(*[slot.waits for slot in order])
        passed: dict[int, Any] = {}  # events after steps; key -1 is the start
        used = {0}

        def join() -> None:
            self._side_stream = None
            for s in used - {0}:
                streams[0].wait_event(driver.recorded(streams[s]))
            used.intersection_update({0})

        def between(n: int) -> None:
            if n - 1 in awaited:
                passed[n - 1] = driver.recorded(self.work_stream())
            if n == len(order):
                join()
                return
            slot = order[n]
            stream = streams[slot.stream]
            for m in (*[-1] * (slot.stream not in used), *slot.waits):
                stream.wait_event(passed[m])
                self._kernel_last[stream.ptr] = False
            used.add(slot.stream)
            self.stream, self._side_stream = stream.ptr, stream if slot.stream else None
            self.beside_exchange = tasks is not None and tasks[n].overlapped is not None
            if self.beside_exchange:
                self._pause(stream.ptr)

        try:
            self.launch(bases, streams[0], between)
        finally:
            if (
                tasks is None
            ):  # after a failed step too: what frees the memory of copies under way must follow them
                join()
            self._side_stream, self.beside_exchange = None, False

    @property
    def lanes(self) -> list[bool]:
        """Priority flags of a capture's streams: that of collectives is urgent.

        The last two, if there are copies between memories, are of their directions.
        """
        exchanges = any(w.exchanges for w in self.works)
        return (
            [False] * config.cuda_streams + [True] * (exchanges or self.copies) + [False, False] * self.copies
        )

    def _tasks(self) -> list[cuda_streams.Task]:
        """Stream-scheduling tasks of all steps."""
        numbers = {id(w.step.eqn): n for n, w in enumerate(self.works) if w.exchanges}  # type: ignore[union-attr]
        tasks = [self._task(w, numbers) for w in self.works]
        barriers = {n for n, t in enumerate(tasks) if t.accesses is None}  # steps that overlap with no other
        return [
            replace(t, overlapped=None) if t.overlapped in barriers or n in barriers else t
            for n, t in enumerate(tasks)
        ]

    def _task(self, work: Work, exchanges: dict[int, int]) -> cuda_streams.Task:
        """Task of a step; ``exchanges`` maps each collective equation to its task."""
        found = []
        for value, written in accesses(work.step):
            root, start = self.roots.place(value)
            end = start + type_of(self.made.values[value]).nbytes
            found.append(cuda_streams.Access(root, start, end, written))
        seconds = cuda_streams.estimate(work.step, sum(a.end - a.start for a in found))
        known = tuple(found) if work.anywhere() else None
        collective = work.step.overlapped if isinstance(work.step, OpaqueStep) else None
        overlapped = exchanges.get(id(collective))
        return cuda_streams.Task(known, seconds, work.exchanges, overlapped, work.copies)

    def dynamic(self) -> dict[int, DeviceBuffer]:
        """Results whose memory steps allocated."""
        first = self.roots.arguments + self.roots.allocations
        return {n: b for n, b in enumerate(self._bases[first:], first) if b is not None}

    def results(
        self, bases: Sequence[DeviceBuffer], dynamic: dict[int, DeviceBuffer], fresh: bool
    ) -> list[DeviceBuffer]:
        """Results of a run on these buffers.

        Args:
          fresh: True to copy dynamic results, which a graph overwrites at each replay.
        """
        return [bases[m] if isinstance(m, int) else m(self, bases, dynamic, fresh) for m in self._makers]

    def copied(self, buffer: DeviceBuffer) -> DeviceBuffer:
        """A copy in its own memory."""
        return self._allocate.copy(buffer)

    def release(self) -> None:
        """Release the buffers of the last call; addresses stay, since they may recur."""
        self._bases = [None] * self.roots.count


Maker = Callable[["Executor", Sequence[DeviceBuffer], dict[int, DeviceBuffer], bool], DeviceBuffer]


def _maker(roots: Roots, types: Sequence[ShapedArray], made: Schedule, o: Any) -> Maker | int:
    """Recipe of a result, computed once per program; it holds no executor.

    Args:
      types: types of the arguments and of the allocations for results.
    Returns:
      the root whose buffer is the result, or a function that makes it.
    """
    if isinstance(o, Literal):
        return lambda executor, bases, dynamic, fresh: cuda_memory.moved(
            executor.copied(executor.constant(o)), o.aval.memory
        )
    place, aval = roots.place(o), type_of(made.values[o])
    root, offset, shape, dtype = place.root, place.offset, aval.shape, aval.dtype
    if root < 0:
        return lambda executor, bases, dynamic, fresh: executor.copied(executor.buffer(place, aval))

    def seen(base: DeviceBuffer) -> DeviceBuffer:
        same = not offset and base.shape == shape and base.dtype == dtype
        return base if same else base.view(shape, dtype, offset)

    if not roots.is_dynamic(root):
        if place.offset == 0 and types[root].same_type(aval):
            return root
        return lambda executor, bases, dynamic, fresh: seen(bases[root])
    return lambda executor, bases, dynamic, fresh: (
        executor.copied(seen(dynamic[root])) if fresh else seen(dynamic[root])
    )


class Allocator:
    """Allocator of a program's values; out-of-memory errors name the program.

    During a graph capture, memory comes from the capture and stays the graph's own.
    """

    def __init__(self, made: Schedule, device: int, name: str):
        self.made, self.device, self.name = made, device, name
        labels = [made.plan.values[v].label for v in made.plan.allocations]
        pairs = zip(block_types(made), labels, strict=True)
        pairs = list(pairs)
        self._on_host = [n for n, (aval, _) in enumerate(pairs) if aval.memory != DEVICE]
        blocks = [(aval.shape, aval.dtype, label) for aval, label in pairs]
        self._pinned_blocks = [blocks[n] for n in self._on_host]
        self._blocks = [block for n, block in enumerate(blocks) if n not in self._on_host]

    def __call__(self, aval: ShapedArray, label: str) -> DeviceBuffer:
        if driver.is_capturing(driver.work_stream(self.device).ptr):
            return _captured(aval, self.device, label)
        if aval.memory != DEVICE:
            return cuda_memory.pinned_pool(self.device).allocate(aval.shape, aval.dtype, label)
        return cuda_memory.allocate(aval.shape, aval.dtype, self.device, label, self.made.plan.peak_bytes)

    def copy(self, buffer: DeviceBuffer) -> DeviceBuffer:
        """A copy in its own memory."""
        if buffer.memory_kind != DEVICE:
            return cuda_memory.copy(buffer, f"a copy in {self.name}")
        out = self(ShapedArray(buffer.shape, buffer.dtype), f"a copy in {self.name}")
        stream = driver.work_stream(self.device)
        driver.copy_on_device(out.ptr, buffer.ptr, buffer.nbytes, stream)
        return out

    def bytes(self, count: int, label: str) -> DeviceBuffer:
        """Memory of ``count`` bytes."""
        return self(ShapedArray((count,), dtypes.uint8), label)

    def zeros(self, count: int) -> DeviceBuffer:
        """Memory of ``count`` zero bytes."""
        out = self.bytes(count, f"counters of {self.name}")
        driver.fill_zero(out.ptr, count, driver.work_stream(self.device))
        return out

    def blocks(self) -> list[DeviceBuffer]:
        """Allocations of the plan: results that reuse no argument."""
        if driver.is_capturing(driver.work_stream(self.device).ptr):
            assert not self._on_host, "a body of a graph has results on the host"
            return [
                _captured(ShapedArray(shape, dtype), self.device, label)
                for shape, dtype, label in self._blocks
            ]
        found = cuda_memory.pool(self.device).allocate_all(self._blocks, self.made.plan.peak_bytes)
        if self._on_host:
            pinned = cuda_memory.pinned_pool(self.device).allocate_all(self._pinned_blocks)
            for n, buffer in zip(self._on_host, pinned, strict=True):
                found.insert(n, buffer)
        return found


def _captured(aval: ShapedArray, device: int, label: str) -> DeviceBuffer:
    """Memory from the allocator of the current capture."""
    import cupy

    x = cupy.empty(aval.shape, cuda_memory.raw_dtype(aval.dtype))
    return cuda_memory.pool(device).adopt(x, aval.dtype, label)
