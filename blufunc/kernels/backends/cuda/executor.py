"""Stage 8 on a CUDA device, one call at a time: the memory of a program's values, and its steps.

Kernels. In: a ``Schedule`` whose kernels are loaded, and the buffers of a call. Out: work on a stream. An ``Executor``
owns what one run at a time can use: an arena, and launches whose parameters are addresses. Arena addresses never
change; those of arguments and results are patched where they differ from the call before. ``program.py`` decides
which executor serves a call, ``replay.py`` whether the call is a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from blufunc.config import config
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Literal
from blufunc.kernels.backends.cuda import streams as cuda_streams
from blufunc.kernels.backends.cuda.driver import driver, sm_reservation
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.driver.modules import Addresses, Loaded, Wanted
from blufunc.kernels.gemm_layout import Gemm
from blufunc.kernels.loopir.access_map import view
from blufunc.kernels.loopir.index import strides_of
from blufunc.kernels.loopir.launch import Scratch
from blufunc.kernels.schedule import OpaqueStep, Schedule, Step, accesses, touched

ALIGNMENT = 256
"""Bytes: where every value begins. Kernels read vectors of 16 bytes, and libraries count on more."""

ARENA = -1


class Place(NamedTuple):
    """Where a value lies: ``offset`` bytes into the memory of ``root``, which is ``ARENA`` or a number of ``Roots``."""

    root: int
    offset: int


class Roots:
    """The pieces of memory beside the arena that a call works on, numbered: arguments, then allocations for results,
    then values whose memory the step makes that computes them.

    Attributes:
      arguments, allocations: how many there are.
      count: of all.
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
        """Where a value lies."""
        while value in self.made.aliases:
            value = self.made.aliases[value]
        if value in self._dynamic:
            return Place(self._dynamic[value], 0)
        found = self.made.plan.placement[value]
        if found.space == "arena":
            return Place(ARENA, found.offset)
        return Place(self._blocks[found.space][found.owner], found.offset)

    def is_dynamic(self, root: int) -> bool:
        """Whether its memory is made by the step that computes it."""
        return root >= self.arguments + self.allocations


def block_types(made: Schedule) -> list[ShapedArray]:
    """What is allocated for each result that takes over no argument: bytes, if others are to lie in its memory too."""
    types = [(type_of(made.values[v]), nbytes) for v, nbytes in made.plan.allocations.items()]
    return [t if t.nbytes == nbytes else ShapedArray((nbytes,), dtypes.uint8) for t, nbytes in types]


def type_of(value: Any) -> ShapedArray:
    """The type of a value: of a variable its own, of scratch that of a vector."""
    return ShapedArray((value.size,), value.dtype) if isinstance(value, Scratch) else value.aval


