"""Pointwise recurrences: the row of the registry.

Kernels, stages 5 to 8. In: equations of ``transforms/control_flow/recurrence.py``. Out: their step: one launch where
columns are many, else one for the chunks of columns and one for the states.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from blufunc.core.ir.jaxpr import DropVar, Eqn
from blufunc.core.primitives.override import is_replaced
from blufunc.kernels.backends.cuda.driver import modules
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Work
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel
from blufunc.kernels.backends.cuda.library.recurrence import source
from blufunc.kernels.schedule import OpaqueStep

_NAMES = frozenset(("recurrence", "affine_recurrence"))


class Recurrence(LibraryKernel):
    """Recurrences of pointwise functions."""

    composite = True

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim.name in _NAMES and eqn.prim.kind == "call" and not is_replaced(eqn.prim, "impl")

    def why_not(self, eqn: Eqn, arch: str) -> str | None:
        return source.why_not(eqn)

    def scratch_bytes(self, eqn: Eqn, arch: str) -> int:
        cut = source.cut_of(eqn)
        return cut.columns * cut.chunks * source.element_bytes(eqn) if cut.chunks > 1 else 0

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        return [_text(step.eqn)]

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        kernel = Kernel(step.eqn, executor.device)
        places = [executor.roots.place(r) for r in step.results if r is not None]
        scratch = None if step.scratch is None else executor.roots.place(step.scratch)

        def run(executor: Executor) -> None:
            given = [o.buffer(executor) for o in operands]
            made = [executor.address(p) for p in places]
            chunks = 0 if scratch is None else executor.address(scratch)
            kernel([b.ptr for b in given], chunks, made, executor.work_stream())

        return Work(run, step.eqn.prim.name, step, anywhere=lambda: all(o.in_place for o in operands))


def _text(eqn: Eqn) -> modules.Text:
    return source.source(eqn, _read(eqn)), eqn.prim.name


def _read(eqn: Eqn) -> list[bool]:
    return [v.__class__ is not DropVar for v in eqn.outvars]


class Kernel:
    """The launches of a recurrence, ready to be put on streams of a device."""

    def __init__(self, eqn: Eqn, device: int):
        text, name = _text(eqn)
        cut, n, m = source.cut_of(eqn), len(eqn.invars), sum(_read(eqn))
        prepare = functools.partial(_prepared, modules.module(text, device, name), cut.blocks)
        self._reduce = prepare("reduce_chunks", n + 1) if cut.chunks > 1 else None
        self._scan = prepare("scan_chunks", n + 1 + m)

    def __call__(self, operands: Sequence[int], chunks: int, results: Sequence[int], stream: Any) -> None:
        """Put them on a stream; arrays are given by their addresses."""
        if self._reduce is not None:
            self._reduce.run([*operands, chunks], stream)
        self._scan.run([*operands, chunks, *results], stream)


def _prepared(module: Any, blocks: int, name: str, arguments: int) -> Any:
    return module.kernel(name).prepare((blocks,), (source.THREADS,), 0, [0] * arguments)
