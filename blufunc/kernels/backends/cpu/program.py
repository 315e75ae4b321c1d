"""CPU programs: compile a schedule to C++ and run its steps in order.

Kernels, stages 6 and 8. In: a jaxpr. Out: a ``HostProgram``. Fused regions are compiled loops over raw memory, matmuls
are compiled or BLAS calls into planned memory, loops, branches and updates are native steps (``native/``), as are sorts
and linear algebra (``steps/``). Other steps call the NumPy definition of their primitive. If all steps are native, C++
runs them in one call; otherwise ``Runner`` does, from Python. Without a compiler, or for short programs,
``backends/numpy/program.py`` serves.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import operator
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays import recording
from blufunc.core.arrays.errstate import ignoring_fp_errors, ignoring_fp_errors_in_callbacks
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal
from blufunc.core.primitives.effects import calls_back
from blufunc.core.primitives.rule_errors import impl_of
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import blas, gemm, toolchain
from blufunc.kernels.backends.cpu.blas import one_thread_each, product_into
from blufunc.kernels.backends.cpu.native.driver import Driver, is_whole, pointer_to
from blufunc.kernels.backends.cpu.native.run import Caller, HostCall, Whole, address_of, aligned, entry
from blufunc.kernels.backends.cpu.planning import dropped_of, is_native, planned
from blufunc.kernels.backends.cpu.renderer import render_many
from blufunc.kernels.backends.cpu.steps.forms import LIBRARIES, limits_threads
from blufunc.kernels.backends.numpy import out_of_memory
from blufunc.kernels.backends.numpy.program import Program
from blufunc.kernels.cache import plans as plan_store
from blufunc.kernels.loopir.access_map import view
from blufunc.kernels.loopir.ir import Kernel
from blufunc.kernels.pipeline import show_stages
from blufunc.kernels.schedule import KernelStep, OpaqueStep, Schedule, Step, touched, warn_of_host
from blufunc.kernels.timings import StepTime, medians


class HostProgram:
    """A compiled jaxpr: call it with a list of argument arrays.

    Attributes:
      schedule: its steps and their memory.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        donated: Sequence[bool],
        compiler: toolchain.Compiler,
        budget: int | None = None,
    ):
        self.jaxpr = simplify(jaxpr)
        made = prepared(self.jaxpr, donated, budget)
        self.schedule, self.text = made.schedule, made.text
        warn_of_host(self.schedule)
        show_stages(self.schedule, jaxpr.name)
        library = None
        if made.names or made.whole:
            symbols = [*made.names.values(), *["program"] * bool(made.whole)]
            library = compiler.compile(self.text, jaxpr.name or "program", symbols=symbols)
        for dtype in made.products:
            assert library is not None
            function = gemm.function_for(compiler, np.dtype(dtype))
            ctypes.c_void_p.in_dll(library, f"gemm_{dtype}").value = ctypes.cast(
                function, ctypes.c_void_p
            ).value
        for name in made.libraries:
            assert library is not None
            pointer = ctypes.c_void_p.in_dll(library, pointer_to(name))
            pointer.value = LIBRARIES[name].address(compiler)
        self.arenas = _Arenas(self.schedule.plan.arena_bytes)
        functions = {s: getattr(library, n) for s, n in made.names.items()}
        self.run = Runner(self.schedule, functions, compiler, made.calls)
        if any(name.startswith("lapack") for name in made.libraries):
            blas.find_again()
        limited = self.run.calls_blas or any(map(limits_threads, self.schedule.opaque))
        self.blas = one_thread_each if limited else contextlib.nullcontext()
        self.whole: Whole | None = None
        if made.whole:
            threads = toolchain.threads if _THREADS.search(self.text) else None
            self.whole = Whole(library.program, self.schedule, self.run.caller, threads)  # type: ignore[union-attr]
        self.is_native = self.whole is not None and not made.calls
        self.limited = limited
        calls = not self.is_native and calls_back(self.jaxpr)
        self.calls = ignoring_fp_errors_in_callbacks if calls else ignoring_fp_errors
        self.name = self.jaxpr.name or "program"
        self.times: Any = ctypes.c_int64 * (len(self.schedule.steps) + 1)

    def __call__(self, buffers: list, times: Any = None) -> tuple:
        """Run the program.

        ``times``, an instance of the class ``times``, receives those of its steps, on the clock of recordings.
        """
        to = recording.active
        if to is not None:
            start, times = recording.clock(), self.times() if times is None else times
        try:
            arrays = [_in_order(b) for b in buffers]
            buffers.clear()
            if self.whole is None or (config.debug and config.shows("launch")):
                return self.calls(self._run_steps, arrays, times)
            if not self.is_native:
                return self.calls(self._run_whole, arrays, times)
            return self._run_whole(arrays, times) if self.limited else self.whole(arrays, times)
        except MemoryError as error:
            raise out_of_memory.of_program(error, self.jaxpr) from None
        finally:
            if to is not None:
                to.ran(self, start, times)

    def _run_whole(self, arrays: list, times: Any) -> tuple:
        assert self.whole is not None
        with self.blas:
            return self.whole(arrays, times)

    def _run_steps(self, arrays: list, times: Any) -> tuple:
        with self.arenas as arena, self.blas:
            return self.run(arrays, arena, times)

    @functools.cached_property
    def step_names(self) -> list[str]:
        """The name of each step in reports and recordings."""
        return [name_of(s) for s in self.schedule.steps]

    def source(self) -> str:
        """Generated C++ source."""
        return self.text

    def timings(self, buffers: Sequence[np.ndarray], repeats: int = 5) -> list[StepTime]:
        """Median time of each step over ``repeats`` runs; the arguments are not changed."""
        runs: list[list[float]] = []
        for _ in range(repeats + 1):
            times = self.times()
            self([np.array(b, order="C") for b in buffers], times)
            runs.append([(stop - start) / 1e9 for start, stop in itertools.pairwise(times)])
        return medians(self.step_names, runs[1:])  # discard the first run: it touches new memory


