"""One program on three executors:

NumPy calls, the LoopIR interpreter, compiled C++.

The two that run a schedule use the steps and the memory of ``kernels/backends/cpu/program.py``; only the kernels
differ. Before a kernel runs, its outputs are filled with garbage, unless they alias an input: so overlapping places in
a plan, and elements that a kernel does not write, show. C++ of many programs is compiled as one source.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from blufunc.core.arrays.errstate import ignoring_fp_errors
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.programs.simplify import simplify
from blufunc.core.pytree import tree
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.backends.cpu.native.run import aligned
from blufunc.kernels.backends.cpu.planning import HOST
from blufunc.kernels.backends.cpu.program import Runner
from blufunc.kernels.backends.cpu.renderer import render_many
from blufunc.kernels.backends.numpy.program import Program
from blufunc.kernels.loopir.ir import Buffer, Kernel
from blufunc.kernels.loopir.verify import check_kernel
from blufunc.kernels.pipeline import Planning, within
from blufunc.kernels.schedule import GroupStep, KernelStep, Schedule
from blufunc.kernels.target import Target
from blufunc.transforms.staging.jit import jit
from tests.emulation.loop_interpreter import run as interpret_kernel

POISON = 0xA5

SMALL = Target(
    chunks=lambda rows, lanes: min(3, rows),
    total_chunks=lambda size: max(1, size // 7),
    keep_bytes=1 << 10,
    keep_loads=True,
    tile=4,
    scan_tile=4,
)
"""Cuts reductions of a few elements in chunks, as ``HOST`` cuts large ones, and
keeps loads, as a GPU does.
"""

LIKE_A_GPU = replace(
    SMALL,
    finish_bytes=1 << 10,
    group=True,
    recompute=True,
    batch_first=True,
    epilogues=True,
    joined_parts=True,
)
"""Also lets kernels reduce their chunks' results and matmuls accumulate.
It groups kernels, recomputes cheap values and merges batch axes, too."""


# -- cases -------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A program with arguments.

    Attributes:
      name: for messages.
      jaxpr: simplified.
      args: NumPy arrays, one for each parameter, constants included; never written to.
      donated: which of them results may be written over.
      target: what the program is lowered for.
      budget: for its planned peak, in bytes; None: as it comes.
    """

    name: str
    jaxpr: Jaxpr
    args: list[np.ndarray]
    donated: tuple[bool, ...]
    target: Target = HOST
    budget: int | None = None
    _schedule: list[Schedule] = field(default_factory=list)
    _expected: list[np.ndarray] = field(default_factory=list)  # of all targets

    @property
    def schedule(self) -> Schedule:
        """The steps and their memory; every kernel obeys the rules of LoopIR."""
        if not self._schedule:
            planning = Planning(self.jaxpr, self.donated, self.target, lambda e: e.prim is dot_general_p)
            made = within(planning, self.budget)
            for kernel in made.kernels:
                check_kernel(kernel)
            self._schedule.append(alone(made))
        return self._schedule[0]

    def expected(self) -> list[np.ndarray]:
        """The results of the reference executor."""
        if not self._expected:
            never = (False,) * len(self.args)
            results = Program(self.jaxpr, never)([a.copy() for a in self.args])
            self._expected.extend(np.asarray(x) for x in results)
        return self._expected

    def interpreted(self) -> list[np.ndarray]:
        """The results of the interpreter."""
        functions = {i: Interpreted(k) for i, k in _kernels(self.schedule)}
        return self.run(functions)

    def run(self, functions: dict[int, Any]) -> list[np.ndarray]:
        """The results of a schedule with ``functions`` of an address table as kernels.

        Checks that arguments keep their values if they were not donated.
        """
        runner = Runner(self.schedule, functions)
        arena = aligned(self.schedule.plan.arena_bytes)
        arena[:] = POISON
        given = [np.array(a, order="C") for a in self.args]
        results = [np.asarray(x) for x in ignoring_fp_errors(runner, list(given), arena)]
        for i, (before, after) in enumerate(zip(self.args, given, strict=True)):
            if not self.donated[i] or not before.ndim:
                assert before.tobytes() == after.tobytes(), f"{self.name}: argument {i} was written to"
        return results


def case(
    fun: Callable, *args: Any, donate: Sequence[int] = (), target: Target = HOST, name: str = ""
) -> Case:
    """The case of a function of arrays; ``donate`` are positions in ``args``.

    Its constants become arguments.
    """
    traced = jit(fun, donate_argnums=tuple(donate)).trace(*args)
    consts = [np.asarray(c) for c in traced.entry.consts]
    given = [np.asarray(a) for a in tree.leaves(args)]
    donated = (False,) * len(consts) + traced.donated
    return Case(name or fun.__name__, simplify(traced.jaxpr), [*consts, *given], donated, target)


