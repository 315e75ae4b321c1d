"""User-written CUDA kernels as steps of a program.

Kernels, stages 6 and 8. In: an equation whose primitive has ``cuda_source`` (``bf.cuda_kernel``). Out: its ``Work``,
one launch from planned memory to planned memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.backends.cuda.driver import modules
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Results, Work
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel
from blufunc.kernels.backends.cuda.render import (
    user_accessors as user_accessors,  # defines a primitive's source
)
from blufunc.kernels.schedule import OpaqueStep
from blufunc.kernels.user_kernel import CudaSource


class UserKernel(LibraryKernel):
    """One launch of the source that a primitive gives for its operands' types."""

    def source_of(self, eqn: Eqn) -> CudaSource:
        """The source and the launch of an equation."""
        return eqn.prim.cuda_source(*[a.aval for a in eqn.invars], **eqn.params)  # type: ignore[attr-defined]

    def matches(self, eqn: Eqn) -> bool:
        return hasattr(eqn.prim, "cuda_source")

    def sources(self, step: OpaqueStep, arch: str) -> list[modules.Text]:
        found = self.source_of(step.eqn)
        return [] if 0 in found.grid else [(found.text, found.entry)]

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        source = self.source_of(step.eqn)
        if 0 in source.grid:
            return Work(lambda executor: None, source.entry, step)
        results = Results(executor, step)
        loaded = modules.load_source(source, executor.device)
        unread = [b.ptr if b else 0 for b in results.unread]
        launch, addresses = loaded.prepare([*[0] * len(operands), *unread])
        executor.follow(addresses, [*[None] * len(operands), *results.places])

        def run(executor: Executor) -> None:
            given = [o.buffer(executor) for o in operands]
            for i, x in enumerate(given):
                addresses[i] = x.ptr
            launch(executor.stream)

        return Work(run, source.entry, step, anywhere=lambda: all(o.in_place for o in operands))
