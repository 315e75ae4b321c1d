"""Stages 6 and 8 on the CPU: a schedule's kernels become C++ functions, and its steps a list to go through.

Kernels. Fused regions run as compiled loops over raw memory, products of matrices as compiled ones or calls of BLAS
into planned memory, everything else as the NumPy definition of its primitive. Where there is no compiler, or a program
is too small to be worth one, ``backends/numpy/program.py`` serves.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import operator
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays.errstate import openly, quietly
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Literal
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.primitives.effects import calls_back
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import gemm, toolchain
from blufunc.kernels.backends.cpu.blas import one_thread_each, product_into
from blufunc.kernels.backends.cpu.renderer import render_many
from blufunc.kernels.backends.numpy.program import Program
from blufunc.kernels.cache import plans as plan_store
from blufunc.kernels.loopir.access_map import view
from blufunc.kernels.pipeline import Planning, show_stages, within
from blufunc.kernels.schedule import KernelStep, OpaqueStep, Schedule, Step, touched, warn_of_host
from blufunc.kernels.target import Target
from blufunc.kernels.timings import StepTime, medians

HOST = Target(
    chunks=lambda rows, lanes: min(16, max(1, rows * lanes >> 14)),
    total_chunks=lambda size: min(64, max(1, size >> 14)),
    keep_bytes=1 << 18,
    keep_loads=False,
    tile=2048,
)
"""Chunks do not depend on the number of processors, so that results do not."""


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
        made, self.text, names = prepared(self.jaxpr, donated, budget)
        self.schedule = made
        warn_of_host(made)
        show_stages(made, jaxpr.name)
        library = compiler.compile(self.text, jaxpr.name or "program") if names else None
        self.arenas = _Arenas(made.plan.arena_bytes)
        self.run = Runner(made, {s: getattr(library, n) for s, n in names.items()}, compiler)
        self.calls = openly if calls_back(self.jaxpr) else quietly
        self.blas = one_thread_each if self.run.calls_blas else contextlib.nullcontext()

    def __call__(self, buffers: list) -> tuple:
        arrays = [_in_order(b) for b in buffers]
        buffers.clear()
        return self.calls(self._run, arrays)

    def _run(self, arrays: list) -> tuple:
        with self.arenas as arena, self.blas:
            return self.run(arrays, arena)

    def source(self) -> str:
        """The generated C++."""
        return self.text

    def timings(self, buffers: Sequence[np.ndarray], repeats: int = 5) -> list[StepTime]:
        """How long each step takes: the median over ``repeats`` runs on these arguments, which stay as they are."""
        runs: list[list[float]] = []
        for _ in range(repeats + 1):
            arrays = [np.array(b, order="C") for b in buffers]
            with self.arenas as arena, self.blas:
                runs.append(self.calls(self.run.timed, arrays, arena))
        names = [name_of(s) for s in self.schedule.steps]
        return medians(names, runs[1:])  # the first run touches new memory


def planned(jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> Schedule:
    """The steps of a simplified jaxpr on the CPU, and their memory, its peak within a budget in bytes."""
    return within(Planning(jaxpr, donated, HOST, lambda e: e.prim is dot_general_p), budget)


class Prepared(NamedTuple):
    """A program but for its library: what is kept on disk of it.

    Attributes:
      schedule: its steps and their memory.
      text: the C++ of all kernels.
      names: the functions of the steps that are kernels, by their numbers.
    """

    schedule: Schedule
    text: str
    names: dict[int, str]


def prepared(jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> Prepared:
    """What ``planned`` gives, and its source; from disk, if it is there."""

    def prepare() -> Prepared:
        schedule = planned(jaxpr, donated, budget)
        return Prepared(schedule, *source_of(schedule))

    return plan_store.kept(jaxpr, ("cpu", repr(tuple(donated)), repr(budget)), prepare, Prepared)


def name_of(step: Step) -> str:
    """What to call a step in reports."""
    return step.eqn.prim.name if isinstance(step, OpaqueStep) else step.kernel.name


def _in_order(x: Any) -> np.ndarray:
    """An array in row-major order. A body may be given NumPy's scalars, which have no memory of their own."""
    return x if x.__class__ is np.ndarray and x.flags.c_contiguous else np.array(x, order="C")


