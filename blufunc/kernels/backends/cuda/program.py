"""CUDA programs: a jaxpr becomes a program that is called with buffers.

Kernels, stages 5 to 8, the sibling of ``backends/cpu/program.py``. NVRTC compiles the kernels of fused regions,
cuBLASLt computes matmuls, and other libraries or the host compute the rest. Calls return before the work is done. All
calls of a device are on one stream, so a call may reuse the memory of the previous one; within a graph, steps may
overlap.

    prepare     pipeline.py          order of steps, memory plan and sources; or all of them from disk
    load        driver/modules.py    kernels as functions of the device
    execute     executor.py          one call: addresses, launches
    replay      replay.py            calls on the same buffers as one graph
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays import recording
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, exact, line_of, subjaxprs
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import inline_definitions, simplify
from blufunc.kernels.backends.cuda import dispatch
from blufunc.kernels.backends.cuda.device_model import H200, HOPPER, L2_BYTES, L2_SPEEDUP, Limits
from blufunc.kernels.backends.cuda.driver import device_times, driver, modules
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.driver.modules import Wanted, wanted_by
from blufunc.kernels.backends.cuda.executor import ALIGNMENT, Allocator, Executor, Work
from blufunc.kernels.backends.cuda.library import matmul, pointwise_gemm, split_gemm, updates
from blufunc.kernels.backends.cuda.library.convolution import graphs as cudnn_graphs
from blufunc.kernels.backends.cuda.library.convolution import plans as convolution_plans
from blufunc.kernels.backends.cuda.library.decoding import skinny_gemm
from blufunc.kernels.backends.cuda.overlap import overlapped_matmuls
from blufunc.kernels.backends.cuda.replay import Replays
from blufunc.kernels.backends.cuda.target import CUDA
from blufunc.kernels.cache import plans as plan_store
from blufunc.kernels.memory.types import Plan
from blufunc.kernels.pipeline import Planning, show_stages, within
from blufunc.kernels.rewrites.select_variant import select_variants
from blufunc.kernels.rewrites.unrolled_windows import WINDOWS
from blufunc.kernels.schedule import OpaqueStep, Schedule, uncollected, warn_of_host
from blufunc.kernels.timings import StepTime, medians


def _why_no_epilogue(eqn: Eqn, arch: str) -> str | None:
    """Reason why a matmul with an elementwise epilogue has no kernel; None if it has."""
    return None if skinny_gemm.runs(eqn) else pointwise_gemm.why_not(eqn, arch)


def _epilogue_seconds(eqn: Eqn) -> float:
    """Seconds that its kernel takes beyond a matmul without an epilogue."""
    return 0.0 if skinny_gemm.runs(eqn) else pointwise_gemm.extra_seconds(eqn)


TARGET = dataclasses.replace(
    CUDA,
    batch_first=True,
    epilogues=True,
    convolutions=lambda c: convolution_plans.why_not(c) is None,
    splits=matmul.split_pays,
    partial_sums=matmul.partial_sums,
    overwritten=updates.overwritten,
    selected_elements=1 << 18,
    updates_in_place=1 << 16,
    group=True,
    ordered=overlapped_matmuls,
    recompute=True,
    scarce_bytes=1 << 30,
    pointwise_seconds=_epilogue_seconds,
    matmul_seconds=matmul.seconds,
    row_seconds=skinny_gemm.row_seconds,
    cache_bytes=L2_BYTES,
    cache_speedup=L2_SPEEDUP,
    machine=H200,
)
"""The target of lowering: memory is scarce, and launches are expensive."""

_programs: weakref.WeakSet[CudaProgram] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Calls that a library has kernels for, as a key of memos.

    Attributes:
      notes: why other composites are inlined.
    """

    library: dispatch.Library
    notes: dict[str, None] = dataclasses.field(default_factory=dict, compare=False)

    def __call__(self, eqn: Eqn) -> bool:
        if not self.library.is_composite(eqn):
            return False
        reason = self.library.why_not(eqn)
        if reason is not None:
            self.notes[f"no kernel for {eqn.prim.name} at {line_of(eqn)}: {reason}"] = None
        return reason is None


