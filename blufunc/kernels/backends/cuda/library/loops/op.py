"""``scan`` as one persistent kernel: the row of the registry.

Kernels, stages 5 to 8. In: the equation of a scan. Out: whether one kernel holds it, and its step. With matmuls, blocks
wait for each other, so all must be resident: the launch is cooperative, with a block per SM at most, and the step
overlaps with no other. A device with fewer SMs or less shared memory runs the loop step by step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from blufunc.core.ir.jaxpr import Eqn, line_of
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Results, Work
from blufunc.kernels.backends.cuda.library.control_flow.rows import ControlFlow
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel
from blufunc.kernels.backends.cuda.library.loops.cell import Cell, cell_of
from blufunc.kernels.backends.cuda.library.loops.source import ENTRY, complete
from blufunc.kernels.backends.cuda.library.loops.tiling import THREADS, Tiling, tiling_of
from blufunc.kernels.schedule import OpaqueStep

_LEAST_ARCH = 80
"""Compute capability from which tensor cores multiply bfloat16."""


def loop_of(eqn: Eqn) -> tuple[Cell, Tiling] | str | None:
    """The kernel of a scan, why there is none, or None for other equations."""
    if eqn.prim.name != "scan" or eqn.prim.kind != "control":
        return None
    p = eqn.params
    key = "loop tiling", p["length"], p["reverse"], p["n_consts"], p["n_carry"]
    return p["jaxpr"].memoised(key, lambda: (_found(eqn),))[0]


def _found(eqn: Eqn) -> tuple[Cell, Tiling] | str | None:
    cell = cell_of(eqn)
    if not isinstance(cell, Cell):
        return cell
    tiling = tiling_of(cell)
    return tiling if isinstance(tiling, str) else (cell, tiling)


def remark(eqn: Eqn) -> str | None:
    """Line of ``explain`` on a scan."""
    found = loop_of(eqn)
    if found is None:
        return None
    if isinstance(found, str):
        return f"scan at {line_of(eqn)} runs step by step: {found}"
    blocks = found[1].grid
    return f"scan at {line_of(eqn)} is one kernel of {blocks} block{'s' * (blocks > 1)}"


class LoopKernel(LibraryKernel):
    """Scans of recurrent cells."""

    def matches(self, eqn: Eqn) -> bool:
        return isinstance(loop_of(eqn), tuple)

    def scratch_bytes(self, eqn: Eqn, arch: str) -> int:
        _, tiling = _loop(eqn)
        return tiling.left_starts[-1]

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        cell, tiling = _loop(step.eqn)
        return [_text(cell, tiling)] if _has_instructions(arch) or not cell.products else []

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        _, tiling = _loop(step.eqn)
        if not _fits(tiling, driver.properties(executor.device)):
            return ControlFlow().bind(executor, step, operands, compile)
        kernel = Kernel(step.eqn, executor.device)
        results = Results(executor, step)
        scratch = None if step.scratch is None else executor.roots.place(step.scratch)
        in_place = all(o.in_place for o in operands)

        def run(executor: Executor) -> None:
            given = [o.buffer(executor) for o in operands]
            addresses = [*(b.ptr for b in given), *results.addresses(executor)]
            kernel(addresses, 0 if scratch is None else executor.address(scratch), executor.work_stream())

        return Work(run, "scan in one kernel", step, anywhere=lambda: in_place and not tiling.waits)


def _loop(eqn: Eqn) -> tuple[Cell, Tiling]:
    found = loop_of(eqn)
    assert isinstance(found, tuple), found
    return found


def _fits(tiling: Tiling, device: driver.DeviceProperties) -> bool:
    """True if a device runs a kernel: blocks that wait for each other are resident."""
    if not tiling.products:
        return True
    enough = device.sm_count >= tiling.grid and device.shared_per_block >= tiling.shared_bytes
    return enough and _has_instructions(device.arch)


def _has_instructions(arch: str) -> bool:
    return int("".join(c for c in arch if c.isdigit())) >= _LEAST_ARCH


@functools.lru_cache(64)
def _text(cell: Cell, tiling: Tiling) -> modules.Text:
    return complete(cell, tiling), ENTRY


class Kernel:
    """The kernel of a scan, ready to be put on streams of a device."""

    def __init__(self, eqn: Eqn, device: int):
        cell, tiling = _loop(eqn)
        text, entry = _text(cell, tiling)
        function = modules.module(text, device, entry).kernel(entry)
        arguments = [0] * (len(cell.operands) + len(cell.carries) + len(cell.outputs) + 1)
        self._launch = function.prepare(
            (tiling.grid,), (THREADS,), tiling.shared_bytes, arguments, cooperative=tiling.waits
        )
        self._counter_bytes = tiling.counter_bytes

    def __call__(self, addresses: Sequence[int], scratch: int, stream: Any) -> None:
        """Put it on a stream; ``addresses`` are those of operands and results."""
        driver.fill_zero(scratch, self._counter_bytes, stream)
        self._launch.run([*addresses, scratch], stream)