class Draft:
    """A program before anything is compiled: what ``lower()`` shows.

    Attributes:
      why_not_compiled: why the program runs as NumPy calls; empty if it will be compiled.
    """

    def __init__(self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None):
        self.jaxpr, self.donated, self.budget = simplify(jaxpr), donated, budget
        self.why_not_compiled = toolchain.why_as_numpy(jaxpr)
        if budget is not None and self.schedule.bought is not None and config.host_compiler == "auto":
            self.why_not_compiled = "" if toolchain.find() is not None else toolchain.why_none()

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Its steps and their memory, if it is compiled."""
        return planned(self.jaxpr, self.donated, self.budget)

    def source(self) -> str:
        """The text that will run."""
        if self.why_not_compiled:
            return Program(self.jaxpr, self.donated).source()
        return source_of(self.schedule)[0]


def compile_program(jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> HostProgram | None:
    """The compiled program; None where there is no compiler, or no gain in one.

    With a budget that the default plan does not meet it is compiled in any case: NumPy calls have no plan.

    Raises:
      MemoryBudgetError: there is no plan within the budget.
      UnsupportedError: there is one, but no compiler.
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
    except (
        errors.CompileError
    ) as e:  # our own text, or a compiler that is not well: NumPy is right in any case
        if config.check:
            raise
        if config.shows("compile"):
            config.show(f"compile: {jaxpr.name or 'program'} runs as NumPy calls.\n{e}")
        else:
            _say_once(f"{jaxpr.name or 'a program'} could not be compiled")
        return None


_said: list[bool] = []


def _say_once(what: str) -> None:
    """Say, once a process, that programs are slower than they could be."""
    if not _said:
        _said.append(True)
        config.show(
            f"blufunc: {what}. Such programs run as NumPy calls; BLUFUNC_DEBUG=compile says more, "
            "BLUFUNC_HOST_COMPILER=never asks for no compiler."
        )


def body_of(jaxpr: Jaxpr) -> Callable[[list], Any]:
    """The body of a loop or call as a function of arrays."""

    def make() -> Callable[[list], Any]:
        donated = (False,) * len(jaxpr.invars)
        found = compile_program(jaxpr, donated)
        if found is None:
            return Program(jaxpr, donated).function
        if config.shows("source"):
            config.show(found.source())
        return found

    return jaxpr.memoised("host body", make)


def source_of(made: Schedule) -> tuple[str, dict[int, str]]:
    """One C++ text with all kernels, equal ones once; and the names of the functions of the steps."""
    known: dict[tuple, str] = {}
    names: dict[int, str] = {}
    taken: dict[str, int] = {}
    kernels = []
    for i, step in enumerate(made.steps):
        if not isinstance(step, KernelStep):
            continue
        key = step.kernel.key
        if key not in known:
            count = taken[step.kernel.name] = taken.get(step.kernel.name, 0) + 1
            known[key] = step.kernel.name if count == 1 else f"{step.kernel.name}_{count}"
            kernels.append(_renamed(step.kernel, known[key]))
        names[i] = known[key]
    return (render_many(kernels) if kernels else ""), names


def _renamed(kernel: Any, name: str) -> Any:
    return dataclasses.replace(kernel, name=name)


class _Arenas:
    """The memory for temporaries: one block that calls take in turns, and new ones while it is in use."""

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


def aligned(nbytes: int) -> np.ndarray:
    """Bytes whose address is a multiple of 64."""
    raw = np.empty(nbytes + 64, np.uint8)
    start = -address_of(raw) % 64
    return raw[start : start + nbytes]


