"""The reference backend: NumPy arrays on the CPU.

Kernels, stage 8. In: a jaxpr and NumPy arrays. Out: a program, or the results of one primitive. It is always
available, and every other backend is compared with it: a primitive means its ``impl``, and a program means its
equations run in order.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import Any

import numpy as np

from blufunc import _lazy, errors
from blufunc.config import config
from blufunc.core.arrays import backend, dlpack, recording
from blufunc.core.arrays.errstate import ignoring_fp_errors, ignoring_fp_errors_in_callbacks
from blufunc.core.arrays.refcounts import ALONE, references
from blufunc.core.ir import source
from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, uses_host
from blufunc.core.primitives.effects import calls_back, eqn_calls_back
from blufunc.core.primitives.override import is_replaced
from blufunc.core.primitives.rule_errors import check_definition, check_values
from blufunc.core.programs.alternatives import chosen
from blufunc.core.programs.simplify import inline_definitions
from blufunc.core.programs.stage import definition
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.backends.numpy import out_of_memory
from blufunc.kernels.backends.numpy.program import CallingProgram, Program, interpret

with _lazy.modules(globals()):  # the compiler is imported when a program is compiled or shown
    from blufunc.kernels.backends.cpu import eager_loops
    from blufunc.kernels.backends.cpu import program as host_program
    from blufunc.kernels.rewrites.loops import memories


class NumpyBackend:
    """``Backend`` whose buffers are NumPy arrays; calls return finished results."""

    name = "cpu"

    def __init__(self) -> None:
        self._devices: list[backend.Device] = []

    def devices(self) -> Sequence[backend.Device]:
        """One device, the cores of this machine, or ``config.cpu_devices`` of them."""
        n = config.cpu_devices
        while len(self._devices) < n:  # the list only grows: arrays refer to its devices
            self._devices.append(backend.Device("cpu", len(self._devices), self))
        return self._devices[:n]

    def from_host(self, x: np.ndarray, device: backend.Device, memory: str = DEVICE) -> np.ndarray:
        """A copy in row-major order."""
        return np.array(x, order="C")

    def to_host(self, buffer: np.ndarray) -> np.ndarray:
        """A read-only view."""
        view = buffer.view()
        view.flags.writeable = False
        return view

    def snapshots(self, buffers: Sequence[np.ndarray]) -> list[Callable[[], np.ndarray]]:
        """Views, which ``claim`` sees as second references."""
        return [functools.partial(self.to_host, b) for b in buffers]

    def block_until_ready(self, buffer: np.ndarray) -> None:
        """Return at once: buffers are always ready."""

    def is_ready(self, buffer: np.ndarray) -> bool:
        """True: a program has ended when its results are buffers."""
        return True

    def run(self, prim: Any, buffers: Sequence, params: dict, outs: Sequence[ShapedArray]) -> Sequence:
        """Run one primitive."""
        to = recording.active
        start = 0 if to is None else recording.clock()
        try:
            if prim.reference is not None:
                results = None
                if prim.kind == "control":
                    results = ignoring_fp_errors(eager_loops.run, self.compile, prim, buffers, params, outs)
                if results is None:
                    run = (
                        ignoring_fp_errors_in_callbacks
                        if eqn_calls_back(prim, params)
                        else ignoring_fp_errors
                    )
                    results = run(prim.reference(interpret, **params), list(buffers))
            else:
                results = ignoring_fp_errors(_apply, prim, buffers, params)
                if (
                    config.check
                    or prim.check_impl
                    or (prim.multiple_results and not _are(results, len(outs)))
                ):
                    check_values(prim, results, outs)
                if config.check and prim.has_definition and prim.has_impl and not is_replaced(prim, "impl"):
                    avals = [ShapedArray(b.shape, b.dtype) for b in buffers]
                    check_definition(
                        prim,
                        ignoring_fp_errors(interpret(definition(prim, avals, params)), [*buffers]),
                        results,
                    )
        except MemoryError as error:
            raise out_of_memory.of_operation(error, prim.name) from None
        if to is not None:
            to.add(prim.name, "operation", start)
        return [r if r.__class__ is np.ndarray else np.asarray(r) for r in results]

    def in_memory(self, buffer: np.ndarray, memory: str) -> np.ndarray:
        """The buffer itself: there is one memory here."""
        return buffer

    def compile(
        self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None
    ) -> Program | host_program.HostProgram:
        """Program over buffers: C++ where it pays or for a budget, else NumPy calls."""
        jaxpr = inline_definitions(self.chosen(memories.without_moves(jaxpr) if uses_host(jaxpr) else jaxpr))
        program = None
        if budget is not None or toolchain.compiles(jaxpr):
            program = host_program.compile_program(jaxpr, donated, budget)
        if program is None:
            program = (CallingProgram if calls_back(jaxpr) else Program)(jaxpr, donated)
        if config.shows("source"):
            config.show(program.source())
        return program

    def draft(self, jaxpr: Jaxpr, donated: Sequence[bool], budget: int | None = None) -> host_program.Draft:
        """Draft of the program that ``compile`` would build."""
        notes: tuple[str, ...] = ()
        if uses_host(jaxpr):
            jaxpr, notes = memories.without_moves(jaxpr), memories.one_memory_note(jaxpr)
        return host_program.Draft(inline_definitions(self.chosen(jaxpr)), donated, budget, notes)

    def chosen(self, jaxpr: Jaxpr) -> Jaxpr:
        """The jaxpr in its definitions: no alternative form has a kernel of its own here."""
        return chosen(jaxpr)

    def claim(self, buffers: list[np.ndarray], donated: Sequence[bool]) -> None:
        """Copy donated buffers that are views, or that a view or another array still sees."""
        holders = references(compress(buffers, donated))  # the array and ``buffers`` hold one reference each
        for i, n in zip(compress(range(len(buffers)), donated), holders, strict=True):
            if n > ALONE + 1 or buffers[i].base is not None or not buffers[i].flags.writeable:
                buffers[i] = buffers[i].copy()

    def memory_stats(self, device: backend.Device) -> dict[str, int]:
        """Bytes of the process and of the machine: NumPy does not count allocations."""
        page, unit = os.sysconf("SC_PAGE_SIZE"), 1 if sys.platform == "darwin" else 1024
        peak = resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if os.path.exists("/proc/self/statm"):  # elsewhere only the peak is known
            with open("/proc/self/statm", encoding="ascii") as f:
                resident = int(f.read().split()[1]) * page
        return {
            "bytes_in_use": resident,
            "peak_bytes_in_use": max(peak, resident),
            "bytes_limit": page * os.sysconf("SC_PHYS_PAGES"),
        }

    # -- other libraries -------------------------------------------------------------------------------

    def dlpack_device(self, device: backend.Device) -> tuple[int, int]:
        """The CPU in DLPack's terms; simulated devices are the same memory."""
        return dlpack.CPU, 0

    def copy(self, buffer: np.ndarray) -> np.ndarray:
        """A copy in row-major order."""
        return buffer.copy()

    def lend(self, buffer: np.ndarray, stream: Any) -> tuple[int, tuple[int, ...] | None]:
        """The address, and the strides of what is not in row-major order."""
        if stream not in (None, -1):
            raise errors.InteropError(
                f"__dlpack__(stream={stream!r:.60}) for the CPU.",
                where=source.here(),
                why="work on the CPU is in no stream.",
                fix="leave stream out",
            )
        return buffer.ctypes.data, None if buffer.flags.c_contiguous else buffer.strides

    def reading(self, device: backend.Device) -> AbstractContextManager[None]:
        """Nothing: the CPU has no streams."""
        return nullcontext()

    def borrow(self, memory: dlpack.Memory, device: backend.Device, copied: bool) -> np.ndarray:
        """A buffer in a producer's memory, or a copy of it."""
        x = memory.on_host()
        return np.array(x, order="C") if copied else x


def _apply(prim: Any, buffers: Sequence, params: dict) -> Sequence:
    out = prim.impl(*buffers, **params)
    return out if prim.multiple_results else (out,)


def _are(results: Any, n: int) -> bool:
    return isinstance(results, (tuple, list)) and len(results) == n