def as_body(jaxpr: Jaxpr, donated: Sequence[bool]) -> Callable[[list], list[np.ndarray]]:
    """A program for the interpreter, like a body by ``host_program.compile_program``."""
    simple, donated = simplify(jaxpr), tuple(donated)
    planned = Case(jaxpr.name, simple, [], donated)

    def run(buffers: list) -> list[np.ndarray]:
        args = [np.asarray(b) for b in buffers]
        return Case(jaxpr.name, simple, args, donated, _schedule=[planned.schedule]).interpreted()

    return run


def alone(made: Schedule) -> Schedule:
    """The schedule with group members as single launches, the last one first."""
    steps = [s.members[::-1] if isinstance(s, GroupStep) else (s,) for s in made.steps]
    return replace(made, steps=[s for members in steps for s in members])


def _kernels(made: Schedule) -> list[tuple[int, Kernel]]:
    return [(i, s.kernel) for i, s in enumerate(made.steps) if isinstance(s, KernelStep)]


# -- executors -----------------------------------------------------------------------------------------


class Interpreted:
    """A kernel that is called like a compiled one."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel

    def __call__(self, table: Any, threads: int) -> None:
        arrays = _arrays(self.kernel, table)
        poison(self.kernel, arrays)
        interpret_kernel(self.kernel, arrays, check=True)


class Compiled:
    """A compiled kernel."""

    def __init__(self, kernel: Kernel, function: Any):
        self.kernel, self.function = kernel, function
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int], None

    def __call__(self, table: Any, threads: int) -> None:
        poison(self.kernel, _arrays(self.kernel, table))
        self.function(table, 2)


def _arrays(kernel: Kernel, table: Any) -> dict[Buffer, np.ndarray]:
    """The memory of buffers, as arrays."""
    arrays = {}
    for b, address in zip(kernel.buffers, table, strict=True):
        size = b.size * b.dtype.itemsize
        raw = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
        arrays[b] = raw.view(b.dtype)
    return arrays


def poison(kernel: Kernel, arrays: dict[Buffer, np.ndarray]) -> None:
    """Fill what a kernel writes, apart from what it reads too."""
    read = {arrays[b].ctypes.data for b in kernel.buffers if not b.written}
    for b in kernel.buffers:
        if b.written and arrays[b].ctypes.data not in read:
            arrays[b].view(np.uint8)[:] = POISON


def compile_all(cases: Sequence[Case]) -> list[dict[int, Any]]:
    """The compiled kernels of each case, from one source; equal kernels once."""
    names: dict[tuple, str] = {}
    kernels: list[Kernel] = []
    used: list[dict[int, tuple[Kernel, str]]] = []
    for c in cases:
        mine = {}
        for i, k in _kernels(c.schedule):
            key = k.key
            if key not in names:
                names[key] = f"{k.name}_n{len(names)}"
                kernels.append(replace(k, name=names[key]))
            mine[i] = k, names[key]
        used.append(mine)
    compiler = toolchain.find()
    assert compiler is not None
    library = compiler.compile(render_many(kernels), "the programs of the tests") if kernels else None
    return [{i: Compiled(k, getattr(library, name)) for i, (k, name) in mine.items()} for mine in used]


# -- comparison ------------------------------------------------------------------------------------------

_ULPS = 64


def differences(got: Sequence[np.ndarray], want: Sequence[np.ndarray], exact: bool) -> list[str]:
    """How results differ; nothing where they agree.

    Not ``exact``, floats may be off by 64 units in the last place of the largest result, those of 16 bits by 4.
    """
    found = []
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape or g.dtype != w.dtype:
            found.append(f"result {i} is {g.dtype}{g.shape}, not {w.dtype}{w.shape}")
        elif not _agree(g, w, exact):
            found.append(f"result {i} is\n{g}\nnot\n{w}")
    return found


def _agree(got: np.ndarray, want: np.ndarray, exact: bool) -> bool:
    if dtypes.is_key(got.dtype):
        return got.tobytes() == want.tobytes()
    if not dtypes.is_inexact(got.dtype):
        return np.array_equal(got, want)
    wide = np.complex128 if dtypes.is_complex(got.dtype) else np.float64
    g, w = got.astype(wide), want.astype(wide)
    if exact:
        return np.array_equal(g, w, equal_nan=True)
    units = _ULPS if got.dtype.itemsize > 2 else 4
    tolerance = units * float(dtypes.finfo(got.dtype).eps)
    return np.allclose(g, w, rtol=tolerance, atol=tolerance * _scale(w), equal_nan=True)


def _scale(x: np.ndarray) -> float:
    finite = np.abs(x[np.isfinite(x)])
    return max(1.0, float(finite.max(initial=0.0)))