def address_of(x: np.ndarray) -> int:
    """Where the data of an array begin."""
    return x.__array_interface__["data"][0]


class Runner:
    """Goes through the steps of a schedule.

    Args:
      made: the schedule.
      functions: of a kernel step's number, what runs it: given a table of addresses and a number of threads.
      compiler: multiplies matrices; None leaves them to BLAS.

    Attributes:
      calls_blas: whether a product was left to BLAS.
    """

    def __init__(self, made: Schedule, functions: dict[int, Any], compiler: toolchain.Compiler | None = None):
        self.made, self.compiler, self.calls_blas = made, compiler, False
        self.steps: list[Callable[[_Memory], None]] = []
        last_use = _last_uses(made)
        for i, step in enumerate(made.steps):
            drop = last_use.get(i, ())
            if isinstance(step, KernelStep):
                self.steps.append(self.kernel_step(step, functions[i], drop))
            else:
                assert isinstance(step, OpaqueStep), "this target groups no kernels"
                self.steps.append(self.product_step(step, drop) or self.opaque_step(step, drop))

    def __call__(self, arrays: list[np.ndarray], arena: np.ndarray) -> tuple:
        made = self.made
        env: dict[int, np.ndarray] = dict(zip(made.inputs, arrays, strict=True))
        arrays.clear()
        memory = _Memory(made, env, arena)
        if config.shows("launch"):
            self.show_launches()
        for step in self.steps:
            step(memory)
        return tuple([self.output(o, memory) for o in self.finals()])

    def timed(self, arrays: list[np.ndarray], arena: np.ndarray) -> list[float]:
        """The seconds that each step takes."""
        memory = _Memory(self.made, dict(zip(self.made.inputs, arrays, strict=True)), arena)
        seconds = []
        for step in self.steps:
            start = time.perf_counter()
            step(memory)
            seconds.append(time.perf_counter() - start)
        return seconds

    def show_launches(self) -> None:
        """Print the steps of a call that begins."""
        for n, step in enumerate(self.made.steps):
            buffers = "" if isinstance(step, OpaqueStep) else f" {', '.join(map(str, step.kernel.buffers))}"
            config.show(f"launch {n}: {name_of(step)}{buffers}")

    def finals(self) -> list[tuple[Literal | int, bool]]:
        """The results, and whether each has been returned in another place before."""
        seen: set[int] = set()
        out: list[tuple[Literal | int, bool]] = []
        for o in self.made.outputs:
            out.append((o, isinstance(o, int) and o in seen))
            if isinstance(o, int):
                seen.add(o)
        return out

    def output(self, o: tuple[Literal | int, bool], memory: _Memory) -> np.ndarray:
        atom, again = o
        if atom.__class__ is Literal:
            return np.array(atom.array.__array__())  # type: ignore[union-attr]
        i: int = atom  # type: ignore[assignment]
        array = memory.array(i)
        owned = i in memory.owned and not again
        return array if owned else np.array(array, order="C")

    def kernel_step(self, step: KernelStep, function: Any, drop: Sequence[int]) -> Callable:
        ids, offsets = step.values, step.offsets
        table = ctypes.c_void_p * len(ids)
        function.argtypes = [ctypes.c_void_p, ctypes.c_int]
        function.restype = None

        def launch(memory: _Memory) -> None:
            addresses = map(operator.add, map(memory.address, ids), offsets)
            function(table(*addresses), memory.threads)
            for i in drop:
                memory.drop(i)

        return launch

    def product_step(self, step: OpaqueStep, drop: Sequence[int]) -> Callable | None:
        """A product of matrices that lie where the plan says; None for what BLAS or a definition computes."""
        if not step.planned:
            return None
        product = None
        if self.compiler is not None:
            product = gemm.product_of(step, self.made.values, self.compiler)
        if product is None:
            self.calls_blas = True
            if config.shows("compile"):
                config.show(f"compile: by BLAS: {', '.join(str(v.aval) for v in step.eqn.invars)}")
            return None
        function, layout, (lhs, lhs_offset), (rhs, rhs_offset) = product
        (result,) = step.results
        assert result is not None  # what nobody wants was taken out

        def multiply(memory: _Memory) -> None:
            threads = layout.threads(memory.threads)
            left, right = memory.address(lhs) + lhs_offset, memory.address(rhs) + rhs_offset
            function(layout, left, right, memory.address(result), threads)
            for i in drop:
                memory.drop(i)

        return multiply

    def opaque_step(self, step: OpaqueStep, drop: Sequence[int]) -> Callable:
        eqn = step.eqn
        operands = [
            np.asarray(o.array) if isinstance(o, Literal) else o
            for o in step.operands
        ]  # fmt: skip

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
            assert result is not None  # what nobody wants was taken out

            def run_into(memory: _Memory) -> None:
                lhs, rhs = values(memory)
                product_into(memory.array(result), lhs, rhs, eqn.params)
                for i in drop:
                    memory.drop(i)

            return run_into
        function = _function_of(eqn)

        aliases = self.made.aliases

        def run(memory: _Memory) -> None:
            given = values(memory)
            # what a definition returns may be a view of an operand, whose memory the plan gives to others
            for i, r in zip(step.results, function(list(given)), strict=True):
                if i is None:
                    continue
                if i in aliases:
                    memory.put(i, r)
                    continue
                r = np.asarray(r)
                shared = any(np.may_share_memory(r, x) for x in given)
                memory.put(i, r.copy() if shared else r)
            for i in drop:
                memory.drop(i)

        return run