@uncollected()
def planned(jaxpr: Jaxpr, donated: Sequence[bool], arch: str, budget: int | None = None) -> Schedule:
    """Schedule of a simplified jaxpr for an architecture, within a budget in bytes."""
    library = dispatch.Library(arch)
    jaxpr, choices = select_variants(jaxpr, library)
    jaxpr = simplify(jaxpr)
    keep = _Kept(library)
    target = dataclasses.replace(
        TARGET,
        scratch_bytes=library.scratch_bytes,
        rows_of_sums=library.rows_of_sums,
        pointwise_gemm=functools.partial(_why_no_epilogue, arch=arch),
    )
    if arch == "sm_90a":  # which has warpgroup matmuls
        target = dataclasses.replace(target, in_one_kernel=split_gemm.sums_of)
    planned = lambda eqn: library.planned(eqn) and not is_replaced(eqn.prim, "impl")
    planning = Planning(jaxpr, donated, target, planned, keep, rows=budget is not None)
    made = within(planning, budget)
    remarks = (library.remark(s.eqn) for s in made.steps if isinstance(s, OpaqueStep))
    made.notes = (*choices, *keep.notes, *planning.notes, *dict.fromkeys(r for r in remarks if r is not None))
    return made


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """The part of a program that needs no device, which the disk cache stores.

    Attributes:
      schedule: its steps and their memory.
      wanted: the launches of each step that has some, by index.
      rendered: the sources of all launches, in order.
      others: the sources of other steps, without users' kernels: their launch parameters may be wrong, which does
        not matter to a program that is only inspected.
    """

    schedule: Schedule
    wanted: dict[int, list[Wanted]]
    rendered: modules.Rendered
    others: tuple[modules.Text, ...]

    @property
    def launches(self) -> list[Wanted]:
        """All launches, in order."""
        return [w for many in self.wanted.values() for w in many]

    def schedules(self, limits: Limits) -> str:
        """The schedules of all kernels as text, for a device with these limits."""
        return modules.schedules(self.launches, limits)


def prepared(
    jaxpr: Jaxpr, donated: Sequence[bool], arch: str, limits: Limits, budget: int | None = None
) -> Prepared:
    """Schedule and sources of a program, from the disk cache if present."""

    def prepare() -> Prepared:
        schedule = planned(jaxpr, donated, arch, budget)
        wanted: dict[int, list[Wanted]] = {}
        others: dict[modules.Text, None] = {}
        for n, step in enumerate(schedule.steps):
            if isinstance(step, OpaqueStep):
                if not _is_users(step):
                    others.update(dict.fromkeys(dispatch.Library(arch).sources(step)))
            else:
                wanted[n] = wanted_by(schedule, step)
        every = [w for many in wanted.values() for w in many]
        return Prepared(schedule, wanted, modules.rendered(every, limits), tuple(others))

    reads = ("cuda", arch, repr(limits), repr(tuple(donated)), repr(budget), _libraries(jaxpr))
    return plan_store.kept(jaxpr, reads, prepare, Prepared)


def _libraries(jaxpr: Jaxpr) -> str:
    """Versions of libraries on whose presence the plan of a program depends."""
    return f"cudnn {cudnn_graphs.version()}" if _has_convolution(jaxpr) else ""


def _has_convolution(jaxpr: Jaxpr) -> bool:
    return any(
        e.prim.name == "conv_general_dilated" or any(map(_has_convolution, subjaxprs(e.params)))
        for e in jaxpr.eqns
    )


def _written_by_users(schedule: Schedule, arch: str) -> list[modules.Text]:
    """The sources of users' kernels."""
    users = [s for s in schedule.steps if isinstance(s, OpaqueStep) and _is_users(s)]
    return [text for step in users for text in dispatch.Library(arch).sources(step)]


def _other_sources(made: Prepared, arch: str) -> tuple[modules.Text, ...]:
    """The sources of library kernels and of users' kernels."""
    return tuple(dict.fromkeys((*made.others, *_written_by_users(made.schedule, arch))))


def _shown(texts: Sequence[str], others: Sequence[modules.Text]) -> str:
    """All sources; the name of a kernel that is not generated precedes its own."""
    return "\n".join([*texts, *(f"// ---- {name} ----\n{text}" for text, name in others)])


def _is_users(step: OpaqueStep) -> bool:
    return hasattr(step.eqn.prim, "cuda_source")


def rest(device: int) -> None:
    """Let all idle programs of a device release their memory."""
    for program in list(_programs):
        if program.device == device:
            program.rest()


cuda_memory.reliefs.append(rest)