class Strided(NamedTuple):
    """A view of a buffer: ``offset`` and ``strides`` in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Operand:
    """What a step that is not a kernel of ours reads.

    Attributes:
      atom, aval: the operand, and its type.
      chain: the movement equations that make it a view of a value.
      layout: how it lies in the memory of that value.
      place: where that value lies; None for a number.
    """

    def __init__(self, executor: Executor, atom: Any, given: Literal | tuple[int, list]):
        self.atom, self.aval = atom, atom.aval
        self._constant: DeviceBuffer | None = None
        self._copy: Callable | None = None
        self.place: Place | None = None
        self.chain: list[Any] = []
        self.layout = Strided((), (), 0)
        if isinstance(given, Literal):
            self._constant = executor.constant(given)
            return
        value, self.chain = given
        self.place = executor.roots.place(value)
        self._source = type_of(executor.made.values[value])
        self.layout = strided(self._source.shape, self.chain)
        if not self._is_dense():
            self._copy = executor.copier(self.chain)

    def _is_dense(self) -> bool:
        """Whether it lies as a buffer of its own would."""
        expected = strides_of(self.aval.shape)
        same = all(
            a == b for a, b, n in zip(self.layout.strides, expected, self.aval.shape, strict=True) if n > 1
        )
        return same and not self.layout.offset * self.aval.dtype.itemsize % ALIGNMENT

    @property
    def in_place(self) -> bool:
        """Whether ``buffer`` is memory that is there already, and no copy."""
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
        """Where the element at index 0 is."""
        base = executor.address(self.place) if self.place is not None else self.base(executor).ptr
        return base + self.layout.offset * self.aval.dtype.itemsize


def strided(shape: tuple[int, ...], chain: Sequence[Any]) -> Strided:
    """What movement equations make of a dense array."""
    base = np.empty(1, np.uint8)  # of which no element is ever touched: it is to tell what strides come out
    model = np.lib.stride_tricks.as_strided(base, shape, strides_of(shape))
    for eqn in chain:
        model = view(eqn, model)
    start = model.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return Strided(model.shape, model.strides, start)


@dataclass
class Work:
    """A step that is ready to run.

    Attributes:
      run: puts it on the stream of its executor, which it is given: it holds none, so that memory goes when it can.
      name: what to call it in reports.
      step: what it came from.
      drops: the roots that nobody needs after it.
      captured: whether it can be part of a graph.
      anywhere: whether it touches only memory of the plan or its own, and puts all on the executor's ``work_stream``:
        then other steps may run beside it. To be asked when it has run once.
      exchanges: whether it waits for other devices: such steps have a stream of their own.
    """

    run: Callable[[Executor], None]
    name: str
    step: Step
    drops: tuple[int, ...] = ()
    captured: bool = True
    anywhere: Callable[[], bool] = lambda: False
    exchanges: bool = False


class Executor:
    """What one run at a time of a program uses.

    Attributes:
      made: the schedule.
      device: the index of the CUDA device.
      arena: the memory of temporaries.
      stream: the handle of the stream that steps are put on now.
      works: the steps.
      products: by what they multiply and how, the library's plans that several steps run by.
      beside_exchange: whether the step that is put on a stream now runs beside an exchange, which it was put behind.
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
        self.beside_exchange = False
        self._beside: Any = None  # the stream of a step that does not go on the first one
        self._constants: dict[tuple, DeviceBuffer] = {}
        self.products: dict[Gemm, Any] = {}
        self._kept: list[DeviceBuffer | None] = []
        self._allocate = Allocator(made, device, name)
        self.arena = self._allocate.bytes(made.plan.arena_bytes, f"the arena of {name}")
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
        types = [*[type_of(made.values[v]) for v in made.inputs], *block_types(made)]
        self._makers = [_maker(self.roots, types, made, o) for o in made.outputs]
        self.captured = all(w.captured for w in self.works)
        if any(s.overlapped for s in made.steps if isinstance(s, OpaqueStep)):
            self._pause = sm_reservation.pause(device, cuda_streams.PAUSE)
            self._pause(driver.compute_stream(device).ptr)  # what is new to a device cannot be captured
        del self.copier  # it holds the program, which holds this

    # -- memory ----------------------------------------------------------------------------------------

    def constant(self, literal: Literal) -> DeviceBuffer:
        """A number on the device."""
        x = np.asarray(literal.array.__array__())
        key = (x.dtype, x.tobytes())
        found = self._constants.get(key)
        if found is None:
            found = self._constants[key] = cuda_memory.to_device(x, self.device, f"a constant of {self.name}")
        return found

    def bind(self, first: int, buffers: Sequence[DeviceBuffer]) -> None:
        """Let the roots from ``first`` on be these buffers from now on."""
        stop = first + len(buffers)
        before, pointers = self._pointers[first:stop], [b.ptr for b in buffers]
        self._bases[first:stop], self._pointers[first:stop] = buffers, pointers
        for root in compress(range(first, stop), map(operator.ne, pointers, before)):
            pointer = self._pointers[root]
            for addresses, i, offset in self._slots[root]:
                addresses[i] = pointer + offset

    def address(self, place: Place) -> int:
        """Where a value is."""
        return place.offset + (self.arena.ptr if place.root == ARENA else self._pointers[place.root])

    def buffer(self, place: Place, aval: ShapedArray) -> DeviceBuffer:
        """A value as a buffer."""
        base = self.arena if place.root == ARENA else self._bases[place.root]
        assert base is not None, "a value was let go of before its last use"
        if not place.offset and base.shape == aval.shape and base.dtype == aval.dtype:
            return base
        return base.view(aval.shape, aval.dtype, place.offset)

    def own(self, aval: ShapedArray, label: str) -> DeviceBuffer:
        """Memory for a value that is made now."""
        return self._allocate(aval, label)

    def keep(self, buffers: Sequence[DeviceBuffer | None]) -> None:
        """Hold memory that launches have the address of."""
        self._kept.extend(buffers)

    def put(self, value: int, buffer: DeviceBuffer) -> None:
        """The result of a step, which made its memory; copied where a place is planned for it."""
        place = self.roots.place(value)
        if self.roots.is_dynamic(place.root):
            self.bind(place.root, [buffer])
            return
        to = self.buffer(place, type_of(self.made.values[value]))
        driver.copy_on_device(to.ptr, buffer.ptr, buffer.nbytes, self.work_stream())

    def work_stream(self) -> Any:
        """The stream itself."""
        return self._beside or driver.work_stream(self.device)

    # -- steps -----------------------------------------------------------------------------------------

    def _kernels(self, step: Any, launches: Sequence[tuple[Wanted, Loaded]]) -> Work:
        made = [self._launch(wanted, loaded) for wanted, loaded in launches]
        name = f"{step.kernel.name} and alike" if len(launches[0][0].kernels) > 1 else step.kernel.name
        if len(made) == 1:
            (launch,) = made
            return Work(lambda executor: launch(executor.stream), name, step, anywhere=lambda: True)

        def run(executor: Executor) -> None:
            for one in made:
                one(executor.stream)

        return Work(run, name, step, anywhere=lambda: True)

    def _launch(self, wanted: Wanted, loaded: Loaded) -> Callable[[int], None]:
        counters = [self._next_counter] if loaded.counters else []
        self._next_counter += 4 * loaded.counters
        launch, addresses = loaded.prepare([*[0] * len(wanted.values), *counters])
        places = map(self.roots.place, wanted.values)
        self.follow(
            addresses, [Place(p.root, p.offset + n) for p, n in zip(places, wanted.offsets, strict=True)]
        )
        return launch

    def follow(self, addresses: Addresses, places: Sequence[Place | None]) -> None:
        """Have the addresses of a launch be those of the values that lie in these places; None: as it is."""
        for i, p in enumerate(places):
            if p is None:
                continue
            if p.root == ARENA:
                addresses[i] = self.arena.ptr + p.offset
            else:
                self._slots[p.root].append((addresses, i, p.offset))

    def _note_drops(self) -> None:
        """Find after which step each piece of memory that a step made can go."""
        kept = {self.roots.place(o).root for o in self.made.outputs if isinstance(o, int)}
        last: dict[int, int] = {}
        for n, step in enumerate(self.made.steps):
            for v in touched(step):
                last[self.roots.place(v).root] = n
        for root, n in last.items():
            if root != ARENA and self.roots.is_dynamic(root) and root not in kept:
                self.works[n].drops += (root,)

    # -- running ---------------------------------------------------------------------------------------

    def launch(
        self, bases: Sequence[DeviceBuffer], stream: Any, between: Callable[[int], object] | None = None
    ) -> None:
        """Put all steps on a stream.

        Args:
          bases: the arguments, then the allocations for results.
          between: called with the number of each step before it, and at the end with that of the steps; it may choose
            the stream that the step goes on.
        """
        self.stream = stream.ptr
        driver.use_device(self.device)
        self.bind(0, bases)
        shown = config.shows("launch")
        for n, work in enumerate(self.works):
            if between is not None:
                between(n)
            if shown:
                config.show(f"launch {n}: {work.name}")
            work.run(self)
            for root in work.drops:
                self._bases[root] = None
        if between is not None:
            between(len(self.works))

    def launch_beside(self, bases: Sequence[DeviceBuffer], streams: Sequence[Any]) -> None:
        """Put all steps on streams of a capture, one for each of ``lanes``: independent ones side by side."""
        if len(streams) == 1:
            self.launch(bases, streams[0])
            return
        tasks = self._tasks()
        order = cuda_streams.turns(tasks, config.cuda_streams)
        awaited = {-1}.union(*[turn.waits for turn in order])
        passed: dict[int, Any] = {}  # the events behind steps; behind -1, that of the beginning
        used = {0}

        def between(n: int) -> None:
            if n - 1 in awaited:
                passed[n - 1] = driver.recorded(self.work_stream())
            if n == len(order):
                self._beside = None
                for s in used - {0}:
                    streams[0].wait_event(driver.recorded(streams[s]))
                return
            turn = order[n]
            stream = streams[turn.stream]
            for m in (*[-1] * (turn.stream not in used), *turn.waits):
                stream.wait_event(passed[m])
            used.add(turn.stream)
            self.stream, self._beside = stream.ptr, stream if turn.stream else None
            self.beside_exchange = tasks[n].beside is not None
            if self.beside_exchange:
                self._pause(stream.ptr)

        try:
            self.launch(bases, streams[0], between)
        finally:
            self._beside, self.beside_exchange = None, False

    @property
    def lanes(self) -> list[bool]:
        """For each stream of a capture, whether it is urgent: only the last is, that of exchanges, if there are any."""
        return [False] * config.cuda_streams + [True] * any(w.exchanges for w in self.works)

    def _tasks(self) -> list[cuda_streams.Task]:
        """What there is to know of each step."""
        numbers = {id(w.step.eqn): n for n, w in enumerate(self.works) if w.exchanges}  # type: ignore[union-attr]
        tasks = [self._task(w, numbers) for w in self.works]
        apart = {n for n, t in enumerate(tasks) if t.accesses is None}  # these have nothing beside them
        return [
            replace(t, beside=None) if t.beside in apart or n in apart else t for n, t in enumerate(tasks)
        ]

    def _task(self, work: Work, exchanges: dict[int, int]) -> cuda_streams.Task:
        """What a step touches, how long it takes, about, and which of the numbered exchanges it begins with."""
        found = []
        for value, written in accesses(work.step):
            root, start = self.roots.place(value)
            end = start + type_of(self.made.values[value]).nbytes
            found.append(cuda_streams.Access(root, start, end, written))
        seconds = cuda_streams.estimate(work.step, sum(a.end - a.start for a in found))
        known = tuple(found) if work.anywhere() else None
        beside = work.step.overlapped if isinstance(work.step, OpaqueStep) else None
        return cuda_streams.Task(known, seconds, work.exchanges, exchanges.get(id(beside)))

    def dynamic(self) -> dict[int, DeviceBuffer]:
        """The results that steps made the memory of."""
        first = self.roots.arguments + self.roots.allocations
        return {n: b for n, b in enumerate(self._bases[first:], first) if b is not None}

    def results(
        self, bases: Sequence[DeviceBuffer], dynamic: dict[int, DeviceBuffer], fresh: bool
    ) -> list[DeviceBuffer]:
        """The results of a run that worked on these buffers.

        Args:
          fresh: whether what steps made must be copied: a graph makes it in the same place every time.
        """
        return [bases[m] if isinstance(m, int) else m(self, bases, dynamic, fresh) for m in self._makers]

    def copied(self, buffer: DeviceBuffer) -> DeviceBuffer:
        """A buffer of its own with the same values."""
        return self._allocate.copy(buffer)

    def release(self) -> None:
        """Let go of the buffers of the last call; addresses are kept, for they may come again."""
        self._bases = [None] * self.roots.count