def _function_of(eqn: Eqn) -> Callable[[list], Sequence]:
    prim = eqn.prim
    if prim.reference is not None:
        return prim.reference(body_of, **eqn.params)
    if prim.multiple_results:
        function = lambda values: prim.impl(*values, **eqn.params)
    else:
        function = lambda values: (prim.impl(*values, **eqn.params),)
    # ranks that do not meet are told where
    return source.at(eqn.source, function) if prim.kind == "collective" else function


def _last_uses(made: Schedule) -> dict[int, list[int]]:
    """After which step a value that is not in planned memory can go."""
    kept = {o for o in made.outputs if isinstance(o, int)}
    last: dict[int, int] = {}
    for n, step in enumerate(made.steps):
        last.update((i, n) for i in touched(step))
    out: dict[int, list[int]] = {}
    for i, n in last.items():
        if i not in kept and i in made.unplanned:
            out.setdefault(n, []).append(i)
    return out


class _Memory:
    """The arrays of one call."""

    __slots__ = ("addresses", "arena", "arrays", "base", "made", "owned", "threads")

    def __init__(self, made: Schedule, arguments: dict[int, np.ndarray], arena: np.ndarray):
        self.made = made
        self.arena = arena
        self.base = address_of(arena)
        self.threads = toolchain.threads()  # of this call: in the child of a fork they are others
        self.arrays = dict(arguments)
        self.addresses: dict[int, int] = {}
        self.owned: set[int] = set()

    def address(self, i: int) -> int:
        """Where the data of a value begin."""
        found = self.addresses.get(i)
        if found is None:
            place = self.made.plan.placement.get(i)
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
        v = self.made.values[i]
        shape, dtype = (v.aval.shape, v.aval.dtype) if hasattr(v, "aval") else ((v.size,), v.dtype)
        place = self.made.plan.placement[i]
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
        """What a step made itself."""
        x = np.asarray(x)
        if not x.flags.c_contiguous:
            x = np.ascontiguousarray(x).reshape(x.shape)
        self.arrays[i] = x
        self.addresses.pop(i, None)

    def drop(self, i: int) -> None:
        """Let go of a value that nobody reads any more."""
        self.arrays.pop(i, None)
        self.addresses.pop(i, None)


__all__ = ["DropVar", "HostProgram", "body_of", "compile_program"]