class CudaProgram:
    """A compiled jaxpr: call it with a list of argument buffers.

    Args:
      jaxpr: without constants.
      donated: the parameters whose memory results may reuse.
      device: the index of the CUDA device.
      budget: for the planned peak, in bytes; None for none.

    Attributes:
      schedule: its steps and their memory.
      captured: whether it can be part of a graph: no step waits for the host.
      launches: number of nodes that a call adds to a graph, about.
    Raises:
      CompileError: a generated kernel or one of the user's does not compile.
      MemoryBudgetError: there is no plan within the budget.
      OutOfMemoryError: the device has no room for the program's temporaries.
    """

    @uncollected()
    def __init__(self, jaxpr: Jaxpr, donated: Sequence[bool], device: int = 0, budget: int | None = None):
        self.device, self.name = device, jaxpr.name or "program"
        self.jaxpr = simplify(jaxpr)
        arch, limits = driver.properties(device).arch, modules.limits_on(device)
        made = prepared(self.jaxpr, donated, arch, limits, budget)
        self.schedule = made.schedule
        warn_of_host(self.schedule)
        show_stages(self.schedule, self.name, schedule=lambda: made.schedules(limits))
        # scalars are never donated
        self._movable = [not (d and v.aval.ndim) for v, d in zip(jaxpr.invars, donated, strict=True)]
        every = made.launches
        others = _other_sources(made, arch)
        texts, functions = modules.load(every, device, self.name, others, made.rendered)
        self._source = _shown(texts, others)
        found = iter(functions)
        self._launches = {n: [(w, next(found)) for w in many] for n, many in made.wanted.items()}
        self._own = Allocator(self.schedule, device, self.name)
        self._copiers: dict[tuple, CudaProgram] = {}
        self._in_graphs: list[Executor] = []  # graphs of other programs have their addresses
        self._free = [self._executor()]
        self.captured, self.launches = self._free[0][0].captured, self._free[0][0].launches
        _programs.add(self)

    # -- running ---------------------------------------------------------------------------------------

    def __call__(self, buffers: list[DeviceBuffer]) -> list[DeviceBuffer]:
        arguments = [b if not b.ptr % ALIGNMENT else self._own.copy(b) for b in buffers]
        buffers.clear()
        bases = [*arguments, *self._with_room(self._own.blocks)]
        if driver.is_capturing(driver.work_stream(self.device).ptr):
            return self._in_graph(bases)
        executor, replays = self._take()
        try:
            if (to := recording.active) is not None:
                dynamic, fresh = self._recorded(executor, bases, to), False
            else:
                dynamic, fresh = replays.run(bases)
            return executor.results(bases, dynamic, fresh)
        finally:
            executor.release()
            self._free.append((executor, replays))
            del self._free[1:]

    def _recorded(
        self, executor: Executor, bases: Sequence[DeviceBuffer], to: recording.Recording
    ) -> dict[int, DeviceBuffer]:
        """Run kernel by kernel, with an event between steps."""
        start, stream = recording.clock(), driver.compute_stream(self.device)
        try:
            with device_times.of(to, self.device).running(self, [w.name for w in executor.works]) as events:
                between = lambda n: events.append(driver.recorded(stream))
                executor.launch(bases, stream, between, overlapping=False)
        finally:
            to.add(self.name, "program", start)
        return executor.dynamic()

    def _in_graph(self, bases: Sequence[DeviceBuffer]) -> list[DeviceBuffer]:
        """A call during a capture: the graph has executors of its own, which stay valid."""
        if self._in_graphs:
            executor = self._in_graphs.pop()
        else:
            with driver.redirected(-1, None):  # its memory and constants belong to the program
                executor, _ = self._executor()
        executor.launch(bases, executor.work_stream())
        results = executor.results(bases, executor.dynamic(), False)
        executor.release()
        self._in_graphs.append(executor)
        return results

    def _take(self) -> tuple[Executor, Replays]:
        """An idle executor; concurrent calls create another one."""
        try:
            return self._free.pop()
        except IndexError:
            return self._executor()

    def _executor(self) -> tuple[Executor, Replays]:
        def make() -> Executor:
            return Executor(self.schedule, self.device, self.name, self._launches, self._opaque, self._copier)

        executor = self._with_room(make)
        return executor, Replays(executor, self._movable)

    def _with_room(self, allocate: Callable[[], Any]) -> Any:
        """The result of ``allocate``; an out-of-memory error reports the plan."""
        try:
            return allocate()
        except errors.OutOfMemoryError as e:
            why = f"{e.why}\n{self.schedule.plan.report()}"
            raise errors.OutOfMemoryError(e.what, where=e.where, why=why, fix=e.fix) from None

    def rest(self) -> None:
        """Return memory to the pool; the next call allocates it again."""
        self._free.clear()

    def own(self, aval: ShapedArray, label: str) -> DeviceBuffer:
        """Memory for a value of the program."""
        return self._own(aval, label)

    # -- its parts -------------------------------------------------------------------------------------

    def _opaque(self, executor: Executor, step: OpaqueStep) -> Work:
        return dispatch.bind(executor, step, functools.partial(body_of, self.device))

    def _copier(self, chain: Sequence[Eqn]) -> Callable[[DeviceBuffer], DeviceBuffer]:
        """A function that copies a view, given by movement equations, to a dense array."""
        source: Any = chain[0].invars[0]
        steps = [(e.prim, *[(k, exact(v)) for k, v in e.params.items()]) for e in chain]
        program = self._copiers.get(key := (source.aval, *steps))
        if program is None:
            moved = Jaxpr([source], chain, chain[-1].outvars, name=f"{self.name}_copy")
            program = self._copiers[key] = CudaProgram(moved, (False,), self.device)
        return lambda buffer: program([buffer])[0]

    # -- reports ---------------------------------------------------------------------------------------

    def source(self) -> str:
        """The CUDA C++: of generated kernels, then of library kernels."""
        return self._source

    @property
    def memory(self) -> Plan:
        """The memory plan: ``peak_bytes`` of a call, and ``report()``, a table."""
        return self.schedule.plan

    @property
    def why_no_graph(self) -> str | None:
        """Why its calls are not replayed as graphs; None if they are or may be."""
        return self._free[0][1].why if self._free else None

    def timings(self, buffers: Sequence[DeviceBuffer] | None = None, repeats: int = 5) -> list[StepTime]:
        """Median device time of each step, launched one by one.

        Args:
          buffers: arguments, which are not changed; default: zeros.
          repeats: number of runs.
        """
        executor, replays = self._take()
        try:
            if buffers is None:
                given = [self._zeros(v.aval) for v in self.schedule.jaxpr.invars]
            else:
                given = [cuda_memory.copy(b) for b in buffers]
            return _times_of(executor, [*given, *self._own.blocks()], repeats)
        finally:
            executor.release()
            self._free.append((executor, replays))
            del self._free[1:]

    def _zeros(self, aval: ShapedArray) -> DeviceBuffer:
        buffer = self.own(aval, "an argument to time with")
        driver.fill_zero(buffer.ptr, buffer.nbytes, driver.compute_stream(self.device))
        return cuda_memory.moved(buffer, aval.memory)