Maker = Callable[["Executor", Sequence[DeviceBuffer], dict[int, DeviceBuffer], bool], DeviceBuffer]


def _maker(roots: Roots, types: Sequence[ShapedArray], made: Schedule, o: Any) -> Maker | int:
    """How a result is had after a run: worked out once, as a step of training has hundreds. It holds no executor.

    Args:
      types: of the arguments, and of the allocations for results.
    Returns:
      the root whose buffer the result is, or a function that makes it.
    """
    if isinstance(o, Literal):
        return lambda executor, bases, dynamic, fresh: executor.copied(executor.constant(o))
    place, aval = roots.place(o), type_of(made.values[o])
    root, offset, shape, dtype = place.root, place.offset, aval.shape, aval.dtype
    if root == ARENA:
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
    """Memory for the values of a program, which says so where there is none.

    While a graph is captured, memory is that which the capture provides: it stays the graph's own.
    """

    def __init__(self, made: Schedule, device: int, name: str):
        self.made, self.device, self.name = made, device, name
        labels = [made.plan.values[v].label for v in made.plan.allocations]
        pairs = zip(block_types(made), labels, strict=True)
        self._blocks = [(aval.shape, aval.dtype, label) for aval, label in pairs]

    def __call__(self, aval: ShapedArray, label: str) -> DeviceBuffer:
        if driver.is_capturing(driver.work_stream(self.device).ptr):
            return _captured(aval, self.device, label)
        return cuda_memory.allocate(aval.shape, aval.dtype, self.device, label, self.made.plan.peak_bytes)

    def copy(self, buffer: DeviceBuffer) -> DeviceBuffer:
        """A buffer of its own with the same values."""
        out = self(ShapedArray(buffer.shape, buffer.dtype), f"a copy in {self.name}")
        stream = driver.work_stream(self.device)
        driver.copy_on_device(out.ptr, buffer.ptr, buffer.nbytes, stream)
        return out

    def bytes(self, count: int, label: str) -> DeviceBuffer:
        """Memory of so many bytes."""
        return self(ShapedArray((count,), dtypes.uint8), label)

    def zeros(self, count: int) -> DeviceBuffer:
        """Bytes that are 0."""
        out = self.bytes(count, f"counters of {self.name}")
        driver.fill_zero(out.ptr, count, driver.work_stream(self.device))
        return out

    def blocks(self) -> list[DeviceBuffer]:
        """The allocations that the plan asks for: the results that take over none of the arguments."""
        if driver.is_capturing(driver.work_stream(self.device).ptr):
            return [
                _captured(ShapedArray(shape, dtype), self.device, label)
                for shape, dtype, label in self._blocks
            ]
        return cuda_memory.pool(self.device).allocate_all(self._blocks, self.made.plan.peak_bytes)


def _captured(aval: ShapedArray, device: int, label: str) -> DeviceBuffer:
    """Memory of the capture's allocator, which is CuPy's while it lasts."""
    import cupy

    x = cupy.empty(aval.shape, cuda_memory.raw_dtype(aval.dtype))
    return cuda_memory.pool(device).adopt(x, aval.dtype, label)