_THREADS = re.compile(r"#pragma omp parallel|(?:gemm|library)_\w+\(.*run->threads")
"""Code that may use more than one thread."""


class Prepared(NamedTuple):
    """The part of a program that the disk cache stores: all but the library.

    Attributes:
      schedule: its steps and their memory.
      text: C++ source of all kernels and native steps.
      names: function name of each kernel step and native step, by index.
      calls: steps that native steps run in Python.
      products: dtypes of the matmuls in native steps.
      libraries: names of libraries that native steps call.
      whole: whether all its steps are native, and the library has a function ``program``.
    """

    schedule: Schedule
    text: str
    names: dict[int, str]
    calls: list[HostCall]
    products: list[str]
    libraries: list[str]
    whole: bool


def prepared(jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> Prepared:
    """Schedule and source of a program, from the disk cache if present."""

    def prepare() -> Prepared:
        schedule = planned(jaxpr, donated, budget)
        return Prepared(schedule, *source_of(schedule))

    return plan_store.kept(jaxpr, ("cpu", repr(tuple(donated)), repr(budget)), prepare, Prepared)


def name_of(step: Step) -> str:
    """Name of a step in reports."""
    return step.eqn.prim.name if isinstance(step, OpaqueStep) else step.kernel.name


def _in_order(x: Any) -> np.ndarray:
    """Row-major array; bodies may pass NumPy scalars, which have no address."""
    return x if x.__class__ is np.ndarray and x.flags.c_contiguous else np.array(x, order="C")


class Draft:
    """A program before compilation, as ``lower()`` shows it.

    Attributes:
      why_not_compiled: why the program runs as NumPy calls; empty if it will be compiled.
    """

    def __init__(
        self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None, notes: tuple[str, ...] = ()
    ):
        self.jaxpr, self.donated, self.budget, self.notes = simplify(jaxpr), donated, budget, notes
        self.why_not_compiled = toolchain.why_as_numpy(jaxpr)
        if budget is not None and self.schedule.bought is not None and config.host_compiler == "auto":
            self.why_not_compiled = "" if toolchain.find() is not None else toolchain.why_none()

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Steps and memory of the compiled program."""
        made = planned(self.jaxpr, self.donated, self.budget)
        made.notes = (*self.notes, *made.notes)
        return made

    def source(self) -> str:
        """Source that will run: C++, or Python if the program is not compiled."""
        if self.why_not_compiled:
            return Program(self.jaxpr, self.donated).source()
        return source_of(self.schedule)[0]


def compile_program(jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> HostProgram | None:
    """Compiled program; None without a compiler, or if compiling does not pay.

    A budget that the default plan exceeds always compiles: NumPy calls have no plan.

    Raises:
      MemoryBudgetError: no plan meets the budget.
      UnsupportedError: a plan meets it, but there is no compiler.
    """
    if budget is not None and planned(simplify(jaxpr), donated).plan.peak_bytes > budget:
        compiler = toolchain.find() if config.host_compiler != "never" else None
        if compiler is None:
            raise errors.UnsupportedError(
                f"memory_budget={budget} needs {jaxpr.name or 'the program'} to be compiled.",
                where=source.here(),
                why=f"it would run as NumPy calls, which allocate as they go: {toolchain.why_as_numpy(jaxpr)}.",
                fix="install a C++ compiler, or leave out the budget",
            )
        return HostProgram(jaxpr, donated, compiler, budget)
    if not toolchain.compiles(jaxpr):
        return None
    compiler = toolchain.find()
    if compiler is None:
        _say_once(toolchain.why_none())
        return None
    try:
        return HostProgram(jaxpr, donated, compiler)
    except errors.CompileError as e:  # a bug in our source or a broken compiler: NumPy is correct in any case
        if config.check:
            raise
        if config.shows("compile"):
            config.show(f"compile: {jaxpr.name or 'program'} runs as NumPy calls.\n{e}")
        else:
            _say_once(f"{jaxpr.name or 'a program'} could not be compiled")
        return None


_said: list[bool] = []


def _say_once(what: str) -> None:
    """Warn once per process that programs run slower than they could."""
    if not _said:
        _said.append(True)
        config.show(
            f"blufunc: {what}. Such programs run as NumPy calls; BLUFUNC_DEBUG=compile shows why, "
            "BLUFUNC_HOST_COMPILER=never silences this."
        )


def body_of(jaxpr: Jaxpr) -> Callable[[list], Any]:
    """Body of a loop or call as a function of arrays."""

    def make() -> Callable[[list], Any]:
        donated = (False,) * len(jaxpr.invars)
        found = compile_program(jaxpr, donated)
        if found is None:
            return Program(jaxpr, donated).function
        if config.shows("source"):
            config.show(found.source())
        return found

    return jaxpr.memoised("host body", make)


def source_of(
    schedule: Schedule,
) -> tuple[str, dict[int, str], list[HostCall], list[str], list[str], bool]:
    """One C++ source with each distinct kernel once; the other fields of ``Prepared``."""
    known: dict[tuple, str] = {}
    taken: dict[str, int] = {}
    kernels = []

    def name_of(kernel: Kernel) -> str:
        found = known.get(kernel.key)
        if found is None:
            count = taken[kernel.name] = taken.get(kernel.name, 0) + 1
            found = known[kernel.key] = kernel.name if count == 1 else f"{kernel.name}_{count}"
            kernels.append(dataclasses.replace(kernel, name=found))
        return found

    names, native = {}, {}
    for i, step in enumerate(schedule.steps):
        if isinstance(step, KernelStep):
            names[i] = name_of(step.kernel)
        elif isinstance(step, OpaqueStep) and is_native(step.eqn):
            native[i] = step
    # a single matmul gains nothing from C++ around it
    whole = (bool(names or native) or len(schedule.steps) > 1) and is_whole(schedule)
    if not (native or whole):
        return render_many(kernels) if names else "", names, [], [], [], False
    exported = {*names.values()}
    driver = Driver(name_of)
    names.update({i: driver.entry(step, schedule.values) for i, step in native.items()})
    if whole:
        driver.program(schedule)
    text = render_many(kernels, driver.source(), {*known.values()} - exported)
    return text, names, driver.calls, sorted(driver.uses_gemm), sorted(driver.uses), whole


class _Arenas:
    """Arenas for temporaries: one is reused; concurrent calls allocate more."""

    def __init__(self, size: int):
        self.size = size
        self.free: list[np.ndarray] = []
        self.local = threading.local()

    def __enter__(self) -> np.ndarray:
        try:
            arena = self.free.pop()
        except IndexError:
            arena = aligned(self.size)
        stack = self.local.__dict__.setdefault("stack", [])
        stack.append(arena)
        return arena

    def __exit__(self, *exc) -> None:
        self.free.append(self.local.stack.pop())
        del self.free[1:]


class Runner:
    """Runs the steps of a schedule.

    Args:
      schedule: the schedule.
      functions: by index of a kernel step, its function of a table of addresses and a thread count; by index of a
        native step, its entry.
      compiler: compiles GEMMs; None leaves them to BLAS.
      calls: steps that native steps run in Python.

    Attributes:
      calls_blas: True if any matmul was left to BLAS.
    """

    def __init__(
        self,
        schedule: Schedule,
        functions: dict[int, Any],
        compiler: toolchain.Compiler | None = None,
        calls: Sequence[HostCall] = (),
    ):
        self.schedule, self.compiler, self.calls_blas = schedule, compiler, False
        self.calls = calls
        self.steps: list[Callable[[_Memory], None]] = []
        last_use = _last_uses(schedule)
        for i, step in enumerate(schedule.steps):
            if isinstance(step, KernelStep):
                run = self.kernel_step(step, functions[i])
            else:
                assert isinstance(step, OpaqueStep), "this target groups no kernels"
                run = self.native_step(step, functions[i]) if i in functions else None
                run = run or self.product_step(step) or self.opaque_step(step)
            self.steps.append(_dropping(run, last_use[i]) if i in last_use else run)

    def __call__(self, arrays: list[np.ndarray], arena: np.ndarray, times: Any = None) -> tuple:
        """Run the steps; ``times`` receives when each began, and the end."""
        schedule = self.schedule
        env: dict[int, np.ndarray] = dict(zip(schedule.inputs, arrays, strict=True))
        arrays.clear()
        memory = _Memory(schedule, env, arena)
        if config.shows("launch"):
            self.show_launches()
        for n, step in enumerate(self.steps):
            if times is not None:
                times[n] = recording.clock()
            step(memory)
        if times is not None:
            times[len(self.steps)] = recording.clock()
        return tuple([self.output(o, memory) for o in self.finals()])

    def show_launches(self) -> None:
        """Print the steps of a call."""
        for n, step in enumerate(self.schedule.steps):
            buffers = "" if isinstance(step, OpaqueStep) else f" {', '.join(map(str, step.kernel.buffers))}"
            config.show(f"launch {n}: {name_of(step)}{buffers}")

    def finals(self) -> list[tuple[Literal | int, bool]]:
        """Results, each with a flag: True if an earlier result is the same value."""
        seen: set[int] = set()
        out: list[tuple[Literal | int, bool]] = []
        for o in self.schedule.outputs:
            out.append((o, isinstance(o, int) and o in seen))
            if isinstance(o, int):
                seen.add(o)
        return out

    def output(self, o: tuple[Literal | int, bool], memory: _Memory) -> np.ndarray:
        atom, repeated = o
        if atom.__class__ is Literal:
            return np.array(atom.array.__array__())  # type: ignore[union-attr]
        i: int = atom  # type: ignore[assignment]
        array = memory.array(i)
        owned = i in memory.owned and not repeated
        return array if owned else np.array(array, order="C")

    def kernel_step(self, step: KernelStep, function: Any) -> Callable:
        ids, offsets = step.values, step.offsets
        table = ctypes.c_void_p * len(ids)
        function.argtypes = [ctypes.c_void_p, ctypes.c_int]
        function.restype = None

        def launch(memory: _Memory) -> None:
            addresses = map(operator.add, map(memory.address, ids), offsets)
            function(table(*addresses), memory.threads)

        return launch

    def product_step(self, step: OpaqueStep) -> Callable | None:
        """Run a matmul as a compiled GEMM in planned memory; None if BLAS computes it."""
        if not step.planned:
            return None
        product = None
        if self.compiler is not None:
            product = gemm.product_of(step, self.schedule.values, self.compiler)
        if product is None:
            self.calls_blas = True
            if config.shows("compile"):
                config.show(f"compile: by BLAS: {', '.join(str(v.aval) for v in step.eqn.invars)}")
            return None
        function, layout, (lhs, lhs_offset), (rhs, rhs_offset) = product
        (result,) = step.results
        assert result is not None  # dead results were eliminated

        def multiply(memory: _Memory) -> None:
            threads = layout.threads(memory.threads)
            left, right = memory.address(lhs) + lhs_offset, memory.address(rhs) + rhs_offset
            function(layout, left, right, memory.address(result), threads)

        return multiply

    @functools.cached_property
    def caller(self) -> Caller:
        """Calls native steps."""
        return Caller(self.calls, _function_of)

    def native_step(self, step: OpaqueStep, function: Any) -> Callable:
        """Run a loop, branch or update as C++."""
        caller, call = self.caller, entry(function)
        literals = [np.array(o.array, order="C") if isinstance(o, Literal) else None for o in step.operands]
        operands = [
            (None, address_of(x)) if x is not None else (o[0], 0)  # type: ignore[index]
            for o, x in zip(step.operands, literals, strict=True)
        ]
        results, scratch = step.results, step.scratch
        dropped = dropped_of(step.eqn) if None in results else {}
        table_of_operands = ctypes.c_void_p * max(len(operands), 1)
        table_of_results = ctypes.c_void_p * max(len(results), 1)

        def run(memory: _Memory) -> None:
            base = 0 if scratch is None else memory.address(scratch)
            given = [address if i is None else memory.address(i) for i, address in operands]
            wanted = [base + dropped[n] if r is None else memory.address(r) for n, r in enumerate(results)]
            caller(call, table_of_operands(*given), table_of_results(*wanted), base, memory.threads)

        run.keeps = literals  # type: ignore[attr-defined]  # their addresses are in ``operands``
        return run

    def opaque_step(self, step: OpaqueStep) -> Callable:
        eqn = step.eqn
        operands = [np.asarray(o.array) if isinstance(o, Literal) else o for o in step.operands]

        def values(memory: _Memory) -> list[np.ndarray]:
            out = []
            for o in operands:
                if o.__class__ is tuple:
                    x = memory.array(o[0])
                    for e in o[1]:
                        x = view(e, x)
                    out.append(x)
                else:
                    out.append(o)
            return out

        if step.planned:
            (result,) = step.results
            assert result is not None  # dead results were eliminated

            def run_into(memory: _Memory) -> None:
                lhs, rhs = values(memory)
                product_into(memory.array(result), lhs, rhs, eqn.params)

            return run_into
        function, aliases = _function_of(eqn), self.schedule.aliases

        def run(memory: _Memory) -> None:
            operands = values(memory)
            # a result may be a view of an operand, whose memory the plan reuses
            for i, r in zip(step.results, function(list(operands)), strict=True):
                if i is None:
                    continue
                if i in aliases:
                    memory.put(i, r)
                    continue
                r = np.asarray(r)
                shared = any(np.may_share_memory(r, x) for x in operands)
                memory.put(i, r.copy() if shared else r)

        return run


def _dropping(run: Callable[[_Memory], None], drop: Sequence[int]) -> Callable[[_Memory], None]:
    """A step that frees values after their last use."""

    def run_and_drop(memory: _Memory) -> None:
        run(memory)
        for i in drop:
            memory.drop(i)

    return run_and_drop


def _function_of(eqn: Eqn) -> Callable[[list], Sequence]:
    prim = eqn.prim
    if prim.reference is not None:
        return prim.reference(body_of, **eqn.params)
    impl = impl_of(prim, eqn.params, [v.aval for v in eqn.outvars])
    function = (lambda values: impl(*values)) if prim.multiple_results else (lambda values: (impl(*values),))
    # a collective that times out names the user's line
    return source.at(eqn.source, function) if prim.kind == "collective" else function


def _last_uses(schedule: Schedule) -> dict[int, list[int]]:
    """Unplanned values to free after each step, by step index."""
    kept = {o for o in schedule.outputs if isinstance(o, int)}
    last: dict[int, int] = {}
    for n, step in enumerate(schedule.steps):
        last.update((i, n) for i in touched(step))
    out: dict[int, list[int]] = {}
    for i, n in last.items():
        if i not in kept and i in schedule.unplanned:
            out.setdefault(n, []).append(i)
    return out


class _Memory:
    """Arrays and addresses of one call."""

    __slots__ = ("addresses", "arena", "arrays", "base", "owned", "schedule", "threads")

    def __init__(self, schedule: Schedule, arguments: dict[int, np.ndarray], arena: np.ndarray):
        self.schedule = schedule
        self.arena = arena
        self.base = address_of(arena)
        self.threads = toolchain.threads()  # per call: a forked child has fewer
        self.arrays = dict(arguments)
        self.addresses: dict[int, int] = {}
        self.owned: set[int] = set()

    def address(self, i: int) -> int:
        """Address of a value's data."""
        found = self.addresses.get(i)
        if found is None:
            place = self.schedule.plan.placement.get(i)
            if i not in self.arrays and place is not None and place.space == "arena":
                found = self.base + place.offset
            else:
                found = address_of(self.array(i))
            self.addresses[i] = found
        return found

    def array(self, i: int) -> np.ndarray:
        """A value as an array of its shape."""
        found = self.arrays.get(i)
        if found is None:
            found = self.arrays[i] = self.made_array(i)
        return found

    def made_array(self, i: int) -> np.ndarray:
        v = self.schedule.values[i]
        shape, dtype = (v.aval.shape, v.aval.dtype) if hasattr(v, "aval") else ((v.size,), v.dtype)
        place = self.schedule.plan.placement[i]
        if place.space == "arena":
            return np.ndarray(shape, dtype, self.arena.data, place.offset)
        if place.space == "output":
            if place.owner == i:
                self.owned.add(i)
                return np.empty(shape, dtype)
            whole = self.array(place.owner)
        else:
            whole = self.arrays[place.owner]
        if place.offset == 0 and whole.shape == shape and whole.dtype == dtype:
            self.owned.add(i)
            return whole
        flat = whole.reshape(-1).view(np.uint8)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return flat[place.offset : place.offset + size].view(dtype).reshape(shape)

    def put(self, i: int, x: Any) -> None:
        """Store an array that a step allocated."""
        x = np.asarray(x)
        if not x.flags.c_contiguous:
            x = np.ascontiguousarray(x).reshape(x.shape)
        self.arrays[i] = x
        self.addresses.pop(i, None)

    def drop(self, i: int) -> None:
        """Release a value after its last use."""
        self.arrays.pop(i, None)
        self.addresses.pop(i, None)