class Draft:
    """Draft of a program for ``arch``, such as ``sm_90a``, which needs no device."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        donated: Sequence[bool],
        arch: str,
        limits: Limits = HOPPER,
        budget: int | None = None,
    ):
        self.jaxpr, self.donated, self.arch = (
            simplify(inline_definitions(jaxpr, WINDOWS.__contains__)),
            donated,
            arch,
        )
        self.limits, self.budget = limits, budget

    @functools.cached_property
    def _prepared(self) -> Prepared:
        result = prepared(self.jaxpr, self.donated, self.arch, self.limits, self.budget)
        if config.shows("schedule"):
            config.show(f"schedule of {self.jaxpr.name or 'program'}:\n{result.schedules(self.limits)}")
        return result

    @property
    def schedule(self) -> Schedule:
        """Steps of the program and their memory."""
        return self._prepared.schedule

    def schedules(self) -> str:
        """Blocks, threads, vectors and memory of each kernel (``BLUFUNC_DEBUG=schedule``)."""
        return self._prepared.schedules(self.limits)

    def source(self) -> str:
        """CUDA C++ that will be compiled: of generated kernels, then of library kernels."""
        made = self._prepared
        return _shown(made.rendered.texts, _other_sources(made, self.arch))


def body_of(device: int, jaxpr: Jaxpr, donated: tuple[bool, ...] = ()) -> CudaProgram:
    """The body of a loop, branch or call as a program; default: nothing is donated."""
    donated = donated or (False,) * len(jaxpr.invars)
    key = "cuda body", device, donated, config.matmul_precision
    return jaxpr.memoised(key, lambda: CudaProgram(jaxpr, donated, device))


def _times_of(executor: Executor, bases: Sequence[DeviceBuffer], repeats: int) -> list[StepTime]:
    """Median time of each step on these buffers, launched one by one."""
    stream = driver.compute_stream(executor.device)
    executor.launch(bases, stream)  # warm up: exclude loading and autotuning
    runs = [_step_seconds(executor, bases, stream) for _ in range(repeats)]
    return medians([w.name for w in executor.works], runs)


def _step_seconds(executor: Executor, bases: Sequence[DeviceBuffer], stream: Any) -> list[float]:
    """Seconds of each step."""
    events: list[Any] = []
    between = lambda n: events.append(driver.recorded(stream))
    executor.launch(bases, stream, between, overlapping=False)
    stream.synchronize()
    return [driver.seconds_between(a, b) for a, b in itertools.pairwise(events)]
